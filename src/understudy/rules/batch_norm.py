"""Batch normalisation, in the many names it goes by.

Statistics for backward differ by device: CPU keeps them in the dtype of the parameters, and none (0 elements) in
evaluation; CUDA keeps one for each channel, in the dtype it accumulates in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.rules.dtype_sets import FLOATS, HALVES, check_cpu_dtype
from understudy.rules.layouts import looks_channels_last, suggested_strides
from understudy.rules.norms import accumulated
from understudy.rules.registry import rule
from understudy.spec import TensorSpec, preserved_copy, same_shape

Maybe = TensorSpec | None
Mask = Sequence[bool]


def _normalised(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, training: bool
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    if x.ndim < 2:
        raise ShapeMismatch(f"batch_norm: needs a batch and channels, got {x}")
    channels = x.shape[1]
    for parameter in (weight, bias, mean, var):
        if parameter is not None and not _is_enough(parameter, channels):
            raise ShapeMismatch(
                f"batch_norm: {parameter} has not one element for each of {channels} channels"
            )
    if not training and (mean is None or var is None):
        raise ArgumentError("batch_norm: evaluation needs running statistics")
    check_cpu_dtype("batch_norm", x, FLOATS)
    if x.device.type != "cpu":
        statistics = x.like((channels,), dtype=accumulated(x.dtype))
        return preserved_copy(x), statistics, statistics
    if training and x.is_empty:
        raise ShapeMismatch(f"batch_norm: {x} has no elements to normalise by")
    dtype = _parameter_dtype(x, weight, bias, mean, var)
    statistics = x.like((channels if training else 0,), dtype=dtype)
    return _formatted(x), statistics, statistics


def _is_enough(parameter: TensorSpec, channels: Any) -> bool:
    """The CPU kernel takes the first elements, one for each channel; others are not its concern."""
    return bool(parameter.numel >= channels if parameter.device.type == "cpu" else parameter.numel == channels)


def _formatted(x: TensorSpec) -> TensorSpec:
    """The CPU kernel asks for contiguity first: with one channel, strides may fit both formats."""
    return x.like() if x.is_contiguous else x.like(stride=suggested_strides(x.shape, x))


def _parameter_dtype(x: TensorSpec, *parameters: Maybe) -> torch.dtype:
    given = {parameter.dtype for parameter in parameters if parameter is not None}
    if given <= {x.dtype}:
        return x.dtype
    if x.dtype not in HALVES or given != {torch.float32}:
        raise DtypeError(f"batch_norm: {x} goes with parameters of its own dtype or (16-bit inputs) float32")
    return torch.float32


@rule("native_batch_norm", "_native_batch_norm_legit")
def batch_norm(
    x: TensorSpec,
    weight: Maybe,
    bias: Maybe,
    mean: Maybe,
    var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[TensorSpec, ...]:
    return _normalised(x, weight, bias, mean, var, training)


@rule("_native_batch_norm_legit.no_stats")
def batch_norm_without_running(
    x: TensorSpec, weight: Maybe, bias: Maybe, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    return _normalised(x, weight, bias, None, None, training)


@rule("_native_batch_norm_legit_no_training")
def batch_norm_in_evaluation(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: TensorSpec, var: TensorSpec, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    return _normalised(x, weight, bias, mean, var, False)


@rule("_native_batch_norm_legit_functional")
def batch_norm_functional(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: TensorSpec, var: TensorSpec, training: bool, momentum: float,
    eps: float,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    results = _normalised(x, weight, bias, mean, var, training)
    return (*results, preserved_copy(mean), preserved_copy(var))


@rule("_batch_norm_with_update")
def batch_norm_with_update(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: TensorSpec, var: TensorSpec, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    return (*_normalised(x, weight, bias, mean, var, True), _reserve(x))


@rule("_batch_norm_with_update_functional")
def batch_norm_with_update_functional(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: TensorSpec, var: TensorSpec, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    results = batch_norm_with_update(x, weight, bias, mean, var, momentum, eps)
    return (*results, preserved_copy(mean), preserved_copy(var))


@rule("_batch_norm_no_update")
def batch_norm_no_update(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    return (*_normalised(x, weight, bias, mean, var, False), _reserve(x))


def _reserve(x: TensorSpec) -> TensorSpec:
    """Room that only cuDNN makes use of."""
    return x.like((0,), dtype=torch.uint8)


@rule("cudnn_batch_norm")
def cudnn_batch_norm(
    x: TensorSpec, weight: TensorSpec, bias: Maybe, mean: Maybe, var: Maybe, training: bool,
    exponential_average_factor: float, epsilon: float,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    if x.device.type == "cpu":
        raise ArgumentError("cudnn_batch_norm: there is no CPU kernel")
    statistics = weight.like((weight.shape[0] if training else 0,))
    return x.like(stride=suggested_strides(x.shape, x)), statistics, statistics, _reserve(x)


# --- backward


def _gradients(
    grad: TensorSpec, x: TensorSpec, weight: Maybe, running: Maybe, output_mask: Mask
) -> tuple[Maybe, ...]:
    if not same_shape(grad.shape, x.shape):
        raise ShapeMismatch(f"batch_norm backward: {grad} is no gradient for {x}")
    check_cpu_dtype("batch_norm backward", x, FLOATS)
    if grad.dtype is not x.dtype:
        raise DtypeError(f"batch_norm backward: {grad} and {x} differ in dtype")
    on_cpu = x.device.type == "cpu"
    if on_cpu:
        parameter = x.like((x.shape[1],), dtype=_parameter_dtype(x, weight, running))
        alike = looks_channels_last(x) == looks_channels_last(grad)
        for_x = _formatted(x) if alike else x.like(stride=suggested_strides(x.shape, x))
    else:
        parameter = x.like((x.shape[1],), dtype=weight.dtype if weight is not None else accumulated(x.dtype))
        for_x = preserved_copy(x)
    for_input, for_weight, for_bias = output_mask
    return for_x if for_input else None, parameter if for_weight else None, parameter if for_bias else None


@rule("native_batch_norm_backward")
def batch_norm_backward(
    grad: TensorSpec, x: TensorSpec, weight: Maybe, mean: Maybe, var: Maybe, save_mean: Maybe, save_invstd: Maybe,
    train: bool, eps: float, output_mask: Mask,
) -> tuple[Maybe, ...]:  # fmt: skip
    return _gradients(grad, x, weight, mean, output_mask)


@rule("batch_norm_backward")
def batch_norm_backward_with_reserve(
    grad: TensorSpec, x: TensorSpec, weight: TensorSpec, mean: Maybe, var: Maybe, save_mean: Maybe,
    save_var: Maybe, update: bool, eps: float, output_mask: Mask, reserve: TensorSpec,
) -> tuple[Maybe, ...]:  # fmt: skip
    return _gradients(grad, x, weight, mean, output_mask)


@rule("cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(
    x: TensorSpec, grad: TensorSpec, weight: TensorSpec, mean: Maybe, var: Maybe, save_mean: Maybe,
    save_var: Maybe, epsilon: float, reserve: Any,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    if x.device.type == "cpu":
        raise ArgumentError("cudnn_batch_norm backward: there is no CPU kernel")
    return x.like(stride=suggested_strides(x.shape, x)), weight.like(), weight.like()
