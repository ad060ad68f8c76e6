"""Convolutions, forward and backward.

A kernel library is chosen by sizes and dtype, and all that can be seen of the choice is the layout of the results:

    1-D      computed as 2-D of height 1, on a contiguous copy of the input
    2-D      channels-last if the input or the weight seems to be; otherwise contiguous
    3-D      the same where oneDNN (or cuDNN) computes, always contiguous where torch's own loops do
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.rules.convolution_sizes import Window, check_operands, output_shape
from understudy.rules.dtype_sets import FLOATS, INTEGERS, check_cpu_dtype
from understudy.rules.layouts import is_surely_row_major, looks_channels_last, suggested_strides
from understudy.rules.registry import rule
from understudy.spec import (
    TensorSpec,
    channels_last_strides,
    contiguous_strides,
    is_channels_last_contiguous,
    preserved_copy,
    same_shape,
)
from understudy.spec.tensor_spec import Size

Numbers = Sequence[Any]


@rule("convolution")
def convolution(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, stride: Numbers, padding: Numbers,
    dilation: Numbers, transposed: bool, output_padding: Numbers, groups: Any,
) -> TensorSpec:  # fmt: skip
    window = Window.of(weight, stride, padding, dilation, transposed, output_padding, groups)
    return _convolved(x, weight, bias, window)


@rule("_convolution", "_convolution.deprecated")
def convolution_with_settings(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, stride: Numbers, padding: Numbers,
    dilation: Numbers, transposed: bool, output_padding: Numbers, groups: Any, *settings: bool,
) -> TensorSpec:  # fmt: skip
    return convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


@rule("mkldnn_convolution")
def mkldnn_convolution(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, padding: Numbers, stride: Numbers,
    dilation: Numbers, groups: Any,
) -> TensorSpec:  # fmt: skip
    return convolution(x, weight, bias, stride, padding, dilation, False, (0,), groups)


def _convolved(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, window: Window) -> TensorSpec:
    check_operands(x, weight, bias, window)
    _check_kernel_dtype(x, window)
    shape = output_shape(x, weight, window)
    if window.transposed and any(size < 0 for size in shape[2:]):
        raise ShapeMismatch(f"convolution: the result of {x} and {weight} would have shape {list(shape)}")
    if _are_plain(x, weight) or x.is_empty:
        return x.like(shape)
    return x.like(shape, stride=_strides(shape, _in_channels_last(x, weight, window)))


def _check_kernel_dtype(x: TensorSpec, window: Window) -> None:
    accepted = {torch.int64} if window.transposed else INTEGERS
    if x.dtype not in FLOATS and x.dtype not in accepted and not x.is_empty:
        check_cpu_dtype("convolution", x, accepted)


# --- the layout of results


def _are_plain(x: TensorSpec, weight: TensorSpec) -> bool:
    """Whether all results are contiguous, whatever the symbols are, and whoever computes them."""
    return (x.ndim > 3 or x.is_symbolic) and is_surely_row_major(x) and is_surely_row_major(weight)


def _in_channels_last(x: TensorSpec, weight: TensorSpec, window: Window) -> bool:
    if x.ndim == 3:
        # A contiguous input is not copied, and with one channel may have the strides of both formats.
        seen = x if x.is_contiguous else x.like()
        x, weight = _with_height(seen), _with_height(weight)
    if not (looks_channels_last(x) or looks_channels_last(weight)):
        return False
    if x.device.type == "cpu":
        return x.ndim == 4 or uses_onednn(x, weight, window)
    return x.dtype is not torch.float64  # cuDNN


def _with_height(spec: TensorSpec) -> TensorSpec:
    """A 1-D kernel (or signal) as a 2-D one of height 1."""
    (a, b, size), (step_a, step_b, step) = spec.shape, spec.stride
    return spec.like((a, b, 1, size), stride=(step_a, step_b, size * step, step))


def _strides(shape: Size, in_channels_last: bool) -> Size:
    if not in_channels_last:
        return contiguous_strides(shape)
    if len(shape) > 3:
        return channels_last_strides(shape)
    a, b, _, c = channels_last_strides((*shape[:2], 1, shape[2]))
    return (a, b, c)


ONEDNN_LEAST_ELEMENTS = 20480


def uses_onednn(x: TensorSpec, weight: TensorSpec, window: Window) -> bool:
    """Whether eager gives a CPU convolution to oneDNN: not for few elements, nor (on one thread) 1x1 kernels."""
    if window.transposed and any(
        extra >= step for extra, step in zip(window.output_padding, window.stride, strict=True)
    ):
        return False
    if x.dtype is not torch.float32:
        return x.dtype in _onednn_halves()
    batch, channels, *spatial = x.shape
    height, width = (1, weight.shape[2]) if weight.ndim == 3 else weight.shape[-2:]
    if not (
        any(step != 1 for step in window.stride)
        or any(step != 1 for step in window.dilation)
        or width != 1
        or height != 1
        or torch.get_num_threads() > 1
        or batch >= 16
    ):
        return False
    if window.groups > 1 or (width > 3 and height > 3) or batch > 1:
        return True
    rows, columns = (1, spatial[0]) if len(spatial) == 1 else spatial[:2]
    return bool(batch * channels * rows * columns > ONEDNN_LEAST_ELEMENTS)


@functools.cache
def _onednn_halves() -> frozenset[torch.dtype]:
    """The 16-bit dtypes that this machine's oneDNN computes in: a matter of its instruction set."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(dtype for dtype, is_supported in supported.items() if is_supported())


