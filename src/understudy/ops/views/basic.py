"""Views: another shape, stride or offset on the storage of the first input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dims import (
    complete_shape,
    divide_up,
    replace_size,
    size_at,
    stride_at,
    with_inserted,
    without,
    wrap_dim,
    wrap_dims,
)
from understudy.ops.shared.layouts import expand_strides, view_strides
from understudy.shapes.node import Shape, Size, Sizes
from understudy.shapes.sizes import (
    expect_in_bounds,
    has_unbacked,
    is_provably_less,
    is_symbolic,
    larger,
    smaller,
    wrap_index,
)
from understudy.spec import TensorSpec, View, complex_type, real_type


@rule("view", "_unsafe_view")
def view(spec: TensorSpec, size: Sizes) -> View:
    return View(0, view_spec(spec, complete_shape(spec, size)))


def view_spec(spec: TensorSpec, shape: Shape) -> TensorSpec:
    stride = view_strides(spec, shape)
    if stride is None:
        raise ShapeMismatch(
            f"view: {spec} can't be viewed as {list(shape)} without a copy, because some of the new dimensions "
            f"join old ones that are not adjacent in memory; use .reshape({list(shape)}) "
            f"or .contiguous() first"
        )
    return spec.as_view(shape, stride)


@rule("_reshape_alias")
def reshape_alias(spec: TensorSpec, size: Sequence[object], stride: Sequence[object]) -> View:
    return View(0, spec.as_view(size, stride))


@rule("expand", "broadcast_to")
def expand(spec: TensorSpec, size: Sequence[object], *, implicit: bool = False) -> View:
    return View(0, spec.as_view(*expand_strides(spec, size)))


@rule("permute")
def permute(spec: TensorSpec, dims: Sequence[int]) -> View:
    if len(dims) != spec.ndim:
        raise ArgumentError(f"permute: expected as many dims as {spec} has, got {list(dims)}")
    order = wrap_dims(dims, spec.ndim)
    return View(0, spec.as_view([spec.shape[d] for d in order], [spec.stride[d] for d in order]))


def transpose_spec(spec: TensorSpec, dim0: int, dim1: int) -> TensorSpec:
    first, second = wrap_dim(dim0, spec.ndim), wrap_dim(dim1, spec.ndim)
    if first == second:
        return spec
    shape, stride = list(spec.shape), list(spec.stride)
    shape[first], shape[second] = shape[second], shape[first]
    stride[first], stride[second] = stride[second], stride[first]
    return spec.as_view(shape, stride)


@rule("transpose.int", "swapaxes", "swapdims")
def transpose(spec: TensorSpec, dim0: int, dim1: int) -> View:
    return View(0, transpose_spec(spec, dim0, dim1))


@rule("t")
def t(spec: TensorSpec) -> View:
    if spec.ndim > 2:
        raise ShapeMismatch(
            f"t: expected at most 2 dimensions, {spec} has {spec.ndim}; use .mT or .transpose(...)"
        )
    return View(0, transpose_spec(spec, 0, 1) if spec.ndim == 2 else spec)


def squeeze_spec(spec: TensorSpec, dims: Sequence[int] | None = None) -> TensorSpec:
    """The spec without the dimensions of size 1 among `dims` (by default all)."""
    candidates = range(spec.ndim) if dims is None else wrap_dims(dims, spec.ndim)
    kept = [dim for dim in range(spec.ndim) if dim not in candidates or spec.shape[dim] != 1]
    return spec.as_view([spec.shape[d] for d in kept], [spec.stride[d] for d in kept])


@rule("squeeze")
def squeeze(spec: TensorSpec) -> View:
    return View(0, squeeze_spec(spec))


@rule("squeeze.dim")
def squeeze_dim(spec: TensorSpec, dim: int) -> View:
    return View(0, squeeze_spec(spec, (dim,)))


@rule("squeeze.dims")
def squeeze_dims(spec: TensorSpec, dim: Sequence[int]) -> View:
    return View(0, squeeze_spec(spec, dim))


def unsqueeze_spec(spec: TensorSpec, dim: int) -> TensorSpec:
    dim = wrap_dim(dim, spec.ndim + 1)
    step = spec.shape[dim] * spec.stride[dim] if dim < spec.ndim else 1
    return spec.as_view(with_inserted(spec.shape, dim, 1), with_inserted(spec.stride, dim, step))


@rule("unsqueeze")
def unsqueeze(spec: TensorSpec, dim: int) -> View:
    return View(0, unsqueeze_spec(spec, dim))


def select_spec(spec: TensorSpec, dim: int, index: Size) -> TensorSpec:
    if not spec.shape:
        raise DimensionError(f"select: expected at least one dimension, got {spec}")
    dim = wrap_dim(dim, spec.ndim)
    size = spec.shape[dim]
    if not expect_in_bounds(size, index):
        raise DimensionError(f"select: index {index} is out of range for dimension {dim} of {spec}")
    index = wrap_index(index, size)
    stride = spec.stride
    return spec.as_view(without(spec.shape, dim), without(stride, dim), spec.offset + index * stride[dim])


@rule("select.int")
def select(spec: TensorSpec, dim: int, index: Size) -> View:
    return View(0, select_spec(spec, dim, index))


def clamped_range(size: Any, start: Any, end: Any) -> tuple[object, object]:
    """Start and end of a slice within 0…size, as Python's own slices clamp them."""
    start = 0 if start is None else start
    if has_unbacked(size, start, end):
        return _clamped_in_data(size, start, end)
    if start < 0:
        start = start + size
        if start < 0:
            start = 0
    elif start > size:
        start = size
    # C++ passes the largest 64-bit integer for "to the end".
    if end is None or (not is_symbolic((end,)) and end == _TO_THE_END):
        return start, size
    if end < 0:
        end = end + size
    if end < start:
        end = start
    elif end > size:
        end = size
    return start, end


