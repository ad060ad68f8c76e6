"""A plan: the outcomes of a call, in the form in which a cache hit replays them."""

from __future__ import annotations

from typing import Any

import torch

from understudy._torch import OpOverload
from understudy.infer.call import Call
from understudy.spec import Changed, New, Outcomes, Same, TensorSpec, View

ONE_NEW, FIRST_VIEWED, FIRST_ITSELF, ONE_NEW_SYMBOLIC, OTHER = range(5)

KERNEL_COUNTS = "_foreach_"
"""Operators on lists of tensors, whose kernels, not the dispatcher, count the writes."""


WRITES_APART = frozenset(
    f"aten::{name}"
    for name in ("cat.out", "gather.out", "take.out", "index_select.out", "kthvalue.values", "masked_select.out")
)
"""Operators that refuse to write into a tensor which shares memory with one that they read."""


READS_FROM = dict.fromkeys(
    "zeros_like ones_like full_like new_zeros new_ones new_full zero_ fill_ copy_".split(), 1
)
"""Operators that do not read the values of their first input: how many inputs to skip."""


class Plan:
    """`kind` names the common shapes of an answer, so that replaying them is one comparison:
    one new tensor (with symbolic sizes or without), a view of the first argument, the first argument itself.

    `written` are the positions of the inputs that the call writes to. `determined` says that the values of the
    results follow from the values of the inputs: the operator is no random one and the results are small.
    `uncounted` are those of the written inputs whose version C++ leaves to the kernel. `reads_from` is the position
    of the first input whose values matter. `apart` says that what is written must not overlap with what is
    read. `plain` says that a hit has nothing to do but to make the tensors. `starts` says that it makes one tensor
    out of nothing, whose values are determined: `zeros`, `arange`.
    """

    __slots__ = ("apart", "determined", "kind", "op", "outcomes", "plain", "reads_from", "spec", "starts", "uncounted",
                 "written")  # fmt: skip

    def __init__(self, outcomes: Outcomes, written: tuple[int, ...] = (), determined: bool = False) -> None:
        self.outcomes = outcomes
        self.written = written
        self.determined = determined
        self.op: OpOverload | None = None
        self.kind = OTHER
        self.spec: Any = None  # the TensorSpec of the one new tensor or view
        self.uncounted: tuple[int, ...] = ()
        self.apart = False
        self.reads_from = 0
        self.plain = True
        self.starts = False

    @staticmethod
    def of(call: Call, outcomes: Outcomes, written: tuple[int, ...], determined: bool) -> Plan:
        plan = Plan(outcomes, written, determined)
        plan.op = call.op  # a key holds the operator's identity: as long as the plan lives, nothing else has it
        first = bool(call.args) and isinstance(call.args[0], TensorSpec)
        match outcomes:
            case New(spec) if spec.layout is torch.strided and not (spec.conj or spec.neg):
                plan.kind, plan.spec = ONE_NEW_SYMBOLIC if spec.is_symbolic else ONE_NEW, spec
            case View(0, spec) if first:
                plan.kind, plan.spec = FIRST_VIEWED, spec
            case Same(0, None) if first:
                plan.kind = FIRST_ITSELF
        if call.op.overloadpacket.__name__.startswith(KERNEL_COUNTS) or isinstance(outcomes, Changed):
            plan.uncounted = written
        plan.reads_from = READS_FROM.get(call.op.overloadpacket.__name__, 0)
        # Values begin with a new tensor that a call made without reading any (zeros, arange, zeros_like, ...): it must
        # be followed. Filling memory that nothing is known of is not: all parameters of a model are initialised so.
        plan.apart = call.op.name() in WRITES_APART
        starts_values = determined and not written and plan.reads_from >= len(call.inputs)
        plan.plain = not (plan.uncounted or plan.apart or starts_values)
        plan.starts = starts_values and not call.inputs and plan.kind == ONE_NEW
        return plan

    def saying(self, outcomes: Outcomes) -> Plan:
        """The same plan, its outcomes said in other terms."""
        plan = Plan(outcomes, self.written, self.determined)
        plan.op, plan.kind, plan.uncounted, plan.apart = self.op, self.kind, self.uncounted, self.apart
        plan.reads_from, plan.plain, plan.starts = self.reads_from, self.plain, self.starts
        if self.spec is not None:
            plan.spec = outcomes.spec  # type: ignore[union-attr]
        return plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and (self.outcomes, self.written) == (other.outcomes, other.written)

    __hash__ = None  # type: ignore[assignment]
