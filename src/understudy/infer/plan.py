"""A plan: the outcomes of a call, in the form in which a cache hit replays them, and its effects.

An effect is what happens around a replayed plan besides the making of tensors: checks of shared memory, counted writes.
It is made once, with the plan, and run at every call, in order, before the results are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import ArgumentError
from understudy.infer.kernels import answer_for_shared, can_ask
from understudy.ops.registry import record_of
from understudy.ops.traits.ranges import has_ranges
from understudy.ops.traits.values import IndexBound, bounds_of, unread_inputs
from understudy.ops.traits.writes import counts_own_writes, writes_apart, writes_in_order
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import assume_filled_if_read, lies_in_data
from understudy.spec import Changed, New, Outcomes, Same, TensorSpec, View, is_dense
from understudy.spec.call import Call, flat
from understudy.spec.error_context import with_line


class Effect(Protocol):
    """`inputs` are tensors with specs; `outcomes` those of the plan, in the terms of the mode that replays it."""

    def run(self, outcomes: Outcomes, inputs: Sequence[object]) -> Outcomes | None:
        """What the call does in place of the plan's outcomes, if anything."""
        ...


def effects_of(call: Call, outcomes: Outcomes, written: tuple[int, ...]) -> tuple[Effect, ...]:
    """What a call does besides making its results."""
    effects: list[Effect] = []
    if bounds := bounds_of(call):
        effects.append(KnownIndices(call.op, bounds))
        for bound in bounds:
            assume_filled_if_read(bound.size(call.inputs[bound.target]), call.inputs[bound.index].shape)
    if not written:
        return tuple(effects)
    if writes_apart.of(call.op) is not None:
        effects.append(MemoryApart(call.op, written))
    if pairs := _pairs_in_order(call, outcomes, written):
        effects.append(MemoryInOrder(call.op, pairs))
    if len(call.inputs) > 1 and _torch.has_out_arguments(call.op) and can_ask(call) and not _has_symbols(call):
        effects.append(SharedMemory(call, written))
    if counts_own_writes(call.op) or isinstance(outcomes, Changed):
        effects.append(CountedWrites(written))
    return tuple(effects)


@dataclass(frozen=True, slots=True)
class CountedWrites:
    """Writes whose versions C++ leaves to the kernel to count. A tensor that is resized before counts twice."""

    written: tuple[int, ...]

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> None:
        tensors = [inputs[position] for position in (*self.written, *_resized(outcomes))]
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _resized(outcomes: Outcomes) -> tuple[int, ...]:
    """The inputs that are resized by an operator that is given a list of tensors to write to."""
    changed = outcomes.inputs if isinstance(outcomes, Changed) else ()
    return tuple(outcome.of for outcome in changed if outcome.spec is not None)


