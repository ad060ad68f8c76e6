"""Layers that repeat: the nodes of one layer are replayed for later layers like it, which are not run.

A layer is a module among siblings in a `ModuleList` or `Sequential`. Two siblings are alike if they have the same class,
the same attributes, and tensors of the same specs all the way down, and if what their code refers to is unchanged. If one
has run on inputs of the same specs, the nodes of the next are written with its own parameters; if it reads tensors
besides its inputs and its own, two runs have to agree first. A layer is run as usual wherever that could make a
difference: gradients, hooks, other modes, autocast, writes in place, data-dependent sizes, changed attributes, globals
and settings, random numbers, files, tensors that are kept alive elsewhere. See `docs/repeated-layers.md`.

This module has the entry points (`RepeatedLayers`, `run_every_layer`), the recording of a run (`LayerRecording`), and
the handlers that are called in the place of `forward` (`LayerHandlers`).
"""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from understudy import _torch
from understudy.capture.lazy_state import LazyParameter, count_since, describe_function, resolve_parameters
from understudy.capture.module_stack import ACTIVE, LayerPosition
from understudy.capture.repeated_layers.comparison import (
    ComparedState,
    Key,
    LayerComparison,
    check_results,
    check_unchanged,
    flatten_call,
    key_of,
)
from understudy.capture.repeated_layers.interception import AttributeReads, InterceptedCalls, LayerFamily
from understudy.capture.repeated_layers.object_state import COMPARED, NotComparable
from understudy.capture.repeated_layers.replay import GradientOfReplay as GradientOfReplay
from understudy.capture.repeated_layers.replay import LayerPlan
from understudy.contexts import contextmanager
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import parts_in
from understudy.graph.node_values import spec_of_val
from understudy.ops.registry import record_of
from understudy.ops.traits.writes import written_values
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.capture.recorder import ProxyTorchDispatchMode
    from understudy.capture.tracer import PythonKeyTracer

LEAST_SIBLINGS = 2
"""The least number of siblings for which comparing pays."""
LEAST_MODULES = 5
"""The least number of modules in a layer for which comparing pays."""
MOST_FAILED_LAYERS = 4
"""After this many layers of a family were compared in vain, the others are run without comparing."""
CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


_REPEATS: ContextVar[bool] = ContextVar("layers are written down again", default=True)


@contextmanager
def run_every_layer() -> Iterator[None]:
    """Inside, `make_fx` runs every layer of a model: no layer is replayed."""
    token = _REPEATS.set(False)
    try:
        yield
    finally:
        _REPEATS.reset(token)


@dataclass
class LayerGroup:
    """Modules that are alike, with their recordings for each key of inputs."""

    last: dict[Key, LayerRecording] = field(default_factory=dict)
    known: dict[Key, LayerRecording] = field(default_factory=dict)

    def add_recording(self, key: Key, recording: LayerRecording, family: LayerFamily) -> None:
        """Add a recording. It can be replayed if it reads no outside tensors, or the same ones as the last recording."""
        last = self.last.get(key)
        if not recording.outside or (last is not None and last.canonical() == recording.canonical()):
            self.known[key] = recording
        family.misses += last is not None
        self.last[key] = recording


