"""A plan: the outcomes of a call, in the form in which a cache hit replays them."""

from __future__ import annotations

from typing import Any

import torch

from understudy._torch import OpOverload
from understudy.spec import Changed, New, Outcomes, Same, TensorSpec, View, is_dense
from understudy.spec.call import Call

ONE_NEW, FIRST_VIEWED, FIRST_ITSELF, ONE_NEW_SYMBOLIC, OTHER = range(5)
KERNEL_COUNTS = "_foreach_"
"""Operators on lists of tensors, whose kernels, not the dispatcher, count the writes."""


WRITES_APART = frozenset(
    f"aten::{name}"
    for name in (
        "cat.out", "gather.out", "take.out", "index_select.out", "kthvalue.values", "masked_select.out",
        "index_add_", "index_copy_", "index_put_", "index_reduce_", "scatter_.src", "scatter_.reduce", "scatter_add_",
        "scatter_reduce_.two",
    )
)  # fmt: skip
"""Operators that refuse to write into a tensor which shares memory with one that they read."""


WRITES_ALIKE = frozenset(
    "add addcdiv addcmul atan2 bernoulli bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor "
    "clamp_max clamp_min copy copysign div eq floor_divide fmod gcd ge gt heaviside hypot igamma igammac lcm le lerp "
    "logical_and logical_or logical_xor lt masked_fill maximum minimum mul ne nextafter pow remainder sub where "
    "xlogy".split()
)
"""Elementwise operators whose in-place and out= variants refuse to write to memory that they read in another order."""


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
    read; `crossing` are pairs of one that is written and one that is read which must not be on one storage, as they
    would not be the same elements in the same order. `plain` says that a hit has nothing to do but to make the
    tensors, or to look at such pairs. `starts` says that it makes one tensor out of nothing, whose values are
    determined: `zeros`, `arange`.
    """

    __slots__ = ("apart", "crossing", "determined", "kind", "op", "outcomes", "plain", "reads_from", "spec", "starts",
                 "uncounted", "written")  # fmt: skip

    def __init__(self, outcomes: Outcomes, written: tuple[int, ...] = (), determined: bool = False) -> None:
        self.outcomes = outcomes
        self.written = written
        self.determined = determined
        self.op: OpOverload | None = None
        self.kind = OTHER
        self.spec: Any = None  # the TensorSpec of the one new tensor or view
        self.uncounted: tuple[int, ...] = ()
        self.apart = False
        self.crossing: tuple[tuple[int, int], ...] = ()
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
        plan.crossing = _crossing(call, written, outcomes) if written else ()
        is_apart = plan.apart or (bool(plan.crossing) and plan.kind != FIRST_ITSELF)
        plan.plain = not (plan.uncounted or is_apart or starts_values)
        plan.starts = starts_values and not call.inputs and plan.kind == ONE_NEW
        return plan

    def saying(self, outcomes: Outcomes) -> Plan:
        """The same plan, its outcomes said in other terms."""
        plan = Plan(outcomes, self.written, self.determined)
        plan.op, plan.kind, plan.uncounted, plan.apart = self.op, self.kind, self.uncounted, self.apart
        plan.reads_from, plan.plain, plan.starts, plan.crossing = (
            self.reads_from, self.plain, self.starts, self.crossing,
        )  # fmt: skip
        if self.spec is not None:
            plan.spec = outcomes.spec  # type: ignore[union-attr]
        return plan

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and (self.outcomes, self.written) == (other.outcomes, other.written)

    __hash__ = None  # type: ignore[assignment]


def _crossing(call: Call, written: tuple[int, ...], outcomes: Outcomes) -> tuple[tuple[int, int], ...]:
    """The pairs of inputs, one written and one read, that the operator refuses to find on one storage."""
    name = call.op.overloadpacket.__name__
    if name.removesuffix("_") not in WRITES_ALIKE and not (torch.Tag.pointwise in call.op.tags and "out" in call.kwargs):
        return ()
    inputs = call.inputs
    return tuple(
        (target, read)
        for target in written
        for read in range(len(inputs))
        if read != target and (is_resizing(outcomes) or do_cross(inputs[read], inputs[target]))
    )


def is_resizing(outcomes: Outcomes) -> bool:
    return isinstance(outcomes, Same) and outcomes.spec is not None


def do_cross(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors on one storage share places in memory without being the same places in the same order.

    Of tensors with gaps or overlaps of their own, eager does not try to find out.
    """
    if a is b or a.is_symbolic or b.is_symbolic or a.numel == 0 or b.numel == 0:
        return False
    if not all(spec.layout is torch.strided and is_dense(spec.shape, spec.stride) for spec in (a, b)):
        return False
    (a_first, a_end), (b_first, b_end) = span(a), span(b)
    if (a_first, a_end) == (b_first, b_end):
        return a.stride != b.stride
    return a_first < b_end and b_first < a_end


def span(spec: TensorSpec) -> tuple[Any, Any]:
    """The bytes of its storage that a dense tensor covers."""
    return spec.offset * spec.itemsize, (spec.offset + spec.numel) * spec.itemsize
