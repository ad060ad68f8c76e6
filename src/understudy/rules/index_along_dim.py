"""Operators with a vector of indices along one dimension: index_select, index_add, index_copy, …"""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch
from understudy.rules.dims import replaced, size_at, without, wrap_dim
from understudy.rules.dtype_sets import BOOL, COMPLEX_HALF, NUMBERS, check_cpu_dtype
from understudy.rules.number_ranges import check_stored, is_stored
from understudy.rules.registry import rule
from understudy.shapes.sizes import has_to_be
from understudy.spec import TensorSpec, preserved_copy

INTEGER_INDEX = frozenset({torch.int32, torch.int64})
FILLED_DTYPES = NUMBERS | BOOL | COMPLEX_HALF
REDUCTIONS = ("prod", "mean", "amax", "amin")


def check_vector(what: str, index: TensorSpec, dtypes: frozenset[torch.dtype] = INTEGER_INDEX) -> None:
    if index.ndim > 1:
        raise DimensionError(f"{what}: the index must be a vector, got {index}")
    if index.dtype not in dtypes:
        raise DtypeError(f"{what}: the index must be i64{' or i32' if len(dtypes) > 1 else ''}, got {index}")


@rule("index_select")
def index_select(spec: TensorSpec, dim: int, index: TensorSpec) -> TensorSpec:
    dim = wrap_dim(dim, spec.ndim)
    check_vector("index_select", index)
    if spec.shape:
        return spec.like(replaced(spec.shape, dim, index.numel))
    if not has_to_be(index.numel, 1):
        raise ShapeMismatch(f"index_select: {spec} has one element, the index {index} selects {index.numel}")
    return spec.like()


def _check_source(what: str, spec: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec, exact: bool) -> None:
    """The source has one slice of the tensor for each index; `exact` tells 0-dim from 1-D of size 1."""
    check_cpu_dtype(what, spec, NUMBERS if what == "index_reduce" else FILLED_DTYPES)
    if source.dtype is not spec.dtype:
        raise DtypeError(f"{what}: {spec} and the source {source} must have one dtype")
    if dim != 0 and dim >= source.ndim:
        raise DimensionError(f"{what}: the source {source} has no dimension {dim}")
    if size_at(source, dim) != index.numel:
        raise ShapeMismatch(
            f"{what}: {index.numel} indices, but dimension {dim} of the source {source} has size {size_at(source, dim)}"
        )
    if without(spec.shape, dim) != without(source.shape, dim) or (exact and spec.ndim != source.ndim):
        raise ShapeMismatch(f"{what}: apart from dimension {dim}, {spec} and the source {source} must have equal sizes")


@rule("index_add")
def index_add(spec: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec, *, alpha: Any = 1) -> TensorSpec:
    dim = wrap_dim(dim, spec.ndim)
    check_vector("index_add", index)
    _check_source("index_add", spec, dim, index, source, exact=True)
    return spec.like()


@rule("index_reduce")
def index_reduce(
    spec: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec, reduce: str, *, include_self: bool = True
) -> TensorSpec:
    if reduce not in REDUCTIONS:
        raise ArgumentError(f"index_reduce: reduce must be one of {', '.join(REDUCTIONS)}, not {reduce!r}")
    dim = wrap_dim(dim, spec.ndim)
    check_vector("index_reduce", index)
    _check_source("index_reduce", spec, dim, index, source, exact=True)
    return spec.like()


@rule("index_copy")
def index_copy(spec: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec) -> TensorSpec:
    dim = wrap_dim(dim, spec.ndim)
    check_vector("index_copy", index, frozenset({torch.int64}))
    if not source.shape and not has_to_be(index.numel, 1):
        raise DimensionError(f"index_copy: the source {source} is one element, there are {index.numel} indices")
    _check_source("index_copy", spec, dim, index, source, exact=False)
    return spec.like()


@rule("index_fill.int_Scalar")
def index_fill(spec: TensorSpec, dim: int, index: TensorSpec, value: Any) -> TensorSpec:
    wrap_dim(dim, spec.ndim)
    if index.ndim > 1 or index.dtype is not torch.int64:
        raise DimensionError(f"index_fill: the index must be a vector of i64, got {index}")
    check_cpu_dtype("index_fill", spec, FILLED_DTYPES)
    if isinstance(value, complex) and not spec.is_complex:
        raise DtypeError(f"index_fill: {value} is complex, {spec} is not")
    if not is_stored(value, spec.dtype, spec.device) and index.numel != 0:
        check_stored("index_fill", value, spec.dtype, spec.device)
    return preserved_copy(spec)


@rule("index_fill.int_Tensor")
def index_fill_tensor(spec: TensorSpec, dim: int, index: TensorSpec, value: TensorSpec) -> TensorSpec:
    if value.shape:
        raise ShapeMismatch(f"index_fill: the value must be 0-dim, got {value}")
    filled: TensorSpec = index_fill(spec, dim, index, 1j if value.is_complex else 1)
    return filled
