"""Normalisations. Results keep the memory format of the input; the statistics beside them are contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.rules.dtype_sets import COMPLEX, FLOATS, HALVES, check_cpu_dtype
from understudy.rules.layouts import looks_channels_last, suggested_strides
from understudy.rules.registry import rule
from understudy.spec import TensorSpec, elementwise_strides, is_channels_last_contiguous, same_shape
from understudy.spec.tensor_spec import Size

Maybe = TensorSpec | None
Mask = Sequence[bool]


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which CUDA kernels add up numbers of this one."""
    return torch.float32 if dtype in HALVES else dtype


def _statistics_dtype(what: str, x: TensorSpec, *parameters: Maybe) -> torch.dtype:
    """CPU kernels keep statistics in the input's dtype, unless 16-bit inputs meet float32 parameters."""
    given = [parameter.dtype for parameter in parameters if parameter is not None]
    if all(dtype is x.dtype for dtype in given):
        return x.dtype
    first = next((p.dtype for p in parameters if p is not None), x.dtype)
    mixed = x.dtype in HALVES and first is not x.dtype and all(dtype is torch.float32 for dtype in given)
    if not mixed and x.device.type == "cpu":
        raise DtypeError(f"{what}: {x} goes with parameters of its own dtype or (16-bit inputs) float32")
    return torch.float32


def _formatted(x: TensorSpec) -> TensorSpec:
    return x.like(stride=suggested_strides(x.shape, x))


def _is_dense(x: TensorSpec) -> bool:
    """Without gaps in the format that it seems to have."""
    if looks_channels_last(x):
        return is_channels_last_contiguous(x.shape, x.stride)
    return x.is_contiguous


# --- over the last dimensions


def _leading_shape(what: str, x: TensorSpec, normalized: Sequence[Any], *parameters: Maybe) -> Size:
    """The shape of the statistics: 1 for each normalised dimension."""
    count = len(normalized)
    wanted = tuple(normalized)
    if not same_shape(x.shape[max(x.ndim - count, 0) :], wanted):
        raise ShapeMismatch(f"{what}: the last dimensions of {x} are not {list(wanted)}")
    for parameter in parameters:
        if parameter is not None and not same_shape(parameter.shape, wanted):
            raise ShapeMismatch(f"{what}: {parameter} has not the normalised shape {list(wanted)}")
    return (*x.shape[: x.ndim - count], *(1,) * count)


@rule("native_layer_norm")
def layer_norm(
    x: TensorSpec, normalized_shape: Sequence[Any], weight: Maybe, bias: Maybe, eps: float
) -> tuple[TensorSpec, ...]:
    if len(normalized_shape) == 0:
        raise ArgumentError("layer_norm: no dimension to normalise over")
    lead = _leading_shape("layer_norm", x, normalized_shape, weight, bias)
    check_cpu_dtype("layer_norm", x, FLOATS)
    on_cpu = x.device.type == "cpu"
    dtype = _statistics_dtype("layer_norm", x, weight, bias) if on_cpu else accumulated(x.dtype)
    statistics = x.like(lead, dtype=dtype)
    return x.like(), statistics, statistics


