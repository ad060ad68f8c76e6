"""Numbers that only data knows, where programs use them: as sizes, as places in slices, as counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode, ShapeEnv, make_fx, statically_known_true
from understudy.shapes.node import value_of


def numbers(count: int) -> tuple[ShapeEnv, FakeTensorMode, list[Any]]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with mode:
        return env, mode, torch.empty(count, dtype=torch.int64).tolist()


def worth(env: ShapeEnv, size: Any, values: dict[Any, int]) -> int:
    """What a size is for these values of the symbols."""
    value = value_of(size)
    if isinstance(value, int):
        return value
    known = dict(values)
    for symbol, expression in env.definitions.items():
        known[symbol] = int(expression.evaluate(known))
    return int(value.evaluate(known))


SLICES: list[Callable[[Any, Any, Any], Any]] = [
    lambda x, n, m: x[:n],
    lambda x, n, m: x[n:],
    lambda x, n, m: x[-n:],
    lambda x, n, m: x[n:m],
    lambda x, n, m: x[: n + 2],
    lambda x, n, m: x[n:m:2],
    lambda x, n, m: x[1:n],
    lambda x, n, m: x.tensor_split([n, m])[1],
]


@pytest.mark.parametrize("program", SLICES)
def test_slices_are_right_for_all_numbers(program: Callable[[Any, Any, Any], torch.Tensor]) -> None:
    """Negative ones are counted from the end, and large ones end with the tensor."""
    env, mode, (n, m) = numbers(2)
    with mode:
        x = torch.randn(5, 2)
        cut = program(x, n, m)
    assert not env.guards
    real = torch.randn(5, 2)
    for a, b in itertools.product(range(-8, 9), repeat=2):
        values = {n.node.value: a, m.node.value: b}
        wanted = program(real, a, b)
        assert worth(env, cut.shape[0], values) == wanted.shape[0], (a, b)
        if wanted.numel():
            assert worth(env, cut.storage_offset(), values) == wanted.storage_offset(), (a, b)


def test_select_counts_from_the_end_too() -> None:
    env, mode, (n,) = numbers(1)
    with mode:
        row = torch.randn(5, 2).select(0, n)
    for a in range(-5, 5):
        assert worth(env, row.storage_offset(), {n.node.value: a}) == 2 * (a % 5)


def test_a_choice_is_forgotten_once_it_is_known() -> None:
    _, mode, (n,) = numbers(1)
    with mode:
        cut = torch.randn(5)[:n]
        assert str(cut.shape[0]) == "max(min((u0 if u0 >= 0 else u0 + 5), 5), 0)"
        torch._check(n >= 0)
        assert str(cut.shape[0]) == "min(u0, 5)"
        torch._check(n <= 5)
        assert str(cut.shape[0]) == "u0"


def test_narrow_has_the_length_that_it_was_given() -> None:
    _, mode, (n,) = numbers(1)
    with mode:
        assert str(torch.randn(10, 4).narrow(0, n, 2).shape[0]) == "2"


SIZES: list[Callable[[Any], Any]] = [
    torch.empty, torch.arange, torch.eye, torch.randperm, lambda n: torch.zeros(3, n), lambda n: torch.randn(1, 4).expand(n, 4),
    lambda n: torch.randn(3).repeat(n), lambda n: torch.randn(4).new_zeros(n), lambda n: torch.randn(10).split([n, 10 - n]),
]  # fmt: skip


@pytest.mark.parametrize("program", SIZES)
def test_what_was_taken_for_a_size_is_one(program: Callable[[Any], Any]) -> None:
    env, mode, (n,) = numbers(1)
    assert not statically_known_true(n >= 0)
    with mode:
        program(n)
    assert statically_known_true(n >= 0)
    assert "u0 >= 0" in [promise.text for promise in env.runtime_asserts]
    assert all("test_unknown_numbers.py" in promise.line for promise in env.runtime_asserts)


def test_a_size_that_must_be_negative_is_refused() -> None:
    _, mode, (n,) = numbers(1)
    with mode:
        torch._check(n <= -2)
        with pytest.raises(RuntimeError, match="expected sizes of at least 0"):
            torch.empty(n + 1)


def test_graphs_leave_to_operators_what_these_check() -> None:
    graph = make_fx(lambda n: torch.zeros(n.item()), tracing_mode="symbolic")(torch.tensor(3))
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    with pytest.raises(RuntimeError, match="negative"):
        graph(torch.tensor(-1))


def test_graphs_leave_the_sum_of_sizes_to_split() -> None:
    graph = make_fx(lambda n, x: x.split(n.tolist()), tracing_mode="symbolic")(
        torch.tensor([2, 3]), torch.randn(5)
    )
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    assert [piece.shape[0] for piece in graph(torch.tensor([4, 1]), torch.randn(5))] == [4, 1]
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        graph(torch.tensor([4, 4]), torch.randn(5))


def test_what_torch_advises_against_has_the_users_line() -> None:
    env, mode, (n,) = numbers(1)
    with mode, pytest.warns(FutureWarning):
        torch._check_is_size(n)
    assert env.runtime_asserts[0].line.endswith("torch._check_is_size(n)")


def test_no_bound_beyond_64_bits_is_promised() -> None:
    env, mode, (n,) = numbers(1)
    with mode:
        torch.randint(0, n, (5,))
    assert not env.runtime_asserts


def test_tensors_of_places() -> None:
    _, mode, _ = numbers(0)
    with mode:
        places = torch.randint(0, 9, (2,))
        for pieces in (torch.tensor_split(torch.randn(10), places), torch.randn(10).tensor_split(places)):
            assert len(pieces) == 3
        assert [p.shape[0] for p in torch.tensor_split(torch.randn(10), torch.tensor([2, 5]))] == [2, 3, 5]
        assert [p.shape[1] for p in torch.randn(2, 10).tensor_split(torch.tensor(3), dim=1)] == [4, 3, 3]
    with FakeTensorMode():
        assert [p.shape[0] for p in torch.tensor_split(torch.randn(10), torch.tensor([2, 5]))] == [2, 3, 5]
        with pytest.raises(RuntimeError, match="has no data"):
            torch.tensor_split(torch.randn(10), torch.randint(0, 9, (2,)))


def test_one_hot_of_as_many_classes_as_there_are() -> None:
    _, mode, (n,) = numbers(1)
    with mode:
        x = torch.randint(0, 9, (4,))
        assert str(torch.nn.functional.one_hot(x).shape) == "torch.Size([4, u1 + 1])"
        assert str(torch.nn.functional.one_hot(x, n).shape) == "torch.Size([4, u0])"
        assert torch.nn.functional.one_hot(x, 5).shape == (4, 5)
        assert torch.nn.functional.one_hot(torch.tensor([0, 2])).shape == (2, 3)
    graph = make_fx(torch.nn.functional.one_hot, tracing_mode="symbolic")(torch.tensor([1, 0, 4]))
    x = torch.tensor([2, 2, 1])
    assert torch.equal(graph(x), torch.nn.functional.one_hot(x))


def test_comparing_values_says_how_to() -> None:
    _, mode, _ = numbers(0)
    with mode, pytest.raises(RuntimeError, match=r"\(a == b\)\.all\(\)\.item\(\)"):
        torch.equal(torch.randn(3), torch.randn(3))
