"""The step of an optimizer while it is captured: its state, and parameters for which the step repeats.

An optimizer makes its state in its first step: `state["exp_avg"] = torch.zeros_like(p)`. When it stores such a tensor,
the tensor is computed for real by the operators that were recorded for it, and the graph reads it as an attribute: from
there on, the step is recorded as any later one.

    StepState            the table `optimizer.state`; its entries report what is stored in them
    initial_value        the real value of a tensor that the step has made
    lazy_zeros           zeros whose memory the system provides when it is written to
    RepeatedParameters   the step is recorded for one parameter, and written again for others like it
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node, map_arg

from understudy import _torch
from understudy.capture.constants import restore_optimizers_after
from understudy.capture.graph_passes import can_be_removed
from understudy.capture.lazy_state import (
    ArgumentSlots,
    FunctionCall,
    LazyMeta,
    Pending,
    RecordedCalls,
    base_name,
    count_since,
    fill_slots,
)
from understudy.capture.tracer import PythonKeyTracer
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import snapshot
from understudy.ops.registry import record_of
from understudy.ops.traits.writes import written_values
from understudy.shapes.bindings import bindings_of_input
from understudy.spec import TensorSpec

Store = Callable[[str, str, Any], Any]
"""(name of the parameter, key, value) → what is stored in its place."""
NO_VALUE = object()


class StepEntries(dict[str, Any]):
    """The state of one parameter. `store` is called for each value that a key is given first; `changed` collects the keys
    of numbers that are given another value later: the graph would keep the one that they have now."""

    def __init__(self, name: str, store: Store, changed: set[str]) -> None:
        super().__init__()
        self.name, self._store, self._changed = name, store, changed

    def __setitem__(self, key: str, value: Any) -> None:
        before = self.get(key, NO_VALUE)
        if before is NO_VALUE or before is None:
            value = self._store(self.name, key, value)
        elif is_number(value) and before != value:
            self._changed.add(key)
        super().__setitem__(key, value)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **entries: Any) -> None:
        for key, value in dict(*others, **entries).items():
            self[key] = value


class StepState(dict[Any, StepEntries]):
    """The table of states by parameter. A parameter without state has an empty one, as in `Optimizer.state`."""

    def __init__(self, names: Mapping[torch.Tensor, str], store: Store) -> None:
        super().__init__()
        self._names, self._store = names, store
        self.changed: set[str] = set()

    def name_of(self, parameter: torch.Tensor) -> str:
        return self._names[parameter]

    def __missing__(self, parameter: torch.Tensor) -> StepEntries:
        entries = StepEntries(self._names[parameter], self._store, self.changed)
        super().__setitem__(parameter, entries)
        return entries

    def __setitem__(self, parameter: torch.Tensor, entries: Mapping[str, Any]) -> None:
        if entries is not self.get(parameter):
            self.pop(parameter, None)
            self[parameter].update(entries)

    def __copy__(self) -> dict[Any, StepEntries]:
        return dict(self)

    def setdefault(self, parameter: torch.Tensor, default: Mapping[str, Any] | None = None) -> StepEntries:
        if parameter not in self and default:
            self[parameter] = default
        return self[parameter]


def is_number(value: object) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def numbers_in(optimizer: Any) -> dict[str, Any]:
    """The plain numbers among the attributes of an optimizer and the options of its groups, by the words that name them."""
    found = {f"the attribute {name!r}": value for name, value in vars(optimizer).items() if is_number(value)}
    for position, group in enumerate(optimizer.param_groups):
        options = {name: value for name, value in group.items() if is_number(value)}
        found.update({f"the option {name!r} of group {position}": value for name, value in options.items()})
    return found


# --- the values with which state begins --------------------------------------------------------------------------------


class StateFromInputs(Exception):
    """The optimizer computes its initial state from gradients."""


UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
ZEROS = ("zeros", "zeros_like", "new_zeros")
LIKE = (*ZEROS, "ones_like", "empty_like", "full_like", "new_ones", "new_empty", "new_full")
"""Operators that read only the metadata of their input."""
LEAST_LAZY_BYTES = 1 << 18
"""Smaller tensors are zeroed at once: a mapping of their own costs more."""


def initial_value(node: Node, read: Callable[[Node], Any]) -> torch.Tensor:
    """The real value of a node that depends only on parameters, constants and metadata. `read`: the value of a `get_attr`
    node. Raises `StateFromInputs` if it depends on gradients or inputs, or is memory that a kernel fills from them."""
    if _name(node) in UNWRITTEN:
        raise StateFromInputs(node.name)
    value = _evaluate(node, read, {})
    return value if _name(node) in LIKE else value.clone()


def _name(node: Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, _torch.OpOverload) else ""


def _evaluate(node: Node, read: Callable[[Node], Any], values: dict[Node, Any]) -> Any:
    if node in values:
        return values[node]
    name = _name(node)
    if name in ZEROS:
        result: Any = lazy_zeros(node.meta["val"])
    elif node.op == "get_attr":
        result = read(node)
    elif node.op == "call_function" and callable(node.target):
        like = node.args[0] if name in LIKE else None
        if isinstance(like, Node):
            values.setdefault(like, _empty_like(like.meta["val"]))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda inner: _evaluate(inner, read, values))
        result = node.target(*args, **kwargs)
    else:
        raise StateFromInputs(node.name)
    values[node] = result
    return result


def _sizes(val: Any) -> tuple[list[int], list[int]]:
    return [int(size) for size in val.shape], [int(step) for step in val.stride()]


def _empty_like(val: Any) -> torch.Tensor:
    return torch.empty_strided(*_sizes(val), dtype=val.dtype, device=val.device)


def lazy_zeros(val: Any) -> torch.Tensor:
    """Zeros with the metadata of a stand-in. The memory of a large one on the CPU is mapped when it is first written to:
    the state of a model of a billion parameters is made at once, and the first step pays for it."""
    shape, stride = _sizes(val)
    length = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    size = length * val.dtype.itemsize
    if val.device.type != "cpu" or size < LEAST_LAZY_BYTES or _torch.active_fake_mode() is not None:
        return _empty_like(val).zero_()
    options = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = torch.frombuffer(mmap.mmap(-1, size, **options), dtype=val.dtype).untyped_storage()
    return torch.empty(0, dtype=val.dtype).set_(memory, 0, shape, stride)


# --- Parameters that repeat ------------------------------------------------------------------------------------------
# Torch's optimizers, unless they work on lists of tensors (`foreach`, `fused`), treat each parameter by itself: what they
# compute depends on its spec, its gradient's, its state and the options of its group. Parameters for which these are
# equal differ in the tensors only.

GRADIENT, PARAMETER = "gradient", "parameter"
DIFFERING = frozenset({"val", "unbacked_bindings", "torch_fn"})
"""Metadata of nodes that differs between parameters."""
NUMBERS = (torch.SymInt, torch.SymFloat)
LISTS = ("foreach", "fused", "differentiable")


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is an optimizer of torch: these make their state before they use it, and use it alike in each step."""
    return type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]


