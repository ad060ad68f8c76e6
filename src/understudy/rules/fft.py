"""Fourier transforms.

Kernel libraries transform the last dimensions of a contiguous batch, so eager brings the others (the batch) to the
front, ordered by their strides, and leaves the result in that order of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.rules.dtype_sets import FLOATS, HALVES
from understudy.rules.registry import rule
from understudy.shapes.sizes import is_any_of
from understudy.spec import TensorSpec, complex_type, contiguous_strides, preserved_copy, real_type
from understudy.spec.tensor_spec import Size

Dims = Sequence[int]

CUFFT_LARGEST = 3  # dimensions in one call of cuFFT


def _memory_order(stride: Size, dims: Dims) -> list[int]:
    """Dimensions from the slowest to the fastest: a batch by its strides, then the transformed ones as given."""
    batch = _split_off(len(stride), dims)
    batch.sort(key=lambda dim: stride[dim], reverse=True)
    return [*batch, *dims]


def _split_off(ndim: int, dims: Dims) -> list[int]:
    """The dimensions not in `dims`, in the order in which swapping from both ends leaves them (it shows only
    where strides are equal)."""
    order = list(range(ndim))
    first, last = 0, ndim
    while True:
        while first < last and order[first] not in dims:
            first += 1
        last -= 1
        while first < last and order[last] in dims:
            last -= 1
        if first >= last:
            return order[:first]
        order[first], order[last] = order[last], order[first]
        first += 1


def _strides_after(stride: Size, sizes: Size, dims: Dims) -> Size:
    order = _memory_order(stride, dims)
    packed = contiguous_strides([sizes[dim] for dim in order])
    result: list[Any] = [0] * len(sizes)
    for dim, step in zip(order, packed, strict=True):
        result[dim] = step
    return tuple(result)


def _by_stride(stride: Size, dims: Dims) -> list[int]:
    return sorted(dims, key=lambda dim: stride[dim], reverse=True)


def _staged(stride: Size, sizes: Size, dims: Dims) -> Size:
    """cuFFT takes few dimensions at once: the fastest first, in the layout that the last call left."""
    left = list(dims)
    while left:
        left = _by_stride(stride, left)
        stride = _strides_after(stride, sizes, left[-CUFFT_LARGEST:])
        left = left[:-CUFFT_LARGEST]
    return stride


def _fits_cufft(dims: Dims) -> bool:
    return len(dims) <= CUFFT_LARGEST and not (len(dims) >= 2 and dims[0] == 0 and dims[1] == 1)


def _prepared(what: str, x: TensorSpec, dims: Dims) -> TensorSpec:
    if any(not 0 <= dim < x.ndim for dim in dims):
        raise ArgumentError(f"{what}: {list(dims)} are no dimensions of {x}")
    if x.device.type == "cpu":
        if x.dtype in HALVES or x.dtype is torch.complex32:
            raise DtypeError(f"{what}: no CPU kernel for {x.dtype}, given as {x}")
        if x.is_empty:
            raise ShapeMismatch(f"{what}: {x} has no elements")
    return preserved_copy(x) if x.conj or x.neg else x


def _without_rule(x: TensorSpec) -> bool:
    """Builds without MKL have another kernel for CPU."""
    return x.device.type not in ("cpu", "cuda") or (
        x.device.type == "cpu" and not torch.backends.mkl.is_available()
    )


@rule("_fft_c2c")
def complex_to_complex(x: TensorSpec, dim: Dims, normalization: int, forward: bool) -> Any:
    if not x.is_complex:
        raise DtypeError(f"_fft_c2c: expected complex numbers, got {x}")
    if not dim:
        return preserved_copy(x)
    if _without_rule(x):
        return NotImplemented
    x = _prepared("_fft_c2c", x, dim)
    return x.like(stride=_complex_strides(x, dim))


def _complex_strides(x: TensorSpec, dims: Dims) -> Size:
    if x.device.type == "cuda":
        return _staged(x.stride, x.shape, dims)
    return _strides_after(x.stride, x.shape, _by_stride(x.stride, dims))


@rule("_fft_r2c")
def real_to_complex(x: TensorSpec, dim: Dims, normalization: int, onesided: bool) -> Any:
    if x.dtype not in FLOATS:
        raise DtypeError(f"_fft_r2c: expected floating numbers, got {x}")
    if not dim:
        raise ArgumentError("_fft_r2c: no dimension to transform")
    if _without_rule(x):
        return NotImplemented
    x = _prepared("_fft_r2c", x, dim)
    *others, last = dim
    half = (*x.shape[:last], x.shape[last] // 2 + 1, *x.shape[last + 1 :])
    shape = half if onesided else x.shape
    dtype = complex_type(x.dtype)
    if x.device.type == "cpu":
        order = [*_by_stride(x.stride, others), last]
        return x.like(shape, stride=_strides_after(x.stride, shape, order), dtype=dtype)
    if _fits_cufft(dim):
        return x.like(shape, stride=_strides_after(x.stride, shape, dim), dtype=dtype)
    if not others:
        return x.like(shape, stride=_strides_after(x.stride, shape, [last]), dtype=dtype)
    if not onesided:  # filled up to its full size in a fresh tensor
        return x.like(shape, dtype=dtype)
    return x.like(shape, stride=_staged(_strides_after(x.stride, half, [last]), half, others), dtype=dtype)


@rule("_fft_c2r")
def complex_to_real(x: TensorSpec, dim: Dims, normalization: int, last_dim_size: Any) -> Any:
    if not x.is_complex:
        raise DtypeError(f"_fft_c2r: expected complex numbers, got {x}")
    if not dim:
        raise ArgumentError("_fft_c2r: no dimension to transform")
    if _without_rule(x):
        return NotImplemented
    x = _prepared("_fft_c2r", x, dim)
    *others, last = dim
    given = x.shape[last]
    if x.device.type == "cpu" and not is_any_of(given, last_dim_size // 2 + 1, last_dim_size):
        raise ShapeMismatch(f"_fft_c2r: {given} values of {x} do not make {last_dim_size}")
    shape = (*x.shape[:last], last_dim_size, *x.shape[last + 1 :])
    dtype = real_type(x.dtype)
    if x.device.type == "cuda" and _fits_cufft(dim):
        return x.like(shape, stride=_strides_after(x.like().stride, shape, dim), dtype=dtype)
    stride = _complex_strides(x, others) if others else x.stride
    if x.device.type == "cuda" and not others:
        stride = x.like().stride
    return x.like(shape, stride=_strides_after(stride, shape, [last]), dtype=dtype)
