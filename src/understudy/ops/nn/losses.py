"""Losses that compare element by element, then reduce, and their gradients; losses of scores for classes, and of sequences
of them, with their decompositions for symbolic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dtypes import (
    FLOATS,
    check_any_dtype,
    check_dtype,
    check_one_dtype,
)
from understudy.ops.variants import check_castable, exact_out
from understudy.shapes.node import Shape, Size, Sizes
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

Function = Callable[..., object]
aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
"""The values of `reduction`."""


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
    check_dtype(name, common, "f")
    return reduce_loss(elementwise((a, target), common, common), reduction)


@rule("huber_loss")
def huber_loss(a: TensorSpec, target: TensorSpec, reduction: int = MEAN, delta: float = 1.0) -> TensorSpec:
    if delta <= 0:
        raise ArgumentError(f"huber_loss: delta must be positive, got {delta}")
    common = promote(a.dtype, target.dtype)
    check_dtype("huber_loss", common, "f")
    if a.device.type != "cpu" and a.dtype is not target.dtype:
        return NotImplemented
    check_castable("huber_loss", common, a.dtype)
    if not same_shape(broadcast_shapes(a.shape, target.shape), a.shape):
        return (
            NotImplemented
            if a.dtype is not target.dtype
            else reduce_loss(elementwise((a, target), common), reduction)
        )
    return reduce_loss(
        preserved_copy(a), reduction
    )  # the kernel writes into a tensor with the strides of the first one


@rule("soft_margin_loss")
def soft_margin_loss(a: TensorSpec, target: TensorSpec, reduction: int = MEAN) -> TensorSpec:
    check_expandable(target.shape, a.shape, "soft_margin_loss's target")  # it is multiplied in place
    if a.dtype is not target.dtype or not same_shape(a.shape, target.shape):
        return NotImplemented
    check_dtype("soft_margin_loss", a.dtype, "fc")
    negated = elementwise((a,), a.dtype)
    return reduce_loss(elementwise((negated, target), a.dtype), reduction)


@rule("binary_cross_entropy")
def binary_cross_entropy(
    a: TensorSpec, target: TensorSpec, weight: TensorSpec | None = None, reduction: int = MEAN
) -> TensorSpec:
    check_dtype("binary_cross_entropy", a.dtype, "f")
    check_one_dtype("binary_cross_entropy", a, target)
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
    check_dtype("binary_cross_entropy", a.dtype, "f")
    check_one_dtype("binary_cross_entropy", a, target)
    return preserved_copy(a)


@rule("binary_cross_entropy_with_logits")
def binary_cross_entropy_with_logits(
    a: TensorSpec, target: TensorSpec, weight: TensorSpec | None = None,
    pos_weight: TensorSpec | None = None, reduction: int = MEAN,
) -> TensorSpec:  # fmt: skip
    check_dtype("binary_cross_entropy_with_logits", a.dtype, "f")
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
    return _dense_gradient("mse_loss_backward", "if", grad, a, target, promotes=True)


@rule("smooth_l1_loss_backward")
def smooth_l1_loss_backward(
    grad: TensorSpec, a: TensorSpec, target: TensorSpec, reduction: int, beta: float
) -> TensorSpec:
    return _dense_gradient("smooth_l1_loss_backward", "if", grad, a, target, promotes=True)


@rule("huber_loss_backward")
def huber_loss_backward(
    grad: TensorSpec, a: TensorSpec, target: TensorSpec, reduction: int, delta: float
) -> TensorSpec:
    return _dense_gradient("huber_loss_backward", "f", grad, a, target)


def _dense_gradient(name: str, kinds: str, *operands: TensorSpec, promotes: bool = False) -> TensorSpec:
    """`promotes`: of different floats, it is computed in the wider one, and stored in that of the input."""
    grad, a, target = operands
    if not grad.dtype is a.dtype is target.dtype and not (
        promotes and FLOATS.issuperset(spec.dtype for spec in operands)
    ):
        return NotImplemented
    check_dtype(name, a.dtype, kinds)
    if not same_shape(broadcast_shapes(grad.shape, a.shape, target.shape), a.shape):
        return NotImplemented
    return a.like()


@rule("soft_margin_loss_backward")
def soft_margin_loss_backward(
    grad: TensorSpec, a: TensorSpec, target: TensorSpec, reduction: int
) -> TensorSpec:
    if not grad.dtype is a.dtype is target.dtype or not same_shape(a.shape, target.shape):
        return NotImplemented
    check_dtype("soft_margin_loss_backward", a.dtype, "fc")
    exponent = elementwise((elementwise((target,), a.dtype), a), a.dtype)
    return elementwise((elementwise((target,), a.dtype), exponent, grad), a.dtype)


exact_out.mark("binary_cross_entropy.out", "binary_cross_entropy_backward.grad_input")


Maybe = TensorSpec | None
WIDE = frozenset({torch.float32, torch.float64})


# --- negative log-likelihood


def _check_scores(what: str, x: TensorSpec, target: TensorSpec, weight: Maybe, channel: int) -> None:
    classes = x.shape[channel]
    if weight is not None:
        if weight.ndim != 1 or weight.shape[0] != classes:
            raise ShapeMismatch(f"{what}: expected {classes} class weights, got {weight}")
        if weight.dtype is not x.dtype:
            raise DtypeError(f"{what}: {x} and the weight {weight} differ in dtype")
    check_any_dtype(what, target, {torch.int64, torch.uint8})


def _check_nll(x: TensorSpec, target: TensorSpec, weight: Maybe) -> None:
    if x.ndim not in (1, 2) or target.ndim > 1:
        raise ShapeMismatch(
            f"nll_loss: expected scores of 1 or 2 dimensions and targets of at most 1, got {x} and {target}"
        )
    if x.ndim == 2 and (target.ndim == 0 or x.shape[0] != target.shape[0]):
        raise ShapeMismatch(f"nll_loss: {x} and {target} differ in batch size")
    if x.ndim == 1 and target.ndim == 1 and target.shape[0] != 1:
        raise ShapeMismatch(f"nll_loss: expected one target for the scores {x}, got {target}")
    _check_scores("nll_loss", x, target, weight, -1)


@rule("nll_loss_forward")
def nll_loss_forward(
    x: TensorSpec, target: TensorSpec, weight: Maybe, reduction: int, ignore_index: object
) -> tuple[TensorSpec, TensorSpec]:
    _check_nll(x, target, weight)
    return x.like(target.shape if reduction == NONE and x.ndim == 2 else ()), x.like(())


@rule("nll_loss_backward")
def nll_loss_backward(
    grad: TensorSpec, x: TensorSpec, target: TensorSpec, weight: Maybe, reduction: int, ignore_index: object,
    total_weight: TensorSpec,
) -> TensorSpec:  # fmt: skip
    _check_nll(x, target, weight)
    if x.ndim == 1 and target.ndim == 1:
        raise ShapeMismatch(f"nll_loss backward: {x} and {target} differ in the number of dimensions")
    _check_gradient("nll_loss", grad, target.shape if reduction == NONE and x.ndim == 2 else ())
    return x.like()


def _check_gradient(what: str, grad: TensorSpec, shape: Shape) -> None:
    fits = same_shape(grad.shape, shape) if shape else grad.ndim <= 1 and grad.numel == 1
    if not fits:
        raise ShapeMismatch(
            f"{what} backward: gradient shape {grad} does not match output shape {list(shape)}"
        )


def _check_nll2d(x: TensorSpec, target: TensorSpec, weight: Maybe) -> None:
    if x.ndim != 4 or target.ndim != 3 or not same_shape(target.shape, (x.shape[0], *x.shape[2:])):
        raise ShapeMismatch(f"nll_loss2d: shape of targets {target} does not match {x}")
    _check_scores("nll_loss2d", x, target, weight, 1)
    if target.dtype is torch.uint8 and x.device.type == "cpu":
        raise DtypeError(f"nll_loss2d: uint8 targets are not supported on CPU, got {target}")


@rule("nll_loss2d_forward")
def nll_loss2d_forward(
    x: TensorSpec, target: TensorSpec, weight: Maybe, reduction: int, ignore_index: object
) -> tuple[TensorSpec, TensorSpec]:
    _check_nll2d(x, target, weight)
    return x.like(target.shape if reduction == NONE else ()), x.like(())


@rule("nll_loss2d_backward")
def nll_loss2d_backward(
    grad: TensorSpec, x: TensorSpec, target: TensorSpec, weight: Maybe, reduction: int, ignore_index: object,
    total_weight: TensorSpec,
) -> TensorSpec:  # fmt: skip
    _check_nll2d(x, target, weight)
    _check_gradient("nll_loss2d", grad, target.shape if reduction == NONE else ())
    result = preserved_copy(x)
    if not result.is_contiguous and x.device.type == "cpu":
        raise ArgumentError(f"nll_loss2d backward: expected a contiguous input, got {x}")
    return result


# --- margins


def _margin_shape(what: str, x: TensorSpec, reduction: int) -> Shape:
    if x.ndim > 2:
        raise ShapeMismatch(f"{what}: expected one or a batch of rows, got {x}")
    if x.ndim > 0 and x.shape[-1] == 0:
        raise ShapeMismatch(f"{what}: rows of {x} have no elements")
    return x.shape[:-1] if reduction == NONE else ()


def _check_margin_target(what: str, x: TensorSpec, target: TensorSpec, shape: Shape) -> None:
    check_any_dtype(what, target, {torch.int64})
    if target.numel != 1 if not shape else not same_shape(target.shape, shape):
        raise ShapeMismatch(f"{what}: shape of targets {target} does not match {x}")


@rule("multi_margin_loss")
def multi_margin_loss(
    x: TensorSpec,
    target: TensorSpec,
    p: object = 1,
    margin: object = 1,
    weight: Maybe = None,
    reduction: int = 1,
) -> TensorSpec:
    shape = _margin_shape("multi_margin_loss", x, reduction)
    if p not in (1, 2):
        raise ArgumentError(f"multi_margin_loss: expected p 1 or 2, got {p}")
    _check_margin_target("multi_margin_loss", x, target, x.shape[:-1])
    if weight is not None and (weight.ndim != 1 or weight.shape[0] != (x.shape[-1] if x.ndim else 1)):
        raise ShapeMismatch(f"multi_margin_loss: expected one weight for each class of {x}, got {weight}")
    return x.like(shape)


@rule("multi_margin_loss_backward")
def multi_margin_loss_backward(
    grad: TensorSpec, x: TensorSpec, target: TensorSpec, p: object, margin: object, weight: Maybe = None,
    reduction: int = 1,
) -> TensorSpec:  # fmt: skip
    multi_margin_loss(x, target, p, margin, weight, reduction)
    return x.like()


@rule("multilabel_margin_loss_forward")
def multilabel_margin_loss(
    x: TensorSpec, target: TensorSpec, reduction: int
) -> tuple[TensorSpec, TensorSpec]:
    shape = _margin_shape("multilabel_margin_loss", x, reduction)
    _check_margin_target("multilabel_margin_loss", x, target, x.shape)
    return x.like(shape), x.like(target.shape)


@rule("multilabel_margin_loss_backward")
def multilabel_margin_loss_backward(
    grad: TensorSpec, x: TensorSpec, target: TensorSpec, reduction: int, is_target: TensorSpec
) -> TensorSpec:
    multilabel_margin_loss(x, target, reduction)
    return x.like()


# --- sequences


@rule("_ctc_loss")
def ctc_loss(
    log_probs: TensorSpec, targets: TensorSpec, input_lengths: Sequence[Any], target_lengths: Sequence[Any],
    blank: int = 0, zero_infinity: bool = False,
) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
    counts = len(input_lengths), len(target_lengths)
    return ctc_losses(log_probs, targets, counts, input_lengths, target_lengths, blank)


def ctc_losses(
    log_probs: TensorSpec, targets: TensorSpec, counts: Sizes, input_lengths: Sizes,
    target_lengths: Sizes, blank: int,
) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
    """(time, batch, classes): the loss of each sequence, and a table over time of both kinds of its states.

    `counts`: the numbers of input lengths and of target lengths. Input lengths may be missing if they are not determined.
    """
    if log_probs.ndim != 3 or log_probs.is_empty:
        raise ShapeMismatch(
            f"ctc_loss: expected non-empty log_probs of shape (time, batch, classes), got {log_probs}"
        )
    time, batch, classes = log_probs.shape
    if any(count != batch for count in counts):
        raise ArgumentError(f"ctc_loss: expected {batch} input lengths and {batch} target lengths")
    if not 0 <= blank < classes:
        raise ArgumentError(f"ctc_loss: blank {blank} is out of range for {classes} classes")
    if any(length < 0 for length in (*input_lengths, *target_lengths)) or any(
        length > time for length in input_lengths
    ):
        raise ArgumentError(
            f"ctc_loss: expected input lengths from 0 to {time} and target lengths of at least 0"
        )
    longest = max(target_lengths, default=0)
    _check_ctc_targets(targets, batch, longest, sum(target_lengths))
    return log_probs.like((batch,)), log_probs.like((batch, time, 2 * longest + 1))


def _check_ctc_targets(targets: TensorSpec, batch: Size, longest: Size, total: Size) -> None:
    """Targets are a row for each sequence, which may be longer than its target, or all in one row."""
    check_any_dtype("ctc_loss", targets, {torch.int64, torch.int32})
    if targets.ndim == 2:
        if targets.shape[0] != batch or targets.shape[1] < longest:
            raise ShapeMismatch(
                f"ctc_loss: expected {batch} targets of up to {longest} classes, got {targets}"
            )
    elif targets.ndim != 1 or targets.shape[0] != total:
        raise ShapeMismatch(
            f"ctc_loss: expected targets of {total} classes in all, or a row for each, got {targets}"
        )


@rule("_ctc_loss_backward", "_ctc_loss_backward.Tensor")
def ctc_loss_backward(
    grad: TensorSpec, log_probs: TensorSpec, targets: TensorSpec, input_lengths: object, target_lengths: object,
    neg_log_likelihood: TensorSpec, log_alpha: TensorSpec, blank: int, zero_infinity: bool = False,
) -> TensorSpec:  # fmt: skip
    return log_probs.like()


@rule(
    "torch_nn::_linear_cross_entropy_batch_chunked",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
)
def check_targets_of_chunks(
    x: TensorSpec, linear_weight: TensorSpec, target: TensorSpec, linear_bias: object, weight: TensorSpec | None,
    *options: object,
) -> Any:  # fmt: skip
    """The registered fake handles the other cases."""
    is_cast = x.device.type == "cpu" and any(
        isinstance(each, torch.dtype) and each is not x.dtype for each in options
    )
    if linear_weight.dtype is not x.dtype and not is_cast:  # to the dtype of accumulation
        raise ShapeMismatch(f"linear_cross_entropy: {x} and {linear_weight} differ in dtype")
    if x.shape[0] != 0 and (target.ndim != 1 or target.shape[0] < x.shape[0]):
        raise ShapeMismatch(f"linear_cross_entropy: expected one target for each row of {x}, got {target}")
    if linear_weight.shape[0] == 0 and x.shape[0] != 0:
        raise DimensionError(f"linear_cross_entropy: expected at least one class, got {linear_weight}")
    if (
        weight is not None
        and weight.ndim == 1
        and weight.shape[0] == 0
        and any(size != 0 for size in target.shape)
    ):
        raise DimensionError(f"linear_cross_entropy: expected weights with elements, got {weight}")
    return NotImplemented


# --- decompositions for symbolic sizes ----------------------------------------------------------------------


@decomposition("cross_entropy_loss")
def decompose_cross_entropy_loss(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = MEAN,
    ignore_index: Any = -100, label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """For class probabilities with weights: C++ reads the number of weights as an integer."""
    if weight is None or weight.dim() != 1 or not target.is_floating_point() or x.dim() != target.dim():
        return NotImplemented
    if ignore_index >= 0 or any(a != b for a, b in zip(x.shape, target.shape, strict=True)):
        return NotImplemented
    classes = 0 if x.dim() == 1 else 1
    count = x.shape[classes]
    if weight.shape[0] != count:
        return NotImplemented
    logarithms = torch.log_softmax(x, classes, x.dtype)
    if label_smoothing > 0:
        target = aten.add.Scalar(aten.mul.Scalar(target, 1 - label_smoothing), label_smoothing / count)
    if x.dim() > 1:
        weight = weight.view([count if i == classes else 1 for i in range(x.dim())])
    losses = logarithms * target * weight
    if reduction == SUM:
        return -losses.sum()
    if reduction != MEAN:
        return -losses.sum(classes)
    if x.numel() == 0:
        return -losses.sum().fill_(math.nan)
    return aten.div.Scalar(-losses.sum(), logarithms.numel() // count)
