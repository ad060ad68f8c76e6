"""Advanced indexing: `x[i, :, j]` and writes to it.

How eager lays out the result of `index`: the indices are broadcast together; if they are not in adjacent
dimensions, those dimensions are moved to the front; the indexed dimensions become the shape of the indices.
The strides come from an elementwise iteration over the source, whose indexed dimensions have stride 0 there,
and over the indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from understudy.errors import (
    ArgumentError,
    DimensionError,
    DtypeError,
    DynamicOutputShapeException,
    ShapeMismatch,
)
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import broadcast, decomposition, has_symbolic_sizes
from understudy.ops.shared.dtypes import MASKS
from understudy.ops.shared.layouts import expand_strides, view_strides
from understudy.shapes.node import Shape
from understudy.shapes.sizes import has_unbacked, is_provably_equal
from understudy.spec import (
    Same,
    TensorSpec,
    broadcast_shapes,
    check_expandable,
    elementwise_strides,
    preserved_copy,
    same_shape,
)

aten = torch.ops.aten
Tensor = torch.Tensor

INDEX_DTYPES = frozenset({torch.int64, torch.int32, torch.uint8, torch.bool})

# Kernels of these devices need indices of the same strides; different ones are made contiguous.
UNIFORM_INDEX_DEVICES = frozenset({"cuda", "xpu", "mps"})
Indices = Sequence[TensorSpec | None]


@rule("index.Tensor", "_unsafe_index.Tensor")
def index(spec: TensorSpec, indices: Indices) -> TensorSpec:
    for position, entry in enumerate(_check_indices(spec, indices)):
        if entry is not None and entry.dtype in MASKS:
            raise DynamicOutputShapeException(
                f"index: the size of the result depends on data: index {position} of {spec} is the mask {entry}; "
                f"use torch.where or masked_fill to keep the shape"
            )
    return index_spec(spec, indices)


def _check_indices(spec: TensorSpec, indices: Indices) -> Indices:
    if not indices:
        raise DimensionError("index: at least one index must be given")
    dims = 0
    for entry in indices:
        if entry is not None and entry.dtype not in INDEX_DTYPES:
            raise DimensionError(f"index: indices must be i64, i32, u8 or b8 tensors, got {entry}")
        dims += entry.ndim if entry is not None and entry.dtype in MASKS else 1
    if len(indices) > spec.ndim or dims > spec.ndim:
        raise DimensionError(f"index: too many indices, got {dims} for {spec} of {spec.ndim} dimensions")
    return indices


def index_spec(spec: TensorSpec, indices: Indices) -> TensorSpec:
    """The result of indexing with integers only."""
    given = [(dim, entry) for dim, entry in enumerate(indices) if entry is not None]
    if not given:
        if spec.is_empty:
            return spec.like(stride=elementwise_strides(spec.shape, (spec,)))
        raise ArgumentError("index: expected at least one index other than None")
    index_shape = _common_shape([entry for _, entry in given])
    dims = [dim for dim, _ in given]
    _check_not_from_nothing(spec, dims, index_shape)
    adjacent = dims[-1] - dims[0] + 1 == len(dims)
    before = range(dims[0] if adjacent else 0)
    after = [dim for dim in range(len(before), spec.ndim) if dim not in dims]
    shape = (*(spec.shape[d] for d in before), *index_shape, *(spec.shape[d] for d in after))
    zeros = (0,) * len(index_shape)
    stride = (*(spec.stride[d] for d in before), *zeros, *(spec.stride[d] for d in after))
    source = spec.as_view(shape, stride)
    rows = [_index_row(entry, index_shape, len(before), len(after)) for _, entry in given]
    if spec.device.type in UNIFORM_INDEX_DEVICES and any(
        not same_shape(row.stride, rows[0].stride) for row in rows
    ):
        rows = [row.like() for row in rows]
    return spec.like(shape, stride=elementwise_strides(shape, (source, *rows)))


def _common_shape(indices: Sequence[TensorSpec]) -> Shape:
    try:
        return broadcast_shapes(*(entry.shape for entry in indices))
    except ShapeMismatch:
        shown = ", ".join(str(list(entry.shape)) for entry in indices)
        raise DimensionError(f"index: indices of shapes {shown} can't be broadcast together") from None


def _check_not_from_nothing(spec: TensorSpec, dims: Sequence[int], index_shape: Shape) -> None:
    for dim in dims:
        if spec.shape[dim] == 0 and not any(size == 0 or has_unbacked(size) for size in index_shape):
            raise DimensionError(f"index: dimension {dim} of {spec} is empty")


def _index_row(entry: TensorSpec, index_shape: Shape, before: int, after: int) -> TensorSpec:
    """An index as an operand of the iteration: of size 1 along the dimensions that are not indexed."""
    spread = entry
    if not same_shape(entry.shape, index_shape):
        spread = entry.as_view(*expand_strides(entry, index_shape))
    if entry.dtype is torch.int32:
        spread = preserved_copy(spread)  # converted to int64 after expansion
    shape = (*(1,) * before, *index_shape, *(1,) * after)
    stride = view_strides(spread, shape)
    return spread.like(shape, stride=stride)


def check_masks(what: str, spec: TensorSpec, indices: Iterable[TensorSpec | None]) -> list[TensorSpec]:
    """The masks among indices. Each has the sizes of the dimensions that it picks from."""
    masks: list[TensorSpec] = []
    dim = 0
    for entry in indices:
        if entry is None or entry.dtype not in MASKS:
            dim += 1
            continue
        masks.append(entry)
        if not same_shape(entry.shape, spec.shape[dim : dim + entry.ndim]):
            raise DimensionError(f"{what}: the mask {entry} does not match {spec} at dimension {dim}")
        dim += entry.ndim
    return masks


def _check_values(
    what: str, spec: TensorSpec, indices: Indices, values: TensorSpec, accumulate: bool
) -> None:
    masks = check_masks(what, spec, _check_indices(spec, indices))
    is_cast = values.dtype is not spec.dtype
    may_be_filled = (
        bool(masks) and _is_single(indices) and not accumulate and (is_cast or masks[0].dtype is torch.uint8)
    )
    is_filled = may_be_filled and values.numel == 1
    if is_filled and masks[0].dtype is torch.uint8:
        raise DtypeError(f"{what}: expected a bool mask for a single value, got {masks[0]}")
    if is_cast and not is_filled:
        raise DtypeError(f"{what}: expected values of dtype {spec.dtype}, got {values}")
    if masks and not _is_single(indices):
        return  # how many elements are written depends on the masks
    target = _largest_target(spec, indices, values) if masks else index_spec(spec, indices).shape
    try:
        check_expandable(values.shape, target, what)
    except ShapeMismatch:
        raise ShapeMismatch(
            f"{what}: the values {values} can't be broadcast to the indexed shape {list(target)}"
        ) from None


def _largest_target(spec: TensorSpec, indices: Indices, values: TensorSpec) -> Shape:
    """The shape of what one mask picks, if it picks as many elements as there are values, or all of them if it has fewer."""
    before, mask = next((dim, entry) for dim, entry in enumerate(indices) if entry is not None)
    after = spec.shape[before + mask.ndim :]
    position = values.ndim - 1 - len(after)
    count: Any = values.shape[position] if position >= 0 else 1
    is_possible = (
        is_provably_equal(count, 1) or has_unbacked(count, *mask.shape) or count <= mask.numel or count == 1
    )
    return (*spec.shape[:before], count if is_possible else mask.numel, *after)


def _is_single(indices: Indices) -> bool:
    return sum(1 for entry in indices if entry is not None) == 1


@rule("index_put", "_unsafe_index_put")
def index_put(spec: TensorSpec, indices: Indices, values: TensorSpec, accumulate: bool = False) -> TensorSpec:
    _check_values("index_put", spec, indices, values, accumulate)
    return preserved_copy(spec)


@rule("_index_put_impl_")
def index_put_impl_(
    spec: TensorSpec, indices: Indices, values: TensorSpec, accumulate: bool = False, unsafe: bool = False
) -> Same:
    _check_values("index_put_", spec, indices, values, accumulate)
    return Same(0)


@rule("_unsafe_masked_index")
def unsafe_masked_index(spec: TensorSpec, mask: TensorSpec, indices: Indices, fill: object) -> TensorSpec:
    found = index_spec(spec, _check_indices(spec, indices))
    shape = broadcast_shapes(found.shape, mask.shape)
    stride = elementwise_strides(shape, (found, mask))
    return spec.like(shape, stride=stride)


@rule("_unsafe_masked_index_put_accumulate")
def unsafe_masked_index_put(
    spec: TensorSpec, mask: TensorSpec, indices: Indices, values: TensorSpec
) -> TensorSpec:
    if values.dtype is not spec.dtype:
        raise DtypeError(
            f"_unsafe_masked_index_put_accumulate: expected values of dtype {spec.dtype}, got {values}"
        )
    places = index_spec(spec, _check_indices(spec, indices))
    check_expandable(
        broadcast_shapes(values.shape, mask.shape), places.shape, "_unsafe_masked_index_put_accumulate"
    )
    return preserved_copy(spec)


@decomposition("masked_select_backward")
def decompose_masked_select_backward(grad: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    shape = broadcast(x.shape, mask.shape)
    return torch.zeros_like(x.expand(shape), memory_format=torch.preserve_format).masked_scatter(mask, grad)


@decomposition("one_hot")
def decompose_one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """Without `num_classes`, the number of classes is data-dependent; otherwise C++ does it."""
    if num_classes != -1 or x.dtype is not torch.int64:
        return NotImplemented
    return compare_one_hot(x, x.max().item() + 1)


def can_scatter_one_hot(x: Tensor, count: object) -> bool:
    has_classes = x.dtype is torch.int64 and type(count) is int and count > 0
    return has_classes and (has_symbolic_sizes(x) or x.numel() > 0)


def scatter_one_hot(x: Tensor, count: int) -> Tensor:
    """As eager: ones written into zeros, contiguous whatever the layout of the classes."""
    places = x.unsqueeze(-1)
    zeros = torch.zeros((*x.shape, count), dtype=x.dtype, device=x.device)
    torch.autograd.graph.increment_version(zeros)  # as C++ does for writing the zeros
    return zeros.scatter_(-1, places, 1)


def compare_one_hot(x: Tensor, count: Any) -> Tensor:
    """By comparison: 1 where the class equals the number, 0 elsewhere. Contiguous whatever the layout of the classes."""
    is_equal = torch.eq(x.unsqueeze(-1), torch.arange(count, device=x.device, dtype=x.dtype))
    return is_equal.to(torch.int64, memory_format=torch.contiguous_format)
