"""Convolutions: sizes and checks, forward and backward, decompositions for symbolic sizes, batching."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.batching import BatchLevel, at_one_level, batching_rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dims import for_each
from understudy.ops.shared.dtypes import FLOATS, INTEGERS, check_cpu_dtype, check_one_dtype
from understudy.ops.shared.layouts import (
    is_provably_row_major,
    looks_channels_last,
    with_height,
)
from understudy.ops.traits.host_kernels import Results, steps_of
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
            raise ShapeMismatch(f"convolution: a weight has 3 to 5 dimensions, got {weight}")
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
                raise ArgumentError(f"convolution: {name} {getattr(self, name)} is negative")
        for name in ("stride", "dilation"):
            if any(number <= 0 for number in getattr(self, name)):
                raise ArgumentError(f"convolution: {name} {getattr(self, name)} is not positive")
        if self.groups <= 0:
            raise ArgumentError(f"convolution: {self.groups} groups")

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
            raise ShapeMismatch(f"convolution: {bias} is no bias for {channels} channels")
    if x.shape[1] != 0 and any(size == 0 for size in weight.shape[2:]):
        raise ShapeMismatch(f"convolution: the kernel of {weight} has no elements")
    if any(size == 0 for size in x.shape[2:]) and x.shape[0] != 0 and x.shape[1] != 0:
        raise ShapeMismatch(f"convolution: {x} has no elements, but a batch and channels")
    if window.transposed:
        _check_output_padding(window)
    else:
        _check_kernel_fits(x, weight, window)


def _check_channels(x: TensorSpec, weight: TensorSpec, window: Window) -> None:
    groups = window.groups
    if weight.shape[0] < groups or weight.shape[0] % groups != 0:
        raise ShapeMismatch(
            f"convolution: the first dimension of {weight} can't be divided into {groups} groups"
        )
    wanted = weight.shape[0] if window.transposed else weight.shape[1] * groups
    if x.shape[1] != wanted:
        raise ShapeMismatch(
            f"convolution: {weight} in {groups} groups wants {wanted} channels, {x} has {x.shape[1]}"
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
    _check_kernel_dtype(x, window)
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
            raise ShapeMismatch(f"convolution: the result of {x} and {weight} would have shape {list(shape)}")
    if weight.shape[1] == 0:
        raise ShapeMismatch(f"convolution: the weight {weight} makes no channels")


def _check_kernel_dtype(x: TensorSpec, window: Window) -> None:
    is_dilated = any(step != 1 for step in window.dilation)
    accepted = {torch.int64} if window.transposed or is_dilated else INTEGERS
    if x.dtype not in FLOATS and x.dtype not in accepted and not x.is_empty:
        check_cpu_dtype("convolution", x, accepted)


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
    # Asked in these cases only, because it adds guards on symbolic sizes.
    with_onednn = on_cpu and (in_channels_last or (for_bias and not for_weight)) and uses_onednn(x, weight, window)
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


@batching_rule("convolution")
@at_one_level
def batch_convolution(level: BatchLevel, x: torch.Tensor, weight: torch.Tensor, bias: Any, *settings: Any) -> Any:
    """With one kernel for all entries, the batch of vmap is folded into the batch; with a kernel for each, into the
    groups."""
    if not level.is_batch(weight) and not level.is_batch(bias):
        inside = level.inside(x)
        result = aten.convolution(inside.flatten(0, 1), weight, bias, *settings)
        return result.reshape(*inside.shape[:2], *result.shape[1:])
    *others, groups = settings
    kernels = level.inside(weight)
    size = kernels.shape[0]
    result = aten.convolution(
        _among_channels(level.inside(x)), kernels.flatten(0, 1), None, *others, size * groups
    )
    result = _from_channels(result, size)
    if bias is not None:
        result = result + level.inside(bias).reshape(size, 1, -1, *[1] * (x.dim() - 2))
    return result


@batching_rule("convolution_backward")
@at_one_level
def batch_convolution_backward(
    level: BatchLevel, gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: list[object], *settings: Any
) -> tuple[object, ...]:
    *others, groups, wanted = settings
    has_own = level.is_batch(weight)
    results: list[Any] = [None, None, None]
    given, inside = level.inside(gradient), level.inside(x)
    size = given.shape[0]
    if wanted[0] and not has_own:
        flat = given.flatten(0, 1), inside.flatten(0, 1), weight, None
        found = aten.convolution_backward(*flat, *others, groups, [True, False, False])[0]
        results[0] = found.reshape(inside.shape)
    if wanted[1] or (wanted[0] and has_own):
        kernels = level.inside(weight)
        grouped = _among_channels(given), _among_channels(inside), kernels.flatten(0, 1), None
        mask = [wanted[0] and has_own, wanted[1], False]
        of_x, of_weight, _ = aten.convolution_backward(*grouped, *others, size * groups, mask)
        results[0] = _from_channels(of_x, size) if mask[0] else results[0]
        results[1] = of_weight.reshape(kernels.shape) if mask[1] else None
    if wanted[2]:
        results[2] = given.sum([1, *range(3, given.dim())])
    return tuple(results)


def _among_channels(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, 1).flatten(1, 2)


def _from_channels(tensor: torch.Tensor, size: Any) -> torch.Tensor:
    count, channels, *rest = tensor.shape
    return tensor.reshape(count, size, channels // size, *rest).transpose(0, 1)


# --- memory of oneDNN's kernels: copies of images and weights with channels in blocks
#
# Blocked x, w and result, then the plain result. Images whose channels are the last dimension are taken as they are. What
# threads add up in is not counted, and half types are left out: both are the choice of the kernel for a processor.

BLOCKS = {"AVX512": 16, "AVX2": 8}
"""Channels of a block, by the instructions of this processor."""
FEW_CHANNELS, HALF_BLOCK = 3, 8
"""Images of so few channels are taken as they are; images of less than a block are filled up to this."""


def _is_laid_out_in_blocks(x: TensorSpec, weight: TensorSpec, window: Window) -> bool:
    if not torch.backends.mkldnn.enabled or torch.backends.cpu.get_cpu_capability() not in BLOCKS:
        return False
    is_plain = x.dtype is torch.float32 and not x.is_empty and not _in_channels_last(x, weight, window)
    return is_plain and uses_onednn(x, weight, window)


def _block() -> int:
    return BLOCKS[torch.backends.cpu.get_cpu_capability()]


def _fill(shape: Sequence[Any], channels: Sequence[int] = (), block: int = 0) -> int:
    """Bytes of a float32 tensor, with its dimensions of channels filled up to blocks."""
    block = block or _block()
    sizes = [int(size) for size in shape]
    return 4 * prod(-(-size // block) * block if dim in channels else size for dim, size in enumerate(sizes))


def _is_narrow(shape: Sequence[Any]) -> bool:
    """Of an image: less channels than a block."""
    return bool(shape[1] < _block())


def _fill_image(shape: Sequence[Any]) -> int:
    """The copy of an image that the gradient of the weight is computed with."""
    if shape[1] <= FEW_CHANNELS:
        return 0
    return _fill(shape, (1,), HALF_BLOCK if _is_narrow(shape) else 0)


@steps_of("convolution")
def of_convolution(
    results: Results, x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None, *settings: Any, **out: object
) -> tuple[int, ...]:
    """A transposed one is computed as a gradient, and copied once more."""
    window = Window.of(weight, *settings)
    if not _is_laid_out_in_blocks(x, weight, window):
        return ()
    transposed, groups = window.transposed, window.groups
    plain, is_plain = _fill(results[0].shape), not transposed and _is_narrow(x.shape)
    weights = _fill(weight.shape, () if groups > 1 else (0,) if is_plain else (0, 1))
    image = 0 if is_plain else _fill(x.shape, (1,))
    if transposed:
        return (max(image + weights, 2 * plain),)
    blocked = _fill(results[0].shape, (1,))
    return (max(image + weights + blocked - plain, blocked),)


@steps_of("convolution_backward")
def of_convolution_backward(
    results: Results, grad: TensorSpec, x: TensorSpec, weight: TensorSpec, bias_sizes: Sizes | None, *settings: Any,
    **out: object,
) -> tuple[int, ...]:  # fmt: skip
    """First the gradient of the input, then that of the weight, each in blocks and then plain."""
    output_mask = settings[-1]
    window = Window.of(weight, *settings[:-1])
    if not _is_laid_out_in_blocks(x, weight, window):
        return ()
    transposed, groups = window.transposed, window.groups
    image, result = (grad, x) if transposed else (x, grad)
    made_input, made_weight, made_bias = (
        _fill(shape) if is_wanted else 0
        for shape, is_wanted in zip((x.shape, weight.shape, bias_sizes or ()), output_mask, strict=True)
    )
    of_image, of_result = _fill_image(image.shape), _fill(result.shape, (1,))
    moments = [0]
    if made_input:
        read = (0 if _is_narrow(grad.shape) else of_image) if transposed else of_result
        blocked = of_result if transposed else _fill(x.shape, (1,) if of_image else ())
        moments += [read + _fill(weight.shape, (0, 1) if groups == 1 else ()) + blocked, made_input + blocked]
    if made_weight:
        blocked = _fill(weight.shape, (0, 1) if groups == 1 and not _is_narrow(image.shape) else ())
        moments += [made_input + max(of_image + of_result + blocked, made_weight + blocked + made_bias) + made_bias]
    return (max(0, max(moments) - made_input - made_weight - made_bias),)
