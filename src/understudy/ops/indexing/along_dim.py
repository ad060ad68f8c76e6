"""Reading and writing along one dimension, by a vector of indices (index_select, index_add) or by a tensor of them (gather,
scatter)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import (
    broadcast,
    decomposition,
)
from understudy.ops.shared.dims import replace_size, size_at, without, wrap_dim
from understudy.ops.shared.dtypes import (
    can_store,
    check_can_store,
)
from understudy.ops.traits.ranges import Operand, ValueRange, is_finite, round_outwards, value_range
from understudy.shapes.sizes import expect_equal
from understudy.spec import TensorSpec, broadcast_shapes, preserved_copy

Function = Callable[..., Any]
Tensor = torch.Tensor

INTEGER_INDEX = frozenset({torch.int32, torch.int64})
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
        return spec.like(replace_size(spec.shape, dim, index.numel))
    if not expect_equal(index.numel, 1):
        raise ShapeMismatch(f"index_select: expected one index for the 0-dim {spec}, got {index}")
    return spec.like()


def _check_source(
    what: str, spec: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec, exact: bool
) -> None:
    """The source has one slice of the tensor for each index; `exact`: 0-dim and 1-D of size 1 are different."""
    if source.dtype is not spec.dtype:
        raise DtypeError(f"{what}: expected a source of dtype {spec.dtype}, got {source}")
    if dim != 0 and dim >= source.ndim:
        raise DimensionError(f"{what}: the source {source} has no dimension {dim}")
    if size_at(source, dim) != index.numel:
        error = DimensionError if what == "index_copy" else ShapeMismatch  # as eager
        raise error(
            f"{what}: {index.numel} indices, but dimension {dim} of the source {source} has size {size_at(source, dim)}"
        )
    if without(spec.shape, dim) != without(source.shape, dim) or (exact and spec.ndim != source.ndim):
        raise ShapeMismatch(
            f"{what}: expected a source with the sizes of {spec} except in dimension {dim}, got {source}"
        )


@rule("index_add")
def index_add(
    spec: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec, *, alpha: object = 1
) -> TensorSpec:
    dim = wrap_dim(dim, spec.ndim)
    check_vector("index_add", index)
    _check_source("index_add", spec, dim, index, source, exact=True)
    return spec.like()


@value_range("scatter_add", "scatter_add_", "index_add", "index_add_")
def _add_at(x: Operand, dim: int, index: Operand, source: Operand, *, alpha: float = 1) -> ValueRange | None:
    each, specs = source.range, (x.spec, index.spec, source.spec)
    if alpha != 1 or any(spec.is_symbolic or not spec.numel for spec in specs):
        return None
    if not is_finite(x.range) or not is_finite(each):
        return None
    added = (index if index.spec.ndim == source.spec.ndim else source).spec.numel
    was, one = x.range.likely, each.likely
    likely = None if was is None or one is None else was + one * added / x.spec.numel
    most = index.spec.numel
    low, high = x.range.low + min(0, each.low * most), x.range.high + max(0, each.high * most)
    return round_outwards(low, high, False, likely, x.is_float)


@rule("index_reduce")
def index_reduce(
    spec: TensorSpec,
    dim: int,
    index: TensorSpec,
    source: TensorSpec,
    reduce: str,
    *,
    include_self: bool = True,
) -> TensorSpec:
    if reduce not in REDUCTIONS:
        raise ArgumentError(f"index_reduce: reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}")
    dim = wrap_dim(dim, spec.ndim)
    check_vector("index_reduce", index)
    _check_source("index_reduce", spec, dim, index, source, exact=True)
    return spec.like()


@rule("index_copy")
def index_copy(spec: TensorSpec, dim: int, index: TensorSpec, source: TensorSpec) -> TensorSpec:
    dim = wrap_dim(dim, spec.ndim)
    check_vector("index_copy", index, frozenset({torch.int64}))
    if not source.shape and not expect_equal(index.numel, 1):
        raise DimensionError(
            f"index_copy: expected one index for the 0-dim source {source}, got {index.numel}"
        )
    _check_source("index_copy", spec, dim, index, source, exact=False)
    return spec.like()


@rule("index_fill.int_Scalar")
def index_fill(spec: TensorSpec, dim: int, index: TensorSpec, value: object) -> TensorSpec:
    wrap_dim(dim, spec.ndim)
    if index.ndim > 1 or index.dtype is not torch.int64:
        raise DimensionError(f"index_fill: the index must be a vector of i64, got {index}")
    if isinstance(value, complex) and not spec.is_complex:
        raise DtypeError(f"index_fill: expected a real value for {spec}, got {value}")
    if not can_store(value, spec.dtype, spec.device) and index.numel != 0:
        check_can_store("index_fill", value, spec.dtype, spec.device)
    return preserved_copy(spec)


@rule("index_fill.int_Tensor")
def index_fill_tensor(spec: TensorSpec, dim: int, index: TensorSpec, value: TensorSpec) -> TensorSpec:
    if value.shape:
        raise ShapeMismatch(f"index_fill: expected a 0-dim value, got {value}")
    filled: TensorSpec = index_fill(spec, dim, index, 1j if value.is_complex else 1)
    return filled


# --- gather, scatter and their relatives: an index of as many dimensions as the tensor ----------------------

SCATTER_REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")
OLD_REDUCTIONS = ("add", "multiply")


def _check_index(what: str, index: TensorSpec) -> None:
    if index.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"{what}: the index must be i64 or i32, got {index}")


def _check_ranks(what: str, spec: TensorSpec, index: TensorSpec, name: str) -> None:
    if (spec.ndim or 1) != (index.ndim or 1):
        raise ShapeMismatch(
            f"{what}: the index {index} and {name} {spec} must have the same number of dimensions"
        )


@rule("gather")
def gather(spec: TensorSpec, dim: int, index: TensorSpec, *, sparse_grad: bool = False) -> TensorSpec:
    dim = wrap_dim(dim, spec.ndim)
    if not index.is_empty:
        _check_index("gather", index)
        _check_ranks("gather", spec, index, "the input")
        _check_not_larger("gather", spec, index, dim)
    return spec.like(index.shape)


def _check_not_larger(what: str, spec: TensorSpec, index: TensorSpec, except_dim: int | None) -> None:
    for dim in range(spec.ndim or 1):
        if dim != except_dim and size_at(index, dim) > size_at(spec, dim):
            raise ShapeMismatch(f"{what}: the index {index} is larger than {spec} in dimension {dim}")


def _check_scatter(
    what: str, spec: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec | None
) -> TensorSpec:
    """The functional result: contiguous, unlike the input."""
    dim = wrap_dim(dim, spec.ndim)
    if src is not None and src.dtype is not spec.dtype:
        raise DtypeError(f"{what}: expected a source of dtype {spec.dtype}, got {src}")
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
def scatter_value(spec: TensorSpec, dim: int, index: TensorSpec, value: object) -> TensorSpec:
    if not can_store(value, spec.dtype, spec.device) and index.numel != 0:
        check_can_store("scatter", value, spec.dtype, spec.device)
    return _check_scatter("scatter", spec, dim, index, None)


@rule("scatter.reduce")
def scatter_reduce(
    spec: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec, *, reduce: str
) -> TensorSpec:
    _check_reduction("scatter", reduce, OLD_REDUCTIONS)
    return _check_scatter("scatter", spec, dim, index, src)


@rule("scatter.value_reduce")
def scatter_value_reduce(
    spec: TensorSpec, dim: int, index: TensorSpec, value: object, *, reduce: str
) -> TensorSpec:
    _check_reduction("scatter", reduce, OLD_REDUCTIONS)
    return _check_scatter("scatter", spec, dim, index, None)


@rule("scatter_reduce.two")
def scatter_reduce_two(
    spec: TensorSpec, dim: int, index: TensorSpec, src: TensorSpec, reduce: str, *, include_self: bool = True
) -> TensorSpec:
    _check_reduction("scatter_reduce", reduce, SCATTER_REDUCTIONS)
    return _check_scatter("scatter_reduce", spec, dim, index, src)


def _check_reduction(what: str, reduce: str, known: Sequence[str]) -> None:
    if reduce not in known:
        raise ArgumentError(f"{what}: reduce must be one of {', '.join(known)}, got {reduce!r}")


def _check_flat_index(what: str, spec: TensorSpec, index: TensorSpec) -> None:
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
        raise DtypeError(f"put: expected a source of dtype {spec.dtype}, got {source}")
    _check_flat_index("put", spec, index)
    if index.numel != source.numel:
        raise DimensionError(f"put: expected as many indices as elements of {source}, got {index.numel}")
    return preserved_copy(spec)


@rule("masked_scatter")
def masked_scatter(spec: TensorSpec, mask: TensorSpec, source: TensorSpec) -> TensorSpec:
    if source.dtype is not spec.dtype:
        raise DtypeError(f"masked_scatter: expected a source of dtype {spec.dtype}, got {source}")
    if mask.dtype is not torch.bool:
        raise DtypeError(f"masked_scatter: the mask must be b8, got {mask}")
    return spec.like(broadcast_shapes(spec.shape, mask.shape))


@rule("masked_scatter_backward")
def masked_scatter_backward(grad_output: TensorSpec, mask: TensorSpec, sizes: Sequence[object]) -> TensorSpec:
    return grad_output.like(sizes)


# --- decompositions for symbolic sizes ----------------------------------------------------------------------


@decomposition("take_along_dim")
def decompose_take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if x.dim() != indices.dim() and dim is not None:
        raise ShapeMismatch(f"take_along_dim: expected indices of {x.dim()} dimensions, got {indices.dim()}")
    if dim is None:  # here 32 bits will do
        return x.view(-1).gather(0, indices.view(-1))
    if indices.dtype is not torch.int64:
        raise DtypeError(f"take_along_dim: the indices must be int64, got {indices.dtype}")
    dim = wrap_dim(dim, x.dim())
    wanted = broadcast(replace_size(x.shape, dim, indices.shape[dim]), indices.shape)
    taken = torch.broadcast_to(indices, wanted)
    source = torch.broadcast_to(x, broadcast(replace_size(indices.shape, dim, x.shape[dim]), x.shape))
    return source.gather(dim, taken.remainder(x.shape[dim]))  # from the end, if negative
