"""Dimension arguments: negative ones, lists of them, and the shape that a reduction over them leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import DimensionError, OperatorError
from understudy.spec import TensorSpec
from understudy.spec.tensor_spec import Size

MOST_DIMS = 64
"""Of a tensor that is reduced over a list of dimensions, which eager keeps as the bits of a number."""


def wrap_dim(dim: int, ndim: int) -> int:
    """A dimension counted from the front; a 0-dim tensor counts as having one."""
    count = ndim or 1
    if -count <= dim < count:
        return dim if dim >= 0 else dim + count
    raise DimensionError(f"dimension {dim} is out of range for a tensor of {ndim} dimensions")


def wrap_dims(dims: Sequence[int], ndim: int) -> list[int]:
    """All of these counted from the front, none twice."""
    wrapped = [wrap_dim(dim, ndim) for dim in dims]
    if len(set(wrapped)) != len(wrapped):
        raise OperatorError(f"dimensions {list(dims)} name one of {ndim} dimensions twice")
    return wrapped


def reduced_shape(shape: Size, dims: Sequence[int], keepdim: bool) -> Size:
    """The shape left by reducing over `dims`, which are counted from the front."""
    if not shape:
        return shape
    if len(shape) > MOST_DIMS and len(dims) < len(shape):
        raise OperatorError(
            f"a reduction over some dimensions takes tensors of up to {MOST_DIMS} dimensions, not {len(shape)}"
        )
    if keepdim:
        return tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    return tuple(size for dim, size in enumerate(shape) if dim not in dims)


def reduced_shape_all(spec: TensorSpec, dims: Any, keepdim: bool) -> Size:
    """As `reduced_shape`, where no dimensions (None or an empty list) means all of them."""
    if not dims:
        return (1,) * spec.ndim if keepdim else ()
    return reduced_shape(spec.shape, wrap_dims(dims, spec.ndim), keepdim)


def check_not_empty(what: str, spec: TensorSpec, dims: Sequence[int]) -> None:
    """A maximum and the like has no value for no elements."""
    for dim in dims:
        if spec.shape and spec.shape[dim] == 0:
            raise DimensionError(f"{what}: dimension {dim} of {spec} has no elements to choose from")
