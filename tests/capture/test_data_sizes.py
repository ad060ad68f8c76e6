"""What is computed from sizes that data decides: the graph is right at whatever they come out as, small ones included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.captured import assert_same, captured
from understudy import FakeTensorMode, ShapeEnv, make_fx

VALUES = ([3.0, 1.0, 2.0, 4.0], [1.0, 1.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0])
"Four, two and one distinct values."


def length_of_a_part(x: Tensor) -> Any:
    return torch.zeros(x.unique()[:3].shape[0])


def length_of_the_rest(x: Tensor) -> Any:
    return torch.zeros(x.unique()[3:].shape[0])


def lengths_from_the_end(x: Tensor) -> Any:
    values = x.unique()
    return [torch.zeros(part.shape[0]) for part in (values[-2:], values[2:-1], values[:-3], values[::2])]


def flat_parts(x: Tensor) -> Any:
    places = (x > 1.5).nonzero()
    return places[:1].flatten(), places[1:].flatten(), places.view(-1)[::2]


def written_rest(x: Tensor) -> Any:
    values = x.unique()
    values[3:] = 7.0
    values[3:] = torch.ones(1)
    return values


def steps_between(x: Tensor) -> Any:
    values = x.unique()
    return values[1:] - values[:-1]


@pytest.mark.parametrize(
    "program",
    [
        length_of_a_part, length_of_the_rest, lengths_from_the_end, flat_parts, written_rest, steps_between,
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_parts_of_what_data_counts(program: Callable[..., Any], mode: str) -> None:
    graph = captured(program, torch.tensor(VALUES[0]), mode=mode)
    assert "_assert_scalar" not in graph.code, (
        "nothing is taken for granted: a part may be empty, or all there is"
    )
    for values in VALUES:
        assert_same(program, graph, torch.tensor(values))


def in_pairs(x: Tensor) -> Any:
    return (x > 0.5).nonzero().unflatten(0, (-1, 2))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_size_in_parts(mode: str) -> None:
    graph = captured(in_pairs, torch.tensor(VALUES[0]), mode=mode)
    assert_same(in_pairs, graph, torch.tensor(VALUES[0]))


def beside_a_size_that_is_1(x: Tensor) -> Any:
    return x[: x.shape[0] // 4] + x.unique()


def test_a_size_that_is_1_at_hand_is_expanded() -> None:
    graph = captured(beside_a_size_that_is_1, torch.tensor(VALUES[0]))
    for values in VALUES:
        assert_same(beside_a_size_that_is_1, graph, torch.tensor(values))


def into_another(x: Tensor, out: Tensor) -> Any:
    torch.neg(torch.zeros((x > 1.5).nonzero().shape[0] + 3), out=out)
    return out.numel()


def test_a_tensor_to_write_to_takes_the_size_that_data_decides() -> None:
    graph = captured(into_another, torch.tensor(VALUES[0]), torch.zeros(4))
    for values in VALUES:
        assert_same(into_another, graph, torch.tensor(values), torch.zeros(4))


def expanded(x: Tensor, y: Tensor) -> Any:
    return x.unique().expand(y.shape), torch.where(y > 0, y, x.unique())


def fitted(x: Tensor, y: Tensor) -> Any:
    longer = torch.zeros(x.unique().shape[0] + 2)
    return longer + y, torch.stack([longer, y]), torch.cat([longer[None], y[None]])


def test_a_size_that_fits_only_as_1() -> None:
    """Of at most three values, there can't be as many as four."""
    x, y = torch.tensor(VALUES[2][:3]), torch.randn(2, 4)
    assert_same(expanded, captured(expanded, x, y, mode="fake"), x, y)
    y = torch.randn(3)
    assert_same(fitted, captured(fitted, x, y, mode="fake"), x, y)


def chosen_of_nothing(x: Tensor) -> Any:
    nothing = x[4:]
    return nothing[(nothing > 0).nonzero().flatten()]


def test_as_many_of_nothing_as_data_says() -> None:
    x = torch.tensor(VALUES[0])
    assert_same(chosen_of_nothing, captured(chosen_of_nothing, x, mode="fake"), x)


def written_after_it_grew(x: Tensor, out: Tensor) -> Any:
    torch.add(x, 3, out=out)
    part = out[:]
    part[part > 0] = 7.0
    return part


def row_of_another_shape(x: Tensor) -> Any:
    y = x.sin()
    y.unbind(0)[1].resize_(1)
    return y[:1]


def other_types_after_it_grew(x: Tensor) -> Any:
    places = torch.empty(0, dtype=torch.long)
    torch.sort(x, 0, out=(torch.empty(0), places))
    return places.view(torch.int32)[..., ::2]


def nothing_written(x: Tensor) -> Any:
    spread = x[:1].expand(2, 1).t()
    spread[1:] = torch.ones(1, 2)
    return spread


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_views_of_memory_that_was_resized(mode: str) -> None:
    x, out = torch.randn(2, 4), torch.randn(2)
    assert_same(written_after_it_grew, captured(written_after_it_grew, x, out, mode=mode), x, out)
    for program in (row_of_another_shape, other_types_after_it_grew, nothing_written):
        assert_same(program, captured(program, out, mode=mode), out)


def test_operators_that_return_sizes_as_plain_numbers() -> None:
    """C++ converts their results to plain numbers, which would specialise the graph, or fail for unbacked sizes."""
    aten = torch.ops.aten

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(aten.size.default(x)[::-1]) * aten.size.int(x, 0) + aten.stride.default(x)[0]

    graph = make_fx(f, tracing_mode="symbolic")(torch.ones(3, 4))
    x = torch.randn(5, 6)
    assert torch.equal(graph(x), f(x))
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = torch.empty(env.create_unbacked_symint(low=0), 2)
        found = make_fx(lambda x: x.reshape(aten.size.default(x)))(rows)
    assert [node.target for node in found.graph.nodes][1:3] == [aten.sym_size.int, aten.view.default]
