"""Arithmetic of sizes and dimensions that the rules of shape-moving operators share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.rules.reduced_dims import wrap_dim, wrap_dims
from understudy.spec import TensorSpec

__all__ = [
    "complete_shape",
    "replaced",
    "size_at",
    "stride_at",
    "with_inserted",
    "without",
    "wrap_dim",
    "wrap_dims",
]


def size_at(spec: TensorSpec, dim: int) -> Any:
    """Size along a wrapped dimension; a 0-dim tensor counts as one of size 1."""
    return spec.shape[dim] if spec.shape else 1


def stride_at(spec: TensorSpec, dim: int) -> Any:
    return spec.stride[dim] if spec.shape else 1


def replaced(sizes: Sequence[Any], dim: int, size: Any) -> tuple[Any, ...]:
    """`sizes` with another value at `dim`."""
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def without(sizes: Sequence[Any], dim: int) -> tuple[Any, ...]:
    return (*sizes[:dim], *sizes[dim + 1 :])


def with_inserted(sizes: Sequence[Any], dim: int, size: Any) -> tuple[Any, ...]:
    return (*sizes[:dim], size, *sizes[dim:])


def complete_shape(spec: TensorSpec, shape: Sequence[Any]) -> tuple[Any, ...]:
    """`shape` for all elements of `spec`, its -1 (if any) filled in."""
    known: Any = 1
    unknown = -1
    for dim, size in enumerate(shape):
        if size == -1:
            if unknown >= 0:
                raise ArgumentError(f"shape {list(shape)} leaves more than one size (-1) to be inferred")
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
        raise ShapeMismatch(f"the -1 in shape {list(shape)} can't be inferred beside a size of 0, for {spec}")
    if spec.numel % known != 0:
        raise ShapeMismatch(
            f"shape {list(shape)} does not fit {spec}: {spec.numel} elements are not divisible by {known}"
        )
    return replaced(shape, unknown, spec.numel // known)
