"""Which dtype a computation on several operands has.

Operands come in three ranks: tensors with dimensions, 0-dim tensors, and Python numbers. A lower rank changes
the dtype only if it is of a higher category (bool < integer < float < complex) than all ranks above it.
"""

from __future__ import annotations

from typing import Any

import torch

from understudy.spec.tensor_spec import TensorSpec

COMPLEX_OF = {
    torch.float16: torch.complex32,
    torch.bfloat16: torch.complex64,
    torch.float32: torch.complex64,
    torch.float64: torch.complex128,
}
REAL_OF = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def default_dtype() -> torch.dtype:
    """The default floating dtype. Read nowhere else, so that a cache key can name all that rules read."""
    return torch.get_default_dtype()


def default_complex_dtype() -> torch.dtype:
    return COMPLEX_OF[default_dtype()]


def number_dtype(number: Any) -> torch.dtype:
    """The dtype that a Python number (or a symbolic one) takes part with in promotion."""
    kind = getattr(number, "pytype", None)  # of a symbolic number's node
    if isinstance(number, (bool, torch.SymBool)) or kind is bool:
        return torch.bool
    if isinstance(number, (float, torch.SymFloat)) or kind is float:
        return default_dtype()
    if isinstance(number, complex):
        return default_complex_dtype()
    return torch.int64


def result_type(*operands: Any) -> torch.dtype:
    """The common dtype of specs and Python numbers; None is skipped."""
    dimensioned = zero_dim = number = None
    for operand in operands:
        if isinstance(operand, TensorSpec):
            dtype = operand.dtype
            if operand.shape:
                if dimensioned is not dtype:
                    dimensioned = dtype if dimensioned is None else promote(dimensioned, dtype)
            else:
                zero_dim = dtype if zero_dim is None else promote(zero_dim, dtype)
        elif operand is not None:
            dtype = number_dtype(operand)
            number = dtype if number is None else promote(number, dtype)
    return _combine(dimensioned, _combine(zero_dim, number)) or default_dtype()


def promote(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if a is b else torch.promote_types(a, b)


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None:
        return lower
    if lower is None or higher is lower or higher.is_complex:
        return higher
    if higher.is_floating_point:
        return COMPLEX_OF.get(higher, higher) if lower.is_complex else higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return promote(higher, lower)
    return higher


def float_type(dtype: torch.dtype) -> torch.dtype:
    """Floats and complex numbers as they are; anything else computes in the default dtype."""
    return dtype if dtype.is_floating_point or dtype.is_complex else default_dtype()


def real_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of a complex dtype; any other dtype as it is."""
    return REAL_OF.get(dtype, dtype)


def complex_type(dtype: torch.dtype) -> torch.dtype:
    """The complex dtype whose parts have this dtype; complex dtypes as they are."""
    return dtype if dtype.is_complex else COMPLEX_OF[dtype]


def is_integral(dtype: torch.dtype, include_bool: bool = False) -> bool:
    if dtype is torch.bool:
        return include_bool
    return not (dtype.is_floating_point or dtype.is_complex)
