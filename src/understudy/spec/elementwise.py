"""The spec of an elementwise operator's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.spec.broadcast import broadcast_shapes
from understudy.spec.devices import common_device
from understudy.spec.strides import elementwise_strides, preserved_strides
from understudy.spec.tensor_spec import TensorSpec


def preserved_copy(
    spec: TensorSpec, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> TensorSpec:
    """A fresh tensor with the layout of this one, dense, without conj and neg bits (as empty_like)."""
    return spec.like(stride=preserved_strides(spec.shape, spec.stride), dtype=dtype, device=device)


def elementwise(operands: Sequence[Any], dtype: torch.dtype, common: torch.dtype | None = None) -> TensorSpec:
    """The result of an elementwise operator on specs and Python numbers (None is skipped).

    `dtype` is the result's; `common` the one that operands are cast to first, None for operators that
    take them as they are. On CPU the cast makes copies, which are dense, and so can change the order of
    dimensions that the result takes over.
    """
    given = [operand for operand in operands if operand is not None]
    specs = [operand for operand in given if isinstance(operand, TensorSpec)]
    if not specs:
        return TensorSpec((), dtype=dtype, device=common_device(()))
    device = common_device(specs)
    shape = broadcast_shapes(*[spec.shape for spec in specs])
    numbers = len(specs) != len(given)
    on_cpu = device.type == "cpu"
    specs = [
        preserved_copy(spec)
        if spec.conj or spec.neg or (on_cpu and common is not None and spec.dtype is not common)
        else spec
        for spec in specs
    ]
    return TensorSpec(shape, elementwise_strides(shape, specs, numbers), dtype=dtype, device=device)
