"""A plan: the outcomes of a call, in the form in which a cache hit replays them, and its effects.

An effect is what happens around a replayed plan besides the making of tensors: checks of shared memory, counted writes.
It is made once, with the plan, and run at every call, in order, before the results are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import ArgumentError
from understudy.ops.registry import RECORDS, OpFacts, record_of
from understudy.ops.shared.dtypes import INTEGERS
from understudy.ops.shared.layouts import LARGE, check_storage_size
from understudy.ops.traits.autocast import is_cast_in_kernel
from understudy.ops.traits.ranges import LARGEST as LARGEST_RANGED
from understudy.ops.traits.ranges import MASKS
from understudy.ops.traits.values import (
    LARGEST,
    IndexBound,
    RefusedValues,
    bounds_of,
    count_elements,
    refused_values_of,
    specs_in,
)
from understudy.ops.traits.writes import (
    counts_own_writes,
    fills_by_mask,
    joins_nothing,
    written_inputs,
)
from understudy.ops.variants import check_no_overlap
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import assume_nonempty_if_indexed, expect_sizes, has_unbacked
from understudy.spec import (
    Changed,
    New,
    Outcomes,
    Same,
    TensorSpec,
    View,
    contiguous_strides,
    is_dense,
    same_shape,
)
from understudy.spec.call import Call, flat
from understudy.spec.error_context import with_line

COPY = torch.ops.aten.copy_.default


class Effect(Protocol):
    """`inputs` are tensors with specs; `outcomes` those of the plan, in the terms of the mode that replays it."""

    def run(self, outcomes: Outcomes, inputs: Sequence[object]) -> Outcomes | None:
        """Returns outcomes that replace those of the plan, or None."""
        ...


def effects_of(call: Call, outcomes: Outcomes, written: tuple[int, ...]) -> tuple[Effect, ...]:
    """The effects of a call."""
    effects: list[Effect] = []
    if bounds := bounds_of(call):
        effects.append(IndexCheck(call.op, bounds))
        for bound in bounds:
            assume_nonempty_if_indexed(bound.size(call.inputs[bound.target]), call.inputs[bound.index].shape)
    if (refused := refused_values_of(call)) is not None:
        effects.append(ValueCheck(call.op, *refused))
    if not written:
        return tuple(effects)
    if record_of(call.op).writes_apart and not fills_by_mask(call) and not joins_nothing(call):
        effects.append(OverlapCheck(call.op, written))
    if copies_alike(call) and any(type(step) is int and step == 0 for step in call.inputs[0].stride):
        effects.append(ExpandedCopyCheck())
    if pairs := _pairs_in_order(call, outcomes, written):
        effects.append(ElementOrderCheck(call.op, pairs))
    if counts_own_writes(call.op) or isinstance(outcomes, Changed):
        effects.append(VersionBumps(written))
    return tuple(effects)


@dataclass(frozen=True, slots=True)
class VersionBumps:
    """Bumps version counters where C++ leaves that to the kernel. A tensor that is resized first is bumped twice."""

    written: tuple[int, ...]

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> Outcomes | None:
        tensors = [inputs[position] for position in self.written]
        if isinstance(outcomes, Changed):
            outcomes = Changed(tuple(_one_after_another(outcomes, inputs)))
            tensors += [inputs[outcome.of] for outcome in outcomes.inputs if outcome.spec is not None]
        torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])
        return outcomes if isinstance(outcomes, Changed) else None


def _one_after_another(outcomes: Changed, inputs: Sequence[Any]) -> Iterator[Same]:
    """A list of written tensors may hold one twice: it is resized for one result before the next is computed."""
    changed: dict[int, TensorSpec] = {}
    for outcome in outcomes.inputs:
        tensor = inputs[outcome.of]
        now = changed.get(id(tensor))
        if now is not None:
            shape = (outcome.spec or tensor._spec).shape
            resized = None if same_shape(now.shape, shape) else now.as_view(shape, contiguous_strides(shape))
            outcome = Same(outcome.of, resized)
        if outcome.spec is not None:
            changed[id(tensor)] = outcome.spec
        yield outcome


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """Raises if determined indices are out of bounds. Symbolic bounds get a guard."""

    op: Any
    bounds: tuple[IndexBound, ...]

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> None:
        for bound in self.bounds:
            index = inputs[bound.index]
            extremes = None if index._determined is None else index.extreme_values(bound.ignored)
            if extremes is None:
                continue
            least, most = extremes
            size = bound.size(inputs[bound.target]._spec)
            wraps_to = -size if bound.wraps else 0
            wrong = most if not most < size else least if not least >= wraps_to else None
            if wrong is None or index._spec.numel == 0:
                continue
            if bound.is_checked_if_empty or not inputs[bound.target]._spec.is_empty:
                reason = f"{self.op}: index {wrong} is out of bounds for a dimension of size {size}"
                shown = ", ".join(str(tensor._spec) for tensor in inputs)
                raise with_line(bound.error(reason), str(self.op), shown)


@dataclass(frozen=True, slots=True)
class ValueCheck:
    """Raises if the determined values of an input are refused: a divisor of 0, a probability of 2."""

    op: Any
    position: int
    refusal: RefusedValues

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> None:
        tensor = inputs[self.position]
        if tensor._determined is None:
            return
        value = tensor.fake_mode.value_without_guards(tensor)
        if value is None:
            return
        with _torch.PastDispatch():  # the value is a real tensor, and the mode may be active
            is_refused = self.refusal.includes(value)
        if is_refused:
            shown = ", ".join(str(each._spec) for each in inputs)
            raise with_line(self.refusal.error(f"{self.op}: {self.refusal.reason}"), str(self.op), shown)


@dataclass(frozen=True, slots=True)
class OverlapCheck:
    """Raises if the call writes to memory that it reads. For resized tensors, the new size counts."""

    op: Any
    written: tuple[int, ...]

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> None:
        specs = [tensor._spec for tensor in inputs]
        for outcome in outcomes if isinstance(outcomes, tuple) else (outcomes,):
            if isinstance(outcome, Same) and outcome.spec is not None:
                specs[outcome.of] = outcome.spec
        for target in self.written:
            for read in range(len(inputs)):
                if read in self.written or _torch.storage_id(inputs[read]) != _torch.storage_id(
                    inputs[target]
                ):
                    continue
                if read in (record_of(self.op).reads_along or ()):
                    is_refused = are_out_of_order(specs[read], specs[target])
                else:
                    is_refused = inputs[read] is inputs[target] or _overlap(specs[read], specs[target])
                if is_refused:
                    reason = (
                        f"{self.op}: the output {specs[target]} shares memory with the input {specs[read]}"
                    )
                    raise with_line(ArgumentError(reason), str(self.op), ", ".join(map(str, specs)))


@dataclass(frozen=True, slots=True)
class ExpandedCopyCheck:
    """Raises for a copy into an expanded tensor, unless it is of the same elements, which eager leaves as they are."""

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> None:
        target, source = inputs
        if _torch.storage_id(target) != _torch.storage_id(source):
            check_no_overlap("copy_", target._spec)


@dataclass(frozen=True, slots=True)
class ElementOrderCheck:
    """Raises if elements are written in another order than they are read, as in `x.add_(x.t())`.

    `pairs` are a written and a read input that, on one storage, would have their elements in different order.
    """

    op: Any
    pairs: tuple[tuple[int, int], ...]

    def run(self, outcomes: Outcomes, inputs: Sequence[Any]) -> None:
        for target, read in self.pairs:
            written, other = inputs[target], inputs[read]
            if _torch.storage_id(other) != _torch.storage_id(written):
                continue
            if other is written and resizes_inputs(outcomes):
                what = f"{written._spec} is both input and output, but does not have the shape of the result"
            elif other is not written and are_out_of_order(
                _as_read(self.op, read, other._spec), written._spec
            ):
                what = (
                    f"some elements of the output {written._spec} and of {other._spec} share a memory location; "
                    "clone one of them first"
                )
            else:
                continue
            shown = ", ".join(str(tensor._spec) for tensor in inputs)
            raise with_line(ArgumentError(f"{self.op}: {what}"), str(self.op), shown)


def _pairs_in_order(call: Call, outcomes: Outcomes, written: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    is_elementwise_out = record_of(call.op).is_pointwise and "out" in call.kwargs
    if not record_of(call.op).writes_in_order and not is_elementwise_out and not fills_by_mask(call):
        return ()
    inputs = call.inputs
    harmless = record_of(call.op).reads_before or ()
    return tuple(
        (target, read)
        for target in written
        for read in range(len(inputs))
        if read != target
        and read not in harmless
        and (
            resizes_inputs(outcomes)
            or _may_be_out_of_order(_as_read(call.op, read, inputs[read]), inputs[target])
        )
    )


def _as_read(op: Any, position: int, spec: TensorSpec) -> TensorSpec:
    see = record_of(op).read_shape
    return spec if see is None else see(position, spec)


def _may_be_out_of_order(a: TensorSpec, b: TensorSpec) -> bool:
    """For symbolic sizes True: the comparison adds guards, so it is made only when both are on one storage."""
    return a is not b if a.is_symbolic or b.is_symbolic else are_out_of_order(a, b)


def copies_alike(call: Call) -> bool:
    """Whether a tensor is copied into one of the same layout: if they share memory, eager does nothing at all."""
    return call.op is COPY and call.inputs[0] is call.inputs[-1]


def is_symbolic_call(call: Call) -> bool:
    """Whether it has symbolic sizes, or symbolic numbers as arguments."""
    return any(spec.is_symbolic for spec in call.inputs) or bool(flat(SymNode, call.args, call.kwargs))


def is_cast_inside(call: Call) -> bool:
    """Whether autocast casts the parts of this composite operator, not its arguments."""
    is_cast_whole = any(_torch.has_autocast_kernel(call.op, spec.device.type) for spec in call.inputs)
    return record_of(call.op).is_decomposed and not is_cast_whole


def has_views(outcomes: object) -> bool:
    return (
        any(map(has_views, outcomes)) if isinstance(outcomes, (tuple, list)) else isinstance(outcomes, View)
    )


def resizes_inputs(outcomes: Outcomes) -> bool:
    return isinstance(outcomes, Same) and outcomes.spec is not None


def are_out_of_order(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors on one storage overlap without being the same elements in the same order.

    False for tensors that are not dense, which eager does not check either.
    """
    if a is b or has_unbacked(*a.shape, *a.stride, a.offset, *b.shape, *b.stride, b.offset):
        return False
    if a.numel == 0 or b.numel == 0:
        return False
    if not all(spec.layout is torch.strided and is_dense(spec.shape, spec.stride) for spec in (a, b)):
        return False
    if _span(a) == _span(b):
        return a.stride != b.stride
    return _spans_intersect(a, b)


