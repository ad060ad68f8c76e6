"""What a mode does with a call that the hot path can't answer: a cache miss, or a hit with determined values.

    answer_miss    handlers → shared plans → inference → replay
    make_call      the call with tensors replaced by specs

A handler answers from tensors. Plans are shared between environments of symbols, and between calls that differ in floats.
Inference (`infer/engine.py`) runs checks and sources, and makes the plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy._torch import Device
from understudy.errors import DataDependentOutputException, DynamicOutputShapeException, UnderstudyError
from understudy.fake import tensor_calls
from understudy.fake.native import canonical
from understudy.fake.tensor import FakeTensor
from understudy.fake.values import data_dependent
from understudy.infer.cache import PLAIN_TYPES
from understudy.infer.engine import cache
from understudy.infer.plan import Plan, is_cast_inside, run_effects
from understudy.infer.shared import SharedQuestion
from understudy.ops.registry import RECORDS, record_of
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import from_torch
from understudy.spec import TensorSpec
from understudy.spec.call import Call, flat_exact, map_structure

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def answer_miss(
    mode: FakeTensorMode,
    func: Any,
    args: Any,
    kwargs: Any,
    key: Any,
    plan: Plan | None,
    has_determined: bool,
) -> Any:
    """Answer a cache miss, a hit with determined values, or a hit that is cross-checked."""
    question = None
    if plan is None:
        answer = answer_by_handler(mode, func, args, kwargs)
        if answer is not NotImplemented:
            cache.bypass("answered from tensors, not from specs")
            return answer
        if mode._can_replay and key is not None:
            plan, question = find_shared_plan(mode, func, key)
    if plan is None or not mode.cache_enabled:
        call = make_call(mode, func, args, kwargs)
        try:
            plan = mode._infer(call)
        except (DataDependentOutputException, DynamicOutputShapeException) as refusal:
            answer = data_dependent.answer(mode, func, args, kwargs)
            if answer is NotImplemented:
                raise
            # its frames hold the error: tensors would live until garbage is collected
            refusal.__traceback__ = None
            cache.bypass("data-dependent output")
            return answer
        except UnderstudyError:
            if not is_cast_inside(call) or not mode.casts_parts():
                raise
            return mode.decompose(func, args, kwargs)  # once they are cast, the operands may fit each other
        _keep_plan(mode, func, key, plan, question)
    else:
        cache.hits += 1
        if mode.crosscheck:
            call = make_call(mode, func, args, kwargs)
            tensor_calls.crosscheck(call, plan, mode._infer(call))
    if plan.effects:
        plan = run_effects(plan, flat_exact(FakeTensor, args, kwargs))
    return mode.replay(func, plan, args, kwargs, has_determined)


def answer_by_handler(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the answer of a handler that needs tensors, not only their specs, or NotImplemented."""
    record = RECORDS.get(id(func))
    if record is None:
        answer = tensor_calls.by_higher_order(mode, func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        record = record_of(func)
    if record.handler is not None:
        answer = record.handler(mode, func, args, kwargs)
        if answer is not NotImplemented:
            return answer
    if args and type(args[0]) in tensor_calls.LIFTED_TYPES:
        return tensor_calls.by_lifted_numbers(mode, func, args, kwargs)
    return NotImplemented


def find_shared_plan(mode: FakeTensorMode, func: Any, key: Any) -> tuple[Plan | None, SharedQuestion | None]:
    """Look for a plan in the caches that the hot path skips: the other cache, and the plans shared between
    environments."""
    if mode._cache is cache:
        record = RECORDS.get(id(func))
        if record is None or not record.ignores_floats:
            return None, None
        return cache.find_for_any_floats(func, key), None
    if mode._uses_process_cache:
        plan = mode._cache.plans.get(key)
    else:
        plan = cache.plans.get(key)
        if plan is not None:
            mode._cache.share(key, plan)
    if plan is not None or not _has_symbols(key):
        return plan, None
    plan = mode._cache.find_for_any_floats(func, key)
    if plan is not None:
        return plan, None
    question = mode._shared_plans.make_question(key)
    plan = None if question is None else mode._shared_plans.find_plan(question)
    if plan is not None:
        mode._cache.share(key, plan)
    return plan, question


def _keep_plan(
    mode: FakeTensorMode, func: Any, key: Any, plan: Plan, question: SharedQuestion | None
) -> None:
    record = RECORDS.get(id(func)) or record_of(func)
    reason = record.uncached if mode.cache_enabled else "cache disabled"
    if mode.shape_env is not None and mode.shape_env.suppresses_guards:
        reason = "guards are suppressed"  # a cache hit would not record the guards that this answer needs
    if reason is not None:
        cache.bypass(reason)
    elif key is not None:
        mode._cache.add(key, plan)
        if question is not None:
            mode._shared_plans.share_plan(question, plan)
        elif mode._cache is not cache and not _has_symbols(key):
            cache.share(key, plan)


def _has_symbols(key: Any) -> bool:
    for part in key:
        kind = type(part)
        if kind is SymNode or (kind is TensorSpec and part.is_symbolic):
            return True
    return False


def make_call(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Call:
    """A call with tensors replaced by specs, and torch's symbols by our nodes."""
    inputs: list[TensorSpec] = []
    record = RECORDS.get(id(func)) or record_of(func)
    leaves = () if record.is_builtin else _describe_leaves(args, kwargs)
    args = _as_spec(tuple(args), inputs)
    if kwargs:
        kwargs = {name: _as_spec(value, inputs) for name, value in kwargs.items()}
    if mode.shape_env is not None:
        args, kwargs = map_structure(from_torch, SYMBOLIC, (args, kwargs))
    return Call(func, args, kwargs, tuple(inputs), leaves)


def _describe_leaves(args: Any, kwargs: Any) -> tuple[tuple[bool, bool], ...]:
    tensors = flat_exact(FakeTensor, args, kwargs)
    return tuple((tensor.requires_grad, getattr(tensor, "_is_param", False)) for tensor in tensors)


def _as_spec(value: Any, inputs: list[TensorSpec]) -> Any:
    """An argument as rules see it: specs for tensors, which are added to the inputs, devices with their index."""
    kind = type(value)
    if kind is FakeTensor:
        inputs.append(value._spec)
        return value._spec
    if kind in PLAIN_TYPES:
        return value
    if kind is not list and kind is not tuple:
        return canonical(value) if kind is Device else value
    parts: list[Any] = []
    for part in value:
        part_kind = type(part)
        if part_kind is FakeTensor:
            inputs.append(part._spec)
            parts.append(part._spec)
        else:
            parts.append(part if part_kind in PLAIN_TYPES else _as_spec(part, inputs))
    return parts if kind is list else tuple(parts)
