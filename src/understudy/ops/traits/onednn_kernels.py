"""Memory that oneDNN's convolutions take on the CPU: copies of images and weights with channels in blocks.

    x, w -> blocked x, w, result -> plain result            the plain ones are the tensors of the program

Images whose channels are the last dimension are taken as they are. What kernels take besides (partial sums for each thread)
is not counted, and `bfloat16` is left out: both are the choice of the kernel for a processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from understudy.ops.traits.host_kernels import Results, steps_of
from understudy.spec import TensorSpec

Maybe = TensorSpec | None
BLOCKS = {"AVX512": 16, "AVX2": 8}
"""Channels of a block, by the instructions of this processor."""
FEW_CHANNELS, HALF_BLOCK = 3, 8
"""Images of so few channels are taken as they are; images of less than a block are filled up to this."""
LEAST_NUMBERS = 20_480
"""An image by itself that is smaller goes to torch's own kernel, unless the filter is large."""


def _takes(x: TensorSpec, weight: TensorSpec, stride: Sequence[int], dilation: Sequence[int], groups: int) -> bool:
    """Whether torch hands the convolution to oneDNN, and oneDNN lays it out in blocks."""
    if not torch.backends.mkldnn.enabled or x.dtype is not torch.float32 or not x.is_contiguous:
        return False
    if x.numel == 0 or torch.backends.cpu.get_cpu_capability() not in BLOCKS:
        return False
    batch, filters = int(x.shape[0]), [int(size) for size in weight.shape[2:]]
    is_pointwise = set(filters) == {1} and set(stride) == {1} == set(dilation) and batch < 16
    is_small = groups == 1 and min(filters) <= 3 and batch == 1 and int(x.numel) <= LEAST_NUMBERS
    return not (is_pointwise and torch.get_num_threads() == 1) and not is_small


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
    results: Results, x: TensorSpec, weight: TensorSpec, bias: Maybe, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> tuple[int, ...]:  # fmt: skip
    """A transposed one is computed as a gradient, and copied once more."""
    if not _takes(x, weight, stride, dilation, groups):
        return ()
    plain, is_plain = _fill(results[0].shape), not transposed and _is_narrow(x.shape)
    weights = _fill(weight.shape, () if groups > 1 else (0,) if is_plain else (0, 1))
    image = 0 if is_plain else _fill(x.shape, (1,))
    if transposed:
        return (max(image + weights, 2 * plain),)
    blocked = _fill(results[0].shape, (1,))
    return (max(image + weights + blocked - plain, blocked),)


@steps_of("convolution_backward")
def of_convolution_backward(
    results: Results, grad: TensorSpec, x: TensorSpec, weight: TensorSpec, bias_sizes: Sequence[int] | None,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, output_mask: Sequence[bool],
) -> tuple[int, ...]:  # fmt: skip
    """First the gradient of the input, then that of the weight, each in blocks and then plain."""
    if not _takes(x, weight, stride, dilation, groups):
        return ()
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
