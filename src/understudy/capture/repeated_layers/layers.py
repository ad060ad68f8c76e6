"""Layers that repeat: what one layer of a model has recorded, the next ones like it record without being run.

A layer is a module among siblings in a `ModuleList` or `Sequential`. Two siblings are alike if they have the same class,
the same attributes, and tensors of the same specs all the way down, and if what their code refers to is unchanged. If one
has run on inputs of the same specs, the next is written into the graph with its own parameters in their place; if it
reads tensors besides its inputs and its own, two runs have to agree first. A layer is run as usual wherever that could
make a difference: gradients, hooks, other modes, autocast, writes in place, data-dependent sizes, changed attributes,
globals and settings, random numbers, files, tensors that somebody kept. `docs/repeated-layers.md` tells it in full.

The module holds the entry (`RepeatedLayers`, `run_every_layer`), what is kept of a run (`LayerRecording`), and the handlers
that are called in the place of layers (`LayerHandlers`).
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
from understudy.capture.lazy_state import LazyParameter, resolve_parameters
from understudy.capture.module_stack import ACTIVE, LayerPlace
from understudy.capture.repeated_layers.comparison import (
    ComparedState,
    Key,
    LayerComparison,
    check_results,
    check_unchanged,
    flatten_call,
    key_of,
)
from understudy.capture.repeated_layers.interception import InterceptedCalls, LayerFamily
from understudy.capture.repeated_layers.object_state import COMPARED, NotComparable
from understudy.capture.repeated_layers.replay import GradientOfReplay as GradientOfReplay
from understudy.capture.repeated_layers.replay import LayerPlan, describe_function
from understudy.contexts import contextmanager
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import parts_in
from understudy.ops.registry import record_of
from understudy.ops.traits.writes import written_values
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.capture.recorder import ProxyTorchDispatchMode
    from understudy.capture.tracer import PythonKeyTracer

LEAST = 2
"""Siblings below which it does not pay."""
FEWEST = 5
"""Modules in a layer below which it does not pay, either."""
TRIES = 4
"""Layers of a family that were run for nothing, until the others are run without being looked at."""
CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


_REPEATS: ContextVar[bool] = ContextVar("layers are written down again", default=True)


@contextmanager
def run_every_layer() -> Iterator[None]:
    """Inside, `make_fx` runs every layer of a model, also those that look like one that it has recorded."""
    token = _REPEATS.set(False)
    try:
        yield
    finally:
        _REPEATS.reset(token)


@dataclass
class LayerGroup:
    """Modules that are alike, and what was recorded of them for each kind of input."""

    last: dict[Key, LayerRecording] = field(default_factory=dict)
    known: dict[Key, LayerRecording] = field(default_factory=dict)

    def keep(self, key: Key, recording: LayerRecording, family: LayerFamily) -> None:
        """What was recorded last is known if it reads nothing besides, or if it reads the same as the one before."""
        last = self.last.get(key)
        if not recording.outside or (last is not None and last.canonical() == recording.canonical()):
            self.known[key] = recording
        family.misses += last is not None
        self.last[key] = recording


class RepeatedLayers:
    """The layers of some modules that repeat. The one entry to this package:

        layers = RepeatedLayers(modules)        # `layers.later`: the modules that will probably not be run
        layers.watch(tracer, mode, recorder)    # from now on, calls of layers are compared with earlier ones
        layers.release()                        # at the end of the trace, also if it has failed

    Inside of `run_every_layer`, there are none.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.later: set[int] = set()
        """The modules, by identity, that are in layers after the first of their family."""
        self._families: list[list[torch.nn.Module]] = []
        self._calls = InterceptedCalls()
        if _REPEATS.get():
            for module in modules:
                for container in parts_in(module):
                    if isinstance(container, CONTAINERS):
                        self._add_those_in(container)

    def _add_those_in(self, container: torch.nn.Module) -> None:
        by_kind: dict[Key, list[list[torch.nn.Module]]] = {}
        for child in container._modules.values():
            parts = [] if child is None else parts_in(child)
            kind = _kind_of(parts)
            if kind is not None:
                by_kind.setdefault(kind, []).append(parts)
        for family in by_kind.values():
            if len(family) >= LEAST:
                self._families.append([parts[0] for parts in family])
                for parts in family[1:]:
                    self.later.update(map(id, parts))

    def watch(self, tracer: PythonKeyTracer, mode: FakeTensorMode, recorder: ProxyTorchDispatchMode) -> None:
        """From now on, a layer that is like an earlier one is written into the graph of `tracer` without being run."""
        handlers = LayerHandlers(tracer, mode, recorder)
        for layers in self._families:
            family = LayerFamily(layers)
            for layer in layers:
                self._calls.intercept(layer, handlers.handler_of(layer, family))

    def release(self) -> None:
        """Every class is as it was before. May be called again, after an interrupt."""
        self._calls.release()


