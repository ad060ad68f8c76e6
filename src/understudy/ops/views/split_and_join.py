"""Operators that split a tensor into a list of views (split, chunk), and that concatenate tensors (cat, stack)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DimensionError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dims import divide_up, replace_size, with_inserted, wrap_dim
from understudy.ops.shared.layouts import is_provably_row_major, looks_channels_last
from understudy.ops.views.basic import (
    narrow_spec,
    select_spec,
    unsqueeze_spec,
    view_spec,
)
from understudy.shapes.node import Shape, Size, Sizes
from understudy.shapes.sizes import (
    add_all,
    at_least_one,
    expect_equal,
    has_unbacked,
    hint_of,
    is_provably_equal,
)
from understudy.spec import (
    TensorSpec,
    View,
    channels_last_strides,
    common_device,
    contiguous_strides,
    product,
    result_type,
    same_shape,
)
from understudy.spec.strides import CHANNELS_LAST_ORDER

Tensor = torch.Tensor
aten = torch.ops.aten


def pieces(spec: TensorSpec, dim: int, sizes: Sizes) -> list[View]:
    views, start = [], 0
    for size in sizes:
        views.append(View(0, narrow_spec(spec, dim, start, size)))
        start = start + size
    return views


def equal_sizes(spec: TensorSpec, dim: int, split_size: Size) -> list[Size]:
    """The sizes of the pieces: `split_size` each, the last may be smaller."""
    length = spec.shape[dim]
    if split_size < 0:
        raise ArgumentError(f"split: split_size must be at least 0, got {split_size}")
    if split_size == 0:
        if length != 0:
            raise ArgumentError(f"split: split_size must be positive for dimension {dim} of {spec}, got 0")
        return [0]
    # The number of pieces has to be a plain number: one guard, where the size is symbolic.
    full = _count(length, split_size) - 1
    return [*[split_size] * full, length - full * split_size]


def _count(length: Any, split_size: object) -> int:
    """The number of pieces, at least one. For symbolic sizes, with the simplest possible guard."""
    count = -(-length // split_size)
    number = hint_of(count)
    if type(count) is not int and number is not None:
        number = max(number, 1)
        if length <= number * split_size and (number == 1 or length > (number - 1) * split_size):
            return int(number)
    return operator.index(at_least_one(count))


@rule("split.Tensor", "unsafe_split.Tensor")
def split(spec: TensorSpec, split_size: Size, dim: int = 0) -> list[View]:
    if not spec.shape:
        raise ShapeMismatch(f"split: expected at least one dimension, got {spec}")
    dim = wrap_dim(dim, spec.ndim)
    return pieces(spec, dim, equal_sizes(spec, dim, split_size))


@rule("split_with_sizes", "split.sizes", "unsafe_split_with_sizes")
def split_with_sizes(spec: TensorSpec, split_sizes: Sizes, dim: int = 0) -> list[View]:
    if not spec.shape:
        raise ShapeMismatch(f"split_with_sizes: expected at least one dimension, got {spec}")
    dim = wrap_dim(dim, spec.ndim)
    total: Any = 0
    for size in split_sizes:
        if size < 0:
            raise ArgumentError(f"split_with_sizes: {list(split_sizes)} has a negative size")
        total = total + size
    if not expect_equal(total, spec.shape[dim], is_checked_by_operator=True):
        raise ShapeMismatch(
            f"split_with_sizes: {list(split_sizes)} add up to {total}, "
            f"dimension {dim} of {spec} has size {spec.shape[dim]}"
        )
    return pieces(spec, dim, split_sizes)


@rule("unbind.int")
def unbind(spec: TensorSpec, dim: int = 0) -> list[View]:
    if not spec.shape:
        raise DimensionError(f"unbind: expected at least one dimension, got {spec}")
    dim = wrap_dim(dim, spec.ndim)
    return [View(0, select_spec(spec, dim, index)) for index in range(spec.shape[dim])]


# --- Operators that concatenate tensors: cat, stack and their relatives ---------------------------


@rule("cat", "concat", "concatenate")
def cat(tensors: Sequence[TensorSpec], dim: int = 0) -> TensorSpec:
    return join_specs(tensors, dim)


def join_specs(tensors: Sequence[TensorSpec], dim: int) -> TensorSpec:
    if not tensors:
        raise ArgumentError("cat: the list of tensors is empty")
    first: TensorSpec | None = None
    joined: list[Any] = []
    for position, tensor in enumerate(tensors):
        if not tensor.shape:
            raise ShapeMismatch(f"cat: tensor {position} of the list is 0-dim: {tensor}; use stack instead")
        if len(tensor.shape) == 1 and tensor.shape[0] == 0:
            continue  # an empty 1-D tensor is skipped
        if first is None:
            first, dim = tensor, wrap_dim(dim, tensor.ndim)
        else:
            _check_joinable(first, tensor, position, dim)
        joined.append(tensor.shape[dim])
    model = tensors[0]
    dtype, device = result_type(*tensors), common_device(tensors)
    if first is None:
        return model.like((0,), dtype=dtype, device=device)
    shape = replace_size(first.shape, dim, add_all(joined))
    return model.like(shape, stride=_joined_strides(tensors, shape), dtype=dtype, device=device)


def _check_joinable(first: TensorSpec, other: TensorSpec, position: int, dim: int) -> None:
    if first.shape is other.shape:
        return
    if other.ndim != first.ndim:
        raise ShapeMismatch(
            f"cat: {first} has {first.ndim} dimensions, tensor {position} of the list has {other.ndim}: {other}"
        )
    for at, (size, other_size) in enumerate(zip(first.shape, other.shape, strict=True)):
        if at != dim and size != other_size and not expect_equal(size, other_size):
            raise ShapeMismatch(
                f"cat: along dimension {dim}, all other sizes must be equal, but dimension {at} has size {size} in "
                f"{first} and {other_size} in tensor {position} of the list, {other}"
            )


def _joined_strides(tensors: Sequence[TensorSpec], shape: tuple[Any, ...]) -> tuple[object, ...]:
    """Channels-last if all tensors look like it, including the skipped ones."""
    if len(shape) in (4, 5):
        ndim = len(shape)
        if all(tensor.ndim == ndim and looks_channels_last(tensor) for tensor in tensors):
            return channels_last_strides(shape)
    return contiguous_strides(shape)


def _has_to_be(shape: Sizes, wanted: Sizes) -> bool:
    return (
        has_unbacked(*shape, *wanted) and len(shape) == len(wanted) and all(map(expect_equal, shape, wanted))
    )


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
        return join_specs([unsqueeze_spec(tensor, dim) for tensor in tensors], dim)
    # Eager concatenates along the dimension after the new one, then views the result.
    along = join_specs(tensors, dim)
    split = view_spec(along, with_inserted(first.shape, dim, len(tensors)))
    return along.like(split.shape, stride=split.stride)


@rule("block_diag")
def block_diag(tensors: Sequence[TensorSpec]) -> Any:
    if not tensors:
        return NotImplemented
    rows: Any = 0
    columns: Any = 0
    for position, tensor in enumerate(tensors):
        if tensor.ndim > 2:
            raise ShapeMismatch(
                f"block_diag: tensor {position} of the list has more than 2 dimensions: {tensor}"
            )
        height, width = (1,) * (2 - tensor.ndim) + tensor.shape
        rows, columns = rows + height, columns + width
    return tensors[0].like((rows, columns), dtype=result_type(*tensors))


# --- Chunks of several tensors, concatenated chunk by chunk: used to gather sharded parameters ------


@rule("_chunk_cat")
def chunk_cat(tensors: Sequence[TensorSpec], dim: int, num_chunks: int) -> Any:
    """Each tensor is padded to whole chunks. Plain sizes, and calls whose strides depend on layouts, are left to torch.

    torch would add a guard on whether padding is needed; the shape is the same in both cases.
    """
    if not any(spec.is_symbolic for spec in tensors):
        return NotImplemented
    first = tensors[0]
    is_plain = num_chunks >= 1 and all(
        (spec.dtype, spec.device) == (first.dtype, first.device) for spec in tensors
    )
    if dim < 0 and all(spec.ndim == first.ndim for spec in tensors):
        dim += first.ndim
    if not is_plain or dim < 0 or any(dim >= spec.ndim for spec in tensors):
        return NotImplemented
    width: Any = 0
    for spec in tensors:
        if spec.is_empty:
            raise ShapeMismatch(f"_chunk_cat: expected tensors with elements, got {spec}")
        if not same_shape(spec.shape[:dim], first.shape[:dim]):
            raise ShapeMismatch(f"_chunk_cat: {first} and {spec} differ before dimension {dim}")
        chunk = (spec.shape[dim] + num_chunks - 1) // num_chunks * product(spec.shape[dim + 1 :])
        if not _goes_row_major(spec, (*spec.shape[:dim], num_chunks, chunk)):
            return NotImplemented
        width = width + chunk
    return first.like((*first.shape[:dim], num_chunks, width))


def _goes_row_major(spec: TensorSpec, shape: Shape) -> bool:
    """Whether a tensor, split into chunks of this shape, can't look channels-last."""
    if len(shape) not in CHANNELS_LAST_ORDER:
        return True
    is_contiguous = all(map(is_provably_equal, spec.stride, contiguous_strides(spec.shape)))
    return is_contiguous and is_provably_row_major(spec.like(shape))


