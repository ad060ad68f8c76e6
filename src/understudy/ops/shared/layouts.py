"""Layouts: the memory format that eager infers from strides, writes in place, the strides of views and expansions, and sizes
that are too large for memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch

from understudy.errors import ArgumentError, OperatorError, ShapeMismatch
from understudy.ops.shared.dims import MOST_INT64
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.node import Shape, Size, SymNode
from understudy.shapes.sizes import (
    at_least_one,
    expect_equal,
    has_unbacked,
    have_different_hints,
    hint_of,
    is_not_one_unless,
    is_provably_different,
    is_provably_equal,
    is_provably_less,
)
from understudy.spec import TensorSpec, channels_last_strides, contiguous_strides, same_shape
from understudy.spec.strides import CHANNELS_LAST_ORDER
from understudy.spec.tensor_spec import product

CHANNELS_LAST_OF = {4: torch.channels_last, 5: torch.channels_last_3d}


def looks_channels_last(spec: TensorSpec) -> bool:
    """Whether eager takes the strides for a channels-last format; ambiguous strides count as contiguous."""
    order = CHANNELS_LAST_ORDER.get(spec.ndim)
    if order is None or (spec.is_symbolic and is_provably_row_major(spec)):
        return False
    if _is_provably_other(spec, order) or spec.stride[1] == 0:
        return False
    ends = _ends(spec, order)
    for dim, least in zip(order, ends, strict=False):
        if spec.shape[dim] == 0 or spec.stride[dim] < least:
            return False
        if dim == 0 and least == spec.stride[1]:
            # All sizes but the first are 1, so their strides are arbitrary.
            return False
    return True


def is_provably_row_major(spec: TensorSpec) -> bool:
    """Whether the strides are those of a contiguous tensor for all values of the symbols. Adds no guard.

    Such a tensor is never taken for channels-last: its last dimension is faster than the channels, or all sizes but the
    first are 1, which is ambiguous.
    """
    return all(map(is_provably_equal, spec.stride, contiguous_strides(spec.shape)))


def _is_provably_other(spec: TensorSpec, order: Sequence[int]) -> bool:
    """Whether, for all values of the symbols, some dimension has a smaller stride than this order allows."""
    ends = _ends(spec, order)
    return any(is_provably_less(spec.stride[dim], least) for dim, least in zip(order, ends, strict=False))


def _ends(spec: TensorSpec, order: Sequence[int]) -> list[Size]:
    """For each dimension, the least stride that it has in this order."""
    return [0, *(spec.shape[dim] * spec.stride[dim] for dim in order)]


def suggested_format(spec: TensorSpec) -> torch.memory_format:
    return CHANNELS_LAST_OF[spec.ndim] if looks_channels_last(spec) else torch.contiguous_format


def suggested_strides(shape: Sequence[Any], model: TensorSpec) -> tuple[object, ...]:
    """Strides for a new tensor of `shape` in the memory format that eager infers for `model`."""
    if len(shape) == model.ndim and looks_channels_last(model):
        return channels_last_strides(shape)
    return contiguous_strides(shape)


# --- Strides of views of another shape -------------------------------------------


def view_strides(spec: TensorSpec, shape: Shape) -> Shape | None:
    """Strides of `spec` viewed as `shape` (with the same number of elements), or None where a copy is necessary."""
    if not spec.shape:
        return (1,) * len(shape)
    if not spec.is_symbolic:
        return _strides_by_hints(spec, shape)
    return _plain_strides(spec, shape) or _strides_of_symbolic(spec, shape)


def _strides_of_symbolic(spec: TensorSpec, shape: Shape) -> Shape | None:
    return (
        _unchanged_strides(spec.shape, spec.stride, shape)
        or _strides_by_products(spec, shape)
        or _strides_by_hints(spec, shape)
    )


def _strides_by_hints(spec: TensorSpec, shape: Shape) -> Shape | None:
    old, stride = spec.shape, spec.stride
    if spec.is_empty:
        return stride if same_shape(old, shape) else _strides_without_elements(shape)
    if same_shape(stride, contiguous_strides(old)):
        return contiguous_strides(shape)
    return _strides_by_chunks(old, stride, shape)


def _plain_strides(spec: TensorSpec, shape: Shape) -> Shape | None:
    """The strides if they are the same for all values of the symbols, empty tensors included; None otherwise."""
    old, stride = spec.shape, spec.stride
    if all(map(is_provably_equal, stride, contiguous_strides(old))):
        return contiguous_strides(shape)
    kept = _strides_of_kept_dimensions(old, stride, shape)
    if kept is None:
        return None
    is_same = len(old) == len(shape) and all(map(is_provably_equal, (*old, *stride), (*shape, *kept)))
    return kept if is_same or all(map(is_provably_less, repeat(0), old)) else None  # also valid if empty


def _unchanged_strides(old: Shape, stride: Shape, shape: Shape) -> Shape | None:
    """The strides of a view of the same shape, unless a dimension of size 1 has a gap.

    For such a dimension eager recomputes the stride, unless the tensor is empty.
    """
    if len(old) != len(shape) or not all(map(is_provably_equal, old, shape)):
        return None
    asked: list[tuple[Any, Any, Any]] = []
    packed: Any = stride[-1]
    for size, step in zip(reversed(old), reversed(stride), strict=True):
        if not is_provably_equal(step, packed):
            if not have_different_hints(size, 1):
                return None
            asked.append((size, step, packed))
        packed = step * size
    return (
        stride
        if all(is_not_one_unless(*each) for each in asked if not is_provably_different(each[0], 1))
        else None
    )


def _strides_of_kept_dimensions(old: Shape, stride: Shape, shape: Shape) -> Shape | None:
    """Strides if only dimensions of size 1 are added or removed; None if they depend on which other sizes are 1.

    Eager keeps the stride of a dimension, but a dimension of size 1 gets the packed stride.
    """
    strides: list[Any] = []
    packed: Any = stride[-1]  # the packed stride
    dim = len(old) - 1
    for size in reversed(shape):
        while dim >= 0 and is_provably_equal(old[dim], 1):
            dim -= 1
        step = packed
        if not is_provably_equal(size, 1):
            if dim < 0 or not is_provably_equal(old[dim], size):
                return None
            if not is_provably_equal(stride[dim], packed) and not is_provably_different(size, 1):
                return None
            step = stride[dim]
            dim -= 1
        strides.append(step)
        packed = step * size
    is_all = all(is_provably_equal(size, 1) for size in old[: dim + 1])
    return tuple(reversed(strides)) if is_all else None


def _strides_by_products(spec: TensorSpec, shape: Shape) -> Shape | None:
    """Strides if it can be proved which old dimensions form a chunk, and which new ones fill it.

    None if that would need a guard: for a new dimension that may have size 1 (it would belong to the inner chunk), or
    for a tensor that may be empty (whose strides differ). A chunk that is filled where it may end has the same strides
    whether it ends there or not.
    """
    old, stride = spec.shape, spec.stride
    if not all(is_provably_less(0, size) for size in old):
        return None
    strides: list[Any] = []
    base, chunk, filled = stride[-1], 1, 1
    for dim in range(len(old) - 1, -1, -1):
        chunk = chunk * old[dim]
        if dim > 0:
            if is_provably_equal(old[dim - 1], 1) or is_provably_equal(stride[dim - 1], chunk * base):
                continue
            if not is_provably_different(old[dim - 1], 1):
                return None  # with size 1 it would be part of the chunk
        while len(strides) < len(shape) and (
            not is_provably_equal(filled, chunk) or is_provably_equal(shape[-1 - len(strides)], 1)
        ):
            strides.append(filled * base)
            filled = filled * shape[-len(strides)]
        if not is_provably_equal(filled, chunk):
            return None
        if dim > 0:
            if len(strides) < len(shape) and not is_provably_different(shape[-1 - len(strides)], 1):
                return None
            base, chunk, filled = stride[dim - 1], 1, 1
    return tuple(reversed(strides)) if len(strides) == len(shape) else None


def _strides_without_elements(shape: Shape) -> Shape:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * at_least_one(size)
    return tuple(reversed(strides))


def _is_short_of(filled: Size, chunk: Size) -> bool:
    """Whether a chunk is not full yet. With unbacked sizes False unless provable: the shape is known to fit."""
    is_plain = type(filled) is int and type(chunk) is int
    if not is_plain and has_unbacked(filled, chunk):
        return not is_provably_equal(filled, chunk)
    return bool(filled < chunk)


def _strides_by_chunks(old: Shape, stride: Shape, shape: Shape) -> Shape | None:
    """Old dimensions that are adjacent in memory form a chunk, which new dimensions must fill."""
    new_stride: list[Any] = [0] * len(shape)
    new_dim = len(shape) - 1
    base, chunk, filled = stride[-1], 1, 1
    for dim in range(len(old) - 1, -1, -1):
        chunk = chunk * old[dim]
        if dim > 0 and (old[dim - 1] == 1 or stride[dim - 1] == chunk * base):
            continue
        while new_dim >= 0 and (_is_short_of(filled, chunk) or shape[new_dim] == 1):
            new_stride[new_dim] = filled * base
            filled = filled * shape[new_dim]
            new_dim -= 1
        if filled != chunk:
            return None
        if dim > 0:
            base, chunk, filled = stride[dim - 1], 1, 1
    return tuple(new_stride) if new_dim == -1 else None


def with_height(spec: TensorSpec) -> TensorSpec:
    """A signal, or a kernel for signals, as an image of height 1."""
    *lead, size = spec.shape
    *steps, step = spec.stride
    return spec.like((*lead, 1, size), stride=(*steps, size * step, step))


def expand_strides(spec: TensorSpec, sizes: Sequence[Any]) -> tuple[Shape, Shape]:
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
            # New leading dimensions get the packed stride, as long as they have size 1.
            size, stride = 1, (shape[-1] * strides[-1] if shape and spec.shape else 0)
        if target == -1:
            if dim < 0:
                raise ArgumentError(
                    f"expand: -1 in {list(sizes)} stands for a new dimension of {spec}; give its size"
                )
            target = size
        elif type(target) is not int and _is_expanded_anyhow(size, stride, target):
            stride = 0
        elif (
            type(target) is not int and has_unbacked(target) and is_provably_equal(size, 1)
        ) or target != size:
            if size != 1 and not expect_equal(size, 1):
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


def _is_expanded_anyhow(size: Any, stride: Any, target: Any) -> bool:
    """Whether the stride is 0, as that of an expanded dimension, even if the target is 1."""
    if have_different_hints(stride, 0) or not is_provably_less(-1, target) or not is_provably_equal(size, 1):
        return False
    if is_provably_equal(stride, 0):
        return True
    return not has_unbacked(target, stride) and is_not_one_unless(target, stride, 0)


# --- numbers beyond 64 bits ---------------------------------------------------------------------------------

MOST_OF_SYMBOLS = MOST_INT64 - 1  # their comparisons take the next number for infinity
LARGE = 2**43
"""Bytes that no tensor has. With symbolic sizes, numbers below it are not guarded against an overflow."""


def check_storage_size(spec: TensorSpec) -> None:
    """Raise if a size, a stride, or the end of the tensor in bytes overflows a 64-bit integer. With symbols, this is decided
    by a guard if there are numbers large enough for that; unbacked sizes count as 1."""
    if spec.layout is not torch.strided:
        return
    if spec.is_symbolic:
        numbers = _large_numbers(spec)
    elif max(spec.numel * spec.dtype.itemsize, *spec.stride, 0) > LARGE:
        last = sum((size - 1) * step for size, step in zip(spec.shape, spec.stride, strict=True))
        numbers = [spec.numel, (last + 1) * spec.itemsize if spec.numel else 0, *spec.stride]
    else:
        return
    if any(number > (MOST_INT64 if type(number) is int else MOST_OF_SYMBOLS) for number in numbers):
        raise OperatorError(f"Storage size calculation overflowed with sizes={list(spec.shape)}")


def _large_numbers(spec: TensorSpec) -> list[Any]:
    """The sizes and strides that may be large, and the numbers of elements and bytes if they may be. What is expanded is in
    the storage once."""
    factors = [_largest_factor(size) for size in spec.shape]
    sizes = [
        size for size, step in zip(spec.shape, spec.stride, strict=True) if type(step) is not int or step != 0
    ]
    large: list[Any] = [size for size, factor in zip(spec.shape, factors, strict=True) if factor > LARGE]
    if math.prod(factors) * spec.itemsize > LARGE:
        large += [product(sizes) * spec.itemsize, *([] if len(sizes) == spec.ndim else [product(spec.shape)])]
    return large + [step for step in spec.stride if _largest_factor(step) > LARGE]


def _largest_factor(size: Any) -> int:
    """The largest number among a size, at least 1, and the factors of its symbols."""
    if type(size) is not SymNode:
        return max(int(size), 1)
    terms = size.value.terms if isinstance(size.value, Expr) else ()
    return max(hint_of(size) or 1, *(abs(factor) for _, factor in terms), 1)
