"""Which Python numbers a dtype can hold: kernels that store a number refuse one that it can't."""

from __future__ import annotations

import math
from typing import Any

import torch

from understudy.errors import ArgumentError
from understudy.rules.dtype_sets import FLOAT8, HALVES

PLAIN_NUMBERS = frozenset({int, float, complex})
WITHOUT_INFINITY = FLOAT8 - {torch.float8_e5m2}
HOLDS_ALL = {torch.bool: "all that is not 0 is true", torch.float8_e8m0fnu: "eager rounds numbers that it does not have"}


def check_stored(what: str, number: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a number that a kernel could not store as this dtype. The meta device has none that would try."""
    if not is_stored(number, dtype, device):
        raise ArgumentError(f"{what}: {number} can't be stored in {dtype} without overflow")


def is_stored(number: Any, dtype: torch.dtype, device: torch.device) -> bool:
    return type(number) not in PLAIN_NUMBERS or device.type == "meta" or is_held(number, dtype)


def check_made_tensor(what: str, number: Any, dtype: torch.dtype, device: torch.device) -> None:
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
