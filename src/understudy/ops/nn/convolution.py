"""Convolutions: sizes and checks, forward and backward, decompositions for symbolic sizes, batching."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dims import for_each
from understudy.ops.shared.dtypes import FLOATS, check_one_dtype
from understudy.ops.shared.layouts import (
    is_provably_row_major,
    looks_channels_last,
    with_height,
)
from understudy.ops.traits.scratch import byte_count, host_scratch
from understudy.shapes.node import Shape, Size, Sizes
from understudy.spec import (
    TensorSpec,
    channels_last_strides,
    contiguous_strides,
    is_channels_last_contiguous,
    preserved_copy,
    same_shape,
)

Tensor = torch.Tensor
aten = torch.ops.aten


class Window(NamedTuple):
    """How the kernel moves: one number for each spatial dimension, but for the last two fields."""

    stride: Shape
    padding: Shape
    dilation: Shape
    output_padding: Shape
    transposed: bool
    groups: Any

    @classmethod
    def of(
        cls, weight: TensorSpec, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any,
        groups: object,
    ) -> Window:  # fmt: skip
        spatial = weight.ndim - 2
        if spatial not in (1, 2, 3):
            raise ShapeMismatch(f"convolution: expected a weight of 3 to 5 dimensions, got {weight}")
        window = cls(
            for_each(stride, spatial, "convolution: stride"),
            for_each(padding, spatial, "convolution: padding"),
            for_each(dilation, spatial, "convolution: dilation"),
            for_each(output_padding, spatial, "convolution: output_padding"),
            transposed,
            groups,
        )
        window.check()
        return window

    def check(self) -> None:
        for name in ("padding", "output_padding"):
            if any(number < 0 for number in getattr(self, name)):
                raise ArgumentError(f"convolution: {name} must be at least 0, got {getattr(self, name)}")
        for name in ("stride", "dilation"):
            if any(number <= 0 for number in getattr(self, name)):
                raise ArgumentError(f"convolution: {name} must be positive, got {getattr(self, name)}")
        if self.groups <= 0:
            raise ArgumentError(f"convolution: groups must be positive, got {self.groups}")

    def output_sizes(self, sizes: Sizes, kernel: Sizes) -> list[Size]:
        rows = zip(sizes, kernel, self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        if self.transposed:
            return [(n - 1) * s - 2 * p + d * (k - 1) + extra + 1 for n, k, s, p, d, extra in rows]
        return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in rows]


def output_shape(x: TensorSpec, weight: TensorSpec, window: Window) -> Shape:
    spatial = window.output_sizes(x.shape[2:], weight.shape[2:])
    channels = weight.shape[1] * window.groups if window.transposed else weight.shape[0]
    if x.shape[1] == 0:  # as eager does for empty inputs
        channels = 0
    return (x.shape[0], channels, *spatial)


def check_operands(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, window: Window) -> None:
    if x.ndim != weight.ndim:
        raise ShapeMismatch(f"convolution: {x} and the weight {weight} differ in the number of dimensions")
    check_one_dtype("convolution", x, weight, bias)
    _check_channels(x, weight, window)
    if bias is not None:
        channels = weight.shape[1] * window.groups if window.transposed else weight.shape[0]
        if bias.ndim != 1 or bias.shape[0] != channels:
            raise ShapeMismatch(f"convolution: expected a bias of {channels} elements, got {bias}")
    if x.shape[1] != 0 and any(size == 0 for size in weight.shape[2:]):
        raise ShapeMismatch(f"convolution: the kernel of {weight} has no elements")
    if any(size == 0 for size in x.shape[2:]) and x.shape[0] != 0 and x.shape[1] != 0:
        raise ShapeMismatch(f"convolution: expected spatial sizes of at least 1, got {x}")
    if window.transposed:
        _check_output_padding(window)
    else:
        _check_kernel_fits(x, weight, window)


def _check_channels(x: TensorSpec, weight: TensorSpec, window: Window) -> None:
    groups = window.groups
    if weight.shape[0] < groups or weight.shape[0] % groups != 0:
        raise ShapeMismatch(
            f"convolution: the first size of {weight} must be divisible by groups, got groups={groups}"
        )
    wanted = weight.shape[0] if window.transposed else weight.shape[1] * groups
    if x.shape[1] != wanted:
        raise ShapeMismatch(
            f"convolution: expected {wanted} input channels for {weight} and groups={groups}, got {x.shape[1]} in {x}"
        )


def _check_output_padding(window: Window) -> None:
    for extra, step, dilation in zip(window.output_padding, window.stride, window.dilation, strict=True):
        if extra >= step and extra >= dilation:
            raise ArgumentError(
                f"convolution: output_padding {window.output_padding} must be smaller than the stride "
                f"{window.stride} or the dilation {window.dilation}"
            )


def _check_kernel_fits(x: TensorSpec, weight: TensorSpec, window: Window) -> None:
    for size, kernel, padding, dilation in zip(
        x.shape[2:], weight.shape[2:], window.padding, window.dilation, strict=True
    ):
        if size + 2 * padding < dilation * (kernel - 1) + 1:
            raise ShapeMismatch(f"convolution: the kernel of {weight} is larger than the padded input {x}")


# --- Convolutions, forward and backward ---------------------------------------------------------------------
# A kernel library is chosen by sizes and dtype; the choice is visible only in the strides of the results:
#
#     1-D      computed as 2-D of height 1, on a contiguous copy of the input
#     2-D      channels-last if the input or the weight looks like it; otherwise contiguous
#     3-D      the same where oneDNN (or cuDNN) computes, always contiguous where torch's own loops do


@rule("convolution")
def convolution(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, stride: Sizes, padding: Sizes,
    dilation: Sizes, transposed: bool, output_padding: Sizes, groups: object,
) -> TensorSpec:  # fmt: skip
    window = Window.of(weight, stride, padding, dilation, transposed, output_padding, groups)
    return _convolve(x, weight, bias, window)


@rule("mkldnn_convolution")
def mkldnn_convolution(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, padding: Sizes, stride: Sizes,
    dilation: Sizes, groups: object,
) -> TensorSpec:  # fmt: skip
    return convolution(x, weight, bias, stride, padding, dilation, False, (0,), groups)


def _convolve(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, window: Window) -> TensorSpec:
    check_operands(x, weight, bias, window)
    shape = output_shape(x, weight, window)
    if window.transposed:
        _check_makes_elements(x, weight, window, shape)
    if _are_plain(x, weight) or x.is_empty:
        return x.like(shape)
    return x.like(shape, stride=_strides(shape, _in_channels_last(x, weight, window)))


def _check_makes_elements(x: TensorSpec, weight: TensorSpec, window: Window, shape: Shape) -> None:
    """A transposed convolution may make nothing of nothing; of something, only where oneDNN computes it."""
    if any(size < 1 for size in shape[2:]):
        takes_no_size = x.is_empty or x.device.type != "cpu" or uses_onednn(x, weight, window)
        if not takes_no_size or any(size < 0 for size in shape[2:]):
            raise ShapeMismatch(
                f"convolution: expected output sizes of at least 1, got {list(shape)} for {x} and {weight}"
            )
    if weight.shape[1] == 0:
        raise ShapeMismatch(f"convolution: weight {weight} has zero output channels")


# --- the layout of results


def _are_plain(x: TensorSpec, weight: TensorSpec) -> bool:
    """Whether all results are contiguous for all values of the symbols and all kernel libraries."""
    return (x.ndim > 3 or x.is_symbolic) and is_provably_row_major(x) and is_provably_row_major(weight)


def _in_channels_last(x: TensorSpec, weight: TensorSpec, window: Window) -> bool:
    if x.ndim == 3:
        # A contiguous input is not copied, and with one channel may have the strides of both formats.
        seen = x if x.is_contiguous else x.like()
        x, weight = with_height(seen), with_height(weight)
    if not (looks_channels_last(x) or looks_channels_last(weight)):
        return False
    if x.device.type == "cpu":
        return x.ndim == 4 or uses_onednn(x, weight, window)
    return x.dtype is not torch.float64  # cuDNN


def _strides(shape: Shape, in_channels_last: bool) -> Shape:
    if not in_channels_last:
        return contiguous_strides(shape)
    if len(shape) > 3:
        return channels_last_strides(shape)
    a, b, _, c = channels_last_strides((*shape[:2], 1, shape[2]))
    return (a, b, c)


ONEDNN_LEAST_ELEMENTS = 20480


def uses_onednn(x: TensorSpec, weight: TensorSpec, window: Window) -> bool:
    """Whether eager uses oneDNN for a CPU convolution: not for few elements, nor (on one thread) for 1x1 kernels."""
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
    """The 16-bit dtypes that oneDNN supports on this machine, which depends on its instruction set."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return frozenset(dtype for dtype, is_supported in supported.items() if is_supported())


