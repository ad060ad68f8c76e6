"""Dimension arguments: negative ones, lists of them, and the shape that a reduction over them leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import ArgumentError, DimensionError, OperatorError, ShapeMismatch
from understudy.shapes.node import Shape, Size, Sizes
from understudy.spec import TensorSpec

MOST_DIMS = 64
"""The limit for reductions over a list of dimensions, which eager stores in a bit set."""


MOST_INT64 = 2**63 - 1


def divide_up(size: Any, by: Any) -> Any:
    """The quotient, rounded up. C++ adds both numbers first: a sum beyond 64 bits wraps around there, and is refused."""
    if type(by) is int and by > MOST_INT64 // 2 and size > MOST_INT64 - by + 1:
        raise OperatorError(f"{size} + {by} - 1 overflows a 64-bit integer")
    return (size + by - 1) // by


def wrap_dim(dim: int, ndim: int) -> int:
    """A dimension counted from the front; a 0-dim tensor counts as having one."""
    count = ndim or 1
    if -count <= dim < count:
        return dim if dim >= 0 else dim + count
    raise DimensionError(f"dimension out of range: expected {-count} to {count - 1}, got {dim}")


def wrap_dims(dims: Sequence[int], ndim: int) -> list[int]:
    """All of these counted from the front. Raises if one is named twice."""
    wrapped = [wrap_dim(dim, ndim) for dim in dims]
    if len(set(wrapped)) != len(wrapped):
        raise OperatorError(f"expected each of {ndim} dimensions at most once, got {list(dims)}")
    return wrapped


def reduced_shape(shape: Shape, dims: Sequence[int], keepdim: bool) -> Shape:
    """The shape left by reducing over `dims`, which are counted from the front."""
    if not shape:
        return shape
    if len(shape) > MOST_DIMS and len(dims) < len(shape):
        raise OperatorError(f"reductions support tensors of up to {MOST_DIMS} dimensions, got {len(shape)}")
    if keepdim:
        return tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    return tuple(size for dim, size in enumerate(shape) if dim not in dims)


def reduced_shape_all(spec: TensorSpec, dims: Any, keepdim: bool) -> Shape:
    """As `reduced_shape`, where no dimensions (None or an empty list) means all of them."""
    if not dims:
        return (1,) * spec.ndim if keepdim else ()
    return reduced_shape(spec.shape, wrap_dims(dims, spec.ndim), keepdim)


def check_not_empty(what: str, spec: TensorSpec, dims: Sequence[int]) -> None:
    """Raise if a reduced dimension has no elements: a maximum would have no value."""
    for dim in dims:
        if spec.shape and spec.shape[dim] == 0:
            raise DimensionError(f"{what}: dimension {dim} of {spec} is empty")


def size_at(spec: TensorSpec, dim: int) -> Size:
    """Shape along a wrapped dimension; a 0-dim tensor counts as one of size 1."""
    return spec.shape[dim] if spec.shape else 1


def stride_at(spec: TensorSpec, dim: int) -> Any:
    return spec.stride[dim] if spec.shape else 1


def replace_size(sizes: Sizes, dim: int, size: Size) -> Shape:
    """`sizes` with another value at `dim`."""
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def without(sizes: Sizes, dim: int) -> tuple[object, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])


def with_inserted(sizes: Sizes, dim: int, size: Size) -> Shape:
    return (*sizes[:dim], size, *sizes[dim:])


def complete_shape(spec: TensorSpec, shape: Sequence[Any]) -> tuple[Any, ...]:
    """`shape` for all elements of `spec`, its -1 (if any) filled in."""
    known: Any = 1
    unknown = -1
    for dim, size in enumerate(shape):
        if size == -1:
            if unknown >= 0:
                raise ArgumentError(f"shape {list(shape)} has more than one -1")
            unknown = dim
        elif size < 0:
            raise ArgumentError(f"shape {list(shape)} has a negative size")
        else:
            known = known * size
    if unknown < 0:
        if known != spec.numel:
            raise ShapeMismatch(f"shape {list(shape)} holds {known} elements, {spec} has {spec.numel}")
        return tuple(shape)
    if known == 0:
        raise ShapeMismatch(f"the -1 in shape {list(shape)} is ambiguous with a size of 0, for {spec}")
    if spec.numel % known != 0:
        raise ShapeMismatch(
            f"shape {list(shape)} does not fit {spec}: {spec.numel} elements are not divisible by {known}"
        )
    return replace_size(shape, unknown, spec.numel // known)


def for_each(numbers: object, spatial: int, what: str) -> Shape:
    """One number for each spatial dimension, from one for all or from a list of them."""
    given = tuple(numbers) if isinstance(numbers, (list, tuple)) else (numbers,)
    if len(given) == 1:
        return given * spatial
    if len(given) != spatial:
        raise ArgumentError(f"{what}: expected {spatial} numbers, got {list(given)}")
    return given
