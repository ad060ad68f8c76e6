"""Normalisations. Results keep the memory format of the input; statistics are contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch
from understudy.ops.kernel_tables.table import holds
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition, is_recorded_symbolically
from understudy.ops.shared.dtypes import HALVES, check_one_dtype, refuse_cpu
from understudy.ops.shared.layouts import looks_channels_last, suggested_strides
from understudy.ops.traits.caching import whole_result
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
MaybeTensor = torch.Tensor | None
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
        raise DtypeError(
            f"{what}: expected parameters of dtype {x.dtype}, or float32 for 16-bit inputs; the input is {x}"
        )
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
        raise ShapeMismatch(f"{what}: expected trailing shape {list(wanted)}, got {x}")
    for parameter in parameters:
        if parameter is not None and not same_shape(parameter.shape, wanted):
            raise ShapeMismatch(f"{what}: expected parameters of shape {list(wanted)}, got {parameter}")
    return (*x.shape[: x.ndim - count], *(1,) * count)


@rule("native_layer_norm")
def layer_norm(
    x: TensorSpec, normalized_shape: Shape, weight: Maybe, bias: Maybe, eps: float
) -> tuple[TensorSpec, ...]:
    if len(normalized_shape) == 0:
        raise ArgumentError("layer_norm: normalized_shape must not be empty")
    lead = _leading_shape("layer_norm", x, normalized_shape, weight, bias)
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
        raise ShapeMismatch(f"{what} backward: gradient shape {grad} does not match input {x}")
    check_one_dtype(f"{what} backward", grad, x)


def _gradient_like(what: str, parameter: Maybe, wanted: bool) -> Maybe:
    if not wanted:
        return None
    if parameter is None:
        raise ArgumentError(f"{what} backward: output_mask asks for the gradient of an absent parameter")
    return parameter.like()


@rule("_fused_rms_norm")
def rms_norm(
    x: TensorSpec, normalized_shape: Sequence[Any], weight: Maybe, eps: float | None
) -> tuple[TensorSpec, TensorSpec]:
    lead = _leading_shape("rms_norm", x, normalized_shape, weight)
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
        raise ArgumentError("rms_norm: normalized_shape must not be empty")
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
    x: TensorSpec,
    weight: Maybe,
    bias: Maybe,
    N: Size,
    C: Size,
    HxW: Size,
    group: Size,
    eps: float,
) -> tuple[TensorSpec, ...]:
    _check_groups(x, N, C, HxW, group, weight, bias)
    result = _keep_format(x)
    if not _is_dense(x) and not holds("group_norm_takes_any_strides"):
        raise ArgumentError(f"group_norm: {x} is neither contiguous nor channels-last")
    dtype = _statistics_dtype("group_norm", x, weight, bias)
    statistics = x.like((N, group), dtype=dtype)
    return result, statistics, statistics


def _check_groups(
    x: TensorSpec,
    batch: Size,
    channels: Size,
    size: Size,
    groups: Size,
    *parameters: Maybe,
) -> None:
    if groups <= 0 or channels % groups != 0:
        raise ArgumentError(
            f"group_norm: channels must be divisible by num_groups, got {channels} and {groups}"
        )
    if x.numel != batch * channels * size:
        raise ShapeMismatch(f"group_norm: expected {batch} * {channels} * {size} elements, got {x}")
    for parameter in parameters:
        if parameter is not None and (parameter.ndim != 1 or parameter.shape[0] != channels):
            raise ShapeMismatch(f"group_norm: expected a parameter of {channels} elements, got {parameter}")


@rule("native_group_norm_backward")
def group_norm_backward(
    grad: TensorSpec, x: TensorSpec, mean: TensorSpec, rstd: TensorSpec, weight: Maybe, N: Any, C: Any, HxW: Any,
    group: Any, output_mask: Mask,
) -> tuple[Maybe, ...]:  # fmt: skip
    _check_groups(x, N, C, HxW, group, weight)
    _check_gradient("group_norm", grad, x)
    for_input, for_weight, for_bias = output_mask
    if weight is None and holds("group_norm_makes_absent_gradients"):
        weight = x.like((C,))
    # The gradient of the bias is made like the weight, so it needs a weight.
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
            raise ShapeMismatch(
                f"batch_norm: expected statistics of one element for each channel, got {statistics}"
            )
    for parameter in (weight, bias, mean, var):
        if parameter is not None and not _is_enough(parameter, channels):
            raise ShapeMismatch(f"batch_norm: expected a parameter of {channels} elements, got {parameter}")
    if not training and (mean is None or var is None):
        raise ArgumentError("batch_norm: evaluation needs running statistics")
    if x.device.type != "cpu":
        statistics = x.like((channels,), dtype=accumulation_dtype(x.dtype))
        return preserved_copy(x), statistics, statistics
    if training and x.is_empty:
        raise ShapeMismatch(f"batch_norm: expected at least one value per channel, got {x}")
    dtype = _parameter_dtype(x, weight, bias, mean, var)
    statistics = x.like((channels if training else 0,), dtype=dtype)
    return _in_format_of(x, weight, bias, mean, var), statistics, statistics


def _is_enough(parameter: TensorSpec, channels: object) -> bool:
    """The CPU kernel reads one element for each channel; further elements are ignored."""
    return bool(
        parameter.numel >= channels if parameter.device.type == "cpu" else parameter.numel == channels
    )


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
        raise DtypeError(
            f"batch_norm: expected parameters of dtype {x.dtype}, or float32 for 16-bit inputs; the input is {x}"
        )
    return torch.float32


@decomposition("batch_norm")
def decompose_batch_norm(
    x: torch.Tensor, weight: MaybeTensor, bias: MaybeTensor, mean: MaybeTensor, var: MaybeTensor, training: bool,
    momentum: float, eps: float, cudnn_enabled: bool,
) -> Any:  # fmt: skip
    """C++ reads the second size without checking the rank: for a vector it would interpret random bits as a symbol."""
    if x.dim() >= 2:
        if x.device.type != "cpu" or not is_recorded_symbolically():
            return NotImplemented
        result = declare_writes_of_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
        return result if result is NotImplemented else result[0]
    if x.dim() == 0 or x.shape[0] != 0:
        raise DimensionError(f"batch_norm: needs a batch and channels, got {x.dim()} dimensions")
    result = x.clone()
    if weight is not None:
        result = result * weight[0]
    return result if bias is None else result + bias[0]


@decomposition("native_batch_norm")
def declare_writes_of_batch_norm(
    x: torch.Tensor, weight: MaybeTensor, bias: MaybeTensor, mean: MaybeTensor, var: MaybeTensor, training: bool,
    momentum: float, eps: float,
) -> Any:  # fmt: skip
    """The operators whose schemas declare that running statistics are written, as graphs for symbolic sizes have them."""
    if not is_recorded_symbolically() or (mean is None) is not (var is None):
        return NotImplemented
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    if training:
        return aten._native_batch_norm_legit(x, weight, bias, mean, var, training, momentum, eps)
    return aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, momentum, eps)


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
        parameter = x.like(
            (x.shape[1],), dtype=weight.dtype if weight is not None else accumulation_dtype(x.dtype)
        )
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
    save_var: Maybe, epsilon: float, reserve: object,
) -> tuple[TensorSpec, ...]:  # fmt: skip
    refuse_cpu("cudnn_batch_norm backward", x)
    return x.like(stride=suggested_strides(x.shape, x)), weight.like(), weight.like()
