"""Losses that compare element by element, then reduce, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.batching import BatchLevel, align_ranks, batching_rule
from understudy.ops.shared.dtypes import COMPLEX_HALF, check_dtype, check_same_dtype
from understudy.ops.variants import check_castable, exact_out
from understudy.spec import (
    TensorSpec,
    broadcast_shapes,
    check_expandable,
    elementwise,
    preserved_copy,
    promote,
    result_type,
    same_shape,
)

Function = Callable[..., Any]
aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


def reduce_loss(unreduced: TensorSpec, reduction: int) -> TensorSpec:
    return unreduced if reduction == NONE else unreduced.like(())


@rule("mse_loss")
def mse_loss(a: TensorSpec, target: TensorSpec, reduction: int = MEAN) -> TensorSpec:
    return _promoting_loss("mse_loss", a, target, reduction)


@rule("smooth_l1_loss")
def smooth_l1_loss(a: TensorSpec, target: TensorSpec, reduction: int = MEAN, beta: float = 1.0) -> TensorSpec:
    if beta < 0:
        raise ArgumentError(f"smooth_l1_loss: beta must not be negative, got {beta}")
    return _promoting_loss("smooth_l1_loss", a, target, reduction)


def _promoting_loss(name: str, a: TensorSpec, target: TensorSpec, reduction: int) -> TensorSpec:
    common = result_type(a, target)
    check_dtype(name, common, "f", a.device)
    return reduce_loss(elementwise((a, target), common, common), reduction)


@rule("huber_loss")
def huber_loss(a: TensorSpec, target: TensorSpec, reduction: int = MEAN, delta: float = 1.0) -> TensorSpec:
    if delta <= 0:
        raise ArgumentError(f"huber_loss: delta must be positive, got {delta}")
    common = promote(a.dtype, target.dtype)
    check_dtype("huber_loss", common, "f", a.device)
    if a.device.type != "cpu" and a.dtype is not target.dtype:
        return NotImplemented
    check_castable("huber_loss", common, a.dtype)
    if not same_shape(broadcast_shapes(a.shape, target.shape), a.shape):
        return NotImplemented if a.dtype is not target.dtype else reduce_loss(elementwise((a, target), common), reduction)
    return reduce_loss(preserved_copy(a), reduction)  # the kernel writes into a tensor like the first one


@rule("soft_margin_loss")
def soft_margin_loss(a: TensorSpec, target: TensorSpec, reduction: int = MEAN) -> TensorSpec:
    if a.dtype is not target.dtype or not same_shape(a.shape, target.shape):
        return NotImplemented
    check_dtype("soft_margin_loss", a.dtype, "fc", a.device, COMPLEX_HALF)
    negated = elementwise((a,), a.dtype)
    return reduce_loss(elementwise((negated, target), a.dtype), reduction)


@rule("binary_cross_entropy")
def binary_cross_entropy(
    a: TensorSpec, target: TensorSpec, weight: TensorSpec | None = None, reduction: int = MEAN
) -> TensorSpec:
    check_dtype("binary_cross_entropy", a.dtype, "f", a.device)
    check_same_dtype("binary_cross_entropy", a, target)
    if not same_shape(a.shape, target.shape):
        raise ShapeMismatch(f"binary_cross_entropy: {a} and the target {target} must have the same shape")
    if weight is not None:
        check_expandable(weight.shape, a.shape, "binary_cross_entropy's weight")
    return reduce_loss(preserved_copy(a), reduction)


@rule("binary_cross_entropy_backward")
def binary_cross_entropy_backward(
    grad: TensorSpec, a: TensorSpec, target: TensorSpec, weight: TensorSpec | None = None,
    reduction: int = MEAN,
) -> TensorSpec:  # fmt: skip
    check_dtype("binary_cross_entropy", a.dtype, "f", a.device)
    check_same_dtype("binary_cross_entropy", a, target)
    return preserved_copy(a)


@rule("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    a: TensorSpec, target: TensorSpec, weight: TensorSpec | None = None,
    pos_weight: TensorSpec | None = None, reduction: int = MEAN,
) -> TensorSpec:  # fmt: skip
    check_dtype("binary_cross_entropy_with_logits", a.dtype, "f", a.device)
    if a.dtype is not target.dtype or not same_shape(a.shape, target.shape):
        return NotImplemented
    loss = preserved_copy(target)
    for extra in (weight, pos_weight):
        if extra is not None:
            if extra.dtype is not a.dtype:
                return NotImplemented
            check_expandable(extra.shape, loss.shape, "binary_cross_entropy_with_logits's weight")
    return reduce_loss(loss, reduction)


@rule("mse_loss_backward")
def mse_loss_backward(grad: TensorSpec, a: TensorSpec, target: TensorSpec, reduction: int) -> TensorSpec:
    return _dense_gradient("mse_loss_backward", "if", grad, a, target)


@rule("smooth_l1_loss_backward")
def smooth_l1_loss_backward(
    grad: TensorSpec, a: TensorSpec, target: TensorSpec, reduction: int, beta: float
) -> TensorSpec:
    return _dense_gradient("smooth_l1_loss_backward", "if", grad, a, target)


@rule("huber_loss_backward")
def huber_loss_backward(
    grad: TensorSpec, a: TensorSpec, target: TensorSpec, reduction: int, delta: float
) -> TensorSpec:
    return _dense_gradient("huber_loss_backward", "f", grad, a, target)


def _dense_gradient(name: str, kinds: str, *operands: TensorSpec) -> Any:
    grad, a, target = operands
    if not grad.dtype is a.dtype is target.dtype:
        return NotImplemented
    check_dtype(name, a.dtype, kinds, a.device)
    if not same_shape(broadcast_shapes(grad.shape, a.shape, target.shape), a.shape):
        return NotImplemented
    return a.like()


@rule("soft_margin_loss_backward")
def soft_margin_loss_backward(
    grad: TensorSpec, a: TensorSpec, target: TensorSpec, reduction: int
) -> TensorSpec:
    if not grad.dtype is a.dtype is target.dtype or not same_shape(a.shape, target.shape):
        return NotImplemented
    check_dtype("soft_margin_loss_backward", a.dtype, "fc", a.device, COMPLEX_HALF)
    exponent = elementwise((elementwise((target,), a.dtype), a), a.dtype)
    return elementwise((elementwise((target,), a.dtype), exponent, grad), a.dtype)


exact_out.mark("binary_cross_entropy.out", "binary_cross_entropy_backward.grad_input")


def _loss(op: Any) -> Function:
    """Of the differences of two tensors, each of which is broadcast."""

    def rule(keys: Any, x: torch.Tensor, target: torch.Tensor, reduction: int = MEAN, *settings: Any) -> Any:
        level = BatchLevel()
        with level.below():
            losses = op(*align_ranks(level, x, target), NONE, *settings)
            if reduction != NONE:
                losses = losses.flatten(1) if losses.dim() > 1 else losses.unsqueeze(1)
                losses = losses.mean(1) if reduction == MEAN else losses.sum(1)
        return level.around(losses)

    return rule


def _loss_backward(op: Any) -> Function:
    def rule(
        keys: Any,
        gradient: torch.Tensor,
        x: torch.Tensor,
        target: torch.Tensor,
        reduction: int,
        *settings: Any,
    ) -> Any:
        level = BatchLevel()
        with level.below():
            given, *others = align_ranks(level, gradient, x, target)
            if reduction == MEAN:
                count = torch.broadcast_shapes(*[other.shape[1:] for other in others]).numel()
                given = given / count
            result = op(given, *others, NONE, *settings)
        return level.around(result)

    return rule


for _name in ("mse_loss", "smooth_l1_loss", "huber_loss"):
    batching_rule(_name)(_loss(getattr(aten, _name)))
    batching_rule(f"{_name}_backward")(_loss_backward(getattr(aten, f"{_name}_backward")))
