"""Checks: which dtypes kernels accept, and which Python numbers a dtype can represent."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, OperatorError
from understudy.ops.kernel_tables.table import holds
from understudy.shapes.node import Scalar, Sizes
from understudy.spec import TensorSpec, product

Check = Callable[..., None]

FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
COMPLEX = frozenset({torch.complex64, torch.complex128})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
BOOL = frozenset({torch.bool})
WHOLE = INTEGERS | BOOL
MASKS = frozenset({torch.bool, torch.uint8})
"""Dtypes of indices that choose where they are true."""
HALVES = frozenset({torch.float16, torch.bfloat16})
COMPLEX_HALF = frozenset({torch.complex32})
FLOAT8 = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if name.startswith("float8_") and isinstance(dtype, torch.dtype)
)
REAL_NUMBERS = FLOATS | INTEGERS
NUMBERS = REAL_NUMBERS | COMPLEX


def unless_empty(shape: Sizes, check: Check, *args: object) -> None:
    """Eager skips its checks for empty tensors. Asked only after an error, because it may add a guard."""
    try:
        check(*args)
    except OperatorError:
        if product(shape) != 0:
            raise


def check_any_dtype(what: str, spec: TensorSpec, accepted: Container[torch.dtype]) -> None:
    """Raise for a dtype that the operator does not support on any device."""
    if spec.dtype not in accepted:
        raise DtypeError(f"{what}: {spec.dtype} is not supported, given as {spec}")


def check_one_dtype(what: str, first: TensorSpec, *others: TensorSpec | None) -> None:
    for other in others:
        if other is not None and other.dtype is not first.dtype:
            raise DtypeError(f"{what}: expected tensors of one dtype, got {first} and {other}")


def refuse_cpu(what: str, spec: TensorSpec) -> None:
    if spec.device.type == "cpu":
        raise ArgumentError(f"{what}: not implemented on CPU")


# --- Which kinds of dtypes operators take, on every device ---

REDUCED = (torch.float16, torch.bfloat16)
KIND_NAMES = {"b": "bool", "i": "integers", "f": "floats", "c": "complex numbers"}


def kind(dtype: torch.dtype) -> str:
    """`b`ool, `i`nteger, `f`loat or `c`omplex."""
    if dtype.is_floating_point:
        return "f"
    if dtype.is_complex:
        return "c"
    return "b" if dtype is torch.bool else "i"


def check_dtype(name: str, dtype: torch.dtype, kinds: str) -> None:
    """Raise for a dtype of another kind. Which dtypes CPU kernels lack is in `kernel_tables`."""
    if kind(dtype) not in kinds:
        expected = ", ".join(KIND_NAMES[one] for one in kinds)
        raise DtypeError(f"{name}: expected {expected}, got {dtype}")


# --- Which Python numbers a dtype can represent: kernels that store a number raise for others ------------

PLAIN_NUMBERS = frozenset({int, float, complex})
WITHOUT_INFINITY = FLOAT8 - {torch.float8_e5m2}
HOLDS_ALL = {
    torch.bool: "every number other than 0 is true",
    torch.float8_e8m0fnu: "eager rounds to the nearest number of the dtype",
}


def check_can_store(what: str, number: object, dtype: torch.dtype, device: torch.device) -> None:
    """Raise for a number that this dtype can't represent. Not on the meta device, which stores nothing."""
    if not can_store(number, dtype, device):
        raise ArgumentError(f"{what}: {number} can't be stored in {dtype} without overflow")


def can_store(number: object, dtype: torch.dtype, device: torch.device) -> bool:
    return type(number) not in PLAIN_NUMBERS or device.type == "meta" or can_represent(number, dtype)


def check_bounds(
    what: str,
    low: Scalar | complex | None,
    high: Scalar | complex | None,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise for bounds of a clamp that this dtype can't represent."""
    if kind(dtype) != "i" or not holds("clamp_saturates"):
        for bound in (low, high):
            check_can_store(what, bound, dtype, device)
        return
    limits = torch.iinfo(dtype)
    is_above = isinstance(low, (int, float)) and low > limits.max
    if is_above or (isinstance(high, (int, float)) and high < limits.min):
        raise ArgumentError(f"{what}: {low if is_above else high} is out of range for {dtype}")


def check_made_tensor(what: str, number: Scalar | complex, dtype: torch.dtype, device: torch.device) -> None:
    """As above, for a tensor made from the number: small floating-point dtypes round it instead."""
    is_rounded = dtype in HALVES or dtype in FLOAT8
    check_can_store(what, number, torch.float64 if is_rounded else dtype, device)


def can_represent(number: Any, dtype: torch.dtype) -> bool:
    """Whether the number is in the dtype's range; it may be rounded."""
    if dtype in HOLDS_ALL:
        return True
    if isinstance(number, complex):
        if dtype.is_complex:
            return can_represent(number.real, dtype) and can_represent(number.imag, dtype)
        return number.imag == 0 and can_represent(number.real, dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return _can_represent_as_float(number, _parts(dtype))
    limits = torch.iinfo(dtype)
    if isinstance(number, float):
        if number == float(limits.max) > limits.max:
            return holds("int64_takes_float_of_its_maximum")
        return float(limits.min) <= number <= float(limits.max)  # false for NaN
    if dtype.is_signed:
        return limits.min <= number <= limits.max
    return -limits.max <= number <= limits.max  # the negative ones wrap around


def _can_represent_as_float(number: float, dtype: torch.dtype) -> bool:
    if isinstance(number, float) and not math.isfinite(number):
        return math.isnan(number) or dtype not in WITHOUT_INFINITY
    limits = torch.finfo(dtype)
    return limits.min <= number <= limits.max


def _parts(dtype: torch.dtype) -> torch.dtype:
    """The dtype in whose range the parts have to be: complex halves are converted from larger ones."""
    if not dtype.is_complex:
        return dtype
    return torch.float64 if dtype is torch.complex128 else torch.float32