def _kind_of(parts: list[torch.nn.Module]) -> Key | None:
    """What layers that consist of these must have in common, before they are looked at more closely. None for one that is
    not worth it: a module of torch's, or a few of them, are run faster than they are compared."""
    if len(parts) == 1:
        kind = type(parts[0])
        return None if kind.__module__.startswith("torch.") else (kind,)
    if len(parts) < FEWEST:
        return None
    return tuple([(type(part), *[p.shape for p in part._parameters.values() if p is not None]) for part in parts])


# --- what a layer has recorded ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerRecording:
    """A stretch of the graph, the values that went in, and what came out."""

    nodes: list[Node]
    inputs: list[Node]
    inputs_after: list[Node]
    """By which nodes they are known when it has run: above autograd, `x.to(dtype)` is a call, and may give `x`."""
    own: list[Node | None]
    tensors: list[Any]
    result: Any
    structure: Any
    prefix: str
    counts: dict[Any, int]
    advance: dict[Any, int]
    """How often torch functions had been called before, and are called in it."""
    held: list[Any]
    appender: _torch.NodeAppender
    gradients: list[bool]
    """Which of the results need a gradient."""
    place: LayerPlace | None
    """Where it was called, if nodes say in which modules they were made."""
    calls_inside: dict[str, int]

    @functools.cached_property
    def outside(self) -> list[FakeTensor]:
        """Tensors that the layer reads and that are neither its inputs nor its own."""
        inside = {*self.nodes, *self.inputs, *(node for node in self.own if node is not None)}
        vals = [
            read.meta.get("val") for node in self.nodes for read in node.all_input_nodes if read not in inside
        ]
        return [val for val in vals if type(val) is FakeTensor]

    @functools.cached_property
    def plan(self) -> LayerPlan:
        """How to write it down again."""
        return LayerPlan(self, self.appender)

    def canonical(self) -> list[Any]:
        """Equal for recordings that differ in nothing but their inputs and own tensors."""
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
                _specs(node.meta.get("val")),
            )
            for node in self.nodes
        ]
        return [
            calls,
            [describe(leaf) if isinstance(leaf, Node) else leaf for leaf in self.result],
            self.structure,
        ]


def _specs(val: Any) -> Any:
    def leaf(part: object) -> Any:
        return part._spec if type(part) is FakeTensor else part

    return map_aggregate(val, leaf)


@dataclass(frozen=True)
class LayerRun:
    """What was there before a layer ran, and the tensors that it has made."""

    before: Node
    random: Any
    settings: tuple[Any, ...]
    counts: dict[Any, int]
    prefix: str
    made: list[weakref.ref[Any]]
    place: LayerPlace | None


@dataclass(frozen=True)
class LayerCall:
    """A layer, what it was like before it ran, and what it was given."""

    layer: torch.nn.Module
    signature: Key
    seen: ComparedState
    arguments: Any
    leaves: list[Any]
    structure: Any
    nodes: list[Node]
    """Of the tensors among the leaves."""