def treats_each_parameter_alone(optimizer: Any) -> bool:
    """Whether this is an optimizer of torch that takes one parameter after the other, and has no hooks."""
    hooks = [hook for hook in _torch.step_hooks_of(optimizer) if hook.__module__ != restore_optimizers_after.__module__]
    return (
        is_torchs(optimizer)
        and not hooks
        and not any(group.get(name) for group in optimizer.param_groups for name in LISTS)
        # on other devices, lists are the default
        and all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
    )


class RepeatedParameters:
    """Takes the step of an optimizer, parameter by parameter.

    `nodes_of_state(parameter, plan)`: the nodes that read the state of a parameter, by key; the state is made where the
    optimizer would have made it, from the nodes that made that of the recorded parameter.
    """

    def __init__(
        self, optimizer: Any, tracer: PythonKeyTracer, mode: FakeTensorMode,
        existing_state: Callable[[Any], dict[str, Node]], nodes_of_state: Callable[[Any, Any], dict[str, Node]],
    ) -> None:  # fmt: skip
        self._optimizer = optimizer
        self._tracer = tracer
        self._mode = mode
        self._existing_state = existing_state
        self._nodes_of_state = nodes_of_state
        self._plans: dict[Any, ParameterPlan | None] = {}

    def step(self) -> None:
        groups = self._optimizer.param_groups
        try:
            for position, group in enumerate(groups):
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._optimizer.param_groups = [{**group, "params": [parameter]}]
                        self._step_one(position, parameter)
        finally:
            self._optimizer.param_groups = groups

    def _step_one(self, position: int, parameter: Any) -> None:
        key = (position, _describe(parameter), _describe(parameter.grad), self._describe_state(parameter))
        plan = self._plans.get(key)
        if plan is None:
            recorded = self._record(parameter)
            self._plans.setdefault(key, recorded)
            return
        with _torch.NoFunctionModes():
            own = {**self._find_inputs(parameter), **self._nodes_of_state(parameter, plan.parameter)}
            plan.write(self._tracer, self._mode, own)

    def _describe_state(self, parameter: Any) -> tuple[Any, ...]:
        return tuple((key, _describe(value)) for key, value in self._optimizer.state.get(parameter, {}).items())

    def _find_inputs(self, parameter: Any) -> dict[str, Node]:
        return {PARAMETER: self._tracer.node_of_tensor(parameter), GRADIENT: self._tracer.node_of_tensor(parameter.grad)}

    def _record(self, parameter: Any) -> ParameterPlan | None:
        """Take the step of one parameter. None if it can't be written for others: it has made assumptions on numbers."""
        tracer, env = self._tracer, self._mode.shape_env
        with _torch.NoFunctionModes():
            inputs = self._find_inputs(parameter)
        last, counts = _torch.last_node(tracer.graph), tracer.torch_fn_counts.copy()
        assumed = None if env is None else (len(env.guards), len(env.runtime_asserts))
        self._optimizer.step()
        nodes = _live_nodes_after(last)
        has_sizes = any("unbacked_bindings" in node.meta and type(node.meta["val"]) not in NUMBERS for node in nodes)
        if has_sizes or (env is not None and (len(env.guards), len(env.runtime_asserts)) != assumed):
            return None
        calls = RecordedCalls(counts, count_since(counts, tracer.torch_fn_counts))
        own = {**inputs, **self._existing_state(parameter)}
        return ParameterPlan(parameter, nodes, own, calls, tracer.appender())


