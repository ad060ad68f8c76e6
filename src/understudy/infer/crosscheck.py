"""`FakeTensorMode(crosscheck="eager")`: compares the answer of each small CPU call with that of the real operator on zeros.

It helps to find a wrong rule. It runs real kernels in this process; without this option none runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch

from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    GuardOnDataDependentSymNode,
    MetadataMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
from understudy.infer.kernels import CPU, hint_of_size, run_on_zeros, strided_on, with_hinted_sizes
from understudy.ops.registry import record_of
from understudy.ops.traits.writes import may_trust_arguments
from understudy.shapes.node import SymNode
from understudy.spec import Changed, Outcomes, Same, TensorSpec, Value
from understudy.spec.call import Call, flat

LARGEST = 1 << 20
"""The largest total size of the inputs, in bytes, of a call that is compared."""
LARGE_NUMBERS = range(1 << 16, 1 << 50)
"""Integer arguments that, used as sizes, may really allocate memory. Larger ones fail at once."""
REFUSALS = (NotImplementedError, IndexError, ValueError, TypeError, RuntimeError)
NOT_RAISED_BY_EAGER = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    FakeTensorDeviceMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
"""Errors about stand-ins and symbols, which eager never raises."""


def compare_with_eager(call: Call, answer: Outcomes | Exception) -> None:
    """Raise `MetadataMismatchError` if the real operator returns something else, or if only one side raises an error.
    `answer`: the outcomes, or the error that was raised."""
    if isinstance(answer, NOT_RAISED_BY_EAGER) or not can_run_eager(call):
        return
    try:
        real = _run_on_some_values(with_hinted_sizes(call))
    except (*NOT_RAISED_BY_EAGER, torch.linalg.LinAlgError):
        return
    except REFUSALS as refusal:
        if isinstance(answer, Exception):
            return
        raise MetadataMismatchError(
            f"{call.op}: eager raises {type(refusal).__name__}: {refusal}; expected {answer}"
        ) from None
    if isinstance(answer, Exception):
        raise MetadataMismatchError(f"{call.op}: eager returns {real}; expected an error") from answer
    if not _are_equal(answer, real, call):
        raise MetadataMismatchError(f"{call.op}: eager returns {real}; expected {answer}")


def can_run_eager(call: Call) -> bool:
    """Whether the real operator can be run on zeros: all tensors are on the CPU and small, and no data decides."""
    op = call.op
    record = record_of(op)
    if not record.is_builtin or record.changes_metadata or record.has_dynamic_shape:
        return False
    if record.uncacheable is not None or may_trust_arguments(op):
        return False
    inputs = call.inputs
    if record.writes_by_index and any(not spec.dtype.is_signed for spec in inputs[1:-1]):
        return False  # whether the values fit depends on how many elements of the mask are true
    if any(spec.device.type != "cpu" or spec.layout is not torch.strided for spec in inputs):
        return False
    if (call.kwargs.get("device") or CPU).type != "cpu":
        return False
    numbers = [*flat(int, call.args, call.kwargs), *flat(SymNode, call.args, call.kwargs)]
    sizes = [size for spec in inputs for size in (*spec.shape, *spec.stride, spec.offset)]
    if any(type(number) is SymNode and not number.has_hint() for number in (*numbers, *sizes)):
        return False
    if any(type(number) is int and abs(number) in LARGE_NUMBERS for number in numbers):
        return False
    return sum(map(_count_bytes, inputs)) <= LARGEST


def _count_bytes(spec: TensorSpec) -> int:
    """The size of its storage in bytes, or of its elements if they overlap; with hints for symbols."""
    extent, count = hint_of_size(spec.offset) + 1, 1
    for size, step in zip(spec.shape, spec.stride, strict=True):
        extent += max(hint_of_size(size) - 1, 0) * hint_of_size(step)
        count *= hint_of_size(size)
    return max(extent, hint_of_size(spec.offset) + count) * spec.itemsize


def _run_on_some_values(call: Call) -> Any:
    """Run on zeros, then on ones and on identities: kernels may reject zeros (as a divisor, say) and singular matrices. If
    all fail, raise the error for zeros."""
    try:
        return run_on_zeros(call)
    except (*NOT_RAISED_BY_EAGER, torch.linalg.LinAlgError):
        raise
    except REFUSALS as error:
        refusal = error
    for fill in (_fill_with_ones, _fill_with_identities):
        with suppress(*REFUSALS):
            return run_on_zeros(call, _make_filled(fill))
    raise refusal from None


def _make_filled(fill: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[TensorSpec], torch.Tensor]:
    return lambda spec: fill(strided_on(spec, CPU, zero=True))


def _fill_with_identities(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim >= 2:
        tensor.diagonal(dim1=-2, dim2=-1).fill_(1)
    return tensor


def _fill_with_ones(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    whole.copy_(torch.ones((), dtype=torch.int64))
    return tensor


def _are_equal(outcomes: Any, real: Any, call: Call) -> bool:
    """Whether outcomes, with symbols replaced by hints, equal those of the real operator. Numbers, and tensors that
    an operator without results changes, are not compared; nor are the strides of tensors without elements."""
    if isinstance(outcomes, (tuple, list)):
        if not isinstance(real, (tuple, list)) or len(outcomes) != len(real):
            return False
        return all(_are_equal(ours, theirs, call) for ours, theirs in zip(outcomes, real, strict=True))
    if isinstance(outcomes, (Changed, Value)):
        return True
    if type(real) is not type(outcomes) or getattr(real, "of", None) != getattr(outcomes, "of", None):
        return False
    given = call.inputs[outcomes.of] if isinstance(outcomes, Same) else None
    ours, theirs = (cast("TensorSpec", each.spec or given) for each in (outcomes, real))
    return _facts(ours) == _facts(theirs)


def _facts(spec: TensorSpec) -> tuple[object, ...]:
    shape = tuple(map(hint_of_size, spec.shape))
    layout = () if 0 in shape else (*map(hint_of_size, spec.stride), hint_of_size(spec.offset))
    return shape, layout, spec.dtype, spec.conj, spec.neg


def check_option(crosscheck: object) -> None:
    """Raise for a value that `crosscheck=` does not accept."""
    if crosscheck not in (False, True, "eager"):
        raise ValueError(f'crosscheck must be False, True or "eager", got {crosscheck!r}')
