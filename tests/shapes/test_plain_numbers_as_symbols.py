"""Where C++ takes plain numbers, or asks data, and symbols do as well: lengths, points, predicates, rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from understudy import FakeTensorMode, ShapeEnv, make_fx

pad_sequence = nn.utils.rnn.pad_sequence


def run(program: Callable[..., Any], *examples: torch.Tensor, **options: Any) -> tuple[Any, ShapeEnv]:
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env, **options)
    stand_ins = [mode.from_tensor(t, source=name) for name, t in zip("xyz", examples, strict=False)]
    with mode:
        return program(*stand_ins), env


def test_padding_sequences_assumes_nothing_of_their_lengths() -> None:
    padded, env = run(
        lambda x, y: pad_sequence([x, y], batch_first=True), torch.randn(4, 3), torch.randn(6, 3)
    )
    assert str(padded.spec) == "f32[2, max(x_0, y_0), x_1]@cpu"
    assert [str(guard.condition) for guard in env.guards] == ["x_1 == y_1"]


@pytest.mark.parametrize(
    "options", [{}, {"batch_first": True, "padding_value": 2.0}, {"padding_side": "left"}]
)
def test_padded_sequences_in_a_graph(options: dict[str, Any]) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return pad_sequence([x, y], **options)

    graph = make_fx(program, tracing_mode="symbolic")(torch.randn(4, 3), torch.randn(6, 3))
    for lengths in ((4, 6), (6, 4), (5, 5), (2, 9)):
        given = [torch.randn(length, 3) for length in lengths]
        assert torch.equal(graph(*given), program(*given))


def test_padding_refuses_what_torch_refuses() -> None:
    with pytest.raises(RuntimeError, match="padding_side"):
        run(lambda x: pad_sequence([x, x], padding_side="top"), torch.randn(4, 3))


def test_gradients_of_padded_sequences() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.requires_grad_()
        pad_sequence([x, y]).sum().backward()
        return x.grad

    gradient, _ = run(program, torch.randn(4, 3), torch.randn(6, 3))
    assert str(gradient.spec) == "f32[x_0, x_1]@cpu"


def test_points_as_a_symbol() -> None:
    points, env = run(lambda x: torch.linspace(-1, 1, x.shape[0]), torch.randn(4, 3))
    assert str(points.spec) == "f32[x_0]@cpu" and not env.guards
    points, env = run(
        lambda x: torch.linspace(-1, 1, x.nonzero().shape[0], dtype=torch.float64), torch.randn(4, 3)
    )
    assert str(points.spec) == "f64[u0]@cpu" and not env.guards


def test_points_in_a_graph() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.shape[0]
        whole = torch.linspace(0, 10, n, dtype=torch.int64)
        return torch.linspace(0, 1, n), torch.linspace(3.0, -1.0, steps=2 * n, dtype=torch.float64), whole

    graph = make_fx(program, tracing_mode="symbolic")(torch.randn(7, 3))
    for n in (2, 3, 7, 8, 33):
        for ours, real in zip(graph(torch.randn(n, 3)), program(torch.randn(n, 3)), strict=True):
            torch.testing.assert_close(ours, real)
            assert (ours[0], ours[-1]) == (real[0], real[-1])


def test_one_point_is_the_first() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.linspace(3, 5, x.nonzero().shape[0])

    graph = make_fx(program, tracing_mode="symbolic")(torch.ones(4))
    assert graph(torch.tensor([0.0, 1.0, 0.0, 0.0])).tolist() == [3.0]
    assert graph(torch.ones(4)).tolist() == torch.linspace(3, 5, 4).tolist()


def test_both_branches_of_a_predicate_that_nobody_knows() -> None:
    def program(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))

    result, env = run(program, torch.randn(4, 3))
    assert str(result.spec) == "f32[x_0, x_1]@cpu"
    assert not env.guards and not env.runtime_asserts and not env.pending_fresh_unbacked_symbols


def test_a_predicate_that_was_promised() -> None:
    def program(x: torch.Tensor) -> Any:
        is_large = x.sum() > 0
        torch._check(is_large.item())
        return torch.cond(is_large, lambda a: a[:1], lambda a: a, (x,))

    result, _ = run(program, torch.randn(4, 3))
    assert str(result.spec) == "f32[1, x_1]@cpu"


def test_jagged_rows_are_as_long_as_at_hand() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> Any:
        jagged = torch.nested.nested_tensor_from_jagged(x, y)
        return (jagged * 2).values(), jagged.shape

    (values, shape), env = run(program, torch.randn(10, 3), torch.tensor([0, 4, 7, 10]))
    assert str(values.spec) == "f32[x_0, 3]@cpu"
    assert str(shape[0]) == "y_0 - 1" and str(shape[2]) == "3"
    assert [str(s).split(" ")[0] for s in env.specialisations] == ["x_1"]


def test_real_tensors_that_a_program_meets_are_no_inputs() -> None:
    table, layer = torch.randn(64, 8), nn.BatchNorm1d(8).eval()

    def program(x: torch.Tensor) -> Any:
        return layer(x + table[: x.shape[0]])

    result, env = run(program, torch.randn(4, 8), allow_non_fake_inputs=True)
    assert str(result.spec) == "f32[x_0, 8]@cpu"
    assert [str(guard.condition) for guard in env.guards] == ["x_0 <= 64", "x_1 == 8"]
    assert env.check(torch.randn(5, 8)) == []


def test_branches_of_different_sizes_give_a_new_symbol() -> None:
    def program(x: torch.Tensor) -> Any:
        half = x.shape[0] // 2
        return torch.cond(x.sum() > 0, lambda a: a[:half].clone(), lambda a: a.clone(), (x,))

    result, env = run(program, torch.randn(6, 3))
    assert str(result.spec) == "f32[u0, x_1]@cpu" and not env.guards
    with pytest.raises(RuntimeError, match="they differ in dtype"):
        run(lambda x: torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a.long(), (x,)), torch.randn(6, 3))


def test_batches_that_only_data_counts_are_promised_to_be_equal() -> None:
    def program(x: torch.Tensor) -> Any:
        n, m = x.tolist()
        return torch.zeros(n, 2, 3) @ torch.zeros(m, 3, 4)

    result, env = run(program, torch.tensor([2, 2]))
    assert str(result.spec) == "f32[u0, 2, 4]@cpu"
    assert str(env.runtime_asserts[-1].condition) == "u0 == u1"


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("extents", [(5, 6), (11, 5, 6)])
def test_gradients_of_a_grid(extents: tuple[int, ...], align_corners: bool) -> None:
    def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        y = y.detach().requires_grad_()
        grid = nn.functional.affine_grid(y, x.shape, align_corners=align_corners)
        (found,) = torch.autograd.grad((grid * x.mean()).sum(), y)
        return found

    def examples(batch: int, more: int) -> list[torch.Tensor]:
        n = len(extents)
        return [torch.randn(batch, 7, *(size + more for size in extents)), torch.randn(batch, n, n + 1)]

    found, env = run(gradient, *examples(8, 0))
    assert not any("x_" in guard.text and "y_" not in guard.text for guard in env.guards)
    assert [str(size) for size in found.shape] == ["x_0", str(len(extents)), str(len(extents) + 1)]
    graph = make_fx(gradient, tracing_mode="symbolic")(*examples(8, 0))
    for batch, more in ((8, 0), (9, 10), (12, 14)):
        given = examples(batch, more)
        torch.testing.assert_close(graph(*given), gradient(*given), rtol=1e-4, atol=1e-4)