class RepeatedLayers:
    """The repeated layers of some modules. The entry point of this package:

        layers = RepeatedLayers(modules)        # `layers.later`: the modules that will probably not run
        layers.watch(tracer, mode, recorder)    # from now on, layers are compared, and replayed if possible
        layers.release()                        # at the end of the trace, also if it has failed

    Inside `run_every_layer`, there are none.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.later: set[int] = set()
        """The modules, by identity, of all layers except the first of each family."""
        self._families: list[LayerFamily] = []
        self._calls = InterceptedCalls()
        if _REPEATS.get():
            for module in modules:
                for container in parts_in(module):
                    if container._modules and isinstance(container, CONTAINERS):
                        self._add_those_in(container)

    def _add_those_in(self, container: torch.nn.Module) -> None:
        by_kind: dict[Key, list[list[torch.nn.Module]]] = {}
        for child in container._modules.values():
            parts = [] if child is None else parts_in(child)
            kind = _kind_of(parts)
            if kind is not None:
                by_kind.setdefault(kind, []).append(parts)
        for family in by_kind.values():
            if len(family) >= LEAST_SIBLINGS:
                self._families.append(LayerFamily(family))
                for parts in family[1:]:
                    self.later.update(map(id, parts))

    def watch(self, tracer: PythonKeyTracer, mode: FakeTensorMode, recorder: ProxyTorchDispatchMode) -> None:
        """From now on, a layer like an earlier one is replayed into the graph of `tracer`."""
        handlers = LayerHandlers(tracer, mode, recorder)
        for family in self._families:
            for layer in family.layers:
                self._calls.intercept(layer, handlers.handler_of(layer, family))

    def release(self) -> None:
        """Restore all classes. An interrupt may cause a second call."""
        self._calls.release()


def _kind_of(parts: list[torch.nn.Module]) -> Key | None:
    """A cheap key that equal layers share. None for layers that are not worth comparing: a few modules of torch run
    faster than they can be compared."""
    if len(parts) == 1:
        kind = type(parts[0])
        return None if kind.__module__.startswith("torch.") else (kind,)
    if len(parts) < LEAST_MODULES:
        return None
    kinds: list[Any] = []
    for part in parts:
        kinds.append(type(part))
        if part._parameters:
            kinds += [parameter.shape for parameter in part._parameters.values() if parameter is not None]
    return tuple(kinds)


# --- recordings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerRecording:
    """The nodes of one run of a layer, its inputs and its results."""

    nodes: list[Node]
    inputs: list[Node]
    inputs_after: list[Node]
    """The nodes of the inputs after the run: above autograd, `x.to(dtype)` is a call, and may return `x`."""
    own: list[Node | None]
    tensors: list[Any]
    result: Any
    structure: Any
    prefix: str
    counts: dict[Any, int]
    advance: dict[Any, int]
    """How often each torch function was called before the run, and in it."""
    held: list[Any]
    appender: _torch.NodeAppender
    gradients: list[bool]
    """Which of the results require grad."""
    place: LayerPosition | None
    """The position of the call, if the module stack is recorded."""
    calls_inside: dict[str, int]

    @functools.cached_property
    def outside(self) -> list[FakeTensor]:
        """The tensors that the layer reads besides its inputs and its own."""
        inside = {*self.nodes, *self.inputs, *(node for node in self.own if node is not None)}
        vals = [
            read.meta.get("val") for node in self.nodes for read in node.all_input_nodes if read not in inside
        ]
        return [val for val in vals if type(val) is FakeTensor]

    @functools.cached_property
    def plan(self) -> LayerPlan:
        """The plan that writes the nodes again."""
        return LayerPlan(self, self.appender)

    def canonical(self) -> list[Any]:
        """A value that is equal for recordings that differ only in their inputs and own tensors."""
        numbers: dict[Node, Any] = {node: ("node", i) for i, node in enumerate(self.nodes)}
        numbers.update((node, ("input", i)) for i, node in enumerate(self.inputs))
        own = {node: ("own", i) for i, node in enumerate(self.own) if node is not None}
        numbers.update(own)

        def describe(part: object) -> Any:
            return numbers.get(part, part) if isinstance(part, Node) else (type(part), part)

        calls = [
            (
                own.get(node, node.target),
                map_aggregate(node.args, describe),
                map_aggregate(node.kwargs, describe),
                spec_of_val(node.meta.get("val")),
            )
            for node in self.nodes
        ]
        return [
            calls,
            [describe(leaf) if isinstance(leaf, Node) else leaf for leaf in self.result],
            self.structure,
        ]


@dataclass(frozen=True)
class LayerRun:
    """The state before a run of a layer, and the tensors that it made."""

    before: Node
    random: Any
    settings: tuple[Any, ...]
    counts: dict[Any, int]
    prefix: str
    made: list[weakref.ref[Any]]
    place: LayerPosition | None


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer: its signature before the run, and its arguments."""

    layer: torch.nn.Module
    signature: Key
    seen: ComparedState
    arguments: Any
    leaves: list[Any]
    structure: Any
    nodes: list[Node]
    """The nodes of the tensors among the leaves."""


