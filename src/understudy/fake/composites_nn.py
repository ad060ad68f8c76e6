"""Parts of networks, step by step: see `composite_table`."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from understudy.errors import ArgumentError
from understudy.fake.composite_table import broadcast, composite, taught
from understudy.fake.upsampling import upsampled

aten = torch.ops.aten
Tensor = torch.Tensor
Maybe = Tensor | None

MEAN, SUM = 1, 2
"""`reduction`; 0 is none."""


@composite("masked_select_backward")
def masked_select_backward(grad: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    shape = broadcast(x.shape, mask.shape)
    return torch.zeros_like(x.expand(shape), memory_format=torch.preserve_format).masked_scatter(mask, grad)


# --- losses -------------------------------------------------------------------------------------------------------


@taught("cross_entropy_loss")
def cross_entropy_loss(
    x: Tensor, target: Tensor, weight: Maybe = None, reduction: int = MEAN, ignore_index: Any = -100,
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """With probabilities as targets, and weights: C++ reads how many of these there are."""
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


# --- embeddings ---------------------------------------------------------------------------------------------------


@composite("embedding_bag.padding_idx")
def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool, mode: int, sparse: bool,
    per_sample_weights: Maybe, include_last_offset: bool, padding_idx: int | None,
) -> Any:  # fmt: skip
    """The row that counts for nothing may be counted from the end: the operator below takes its number."""
    if padding_idx is None or unpack_dual(weight).tangent is not None:
        return NotImplemented
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        raise ArgumentError(f"embedding_bag: padding_idx {padding_idx} is not among {rows} rows")
    number = padding_idx if padding_idx >= 0 else int(padding_idx + rows)
    op = aten._embedding_bag if weight.requires_grad else aten._embedding_bag_forward_only
    return op.default(
        weight, indices.contiguous(), offsets.contiguous(), scale_grad_by_freq, mode, sparse, per_sample_weights,
        include_last_offset, number,
    )  # fmt: skip


# --- convolutions -------------------------------------------------------------------------------------------------


@composite("_convolution_mode")
def convolution_with_named_padding(
    x: Tensor, weight: Tensor, bias: Maybe, stride: Any, padding: str, dilation: Any, groups: Any
) -> Any:
    """For `same`, C++ asks of each dimension whether it needs as much on both sides. It matters whether all do."""
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


# --- pooling ------------------------------------------------------------------------------------------------------


def _register_pooling(dimensions: int) -> None:
    op = getattr(aten, f"_adaptive_avg_pool{dimensions}d").default

    @composite(f"adaptive_avg_pool{dimensions}d")
    def adaptive_avg_pool(x: Tensor, output_size: Any) -> Any:
        """C++ asks size by size whether it is 1. That matters only if they all are: of one cell, it is the mean."""
        sizes = list(output_size)
        if len(sizes) != dimensions or not any(isinstance(size, torch.SymInt) for size in sizes):
            return NotImplemented
        if any(size < 0 for size in sizes) or functools.reduce(operator.and_, [size == 1 for size in sizes]):
            return NotImplemented
        return op(x, sizes)


for _dimensions in (2, 3):
    _register_pooling(_dimensions)


# --- upsampling ---------------------------------------------------------------------------------------------------

UPSAMPLINGS = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d""".split()
UPSAMPLINGS_WITH_CORNERS = """upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa""".split()


def _register_upsampling(name: str) -> None:
    @composite(f"{name}.vec")
    def upsample(x: Tensor, output_size: Any, scale_factors: Any = None) -> Any:
        return upsampled(name, (x, output_size, scale_factors), {})


def _register_upsampling_with_corners(name: str) -> None:
    @composite(f"{name}.vec")
    def upsample(x: Tensor, output_size: Any, align_corners: bool, scale_factors: Any = None) -> Any:
        return upsampled(name, (x, output_size, align_corners, scale_factors), {})


for _name in UPSAMPLINGS:
    _register_upsampling(_name)
for _name in UPSAMPLINGS_WITH_CORNERS:
    _register_upsampling_with_corners(_name)
