"""Along one dimension: running sums, products and extremes, softmax and sorting."""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.kernel_tables.table import holds
from understudy.ops.registry import rule
from understudy.ops.shared.dims import replace_size, size_at, wrap_dim
from understudy.spec import TensorSpec, Value, is_integral, preserved_copy, same_shape


@rule("cumsum", "cumprod")
def running_total(spec: TensorSpec, dim: int, *, dtype: torch.dtype | None = None) -> TensorSpec:
    """Always contiguous. Integers accumulate in int64."""
    wrap_dim(dim, spec.ndim)
    if dtype is None:
        dtype = torch.int64 if is_integral(spec.dtype, include_bool=True) else spec.dtype
    return spec.like(dtype=dtype)


@rule("cummax", "cummin")
def running_extreme(spec: TensorSpec, dim: int) -> tuple[TensorSpec, TensorSpec]:
    if not (spec.is_empty and holds("cummax_takes_any_dim_of_empty")):
        wrap_dim(dim, spec.ndim)
    return spec.like(), spec.like(dtype=torch.int64)


@rule("_cummax_helper", "_cummin_helper")
def running_extreme_into(spec: TensorSpec, values: TensorSpec, indices: TensorSpec, dim: int) -> Value:
    wrap_dim(dim, spec.ndim)
    return Value(None)


@rule("logcumsumexp", "_logcumsumexp")
def logcumsumexp(spec: TensorSpec, dim: int) -> TensorSpec:
    wrap_dim(dim, spec.ndim)
    return spec.like()


# --- Softmax and its relatives ------------------------------------------------------------------------------

Dtype = torch.dtype | None


@rule("_softmax", "_log_softmax")
def softmax(x: TensorSpec, dim: int, half_to_float: bool) -> TensorSpec:
    wrap_dim(dim, x.ndim)
    if half_to_float:
        if x.device.type == "cpu":
            raise ArgumentError(f"softmax: half_to_float is not supported on CPU, got {x.dtype}")
        return x.like(dtype=torch.float32)
    return x.like()


@rule("softmax.int", "log_softmax.int")
def softmax_in_dtype(x: TensorSpec, dim: int, dtype: Dtype = None) -> TensorSpec:
    wrap_dim(dim, x.ndim)
    return x.like(dtype=dtype)


@rule("_safe_softmax")
def safe_softmax(x: TensorSpec, dim: int, dtype: Dtype = None) -> TensorSpec:
    return softmax_in_dtype(x, dim, dtype)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(grad: TensorSpec, output: TensorSpec, dim: int, input_dtype: torch.dtype) -> TensorSpec:
    wrap_dim(dim, grad.ndim)
    if not same_shape(grad.shape, output.shape):
        raise ShapeMismatch(f"softmax backward: {grad} and {output} differ in shape")
    narrowed = grad.dtype is torch.float32 and input_dtype is torch.float16
    if grad.device.type == "cpu" and (narrowed or grad.dtype is not output.dtype):
        raise DtypeError(f"softmax backward: not implemented on CPU for {grad} and {output} to {input_dtype}")
    return grad.like(dtype=torch.float16 if narrowed else grad.dtype)


# --- Sorting: values and indices ----------------------------------------------------------


@rule("sort", "sort.stable")
def sort(
    spec: TensorSpec, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[TensorSpec, TensorSpec]:
    """Both results keep the order of dimensions in memory."""
    wrap_dim(dim, spec.ndim)
    values = preserved_copy(spec)
    return values, values.like(stride=values.stride, dtype=torch.int64)


@rule("topk")
def topk(
    spec: TensorSpec, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TensorSpec, TensorSpec]:
    dim = wrap_dim(dim, spec.ndim)
    size = size_at(spec, dim)
    if k < 0 or k > size:
        raise ArgumentError(
            f"topk: expected k between 0 and {size}, the size of dimension {dim} of {spec}, got {k}"
        )
    values = spec.like(replace_size(spec.shape, dim, k) if spec.shape else ())
    return values, values.like(dtype=torch.int64)