class LayerHandlers:
    """The handlers that are called in the place of the layers of one trace."""

    def __init__(self, tracer: PythonKeyTracer, mode: FakeTensorMode, recorder: ProxyTorchDispatchMode) -> None:
        self._tracer = tracer
        self._mode = mode
        self._recorder = recorder
        self._allows_gradients = recorder.pre_dispatch
        """Above autograd, the recorded nodes do not depend on gradients."""
        self._likeness = LayerComparison()
        self._groups: dict[Key, LayerGroup] = {}
        self._reading: list[AttributeReads] = []
        """Of the layers that are running now, the outermost first."""

    def handler_of(self, layer: torch.nn.Module, family: LayerFamily) -> Callable[..., Any]:
        """A handler that runs the layer, or replays the recording of a similar one."""

        def handle(forward: Callable[..., object], *args: object, **kwargs: object) -> Any:
            if family.misses >= MOST_FAILED_LAYERS or not self._can_be_repeated():
                return forward(*args, **kwargs)
            try:
                with _torch.NoFunctionModes():
                    group, signature, seen = self._group_of(layer, family)
                    leaves, structure = flatten_call(args, kwargs)
                    names = self._likeness.names_of(type(layer))
                    key = key_of(self._tracer, self._mode, leaves, structure, self._allows_gradients, names)
                    place = self._position_of(layer)
                    if _is_trained(seen.tensors) and not self._allows_gradients:
                        raise NotComparable
            except (NotComparable, TypeError):  # the latter: an unhashable value
                family.misses += 1
                return forward(*args, **kwargs)
            known = group.known.get(key)
            given = [leaf for leaf in leaves if type(leaf) is FakeTensor]
            if known is None:
                nodes = list(map(self._node, given))
                run, (reads, result) = self._observe(
                    lambda: family.run(layer, lambda: forward(*args, **kwargs), self._reading), place
                )
                try:
                    family.check_unread(reads)
                    call = LayerCall(layer, signature, seen, (args, kwargs), leaves, structure, nodes)
                    recording = self._check_run(run, result, call, family)
                except (NotComparable, TypeError):
                    family.misses += 1
                else:
                    group.add_recording(key, recording, family)
                return result
            family.misses = 0
            for outer in self._reading:
                outer.note_replayed(layer, family.watched)
            with _torch.NoFunctionModes():
                result = known.plan.write_nodes(self._tracer, self._mode, given, seen.tensors, place)
            stack = ACTIVE.get()
            if place is not None and stack is not None:
                stack.count_calls(place, known.calls_inside)
            return _torch.tree_unflatten(result, known.structure)

        return handle

    def _can_be_repeated(self) -> bool:
        return self._tracer.keep_in_step is None and _torch.has_only_recorder(self._mode, self._recorder)

    def _position_of(self, layer: torch.nn.Module) -> LayerPosition | None:
        """The position of the call, if the module stack is recorded."""
        stack = ACTIVE.get()
        if stack is None or self._tracer.node_meta.module_stack is None:
            return None
        place = stack.position_of_layer(layer)
        if place is None:
            raise NotComparable
        return place

    def _group_of(self, layer: torch.nn.Module, family: LayerFamily) -> tuple[LayerGroup, Key, ComparedState]:
        """The layers that are like this one, their common signature, and the state of this layer."""
        seen = ComparedState()
        signature = self._likeness.signature(layer, seen, family.watched)
        group = self._groups.get(signature)
        if group is None:
            if family.watch(self._likeness.names_of(type(layer))):
                seen = ComparedState()
                signature = self._likeness.signature(layer, seen, family.watched)
            group = self._groups.setdefault(signature, LayerGroup())
        return group, signature, seen

    # --- running and comparing ---------------------------------------------------------------------------------

    def _observe(self, forward: Callable[[], object], place: LayerPosition | None) -> tuple[LayerRun, Any]:
        """Run a layer, and observe its effects."""
        tracer = self._tracer
        run = LayerRun(
            next(iter(reversed(tracer.graph.nodes))), random.getstate(), _settings(), dict(tracer.torch_fn_counts),
            tracer.node_meta.stack_trace(), [], place,
        )  # fmt: skip
        around, tracer.made = tracer.made, run.made
        try:
            result = forward()
        finally:
            tracer.made = around
            if around is not None:
                around += run.made
        tracer.node_meta.stack_trace()  # drops the frames of the layer, and their tensors
        return run, result

    def _check_run(self, run: LayerRun, result: object, called: LayerCall, family: LayerFamily) -> LayerRecording:
        """The recording of a run, if replaying it is equivalent to running the layer; raises `NotComparable` otherwise."""
        after, seen = ComparedState(), called.seen
        seen.tensors = resolve_parameters(seen.tensors)
        if random.getstate() != run.random or _settings() != run.settings:
            raise NotComparable
        if self._likeness.signature(called.layer, after, family.watched) != called.signature:
            raise NotComparable
        if after.calls != seen.calls:  # with unknown arguments
            raise NotComparable
        leaves, structure = _torch.tree_flatten(result)
        check_unchanged(called.arguments, called.leaves, called.structure)
        check_results(result, leaves, called.arguments, seen)
        given = [leaf for leaf in called.leaves if type(leaf) is FakeTensor]
        if _is_kept_elsewhere(run.made, [*leaves, *called.leaves]) or any(_is_determined(leaf, given) for leaf in leaves):
            raise NotComparable
        tracer = self._tracer
        own = [tracer.constants.existing(tensor) for tensor in seen.tensors]
        nodes = _torch.nodes_after(run.before)
        recording = LayerRecording(
            [node for node in nodes if not _is_shared(node, own)], called.nodes, list(map(self._node, given)), own,
            [*given, *seen.tensors],
            [self._node(leaf) if isinstance(leaf, torch.Tensor) else _require_plain(leaf) for leaf in leaves],
            structure, run.prefix, run.counts, count_since(run.counts, tracer.torch_fn_counts), seen.held,
            tracer.appender(), [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves], run.place,
            {} if run.place is None else run.place.calls_inside(self._place_after(called.layer)),
        )  # fmt: skip
        _check_pure(recording, nodes)
        _check_modules(recording)
        _check_calls(recording)
        return recording

    def _place_after(self, layer: torch.nn.Module) -> LayerPosition:
        place = self._position_of(layer)
        assert place is not None, "there was one before it ran"
        return place

    def _node(self, tensor: Any) -> Node:
        """The node of an input or a result."""
        node = self._tracer.find_node(tensor) or self._tracer.constants.existing(tensor)
        if node is None:
            raise NotComparable
        return node


