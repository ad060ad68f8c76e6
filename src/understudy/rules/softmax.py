"""Softmax and its relatives."""

from __future__ import annotations

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.rules.dtype_sets import BOOL, FLOATS, INTEGERS, UNSIGNED, check_cpu_dtype
from understudy.rules.reduced_dims import wrap_dim
from understudy.rules.registry import rule
from understudy.spec import TensorSpec, same_shape

Dtype = torch.dtype | None


@rule("_softmax", "_log_softmax")
def softmax(x: TensorSpec, dim: int, half_to_float: bool) -> TensorSpec:
    wrap_dim(dim, x.ndim)
    if half_to_float:
        if x.device.type == "cpu":
            raise ArgumentError(f"softmax: the CPU kernel does not widen {x.dtype} on the way")
        return x.like(dtype=torch.float32)
    _check_dtype(x)
    return x.like()


@rule("softmax.int", "log_softmax.int")
def softmax_in_dtype(x: TensorSpec, dim: int, dtype: Dtype = None) -> TensorSpec:
    wrap_dim(dim, x.ndim)
    converted = x.like(dtype=dtype)
    _check_dtype(converted)
    return converted


def _check_dtype(x: TensorSpec) -> None:
    """The kernel is not asked where there is nothing to compute."""
    if x.dtype not in FLOATS and not x.is_empty:
        check_cpu_dtype("softmax", x, FLOATS)


@rule("_safe_softmax")
def safe_softmax(x: TensorSpec, dim: int, dtype: Dtype = None) -> TensorSpec:
    check_cpu_dtype("_safe_softmax", x, FLOATS | INTEGERS | UNSIGNED | BOOL)
    return softmax_in_dtype(x, dim, dtype)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(grad: TensorSpec, output: TensorSpec, dim: int, input_dtype: torch.dtype) -> TensorSpec:
    wrap_dim(dim, grad.ndim)
    if not same_shape(grad.shape, output.shape):
        raise ShapeMismatch(f"softmax backward: {grad} and {output} differ in shape")
    check_cpu_dtype("softmax backward", grad, FLOATS)
    narrowed = grad.dtype is torch.float32 and input_dtype is torch.float16
    if grad.device.type == "cpu" and (narrowed or grad.dtype is not output.dtype):
        raise DtypeError(f"softmax backward: no CPU kernel for {grad} and {output} to {input_dtype}")
    return grad.like(dtype=torch.float16 if narrowed else grad.dtype)