def _overlap(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two dense tensors on one storage overlap; False for others, which eager does not check either."""
    if a.numel == 0 or b.numel == 0 or not all(is_dense(spec.shape, spec.stride) for spec in (a, b)):
        return False
    return _spans_intersect(a, b)


def _spans_intersect(a: TensorSpec, b: TensorSpec) -> bool:
    (a_first, a_end), (b_first, b_end) = _span(a), _span(b)
    return bool(a_first < b_end and b_first < a_end)


def _span(spec: TensorSpec) -> tuple[Any, Any]:
    """The range of bytes that a dense tensor covers in its storage."""
    return spec.offset * spec.itemsize, (spec.offset + spec.numel) * spec.itemsize


(
    ONE_NEW, FIRST_VIEWED, FIRST_ITSELF, ONE_NEW_SYMBOLIC, ONE_DETERMINED, OTHER, COMPOSITE, TRACKED, RANGED, BOUNDED,
    DECOMPOSED,
) = range(11)  # fmt: skip


_serials = itertools.count()


class Plan:
    """`kind` names the common shapes of an answer, so that replaying them is one comparison:

        ONE_NEW, ONE_NEW_SYMBOLIC   one new tensor
        FIRST_VIEWED, FIRST_ITSELF  a view of the first argument, or the first argument
        ONE_DETERMINED              one new tensor, made from nothing, whose values are determined: `zeros`, `arange`
        OTHER                       anything else that only specs decide
        COMPOSITE                   the same of a composite operator, whose parts are cast where autocast is enabled
        TRACKED                     tensors whose values are determined although no input is read: `zeros_like`
        BOUNDED                     one new tensor of symbolic size, of integers whose bounds are known: `arange(n)`
        RANGED                      tensors whose values have a known range: masks, single numbers, random ones
        DECOMPOSED                  what C++ makes of a composite operator that views or writes its inputs: which views
                                    and versions autograd counts is decided by the operators inside it

    `effects` are run before the results are made. `written` are the positions of the inputs that the call writes to.
    `determined` says that the values of the results follow from the values of the inputs. `bounds` are the ranges of
    the results when the input has no known range, once they have been inferred. `serial` is a key for tables of facts about
    plans: unlike an identity, it is never used again.
    """

    __slots__ = ("bounds", "determined", "effects", "kind", "op", "outcomes", "serial", "spec", "written")

    def __init__(self, outcomes: Outcomes, written: tuple[int, ...] = (), determined: bool = False) -> None:
        self.outcomes = outcomes
        self.written = written
        self.determined = determined
        self.op: OpOverload | None = None
        self.kind = OTHER
        self.spec: Any = None  # the TensorSpec of the one new tensor or view
        self.effects: tuple[Effect, ...] = ()
        self.bounds: Any = None
        self.serial = next(_serials)

    @staticmethod
    def of(call: Call, outcomes: Outcomes) -> Plan:
        op = call.op
        record = RECORDS.get(id(op)) or record_of(op)
        if type(outcomes) is View and record.is_own_tensor:
            outcomes = replace(outcomes, is_linked=False)
        made = [outcomes.spec] if type(outcomes) is New else specs_in(outcomes)
        for spec in made:
            if spec.is_symbolic or max(spec.numel * spec.dtype.itemsize, *spec.stride, 0) > LARGE:
                check_storage_size(spec)
                expect_sizes(spec.shape)
        written = written_inputs(call) if record.may_write else ()
        plan = Plan(outcomes, written, record.follows_from_inputs and _is_trackable(call, outcomes, made))
        plan.op = op  # keeps the operator alive: a key holds its id(), which must not be reused
        if written or record.index_bounds is not None or record.refused_values is not None:
            plan.effects = effects_of(call, outcomes, written)
        plan.set_kind_by_outcomes(bool(call.args) and type(call.args[0]) is TensorSpec)
        # Determined values start at a new tensor whose values depend on no input (zeros, arange, zeros_like, ...): it
        # is tracked. Filling memory of unknown contents is not: all parameters of a model are initialised like that.
        if plan.determined and not written and (record.unread_inputs or 0) >= len(call.inputs):
            plan.kind = ONE_DETERMINED if plan.kind == ONE_NEW and not call.inputs else TRACKED
        elif record.value_range is not None and _has_ranges(record, call, made, written):
            plan.kind = RANGED
        elif plan.kind == ONE_NEW_SYMBOLIC and plan.spec.dtype in INTEGERS and record.extremes is not None:
            plan.kind = BOUNDED
        if record.is_decomposed:  # it has arrived whole, in inference mode
            if (written or has_views(outcomes)) and not is_symbolic_call(call):
                plan.kind = (
                    DECOMPOSED  # with symbols, another capture that replays the plan would have others
                )
            elif (
                plan.kind <= OTHER
                and is_cast_inside(call)
                and not (plan.kind == FIRST_ITSELF and not written)
            ):
                plan.kind = COMPOSITE
        elif record.caller_in_kernel is not None and is_cast_in_kernel(
            op, [spec.device.type for spec in call.inputs]
        ):
            plan.kind = COMPOSITE
        return plan

    def set_kind_by_outcomes(self, is_first_a_tensor: bool) -> None:
        """Set the kind and the spec, as far as outcomes decide them."""
        outcomes: Any = self.outcomes
        kind = type(outcomes)
        if kind is New:
            spec = outcomes.spec
            if spec.layout is torch.strided and not (spec.conj or spec.neg):
                self.kind, self.spec = ONE_NEW_SYMBOLIC if spec.is_symbolic else ONE_NEW, spec
        elif is_first_a_tensor and kind is View and outcomes.of == 0 and outcomes.is_linked:
            self.kind, self.spec = FIRST_VIEWED, outcomes.spec
        elif is_first_a_tensor and kind is Same and outcomes.of == 0 and outcomes.spec is None:
            self.kind = FIRST_ITSELF

    def count_unread(self) -> int:
        """The number of leading inputs whose values do not affect the results."""
        return 0 if self.op is None else record_of(self.op).unread_inputs or 0

    def with_outcomes(self, outcomes: Outcomes) -> Plan:
        """The same plan with other outcomes."""
        plan = Plan(outcomes, self.written, self.determined)
        plan.op, plan.kind, plan.effects = self.op, self.kind, self.effects
        if self.spec is not None and isinstance(outcomes, (New, View)):
            plan.spec = outcomes.spec
        return plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and (self.outcomes, self.written) == (other.outcomes, other.written)


def _is_trackable(call: Call, outcomes: Outcomes, made: list[TensorSpec]) -> bool:
    """Whether the results are few enough for their determined values to be tracked. `made`: the specs in the outcomes."""
    for spec in (*call.inputs, *made):
        # A sparse tensor shares memory with its parts: writes to the parts are not tracked.
        if spec.is_symbolic or spec.sparse is not None:
            return False
    if type(outcomes) is New:
        return bool(outcomes.spec.numel <= LARGEST)
    return bool(count_elements(outcomes, call.inputs) <= LARGEST)


def _has_ranges(record: OpFacts, call: Call, made: list[TensorSpec], written: tuple[int, ...]) -> bool:
    """Whether ranges of a call's results, or of its written tensors, are tracked: masks, few numbers, random
    numbers."""
    if record.has_out:
        return False
    inputs = call.inputs
    is_tracked = record.is_random or record.followed_at_any_size
    if not is_tracked and inputs and inputs[0].dtype in MASKS:
        is_tracked = all(spec.dtype in MASKS for spec in inputs)
    most_floats = LARGEST_RANGED if record.followed_through else 1
    for spec in [inputs[position] for position in written] if written else made:
        if spec.is_symbolic:
            continue
        most = most_floats if spec.dtype.is_floating_point else LARGEST_RANGED
        if is_tracked or spec.dtype in MASKS or spec.numel <= most:
            return True
    return False


def run_effects(plan: Plan, inputs: Sequence[object]) -> Plan:
    """Run the effects. Returns the plan to replay: another one if an effect replaces the outcomes."""
    for effect in plan.effects:
        outcomes = effect.run(plan.outcomes, inputs)
        if outcomes is not None and plan.kind != DECOMPOSED:
            other = Plan(outcomes, plan.written, plan.determined)
            other.op, other.effects = plan.op, plan.effects
            plan = other
    return plan
