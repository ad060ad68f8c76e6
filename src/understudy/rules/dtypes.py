"""Which dtypes operators take: by kind on every device, by single dtypes where only a CPU kernel is missing."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from understudy.errors import DtypeError
from understudy.spec import TensorSpec

HALF = (torch.float16,)
REDUCED = (torch.float16, torch.bfloat16)
COMPLEX_HALF = (torch.complex32,)
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
    without_cpu_kernel: Iterable[torch.dtype] = (),
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
