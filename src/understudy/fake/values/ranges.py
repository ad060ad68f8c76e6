"""Ranges of values: `torch.rand([]) < 0.0` is False whatever is drawn; so is `isnan` of integers.

Ranges are kept for results without determined values: masks, single numbers, random numbers. A range holds until its tensor
is written to. A tensor made in inference mode counts no writes, so the record of its storage, which all aliases share, is
watched instead. Only the likely value is kept for a tensor without such a record that is written in place, and for one with
uncounted writes by others, such as `x.data`.
"""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor, count_writes
from understudy.fake.values.determined import CallResult, DeterminedContents, StoragePart, is_counted_apart
from understudy.infer.plan import Plan
from understudy.ops.registry import record_of
from understudy.ops.traits.ranges import Operand, ValueRange, range_of_dtype, single_value
from understudy.spec import TensorSpec
from understudy.spec.call import flat, map_structure

MOST_COMPUTED = 1 << 12
"""The range of determined values is computed for up to this many elements."""


def range_of(fake: FakeTensor) -> ValueRange:
    """The range of the values of a tensor, and a likely value."""
    known = _range_of_determined(fake)
    if known is not None:
        return known
    limits = range_of_dtype(fake._spec.dtype)
    if fake._range is None:
        return limits
    found, version = fake._range
    if version is None:
        return limits.expect(found.likely)
    if version != (
        fake._determined and fake._determined.watch if fake.is_inference() else count_writes(fake)
    ):
        return limits
    if limits.low <= found.low and found.high <= limits.high and limits.may_be_nan:
        return found
    low, high = max(found.low, limits.low), min(found.high, limits.high)
    return ValueRange(low, high, found.may_be_nan and limits.may_be_nan, found.likely, found.filled)


def _range_of_determined(fake: FakeTensor) -> ValueRange | None:
    spec = fake._spec
    if spec.layout is not torch.strided:
        return None
    is_real = spec.dtype.is_floating_point or spec.dtype is torch.bool or not spec.dtype.is_complex
    if fake._determined is None or spec.is_symbolic or not is_real or not spec.numel:
        return None
    if spec.numel > MOST_COMPUTED:
        return _range_of_event(fake._determined.content, spec)
    value = fake.fake_mode.value_without_guards(fake)
    if value is None:
        return None
    with _torch.PastDispatch():
        plain = value.to(torch.float64) if value.dtype.is_floating_point else value.to(torch.int64)
        if value.numel() == 1:
            return single_value(plain.item())
        has_nan = bool(plain.isnan().any())
        likely = float(plain.to(torch.float64).mean())
        return (
            ValueRange(plain.min().item(), plain.max().item(), has_nan, likely)
            if not has_nan
            else ValueRange()
        )


def _range_of_event(content: Any, spec: TensorSpec) -> ValueRange | None:
    """The range of many values that follows from the call itself, as for `zeros`, or from the call that made its one
    tensor, as for `zeros(…).int()`."""
    if not isinstance(content, CallResult) or content.spec.dtype is not spec.dtype:
        return None
    event, rule = content.event, None if content.event.op is None else record_of(content.event.op).value_range
    if rule is None or event.is_write:
        return None
    is_alone = len(flat(StoragePart, event.args, event.kwargs)) == 1

    def operand_of(part: StoragePart) -> Operand:
        found = _range_of_event(part.content, part.spec) if is_alone else None
        return Operand(found or range_of_dtype(part.spec.dtype), part.spec, part.owner)

    args, kwargs = map_structure(operand_of, StoragePart, (event.args, event.kwargs))
    found = rule(*args, **{name: value for name, value in kwargs.items() if name not in OPTIONS_OF_FACTORIES})
    return found if isinstance(found, ValueRange) else None


def operand(fake: FakeTensor) -> Operand:
    storage = _torch.storage_id(fake) if fake._spec.layout is torch.strided else id(fake)
    return Operand(range_of(fake), fake._spec, storage)


def infer_ranges_by_plan(
    func: Any, plan: Plan, args: Any, kwargs: Any, inputs: list[FakeTensor]
) -> tuple[ValueRange, ...] | ValueRange | None:
    """The ranges of a call's results. For a single input, they are inferred once for each range of it, and kept in the
    plan."""
    if len(inputs) > 1:
        return infer_ranges(func, args, kwargs)
    is_unknown = not inputs or (inputs[0]._range is None and inputs[0]._determined is None)
    known = None if is_unknown else range_of(inputs[0])
    bounds = plan.bounds
    if bounds is None or len(bounds) >= MOST_KEPT:
        bounds = plan.bounds = {}
    if known not in bounds:
        bounds[known] = infer_ranges(func, args, kwargs)
    found: tuple[ValueRange, ...] | ValueRange | None = bounds[known]
    return found


MOST_KEPT = 64
"""The ranges of a plan are kept for this many ranges of its input."""


def infer_ranges(func: Any, args: Any, kwargs: Any) -> tuple[ValueRange, ...] | ValueRange | None:
    """The ranges of a call's results. Must be called before the call, which may write to its inputs."""
    rule = record_of(func).value_range
    if rule is None:
        return None
    args, kwargs = map_structure(operand, FakeTensor, (tuple(args), dict(kwargs)))
    options = {name: value for name, value in kwargs.items() if name not in OPTIONS_OF_FACTORIES}
    return rule(*args, **options)


OPTIONS_OF_FACTORIES = frozenset({"layout", "device", "pin_memory", "non_blocking", "memory_format"})


def store_ranges(
    values: tuple[ValueRange, ...] | ValueRange, targets: list[FakeTensor], is_written: bool
) -> None:
    """Set the ranges of a call's results, or of the tensors it writes to. The version counter is bumped when the call
    returns."""
    pairs = zip(values, targets, strict=False) if isinstance(values, tuple) else ((values, targets[-1]),)
    for value, target in pairs:
        if not target.is_inference():
            counted, uncounted = count_writes(target)
            target._range = value, None if is_counted_apart(target) else (counted + is_written, uncounted)
            continue
        if target._determined is None and not is_written:
            target._determined = DeterminedContents(None)
        target._range = value, None if target._determined is None else target._determined.begin_watch()
