"""Which dtypes kernels take, and which Python numbers a dtype can hold; the others are refused."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.errors import ArgumentError, DtypeError
from understudy.spec import TensorSpec

if TYPE_CHECKING:
    from understudy.shapes.node import Scalar

FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
COMPLEX = frozenset({torch.complex64, torch.complex128})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
BOOL = frozenset({torch.bool})
HALVES = frozenset({torch.float16, torch.bfloat16})
COMPLEX_HALF = frozenset({torch.complex32})
COMPLEX_BFLOAT = frozenset({torch.bfloat16.to_complex()}) - COMPLEX
"""Empty where torch has no complex dtype whose parts are bfloat16. The CPU copies and compares it, and little else."""
SMALL_COMPLEX = COMPLEX_HALF | COMPLEX_BFLOAT
FLOAT8 = frozenset(
    dtype
    for name, dtype in vars(torch).items()
    if name.startswith("float8_") and isinstance(dtype, torch.dtype)
)
REAL_NUMBERS = FLOATS | INTEGERS
NUMBERS = REAL_NUMBERS | COMPLEX


def check_cpu_dtype(what: str, spec: TensorSpec, accepted: Container[torch.dtype]) -> None:
    """Refuse what the CPU kernel is not compiled for; other devices have kernels for other dtypes."""
    if spec.dtype not in accepted and spec.device.type == "cpu":
        raise DtypeError(f"{what}: no CPU kernel for {spec.dtype}, given as {spec}")


def check_any_dtype(what: str, spec: TensorSpec, accepted: Container[torch.dtype]) -> None:
    """Refuse a dtype that the operator has no meaning for, on any device."""
    if spec.dtype not in accepted:
        raise DtypeError(f"{what}: {spec.dtype} is not taken, given as {spec}")


def check_one_dtype(what: str, first: TensorSpec, *others: TensorSpec | None) -> None:
    for other in others:
        if other is not None and other.dtype is not first.dtype:
            raise DtypeError(f"{what}: {first} and {other} differ in dtype")


# --- Which dtypes operators take: by kind on every device, by single dtypes where only a CPU kernel is missing ---

HALF = (torch.float16,)
REDUCED = (torch.float16, torch.bfloat16)
NONE: tuple[torch.dtype, ...] = ()
KIND_NAMES = {"b": "bool", "i": "integers", "f": "floats", "c": "complex numbers"}


def kind(dtype: torch.dtype) -> str:
    """`b`ool, `i`nteger, `f`loat or `c`omplex."""
    if dtype.is_floating_point:
        return "f"
    if dtype.is_complex:
        return "c"
    return "b" if dtype is torch.bool else "i"


def check_dtype(
    name: str,
    dtype: torch.dtype,
    kinds: str,
    device: torch.device,
    without_cpu_kernel: Iterable[torch.dtype] = COMPLEX_BFLOAT,
) -> None:
    """Refuse a dtype of another kind, and on CPU one that eager has no kernel for."""
    if kind(dtype) not in kinds:
        takes = ", ".join(KIND_NAMES[one] for one in kinds)
        raise DtypeError(f"{name}: takes {takes}, not {dtype}")
    if dtype in without_cpu_kernel and device.type == "cpu":
        raise DtypeError(f"{name}: not implemented on CPU for {dtype}")


def check_same_dtype(name: str, *specs: TensorSpec) -> None:
    first = specs[0]
    for spec in specs[1:]:
        if spec.dtype is not first.dtype:
            raise DtypeError(f"{name}: {first} and {spec} must have the same dtype")


# --- Which Python numbers a dtype can hold: kernels that store a number refuse one that it can't ------------

PLAIN_NUMBERS = frozenset({int, float, complex})
WITHOUT_INFINITY = FLOAT8 - {torch.float8_e5m2}
HOLDS_ALL = {torch.bool: "all that is not 0 is true", torch.float8_e8m0fnu: "eager rounds numbers that it does not have"}


def check_stored(what: str, number: object, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a number that a kernel could not store as this dtype. The meta device has none that would try."""
    if not is_stored(number, dtype, device):
        raise ArgumentError(f"{what}: {number} can't be stored in {dtype} without overflow")


def is_stored(number: object, dtype: torch.dtype, device: torch.device) -> bool:
    return type(number) not in PLAIN_NUMBERS or device.type == "meta" or is_held(number, dtype)


def check_bounds(
    what: str, low: Scalar | complex | None, high: Scalar | complex | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse bounds that values of this dtype can't be clamped by."""
    if kind(dtype) != "i" or not _torch.clamp_saturates():
        for bound in (low, high):
            check_stored(what, bound, dtype, device)
        return
    limits = torch.iinfo(dtype)
    is_above = isinstance(low, (int, float)) and low > limits.max
    if is_above or (isinstance(high, (int, float)) and high < limits.min):
        raise ArgumentError(f"{what}: {low if is_above else high} is outside of what {dtype} can hold")


def check_made_tensor(what: str, number: Scalar | complex, dtype: torch.dtype, device: torch.device) -> None:
    """As above, for a tensor made of the number alone: the small floating-point dtypes are rounded to."""
    is_rounded = dtype in HALVES or dtype in FLOAT8
    check_stored(what, number, torch.float64 if is_rounded else dtype, device)


def is_held(number: Any, dtype: torch.dtype) -> bool:
    """Whether the number is in the dtype's range; rounding is no matter."""
    if dtype in HOLDS_ALL:
        return True
    if isinstance(number, complex):
        if dtype.is_complex:
            return is_held(number.real, dtype) and is_held(number.imag, dtype)
        return number.imag == 0 and is_held(number.real, dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return _is_held_as_float(number, _parts(dtype))
    limits = torch.iinfo(dtype)
    if isinstance(number, float):
        if number == float(limits.max) > limits.max:
            return _torch.int64_takes_float_of_its_maximum()
        return float(limits.min) <= number <= float(limits.max)  # false for what is not a number
    if dtype.is_signed:
        return limits.min <= number <= limits.max
    return -limits.max <= number <= limits.max  # the negative ones wrap around


def _is_held_as_float(number: float, dtype: torch.dtype) -> bool:
    if isinstance(number, float) and not math.isfinite(number):
        return math.isnan(number) or dtype not in WITHOUT_INFINITY
    limits = torch.finfo(dtype)
    return limits.min <= number <= limits.max


def _parts(dtype: torch.dtype) -> torch.dtype:
    """The dtype in whose range the parts have to be: complex numbers of halves are stored by way of larger ones."""
    if not dtype.is_complex:
        return dtype
    return torch.float64 if dtype is torch.complex128 else torch.float32