# --- decompositions for symbolic sizes ----------------------------------------------------------------------


@decomposition("tensor_split.tensor_indices_or_sections")
def decompose_tensor_split(x: Tensor, places: Tensor, dim: int = 0) -> Any:
    """The split points, or the number of pieces, are data-dependent: each becomes a symbol, unless it is determined."""
    if places.dtype is not torch.int64 or places.dim() > 1:
        return NotImplemented  # C++ raises the error
    if places.dim() == 0:
        return torch.tensor_split(x, int(places.item()), dim)
    return aten.tensor_split.indices(x, [places[i].item() for i in range(int(places.shape[0]))], dim)


@decomposition("chunk")
def check_chunks(x: Tensor, chunks: int, dim: int = 0) -> Any:
    """C++ computes with symbols, which have more than 64 bits."""
    if chunks > 0 and -x.dim() <= dim < x.dim():
        divide_up(x.shape[dim], chunks)
    return NotImplemented


@decomposition("unsafe_chunk")
def decompose_unsafe_chunk(x: Tensor, chunks: int, dim: int = 0) -> Any:
    if chunks <= 0:
        return NotImplemented  # C++ raises the error
    length = x.shape[wrap_dim(dim, x.dim())]
    size = divide_up(length, chunks)
    if size == 0:
        return torch.unsafe_split_with_sizes(
            x, [size] * (chunks - 1) + [size - (size * chunks - length)], dim
        )
    return aten.unsafe_split.Tensor(x, size, dim)


@decomposition("unflatten_dense_tensors")
def decompose_unflatten(flat: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Parts of a flat tensor, in the shapes of others."""
    results: list[Tensor] = []
    start: Any = 0
    for like in tensors:
        if like.numel() == 0:
            results.append(torch.empty((0,), dtype=flat.dtype, device=flat.device))
            continue
        results.append(torch.narrow(flat, 0, start, like.numel()).view(like.shape))
        start = start + like.numel()
    return results