# --- backward


@rule("convolution_backward")
def convolution_backward(
    grad: TensorSpec, x: TensorSpec, weight: TensorSpec, bias_sizes: Sizes | None, stride: Sizes,
    padding: Sizes, dilation: Sizes, transposed: bool, output_padding: Sizes, groups: object,
    output_mask: Sequence[bool],
) -> tuple[TensorSpec | None, ...]:  # fmt: skip
    window = Window.of(weight, stride, padding, dilation, transposed, output_padding, groups)
    check_operands(x, weight, None, window)
    shape = output_shape(x, weight, window)
    if not same_shape(grad.shape, shape):
        raise ShapeMismatch(
            f"convolution backward: gradient shape {grad} does not match output shape {list(shape)}"
        )
    for_input, for_weight, for_bias = output_mask
    bias = grad.like((shape[1],)) if for_bias else None
    if x.is_symbolic and x.dtype in FLOATS and (for_weight or not for_bias) and _are_plain(x, weight):
        return x.like() if for_input else None, weight.like() if for_weight else None, bias
    if x.is_empty:
        return _empty_gradients(x, weight, output_mask, bias)
    in_channels_last = _in_channels_last(x, weight, window)
    on_cpu = x.device.type == "cpu"
    # Asked in these cases only, because it adds guards on symbolic sizes.
    with_onednn = (
        on_cpu and (in_channels_last or (for_bias and not for_weight)) and uses_onednn(x, weight, window)
    )
    if for_bias and with_onednn and not for_weight:
        # oneDNN computes both gradients at once, and returns both; that of a 1-D kernel is then still 2-D.
        for_weight = True
        weight = with_height(weight) if weight.ndim == 3 else weight
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
        # torch's own loops follow the strides of the copied weight; a 1x1 kernel fits both formats, and is not copied.
        seen = with_height(weight) if weight.ndim == 3 else weight
        if is_channels_last_contiguous(seen.shape, seen.stride):
            in_channels_last = looks_channels_last(seen)
    return weight.like(stride=_strides(weight.shape, in_channels_last))