# --- backward


@rule("convolution_backward")
def convolution_backward(
    grad: TensorSpec, x: TensorSpec, weight: TensorSpec, bias_sizes: Numbers | None, stride: Numbers,
    padding: Numbers, dilation: Numbers, transposed: bool, output_padding: Numbers, groups: Any,
    output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:  # fmt: skip
    window = Window.of(weight, stride, padding, dilation, transposed, output_padding, groups)
    check_operands(x, weight, None, window)
    shape = output_shape(x, weight, window)
    if not same_shape(grad.shape, shape):
        raise ShapeMismatch(
            f"convolution backward: {grad} is no gradient for a result of shape {list(shape)}"
        )
    for_input, for_weight, for_bias = output_mask
    bias = grad.like((shape[1],)) if for_bias else None
    if x.is_symbolic and x.dtype in FLOATS and (for_weight or not for_bias) and _are_plain(x, weight):
        return x.like() if for_input else None, weight.like() if for_weight else None, bias
    if x.is_empty:
        return _empty_gradients(x, weight, output_mask, bias)
    check_cpu_dtype("convolution backward", x, FLOATS)
    in_channels_last = _in_channels_last(x, weight, window)
    on_cpu = x.device.type == "cpu"
    # It matters in these cases only, and for symbolic sizes it is a question that would become a guard.
    with_onednn = on_cpu and (in_channels_last or (for_bias and not for_weight)) and uses_onednn(x, weight, window)
    if for_bias and with_onednn and not for_weight:
        # oneDNN computes both at once; what nobody asked for is left as computed, a 1-D kernel as a 2-D one.
        for_weight = True
        weight = _with_height(weight) if weight.ndim == 3 else weight
    return (
        x.like(stride=_strides(x.shape, in_channels_last)) if for_input else None,
        _gradient_of_weight(weight, window, in_channels_last, with_onednn or not on_cpu)
        if for_weight
        else None,
        bias,
    )


def _empty_gradients(
    x: TensorSpec, weight: TensorSpec, output_mask: Sequence[bool], bias: TensorSpec | None
) -> tuple[TensorSpec | None, ...]:
    return (
        preserved_copy(x) if output_mask[0] else None,
        preserved_copy(weight) if output_mask[1] else None,
        bias,
    )


def _gradient_of_weight(
    weight: TensorSpec, window: Window, in_channels_last: bool, by_library: bool
) -> TensorSpec:
    dilated = any(step != 1 for step in window.dilation)
    if in_channels_last and not by_library and (window.transposed or not dilated):
        # torch's own loops follow the copy of the weight, and a 1x1 kernel in both formats is not copied.
        seen = _with_height(weight) if weight.ndim == 3 else weight
        if is_channels_last_contiguous(seen.shape, seen.stride):
            in_channels_last = looks_channels_last(seen)
    return weight.like(stride=_strides(weight.shape, in_channels_last))


# --- composites, which arrive whole in inference mode


@rule("conv1d", "conv2d", "conv3d")
def conv(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None, stride: Numbers = (1,),
    padding: Numbers = (0,), dilation: Numbers = (1,), groups: Any = 1,
) -> Any:  # fmt: skip
    return _maybe_unbatched(x, weight, bias, stride, padding, dilation, False, (0,), groups)


@rule("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
def conv_transpose(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None, stride: Numbers = (1,),
    padding: Numbers = (0,), output_padding: Numbers = (0,), groups: Any = 1, dilation: Numbers = (1,),
) -> Any:  # fmt: skip
    return _maybe_unbatched(x, weight, bias, stride, padding, dilation, True, output_padding, groups)


@rule("conv1d.padding", "conv2d.padding", "conv3d.padding")
def conv_with_named_padding(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None, stride: Numbers = (1,),
    padding: str = "valid", dilation: Numbers = (1,), groups: Any = 1,
) -> Any:  # fmt: skip
    if padding == "valid":
        return conv(x, weight, bias, stride, (0,), dilation, groups)
    if padding != "same":
        raise ArgumentError(f"convolution: padding is 'valid' or 'same', not {padding!r}")
    if any(step != 1 for step in stride):
        raise ArgumentError(f"convolution: padding='same' goes with a stride of 1, not {list(stride)}")
    spatial = weight.ndim - 2
    steps = tuple(dilation) * spatial if len(dilation) == 1 else tuple(dilation)
    totals = [step * (size - 1) for step, size in zip(steps, weight.shape[2:], strict=True)]
    # Only the same on both sides can be left to the convolution; the rest of an odd total is padded before.
    rests = [total % 2 for total in totals]
    if any(rests):
        lead = x.ndim - spatial
        shape = (*x.shape[:lead], *(size + rest for size, rest in zip(x.shape[lead:], rests, strict=True)))
        x = x.like(shape, stride=suggested_strides(shape, x))
    return conv(x, weight, bias, stride, [total // 2 for total in totals], dilation, groups)


def _maybe_unbatched(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, *window: Any) -> Any:
    if x.is_complex or x.conj or weight.conj:
        return NotImplemented
    if x.ndim != weight.ndim - 1:
        return convolution(x, weight, bias, *window)
    batched = x.like((1, *x.shape), stride=(x.shape[0] * x.stride[0], *x.stride))
    result = convolution(batched, weight, bias, *window)
    return result.like(result.shape[1:], stride=result.stride[1:])