class LayerHandlers:
    """What is called in the place of the layers of one trace."""

    def __init__(self, tracer: PythonKeyTracer, mode: FakeTensorMode, recorder: ProxyTorchDispatchMode) -> None:
        self._tracer = tracer
        self._mode = mode
        self._recorder = recorder
        self._allows_gradients = recorder.pre_dispatch
        """Above autograd, nothing that is recorded depends on gradients."""
        self._likeness = LayerComparison()
        self._groups: dict[Key, LayerGroup] = {}

    def handler_of(self, layer: torch.nn.Module, family: LayerFamily) -> Callable[..., Any]:
        """Runs the layer, or writes down again what one like it has recorded."""

        def handle(forward: Callable[..., object], *args: object, **kwargs: object) -> Any:
            if family.misses >= TRIES or not self._can_be_repeated():
                return forward(*args, **kwargs)
            try:
                with _torch.NoFunctionModes():
                    signature, seen = self._signature(layer, family)
                    leaves, structure = flatten_call(args, kwargs)
                    key = key_of(self._tracer, self._mode, leaves, structure, self._allows_gradients)
                    place = self._place_of(layer)
                    if _is_trained(seen.tensors) and not self._allows_gradients:
                        raise NotComparable
            except (NotComparable, TypeError):  # the latter: something that has no hash
                family.misses += 1
                return forward(*args, **kwargs)
            known = self._groups[signature].known.get(key)
            given = [leaf for leaf in leaves if type(leaf) is FakeTensor]
            if known is None:
                nodes = list(map(self._node, given))
                run, (reads, result) = self._observe(lambda: family.run(layer, lambda: forward(*args, **kwargs)), place)
                try:
                    family.check_unread(reads)
                    call = LayerCall(layer, signature, seen, (args, kwargs), leaves, structure, nodes)
                    recording = self._check_run(run, result, call, family)
                except (NotComparable, TypeError):
                    family.misses += 1
                else:
                    self._groups[signature].keep(key, recording, family)
                return result
            family.misses = 0
            with _torch.NoFunctionModes():
                result = known.plan.follow(self._tracer, self._mode, given, seen.tensors, place)
            stack = ACTIVE.get()
            if place is not None and stack is not None:
                stack.count_calls(place, known.calls_inside)
            return _torch.tree_unflatten(result, known.structure)

        return handle

    def _can_be_repeated(self) -> bool:
        return self._tracer.keep_in_step is None and _torch.is_recorded_alone(self._mode, self._recorder)

    def _place_of(self, layer: torch.nn.Module) -> LayerPlace | None:
        """Where it is called, if nodes say in which modules they were made."""
        stack = ACTIVE.get()
        if stack is None or self._tracer.node_meta.module_stack is None:
            return None
        place = stack.place_of(layer)
        if place is None:
            raise NotComparable
        return place

    def _signature(self, layer: torch.nn.Module, family: LayerFamily) -> tuple[Key, ComparedState]:
        seen = ComparedState()
        signature = self._likeness.signature(layer, seen, family.watched)
        if signature not in self._groups:
            if family.watch(self._likeness.names_of(type(layer))):
                seen = ComparedState()
                signature = self._likeness.signature(layer, seen, family.watched)
            self._groups.setdefault(signature, LayerGroup())
        return signature, seen

    # --- running and comparing ---------------------------------------------------------------------------------

    def _observe(self, forward: Callable[[], object], place: LayerPlace | None) -> tuple[LayerRun, Any]:
        """Run a layer, and look at what happens meanwhile."""
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
        tracer.node_meta.stack_trace()  # lets go of the frames in which the layer ran, and so of their tensors
        return run, result

    def _check_run(self, run: LayerRun, result: object, called: LayerCall, family: LayerFamily) -> LayerRecording:
        """What was recorded, if writing it down again is as good as running the layer again."""
        after, seen = ComparedState(), called.seen
        seen.tensors = resolve_parameters(seen.tensors)
        if random.getstate() != run.random or _settings() != run.settings:
            raise NotComparable
        if self._likeness.signature(called.layer, after, family.watched) != called.signature:
            raise NotComparable
        if after.calls != seen.calls:  # with arguments that were not seen
            raise NotComparable
        leaves, structure = _torch.tree_flatten(result)
        check_unchanged(called.arguments, called.leaves, called.structure)
        check_results(result, leaves, called.arguments, seen)
        given = [leaf for leaf in called.leaves if type(leaf) is FakeTensor]
        if _is_kept_elsewhere(run.made, [*leaves, *called.leaves]) or any(_is_determined(leaf, given) for leaf in leaves):
            raise NotComparable
        tracer = self._tracer
        own = [tracer.constants.existing(tensor) for tensor in seen.tensors]
        nodes = _after(run.before)
        recording = LayerRecording(
            [node for node in nodes if not _is_shared(node, own)], called.nodes, list(map(self._node, given)), own,
            [*given, *seen.tensors],
            [self._node(leaf) if isinstance(leaf, torch.Tensor) else _plain(leaf) for leaf in leaves],
            structure, run.prefix, run.counts, _advance(run.counts, tracer.torch_fn_counts), seen.held,
            tracer.appender(), [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves], run.place,
            {} if run.place is None else run.place.calls_inside(self._place_after(called.layer)),
        )  # fmt: skip
        _check_pure(recording, nodes)
        _check_modules(recording)
        _check_calls(recording)
        return recording

    def _place_after(self, layer: torch.nn.Module) -> LayerPlace:
        place = self._place_of(layer)
        assert place is not None, "there was one before it ran"
        return place

    def _node(self, tensor: Any) -> Node:
        """Of an input or a result."""
        node = self._tracer.find_node(tensor) or self._tracer.constants.existing(tensor)
        if node is None:
            raise NotComparable
        return node