def _describe(value: Any) -> Any:
    if type(value) is not FakeTensor:
        return type(value), value
    return value._spec, value.requires_grad, value._range and value._range[0]


def _live_nodes_after(last: Node) -> list[Node]:
    """The nodes after this one that have an effect, or are read by one that has."""
    nodes = _torch.nodes_after(last)
    dead: set[Node] = set()
    pure: dict[Any, bool] = {}
    for node in reversed(nodes):
        if dead.issuperset(node.users) and can_be_removed(node, pure):
            dead.add(node)
    return [node for node in nodes if node not in dead]


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node, without what differs between parameters."""

    slot: int
    name: str
    bucket: dict[Node, None]
    target: Any
    arguments: Callable[[list[Any]], tuple[Any, ...]]
    kwargs: dict[str, Any]
    has_slots: bool
    meta: dict[str, Any]


def _shares_memory(val: FakeTensor, inputs: list[Node]) -> bool:
    vals = [node.meta.get("val") for node in inputs]
    return _torch.storage_id(val) in {_torch.storage_id(other) for other in vals if type(other) is FakeTensor}


class ParameterPlan:
    """The nodes of one parameter's step, with slots for its tensors."""

    def __init__(
        self, parameter: Any, nodes: list[Node], own: dict[str, Node], calls: RecordedCalls, appender: _torch.NodeAppender
    ) -> None:
        self.parameter = parameter
        calculations = [node for node in nodes if node.op == "call_function"]
        self._slots = ArgumentSlots(dict.fromkeys((*own.values(), *calculations)))
        self._own = {name: self._slots[node] for name, node in own.items()}
        self._recorded = calls
        self._appender = appender
        self.calls: list[FunctionCall] = []
        self.read_numbers: dict[int, Any] = {}
        """The data-dependent numbers that nodes read, by the number of the node."""
        self.new_specs: dict[int, TensorSpec] = {}
        """The specs of new tensors, by the number of the node."""
        self._nodes = [self._plan(number, node) for number, node in enumerate(calculations)]

    def _plan(self, number: int, node: Node) -> PlannedNode:
        kwargs, has_slots = self._slots.mark(node.kwargs)
        meta = {name: Pending(name, number) if name in DIFFERING else value for name, value in node.meta.items()}
        if "torch_fn" in meta:
            meta["torch_fn"] = Pending("torch_fn", len(self.calls))
            self.calls.append(self._recorded.read(node.meta["torch_fn"]))
        val = node.meta.get("val")
        if "unbacked_bindings" in meta:
            self.read_numbers[number] = val
        if type(val) is FakeTensor and not _shares_memory(val, node.all_input_nodes):
            self.new_specs[number] = val._spec
        return PlannedNode(
            self._slots[node], base_name(node.target), self._appender.bucket(node.target), node.target,
            self._slots.select(node.args), kwargs, has_slots, meta,
        )  # fmt: skip

    def write(self, tracer: PythonKeyTracer, mode: FakeTensorMode, own: dict[str, Node]) -> None:
        """Write the nodes for a parameter. `own`: the nodes of its tensors."""
        values = self._slots.values.copy()
        for name, node in own.items():
            if name in self._own:
                values[self._own[name]] = node
        written = WrittenStep(self, mode, self._recorded.count_again(tracer.torch_fn_counts))
        for planned in self._nodes:
            kwargs = fill_slots(planned.kwargs, values) if planned.has_slots else planned.kwargs
            node = self._appender.add(planned.name, planned.bucket, planned.target, planned.arguments(values), kwargs)
            values[planned.slot] = node
            meta = LazyMeta(planned.meta)
            meta.source = written
            _torch.set_node_meta(node, meta)
            written.nodes.append(node)


