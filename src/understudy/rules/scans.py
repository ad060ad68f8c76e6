"""Running sums, products, maxima and minima along a dimension."""

from __future__ import annotations

import torch

from understudy.rules.dims import wrap_dim
from understudy.rules.dtype_sets import (
    BOOL,
    COMPLEX,
    FLOATS,
    NUMBERS,
    REAL_NUMBERS,
    check_cpu_dtype,
)
from understudy.rules.registry import rule
from understudy.spec import TensorSpec, Value, is_integral


@rule("cumsum", "cumprod")
def running_total(spec: TensorSpec, dim: int, *, dtype: torch.dtype | None = None) -> TensorSpec:
    """Contiguous whatever the input is. Integers add up in 64 bits."""
    wrap_dim(dim, spec.ndim)
    if dtype is None:
        dtype = torch.int64 if is_integral(spec.dtype, include_bool=True) else spec.dtype
    result = spec.like(dtype=dtype)
    check_cpu_dtype("cumsum and cumprod", result, NUMBERS)
    return result


@rule("cummax", "cummin")
def running_extreme(spec: TensorSpec, dim: int) -> tuple[TensorSpec, TensorSpec]:
    if not spec.is_empty:
        wrap_dim(dim, spec.ndim)
    if spec.shape:  # a single element is copied, whatever it is
        check_cpu_dtype("cummax and cummin", spec, REAL_NUMBERS | BOOL)
    return spec.like(), spec.like(dtype=torch.int64)


@rule("_cummax_helper", "_cummin_helper")
def running_extreme_into(spec: TensorSpec, values: TensorSpec, indices: TensorSpec, dim: int) -> Value:
    wrap_dim(dim, spec.ndim)
    return Value(None)


@rule("logcumsumexp", "_logcumsumexp")
def logcumsumexp(spec: TensorSpec, dim: int) -> TensorSpec:
    wrap_dim(dim, spec.ndim)
    check_cpu_dtype("logcumsumexp", spec, FLOATS | COMPLEX)
    return spec.like()


@rule("cummaxmin_backward")
def cummaxmin_backward(grad: TensorSpec, input: TensorSpec, indices: TensorSpec, dim: int) -> TensorSpec:
    return input.like()
