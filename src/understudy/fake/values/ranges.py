"""Ranges of values: `torch.rand([]) < 0.0` is False whatever is drawn, `isnan` of integers too.

Kept beside determined values, for results of which these are not known: masks, single numbers, random ones. A range holds
until its tensor is written to. A tensor made for inference counts no writes: of it, only the guess is kept.
"""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.infer.plan import Plan
from understudy.ops.traits.ranges import Operand, ValueRange, exactly, range_of_dtype, value_range
from understudy.spec.call import map_structure

MOST_COMPUTED = 1 << 12
"""Elements up to which the range of determined values is computed."""


def range_of(fake: FakeTensor) -> ValueRange:
    """What is sure about the values of a tensor, and likely."""
    known = _range_of_determined(fake)
    if known is not None:
        return known
    limits = range_of_dtype(fake._spec.dtype)
    if fake._range is None:
        return limits
    found, version = fake._range
    if version is None:
        return limits.expect(found.likely)
    if fake.is_inference() or version != fake._version:
        return limits
    low, high = max(found.low, limits.low), min(found.high, limits.high)
    return ValueRange(low, high, found.may_be_nan and limits.may_be_nan, found.likely)


def _range_of_determined(fake: FakeTensor) -> ValueRange | None:
    spec = fake._spec
    is_real = spec.dtype.is_floating_point or spec.dtype is torch.bool or not spec.dtype.is_complex
    if fake._known is None or spec.is_symbolic or not is_real or not 0 < spec.numel <= MOST_COMPUTED:
        return None
    value = fake.fake_mode.value_at_hand(fake)
    if value is None:
        return None
    with _torch.PastDispatch():
        plain = value.to(torch.float64) if value.dtype.is_floating_point else value.to(torch.int64)
        if value.numel() == 1:
            return exactly(plain.item())
        has_nan = bool(plain.isnan().any())
        likely = float(plain.to(torch.float64).mean())
        return ValueRange(plain.min().item(), plain.max().item(), has_nan, likely) if not has_nan else ValueRange()


def operand(fake: FakeTensor) -> Operand:
    storage = _torch.storage_id(fake) if fake._spec.layout is torch.strided else id(fake)
    return Operand(range_of(fake), fake._spec, storage)


def ranges_by_plan(
    func: Any, plan: Plan, args: Any, kwargs: Any, inputs: list[FakeTensor]
) -> tuple[ValueRange, ...] | ValueRange | None:
    """What the values of a call's results will be. Of one input of which nothing is known, that is inferred once."""
    if len(inputs) > 1 or (inputs and (inputs[0]._range is not None or inputs[0]._known is not None)):
        return infer_ranges(func, args, kwargs)
    if plan.bounds is None:
        plan.bounds = (infer_ranges(func, args, kwargs),)
    return plan.bounds[0]


def infer_ranges(func: Any, args: Any, kwargs: Any) -> tuple[ValueRange, ...] | ValueRange | None:
    """What the values of a call's results will be: asked before the call, which may write to its inputs."""
    rule = value_range.of(func)
    if rule is None:
        return None
    args, kwargs = map_structure(operand, FakeTensor, (tuple(args), dict(kwargs)))
    options = {name: value for name, value in kwargs.items() if name not in OPTIONS_OF_FACTORIES}
    return rule(*args, **options)


OPTIONS_OF_FACTORIES = frozenset({"layout", "device", "pin_memory", "non_blocking", "memory_format"})


def keep_ranges(values: tuple[ValueRange, ...] | ValueRange, targets: list[FakeTensor], is_written: bool) -> None:
    """For the results of a call, or for what it writes to: the write is counted when the call returns."""
    pairs = zip(values, targets, strict=False) if isinstance(values, tuple) else ((values, targets[-1]),)
    for value, target in pairs:
        target._range = value, None if target.is_inference() else target._version + is_written