def _settings() -> tuple[Any, ...]:
    return torch.is_grad_enabled(), *_torch.settings()


def _advance(before: dict[Any, int], after: dict[Any, int]) -> dict[Any, int]:
    return {func: count - before.get(func, 0) for func, count in after.items() if count != before.get(func, 0)}


def _is_trained(tensors: list[Any]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_determined(leaf: object, given: list[FakeTensor]) -> bool:
    """Whether a layer gives a tensor with values that are known, other than one that it was given."""
    return type(leaf) is FakeTensor and leaf._known is not None and not any(leaf is one for one in given)


def _is_shared(node: Node, own: list[Node | None]) -> bool:
    """Written down once and used by all: constants that are not a layer's own, and numbers made of sizes."""
    if node.op == "get_attr":
        return node not in own
    return type(node.meta.get("val")) in NUMBERS


def _after(before: Node) -> list[Node]:
    nodes = []
    node = before.next
    while node.op != "root":
        nodes.append(node)
        node = node.next
    return nodes


def _plain(leaf: object) -> Any:
    if type(leaf) not in COMPARED:
        raise NotComparable
    return leaf


def _is_kept_elsewhere(made: list[weakref.ref[Any]], expected: list[Any]) -> bool:
    """Whether somebody holds on to a tensor that was made inside."""
    known = {id(tensor) for tensor in expected}
    alive = [reference for reference in made if id(reference()) not in known]
    with _torch.NoFunctionModes():
        return any(map(_torch.is_held_by_python, alive))


def _check_pure(recording: LayerRecording, nodes: list[Node]) -> None:
    """Nothing but calls that can be repeated: no writes to what was there before, no graphs inside, no sizes born here,
    no results and parameters that were there before."""
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
    """That all calls were made in modules of the layer."""
    place = recording.place
    for node in recording.nodes if place is not None else ():
        stack = node.meta.get("nn_module_stack")
        if place is not None and stack is not None and place.relative(stack) is None:
            raise NotComparable


def _check_calls(recording: LayerRecording) -> None:
    """That it is known which torch functions the nodes name: `x.real` and `x.shape` are both called `__get__`."""
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
