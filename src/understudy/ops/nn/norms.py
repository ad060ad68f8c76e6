"""Normalisations. Results keep the memory format of the input; statistics are contiguous."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.batching import BatchLevel, at_one_level, batching_rule, with_dims_between
from understudy.ops.shared.decompositions import decomposition, has_symbolic_sizes, under_transforms
from understudy.ops.shared.dtypes import COMPLEX, FLOATS, HALVES, check_cpu_dtype, check_one_dtype, refuse_cpu
from understudy.ops.shared.layouts import looks_channels_last, suggested_strides
from understudy.ops.traits.caching import whole_result
from understudy.ops.traits.host_kernels import Results, steps_of
from understudy.shapes.node import Shape, Size, Sizes
from understudy.spec import (
    TensorSpec,
    channels_last_strides,
    elementwise_strides,
    is_channels_last_contiguous,
    preserved_copy,
    same_shape,
)

aten = torch.ops.aten

Maybe = TensorSpec | None
Mask = Sequence[bool]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which CUDA kernels accumulate this one."""
    return torch.float32 if dtype in HALVES else dtype


def _statistics_dtype(what: str, x: TensorSpec, *parameters: Maybe) -> torch.dtype:
    """CPU kernels return statistics in the input's dtype, or in float32 for 16-bit inputs with float32 parameters."""
    given = [parameter.dtype for parameter in parameters if parameter is not None]
    if all(dtype is x.dtype for dtype in given):
        return x.dtype
    first = next((p.dtype for p in parameters if p is not None), x.dtype)
    mixed = x.dtype in HALVES and first is not x.dtype and all(dtype is torch.float32 for dtype in given)
    if not mixed and x.device.type == "cpu":
        raise DtypeError(f"{what}: {x} goes with parameters of its own dtype or (16-bit inputs) float32")
    return torch.float32


def _keep_format(x: TensorSpec) -> TensorSpec:
    return x.like(stride=suggested_strides(x.shape, x))


def _is_dense(x: TensorSpec) -> bool:
    """Whether it is dense in the memory format that eager infers for it."""
    if looks_channels_last(x):
        return is_channels_last_contiguous(x.shape, x.stride)
    return x.is_contiguous


# --- over the last dimensions


def _leading_shape(what: str, x: TensorSpec, normalized: Sizes, *parameters: Maybe) -> Shape:
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
    x: TensorSpec, normalized_shape: Shape, weight: Maybe, bias: Maybe, eps: float
) -> tuple[TensorSpec, ...]:
    if len(normalized_shape) == 0:
        raise ArgumentError("layer_norm: no dimension to normalise over")
    lead = _leading_shape("layer_norm", x, normalized_shape, weight, bias)
    check_cpu_dtype("layer_norm", x, FLOATS)
    on_cpu = x.device.type == "cpu"
    dtype = _statistics_dtype("layer_norm", x, weight, bias) if on_cpu else accumulation_dtype(x.dtype)
    statistics = x.like(lead, dtype=dtype)
    return x.like(), statistics, statistics


