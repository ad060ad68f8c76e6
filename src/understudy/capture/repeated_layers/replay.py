"""The plan of a recorded layer, which writes its nodes again for similar layers.

    StepValues, ReplayedValues    the values of its nodes: specs and aliasing
    LayerPlan                     its nodes, with slots for what differs between runs; `write_nodes` writes them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from understudy import _torch
from understudy.capture.lazy_state import (
    ArgumentSlots,
    LazyMeta,
    LazyParameter,
    Pending,
    RecordedCalls,
    base_name,
    fill_slots,
    no_arguments,
)
from understudy.capture.module_stack import LayerPosition, RelativeStack
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import can_remake, make_new, make_view, remake
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import snapshot
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.capture.repeated_layers.layers import LayerRecording
    from understudy.capture.tracer import PythonKeyTracer

@dataclass(slots=True)
class TensorValue:
    """The value of a node that is a tensor: its spec, and the number of its storage."""

    spec: Any
    storage: int
    is_simple: bool
    """Can be made by the fast path: on a storage that only values of the layer share."""


class StepValues:
    """The values of the steps of a layer."""

    def __init__(self, tensors: list[Any], outside: list[FakeTensor]) -> None:
        self._numbers: dict[int, int] = {}
        self.of_tensors = [self._number(tensor) for tensor in tensors]
        self.outside = {self._number(val): val for val in outside}
        self.from_before = {*self.of_tensors, *self.outside}
        self.steps: list[Any] = []
        self.first: dict[int, int] = {}
        """For each storage number, the step that makes the first tensor on it."""

    def _number(self, tensor: Any) -> int:
        if type(tensor) is LazyParameter:  # of a layer inside of this one that was replayed: its views have its storage
            tensor = tensor.stand_in()
        return self._numbers.setdefault(_torch.storage_id(tensor), len(self._numbers))

    def __len__(self) -> int:
        """The number of storages."""
        return len(self._numbers)

    def add(self, val: Any) -> bool:
        """Add the value of the next step. Returns whether it can be made lazily."""
        if type(val) is FakeTensor:
            self.steps.append(self._describe(val))
            return can_remake(val._spec)
        tensors = flat(FakeTensor, (val,), {})

        def describe(part: object) -> Any:
            return self._describe(part) if type(part) is FakeTensor else part

        self.steps.append(map_aggregate(val, describe))
        return val is not None and all(can_remake(tensor._spec) for tensor in tensors)

    def _describe(self, tensor: FakeTensor) -> TensorValue:
        storage = self._number(tensor)
        self.first.setdefault(storage, len(self.steps))
        is_simple = storage not in self.from_before and can_remake(tensor._spec)
        return TensorValue(tensor._spec, storage, is_simple)


class ReplayedValues:
    """The values of the nodes of one replayed layer, each made once."""

    def __init__(self, values: StepValues, mode: FakeTensorMode, given: list[FakeTensor], own: list[Any]) -> None:
        self._values = values
        self._mode = mode
        self._is_inference = torch.is_inference_mode_enabled()
        self._bases: list[Any] = [None] * len(values)
        for storage, val in values.outside.items():
            self._bases[storage] = val
        for position, (storage, tensor) in enumerate(zip(values.of_tensors, (*given, *own), strict=True)):
            if storage in values.first:
                # The inputs are not referenced: checks of whether tensors are still alive would be misled.
                self._bases[storage] = snapshot(tensor) if position < len(given) else tensor
        self._made: dict[int, Any] = {}

    def make(self, step: int) -> Any:
        """The value of a step."""
        if step not in self._made:
            if torch.is_inference_mode_enabled() is self._is_inference:
                self._made[step] = self._all(step)
            else:
                with _torch.inference_mode(self._is_inference):
                    self._made[step] = self._all(step)
        return self._made[step]

    def _all(self, step: int) -> Any:
        vals: Any = self._values.steps[step]
        if type(vals) is TensorValue:
            return self._tensor(vals, step)

        def make(part: object) -> Any:
            return self._tensor(part, step) if type(part) is TensorValue else part

        return map_aggregate(vals, make)

    def _tensor(self, val: TensorValue, step: int) -> FakeTensor:
        base = self._bases[val.storage]
        if type(base) is LazyParameter:
            base = self._bases[val.storage] = base.stand_in()
        if base is None:
            first = self._values.first[val.storage]
            if first != step:
                self.make(first)
                base = self._bases[val.storage]
        is_short = val.is_simple and not self._is_inference
        if base is None:
            fake = remake(self._mode, val.spec, None) if is_short else make_new(self._mode, val.spec)
            self._bases[val.storage] = fake
            return fake
        return remake(self._mode, val.spec, base) if is_short else make_view(self._mode, base, val.spec)


# --- The plan of a recorded layer ----------

NONE = -1
DIFFERING = frozenset({"val", "stack_trace", "torch_fn", "nn_module_stack"})
"""Metadata of nodes that differs between layers."""
set_meta = _torch.set_node_meta


class ReplayStep(NamedTuple):
    """A node, without what differs between runs."""

    slot: int
    own: int
    """The position of the layer's own tensor that it reads, NONE for a call."""
    name: str
    bucket: dict[Node, None]
    """The graph's table of calls of this target."""
    target: Any
    arguments: Callable[[list[Any]], tuple[Any, ...]]
    """Selects the arguments of the call from the values of a run."""
    kwargs: dict[str, Any]
    has_places: bool
    """Whether the kwargs contain slots."""
    meta: dict[str, Any]
    """The metadata, with pending entries for what differs between runs."""
    value: int
    """The number of its value in the values of a run, if that can't be made lazily; else NONE."""


