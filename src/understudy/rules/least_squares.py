"""Least squares: as far as the sizes of the four results do not depend on the rank of the matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.rules.registry import rule
from understudy.spec import TensorSpec, broadcast_shapes, contiguous_strides, real_type, same_shape

CPU_DRIVERS = ("gels", "gelsy", "gelsd", "gelss")
DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


@rule("linalg_lstsq")
def lstsq(a: TensorSpec, b: TensorSpec, rcond: Any = None, *, driver: str | None = None) -> Any:
    driver = _driver(a, driver)
    is_vector = _check(a, b)
    if not is_vector and a.ndim != b.ndim:
        return NotImplemented
    rows, columns = a.shape[-2:]
    right = () if is_vector else b.shape[-1:]
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-1] if is_vector else b.shape[:-2])
    if driver == "gels" and (a.is_symbolic or b.is_symbolic) and rows > columns:
        return NotImplemented  # C++ asks for the number of residuals as an integer when it computes the gradient
    if driver in ("gelsd", "gelss"):
        if rows > columns:
            return NotImplemented  # only matrices of full rank have residuals
        values = a.like((*a.shape[:-2], rows), dtype=real_type(a.dtype))
    else:
        values = a.like((0,), dtype=real_type(a.dtype))
    residuals = a.like((*batch, *right) if driver == "gels" and rows > columns else (0,), dtype=real_type(a.dtype))
    rank = a.like(a.shape[:-2] if driver != "gels" else (0,), dtype=torch.int64)
    return _solution(a, batch, columns, right, rows), residuals, rank, values


def _driver(a: TensorSpec, driver: str | None) -> str:
    known = CPU_DRIVERS if a.device.type == "cpu" else ("gels",)
    if driver is not None and driver not in known:
        raise ArgumentError(f"linalg.lstsq: driver is one of {', '.join(known)} on {a.device}, not {driver!r}")
    return driver or ("gelsy" if a.device.type == "cpu" else "gels")


def _check(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether the right side is one of vectors."""
    if a.ndim < 2 or b.ndim < 1:
        raise ShapeMismatch(f"linalg.lstsq: expected matrices, got {a} and {b}")
    if a.dtype is not b.dtype or a.dtype not in DTYPES:
        raise DtypeError(f"linalg.lstsq: expected two of the same dtype, float32, float64 or complex, got {a} and {b}")
    if a.ndim - 1 == b.ndim and same_shape(b.shape, a.shape[:-1]):
        return True
    if not same_shape(b.shape[-2:-1], a.shape[-2:-1]):
        raise ShapeMismatch(f"linalg.lstsq: {a} and {b} differ in the number of rows")
    return False


def _solution(a: TensorSpec, batch: Sequence[Any], columns: Any, right: Sequence[Any], rows: Any) -> TensorSpec:
    """The first rows of columns that are as long as the kernel needs them: matrices are stored column by column."""
    column = max(rows, columns, 1)
    width = right[0] if right else 1
    steps = [step * max(width, 1) * column for step in contiguous_strides(tuple(batch))]
    return TensorSpec(
        (*batch, columns, *right), (*steps, 1, *([column] if right else [])), dtype=a.dtype, device=a.device
    )
