"""Whether the values of results follow from the values of inputs, and which inputs are read for them."""

from __future__ import annotations

from typing import Any

from understudy.ops.registry import Trait, record_of
from understudy.spec import New, Outcomes, Same, TensorSpec, View
from understudy.spec.call import Call

LARGEST = 1 << 20
"""Elements that a tensor may have for its determined values to be followed."""

undetermined: Trait[str] = Trait("why the values of its results do not follow from its inputs", of_packets=True)
undetermined.register(
    "memory as it was found",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_", "resize_as_",
)  # fmt: skip
undetermined.register("concerns streams", "record_stream")

unread_inputs: Trait[int] = Trait("how many of its first inputs it does not read the values of", of_packets=True)
unread_inputs.register(
    1, "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero_", "fill_", "copy_"
)

def is_determined(call: Call, outcomes: Outcomes) -> bool:
    """Whether the values of what a call gives follow from the values of its inputs, and are few enough to follow."""
    record = record_of(call.op)
    if any(spec.is_symbolic for spec in (*call.inputs, *specs_in(outcomes))):
        return False
    if record.is_random or undetermined.of(call.op) is not None:
        return False
    return call.op.namespace in ("aten", "prims") and _count_elements(outcomes, call.inputs) <= LARGEST


def specs_in(outcomes: object) -> list[TensorSpec]:
    """Those of the tensors that a call makes."""
    match outcomes:
        case New(spec) | View(_, spec):
            return [spec]
        case tuple() | list():
            return [spec for part in outcomes for spec in specs_in(part)]
    return []


def _count_elements(outcomes: Any, inputs: tuple[TensorSpec, ...]) -> Any:
    match outcomes:
        case New(spec) | View(_, spec):
            return spec.numel
        case Same(of):
            return inputs[of].numel
        case tuple() | list():
            return sum(_count_elements(part, inputs) for part in outcomes)
    return 0
