"""infer: a call in, a plan out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy.errors import OperatorError, UnsupportedOperatorException
from understudy.infer.cache import Cache
from understudy.infer.kernels import check_against_eager, judge_refusal
from understudy.infer.plan import Plan
from understudy.infer.sources import SOURCES, CompositeRunner, Source, by_decomposition, by_meta_kernel
from understudy.ops.registry import Rule, user_rule
from understudy.ops.traits import caching
from understudy.ops.traits.devices import device_of, refuse_without_kernel
from understudy.ops.traits.rare_dtypes import refuse_rare
from understudy.ops.traits.values import is_determined, specs_in
from understudy.ops.traits.writes import written_inputs
from understudy.shapes.sizes import expect_sizes
from understudy.spec import Outcomes, TensorSpec
from understudy.spec.call import Call

OF_TORCH = (by_meta_kernel, by_decomposition)
"""Sources of torch's own, whose strides and refusals are not always eager's."""
MOST_BYTES = 2**63 - 1
cache = Cache()
"""One for the process: a plan depends on nothing that belongs to a mode."""


def mark_pure(op: Any, *, pure: bool = True) -> None:
    """Let the answers for a custom operator (an overload, or its name) be kept in the cache.

    Say so of operators whose results' metadata depends on the metadata of the inputs and the other arguments alone:
    not on global state, and not on when they are called.
    """
    caching.pure.replace(pure or None, op)
    if not pure:
        cache.forget_plans()


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register the decorated pure function as the answer for these operators (overloads, or their names).

        @rule("mylib::pooled")
        def pooled(x: TensorSpec, size: int) -> TensorSpec:
            return x.like((x.shape[0] // size, *x.shape[1:]))

    It comes before every other source, for operators of torch as well, and returns `NotImplemented` for calls that it
    leaves to the others.
    """

    def register(function: Rule) -> Rule:
        user_rule.replace(function, *ops)
        cache.forget_plans()
        return function

    return register


def infer(call: Call, stage: CompositeRunner) -> Plan:
    """What the call does, from the first source that knows."""
    device_of(call)
    try:
        outcomes, source = _first_answer(call, stage)
    except Exception as error:
        if not stage.allow_fallback_kernels:
            raise
        outcomes = judge_refusal(call, error)
    else:
        if stage.allow_fallback_kernels:
            outcomes = check_against_eager(call, outcomes, source not in OF_TORCH)
    for spec in specs_in(outcomes):
        if spec.is_symbolic:
            expect_sizes(spec.shape)
        else:
            check_storage_size(spec)
    return Plan.of(call, outcomes, written_inputs(call), is_determined(call, outcomes))


def _first_answer(call: Call, stage: CompositeRunner) -> tuple[Outcomes, Source]:
    refuse_rare(call)
    refuse_without_kernel(call)
    for source in SOURCES:
        outcomes = source(call, stage)
        if outcomes is not NotImplemented:
            return outcomes, source
    raise UnsupportedOperatorException(f"nothing is known about what {call.op} returns", func=call.op)


def check_storage_size(spec: TensorSpec) -> None:
    """Refuse a tensor whose bytes no 64-bit number can count."""
    if spec.layout is torch.strided and spec.numel * spec.itemsize > MOST_BYTES:
        raise OperatorError(f"Storage size calculation overflowed with sizes={list(spec.shape)}")