@dataclass(frozen=True, slots=True)
class KnownIndices:
    """Refuses indices whose values are determined, and lie beyond what they point into. Sizes that are symbols get a
    guard."""

    op: Any
    bounds: tuple[IndexBound, ...]

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> None:
        for bound in self.bounds:
            index = inputs[bound.index]
            extremes = None if index._known is None else index.extreme_values(bound.ignored)
            if extremes is None:
                continue
            least, most = extremes
            size = bound.size(inputs[bound.target]._spec)
            wraps_to = -size if bound.wraps else 0
            wrong = most if not most < size else least if not least >= wraps_to else None
            if wrong is not None:
                reason = f"{self.op}: index {wrong} is out of bounds for a dimension of size {size}"
                shown = ", ".join(str(tensor._spec) for tensor in inputs)
                raise with_line(bound.error(reason), str(self.op), shown)


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Asks the real operator what it does if `out=` shares memory with what it reads: no rule tells."""

    call: Call
    written: tuple[int, ...]

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> Outcomes | None:
        storages = [_torch.storage_id(tensor) for tensor in inputs]
        if any(storages.count(storages[position]) > 1 for position in self.written):
            answer = answer_for_shared(self.call, inputs)
            return None if isinstance(outcomes, Changed) else answer  # a list that is written to is not returned
        return None


@dataclass(frozen=True, slots=True)
class MemoryApart:
    """Refuses to write to memory that the same call reads. A tensor that is resized counts as it is afterwards."""

    op: Any
    written: tuple[int, ...]

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> None:
        specs = [tensor._spec for tensor in inputs]
        for outcome in outcomes if isinstance(outcomes, tuple) else (outcomes,):
            if isinstance(outcome, Same) and outcome.spec is not None:
                specs[outcome.of] = outcome.spec
        for target in self.written:
            for read in range(len(inputs)):
                if read in self.written or _torch.storage_id(inputs[read]) != _torch.storage_id(inputs[target]):
                    continue
                if inputs[read] is inputs[target] or _overlap(specs[read], specs[target]):
                    reason = f"{self.op}: what is written to, {specs[target]}, shares memory with {specs[read]}"
                    raise with_line(ArgumentError(reason), str(self.op), ", ".join(map(str, specs)))


@dataclass(frozen=True, slots=True)
class MemoryInOrder:
    """Refuses to write elements in one order that are read in another, as in `x.add_(x.t())`.

    `pairs` are inputs, one written and one read, that would not be the same elements in the same order on one storage.
    """

    op: Any
    pairs: tuple[tuple[int, int], ...]

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> None:
        for target, read in self.pairs:
            written, other = inputs[target], inputs[read]
            if _torch.storage_id(other) != _torch.storage_id(written):
                continue
            if other is written and is_resizing(outcomes):
                what = f"{written._spec} is read and written, and does not have the shape of the result"
            elif other is not written and are_out_of_order(other._spec, written._spec):
                what = (
                    f"some elements of what is written to, {written._spec}, and of {other._spec} are a single memory "
                    "location; clone one of them first"
                )
            else:
                continue
            shown = ", ".join(str(tensor._spec) for tensor in inputs)
            raise with_line(ArgumentError(f"{self.op}: {what}"), str(self.op), shown)


def _pairs_in_order(call: Call, outcomes: Outcomes, written: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    is_elementwise_out = record_of(call.op).is_pointwise and "out" in call.kwargs
    if writes_in_order.of(call.op) is None and not is_elementwise_out:
        return ()
    inputs = call.inputs
    return tuple(
        (target, read)
        for target in written
        for read in range(len(inputs))
        if read != target and (is_resizing(outcomes) or _may_be_out_of_order(inputs[read], inputs[target]))
    )


def _may_be_out_of_order(a: TensorSpec, b: TensorSpec) -> bool:
    """Of symbols, that is asked when they are on one storage: the answer makes guards."""
    return a is not b if a.is_symbolic or b.is_symbolic else are_out_of_order(a, b)


def _has_symbols(call: Call) -> bool:
    """Whether numbers among its arguments are symbols: another capture that replays the plan has others."""
    return bool(flat(SymNode, call.args, call.kwargs))


def is_resizing(outcomes: Outcomes) -> bool:
    return isinstance(outcomes, Same) and outcomes.spec is not None


def are_out_of_order(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors on one storage share places in memory without being the same places in the same order.

    Of tensors with gaps or overlaps of their own, eager does not try to find out.
    """
    if a is b or lies_in_data(*a.shape, *a.stride, a.offset, *b.shape, *b.stride, b.offset):
        return False
    if a.numel == 0 or b.numel == 0:
        return False
    if not all(spec.layout is torch.strided and is_dense(spec.shape, spec.stride) for spec in (a, b)):
        return False
    if _span(a) == _span(b):
        return a.stride != b.stride
    return _do_spans_meet(a, b)


