"""Strides with which the same storage is seen in another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.shapes.sizes import at_least_one
from understudy.spec import TensorSpec, contiguous_strides, same_shape

Size = tuple[Any, ...]


def view_strides(spec: TensorSpec, shape: Size) -> Size | None:
    """Strides of `spec` viewed as `shape` (of as many elements), or None where only a copy can do it."""
    old, stride = spec.shape, spec.stride
    if not old:
        return (1,) * len(shape)
    if spec.is_empty:
        return stride if same_shape(old, shape) else _strides_without_elements(shape)
    if same_shape(stride, contiguous_strides(old)):
        return contiguous_strides(shape)
    return _strides_by_chunks(old, stride, shape)


def _strides_without_elements(shape: Size) -> Size:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * at_least_one(size)
    return tuple(reversed(strides))


def _strides_by_chunks(old: Size, stride: Size, shape: Size) -> Size | None:
    """Old dimensions that lie next to each other in memory form a chunk, which new dimensions must fill."""
    new_stride: list[Any] = [0] * len(shape)
    new_dim = len(shape) - 1
    base, chunk, filled = stride[-1], 1, 1
    for dim in range(len(old) - 1, -1, -1):
        chunk = chunk * old[dim]
        if dim > 0 and (old[dim - 1] == 1 or stride[dim - 1] == chunk * base):
            continue
        while new_dim >= 0 and (filled < chunk or shape[new_dim] == 1):
            new_stride[new_dim] = filled * base
            filled = filled * shape[new_dim]
            new_dim -= 1
        if filled != chunk:
            return None
        if dim > 0:
            base, chunk, filled = stride[dim - 1], 1, 1
    return tuple(new_stride) if new_dim == -1 else None


def expand_strides(spec: TensorSpec, sizes: Sequence[Any]) -> tuple[Size, Size]:
    """Shape and strides of `spec` expanded to `sizes`, whose -1 keep a size."""
    added = len(sizes) - len(spec.shape)
    if added < 0:
        raise ShapeMismatch(
            f"expand: {list(sizes)} has fewer dimensions than {spec}; give at least {len(spec.shape)} sizes"
        )
    shape: list[Any] = []
    strides: list[Any] = []
    for position in range(len(sizes) - 1, -1, -1):
        target, dim = sizes[position], position - added
        if dim >= 0:
            size, stride = spec.shape[dim], spec.stride[dim]
        else:
            # Dimensions put in front lie around the others, as long as they have size 1.
            size, stride = 1, (shape[-1] * strides[-1] if shape and spec.shape else 0)
        if target == -1:
            if dim < 0:
                raise ArgumentError(
                    f"expand: -1 in {list(sizes)} stands for a dimension that {spec} does not have, "
                    f"so there is no size to keep"
                )
            target = size
        elif target != size:
            if size != 1:
                raise ShapeMismatch(
                    f"expand: {spec} has size {size} in dimension {dim}, which can't become {target} in "
                    f"{list(sizes)}; only sizes of 1 can be expanded"
                )
            if target < 0:
                raise ArgumentError(f"expand: {list(sizes)} has a negative size")
            stride = 0
        shape.append(target)
        strides.append(stride)
    return tuple(reversed(shape)), tuple(reversed(strides))