class ReplayedLayer:
    """One replayed layer: makes the pending metadata of its nodes."""

    __slots__ = ("_calls", "_counts", "_place", "_plan", "_prefix", "_values")

    def __init__(
        self, plan: LayerPlan, values: ReplayedValues, prefix: str, counts: dict[Any, int], place: LayerPosition | None
    ) -> None:
        self._plan = plan
        self._values = values
        self._prefix = prefix
        self._counts = counts
        self._place = place

    def make(self, pending: Pending) -> Any:
        if pending.kind == "val":
            return self._values.make(pending.number)
        if pending.kind == "stack_trace":  # the lines outside of the layer differ, those inside are the same
            return self._prefix + self._plan.lines_inside[pending.number]
        if pending.kind == "nn_module_stack" and self._place is not None:
            return self._place.absolute(self._plan.stacks_inside[pending.number])
        return self._plan.call_list[pending.number].number(self._counts)


class LayerPlan:
    """The steps of a layer, and how to replay them."""

    def __init__(self, known: LayerRecording, appender: _torch.NodeAppender) -> None:
        self._known = known
        self._appender = appender
        nodes = dict.fromkeys((*known.inputs, *filter(None, known.own), *known.nodes))
        self._slots = ArgumentSlots(nodes)
        self._gives = StepValues(known.tensors, known.outside)
        self._traces: dict[str, Pending] = {}
        self._stacks: dict[Any, Pending] = {}
        self._calls: dict[tuple[str, str], Pending] = {}
        self._tables: dict[str, dict[Any, Pending]] = {
            "stack_trace": self._traces, "torch_fn": self._calls, "nn_module_stack": self._stacks,
        }  # fmt: skip
        self._recorded = RecordedCalls(known.counts, known.advance)
        self._own_of = {node: i for i, node in enumerate(known.own) if node is not None}
        inside = set(known.nodes)
        self._read_before = [(self._slots[node], i) for node, i in self._own_of.items() if node not in inside]
        self._steps = list(map(self._step, known.nodes))
        self.lines_inside = [trace[len(known.prefix) :] for trace in self._traces]
        self.stacks_inside: list[RelativeStack] = list(self._stacks)
        self.call_list = list(map(self._recorded.read, self._calls))

    # --- preparing -----------------------------------------------------------------------------------------------

    def _step(self, node: Node) -> ReplayStep:
        slot = self._slots[node]
        if node.op == "get_attr":
            return ReplayStep(slot, self._own_of[node], "", {}, None, no_arguments, {}, False, {}, NONE)
        val = node.meta.get("val")
        number = NONE if val is None else len(self._gives.steps)
        is_late = val is not None and self._gives.add(val)
        kwargs, has_places = self._slots.mark(node.kwargs)
        return ReplayStep(
            slot, NONE, base_name(node.target), self._appender.bucket(node.target), node.target,
            self._slots.select(node.args), kwargs, has_places, self._meta(node.meta, number), NONE if is_late else number,
        )  # fmt: skip

    def _meta(self, meta: dict[str, Any], number: int) -> dict[str, Any]:
        """The metadata of a node, with placeholders for what differs between runs. `number`: of its value."""
        placed = {}
        for name, value in meta.items():
            if value is None or name not in DIFFERING:
                placed[name] = value
            else:
                placed[name] = Pending(name, number) if name == "val" else self._pending(name, value)
        return placed

    def _pending(self, name: str, value: Any) -> Pending:
        """The placeholder of a metadata entry: one for each value."""
        if name == "nn_module_stack":
            value = None if self._known.place is None else self._known.place.relative(value)
        known = self._tables[name]
        found = known.get(value)
        if found is None:
            found = known[value] = Pending(name, len(known))
        return found

    # --- replaying -----------------------------------------------------------------------------------------------

    def write_nodes(
        self, tracer: PythonKeyTracer, mode: FakeTensorMode, given: list[FakeTensor], tensors: list[Any],
        place: LayerPosition | None,
    ) -> list[Any]:  # fmt: skip
        """Write the nodes for these inputs and own tensors of the layer; returns the leaves of its result."""
        slots = self._slots.values.copy()
        for node, fake in zip(self._known.inputs, given, strict=True):
            slots[self._slots[node]] = tracer.node_of_tensor(fake)
        constants = tracer.constants

        def node_of(tensor: Any) -> Node:
            return constants.node_of_lazy(tensor) if type(tensor) is LazyParameter else constants.node_of(tensor)

        for slot, i in self._read_before:
            slots[slot] = node_of(tensors[i])
        values = ReplayedValues(self._gives, mode, given, tensors)
        counts = self._recorded.count_again(tracer.torch_fn_counts)
        written = ReplayedLayer(self, values, tracer.node_meta.stack_trace(), counts, place)
        add = self._appender.add
        for slot, own, name, bucket, target, arguments, kwargs, has_places, same, value in self._steps:
            if own != NONE:
                slots[slot] = node_of(tensors[own])
                continue
            if has_places:
                kwargs = fill_slots(kwargs, slots)
            node = slots[slot] = add(name, bucket, target, arguments(slots), kwargs)
            meta = LazyMeta(same)
            meta.source = written
            if value != NONE:
                meta["val"] = values.make(value)
            set_meta(node, meta)
        return self._results(tracer, mode, slots, given, tensors)

    def _results(
        self, tracer: PythonKeyTracer, mode: FakeTensorMode, slots: list[Any], given: list[FakeTensor], tensors: list[Any]
    ) -> list[Any]:
        known = self._known
        made: dict[Node, Any] = dict(zip(known.inputs, given, strict=True))
        for before, after, tensor in zip(known.inputs, known.inputs_after, given, strict=True):
            if before is not after:
                made[after] = tensor
                tracer.remember(tensor, slots[self._slots[after]])
        for leaf, needs_gradient in zip(known.result, known.gradients, strict=True):
            if isinstance(leaf, Node) and leaf not in made:
                node = slots[self._slots[leaf]]
                val = node.meta["val"]
                made[leaf] = make_view(mode, val, val._spec)
                if needs_gradient:
                    made[leaf] = add_gradient(made[leaf], _source_of_gradient(given, tensors))
                tracer.remember(made[leaf], node)
        return [made[leaf] if isinstance(leaf, Node) else leaf for leaf in known.result]


# --- gradients --------------------------------------------------------------------------------------------------------


class GradientOfReplay(RuntimeError):
    """A backward pass reached a replayed layer: it has to be run."""


class ReplayedGradient(torch.autograd.Function):
    """Makes the result of a replayed layer require grad. The gradient itself can't be computed."""

    @staticmethod
    def forward(ctx: object, result: list[FakeTensor], source: torch.Tensor) -> FakeTensor:
        return result.pop()  # passed in a list, so that autograd does not treat it as an input

    @staticmethod
    def backward(ctx: object, *gradients: object) -> Any:
        raise GradientOfReplay(
            "a backward pass inside of the program came to a layer that was written into the graph without being run: "
            "trace it inside of `with understudy.run_every_layer():`"
        )


def add_gradient(result: FakeTensor, source: torch.Tensor) -> FakeTensor:
    """A result that requires grad because `source` does."""
    with _torch.no_modes():
        made: FakeTensor = _torch.apply_function(ReplayedGradient, [result], source)
    return made


def _source_of_gradient(given: list[FakeTensor], tensors: list[Any]) -> torch.Tensor:
    source: Any = next(tensor for tensor in (*given, *tensors) if tensor.requires_grad)
    return source.stand_in() if type(source) is LazyParameter else source