def _clamped_in_data(size: Size, start: Size, end: Size) -> tuple[object, object]:
    """The same for unbacked numbers, which can't be compared: with symbolic minima."""
    start = smaller(larger(wrap_index(start, size), 0), size)
    if end is None or (type(end) is int and end == _TO_THE_END):
        return start, size
    return start, larger(smaller(wrap_index(end, size), size), start)


_TO_THE_END = 2**63 - 1


def sliced_size(spec: TensorSpec, dim: int, start: object, end: Any, step: Size) -> tuple[int, Any, Any]:
    """The wrapped dimension, the first index and the number of indices of a slice."""
    if not spec.shape:
        raise DimensionError(f"slice: expected at least one dimension, got {spec}")
    dim = wrap_dim(dim, spec.ndim)
    if step <= 0:
        raise ArgumentError(f"slice: step must be positive, got {step}")
    start, end = clamped_range(spec.shape[dim], start, end)
    length = end - start
    return dim, start, length if step == 1 else divide_up(length, step)


def slice_spec(spec: TensorSpec, dim: int, start: Any, end: object, step: Any) -> TensorSpec:
    dim, start, length = sliced_size(spec, dim, start, end, step)
    stride = spec.stride
    return spec.as_view(
        replace_size(spec.shape, dim, length),
        stride if step == 1 else replace_size(stride, dim, stride[dim] * step),
        spec.offset + start * stride[dim],
    )


@rule("slice.Tensor")
def slice_(
    spec: TensorSpec, dim: int = 0, start: object = None, end: object = None, step: object = 1
) -> View:
    return View(0, slice_spec(spec, dim, start, end, step))


def narrow_spec(spec: TensorSpec, dim: int, start: Size, length: Size) -> TensorSpec:
    """A slice whose range is known to be in bounds."""
    return spec.as_view(
        replace_size(spec.shape, dim, length), spec.stride, spec.offset + start * spec.stride[dim]
    )


