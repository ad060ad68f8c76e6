"""infer: a call in, a plan out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from understudy import _torch
from understudy.errors import UnsupportedOperatorException
from understudy.infer.cache import Cache
from understudy.infer.plan import Plan
from understudy.infer.sources import SOURCES, CompositeRunner
from understudy.ops.registry import Rule, full_name, user_rule
from understudy.ops.traits.devices import device_of
from understudy.ops.traits.rare_dtypes import refuse_rare
from understudy.shapes.sizes import expect_sizes
from understudy.spec import New, Outcomes, Same, TensorSpec, View
from understudy.spec.call import Call, flat

KNOWN_LIMIT = 1 << 20
"""Elements that a tensor may have for its determined values to be followed."""
UNDETERMINED = {
    "empty": "memory as it was found",
    "empty_like": "memory as it was found",
    "empty_strided": "memory as it was found",
    "new_empty": "memory as it was found",
    "new_empty_strided": "memory as it was found",
    "empty_permuted": "memory as it was found",
    "resize_": "memory as it was found",
    "resize_as_": "memory as it was found",
    "record_stream": "concerns streams",
}
KEEPS_VALUE = {
    ("_amp_foreach_non_finite_check_and_unscale_", "found_inf"): "gradients without data have no infinities",
}
"""Arguments that an operator writes to, but whose values stay what they were when it runs on stand-ins."""
UNCACHEABLE = {
    "as_strided": "depends on the size of the storage",
    "as_strided_": "depends on the size of the storage",
}
HIDDEN_WRITES = dict.fromkeys(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), ("running_mean", "running_var")
)
"""Arguments that are written to in training although the schema does not say so."""
cache = Cache()
"""One for the process: a plan depends on nothing that belongs to a mode."""
pure_operators: set[str] = set()


def mark_pure(op: Any, *, pure: bool = True) -> None:
    """Let the answers for a custom operator (an overload, or its name) be kept in the cache.

    Say so of operators whose results' metadata depends on the metadata of the inputs and the other arguments alone:
    not on global state, and not on when they are called.
    """
    name = full_name(op)
    if pure:
        pure_operators.add(name)
    else:
        pure_operators.discard(name)
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
        user_rule(*ops)(function)
        cache.forget_plans()
        return function

    return register


def infer(call: Call, stage: CompositeRunner) -> Plan:
    """What the call does, from the first source that knows."""
    device_of(call)
    refuse_rare(call)
    for source in SOURCES:
        outcomes = source(call, stage)
        if outcomes is not NotImplemented:
            for spec in specs_in(outcomes):
                if spec.is_symbolic:
                    expect_sizes(spec.shape)
            return Plan.of(call, outcomes, written_inputs(call), is_determined(call, outcomes))
    raise UnsupportedOperatorException(f"nothing is known about what {call.op} returns", func=call.op)


def written_inputs(call: Call) -> tuple[int, ...]:
    """The positions of the inputs that the call writes to, by the operator's schema and by `HIDDEN_WRITES`."""
    written = _torch.written_arguments(call.op)
    packet = call.op.overloadpacket.__name__
    if not written and packet not in HIDDEN_WRITES:
        return ()
    arguments = [*zip(_torch.argument_names(call.op), call.args, strict=False), *call.kwargs.items()]
    names = {name for _, name in written if (packet, name) not in KEEPS_VALUE}
    if packet in HIDDEN_WRITES and dict(arguments)["training"]:
        names.update(HIDDEN_WRITES[packet])
    positions: list[int] = []
    seen = 0
    for name, value in arguments:
        count = len(flat(TensorSpec, (value,), {}))
        if name in names:
            positions.extend(range(seen, seen + count))
        seen += count
    return tuple(positions)


def is_determined(call: Call, outcomes: Outcomes) -> bool:
    op = call.op
    if any(spec.is_symbolic for spec in (*call.inputs, *specs_in(outcomes))):
        return False
    if torch.Tag.nondeterministic_seeded in op.tags or op.overloadpacket.__name__ in UNDETERMINED:
        return False
    return op.namespace in ("aten", "prims") and _elements(outcomes, call.inputs) <= KNOWN_LIMIT


def specs_in(outcomes: Any) -> Iterator[TensorSpec]:
    """Those of the tensors that a call makes."""
    match outcomes:
        case New(spec) | View(_, spec):
            yield spec
        case tuple() | list():
            for part in outcomes:
                yield from specs_in(part)


def _elements(outcomes: Any, inputs: tuple[TensorSpec, ...]) -> Any:
    match outcomes:
        case New(spec) | View(_, spec):
            return spec.numel
        case Same(of):
            return inputs[of].numel
        case tuple() | list():
            return sum(_elements(part, inputs) for part in outcomes)
    return 0


def why_not_cached(call: Call) -> str | None:
    """The reason not to keep the plan of this call, or None."""
    op = call.op
    if not _torch.is_builtin_namespace(op) and full_name(op) not in pure_operators:
        return "custom operator not marked pure"
    if torch.Tag.inplace_view in op.tags:
        return "inplace view"  # what torch's own cache calls it
    return UNCACHEABLE.get(op.overloadpacket.__name__)
