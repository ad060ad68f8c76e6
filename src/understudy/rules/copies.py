"""Copies, casts, moves between devices, and filling."""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.rules.in_place import check_no_overlap
from understudy.rules.number_ranges import check_stored
from understudy.rules.registry import rule
from understudy.shapes.sizes import surely_equal
from understudy.spec import (
    Same,
    TensorSpec,
    channels_last_strides,
    check_expandable,
    contiguous_strides,
    is_channels_last_contiguous,
    preserved_copy,
    preserved_strides,
)
from understudy.spec.tensor_spec import Size

CHANNELS_LAST_NDIM = {torch.channels_last: 4, torch.channels_last_3d: 5}


def strides_in_format(shape: Size, memory_format: torch.memory_format | None) -> Size:
    """Strides of a fresh tensor in a memory format that is no question of another tensor's layout."""
    ndim = CHANNELS_LAST_NDIM.get(memory_format) if memory_format is not None else None
    if ndim is None:
        if memory_format is torch.preserve_format:
            raise ArgumentError("preserve_format says nothing where there is no tensor to take a layout from")
        return contiguous_strides(shape)
    if len(shape) != ndim:
        raise ShapeMismatch(f"{memory_format} needs {ndim} dimensions, {list(shape)} has {len(shape)}")
    return channels_last_strides(shape)


def copy_strides(spec: TensorSpec, memory_format: torch.memory_format | None) -> Size:
    """Strides of a copy of a tensor in this format, its own layout if None."""
    if memory_format is None or memory_format is torch.preserve_format:
        return preserved_strides(spec.shape, spec.stride)
    return strides_in_format(spec.shape, memory_format)


@rule("_to_copy")
def to_copy(
    a: TensorSpec, *, dtype: torch.dtype | None = None, layout: torch.layout | None = None,
    device: torch.device | None = None, pin_memory: bool | None = None, non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> TensorSpec:  # fmt: skip
    if a.layout is not torch.strided or (layout is not None and layout is not torch.strided):
        return NotImplemented
    return a.like(stride=copy_strides(a, memory_format), dtype=dtype, device=device)


@rule("clone")
def clone(a: TensorSpec, *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    if a.layout is not torch.strided:
        return NotImplemented
    return a.like(stride=copy_strides(a, memory_format))


@rule("contiguous")
def contiguous(a: TensorSpec, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    if a.layout is not torch.strided:
        return NotImplemented
    if _has_format(a, memory_format):
        return Same(0)
    if memory_format is torch.preserve_format:
        raise ArgumentError("contiguous: preserve_format is not a format that a tensor can be put into")
    return clone(a, memory_format=memory_format)


def _has_format(a: TensorSpec, memory_format: torch.memory_format) -> bool:
    ndim = CHANNELS_LAST_NDIM.get(memory_format)
    if ndim is None:
        return a.is_contiguous
    return a.ndim == ndim and is_channels_last_contiguous(a.shape, a.stride)


@rule("copy_")
def copy_in_place(a: TensorSpec, source: TensorSpec, non_blocking: bool = False) -> Same:
    check_expandable(source.shape, a.shape, "copy_")
    if a is not source and not any(surely_equal(size, 0) for size in a.shape):
        check_no_overlap("copy_", a)
    return Same(0)


@rule("copy")
def copy(a: TensorSpec, source: TensorSpec, non_blocking: bool = False) -> TensorSpec:
    """A copy of `a`'s whole storage, so at the same place in it, that is then written."""
    check_expandable(source.shape, a.shape, "copy")
    for size, step in zip(a.shape, a.stride, strict=True):
        if step == 0 and size > 1:
            return preserved_copy(a)
    return a.viewed(a.shape, a.stride, conj=False, neg=False)


@rule("fill.Scalar")
def fill_with_number(a: TensorSpec, value: Any) -> TensorSpec:
    check_stored("fill", value, a.dtype, a.device)
    return preserved_copy(a)


@rule("fill.Tensor")
def fill_with_tensor(a: TensorSpec, value: TensorSpec) -> TensorSpec:
    if value.shape:
        raise ShapeMismatch(f"fill: the value must be a 0-dim tensor, not {value}")
    return preserved_copy(a)


@rule("zero")
def zero(a: TensorSpec) -> TensorSpec:
    return preserved_copy(a)


@rule("_pin_memory")
def pin_memory(a: TensorSpec, device: torch.device | None = None) -> TensorSpec:
    return preserved_copy(a)


@rule("_lazy_clone")
def lazy_clone(a: TensorSpec) -> TensorSpec:
    """Shares the storage until one of the two is written: so far as anyone can see, a copy in place."""
    return a


@rule("fill_.Scalar")
def fill_in_place(a: TensorSpec, value: Any) -> Same:
    check_stored("fill_", value, a.dtype, a.device)
    return Same(0)


@rule("fill_.Tensor")
def fill_with_tensor_in_place(a: TensorSpec, value: TensorSpec) -> Same:
    fill_with_tensor(a, value)
    return Same(0)


@rule("zero_")
def zero_in_place(a: TensorSpec) -> Same:
    return Same(0)
