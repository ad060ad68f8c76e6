"""The spec of an elementwise operator's result."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from understudy.shapes.sizes import at_hand, is_symbolic
from understudy.spec.broadcast import Meeting, broadcast_shapes, meet_anyhow, meet_as_at_hand
from understudy.spec.devices import common_device
from understudy.spec.strides import elementwise_strides, is_surely_row_major, preserved_strides
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
    shape = broadcast_shapes(*[spec.shape for spec in specs], meet=_meeting(specs))
    numbers = len(specs) != len(given)
    on_cpu = device.type == "cpu"
    are_copied = [
        spec.conj or spec.neg or (on_cpu and common is not None and spec.dtype is not common) for spec in specs
    ]
    if True in are_copied and not (is_symbolic(shape) and _are_surely_row_major(specs)):  # copies would be that, too
        specs = [preserved_copy(s) if is_copied else s for s, is_copied in zip(specs, are_copied, strict=True)]
    return TensorSpec(shape, elementwise_strides(shape, specs, numbers), dtype=dtype, device=device)


def _meeting(operands: Sequence[TensorSpec]) -> Meeting | None:
    """Of operands in row-major order the result is, too, expanded or not: then it does not matter what is expanded.

    Asked is that only of sizes that are both 0, or both 1, at hand. Larger ones are taken to be equal, which says more of
    them; and of others autograd wants to know which one is expanded.
    """
    if not any(operand.is_symbolic for operand in operands) or _is_expanded_by_a_third(operands):
        return None

    def meet(other: Any, size: Any) -> Any:
        is_small = at_hand(size) in (0, 1) and at_hand(size) == at_hand(other)
        if is_small and _are_surely_row_major(operands):
            return meet_anyhow(other, size)
        return meet_as_at_hand(other, size)

    return meet


def _are_surely_row_major(operands: Sequence[TensorSpec]) -> bool:
    return all(is_surely_row_major(operand.shape, operand.stride) for operand in operands)


def _is_expanded_by_a_third(operands: Sequence[TensorSpec]) -> bool:
    """Whether the sizes that meet first may have to meet a larger one later."""
    if len(operands) < 3:
        return False
    sizes = zip_longest(*[map(at_hand, reversed(operand.shape)) for operand in operands], fillvalue=1)
    return any(len(set(of_one_dim)) > 1 for of_one_dim in sizes)
