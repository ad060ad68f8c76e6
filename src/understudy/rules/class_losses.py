"""Losses of scores for classes, and of sequences of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.rules.dtype_sets import FLOATS, check_any_dtype, check_cpu_dtype
from understudy.rules.registry import rule
from understudy.spec import TensorSpec, preserved_copy, same_shape
from understudy.spec.tensor_spec import Size

Maybe = TensorSpec | None

NONE = 0  # of the values of `reduction`: no reduction
WIDE = frozenset({torch.float32, torch.float64})


# --- negative log-likelihood


def _check_scores(what: str, x: TensorSpec, target: TensorSpec, weight: Maybe, channel: int) -> None:
    classes = x.shape[channel]
    if weight is not None:
        if weight.ndim != 1 or weight.shape[0] != classes:
            raise ShapeMismatch(f"{what}: {weight} has not one weight for each of {classes} classes")
        if weight.dtype is not x.dtype:
            raise DtypeError(f"{what}: {x} and the weight {weight} differ in dtype")
    check_any_dtype(what, target, {torch.int64, torch.uint8})
    check_cpu_dtype(what, x, FLOATS)


def _check_nll(x: TensorSpec, target: TensorSpec, weight: Maybe) -> None:
    if x.ndim not in (1, 2) or target.ndim > 1:
        raise ShapeMismatch(f"nll_loss: expected scores for one or a batch of targets, got {x} and {target}")
    if x.ndim == 2 and (target.ndim == 0 or x.shape[0] != target.shape[0]):
        raise ShapeMismatch(f"nll_loss: {x} and {target} differ in batch size")
    _check_scores("nll_loss", x, target, weight, -1)


@rule("nll_loss_forward")
def nll_loss_forward(
    x: TensorSpec, target: TensorSpec, weight: Maybe, reduction: int, ignore_index: Any
) -> tuple[TensorSpec, TensorSpec]:
    _check_nll(x, target, weight)
    return x.like(target.shape if reduction == NONE and x.ndim == 2 else ()), x.like(())


@rule("nll_loss_backward")
def nll_loss_backward(
    grad: TensorSpec, x: TensorSpec, target: TensorSpec, weight: Maybe, reduction: int, ignore_index: Any,
    total_weight: TensorSpec,
) -> TensorSpec:  # fmt: skip
    _check_nll(x, target, weight)
    if x.ndim == 1 and target.ndim == 1:
        raise ShapeMismatch(f"nll_loss backward: {x} and {target} differ in the number of dimensions")
    _check_gradient("nll_loss", grad, target.shape if reduction == NONE and x.ndim == 2 else ())
    return x.like()


def _check_gradient(what: str, grad: TensorSpec, shape: Size) -> None:
    fits = same_shape(grad.shape, shape) if shape else grad.ndim <= 1 and grad.numel == 1
    if not fits:
        raise ShapeMismatch(f"{what} backward: {grad} is no gradient for a result of shape {list(shape)}")


def _check_nll2d(x: TensorSpec, target: TensorSpec, weight: Maybe) -> None:
    if x.ndim != 4 or target.ndim != 3 or not same_shape(target.shape, (x.shape[0], *x.shape[2:])):
        raise ShapeMismatch(f"nll_loss2d: {target} are no targets for each point of {x}")
    _check_scores("nll_loss2d", x, target, weight, 1)
    if target.dtype is torch.uint8 and x.device.type == "cpu":
        raise DtypeError(f"nll_loss2d: no CPU kernel for targets of uint8, given as {target}")


@rule("nll_loss2d_forward")
def nll_loss2d_forward(
    x: TensorSpec, target: TensorSpec, weight: Maybe, reduction: int, ignore_index: Any
) -> tuple[TensorSpec, TensorSpec]:
    _check_nll2d(x, target, weight)
    return x.like(target.shape if reduction == NONE else ()), x.like(())


@rule("nll_loss2d_backward")
def nll_loss2d_backward(
    grad: TensorSpec, x: TensorSpec, target: TensorSpec, weight: Maybe, reduction: int, ignore_index: Any,
    total_weight: TensorSpec,
) -> TensorSpec:  # fmt: skip
    _check_nll2d(x, target, weight)
    _check_gradient("nll_loss2d", grad, target.shape if reduction == NONE else ())
    result = preserved_copy(x)
    if not result.is_contiguous and x.device.type == "cpu":
        raise ArgumentError(f"nll_loss2d backward: the CPU kernel takes no gradients in the layout of {x}")
    return result


@rule("nll_loss", "nll_loss_nd")
def nll_loss(
    x: TensorSpec, target: TensorSpec, weight: Maybe = None, reduction: int = 1, ignore_index: Any = -100
) -> Any:
    """Arrives whole in inference mode."""
    if x.ndim in (1, 2):
        return nll_loss_forward(x, target, weight, reduction, ignore_index)[0]
    if x.ndim == 4:
        return nll_loss2d_forward(x, target, weight, reduction, ignore_index)[0]
    return NotImplemented


@rule("cross_entropy_loss")
def cross_entropy(
    x: TensorSpec, target: TensorSpec, weight: Maybe = None, reduction: int = 1, ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Arrives whole in inference mode."""
    if label_smoothing != 0 or target.is_floating_point or same_shape(target.shape, x.shape):
        return NotImplemented
    return nll_loss(x, target, weight, reduction, ignore_index)


