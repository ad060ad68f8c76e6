"""The real operator as the judge of refusals, on zeros, where that is small and safe.

A rule knows in general what an operator refuses; eager knows it of each call: a kernel that is missing for a dtype is not
missed by an empty tensor, and which built-in exception says so differs from operator to operator. Refusals are rare, so
asking costs nothing that anybody would notice. Calls with dtypes that are for storing numbers are rare, too, and which
kernels take them follows no rule: there, eager is asked about what a rule would take as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch

from understudy import _torch
from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorDeviceMismatchError,
    GuardOnDataDependentSymNode,
    UnderstudyError,
    UnsupportedOperatorException,
)
from understudy.infer.kernels import run_on_zeros, with_fixed_sizes
from understudy.ops.registry import record_of
from understudy.ops.shared.dtypes import COMPLEX_HALF, FLOAT8, UNSIGNED
from understudy.ops.traits.caching import uncacheable
from understudy.ops.traits.writes import trusts_arguments
from understudy.shapes.node import SymNode
from understudy.spec import Outcomes, TensorSpec
from understudy.spec.call import Call, flat, map_structure
from understudy.spec.error_context import translate, with_context

SMALL = 1 << 20
"""Bytes that the inputs of a call may have for the real operator to be asked."""
LARGE_NUMBERS = range(1 << 16, 1 << 50)
"""Numbers that, as sizes, ask for memory that may be there. What asks for more is refused at once."""
STORED = FLOAT8 | UNSIGNED | COMPLEX_HALF
BUILT_IN = (NotImplementedError, IndexError, ValueError, TypeError, RuntimeError)
NOT_EAGERS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    FakeTensorDeviceMismatchError,
    UnsupportedOperatorException,
)
"""Errors about stand-ins, of which eager knows nothing."""


def judge_refusal(call: Call, error: Exception) -> Outcomes:
    """What the call does after all; or the error again, as the built-in exception that eager raises."""
    if isinstance(error, NOT_EAGERS) or _has_context(error) or not can_ask(call):
        raise error
    try:
        return run_on_zeros(with_fixed_sizes(call))
    except NOT_EAGERS:
        raise error from None
    except BUILT_IN as refusal:
        raise_as(error, refusal, call)


def check_stored_dtypes(call: Call, outcomes: Outcomes) -> Outcomes:
    """What eager says of a call with dtypes that few kernels take."""
    dtypes = {spec.dtype for spec in call.inputs} | {call.kwargs.get("dtype")}
    if dtypes.isdisjoint(STORED) or any(spec.is_symbolic for spec in call.inputs) or not can_ask(call):
        return outcomes
    try:
        return run_on_zeros(call)
    except NOT_EAGERS:
        return outcomes
    except BUILT_IN as refusal:
        raise translate(refusal, call) from None


def answer_for_shared(call: Call, inputs: Sequence[Any]) -> Outcomes:
    """What the real operator does with tensors that share memory as these do, at the sizes at hand."""
    current = iter(inputs)  # a plan may come from a capture with other symbols
    args, kwargs = map_structure(lambda _: next(current)._spec, TensorSpec, (call.args, call.kwargs))
    call = with_fixed_sizes(Call.of(call.op, args, kwargs))
    storages: dict[int, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    tensors = iter(inputs)

    def make(spec: TensorSpec) -> torch.Tensor:
        fake = next(tensors)
        if id(fake) not in made:
            fresh = torch.zeros(needed, dtype=torch.uint8)
            made[id(fake)] = _on_shared(spec, storages.setdefault(_torch.storage_id(fake), fresh))
        return made[id(fake)]

    needed = max(_bytes(spec) for spec in call.inputs)
    try:
        return run_on_zeros(call, make)
    except BUILT_IN as refusal:
        raise with_context(refusal, call) from None


def _on_shared(spec: TensorSpec, storage: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(0, dtype=spec.dtype)
    tensor.set_(storage.untyped_storage(), spec.offset, spec.shape, spec.stride)
    if spec.conj:
        _torch.set_conj(tensor, True)
    if spec.neg:
        _torch.set_neg(tensor, True)
    return tensor


def can_ask(call: Call) -> bool:
    """Whether the real operator can be run on zeros: of this build, on few elements, and without reading beyond them."""
    op = call.op
    if not _torch.is_builtin_namespace(op) or torch.Tag.inplace_view in op.tags or record_of(op).has_dynamic_shape:
        return False
    if uncacheable.of(op) is not None or trusts_arguments.of(op) is not None:
        return False
    inputs = call.inputs
    if any(spec.device.type != "cpu" or spec.layout is not torch.strided for spec in inputs) or _is_elsewhere(call):
        return False
    numbers = [*flat(int, call.args, call.kwargs), *flat(SymNode, call.args, call.kwargs)]
    sizes = [size for spec in inputs for size in (*spec.shape, *spec.stride, spec.offset)]
    if any(type(number) is SymNode and not number.has_hint() for number in (*numbers, *sizes)):
        return False
    if any(type(number) is int and abs(number) in LARGE_NUMBERS for number in numbers):
        return False
    return sum(_bytes(spec) for spec in inputs) <= SMALL


def _is_elsewhere(call: Call) -> bool:
    device = call.kwargs.get("device")
    return device is not None and device.type != "cpu"


def _bytes(spec: TensorSpec) -> int:
    """Of the storage that it reaches into, at the sizes at hand."""
    extent = _hint(spec.offset) + 1
    for size, step in zip(spec.shape, spec.stride, strict=True):
        extent += max(_hint(size) - 1, 0) * _hint(step)
    return extent * spec.itemsize


def _hint(size: Any) -> int:
    return int(size.hint) if type(size) is SymNode else int(size)


def _has_context(error: Exception) -> bool:
    """Whether it comes from an operator that this one is made of, which was asked about already."""
    return isinstance(error, UnderstudyError) and bool(error.context.op)


def raise_as(error: Exception, refusal: Exception, call: Call) -> NoReturn:
    """Our words, and the built-in class of eager's refusal."""
    ours = error if isinstance(error, UnderstudyError) else translate(error, call)
    built_in = next(kind for kind in BUILT_IN if isinstance(refusal, kind))
    if isinstance(ours, built_in):
        raise ours from error.__cause__
    raise _class_of_both(type(ours), built_in)(ours.reason, func=ours.func) from error.__cause__


@cache
def _class_of_both(ours: type[UnderstudyError], built_in: type[Exception]) -> Any:
    return type(ours.__name__, (ours, built_in), {"__doc__": ours.__doc__, "__module__": ours.__module__})