@rule("narrow")
def narrow(spec: TensorSpec, dim: int, start: Any, length: Any) -> View:
    if not spec.shape:
        raise DimensionError(f"narrow: expected at least one dimension, got {spec}")
    if length < 0:
        raise ArgumentError(f"narrow: the length must not be negative, got {length}")
    dim = wrap_dim(dim, spec.ndim)
    size = spec.shape[dim]
    if start < -size or start > size:
        raise DimensionError(f"narrow: start {start} is out of range for dimension {dim} of {spec}")
    start = wrap_index(start, size)
    if start + length > size:
        raise DimensionError(f"narrow: start {start} + length {length} exceeds dimension {dim} of {spec}")
    return View(0, narrow_spec(spec, dim, start, length))


@decomposition("narrow.Tensor")
def check_length(x: torch.Tensor, dim: int, start: object, length: Any) -> Any:
    """C++ compares the length with the start, which is data-dependent."""
    if -x.dim() <= dim < x.dim() and length > x.shape[dim]:
        raise DimensionError(f"narrow: length {length} exceeds dimension {dim} of {list(x.shape)}")
    return NotImplemented


@rule("diagonal")
def diagonal(spec: TensorSpec, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    return View(0, diagonal_of(spec, offset, dim1, dim2))


def diagonal_of(spec: TensorSpec, offset: int, dim1: int, dim2: int) -> TensorSpec:
    if not spec.shape:
        raise DimensionError(f"diagonal: expected at least two dimensions, got {spec}")
    first, second = wrap_dim(dim1, spec.ndim), wrap_dim(dim2, spec.ndim)
    if first == second:
        raise ArgumentError(f"diagonal: expected two different dimensions, got {first} twice")
    rows, columns = spec.shape[first], spec.shape[second]
    if offset >= 0:
        columns = columns - offset
    else:
        rows = rows + offset
    length = smaller(rows, columns)
    skipped = offset * spec.stride[second] if offset >= 0 else -offset * spec.stride[first]
    if not is_provably_less(0, length):
        length = larger(length, 0)
        skipped = skipped * smaller(length, 1)  # an empty diagonal keeps the offset of the tensor
    kept = [dim for dim in range(spec.ndim) if dim not in (first, second)]
    return spec.as_view(
        [*(spec.shape[d] for d in kept), length],
        [*(spec.stride[d] for d in kept), spec.stride[first] + spec.stride[second]],
        spec.offset + skipped,
    )


def restride_spec(spec: TensorSpec, size: Sizes, stride: Sizes, offset: Size | None) -> TensorSpec:
    if len(size) != len(stride):
        raise ArgumentError(
            f"as_strided: expected as many strides as sizes, got {list(size)} and {list(stride)}"
        )
    if any(s < 0 for s in stride):
        raise ArgumentError(
            f"as_strided: Negative strides are not supported at the moment, got strides: {list(stride)}"
        )
    if any(s < 0 for s in size) or (offset is not None and offset < 0):
        raise ArgumentError(
            f"as_strided: sizes and offset must not be negative, got {list(size)} and {offset}"
        )
    return spec.as_view(size, stride, offset)


@rule("as_strided")
def as_strided(
    spec: TensorSpec,
    size: Sizes,
    stride: Sizes,
    storage_offset: Size | None = None,
) -> View:
    return View(0, restride_spec(spec, size, stride, storage_offset))


def unfold_spec(spec: TensorSpec, dimension: int, size: Any, step: Any) -> TensorSpec:
    dim = wrap_dim(dimension, spec.ndim)
    length, stride = size_at(spec, dim), stride_at(spec, dim)
    if size < 0 or step <= 0:
        raise ArgumentError(f"unfold: expected a size ≥ 0 and a step > 0, got {size} and {step}")
    if size > length:
        raise ShapeMismatch(f"unfold: size {size} exceeds {length}, the size of dimension {dim} of {spec}")
    if not spec.shape:
        return spec.as_view((size,), (1,))
    return spec.as_view(
        (*replace_size(spec.shape, dim, (length - size) // step + 1), size),
        (*replace_size(spec.stride, dim, stride * step), stride),
    )


@rule("unfold")
def unfold(spec: TensorSpec, dimension: int, size: object, step: object) -> View:
    return View(0, unfold_spec(spec, dimension, size, step))


@rule("alias", "detach")
def alias(spec: TensorSpec) -> View:
    return View(0, spec)


@rule("view.dtype")
def view_dtype(spec: TensorSpec, dtype: torch.dtype) -> View:
    return View(0, reinterpret_spec(spec, dtype))


def reinterpret_spec(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """The same bytes as another dtype: the last dimension shrinks or grows with the size of an element."""
    if spec.dtype is dtype and not spec.conj and not spec.neg:
        return spec
    if spec.conj or spec.neg:
        raise DtypeError(
            f"view: {spec} is a lazy conjugate or negative; call .resolve_conj().resolve_neg() first"
        )
    old, new = spec.dtype.itemsize, dtype.itemsize
    if old == new:
        return spec.as_view(spec.shape, spec.stride, dtype=dtype)
    if not spec.shape:
        raise DtypeError(f"view: expected at least one dimension to view {spec} as {dtype}")
    if spec.stride[-1] != 1:
        raise DtypeError(f"view: {spec} must have stride 1 in its last dimension to become {dtype}")
    if old > new:
        ratio = old // new
        stride = [step * ratio for step in spec.stride[:-1]]
        return spec.as_view(
            (*spec.shape[:-1], spec.shape[-1] * ratio), (*stride, 1), spec.offset * ratio, dtype=dtype
        )
    ratio = new // old
    if any(part % ratio != 0 for part in (spec.shape[-1], spec.offset, *spec.stride[:-1])):
        raise DtypeError(
            f"view: the last size, the offset and the strides of {spec} must be divisible by {ratio} to become {dtype}"
        )
    stride = [step // ratio for step in spec.stride[:-1]]
    return spec.as_view(
        (*spec.shape[:-1], spec.shape[-1] // ratio), (*stride, 1), spec.offset // ratio, dtype=dtype
    )


def as_real(spec: TensorSpec, conj: bool = False) -> TensorSpec:
    stride = [step * 2 for step in spec.stride]
    return spec.as_view(
        (*spec.shape, 2), (*stride, 1), spec.offset * 2, dtype=real_type(spec.dtype), conj=conj
    )


@rule("view_as_real")
def view_as_real(spec: TensorSpec) -> View:
    if not spec.is_complex:
        raise DtypeError(f"view_as_real: {spec} is not complex")
    if spec.conj:
        raise DtypeError(f"view_as_real: {spec} is a lazy conjugate; call .resolve_conj() first")
    return View(0, as_real(spec))


@rule("view_as_complex")
def view_as_complex(spec: TensorSpec) -> View:
    if spec.dtype not in (torch.float16, torch.float32, torch.float64):
        raise DtypeError(f"view_as_complex: expected f16, f32 or f64, got {spec}")
    if not spec.shape or spec.shape[-1] != 2:
        raise ShapeMismatch(f"view_as_complex: the last dimension of {spec} must have size 2")
    uneven = any(step % 2 != 0 for size, step in zip(spec.shape, spec.stride[:-1], strict=False) if size != 1)
    if spec.stride[-1] != 1 or uneven or spec.offset % 2 != 0:
        raise ShapeMismatch(
            f"view_as_complex: {spec} must have stride 1 in its last dimension, and an even offset and even strides "
            f"elsewhere"
        )
    stride = [step // 2 for step in spec.stride[:-1]]
    return View(0, spec.as_view(spec.shape[:-1], stride, spec.offset // 2, dtype=complex_type(spec.dtype)))


@rule("_conj")
def conj(spec: TensorSpec) -> View:
    if not spec.is_complex:
        raise DtypeError(f"conj: {spec} is not complex")
    return View(0, spec.as_view(spec.shape, spec.stride, conj=not spec.conj))


@rule("_neg_view")
def neg_view(spec: TensorSpec) -> View:
    return View(0, spec.as_view(spec.shape, spec.stride, neg=not spec.neg))