@rule("layer_norm")
def layer_norm_whole(
    x: TensorSpec, normalized_shape: Sequence[Any], weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> TensorSpec:  # fmt: skip
    return layer_norm(x, normalized_shape, weight, bias, eps)[0]


@rule("native_layer_norm_backward")
def layer_norm_backward(
    grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[Any], mean: TensorSpec, rstd: TensorSpec,
    weight: Maybe, bias: Maybe, output_mask: Mask,
) -> tuple[Maybe, ...]:  # fmt: skip
    _leading_shape("layer_norm", x, normalized_shape, weight, bias)
    _check_gradient("layer_norm", grad, x)
    for_input, for_weight, for_bias = output_mask
    return (
        x.like() if for_input else None,
        _gradient_like("layer_norm", weight, for_weight),
        _gradient_like("layer_norm", bias, for_bias),
    )


def _check_gradient(what: str, grad: TensorSpec, x: TensorSpec) -> None:
    if not same_shape(grad.shape, x.shape):
        raise ShapeMismatch(f"{what} backward: {grad} is no gradient for {x}")
    check_cpu_dtype(what, x, FLOATS)
    if grad.dtype is not x.dtype:
        raise DtypeError(f"{what} backward: {grad} and {x} differ in dtype")


def _gradient_like(what: str, parameter: Maybe, wanted: bool) -> Maybe:
    if not wanted:
        return None
    if parameter is None:
        raise ArgumentError(f"{what} backward: a gradient is asked for a parameter that was not given")
    return parameter.like()


@rule("_fused_rms_norm")
def rms_norm(
    x: TensorSpec, normalized_shape: Sequence[Any], weight: Maybe, eps: float | None
) -> tuple[TensorSpec, TensorSpec]:
    lead = _leading_shape("rms_norm", x, normalized_shape, weight)
    check_cpu_dtype("rms_norm", x, FLOATS | COMPLEX)
    if len(normalized_shape) == 0:  # a mean over no dimensions is one over all of them
        lead = (1,) * x.ndim
    statistics = x.like(lead, dtype=accumulated(x.dtype))
    if x.device.type != "cpu":
        return x.like(), statistics
    # On CPU it is a row of elementwise operators on an input made dense; strides of sizes 0 and 1 are kept.
    shape = x.shape
    result = x if _is_dense(x) else _formatted(x)
    for factor in (statistics, weight):
        if factor is not None:
            result = x.like(stride=elementwise_strides(shape, (result, factor)))
    return result, statistics


@rule("rms_norm")
def rms_norm_whole(
    x: TensorSpec, normalized_shape: Sequence[Any], weight: Maybe = None, eps: float | None = None
) -> TensorSpec:
    if len(normalized_shape) == 0:
        raise ArgumentError("rms_norm: no dimension to normalise over")
    return rms_norm(x, normalized_shape, weight, eps)[0]


@rule("_fused_rms_norm_backward")
def rms_norm_backward(
    grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[Any], rstd: TensorSpec, weight: Maybe,
    output_mask: Mask,
) -> tuple[Maybe, ...]:  # fmt: skip
    if x.device.type == "cpu":
        raise ArgumentError("rms_norm backward: there is no CPU kernel")
    _leading_shape("rms_norm", x, normalized_shape, weight)
    for_weight = output_mask[1] and weight is not None
    return x.like() if output_mask[0] else None, weight.like() if for_weight and weight is not None else None


# --- over groups of channels


@rule("native_group_norm")
def group_norm(
    x: TensorSpec, weight: Maybe, bias: Maybe, N: Any, C: Any, HxW: Any, group: Any, eps: float
) -> tuple[TensorSpec, ...]:
    _check_groups(x, N, C, HxW, group, weight, bias)
    check_cpu_dtype("group_norm", x, FLOATS)
    result = _formatted(x)
    if not _is_dense(x):
        raise ArgumentError(f"group_norm: {x} is neither contiguous nor channels-last")
    dtype = _statistics_dtype("group_norm", x, weight, bias)
    statistics = x.like((N, group), dtype=dtype)
    return result, statistics, statistics


def _check_groups(
    x: TensorSpec, batch: Any, channels: Any, size: Any, groups: Any, *parameters: Maybe
) -> None:
    if groups <= 0 or channels % groups != 0:
        raise ArgumentError(f"group_norm: {channels} channels can't be divided into {groups} groups")
    if x.numel != batch * channels * size:
        raise ShapeMismatch(f"group_norm: {x} has not {batch} * {channels} * {size} elements")
    for parameter in parameters:
        if parameter is not None and (parameter.ndim != 1 or parameter.shape[0] != channels):
            raise ShapeMismatch(f"group_norm: {parameter} is no parameter for {channels} channels")


@rule("native_group_norm_backward")
def group_norm_backward(
    grad: TensorSpec, x: TensorSpec, mean: TensorSpec, rstd: TensorSpec, weight: Maybe, N: Any, C: Any, HxW: Any,
    group: Any, output_mask: Mask,
) -> tuple[Maybe, ...]:  # fmt: skip
    _check_groups(x, N, C, HxW, group, weight)
    _check_gradient("group_norm", grad, x)
    for_input, for_weight, for_bias = output_mask
    # The gradient of the bias is made like the weight, and there is none without it.
    return (
        _formatted(x) if for_input else None,
        _gradient_like("group_norm", weight, for_weight),
        _gradient_like("group_norm", weight, for_bias),
    )
