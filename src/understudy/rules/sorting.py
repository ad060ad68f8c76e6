"""Sorting: values and the places they came from."""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import ArgumentError
from understudy.rules.dims import replaced, size_at, wrap_dim
from understudy.rules.dtype_sets import BOOL, REAL_NUMBERS, UNSIGNED, check_cpu_dtype
from understudy.rules.registry import rule
from understudy.spec import TensorSpec, preserved_copy

SORTED_DTYPES = REAL_NUMBERS | UNSIGNED | BOOL


def _sorted(spec: TensorSpec, dim: int) -> tuple[TensorSpec, TensorSpec]:
    """Both results keep the order of dimensions in memory."""
    wrap_dim(dim, spec.ndim)
    check_cpu_dtype("sort", spec, SORTED_DTYPES)
    values = preserved_copy(spec)
    return values, values.like(stride=values.stride, dtype=torch.int64)


@rule("sort")
def sort(spec: TensorSpec, dim: int = -1, descending: bool = False) -> tuple[TensorSpec, TensorSpec]:
    return _sorted(spec, dim)


@rule("sort.stable")
def sort_stable(
    spec: TensorSpec, *, stable: bool | None, dim: int = -1, descending: bool = False
) -> tuple[TensorSpec, TensorSpec]:
    return _sorted(spec, dim)


@rule("argsort")
def argsort(spec: TensorSpec, dim: int = -1, descending: bool = False) -> TensorSpec:
    return _sorted(spec, dim)[1]


@rule("argsort.stable")
def argsort_stable(spec: TensorSpec, *, stable: bool, dim: int = -1, descending: bool = False) -> TensorSpec:
    return _sorted(spec, dim)[1]


@rule("msort")
def msort(spec: TensorSpec) -> TensorSpec:
    return _sorted(spec, 0)[0]


@rule("topk")
def topk(
    spec: TensorSpec, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TensorSpec, TensorSpec]:
    dim = wrap_dim(dim, spec.ndim)
    size = size_at(spec, dim)
    if k < 0 or k > size:
        raise ArgumentError(f"topk: k is {k}, but dimension {dim} of {spec} has {size} elements to choose from")
    check_cpu_dtype("topk", spec, REAL_NUMBERS)
    values = spec.like(replaced(spec.shape, dim, k) if spec.shape else ())
    return values, values.like(dtype=torch.int64)
