"""Elementwise operators on three operands, and those that choose between values."""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.rules.dtypes import COMPLEX_HALF, check_dtype, kind
from understudy.rules.in_place import written_in_place
from understudy.rules.number_ranges import check_stored
from understudy.rules.registry import exact_out, rule
from understudy.spec import (
    Same,
    TensorSpec,
    broadcast_shapes,
    common_device,
    elementwise,
    is_integral,
    number_dtype,
    preserved_copy,
    result_type,
)


@rule("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(condition: TensorSpec, a: Any, b: Any) -> TensorSpec:
    if condition.dtype not in (torch.bool, torch.uint8):
        raise DtypeError(f"where: the condition must be a bool tensor, not {condition}")
    dtype = result_type(a, b)
    on_cpu = common_device((condition, a, b)).type == "cpu"
    chosen = [
        preserved_copy(x, dtype) if isinstance(x, TensorSpec) and on_cpu and x.dtype is not dtype else x
        for x in (a, b)
    ]
    return elementwise((condition, *chosen), dtype)


@rule("addcmul")
def addcmul(a: TensorSpec, b: TensorSpec, c: TensorSpec, *, value: Any = 1) -> TensorSpec:
    common = result_type(a, b, c)
    check_dtype("addcmul", common, "ifc", common_device((a, b, c)))
    check_number_fits("addcmul", value, common)
    return elementwise((a, b, c), common, common)


@rule("addcdiv")
def addcdiv(a: TensorSpec, b: TensorSpec, c: TensorSpec, *, value: Any = 1) -> TensorSpec:
    if is_integral(b.dtype, True) and is_integral(c.dtype, True):
        raise DtypeError(f"addcdiv: the quotient of integers {b} and {c} is not supported; cast one to float")
    common = result_type(a, b, c)
    check_dtype("addcdiv", common, "fc", common_device((a, b, c)), COMPLEX_HALF)
    check_number_fits("addcdiv", value, common)
    return elementwise((a, b, c), common, common)


def check_number_fits(name: str, number: Any, dtype: torch.dtype) -> None:
    """A complex number can't be stored as a real one; other numbers are truncated, and all can be bools."""
    if kind(number_dtype(number)) == "c" and kind(dtype) in "if" and number.imag != 0:
        raise ArgumentError(f"{name}: {number} can't be stored in {dtype}")


@rule("lerp.Scalar")
def lerp_by_number(start: TensorSpec, end: TensorSpec, weight: Any) -> TensorSpec:
    _check_lerp(start, end)
    check_dtype("lerp", start.dtype, "fc", start.device, COMPLEX_HALF)
    return elementwise((start, end), start.dtype)


@rule("lerp.Tensor")
def lerp(start: TensorSpec, end: TensorSpec, weight: TensorSpec) -> TensorSpec:
    _check_lerp(start, end)
    if weight.dtype is not start.dtype and weight.shape:
        raise DtypeError(f"lerp: the weight {weight} must have the dtype of {start}")
    common = result_type(start, end, weight)
    check_dtype("lerp", common, "fc", start.device, COMPLEX_HALF)
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
        check_dtype("clamp", common, "if", a.device)
    for bound in (min, max):
        check_stored("clamp", bound, common, a.device)
    return elementwise((a,), common, common)


@rule("clamp_min", "clamp_max")
def clamp_one_side(a: TensorSpec, bound: Any) -> TensorSpec:
    return clamp(a, bound)


@rule("clamp.Tensor")
def clamp_tensor(a: TensorSpec, min: Any = None, max: Any = None) -> TensorSpec:
    _check_bounds(min, max)
    common = result_type(a, min, max)
    _check_clamp_dtype(common)
    if min is not None and max is not None:  # one bound alone is maximum or minimum, which take bools
        check_dtype("clamp", common, "if", a.device)
    return elementwise((a, min, max), common, common)


@rule("clamp_min.Tensor", "clamp_max.Tensor")
def clamp_one_side_tensor(a: TensorSpec, bound: TensorSpec) -> TensorSpec:
    return clamp_tensor(a, bound)


def _check_bounds(min: Any, max: Any) -> None:
    if min is None and max is None:
        raise ArgumentError("clamp: at least one of min and max must be given")


def _check_clamp_dtype(dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise DtypeError(f"clamp: complex numbers have no order ({dtype})")


@rule("masked_fill.Scalar")
def masked_fill(a: TensorSpec, mask: TensorSpec, value: Any) -> TensorSpec:
    _check_mask(mask)
    check_stored("masked_fill", value, a.dtype, a.device)
    return _filled(a, mask)


@rule("masked_fill.Tensor")
def masked_fill_tensor(a: TensorSpec, mask: TensorSpec, value: TensorSpec) -> TensorSpec:
    _check_mask(mask)
    if value.shape:
        raise ShapeMismatch(f"masked_fill: the value must be a 0-dim tensor, not {value}")
    return _filled(a, mask)


def _filled(a: TensorSpec, mask: TensorSpec) -> TensorSpec:
    return TensorSpec(broadcast_shapes(a.shape, mask.shape), dtype=a.dtype, device=a.device)


def _check_mask(mask: TensorSpec) -> None:
    if mask.dtype is not torch.bool:
        raise DtypeError(f"masked_fill: the mask must be a bool tensor, not {mask}")


@rule("threshold")
def threshold(a: TensorSpec, threshold: Any, value: Any) -> TensorSpec:
    check_dtype("threshold", a.dtype, "if", a.device)
    for number in (threshold, value):
        check_stored("threshold", number, a.dtype, a.device)
    return elementwise((a,), a.dtype)


@rule("isclose")
def isclose(
    a: TensorSpec, b: TensorSpec, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> TensorSpec:
    if a.dtype is not b.dtype:
        raise DtypeError(f"isclose: {a} and {b} must have the same dtype")
    if rtol < 0 or atol < 0:
        raise ArgumentError(f"isclose: tolerances must not be negative (rtol={rtol}, atol={atol})")
    return elementwise((a, b), torch.bool)


@rule("masked_fill_.Scalar")
def masked_fill_in_place(a: TensorSpec, mask: TensorSpec, value: Any) -> Same:
    return _written(a, masked_fill(a, mask, value))


@rule("masked_fill_.Tensor")
def masked_fill_tensor_in_place(a: TensorSpec, mask: TensorSpec, value: TensorSpec) -> Same:
    return _written(a, masked_fill_tensor(a, mask, value))


def _written(a: TensorSpec, result: TensorSpec) -> Same:
    """Filling an expanded tensor is discouraged by eager, but done."""
    return written_in_place("masked_fill_", a.like(), result)


exact_out("clamp.out", "clamp_min.out", "clamp_max.out", "where.self_out", "lerp.Tensor_out")