def _overlap(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two dense tensors on one storage share a place in memory; of others, eager does not try to find out."""
    if a.numel == 0 or b.numel == 0 or not all(is_dense(spec.shape, spec.stride) for spec in (a, b)):
        return False
    return _do_spans_meet(a, b)


def _do_spans_meet(a: TensorSpec, b: TensorSpec) -> bool:
    (a_first, a_end), (b_first, b_end) = _span(a), _span(b)
    return bool(a_first < b_end and b_first < a_end)


def _span(spec: TensorSpec) -> tuple[Any, Any]:
    """The bytes of its storage that a dense tensor covers."""
    return spec.offset * spec.itemsize, (spec.offset + spec.numel) * spec.itemsize


ONE_NEW, FIRST_VIEWED, FIRST_ITSELF, ONE_NEW_SYMBOLIC, ONE_DETERMINED, OTHER, FOLLOWED, RANGED = range(8)


class Plan:
    """`kind` names the common shapes of an answer, so that replaying them is one comparison:

        ONE_NEW, ONE_NEW_SYMBOLIC   one new tensor
        FIRST_VIEWED, FIRST_ITSELF  a view of the first argument, or the first argument
        ONE_DETERMINED              one new tensor, made from nothing, whose values are determined: `zeros`, `arange`
        OTHER                       anything else that only specs decide
        FOLLOWED                    other tensors whose values are determined though none of an input is read: `zeros_like`
        RANGED                      tensors of whose values a range is known: masks, single numbers, random ones

    `effects` are run before the results are made. `written` are the positions of the inputs that the call writes to.
    `determined` says that the values of the results follow from the values of the inputs. `bounds` are the ranges of the
    results where nothing is known of an input, once somebody has inferred them.
    """

    __slots__ = ("bounds", "determined", "effects", "kind", "op", "outcomes", "spec", "written")

    def __init__(self, outcomes: Outcomes, written: tuple[int, ...] = (), determined: bool = False) -> None:
        self.outcomes = outcomes
        self.written = written
        self.determined = determined
        self.op: OpOverload | None = None
        self.kind = OTHER
        self.spec: Any = None  # the TensorSpec of the one new tensor or view
        self.effects: tuple[Effect, ...] = ()
        self.bounds: Any = None

    @staticmethod
    def of(call: Call, outcomes: Outcomes, written: tuple[int, ...], determined: bool) -> Plan:
        plan = Plan(outcomes, written, determined)
        plan.op = call.op  # a key holds the operator's identity: as long as the plan lives, nothing else has it
        plan.effects = effects_of(call, outcomes, written)
        first = bool(call.args) and isinstance(call.args[0], TensorSpec)
        match outcomes:
            case New(spec) if spec.layout is torch.strided and not (spec.conj or spec.neg):
                plan.kind, plan.spec = ONE_NEW_SYMBOLIC if spec.is_symbolic else ONE_NEW, spec
            case View(0, spec) if first:
                plan.kind, plan.spec = FIRST_VIEWED, spec
            case Same(0, None) if first:
                plan.kind = FIRST_ITSELF
        # Values begin with a new tensor that a call made without reading any (zeros, arange, zeros_like, ...): it must
        # be followed. Filling memory that nothing is known of is not: all parameters of a model are initialised so.
        if determined and not written and plan.count_unread() >= len(call.inputs):
            plan.kind = ONE_DETERMINED if plan.kind == ONE_NEW and not call.inputs else FOLLOWED
        elif has_ranges(call, outcomes, written):
            plan.kind = RANGED
        return plan

    def count_unread(self) -> int:
        """How many of the first inputs are not read for the values of the results."""
        return 0 if self.op is None else unread_inputs.of(self.op) or 0

    def with_outcomes(self, outcomes: Outcomes) -> Plan:
        """The same plan, its outcomes said in other terms."""
        plan = Plan(outcomes, self.written, self.determined)
        plan.op, plan.kind, plan.effects = self.op, self.kind, self.effects
        if self.spec is not None and isinstance(outcomes, (New, View)):
            plan.spec = outcomes.spec
        return plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and (self.outcomes, self.written) == (other.outcomes, other.written)

    __hash__ = None  # type: ignore[assignment]


def run_effects(plan: Plan, inputs: Sequence[object]) -> Plan:
    """The plan to replay: this one, unless an effect knows better of these inputs."""
    for effect in plan.effects:
        outcomes = effect.run(plan.outcomes, inputs)
        if outcomes is not None:
            other = Plan(outcomes, plan.written, plan.determined)
            other.op, other.effects = plan.op, plan.effects
            plan = other
    return plan
