"""Elementwise operators on two and three operands (tensors and numbers), and those that choose between values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.dtypes import (
    check_bounds,
    check_can_store,
    check_dtype,
    check_one_dtype,
    kind,
)
from understudy.ops.variants import exact_out, write_in_place
from understudy.shapes.node import Scalar, Size
from understudy.spec import (
    Same,
    TensorSpec,
    broadcast_shapes,
    common_device,
    complex_type,
    elementwise,
    float_type,
    is_integral,
    number_dtype,
    preserved_copy,
    result_type,
    same_shape,
)

BOTH = ("Tensor", "Scalar")
ONLY_TENSORS = ("",)
SHIFTS = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
ALL_ORDERS = ("Tensor", "Scalar", "Scalar_Tensor")
POLYNOMIAL = ("", "n_scalar", "x_scalar")
EITHER_SCALAR = ("", "self_scalar", "other_scalar")

# kinds taken, overloads, names. Kinds and kernels are those of the common dtype.
Table = tuple[tuple[str, tuple[str, ...], str], ...]
COMMON_DTYPE: Table = (
    ("bifc", BOTH, "mul"),
    ("if", ALL_ORDERS, "remainder"),
    ("if", BOTH, "fmod"),
    ("if", ("", "Scalar"), "floor_divide"),
    ("bif", ONLY_TENSORS, "maximum minimum fmax fmin"),
    ("bi", ALL_ORDERS, "bitwise_and bitwise_or bitwise_xor"),
    ("i", SHIFTS, "bitwise_left_shift bitwise_right_shift"),
    ("i", BOTH, "__lshift__ __rshift__"),
    ("i", ONLY_TENSORS, "gcd lcm"),
    ("f", ONLY_TENSORS, "hypot igamma igammac logaddexp2 nextafter"),
    ("fc", ONLY_TENSORS, "logaddexp"),
)
FLOAT_RESULT: Table = (
    ("bifc", BOTH, "div"),
    ("bif", ONLY_TENSORS, "atan2"),
    ("bif", BOTH, "copysign"),
    ("bif", ("Tensor", "Scalar_Self", "Scalar_Other"), "xlogy"),
    ("bif", EITHER_SCALAR, "special_xlog1py"),
    ("bif", EITHER_SCALAR, "special_zeta"),
    (
        "bif",
        POLYNOMIAL,
        "special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
        "special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he "
        "special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t "
        "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
        "special_shifted_chebyshev_polynomial_w",
    ),
)
BOOL_RESULT: Table = (
    ("bif", BOTH, "ge gt le lt"),
    ("bifc", BOTH, "eq ne"),
    ("bifc", ONLY_TENSORS, "logical_and logical_or logical_xor"),
)


def overload(name: str, of: str) -> str:
    return f"{name}.{of}" if of else name


def binary(
    name: str, kinds: str, computes_in: Callable[[torch.dtype], torch.dtype],
    result_of: Callable[[torch.dtype], torch.dtype],
) -> Callable[[Any, Any], TensorSpec]:  # fmt: skip
    def binary_rule(a: TensorSpec, b: Scalar | TensorSpec) -> TensorSpec:
        common = computes_in(result_type(a, b))
        check_dtype(name, common, kinds)
        return elementwise((a, b), result_of(common), common)

    return binary_rule


def _same(dtype: torch.dtype) -> torch.dtype:
    return dtype


def _bool(dtype: torch.dtype) -> torch.dtype:
    return torch.bool


for _table, _computes_in, _result_of in (
    (COMMON_DTYPE, _same, _same),
    (FLOAT_RESULT, float_type, _same),
    (BOOL_RESULT, _same, _bool),
):
    for _kinds, _overloads, _names in _table:
        for _name in _names.split():
            _function = binary(_name, _kinds, _computes_in, _result_of)
            rule(*(overload(_name, _overload) for _overload in _overloads))(_function)


def check_alpha(name: str, alpha: object, dtype: torch.dtype) -> None:
    """Raise if `alpha` is of a higher kind (bool < int < float < complex) than the result."""
    if type(alpha) is int:
        return
    if isinstance(alpha, bool) and dtype is not torch.bool:
        raise ArgumentError(f"{name}: a bool alpha needs bool tensors, got {dtype}")
    rank = "bifc"
    if rank.index(kind(number_dtype(alpha))) > max(rank.index(kind(dtype)), 1):
        raise ArgumentError(f"{name}: alpha={alpha} is not supported for a result of {dtype}")


@rule("add.Tensor", "add.Scalar")
def add(a: TensorSpec, b: Scalar | TensorSpec, alpha: Scalar | complex = 1) -> TensorSpec:
    common = result_type(a, b)
    if type(alpha) is not int:
        check_alpha("add", alpha, common)
    return elementwise((a, b), common, common)


@rule("sub.Tensor", "sub.Scalar")
def sub(a: TensorSpec | Size, b: Scalar | TensorSpec, alpha: Scalar | complex = 1) -> TensorSpec:
    check_no_bool(a, b)
    common = result_type(a, b)
    if type(alpha) is not int:
        check_alpha("sub", alpha, common)
    return elementwise((a, b), common, common)


@rule("rsub.Tensor", "rsub.Scalar")
def rsub(a: TensorSpec, b: Any, alpha: Scalar | complex = 1) -> TensorSpec:
    return sub(b, a, alpha)


def check_no_bool(*operands: object) -> None:
    for operand in operands:
        if operand is True or operand is False or getattr(operand, "dtype", None) is torch.bool:
            raise DtypeError("sub: bools can't be subtracted; use logical_not or bitwise_xor")


@rule("div.Tensor_mode", "div.Scalar_mode")
def div_mode(a: Any, b: Any, *, rounding_mode: str | None) -> TensorSpec:
    common = result_type(a, b)
    if rounding_mode is None:
        common = float_type(common)
        check_dtype("div", common, "fc")
    elif rounding_mode in ("floor", "trunc"):
        check_dtype("div", common, "if")
    else:
        raise ArgumentError(f"div: expected rounding_mode None, 'trunc' or 'floor', got {rounding_mode!r}")
    return elementwise((a, b), common, common)


@rule("pow.Tensor_Tensor")
def pow_tensor(base: Any, exponent: Any) -> TensorSpec:
    common = _pow_dtype(base, exponent)
    return elementwise((base, exponent), common, common)


@rule("pow.Tensor_Scalar")
def pow_by_number(base: TensorSpec, exponent: Any) -> TensorSpec:
    common = result_type(base, exponent)
    try:
        _pow_dtype(base, exponent)
    except DtypeError:
        if exponent != 0 and exponent != 1:  # these two are a fill with ones and a copy
            raise
    if is_integral(common, True) and exponent < 0:
        raise ArgumentError(f"pow: integers can't be raised to a negative power, got {base} and {exponent}")
    if is_integral(common, False):
        check_can_store("pow", exponent, common, base.device)
    return elementwise((base,), common, common)  # the number does not affect the strides


@rule("pow.Scalar")
def pow_of_number(base: object, exponent: TensorSpec) -> TensorSpec:
    return exponent.like(dtype=_pow_dtype(base, exponent))


@rule("__ilshift__.Tensor", "__ilshift__.Scalar", "__irshift__.Tensor", "__irshift__.Scalar")
def shift_in_place(a: TensorSpec, by: object) -> Same:
    shift = cast("Callable[..., TensorSpec]", rule.by_name("bitwise_left_shift.Tensor"))
    return write_in_place("shift", a, shift(a, by))


@rule("pow_.Tensor")
def pow_tensor_in_place(base: TensorSpec, exponent: object) -> Same:
    return write_in_place("pow_", base, pow_tensor(base, exponent))


@rule("pow_.Scalar")
def pow_by_number_in_place(base: TensorSpec, exponent: object) -> Same:
    return write_in_place("pow_", base, pow_by_number(base, exponent))


def _pow_dtype(base: Any, exponent: Any) -> torch.dtype:
    common = result_type(base, exponent)
    check_dtype("pow", common, "ifc")
    return common


@rule("ldexp.Tensor")
def ldexp(a: TensorSpec, exponent: TensorSpec) -> TensorSpec:
    """Integer exponents of real numbers have their own kernel; otherwise it is a product with a power of two."""
    if a.is_floating_point and is_integral(exponent.dtype, True):
        check_dtype("ldexp", exponent.dtype, "i")
        result = elementwise((a, exponent), a.dtype)
        return preserved_copy(a) if same_shape(result.shape, a.shape) else result
    if a.dtype is torch.float32 or is_integral(a.dtype, True):
        power = pow_of_number(2.0, exponent)
    else:
        power = pow_tensor(a.like(()), exponent)
    common = result_type(a, power)
    return elementwise((a, power), common, common)


@rule("heaviside")
def heaviside(a: TensorSpec, values: TensorSpec) -> TensorSpec:
    check_one_dtype("heaviside", a, values)
    check_dtype("heaviside", a.dtype, "bif")
    return elementwise((a, values), a.dtype)


@rule("complex")
def complex_of_real_and_imaginary(real: TensorSpec, imag: TensorSpec) -> TensorSpec:
    return _complex_of_parts("complex", real, imag, (torch.float16, torch.float32, torch.float64))


@rule("polar")
def polar(magnitude: TensorSpec, angle: TensorSpec) -> TensorSpec:
    return _complex_of_parts("polar", magnitude, angle, (torch.float16, torch.float32, torch.float64))


def _complex_of_parts(name: str, a: TensorSpec, b: TensorSpec, takes: tuple[torch.dtype, ...]) -> TensorSpec:
    check_one_dtype(name, a, b)
    if a.dtype not in takes:
        raise DtypeError(f"{name}: expected float16, float32 or float64, got {a.dtype}")
    return elementwise((a, b), complex_type(a.dtype))


exact_out.mark("complex.out", "polar.out", "heaviside.out")


# --- Elementwise operators on three operands, and those that choose between values --------------------------


@rule("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(condition: TensorSpec, a: Any, b: Any) -> TensorSpec:
    if condition.dtype not in (torch.bool, torch.uint8):
        raise DtypeError(f"where: expected a bool tensor as condition, got {condition}")
    dtype = result_type(a, b)
    on_cpu = common_device((condition, a, b)).type == "cpu"
    chosen = [
        preserved_copy(x, dtype) if isinstance(x, TensorSpec) and on_cpu and x.dtype is not dtype else x
        for x in (a, b)
    ]
    return elementwise((condition, *chosen), dtype)


@rule("addcmul")
def addcmul(a: TensorSpec, b: TensorSpec, c: TensorSpec, *, value: Scalar | complex = 1) -> TensorSpec:
    common = result_type(a, b, c)
    check_dtype("addcmul", common, "ifc")
    check_number_fits("addcmul", value, common)
    return elementwise((a, b, c), common, common)


@rule("addcdiv")
def addcdiv(a: TensorSpec, b: TensorSpec, c: TensorSpec, *, value: Scalar | complex = 1) -> TensorSpec:
    if is_integral(b.dtype, True) and is_integral(c.dtype, True):
        raise DtypeError(f"addcdiv: the quotient of integers {b} and {c} is not supported; cast one to float")
    common = result_type(a, b, c)
    check_dtype("addcdiv", common, "fc")
    check_number_fits("addcdiv", value, common)
    return elementwise((a, b, c), common, common)


def check_number_fits(name: str, number: Any, dtype: torch.dtype) -> None:
    """Raise if a complex number is stored in a real dtype other than bool; other numbers are truncated."""
    if kind(number_dtype(number)) == "c" and kind(dtype) in "if" and number.imag != 0:
        raise ArgumentError(f"{name}: {number} can't be stored in {dtype}")


@rule("lerp.Scalar")
def lerp_by_number(start: TensorSpec, end: TensorSpec, weight: Scalar | complex) -> TensorSpec:
    _check_lerp(start, end)
    check_dtype("lerp", start.dtype, "fc")
    if isinstance(weight, complex) and weight.imag != 0 and not start.dtype.is_complex:
        raise ArgumentError(f"lerp: the weight {weight} does not fit into {start.dtype}")
    return elementwise((start, end), start.dtype)


@rule("lerp.Tensor")
def lerp(start: TensorSpec, end: TensorSpec, weight: TensorSpec) -> TensorSpec:
    _check_lerp(start, end)
    if weight.dtype is not start.dtype and weight.shape:
        raise DtypeError(f"lerp: the weight {weight} must have the dtype of {start}")
    common = result_type(start, end, weight)
    check_dtype("lerp", common, "fc")
    return elementwise((start, end, weight), common, common)


def _check_lerp(start: TensorSpec, end: TensorSpec) -> None:
    if start.dtype is not end.dtype:
        raise DtypeError(f"lerp: {start} and {end} must have the same dtype")


@rule("clamp")
def clamp(a: TensorSpec, min: Any = None, max: Any = None) -> TensorSpec:
    """The bounds are numbers that take part in promotion, but not in the layout."""
    _check_bounds(min, max)
    _check_clamp_dtype(a.dtype)
    common = result_type(a, min, max)
    _check_clamp_dtype(common)
    if common is torch.bool:
        check_dtype("clamp", common, "if")
    check_bounds("clamp", min, max, common, a.device)
    return elementwise((a,), common, common)


@rule("clamp_min")
def clamp_min(a: TensorSpec, bound: Scalar | complex) -> TensorSpec:
    return clamp(a, bound)


@rule("clamp_max")
def clamp_max(a: TensorSpec, bound: Scalar | complex) -> TensorSpec:
    return clamp(a, None, bound)


@rule("clamp.Tensor")
def clamp_tensor(a: TensorSpec, min: Any = None, max: Any = None) -> TensorSpec:
    _check_bounds(min, max)
    common = result_type(a, min, max)
    _check_clamp_dtype(common)
    if min is not None and max is not None:  # one bound alone is maximum or minimum, which take bools
        check_dtype("clamp", common, "if")
    return elementwise((a, min, max), common, common)


@rule("clamp_min.Tensor", "clamp_max.Tensor")
def clamp_one_side_tensor(a: TensorSpec, bound: TensorSpec) -> TensorSpec:
    return clamp_tensor(a, bound)


def _check_bounds(min: Scalar | complex | None, max: Scalar | TensorSpec | None) -> None:
    if min is None and max is None:
        raise ArgumentError("clamp: at least one of min and max must be given")


def _check_clamp_dtype(dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise DtypeError(f"clamp: complex dtypes are not supported, got {dtype}")


@rule("masked_fill.Scalar")
def masked_fill(a: TensorSpec, mask: TensorSpec, value: Scalar | complex) -> TensorSpec:
    _check_mask(mask)
    check_can_store("masked_fill", value, a.dtype, a.device)
    return _fill_mask(a, mask)


@rule("masked_fill.Tensor")
def masked_fill_tensor(a: TensorSpec, mask: TensorSpec, value: TensorSpec) -> TensorSpec:
    _check_mask(mask)
    if value.shape:
        raise ShapeMismatch(f"masked_fill: expected a 0-dim tensor as value, got {value}")
    return _fill_mask(a, mask)


def _fill_mask(a: TensorSpec, mask: TensorSpec) -> TensorSpec:
    return TensorSpec(broadcast_shapes(a.shape, mask.shape), dtype=a.dtype, device=a.device)


def _check_mask(mask: TensorSpec) -> None:
    if mask.dtype is not torch.bool:
        raise DtypeError(f"masked_fill: expected a bool tensor as mask, got {mask}")


@rule("threshold")
def threshold(a: TensorSpec, threshold: object, value: object) -> TensorSpec:
    check_dtype("threshold", a.dtype, "if")
    for number in (threshold, value):
        check_can_store("threshold", number, a.dtype, a.device)
    return elementwise((a,), a.dtype)


@rule("masked_fill_.Scalar")
def masked_fill_in_place(a: TensorSpec, mask: TensorSpec, value: Scalar | complex) -> Same:
    return _written(a, masked_fill(a, mask, value))


@rule("masked_fill_.Tensor")
def masked_fill_tensor_in_place(a: TensorSpec, mask: TensorSpec, value: TensorSpec) -> Same:
    return _written(a, masked_fill_tensor(a, mask, value))


def _written(a: TensorSpec, result: TensorSpec) -> Same:
    """Eager warns about filling an expanded tensor, but does it."""
    return write_in_place("masked_fill_", a.like(), result)


exact_out.mark("clamp.out", "clamp_min.out", "clamp_max.out", "where.self_out", "lerp.Tensor_out")
