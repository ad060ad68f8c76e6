"""A plan: the outcomes of a call, in the form in which a cache hit replays them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy._torch import OpOverload
from understudy.infer.effects import Effect, effects_of
from understudy.ops.traits.ranges import has_ranges
from understudy.ops.traits.values import unread_inputs
from understudy.spec import New, Outcomes, Same, TensorSpec, View
from understudy.spec.call import Call

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
    `determined` says that the values of the results follow from the values of the inputs.
    """

    __slots__ = ("determined", "effects", "kind", "op", "outcomes", "spec", "written")

    def __init__(self, outcomes: Outcomes, written: tuple[int, ...] = (), determined: bool = False) -> None:
        self.outcomes = outcomes
        self.written = written
        self.determined = determined
        self.op: OpOverload | None = None
        self.kind = OTHER
        self.spec: Any = None  # the TensorSpec of the one new tensor or view
        self.effects: tuple[Effect, ...] = ()

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


def run_effects(plan: Plan, inputs: Sequence[Any]) -> Plan:
    """The plan to replay: this one, unless an effect knows better of these inputs."""
    for effect in plan.effects:
        outcomes = effect.run(plan.outcomes, inputs)
        if outcomes is not None:
            other = Plan(outcomes, plan.written, plan.determined)
            other.op, other.effects = plan.op, plan.effects
            plan = other
    return plan
