"""Elementwise operators on one tensor; gradients of elementwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.kernel_tables.table import holds
from understudy.ops.registry import rule
from understudy.ops.shared.dims import wrap_dim
from understudy.ops.shared.dtypes import (
    check_bounds,
    check_can_store,
    check_dtype,
    check_one_dtype,
)
from understudy.ops.variants import exact_out, write_in_place, write_out
from understudy.spec import (
    Same,
    TensorSpec,
    broadcast_shapes,
    elementwise,
    float_type,
    preserved_copy,
    real_type,
    result_type,
    same_shape,
)


def same_type(dtype: torch.dtype) -> torch.dtype:
    return dtype


def bool_type(dtype: torch.dtype) -> torch.dtype:
    return torch.bool


# kinds taken, names. Results have the dtype of the input.
SAME_DTYPE: tuple[tuple[str, str], ...] = (
    ("f", "frac special_round"),
    ("if", "ceil floor round trunc relu"),
    ("ifc", "neg"),
    ("bif", "sign"),
    ("bifc", "sgn"),
    ("bi", "bitwise_not"),
    ("f", "celu elu hardshrink hardsigmoid hardswish leaky_relu mish selu softplus"),
    ("fc", "silu"),
)

# Integers and bools compute in the default dtype.
FLOAT_RESULT: tuple[tuple[str, str], ...] = (
    ("bif", "digamma erf erfc erfinv i0 lgamma special_entr special_i0e special_i1 special_i1e"),
    (
        "bifc",
        "acos acosh asin asinh atan atanh cos cosh exp exp2 expm1 log log10 log1p log2 reciprocal rsqrt "
        "sigmoid sin sinc sinh sqrt tan tanh",
    ),
    (
        "bif",
        "special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 "
        "special_erfcx special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 "
        "special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 "
        "special_scaled_modified_bessel_k1 special_spherical_bessel_j0",
    ),
    ("bif", "logit"),
)
BOOL_RESULT: tuple[tuple[str, str], ...] = (
    ("bif", "isneginf isposinf signbit"),
    ("bifc", "logical_not"),
    ("bifc", "isnan"),
)


def unary(name: str, result_of: Callable[[torch.dtype], torch.dtype], kinds: str) -> None:
    """Register an operator whose result is laid out as its input; its other arguments change values only."""

    @rule(name)
    def unary_rule(a: TensorSpec, *_: object, **__: object) -> TensorSpec:
        dtype = result_of(a.dtype)
        common = dtype if result_of is float_type else a.dtype
        check_dtype(name, common, kinds)
        if common is not a.dtype:
            check_dtype(name, a.dtype, kinds)
        return elementwise((a,), dtype, common)


for _table, _result_of in ((SAME_DTYPE, same_type), (FLOAT_RESULT, float_type), (BOOL_RESULT, bool_type)):
    for _kinds, _names in _table:
        for _name in _names.split():
            unary(_name, _result_of, _kinds)


@rule("abs")
def absolute(a: TensorSpec) -> TensorSpec:
    check_dtype("abs", a.dtype, "ifc")
    if a.is_complex:
        return preserved_copy(a, real_type(a.dtype))
    return elementwise((a,), a.dtype)


@rule("abs.out")
def abs_into(a: TensorSpec, *, out: TensorSpec) -> Same:
    result = absolute(a)
    return write_out("abs.out", result.like() if a.is_complex else result, out, 1)


@rule("abs_")
def abs_in_place(a: TensorSpec) -> Same:
    check_dtype("abs_", a.dtype, "if")
    return write_in_place("abs_", a, a)


@rule("angle")
def angle(a: TensorSpec) -> TensorSpec:
    if a.is_complex:
        check_dtype("angle", a.dtype, "c")
        return a.like(dtype=real_type(a.dtype))
    dtype = float_type(a.dtype)
    return elementwise((a,), dtype, dtype)


@rule("isinf")
def isinf(a: TensorSpec) -> TensorSpec:
    if not (a.is_floating_point or a.is_complex):
        return preserved_copy(a, torch.bool)
    if a.is_complex:  # of each part on its own
        a = a.as_view(a.shape, [2 * step for step in a.stride], dtype=real_type(a.dtype), conj=False)
    return elementwise((elementwise((a,), a.dtype), 0.0), torch.bool)


@rule("deg2rad", "rad2deg")
def between_degrees_and_radians(a: TensorSpec) -> TensorSpec:
    check_dtype("deg2rad", a.dtype, "bif")
    return preserved_copy(a, float_type(a.dtype))


@rule("nan_to_num")
def nan_to_num(a: TensorSpec, *_: object, **__: object) -> TensorSpec:
    check_dtype("nan_to_num", a.dtype, "bifc")
    return preserved_copy(a)


@rule("_conj_physical")
def conj_physical(a: TensorSpec) -> TensorSpec:
    check_dtype("conj_physical", a.dtype, "bifc")
    return preserved_copy(a)


@rule("conj_physical")
def conj_physical_of_complex(a: TensorSpec) -> TensorSpec | Same:
    """Arrives whole in inference mode; others than complex numbers it gives back."""
    return conj_physical(a) if a.is_complex else Same(0)


@rule("conj_physical_")
def conj_physical_in_place(a: TensorSpec) -> Same:
    conj_physical(a)
    return Same(0)


@rule("deg2rad.out", "rad2deg.out")
def degrees_or_radians_into(a: TensorSpec, *, out: TensorSpec) -> Same:
    result = between_degrees_and_radians(a)
    return write_out("deg2rad.out", elementwise((a, 1.0), result.dtype, result.dtype), out, 1)


@rule("nan_to_num.out")
def nan_to_num_into(a: TensorSpec, *_: object, out: TensorSpec, **__: object) -> Same:
    """Unlike the functional variant, which copies, this one is an elementwise kernel."""
    result = nan_to_num(a)
    return write_out("nan_to_num.out", elementwise((result,), result.dtype), out, 1)


@rule("conj_physical.out")
def conj_physical_into(a: TensorSpec, *, out: TensorSpec) -> Same:
    return write_out("conj_physical.out", elementwise((conj_physical(a),), a.dtype), out, 1)


@rule("round.decimals")
def round_decimals(a: TensorSpec, *, decimals: int) -> TensorSpec:
    check_dtype("round", a.dtype, "f")
    return elementwise((a,), a.dtype)


@rule("polygamma")
def polygamma(n: int, a: TensorSpec) -> TensorSpec:
    if n < 0:
        raise ArgumentError(f"polygamma: the order must not be negative, got {n}")
    check_dtype("polygamma", a.dtype, "bif")
    dtype = float_type(a.dtype)
    return elementwise((a,), dtype, dtype)


@rule("polygamma_")
def polygamma_in_place(a: TensorSpec, n: int) -> Same:
    return write_in_place("polygamma_", a, polygamma(n, a))


@rule("mvlgamma")
def mvlgamma(a: TensorSpec, p: int) -> TensorSpec:
    if p < 1:
        raise ArgumentError(f"mvlgamma: p must be at least 1, got {p}")
    check_dtype("mvlgamma", a.dtype, "if")
    return a.like(dtype=float_type(a.dtype))


@rule("gelu")
def gelu(a: TensorSpec, *, approximate: str = "none") -> TensorSpec:
    check_gelu_approximation(approximate)
    check_dtype("gelu", a.dtype, "f")
    return elementwise((a,), a.dtype)


def check_gelu_approximation(approximate: str) -> None:
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"gelu: expected approximate 'none' or 'tanh', got {approximate!r}")


@rule("frexp.Tensor")
def frexp(a: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    check_dtype("frexp", a.dtype, "f")
    mantissa = preserved_copy(a)
    return mantissa, preserved_copy(a, torch.int32)


@rule("frexp.Tensor_out")
def frexp_into(a: TensorSpec, *, mantissa: TensorSpec, exponent: TensorSpec) -> tuple[Same, Same]:
    check_dtype("frexp", a.dtype, "f")
    return (
        write_out("frexp.Tensor_out", elementwise((a,), a.dtype), mantissa, 1),
        write_out("frexp.Tensor_out", elementwise((a,), torch.int32), exponent, 2),
    )


@rule("softshrink")
def softshrink(a: TensorSpec, lambd: Any = 0.5) -> TensorSpec:
    check_dtype("softshrink", a.dtype, "f")
    if lambd < 0:
        raise ArgumentError(f"softshrink: lambd must not be negative, got {lambd}")
    return elementwise((a,), a.dtype)


@rule("hardtanh")
def hardtanh(a: TensorSpec, min_val: Any = -1, max_val: Any = 1) -> TensorSpec:
    if a.dtype is torch.bool:
        raise DtypeError("hardtanh: bool tensors are not supported")
    if not a.dtype.is_signed and (min_val < 0 or max_val < 0) and not holds("clamp_saturates"):
        raise ArgumentError(
            f"hardtanh: expected bounds of at least 0 for the unsigned {a}, got {min_val} and {max_val}"
        )
    check_dtype("hardtanh", a.dtype, "if")
    for bound in (min_val, max_val):
        check_can_store("hardtanh", bound, a.dtype if a.is_floating_point else torch.int64, a.device)
    if not a.is_floating_point:  # fractions are cut off first
        low, high = (math.trunc(bound) if type(bound) is float else bound for bound in (min_val, max_val))
        check_bounds("hardtanh", low, high, a.dtype, a.device)
    return preserved_copy(a)


exact_out.mark(
    "abs.out",
    "nan_to_num.out",
    "gelu.out",
    "hardtanh.out",
    "frexp.Tensor_out",
    "isneginf.out",
    "isposinf.out",
)
exact_out.mark(
    *(f"{name}.out" for _, names in SAME_DTYPE for name in names.split() if name != "selu")
)  # has no out=


aten = torch.ops.aten


# kinds taken, names of gradients that take (gradient, other, numbers…)
GRADIENT_FIRST: tuple[tuple[str, str], ...] = (
    ("f", "mish_backward hardswish_backward hardsigmoid_backward hardtanh_backward softplus_backward"),
    ("f", "softshrink_backward hardshrink_backward logit_backward"),
    ("fc", "sigmoid_backward tanh_backward silu_backward"),
)

# The same arguments, but the other tensor is the first operand of the computation.
GRADIENT_SECOND: tuple[tuple[str, str], ...] = (
    ("if", "threshold_backward"),
    ("f", "leaky_relu_backward"),
)


def gradient(name: str, kinds: str, first: TensorSpec, second: TensorSpec) -> TensorSpec:
    common = result_type(first, second)
    check_dtype(name, common, kinds)
    return elementwise((first, second), common, common)


def _register(name: str, kinds: str, swapped: bool) -> Callable[..., TensorSpec]:
    @rule(name)
    def backward_rule(grad: TensorSpec, other: TensorSpec, *_: object, **__: object) -> TensorSpec:
        operands = (other, grad) if swapped else (grad, other)
        return gradient(name, kinds, *operands)

    return backward_rule


for _table, _swapped in ((GRADIENT_FIRST, False), (GRADIENT_SECOND, True)):
    for _kinds, _names in _table:
        for _name in _names.split():
            _register(_name, _kinds, _swapped)


@rule("gelu_backward")
def gelu_backward(grad: TensorSpec, a: TensorSpec, *, approximate: str = "none") -> TensorSpec:
    check_gelu_approximation(approximate)
    return gradient("gelu_backward", "f", grad, a)


@rule("elu_backward")
def elu_backward(
    grad: TensorSpec, alpha: object, scale: object, input_scale: object, is_result: bool, a: TensorSpec
) -> TensorSpec:
    return gradient("elu_backward", "f", grad, a)


@rule("_prelu_kernel")
def prelu_kernel(a: TensorSpec, weight: TensorSpec) -> TensorSpec:
    check_one_dtype("prelu", a, weight)
    check_dtype("prelu", a.dtype, "f")
    if not same_shape(broadcast_shapes(a.shape, weight.shape), a.shape):
        raise ShapeMismatch(f"prelu: the weight {weight} does not broadcast to {a}")
    return preserved_copy(a)


@rule("_prelu_kernel_backward")
def prelu_kernel_backward(
    grad: TensorSpec, a: TensorSpec, weight: TensorSpec
) -> tuple[TensorSpec, TensorSpec]:
    check_one_dtype("prelu", grad, a, weight)
    check_dtype("prelu", a.dtype, "f")
    result = elementwise((a, weight, grad), a.dtype)
    return result, result


@rule("log_sigmoid_forward")
def log_sigmoid_forward(a: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    check_dtype("log_sigmoid", a.dtype, "f")
    if a.device.type == "cpu":
        return a.like(), a.like()
    return elementwise((a,), a.dtype), a.like((0,))  # only the CPU kernel saves something for the gradient


@rule("log_sigmoid_backward")
def log_sigmoid_backward(grad: TensorSpec, a: TensorSpec, buffer: TensorSpec) -> TensorSpec:
    check_dtype("log_sigmoid_backward", grad.dtype, "f")
    if grad.device.type != "cpu":
        return elementwise((a, grad), grad.dtype)
    if a.dtype is not grad.dtype or buffer.dtype is not grad.dtype:
        return NotImplemented
    if not same_shape(broadcast_shapes(grad.shape, a.shape), grad.shape):
        return NotImplemented
    return preserved_copy(grad)


@rule("rrelu_with_noise")
def rrelu_with_noise(
    a: TensorSpec, noise: TensorSpec, lower: object = 0.125, upper: object = 1 / 3, training: bool = False,
    generator: object = None,
) -> TensorSpec:  # fmt: skip
    if training:
        check_one_dtype("rrelu_with_noise", a, noise)
        check_dtype("rrelu_with_noise", a.dtype, "f")
    check_dtype("rrelu_with_noise", a.dtype, "f")
    if not same_shape(a.shape, noise.shape):
        raise ShapeMismatch(f"rrelu_with_noise: {a} and its noise {noise} must have the same shape")
    return a.like()


@rule("rrelu_with_noise_backward")
def rrelu_with_noise_backward(
    grad: TensorSpec, a: TensorSpec, noise: TensorSpec, lower: object, upper: Any, training: bool,
    self_is_result: bool,
) -> TensorSpec:  # fmt: skip
    if training and upper - lower > 1e-6:
        return elementwise((noise, grad), result_type(noise, grad), result_type(noise, grad))
    return gradient("rrelu_with_noise_backward", "f", a, grad)


@rule("glu")
def glu(a: TensorSpec, dim: int = -1) -> TensorSpec:
    if not a.shape:
        raise ShapeMismatch("glu: expected at least one dimension, got a 0-dim tensor")
    dim = wrap_dim(dim, a.ndim)
    size = a.shape[dim]
    if size % 2 != 0:
        raise ShapeMismatch(f"glu: expected an even size in dimension {dim}, got {a}")
    check_dtype("glu", a.dtype, "f")
    half = a.as_view((*a.shape[:dim], size // 2, *a.shape[dim + 1 :]), a.stride)
    return elementwise((half, half), a.dtype)


@rule("glu_backward")
def glu_backward(grad: TensorSpec, a: TensorSpec, dim: int) -> TensorSpec:
    if not a.shape:
        raise ShapeMismatch("glu_backward: expected at least one dimension, got a 0-dim tensor")
    dim = wrap_dim(dim, a.ndim)
    if a.shape[dim] % 2 != 0:
        raise ShapeMismatch(f"glu_backward: expected an even size in dimension {dim}, got {a}")
    if grad.dtype is not a.dtype:
        raise DtypeError(f"glu_backward: {grad} and {a} must have the same dtype")
    check_dtype("glu_backward", a.dtype, "f")
    return a.like()


exact_out.mark("log_sigmoid_forward.output")