# --- margins


def _margin_shape(what: str, x: TensorSpec, reduction: int) -> Size:
    if x.ndim > 2:
        raise ShapeMismatch(f"{what}: expected one or a batch of rows, got {x}")
    check_cpu_dtype(what, x, WIDE)
    return x.shape[:-1] if reduction == NONE else ()


def _check_margin_target(what: str, x: TensorSpec, target: TensorSpec, shape: Size) -> None:
    check_any_dtype(what, target, {torch.int64})
    if target.numel != 1 if not shape else not same_shape(target.shape, shape):
        raise ShapeMismatch(f"{what}: {target} are no targets for {x}")


@rule("multi_margin_loss")
def multi_margin_loss(
    x: TensorSpec, target: TensorSpec, p: Any = 1, margin: Any = 1, weight: Maybe = None, reduction: int = 1
) -> TensorSpec:
    shape = _margin_shape("multi_margin_loss", x, reduction)
    if p not in (1, 2):
        raise ArgumentError(f"multi_margin_loss: p is 1 or 2, not {p}")
    _check_margin_target("multi_margin_loss", x, target, x.shape[:-1])
    return x.like(shape)


@rule("multi_margin_loss_backward")
def multi_margin_loss_backward(
    grad: TensorSpec, x: TensorSpec, target: TensorSpec, p: Any, margin: Any, weight: Maybe = None,
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
    log_probs: TensorSpec, targets: TensorSpec, counts: Sequence[Any], input_lengths: Sequence[Any],
    target_lengths: Sequence[Any], blank: int,
) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
    """(time, batch, classes): the loss of each sequence, and a table over time of both kinds of its states.

    `counts`: how many lengths there are of inputs and of targets. Those of inputs may be left out where nobody knows them.
    """
    if log_probs.ndim != 3 or log_probs.is_empty:
        raise ShapeMismatch(f"ctc_loss: expected (time, batch, classes), and elements, got {log_probs}")
    time, batch, classes = log_probs.shape
    if any(count != batch for count in counts):
        raise ArgumentError(f"ctc_loss: not one length of input and target for each of {batch} sequences")
    if not 0 <= blank < classes:
        raise ArgumentError(f"ctc_loss: the blank {blank} is none of {classes} classes")
    if any(length < 0 for length in (*input_lengths, *target_lengths)) or any(
        length > time for length in input_lengths
    ):
        raise ArgumentError(f"ctc_loss: lengths of inputs have to be 0 to {time}, those of targets 0 or more")
    longest = max(target_lengths, default=0)
    _check_ctc_targets(targets, batch, longest, sum(target_lengths))
    check_cpu_dtype("ctc_loss", log_probs, WIDE)
    return log_probs.like((batch,)), log_probs.like((batch, time, 2 * longest + 1))


def _check_ctc_targets(targets: TensorSpec, batch: Any, longest: Any, total: Any) -> None:
    """A row for each sequence, which may be longer than its target; or all targets in one row."""
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
    grad: TensorSpec, log_probs: TensorSpec, targets: TensorSpec, input_lengths: Any, target_lengths: Any,
    neg_log_likelihood: TensorSpec, log_alpha: TensorSpec, blank: int, zero_infinity: bool = False,
) -> TensorSpec:  # fmt: skip
    check_cpu_dtype("ctc_loss backward", log_probs, WIDE)
    return log_probs.like()
