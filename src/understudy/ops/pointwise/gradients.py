"""Gradients of elementwise operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from understudy.errors import DtypeError, ShapeMismatch
from understudy.ops.pointwise.unary import check_gelu_approximation
from understudy.ops.registry import rule
from understudy.ops.shared.batching import BatchLevel, batching_rule
from understudy.ops.shared.dims import wrap_dim
from understudy.ops.shared.dtypes import COMPLEX_HALF, NONE, check_dtype, check_same_dtype
from understudy.ops.variants import exact_out
from understudy.spec import (
    TensorSpec,
    broadcast_shapes,
    common_device,
    elementwise,
    preserved_copy,
    result_type,
    same_shape,
)

aten = torch.ops.aten

Dtypes = Iterable[torch.dtype]

# kinds taken, dtypes without a CPU kernel, names of gradients that take (gradient, other, numbers…)
GRADIENT_FIRST: tuple[tuple[str, Dtypes, str], ...] = (
    ("f", NONE, "mish_backward hardswish_backward hardsigmoid_backward hardtanh_backward softplus_backward"),
    ("f", NONE, "softshrink_backward hardshrink_backward logit_backward"),
    ("fc", COMPLEX_HALF, "sigmoid_backward tanh_backward silu_backward"),
)

# The same arguments, but the other tensor is the first operand of the computation.
GRADIENT_SECOND: tuple[tuple[str, Dtypes, str], ...] = (
    ("if", NONE, "threshold_backward"),
    ("f", NONE, "leaky_relu_backward"),
)


def gradient(name: str, kinds: str, without: Dtypes, first: Any, second: Any) -> TensorSpec:
    common = result_type(first, second)
    check_dtype(name, common, kinds, common_device((first, second)), without)
    return elementwise((first, second), common, common)


def _register(name: str, kinds: str, without: Dtypes, swapped: bool) -> Callable[..., TensorSpec]:
    @rule(name)
    def backward_rule(grad: TensorSpec, other: TensorSpec, *_: Any, **__: Any) -> TensorSpec:
        operands = (other, grad) if swapped else (grad, other)
        return gradient(name, kinds, without, *operands)

    return backward_rule


for _table, _swapped in ((GRADIENT_FIRST, False), (GRADIENT_SECOND, True)):
    for _kinds, _without, _names in _table:
        for _name in _names.split():
            _register(_name, _kinds, _without, _swapped)


@rule("gelu_backward")
def gelu_backward(grad: TensorSpec, a: TensorSpec, *, approximate: str = "none") -> TensorSpec:
    check_gelu_approximation(approximate)
    return gradient("gelu_backward", "f", NONE, grad, a)


@rule("elu_backward")
def elu_backward(
    grad: TensorSpec, alpha: Any, scale: Any, input_scale: Any, is_result: bool, a: TensorSpec
) -> TensorSpec:
    return gradient("elu_backward", "f", NONE, grad, a)


@rule("_prelu_kernel")
def prelu_kernel(a: TensorSpec, weight: TensorSpec) -> TensorSpec:
    check_same_dtype("prelu", a, weight)
    check_dtype("prelu", a.dtype, "f", a.device)
    if not same_shape(broadcast_shapes(a.shape, weight.shape), a.shape):
        raise ShapeMismatch(f"prelu: the weight {weight} does not broadcast to {a}")
    return preserved_copy(a)


@rule("_prelu_kernel_backward")
def prelu_kernel_backward(
    grad: TensorSpec, a: TensorSpec, weight: TensorSpec
) -> tuple[TensorSpec, TensorSpec]:
    check_same_dtype("prelu", grad, a, weight)
    check_dtype("prelu", a.dtype, "f", a.device)
    result = elementwise((a, weight, grad), a.dtype)
    return result, result


@rule("log_sigmoid_forward")
def log_sigmoid_forward(a: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    check_dtype("log_sigmoid", a.dtype, "f", a.device)
    if a.device.type == "cpu":
        return a.like(), a.like()
    return elementwise((a,), a.dtype), a.like((0,))  # only the CPU kernel saves something for the gradient


@rule("log_sigmoid_backward")
def log_sigmoid_backward(grad: TensorSpec, a: TensorSpec, buffer: TensorSpec) -> TensorSpec:
    check_dtype("log_sigmoid_backward", grad.dtype, "f", a.device)
    if grad.device.type != "cpu":
        return elementwise((a, grad), grad.dtype)
    if a.dtype is not grad.dtype or buffer.dtype is not grad.dtype:
        return NotImplemented
    if not same_shape(broadcast_shapes(grad.shape, a.shape), grad.shape):
        return NotImplemented
    return preserved_copy(grad)


@rule("rrelu_with_noise")
def rrelu_with_noise(
    a: TensorSpec, noise: TensorSpec, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False,
    generator: Any = None,
) -> TensorSpec:  # fmt: skip
    if training:
        check_same_dtype("rrelu_with_noise", a, noise)
        check_dtype("rrelu_with_noise", a.dtype, "f", a.device, (torch.float16,))
    check_dtype("rrelu_with_noise", a.dtype, "f", a.device)
    if not same_shape(a.shape, noise.shape):
        raise ShapeMismatch(f"rrelu_with_noise: {a} and its noise {noise} must have the same shape")
    return a.like()


@rule("rrelu_with_noise_backward")
def rrelu_with_noise_backward(
    grad: TensorSpec, a: TensorSpec, noise: TensorSpec, lower: Any, upper: Any, training: bool,
    self_is_result: bool,
) -> TensorSpec:  # fmt: skip
    if training and upper - lower > 1e-6:
        return elementwise((noise, grad), result_type(noise, grad), result_type(noise, grad))
    return gradient("rrelu_with_noise_backward", "f", NONE, a, grad)


@rule("glu")
def glu(a: TensorSpec, dim: int = -1) -> TensorSpec:
    if not a.shape:
        raise ShapeMismatch("glu: a 0-dim tensor can't be halved")
    dim = wrap_dim(dim, a.ndim)
    size = a.shape[dim]
    if size % 2 != 0:
        raise ShapeMismatch(f"glu: dimension {dim} of {a} can't be halved")
    check_dtype("glu", a.dtype, "f", a.device)
    half = a.as_view((*a.shape[:dim], size // 2, *a.shape[dim + 1 :]), a.stride)
    return elementwise((half, half), a.dtype)


@rule("glu_backward")
def glu_backward(grad: TensorSpec, a: TensorSpec, dim: int) -> TensorSpec:
    if not a.shape:
        raise ShapeMismatch("glu_backward: a 0-dim tensor can't be halved")
    dim = wrap_dim(dim, a.ndim)
    if a.shape[dim] % 2 != 0:
        raise ShapeMismatch(f"glu_backward: dimension {dim} of {a} can't be halved")
    if grad.dtype is not a.dtype:
        raise DtypeError(f"glu_backward: {grad} and {a} must have the same dtype")
    check_dtype("glu_backward", a.dtype, "f", a.device)
    return a.like()


exact_out.mark("log_sigmoid_forward.output")


@batching_rule("gelu_backward")
def batch_gelu_backward(keys: Any, gradient: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> Any:
    level = BatchLevel()
    with level.below():
        result = aten.gelu_backward(level.inside(gradient), level.inside(x), approximate=approximate)
    return level.around(result)
