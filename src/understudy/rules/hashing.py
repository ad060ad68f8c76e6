"""Hashes of tensors, along some dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from understudy.errors import ArgumentError
from understudy.rules.dtype_sets import BOOL, REAL_NUMBERS, check_cpu_dtype
from understudy.rules.reduced_dims import check_not_empty, reduced_shape, wrap_dims
from understudy.rules.registry import rule
from understudy.spec import TensorSpec


@rule("hash_tensor")
def hash_tensor(
    x: TensorSpec, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0
) -> TensorSpec:
    if mode != 0:
        raise ArgumentError(f"hash_tensor: there is no mode {mode}")
    check_cpu_dtype("hash_tensor", x, REAL_NUMBERS | BOOL)
    dims = wrap_dims(dim, x.ndim) if dim else list(range(x.ndim))
    check_not_empty("hash_tensor", x, dims)
    return x.like(reduced_shape(x.shape, dims, keepdim), dtype=torch.uint64)
