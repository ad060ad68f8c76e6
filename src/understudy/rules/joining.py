"""Operators that put tensors beside each other: cat, stack and their relatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.rules.dims import replaced, with_inserted, wrap_dim
from understudy.rules.layouts import looks_channels_last
from understudy.rules.registry import rule
from understudy.rules.view_strides import expand_strides
from understudy.rules.views import unsqueezed, viewed_as, with_dimensions
from understudy.shapes.sizes import has_to_be, lies_in_data
from understudy.spec import (
    TensorSpec,
    View,
    channels_last_strides,
    common_device,
    contiguous_strides,
    result_type,
    same_shape,
)


@rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[TensorSpec], dim: int = 0) -> TensorSpec:
    return joined(tensors, dim)


def joined(tensors: Sequence[TensorSpec], dim: int) -> TensorSpec:
    if not tensors:
        raise ArgumentError("cat: the list of tensors is empty")
    first: TensorSpec | None = None
    total: Any = 0
    for position, tensor in enumerate(tensors):
        if not tensor.shape:
            raise ShapeMismatch(f"cat: tensor {position} of the list is 0-dim: {tensor}; use stack instead")
        if len(tensor.shape) == 1 and tensor.shape[0] == 0:
            continue  # a 1-D tensor without elements goes with anything
        if first is None:
            first, dim = tensor, wrap_dim(dim, tensor.ndim)
        else:
            _check_joinable(first, tensor, position, dim)
        total = total + tensor.shape[dim]
    model = tensors[0]
    dtype, device = result_type(*tensors), common_device(tensors)
    if first is None:
        return model.like((0,), dtype=dtype, device=device)
    shape = replaced(first.shape, dim, total)
    return model.like(shape, stride=_joined_strides(tensors, shape), dtype=dtype, device=device)


def _check_joinable(first: TensorSpec, other: TensorSpec, position: int, dim: int) -> None:
    if first.shape is other.shape:
        return
    if other.ndim != first.ndim:
        raise ShapeMismatch(
            f"cat: {first} has {first.ndim} dimensions, tensor {position} of the list has {other.ndim}: {other}"
        )
    for at, (size, other_size) in enumerate(zip(first.shape, other.shape, strict=True)):
        if at != dim and size != other_size and not has_to_be(size, other_size):
            raise ShapeMismatch(
                f"cat: along dimension {dim}, all other sizes must be equal, but dimension {at} has size {size} in "
                f"{first} and {other_size} in tensor {position} of the list, {other}"
            )


def _joined_strides(tensors: Sequence[TensorSpec], shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Channels-last if all of the tensors look like it, skipped ones included."""
    if len(shape) in (4, 5):
        ndim = len(shape)
        if all(tensor.ndim == ndim and looks_channels_last(tensor) for tensor in tensors):
            return channels_last_strides(shape)
    return contiguous_strides(shape)


def _has_to_be(shape: Sequence[Any], wanted: Sequence[Any]) -> bool:
    return lies_in_data(*shape, *wanted) and len(shape) == len(wanted) and all(map(has_to_be, shape, wanted))


@rule("stack", "_stack")
def stack(tensors: Sequence[TensorSpec], dim: int = 0) -> TensorSpec:
    if not tensors:
        raise ArgumentError("stack: the list of tensors is empty")
    first = tensors[0]
    for position, tensor in enumerate(tensors):
        if not same_shape(tensor.shape, first.shape) and not _has_to_be(tensor.shape, first.shape):
            raise ShapeMismatch(
                f"stack: all tensors must have one shape, but the first is {first} "
                f"and tensor {position} of the list is {tensor}"
            )
    dim = wrap_dim(dim, first.ndim + 1)
    if dim == first.ndim:
        return joined([unsqueezed(tensor, dim) for tensor in tensors], dim)
    # Eager joins along the dimension behind the new one, and then splits the result.
    along = joined(tensors, dim)
    split = viewed_as(along, with_inserted(first.shape, dim, len(tensors)))
    return along.like(split.shape, stride=split.stride)


@rule("hstack")
def hstack(tensors: Sequence[TensorSpec]) -> TensorSpec:
    raised = [with_dimensions(tensor, 1) for tensor in tensors]
    return joined(raised, 0 if raised and raised[0].ndim == 1 else 1)


@rule("vstack", "row_stack")
def vstack(tensors: Sequence[TensorSpec]) -> TensorSpec:
    return joined([with_dimensions(tensor, 2) for tensor in tensors], 0)


@rule("dstack")
def dstack(tensors: Sequence[TensorSpec]) -> TensorSpec:
    return joined([with_dimensions(tensor, 3) for tensor in tensors], 2)


@rule("column_stack")
def column_stack(tensors: Sequence[TensorSpec]) -> TensorSpec:
    columns = [viewed_as(t, (t.numel, 1)) if t.ndim <= 1 else t for t in tensors]
    return joined(columns, 1)


@rule("block_diag")
def block_diag(tensors: Sequence[TensorSpec]) -> Any:
    if not tensors:
        return NotImplemented
    rows: Any = 0
    columns: Any = 0
    for position, tensor in enumerate(tensors):
        if tensor.ndim > 2:
            raise ShapeMismatch(f"block_diag: tensor {position} of the list has more than 2 dimensions: {tensor}")
        height, width = (1,) * (2 - tensor.ndim) + tensor.shape
        rows, columns = rows + height, columns + width
    return tensors[0].like((rows, columns), dtype=_joint_dtype(tensors))


def _joint_dtype(tensors: Sequence[TensorSpec]) -> Any:
    """Promotion in which 0-dim tensors count as much as the others."""
    return result_type(*(tensor if tensor.shape else unsqueezed(tensor, 0) for tensor in tensors))


@rule("meshgrid")
def meshgrid(tensors: Sequence[TensorSpec]) -> list[View]:
    return _grids(tensors, "ij")


@rule("meshgrid.indexing")
def meshgrid_indexing(tensors: Sequence[TensorSpec], *, indexing: str) -> list[View]:
    return _grids(tensors, indexing)


def _grids(tensors: Sequence[TensorSpec], indexing: str) -> list[View]:
    if not tensors:
        raise ArgumentError("meshgrid: the list of tensors is empty")
    if indexing not in ("ij", "xy"):
        raise ArgumentError(f"meshgrid: indexing is 'ij' or 'xy', not {indexing!r}")
    for tensor in tensors:
        if tensor.ndim > 1:
            raise ShapeMismatch(f"meshgrid: expected tensors of at most one dimension, got {tensor}")
        if tensor.dtype is not tensors[0].dtype:
            raise ArgumentError(f"meshgrid: {tensors[0]} and {tensor} differ in dtype")
    order = list(range(len(tensors)))
    if indexing == "xy" and len(tensors) >= 2:
        order[:2] = [1, 0]
    shape = [tensors[position].numel for position in order]
    grids = []
    for dim, position in enumerate(order):
        column = viewed_as(tensors[position], tuple(s if d == dim else 1 for d, s in enumerate(shape)))
        grids.append(View(position, column.viewed(*expand_strides(column, shape))))
    return [grids[dim] for dim in order]