def _settings() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), *_torch.settings()


def _is_trained(tensors: list[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_determined(leaf: object, given: list[FakeTensor]) -> bool:
    """Whether a result has determined values, and is not one of the inputs."""
    return type(leaf) is FakeTensor and leaf._determined is not None and not any(leaf is one for one in given)


def _is_shared(node: Node, own: list[Node | None]) -> bool:
    """Whether a node is shared by all layers: constants that are not a layer's own, and numbers computed from sizes."""
    if node.op == "get_attr":
        return node not in own
    return type(node.meta.get("val")) in NUMBERS


def _require_plain(leaf: object) -> Any:
    if type(leaf) not in COMPARED:
        raise NotComparable
    return leaf


def _is_kept_elsewhere(made: list[weakref.ref[Any]], expected: list[Any]) -> bool:
    """Whether a tensor that was made inside is still referenced from elsewhere."""
    known = {id(tensor) for tensor in expected}
    alive = [reference for reference in made if id(reference()) not in known]
    with _torch.NoFunctionModes():
        return any(map(_torch.is_held_by_python, alive))


def _check_pure(recording: LayerRecording, nodes: list[Node]) -> None:
    """Raise unless all nodes can be replayed: no writes to existing tensors, no subgraphs, no new unbacked symbols, no
    results that alias existing tensors."""
    if any("unbacked_bindings" in node.meta for node in nodes):
        raise NotComparable
    inside = {*recording.nodes, *recording.inputs}
    if not all(leaf in inside for leaf in recording.result if isinstance(leaf, Node)):
        raise NotComparable
    earlier = {node for node in recording.own if node is not None and node not in inside}
    if not earlier.isdisjoint(recording.inputs) or any(not earlier.isdisjoint(node.all_input_nodes) for node in nodes):
        raise NotComparable
    targets = {id(node.target): node.target for node in recording.nodes if node.op == "call_function"}
    writing = {identity for identity, target in targets.items() if _may_write(target)}
    before: set[int] | None = None
    for node in recording.nodes:
        if node.op != "call_function" and node.op != "get_attr":
            raise NotComparable
        if id(node.target) in writing:
            if before is None:
                tensors = [tensor for tensor in recording.tensors if type(tensor) is not LazyParameter]
                before = {_torch.storage_id(tensor) for tensor in (*tensors, *recording.outside)}
            if not before.isdisjoint(_written_storages(node)):
                raise NotComparable


def _check_modules(recording: LayerRecording) -> None:
    """Raise unless all calls were made in modules of the layer."""
    place = recording.place
    for node in recording.nodes if place is not None else ():
        stack = node.meta.get("nn_module_stack")
        if place is not None and stack is not None and place.relative(stack) is None:
            raise NotComparable


def _check_calls(recording: LayerRecording) -> None:
    """Raise unless the torch functions of the nodes are unambiguous: `x.real` and `x.shape` are both called `__get__`."""
    names = list(map(describe_function, recording.advance))
    shared = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    for call in {node.meta.get("torch_fn") for node in recording.nodes} if shared else ():
        if call is not None and (call[0].rpartition("_")[0], call[1]) in shared:
            raise NotComparable


def _may_write(target: object) -> bool:
    if isinstance(target, _torch.HigherOrderOperator):
        raise NotComparable
    return isinstance(target, _torch.OpOverload) and record_of(target).may_write


def _written_storages(node: Node) -> set[int]:
    written = flat(Node, written_values(node.target, node.args, node.kwargs), {})
    vals = [node.meta.get("val") for node in written]
    if not all(type(val) is FakeTensor for val in vals):
        raise NotComparable
    return {_torch.storage_id(val) for val in vals}
