"""infer: a call in, a plan out. Where answers come from, in order; the order is data: `SOURCES`.

Each source takes a call and a stage, and returns outcomes, or `NotImplemented` if it does not know.
A stage runs Python functions on stand-in tensors (the mode is one); that is how this layer can use
decompositions and registered fakes without knowing tensors itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from understudy import _torch
from understudy.errors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OperatorError,
    UnsupportedOperatorException,
)
from understudy.infer.cache import Cache
from understudy.infer.kernels import (
    check_against_eager,
    judge_refusal,
    run_meta_kernel,
    run_real_kernel,
    with_fixed_sizes,
)
from understudy.infer.plan import Plan
from understudy.ops.registry import Registered, record_of, user_rule
from understudy.ops.traits import caching
from understudy.ops.traits.devices import device_of, refuse_without_kernel
from understudy.ops.traits.rare_dtypes import refuse_rare
from understudy.ops.traits.values import is_determined, specs_in
from understudy.ops.traits.writes import written_inputs
from understudy.ops.variants import rule_of
from understudy.shapes.sizes import expect_sizes
from understudy.spec import Outcomes, Same, TensorSpec, normal
from understudy.spec.call import Call, flat

FALLBACK_LIMIT = 64 << 20
"""Bytes that the real kernel of an operator without any other source may be given."""


class CompositeRunner(Protocol):
    """Runs a function on stand-ins for the call's inputs, and says what it did."""

    allow_fallback_kernels: bool

    def perform(self, function: Callable[..., object], call: Call) -> Any: ...


Source = Callable[[Call, CompositeRunner], Any]


def by_rule(call: Call, stage: CompositeRunner) -> Any:
    rule = rule_of(call.op)
    if rule is None or not all(spec.layout is torch.strided for spec in call.inputs):
        return NotImplemented
    answer = rule(*call.args, **call.kwargs)
    return NotImplemented if answer is NotImplemented else normal(answer)


def by_registered_fake(call: Call, stage: CompositeRunner) -> Any:
    function = _torch.registered_fake(call.op)
    return NotImplemented if function is None else stage.perform(function, call)


def is_sparse_call(call: Call) -> bool:
    """Torch's meta kernels and decompositions know little of sparse layouts: the real kernel on zeros knows better."""
    return any(spec.sparse is not None for spec in call.inputs)


def by_refusal(call: Call, stage: CompositeRunner) -> Any:
    """Operators whose answer is in the data, by their tags."""
    tags = call.op.tags
    if torch.Tag.data_dependent_output in tags:
        raise DataDependentOutputException(
            f"{call.op} is data-dependent: it reads values, and these tensors have none", func=call.op
        )
    if record_of(call.op).has_dynamic_shape:
        raise DynamicOutputShapeException(
            f"the size of what {call.op} returns depends on values, and these tensors have none", func=call.op
        )
    return NotImplemented


def by_composite(call: Call, stage: CompositeRunner) -> Any:
    """Operators that eager itself breaks up into others."""
    if not _torch.has_composite_kernel(call.op):
        return NotImplemented
    return stage.perform(call.op.decompose, call)


def by_meta_kernel(call: Call, stage: CompositeRunner) -> Any:
    if is_sparse_call(call) or not _torch.has_meta_kernel(call.op):
        return NotImplemented
    return run_meta_kernel(call)


def by_decomposition(call: Call, stage: CompositeRunner) -> Any:
    function = None if is_sparse_call(call) else _torch.decomposition_of(call.op)
    return NotImplemented if function is None else stage.perform(function, call)


def by_fixed_sizes(call: Call, stage: CompositeRunner) -> Any:
    """Kernels that can't take symbols: the sizes become what they are at hand, and the guards say so."""
    if not any(spec.is_symbolic for spec in call.inputs):
        return NotImplemented
    fixed = with_fixed_sizes(call)
    answer = by_meta_kernel(fixed, stage)
    return by_real_kernel(fixed, stage) if answer is NotImplemented else answer


def by_real_kernel(call: Call, stage: CompositeRunner) -> Any:
    """The last resort: the real operator on zeros. Only where nothing can go wrong by it."""
    op = call.op
    if not stage.allow_fallback_kernels:
        raise UnsupportedOperatorException(f"{op} has no rule, and allow_fallback_kernels is off", func=op)
    if not _torch.is_builtin_namespace(op):
        if _torch.returns_nothing(op) and _torch.is_mutable(op):
            return normal(None)  # it writes to what it is given, and that is all
        if (given := _torch.returned_arguments(op)) is not None:
            return _arguments_given_back(call, given)
        raise UnsupportedOperatorException(
            f"nothing is known about what {op} returns: register it with "
            f"torch.library.register_fake({op.name().split('.')[0]!r}) or understudy.rule({op.name()!r})",
            func=op,
        )
    if torch.Tag.inplace_view in op.tags:
        raise UnsupportedOperatorException(f"{op} changes metadata in place and has no rule", func=op)
    size = sum(spec.numel * spec.itemsize for spec in call.inputs)
    if size > FALLBACK_LIMIT:
        raise UnsupportedOperatorException(
            f"{op} has no rule, and running it for real on zeros would take {size / 2**20:,.0f} MiB "
            f"(the limit is {FALLBACK_LIMIT >> 20} MiB)",
            func=op,
        )
    return run_real_kernel(call)


def _arguments_given_back(call: Call, names: list[str]) -> Any:
    """What a schema says of an operator that returns what it writes to: `op(Tensor(a!) x) -> Tensor(a!)`."""
    positions: dict[str, int] = {}
    count = 0
    for name, value in [*zip(_torch.argument_names(call.op), call.args, strict=False), *call.kwargs.items()]:
        positions[name] = count
        count += len(flat(TensorSpec, (value,), {}))
    outcomes = tuple(Same(positions[name]) for name in names)
    return outcomes[0] if len(outcomes) == 1 else outcomes


SOURCES: tuple[Source, ...] = (
    by_rule,
    by_registered_fake,
    by_refusal,
    by_composite,
    by_meta_kernel,
    by_decomposition,
    by_fixed_sizes,
    by_real_kernel,
)


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


def rule(*ops: _torch.OpOverload | str) -> Callable[[Registered], Registered]:
    """Register the decorated pure function as the answer for these operators (overloads, or their names).

        @rule("mylib::pooled")
        def pooled(x: TensorSpec, size: int) -> TensorSpec:
            return x.like((x.shape[0] // size, *x.shape[1:]))

    It comes before every other source, for operators of torch as well, and returns `NotImplemented` for calls that it
    leaves to the others.
    """

    def register(function: Registered) -> Registered:
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