# --- composites, which arrive whole in inference mode


@rule("conv1d", "conv2d", "conv3d")
def conv(
    x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None, stride: Sizes = (1,),
    padding: Sizes = (0,), dilation: Sizes = (1,), groups: object = 1,
) -> Any:  # fmt: skip
    window = stride, padding, dilation, False, (0,), groups
    if x.is_complex or x.conj or weight.conj:
        return NotImplemented
    if x.ndim != weight.ndim - 1:
        return convolution(x, weight, bias, *window)
    batched = x.like((1, *x.shape), stride=(x.shape[0] * x.stride[0], *x.stride))
    result = convolution(batched, weight, bias, *window)
    return result.like(result.shape[1:], stride=result.stride[1:])


# --- decompositions for symbolic sizes ----------------------------------------------------------------------


@decomposition("_convolution_mode")
def decompose_convolution_with_named_padding(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: str, dilation: Any, groups: object
) -> Any:
    """For `same`, C++ adds a guard for each dimension on whether its padding is symmetric; one guard for all is enough."""
    sizes = weight.shape[2:]
    if padding != "same" or len(dilation) != len(sizes) or any(step != 1 for step in stride):
        return NotImplemented
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return NotImplemented
    totals = [step * (size - 1) for step, size in zip(dilation, sizes, strict=True)]
    rests = [total % 2 for total in totals]
    if not functools.reduce(operator.or_, [rest != 0 for rest in rests]):
        return NotImplemented
    x = aten.constant_pad_nd.default(x, [each for rest in reversed(rests) for each in (0, rest)])
    sides = [total // 2 for total in totals]
    return aten.convolution.default(x, weight, bias, stride, sides, dilation, False, [0] * len(sizes), groups)


# --- memory of oneDNN's float32 kernels: copies of operands with channels in blocks

VECTOR_INSTRUCTIONS = ("AVX512", "AVX2")
"""Processors whose kernels need blocks of channels."""
FEW_CHANNELS = 3
"""Images with at most so many channels are read without a copy."""


def _has_blocks(x: TensorSpec, weight: TensorSpec, window: Window) -> bool:
    if (
        not torch.backends.mkldnn.enabled
        or torch.backends.cpu.get_cpu_capability() not in VECTOR_INSTRUCTIONS
    ):
        return False
    is_plain = x.dtype is torch.float32 and not x.is_empty and not _in_channels_last(x, weight, window)
    return is_plain and uses_onednn(x, weight, window)


def _copy_bytes(image: TensorSpec) -> int:
    return byte_count(image) if image.shape[1] > FEW_CHANNELS else 0


@host_scratch("convolution")
def convolution_scratch(
    results: Sequence[TensorSpec], x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, *settings: Any,
    **out: object,
) -> int:  # fmt: skip
    """Copies of image and weight. A transposed convolution also copies its result twice."""
    window = Window.of(weight, *settings)
    if not _has_blocks(x, weight, window):
        return 0
    operands = _copy_bytes(x) + byte_count(weight)
    return max(operands, 2 * byte_count(results[0])) if window.transposed else operands


@host_scratch("convolution_backward")
def convolution_backward_scratch(
    results: Sequence[TensorSpec], grad: TensorSpec, x: TensorSpec, weight: TensorSpec, bias_sizes: Sizes | None,
    *settings: Any, **out: object,
) -> int:  # fmt: skip
    """Copies of gradient and image."""
    window = Window.of(weight, *settings[:-1])
    return _copy_bytes(x) + _copy_bytes(grad) if _has_blocks(x, weight, window) else 0
