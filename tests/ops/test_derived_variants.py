"""In-place and out= variants that are derived from functional rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.oracle.real import check_rule

aten = torch.ops.aten
X = torch.ones(4, 3).t()
MASK = X > 0

OUT_CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.add.out, (X, X)),
    (aten.exp.out, (X,)),
    (aten.clamp.out, (X, 0, 1)),
    (aten.clamp.Tensor_out, (X, X, X)),
    (aten.clamp_min.out, (X, 0)),
    (aten.relu.out, (X,)),
    (aten.abs.out, (X,)),
    (aten.neg.out, (X,)),
    (aten.sgn.out, (X,)),
    (aten.floor.out, (X,)),
    (aten.silu.out, (X,)),
    (aten.softplus.out, (X,)),
    (aten.hardswish.out, (X,)),
    (aten.hardshrink.out, (X,)),
    (aten.mish.out, (X,)),
    (aten.leaky_relu.out, (X,)),
    (aten.nan_to_num.out, (X,)),
    (aten.lerp.Tensor_out, (X, X, X)),
    (aten.heaviside.out, (X, X)),
    (aten.pow.Scalar_out, (2, X)),
    (aten.pow.Tensor_Scalar_out, (X, 2)),
    (aten.clone.out, (X,)),
    (aten.zeros_like.out, (X,)),
    (aten.native_dropout_backward.out, (X, MASK, 1.0)),
    (aten.masked_fill.Scalar_out, (X, MASK, 1.0)),
    (aten.where.self_out, (MASK, X, X)),
    (aten.mse_loss.out, (X, X, 0)),
    (aten.maximum.out, (X, X)),
    (aten.xlogy.OutTensor, (X, X)),
    (aten.zeros.out, ([2, 3],)),
    (aten.full.out, ([2, 3], 1.5)),
    (aten.arange.out, (5,)),
    (aten.eye.m_out, (2, 3)),
    (aten.randperm.out, (5,)),
    (aten.rand.out, ([2],)),
]


@pytest.mark.parametrize(
    "op, args", OUT_CALLS, ids=lambda x: str(x) if isinstance(x, torch._ops.OpOverload) else ""
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_out(op: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    shape = op(*args, out=torch.empty(0)).shape
    check_rule(op, *args, out=torch.empty(0, dtype=dtype))
    check_rule(op, *args, out=torch.empty(7, dtype=dtype)[2:4].view(2, 1))
    check_rule(op, *args, out=torch.empty(shape, dtype=dtype))
    check_rule(op, *args, out=torch.empty(shape[::-1], dtype=dtype).permute(*reversed(range(len(shape)))))


def test_grad_input() -> None:
    check_rule(aten.sigmoid_backward.grad_input, X, X, grad_input=torch.empty(0))
    check_rule(aten.gelu_backward.grad_input, X, X, grad_input=torch.empty(0))


def test_rounding_mode() -> None:
    check_rule(aten.div.out_mode, X, X, rounding_mode="floor", out=torch.empty(0))
    check_rule(aten.div_.Tensor_mode, X.clone(), X, rounding_mode="floor")


def test_expanded_targets() -> None:
    def expanded() -> torch.Tensor:
        return torch.ones(1).expand(3)

    for op in (aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default):
        check_rule(op, expanded(), torch.ones(3))
    for op in (aten.exp_.default, aten.relu_.default, aten.zero_.default, aten.abs_.default):
        check_rule(op, expanded())
    check_rule(aten.threshold_.default, expanded(), 0, 0)
    check_rule(aten.masked_fill_.Scalar, expanded(), torch.ones(3) > 0, 1)
    check_rule(aten.add.out, torch.ones(3), torch.ones(3), out=expanded())


def test_results_that_do_not_fit() -> None:
    check_rule(aten.add_.Tensor, torch.ones(3), torch.ones(2, 3))
    check_rule(aten.add_.Tensor, torch.ones(3, dtype=torch.int64), torch.ones(3))
    check_rule(aten.div_.Tensor, torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.int64))
    check_rule(aten.add.out, torch.ones(3), torch.ones(3), out=torch.ones(3, dtype=torch.int64))
