"""Composite operators that C++ computes with plain integers keep symbolic sizes here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from understudy import FakeTensorMode, ShapeEnv, dims
from understudy.errors import DataDependentOutputException, GuardOnDataDependentSymNode

ROWS, COLUMNS = dims("rows", "columns")


def on_symbols(program: Callable[..., Any], *reals: Tensor) -> tuple[ShapeEnv, Any]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes = [
        mode.from_tensor(real, source=f"x{i}", symbolic_context=(ROWS, COLUMNS) if real.dim() == 2 else None)
        for i, real in enumerate(reals)
    ]
    with mode:
        return env, program(*fakes)


@pytest.mark.parametrize(
    ("program", "spec"),
    [
        (torch.cov, "f32[rows, rows]@cpu"),
        (torch.corrcoef, "f32[rows, rows]@cpu"),
        (lambda x: torch.cov(x, correction=0), "f32[rows, rows]@cpu"),
        (lambda x: torch.take_along_dim(x, x.argsort(1), 1), "f32[rows, columns]@cpu"),
        (lambda x: torch.linalg.matrix_norm(x, 2), "f32[]@cpu"),
        (lambda x: torch.linalg.matrix_norm(x, 1, keepdim=True), "f32[1, 1]@cpu"),
        (lambda x: torch.linalg.norm(x.expand(3, -1, -1), -float("inf"), (0, 2)), "f32[rows]@cpu"),
        (lambda x: torch.linalg.norm(x.expand(3, -1, -1), 2, (2, 0), keepdim=True), "f32[1, rows, 1]~(1, 1, 1)@cpu"),
        (lambda x: torch.kron(x, x[0]), "f32[rows, columns**2]@cpu"),
        (lambda x: torch.nn.functional.max_pool1d(x, 2), "f32[rows, columns//2]@cpu"),
        (lambda x: torch.nn.functional.max_pool1d(x, 3, 2, 1, ceil_mode=True), "f32[rows, columns//2 + 1]@cpu"),
        (lambda x: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1), "f32[rows, 1]@cpu"),
    ],
)
def test_sizes_stay_symbols(program: Callable[[Tensor], Tensor], spec: str) -> None:
    env, out = on_symbols(program, torch.randn(4, 6))
    assert str(out.spec) == spec and not env.specialisations
    assert tuple(program(torch.randn(4, 6)).shape) == tuple(size.node.hint if hasattr(size, "node") else size for size in out.shape)


def test_pieces() -> None:
    env, out = on_symbols(lambda x: torch.unsafe_chunk(x, 2, 1), torch.randn(4, 6))
    assert [str(piece.spec.shape[1]) for piece in out] == ["(columns + 1)//2", "columns//2"]
    assert not env.specialisations


def test_places_from_data_become_symbols() -> None:
    env, out = on_symbols(torch.tensor_split, torch.randn(6, 2), torch.tensor([2, 4]))
    assert len(out) == 3 and len(env.births) >= 2
    assert str(out[0].spec.shape[1]) == "columns"


def test_a_number_of_pieces_from_data_is_refused() -> None:
    with pytest.raises(GuardOnDataDependentSymNode, match="needs to know the value of u0"):
        on_symbols(torch.tensor_split, torch.randn(6, 2), torch.tensor(3))


def test_weights_are_values() -> None:
    with pytest.raises(DataDependentOutputException, match="compares values"):
        on_symbols(lambda x, w: torch.cov(x, aweights=w), torch.randn(3, 6), torch.rand(6))


def test_gradients_flow() -> None:
    env, out = on_symbols(lambda x: torch.autograd.grad(torch.cov(x.requires_grad_()).sum(), x)[0], torch.randn(4, 6))
    assert str(out.spec) == "f32[rows, columns]@cpu" and not env.specialisations
