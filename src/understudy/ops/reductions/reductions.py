"""Reductions over dimensions: sums, extremes, counts, variances, norms, hashes.

Results are contiguous on every device and for every layout of the input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DataDependentOutputException, DimensionError, DtypeError
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dims import check_not_empty, reduced_shape, reduced_shape_all, wrap_dim, wrap_dims
from understudy.ops.shared.dtypes import (
    BOOL,
    COMPLEX,
    COMPLEX_HALF,
    FLOAT8,
    FLOATS,
    check_any_dtype,
)
from understudy.ops.traits.ranges import (
    FALSE,
    TRUE,
    Operand,
    ValueRange,
    as_truth,
    is_finite,
    positions_in,
    round_outwards,
    truth,
    value_range,
)
from understudy.shapes.node import Scalar
from understudy.spec import TensorSpec
from understudy.spec.elementwise import float_type, is_integral, real_type

Tensor = torch.Tensor

Dims = Sequence[int] | None
Dtype = torch.dtype | None
ANY_COMPLEX_OR_FLOAT = FLOATS | COMPLEX | COMPLEX_HALF


# --- sums and products


def _total_dtype(what: str, x: TensorSpec, dtype: Dtype) -> torch.dtype:
    """Integers accumulate in int64, unless a dtype is given."""
    if dtype is not None:
        return dtype
    return torch.int64 if is_integral(x.dtype, include_bool=True) else x.dtype


@rule("sum")
def sum_all(x: TensorSpec, *, dtype: Dtype = None) -> TensorSpec:
    return x.like((), dtype=_total_dtype("sum", x, dtype))


@rule("sum.dim_IntList")
def sum_dims(x: TensorSpec, dim: Dims, keepdim: bool = False, *, dtype: Dtype = None) -> TensorSpec:
    return x.like(reduced_shape_all(x, dim, keepdim), dtype=_total_dtype("sum", x, dtype))


@rule("nansum")
def nansum(x: TensorSpec, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None) -> TensorSpec:
    if x.is_complex or (dtype is not None and dtype.is_complex and x.is_floating_point):
        raise DtypeError(f"nansum: complex dtypes are not supported, got {x} and dtype={dtype}")
    return x.like(reduced_shape_all(x, dim, keepdim), dtype=_total_dtype("nansum", x, dtype))


@rule("prod")
def prod_all(x: TensorSpec, *, dtype: Dtype = None) -> TensorSpec:
    return x.like((), dtype=_total_dtype("prod", x, dtype))


@rule("prod.dim_int")
def prod_dim(x: TensorSpec, dim: int, keepdim: bool = False, *, dtype: Dtype = None) -> TensorSpec:
    shape = reduced_shape(x.shape, [wrap_dim(dim, x.ndim)], keepdim)
    return x.like(shape, dtype=_total_dtype("prod", x, dtype))


def _mean_dtype(x: TensorSpec, dtype: Dtype) -> torch.dtype:
    result = dtype or x.dtype
    if is_integral(result, include_bool=True):
        raise DtypeError(
            f"mean: expected a floating-point or complex dtype, got {result} for {x}; give dtype="
        )
    return result


@rule("mean")
def mean_all(x: TensorSpec, *, dtype: Dtype = None) -> TensorSpec:
    return x.like((), dtype=_mean_dtype(x, dtype))


@rule("mean.dim")
def mean_dims(x: TensorSpec, dim: Dims, keepdim: bool = False, *, dtype: Dtype = None) -> TensorSpec:
    return x.like(reduced_shape_all(x, dim, keepdim), dtype=_mean_dtype(x, dtype))


@rule("logsumexp")
def logsumexp(x: TensorSpec, dim: Sequence[int], keepdim: bool = False) -> TensorSpec:
    if not dim and x.shape and not keepdim and not x.is_empty:
        raise ArgumentError("logsumexp: dim=[] needs keepdim=True")
    if is_integral(x.dtype, include_bool=True):
        x = x.like(dtype=float_type(x.dtype))
    return x.like(reduced_shape_all(x, dim, keepdim))


@rule("trace")
def trace(x: TensorSpec) -> TensorSpec:
    if x.ndim != 2:
        raise DimensionError(f"trace: expected a matrix, got {x}")
    return x.like((), dtype=torch.int64 if is_integral(x.dtype) else x.dtype)


# --- extremes


def _extreme_dims(what: str, x: TensorSpec, dim: Sequence[int]) -> list[int]:
    dims = wrap_dims(dim, x.ndim) if dim else list(range(x.ndim))
    check_not_empty(what, x, dims)
    return dims


@rule("amax", "amin")
def amax(x: TensorSpec, dim: Sequence[int] = (), keepdim: bool = False) -> TensorSpec:
    return x.like(reduced_shape(x.shape, _extreme_dims("amax/amin", x, dim), keepdim))


@rule("max", "min")
def max_all(x: TensorSpec) -> TensorSpec:
    _extreme_dims("max/min", x, ())
    return x.like(())


@rule("max.dim", "min.dim")
def max_dim(x: TensorSpec, dim: int, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return _with_indices(x, _extreme_dims("max/min", x, [dim]), keepdim)


@rule("aminmax")
def aminmax(x: TensorSpec, *, dim: int | None = None, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    dims = _extreme_dims("aminmax", x, () if dim is None else [dim])
    result = x.like(reduced_shape(x.shape, dims, keepdim))
    return result, result


@rule("argmax", "argmin")
def argmax(x: TensorSpec, dim: int | None = None, keepdim: bool = False) -> TensorSpec:
    dims = _extreme_dims("argmax/argmin", x, () if dim is None else [dim])
    return x.like(reduced_shape(x.shape, dims, keepdim), dtype=torch.int64)


@rule("median", "nanmedian")
def median_all(x: TensorSpec) -> TensorSpec:
    return x.like(())


@rule("median.dim", "nanmedian.dim")
def median_dim(x: TensorSpec, dim: int, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return _with_indices(x, _extreme_dims("median", x, [dim]), keepdim)


@rule("mode")
def mode(x: TensorSpec, dim: int = -1, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return _with_indices(x, _extreme_dims("mode", x, [dim]), keepdim)


@rule("kthvalue")
def kthvalue(x: TensorSpec, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[TensorSpec, TensorSpec]:
    dims = _extreme_dims("kthvalue", x, [dim])
    size = x.shape[dims[0]] if x.shape else 1
    if k < 1 or k > size:
        raise ArgumentError(f"kthvalue: expected k between 1 and {size} for {x}, got {k}")
    return _with_indices(x, dims, keepdim)


def _with_indices(x: TensorSpec, dims: list[int], keepdim: bool) -> tuple[TensorSpec, TensorSpec]:
    shape = reduced_shape(x.shape, dims, keepdim)
    return x.like(shape), x.like(shape, dtype=torch.int64)


# --- truth and counting


def _truth(x: TensorSpec) -> torch.dtype:
    """For uint8 the result is uint8, for historical reasons; otherwise bool."""
    return torch.uint8 if x.dtype is torch.uint8 else torch.bool


@rule("any", "all")
def any_all(x: TensorSpec) -> TensorSpec:
    return x.like((), dtype=_truth(x))


@rule("any.dim", "all.dim")
def any_dim(x: TensorSpec, dim: int, keepdim: bool = False) -> TensorSpec:
    return x.like(reduced_shape(x.shape, [wrap_dim(dim, x.ndim)], keepdim), dtype=_truth(x))


@rule("any.dims", "all.dims")
def any_dims(x: TensorSpec, dim: Dims = None, keepdim: bool = False) -> Any:
    if dim is not None and len(dim) == 0:
        return x.like(dtype=_truth(x))
    return x.like(reduced_shape_all(x, dim, keepdim), dtype=_truth(x))


@rule("_is_all_true", "_is_any_true")
def is_all_true(x: TensorSpec) -> TensorSpec:
    check_any_dtype("_is_all_true", x, BOOL)
    return x.like(())


@rule("count_nonzero")
def count_nonzero(x: TensorSpec, dim: int | None = None) -> TensorSpec:
    return count_nonzero_dims(x, () if dim is None else [dim])


@rule("count_nonzero.dim_IntList")
def count_nonzero_dims(x: TensorSpec, dim: Sequence[int]) -> TensorSpec:
    return x.like(reduced_shape_all(x, dim, False), dtype=torch.int64)


@rule("equal")
def refuse_equal(*specs: object, **options: object) -> Any:
    raise DataDependentOutputException(
        "the answer is a Python bool that depends on the values of the tensors"
    )


# --- variance


def _variance(what: str, x: TensorSpec, dim: Dims, keepdim: bool) -> tuple[TensorSpec, TensorSpec]:
    if is_integral(x.dtype, include_bool=True):
        raise DtypeError(f"{what}: expected a floating-point or complex tensor, got {x}")
    shape = reduced_shape_all(x, dim, keepdim)
    return x.like(shape, dtype=real_type(x.dtype)), x.like(shape)


@rule("var.dim", "std.dim", "var.correction", "std.correction")
def var_dim(
    x: TensorSpec,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: object = None,
) -> TensorSpec:
    return _variance("var/std", x, dim, keepdim)[0]


@rule("var_mean.dim", "std_mean.dim", "var_mean.correction", "std_mean.correction")
def var_mean_dim(
    x: TensorSpec,
    dim: Dims = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: object = None,
) -> tuple[TensorSpec, TensorSpec]:
    return _variance("var_mean/std_mean", x, dim, keepdim)


# --- norms of vectors


@rule("linalg_vector_norm")
def vector_norm(
    x: TensorSpec, ord: Scalar = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Dtype = None
) -> TensorSpec:
    check_any_dtype("vector_norm", x, ANY_COMPLEX_OR_FLOAT | FLOAT8)
    if dtype is not None and (
        dtype.is_complex != x.is_complex
        or not (dtype.is_floating_point or dtype.is_complex)
        or torch.promote_types(x.dtype, dtype) is not dtype
    ):
        raise DtypeError(f"vector_norm: {x} can't be computed in {dtype} without loss")
    if ord < 0 or ord == float("inf"):
        _extreme_norm_exists(x, ord, dim)
    return x.like(reduced_shape_all(x, dim, keepdim), dtype=real_type(dtype or x.dtype))


def _extreme_norm_exists(x: TensorSpec, order: object, dim: Dims) -> None:
    dims = wrap_dims(dim, x.ndim) if dim else range(x.ndim)
    if any(x.shape and x.shape[d] == 0 for d in dims):
        raise ArgumentError(f"vector_norm: the norm of order {order} is undefined without elements, got {x}")


def _norm(x: TensorSpec, p: Scalar | None, dim: Dims, keepdim: bool, dtype: torch.dtype) -> TensorSpec:
    if dtype.is_complex:
        raise DtypeError(f"norm: expected a real dtype for the norm of {x}, got {dtype}")
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@rule("norm.Scalar")
def norm_all(x: TensorSpec, p: Scalar = 2) -> TensorSpec:
    return vector_norm(x, p)


@rule("norm.ScalarOpt_dim")
def norm_dims(x: TensorSpec, p: Scalar | None, dim: Sequence[int], keepdim: bool = False) -> TensorSpec:
    return vector_norm(x, 2 if p is None else p, dim, keepdim)


@rule("norm.ScalarOpt_dim_dtype")
def norm_dims_dtype(
    x: TensorSpec, p: Scalar | None, dim: Sequence[int], keepdim: bool, *, dtype: torch.dtype
) -> TensorSpec:
    return _norm(x, p, dim, keepdim, dtype)


@rule("norm.ScalarOpt_dtype")
def norm_all_dtype(x: TensorSpec, p: Scalar | None, *, dtype: torch.dtype) -> TensorSpec:
    return _norm(x, p, None, False, dtype)


# --- Hashes of tensors, along some dimensions ---------------------------------------------------------------


@rule("hash_tensor")
def hash_tensor(
    x: TensorSpec, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> TensorSpec:
    if mode != 0:
        raise ArgumentError(f"hash_tensor: expected mode 0, got {mode}")
    dims = wrap_dims(dim, x.ndim) if dim else list(range(x.ndim))
    check_not_empty("hash_tensor", x, dims)
    return x.like(reduced_shape(x.shape, dims, keepdim), dtype=torch.uint64)


@decomposition("is_nonzero")
def decompose_is_nonzero(x: Tensor) -> bool:
    """`bool(x)`"""
    if x.numel() != 1:
        many = "more than one value" if x.numel() != 0 else "no values"
        raise RuntimeError(f"Boolean value of Tensor with {many} is ambiguous")
    return bool(x.item())


# --- between which numbers the results lie

# `all` and `any` of unknown masks are taken to be checks, which pass.


@value_range("all", "_is_all_true")
def _range_of_all(x: Operand, dim: Any = None, *args: object, **kwargs: object) -> ValueRange:
    found = as_truth(x.range)
    if x.spec.numel == 0:
        return TRUE
    if found.value is not None or found.likely is None:
        return found.expect(1)
    if dim is None or x.spec.is_symbolic:
        return truth(float(found.likely >= 1))
    return truth(found.likely ** _count_along(x, dim))


@value_range("_is_any_true")
def _range_of_nan_check(x: Operand) -> ValueRange:
    """Asked by `torch.autograd.detect_anomaly` only, whether a gradient has NaN: unknown ones are taken not to."""
    return TRUE if x.range.value else FALSE


@value_range("any")
def _range_of_any(x: Operand, dim: Any = None, *args: object, **kwargs: object) -> ValueRange:
    found = as_truth(x.range)
    if x.spec.numel == 0:
        return FALSE
    if found.value is not None or found.likely is None:
        return found.expect(0)
    if dim is None or x.spec.is_symbolic:
        return truth(float(found.likely > 0))
    return truth(1 - (1 - found.likely) ** _count_along(x, dim))


@value_range("max", "min", "amax", "amin")
def _range_of_extremes(x: Operand, *args: object, **kwargs: object) -> ValueRange | tuple[ValueRange, ...]:
    if args and isinstance(args[0], Operand):
        return _larger_range(x.range, args[0].range)
    if args and isinstance(args[0], int) and x.spec.ndim:  # with positions, if it is `max.dim`
        return x.range, ValueRange(0, max(x.spec.shape[args[0]] - 1, 0), False)
    return x.range


def _larger_range(a: ValueRange, b: ValueRange) -> ValueRange:
    return ValueRange(min(a.low, b.low), max(a.high, b.high), a.may_be_nan or b.may_be_nan)


@value_range("argmax", "argmin")
def _range_of_positions(x: Operand, dim: int | None = None, keepdim: bool = False) -> ValueRange:
    return positions_in(x, dim)


@value_range("sum")
def _range_of_sum(
    x: Operand, dim: Any = None, *args: object, dtype: torch.dtype | None = None
) -> ValueRange | None:
    is_narrow = dtype in NARROW or (dtype is None and x.spec.dtype in NARROW_FLOATS)
    return None if is_narrow else _add_up(x.range, x, dim)


@value_range("count_nonzero")
def _range_of_count_nonzero(x: Operand, dim: Any = None) -> ValueRange | None:
    return _add_up(as_truth(x.range), x, dim)


def _add_up(each: ValueRange, x: Operand, dim: Any) -> ValueRange | None:
    if x.spec.is_symbolic or not is_finite(each):
        return None
    count = _count_along(x, dim)
    share = 0.5 if each.likely is None and (each.low, each.high) == (0, 1) else each.likely
    likely = None if share is None else share * count
    return round_outwards(each.low * count, each.high * count, False, likely, x.is_float)


def _count_along(x: Operand, dim: Any) -> int:
    """How many elements become one; of plain sizes."""
    dims = [dim] if isinstance(dim, int) else dim
    sizes: list[Any] = [x.spec.shape[d] for d in dims] if dims and x.spec.ndim else [x.spec.numel]
    return int(math.prod(sizes))


NARROW_FLOATS = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
NARROW = (*NARROW_FLOATS, torch.int8, torch.uint8, torch.int16)
"""In these, a sum overflows sooner than numbers are large."""


@value_range("mean")
def _range_of_mean(x: Operand, *args: object, **kwargs: object) -> ValueRange | None:
    if x.spec.is_symbolic:
        return None
    return round_outwards(
        x.range.low, x.range.high, x.range.may_be_nan or not x.spec.numel, x.range.likely, True
    )