class WrittenStep:
    """The nodes of a parameter that were written by a plan: makes their pending metadata."""

    __slots__ = ("_bindings", "_counts", "_mode", "_plan", "_vals", "nodes")

    def __init__(self, plan: ParameterPlan, mode: FakeTensorMode, counts: dict[Any, int]) -> None:
        self._plan, self._mode, self._counts = plan, mode, counts
        self.nodes: list[Node] = []
        self._vals: dict[int, Any] = {}
        self._bindings: dict[int, Any] = {}

    def make(self, pending: Pending) -> Any:
        number = pending.number
        if pending.kind == "torch_fn":
            return self._plan.calls[number].number(self._counts)
        if number not in self._vals:
            self._vals[number] = self._run(number)
        return self._vals[number] if pending.kind == "val" else self._bindings[number]

    def _run(self, number: int) -> Any:
        """The value of a node: what it gives for the values of its arguments; of a write, what was written to."""
        node = self.nodes[number]
        env: Any = self._mode.shape_env
        target: Any = node.target
        if number in self._plan.new_specs:
            return make_new(self._mode, self._plan.new_specs[number])
        if number in self._plan.read_numbers:
            made = env.create_unbacked_like(self._plan.read_numbers[number])
            self._bindings[number] = bindings_of_input(env, made)
            return made
        args, kwargs = map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
        if isinstance(target, _torch.OpOverload) and record_of(target).may_write:
            return snapshot(next(iter(written_values(target, args, kwargs))))
        with _torch.NoFunctionModes(), _torch.no_modes(), self._mode, _torch.grad_mode(False):
            result = target(*args, **kwargs)
        return snapshot(result) if type(result) is FakeTensor else result
