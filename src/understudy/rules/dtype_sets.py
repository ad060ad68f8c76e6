"""Sets of dtypes that kernels take, and the refusals of the others."""

from __future__ import annotations

from collections.abc import Container

import torch

from understudy.errors import DtypeError
from understudy.spec import TensorSpec

FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
COMPLEX = frozenset({torch.complex64, torch.complex128})
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
BOOL = frozenset({torch.bool})
HALVES = frozenset({torch.float16, torch.bfloat16})
COMPLEX_HALF = frozenset({torch.complex32})
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
