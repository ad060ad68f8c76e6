"""gather, scatter and their relatives: an index of as many dimensions as the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch
from understudy.rules.dims import size_at, wrap_dim
from understudy.rules.dtype_sets import BOOL, NUMBERS, REAL_NUMBERS, check_cpu_dtype
from understudy.rules.number_ranges import check_stored, is_stored
from understudy.rules.registry import rule
from understudy.spec import TensorSpec, broadcast_shapes, preserved_copy

SCATTER_REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")
ORDERED_REDUCTIONS = ("amax", "amin")
OLD_REDUCTIONS = ("add", "multiply")

MOVED_DTYPES = NUMBERS | BOOL


def _check_index(what: str, index: TensorSpec) -> None:
    if index.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"{what}: the index must be i64 or i32, got {index}")


def _check_ranks(what: str, spec: TensorSpec, index: TensorSpec, name: str) -> None:
    if (spec.ndim or 1) != (index.ndim or 1):
        raise ShapeMismatch(f"{what}: the index {index} and {name} {spec} must have as many dimensions")


@rule("gather")
def gather(spec: TensorSpec, dim: int, index: TensorSpec, *, sparse_grad: bool = False) -> TensorSpec:
    dim = wrap_dim(dim, spec.ndim)
    check_cpu_dtype("gather", spec, MOVED_DTYPES)
    if not index.is_empty:
        _check_index("gather", index)
        _check_ranks("gather", spec, index, "the input")
        _check_not_larger("gather", spec, index, dim)
    return spec.like(index.shape)


def _check_not_larger(what: str, spec: TensorSpec, index: TensorSpec, except_dim: int | None) -> None:
    for dim in range(spec.ndim or 1):
        if dim != except_dim and size_at(index, dim) > size_at(spec, dim):
            raise ShapeMismatch(f"{what}: the index {index} is larger than {spec} in dimension {dim}")


def _check_scatter(what: str, spec: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec | None) -> TensorSpec:
    """The functional result: laid out anew, unlike the input."""
    check_cpu_dtype(what, spec, MOVED_DTYPES)
    dim = wrap_dim(dim, spec.ndim)
    if src is not None and src.dtype is not spec.dtype:
        raise DtypeError(f"{what}: {spec} and the source {src} must have one dtype")
    if index.is_empty:
        return spec.like()
    _check_index(what, index)
    _check_ranks(what, spec, index, "the input")
    _check_not_larger(what, spec, index, dim)
    if src is not None:
        _check_ranks(what, src, index, "the source")
        _check_not_larger(what, src, index, None)
    return spec.like()


@rule("scatter.src", "scatter_add")
def scatter(spec: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec) -> TensorSpec:
    return _check_scatter("scatter", spec, dim, index, src)


@rule("scatter.value")
def scatter_value(spec: TensorSpec, dim: int, index: TensorSpec, value: Any) -> TensorSpec:
    if not is_stored(value, spec.dtype, spec.device) and index.numel != 0:
        check_stored("scatter", value, spec.dtype, spec.device)
    return _check_scatter("scatter", spec, dim, index, None)


@rule("scatter.reduce")
def scatter_reduce(spec: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec, *, reduce: str) -> TensorSpec:
    _check_reduction("scatter", reduce, OLD_REDUCTIONS)
    return _check_scatter("scatter", spec, dim, index, src)


@rule("scatter.value_reduce")
def scatter_value_reduce(spec: TensorSpec, dim: int, index: TensorSpec, value: Any, *, reduce: str) -> TensorSpec:
    _check_reduction("scatter", reduce, OLD_REDUCTIONS)
    return _check_scatter("scatter", spec, dim, index, None)


@rule("scatter_reduce.two")
def scatter_reduce_two(
    spec: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec, reduce: str, *, include_self: bool = True
) -> TensorSpec:
    _check_reduction("scatter_reduce", reduce, SCATTER_REDUCTIONS)
    check_cpu_dtype("scatter_reduce", spec, REAL_NUMBERS | BOOL if reduce in ORDERED_REDUCTIONS else MOVED_DTYPES)
    return _check_scatter("scatter_reduce", spec, dim, index, src)


def _check_reduction(what: str, reduce: str, known: Sequence[str]) -> None:
    if reduce not in known:
        raise ArgumentError(f"{what}: reduce must be one of {', '.join(known)}, not {reduce!r}")


def _check_flat_index(what: str, spec: TensorSpec, index: TensorSpec) -> None:
    check_cpu_dtype(what, spec, MOVED_DTYPES)
    if index.dtype is not torch.int64:
        raise DtypeError(f"{what}: the index must be i64, got {index}")
    if spec.is_empty and not index.is_empty:
        raise DimensionError(f"{what}: {spec} has no elements")


@rule("take")
def take(spec: TensorSpec, index: TensorSpec) -> TensorSpec:
    _check_flat_index("take", spec, index)
    return spec.like(index.shape)


@rule("put")
def put(spec: TensorSpec, index: TensorSpec, source: TensorSpec, accumulate: bool = False) -> TensorSpec:
    if source.dtype is not spec.dtype:
        raise DtypeError(f"put: {spec} and the source {source} must have one dtype")
    _check_flat_index("put", spec, index)
    if index.numel != source.numel:
        raise DimensionError(f"put: {index.numel} indices for {source.numel} elements of the source {source}")
    return preserved_copy(spec)


@rule("take_along_dim")
def take_along_dim(spec: TensorSpec, indices: TensorSpec, dim: int | None = None) -> Any:
    if dim is None:
        return NotImplemented
    if indices.dtype is not torch.int64:
        raise DtypeError(f"take_along_dim: the indices must be i64, got {indices}")
    if spec.ndim != indices.ndim:
        raise ShapeMismatch(f"take_along_dim: {spec} and the indices {indices} must have as many dimensions")
    at = wrap_dim(dim, spec.ndim)
    if not spec.shape:
        raise DimensionError(f"take_along_dim: {spec} has no dimension to take along")
    try:
        shape = list(broadcast_shapes(_at(spec.shape, at, 1), _at(indices.shape, at, 1)))
    except ShapeMismatch:
        raise ShapeMismatch(f"take_along_dim: {spec} and the indices {indices} can't be broadcast together") from None
    shape[at] = indices.shape[at]
    return spec.like(shape)


def _at(shape: tuple[Any, ...], dim: int, size: Any) -> tuple[Any, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


@rule("masked_scatter")
def masked_scatter(spec: TensorSpec, mask: TensorSpec, source: TensorSpec) -> TensorSpec:
    if source.dtype is not spec.dtype:
        raise DtypeError(f"masked_scatter: {spec} and the source {source} must have one dtype")
    if mask.dtype is not torch.bool:
        raise DtypeError(f"masked_scatter: the mask must be b8, got {mask}")
    check_cpu_dtype("masked_scatter", spec, MOVED_DTYPES)
    return spec.like(broadcast_shapes(spec.shape, mask.shape))


@rule("masked_scatter_backward")
def masked_scatter_backward(grad_output: TensorSpec, mask: TensorSpec, sizes: Sequence[Any]) -> TensorSpec:
    return grad_output.like(sizes)