@rule("layer_norm")
def layer_norm_whole(
    x: TensorSpec, normalized_shape: Shape, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> TensorSpec:  # fmt: skip
    return layer_norm(x, normalized_shape, weight, bias, eps)[0]


@rule("native_layer_norm_backward")
def layer_norm_backward(
    grad: TensorSpec, x: TensorSpec, normalized_shape: Sizes, mean: TensorSpec, rstd: TensorSpec,
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
    check_one_dtype(f"{what} backward", grad, x)


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
    if len(normalized_shape) == 0:  # an empty list of dimensions means all
        lead = (1,) * x.ndim
    statistics = x.like(lead, dtype=accumulation_dtype(x.dtype))
    if x.device.type != "cpu":
        return x.like(), statistics
    # On CPU it is a sequence of elementwise operators on a dense input; strides of dimensions of size 0 and 1 are kept.
    shape = x.shape
    result = x if _is_dense(x) else _keep_format(x)
    for factor in (statistics, weight):
        if factor is not None:
            result = x.like(stride=elementwise_strides(shape, (result, factor)))
    return result, statistics


@rule("rms_norm")
def rms_norm_whole(
    x: TensorSpec, normalized_shape: Sequence[object], weight: Maybe = None, eps: float | None = None
) -> TensorSpec:
    if len(normalized_shape) == 0:
        raise ArgumentError("rms_norm: no dimension to normalise over")
    return rms_norm(x, normalized_shape, weight, eps)[0]


@rule("_fused_rms_norm_backward")
def rms_norm_backward(
    grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[Any], rstd: TensorSpec, weight: Maybe,
    output_mask: Mask,
) -> tuple[Maybe, ...]:  # fmt: skip
    refuse_cpu("rms_norm backward", x)
    _leading_shape("rms_norm", x, normalized_shape, weight)
    for_weight = output_mask[1] and weight is not None
    return x.like() if output_mask[0] else None, weight.like() if for_weight and weight is not None else None


# --- over groups of channels


@rule("native_group_norm")
def group_norm(
    x: TensorSpec, weight: Maybe, bias: Maybe, N: Size, C: Size, HxW: Size,
    group: Size, eps: float,
) -> tuple[TensorSpec, ...]:
    _check_groups(x, N, C, HxW, group, weight, bias)
    check_cpu_dtype("group_norm", x, FLOATS)
    result = _keep_format(x)
    if not _is_dense(x) and not _torch.group_norm_takes_any_strides():
        raise ArgumentError(f"group_norm: {x} is neither contiguous nor channels-last")
    dtype = _statistics_dtype("group_norm", x, weight, bias)
    statistics = x.like((N, group), dtype=dtype)
    return result, statistics, statistics


def _check_groups(
    x: TensorSpec, batch: Size, channels: Size, size: Size, groups: Size,
    *parameters: Maybe,
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
    if weight is None and _torch.group_norm_makes_absent_gradients():
        weight = x.like((C,))
    # The gradient of the bias is made like the weight; without a weight there is none.
    return (
        _keep_format(x) if for_input else None,
        _gradient_like("group_norm", weight, for_weight),
        _gradient_like("group_norm", weight, for_bias),
    )


# --- Batch normalisation, all variants ------------------------------------------------------
# Statistics for backward differ by device: CPU keeps them in the dtype of the parameters, and none (0 elements) in
# evaluation; CUDA keeps one for each channel, in the dtype it accumulates in.

def _normalise(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, training: bool
) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    if x.ndim < 2:
        raise DimensionError(f"batch_norm: needs a batch and channels, got {x}")
    channels = x.shape[1]
    for statistics in (mean, var):
        if statistics is not None and statistics.ndim != 1:
            raise ShapeMismatch(f"batch_norm: {statistics} is no vector of one number for each channel")
    for parameter in (weight, bias, mean, var):
        if parameter is not None and not _is_enough(parameter, channels):
            raise ShapeMismatch(
                f"batch_norm: {parameter} has not one element for each of {channels} channels"
            )
    if not training and (mean is None or var is None):
        raise ArgumentError("batch_norm: evaluation needs running statistics")
    check_cpu_dtype("batch_norm", x, FLOATS)
    if x.device.type != "cpu":
        statistics = x.like((channels,), dtype=accumulation_dtype(x.dtype))
        return preserved_copy(x), statistics, statistics
    if training and x.is_empty:
        raise ShapeMismatch(f"batch_norm: {x} has no elements to normalise by")
    dtype = _parameter_dtype(x, weight, bias, mean, var)
    statistics = x.like((channels if training else 0,), dtype=dtype)
    return _in_format_of(x, weight, bias, mean, var), statistics, statistics


def _is_enough(parameter: TensorSpec, channels: object) -> bool:
    """The CPU kernel reads one element for each channel; further elements are ignored."""
    return bool(parameter.numel >= channels if parameter.device.type == "cpu" else parameter.numel == channels)


def _has_format(x: TensorSpec) -> bool:
    return x.is_contiguous or is_channels_last_contiguous(x.shape, x.stride)


def _in_format_of(x: TensorSpec, *parameters: Maybe) -> TensorSpec:
    """The kernel for contiguous tensors asks of which format they are, first whether it is the usual one: with one channel,
    or one column, strides may fit both. The other kernel takes the format that the strides suggest."""
    if all(parameter is None or parameter.is_contiguous for parameter in parameters):
        if x.is_contiguous:
            return x.like()
        if is_channels_last_contiguous(x.shape, x.stride):
            return x.like(stride=channels_last_strides(x.shape))
    return x.like(stride=suggested_strides(x.shape, x))


def _parameter_dtype(x: TensorSpec, *parameters: Maybe) -> torch.dtype:
    given = {parameter.dtype for parameter in parameters if parameter is not None}
    if given <= {x.dtype}:
        return x.dtype
    if x.dtype not in HALVES or given != {torch.float32}:
        raise DtypeError(f"batch_norm: {x} goes with parameters of its own dtype or (16-bit inputs) float32")
    return torch.float32


@decomposition("batch_norm")
def decompose_batch_norm_of_vector(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, *_: object, **__: object
) -> Any:
    """C++ reads the second size without checking the rank: for a vector it would interpret random bits as a symbol."""
    if x.dim() >= 2:
        return NotImplemented
    if x.dim() == 0 or x.shape[0] != 0:
        raise DimensionError(f"batch_norm: needs a batch and channels, got {x.dim()} dimensions")
    result = x.clone()
    if weight is not None:
        result = result * weight[0]
    return result if bias is None else result + bias[0]


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
    return _normalise(x, weight, bias, mean, var, training)


@whole_result("batch_norm")
def whole_batch_norm(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, training: bool, momentum: float, eps: float,
    cudnn_enabled: bool,
) -> Any:  # fmt: skip
    """C++ itself checks how many channels the parameters are for."""
    parameters = [given for given in (weight, bias, mean, var) if given is not None]
    if x.device.type != "cpu" or x.ndim < 2 or any(given.shape != x.shape[1:2] for given in parameters):
        return NotImplemented
    return _normalise(x, weight, bias, mean, var, training)[0]


@rule("_native_batch_norm_legit.no_stats")
def batch_norm_without_running(
    x: TensorSpec, weight: Maybe, bias: Maybe, training: bool, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    return _normalise(x, weight, bias, None, None, training)


@rule("_native_batch_norm_legit_no_training")
def batch_norm_in_evaluation(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: TensorSpec, var: TensorSpec, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    return _normalise(x, weight, bias, mean, var, False)


@rule("_native_batch_norm_legit_functional")
def batch_norm_functional(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: TensorSpec, var: TensorSpec, training: bool, momentum: float,
    eps: float,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    results = _normalise(x, weight, bias, mean, var, training)
    return (*results, preserved_copy(mean), preserved_copy(var))


@rule("_batch_norm_with_update")
def batch_norm_with_update(
    x: TensorSpec, weight: Maybe, bias: Maybe, mean: TensorSpec, var: TensorSpec, momentum: float, eps: float
) -> tuple[TensorSpec, ...]:
    return (*_normalise(x, weight, bias, mean, var, True), _reserve(x))


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
    return (*_normalise(x, weight, bias, mean, var, False), _reserve(x))


def _reserve(x: TensorSpec) -> TensorSpec:
    """The reserve space, which only cuDNN uses."""
    return x.like((0,), dtype=torch.uint8)


@rule("cudnn_batch_norm")
def cudnn_batch_norm(
    x: TensorSpec, weight: TensorSpec, bias: Maybe, mean: Maybe, var: Maybe, training: bool,
    exponential_average_factor: float, epsilon: float,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    refuse_cpu("cudnn_batch_norm", x)
    statistics = weight.like((weight.shape[0] if training else 0,))
    return x.like(stride=suggested_strides(x.shape, x)), statistics, statistics, _reserve(x)


# --- backward


def _gradients(
    grad: TensorSpec, x: TensorSpec, weight: Maybe, running: Maybe, output_mask: Mask
) -> tuple[Maybe, ...]:
    _check_gradient("batch_norm", grad, x)
    on_cpu = x.device.type == "cpu"
    if on_cpu:
        parameter = x.like((x.shape[1],), dtype=_parameter_dtype(x, weight, running))
        alike = looks_channels_last(x) == looks_channels_last(grad) and _has_format(grad)
        for_x = _in_format_of(x) if alike else x.like(stride=suggested_strides(x.shape, x))
    else:
        parameter = x.like((x.shape[1],), dtype=weight.dtype if weight is not None else accumulation_dtype(x.dtype))
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


# --- what CPU kernels of batch norm make on the way


def _goes_by_rows(x: TensorSpec) -> bool:
    """Whether a row has all channels of a place: threads add up a row of sums each."""
    return all(size == 1 for size in x.shape[2:]) or not x.is_contiguous


def _count_channel_bytes(x: TensorSpec) -> int:
    return int(x.shape[1]) * accumulation_dtype(x.dtype).itemsize


@steps_of("native_batch_norm", "_native_batch_norm_legit")
def _of_batch_norm(
    results: Results, x: TensorSpec, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, training: bool,
    *rest: object, **out: object,
) -> tuple[int, ...]:  # fmt: skip
    """Sums for each channel, then a factor and a summand for each."""
    channels = _count_channel_bytes(x)
    if not _has_format(x):
        return () if training else (3 * channels,)
    sums = 2 * int(x.shape[1]) * results[1].itemsize if training else 0
    if sums and _goes_by_rows(x):
        sums += torch.get_num_threads() * channels
    return (max(sums, 2 * channels),)


@steps_of("native_batch_norm_backward")
def _of_batch_norm_backward(
    results: Results, grad: TensorSpec, x: TensorSpec, weight: Maybe, mean: Maybe, var: Maybe, save_mean: Maybe,
    save_invstd: Maybe, train: bool, eps: float, output_mask: Mask, **out: object,
) -> tuple[int, ...]:  # fmt: skip
    """The gradient of the input is made twice, and the first one dropped; then come the sums of two kinds."""
    channels = _count_channel_bytes(x)
    if not (_has_format(x) and _has_format(grad) and looks_channels_last(x) == looks_channels_last(grad)):
        return (channels,)
    twice = int(x.numel) * x.itemsize if output_mask[0] else 0
    if not _goes_by_rows(x):
        return (twice,)
    vectors = 3 if x.dtype in HALVES else 0 if train else 1
    return (max(twice, (vectors + 2 * torch.get_num_threads()) * channels),)


@rule("cudnn_batch_norm_backward")
def cudnn_batch_norm_backward(
    x: TensorSpec, grad: TensorSpec, weight: TensorSpec, mean: Maybe, var: Maybe, save_mean: Maybe,
    save_var: Maybe, epsilon: float, reserve: object,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    refuse_cpu("cudnn_batch_norm backward", x)
    return x.like(stride=suggested_strides(x.shape, x)), weight.like(), weight.like()


@batching_rule("native_layer_norm")
@at_one_level
def batch_native_layer_norm(
    level: BatchLevel, x: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, ...]:
    has_own = level.is_batch(weight) or level.is_batch(bias)
    inside = level.inside(x)
    if not has_own:
        return torch.native_layer_norm(inside, shape, weight, bias, eps)
    result, *statistics = torch.native_layer_norm(inside, shape, None, None, eps)
    ones = [1] * (x.dim() - len(shape))
    if weight is not None:
        result = result * with_dims_between(level, weight, ones)
    if bias is not None:
        result = result + with_dims_between(level, bias, ones)
    return (result, *statistics)


@batching_rule("native_layer_norm_backward")
@at_one_level
def batch_native_layer_norm_backward(
    level: BatchLevel, gradient: torch.Tensor, x: torch.Tensor, shape: list[object], mean: torch.Tensor,
    rstd: torch.Tensor, weight: Any,
    bias: object, wanted: list[bool],
) -> tuple[object, ...]:  # fmt: skip
    has_own = level.is_batch(weight)
    rows = list(range(1, x.dim() - len(shape) + 1))
    results: list[Any] = [None, None, None]
    given, *others = (level.inside(tensor) for tensor in (gradient, x, mean, rstd))
    if wanted[0]:
        scaled = given * with_dims_between(level, weight, [1] * len(rows)) if has_own else given
        affine = (None, None) if has_own else (weight, None)
        # The kernel reads statistics as if they were contiguous, and one for the whole batch is expanded.
        statistics = (part.contiguous() for part in others[1:])
        backward = aten.native_layer_norm_backward
        results[0] = backward(scaled, others[0], shape, *statistics, *affine, [True, False, False])[0]
    if wanted[1]:
        results[1] = _sum_over(given * (others[0] - others[1]) * others[2], rows)
    if wanted[2]:
        results[2] = _sum_over(given, rows)
    return tuple(results)


def _sum_over(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return tensor.sum(dims) if dims else tensor.clone()


@batching_rule("native_group_norm")
@at_one_level
def batch_native_group_norm(
    level: BatchLevel,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    count: Size,
    channels: Size,
    size: int | torch.SymInt,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    has_own = level.is_batch(weight) or level.is_batch(bias)
    inside = level.inside(x)
    outer = inside.shape[:2]
    affine = (None, None) if has_own else (weight, bias)
    flat = inside.flatten(0, 1).contiguous()
    found = aten.native_group_norm(flat, *affine, flat.shape[0], channels, size, groups, eps)
    result, *statistics = (part.reshape(*outer, *part.shape[1:]) for part in found)
    if has_own:
        result = result if weight is None else result * _for_channels(level, weight, x.dim())
        result = result if bias is None else result + _for_channels(level, bias, x.dim())
    return (result, *statistics)


@batching_rule("native_group_norm_backward")
@at_one_level
def batch_native_group_norm_backward(
    level: BatchLevel, gradient: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Any,
    count: object,
    channels: object, size: object, groups: int, wanted: list[bool],
) -> Any:  # fmt: skip
    has_own = level.is_batch(weight)
    results: list[Any] = [None, None, None]
    given, inside, *statistics = (level.inside(tensor) for tensor in (gradient, x, mean, rstd))
    if wanted[0]:
        scaled = given * _for_channels(level, weight, x.dim()) if has_own else given
        flat = [part.flatten(0, 1).contiguous() for part in (scaled, inside, *statistics)]
        sizes = (flat[0].shape[0], channels, size, groups)
        found = aten.native_group_norm_backward(
            *flat, None if has_own else weight, *sizes, [True, False, False]
        )
        results[0] = found[0].reshape(inside.shape)
    rows = [1, *range(3, inside.dim())]
    if wanted[1]:
        center, scale = (part[..., None] for part in statistics)
        grouped = inside.reshape(*inside.shape[:2], groups, -1)
        normal = ((grouped - center) * scale).reshape(inside.shape)
        results[1] = (given * normal).sum(rows)
    if wanted[2]:
        results[2] = given.sum(rows)
    return tuple(results)


def _for_channels(level: BatchLevel, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    inside = level.inside(tensor)
    return inside.reshape(inside.shape[0], 1, -1, *[1] * (rank - 2))


@under_transforms("group_norm")
def decompose_group_norm(
    input: torch.Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:  # fmt: skip
    is_usual = input.dim() > 2 and input.device.type == "cpu" and input.is_contiguous()
    if not has_symbolic_sizes(input) or not is_usual or input.shape[1] % groups:
        return NotImplemented
    count, channels, *rest = input.shape
    return torch.native_group_norm(input, weight, bias, count, channels, math.prod(rest), groups, eps)[0]
