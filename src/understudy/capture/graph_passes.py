"""Passes over a recorded graph.

remove_dead_code    removes nodes without users and without effects
make_writable       replaces ZeroTensors that an operator of the graph writes to by ordinary zeros
insert_promises     writes deferred runtime assertions (`torch._check` on unbacked symbols) as nodes
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy.capture.tracer import SYMBOLIC, PythonKeyTracer
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import set_val
from understudy.graph.random_state import CHANGES_OF_GENERATOR, STATES, torch_get_rng_state
from understudy.ops.registry import record_of
from understudy.ops.traits.writes import draws_numbers, is_pure, written_values
from understudy.shapes.checking import origins
from understudy.shapes.env import ShapeEnv
from understudy.shapes.guards import Guard
from understudy.spec.call import flat


def remove_unused_rng_states(graph: Graph) -> None:
    """Remove nodes that read the generator's state and put it back, if the graph doesn't change it in between."""
    states = [node for target in STATES for node in graph.find_nodes(op="call_function", target=target)]
    if not states or any(_changes_rng_state(node) for node in graph.nodes):
        return
    for node in reversed(list(graph.nodes)):
        if node in states and not node.users:
            graph.erase_node(node)


def _changes_rng_state(node: Node) -> bool:
    target = node.target
    if isinstance(target, _torch.OpOverload):
        return draws_numbers(target, node.args, node.kwargs)
    if isinstance(target, _torch.HigherOrderOperator):  # its subgraphs may
        return True
    is_restored = any(value.target is torch_get_rng_state for value in node.all_input_nodes)
    return target in CHANGES_OF_GENERATOR and not is_restored


def remove_dead_code(graph: Graph) -> None:
    remove_unused_rng_states(graph)
    pure: dict[Any, bool] = {}
    erase = _torch.erase_node if graph.owning_module is None else graph.erase_node
    for node in reversed(graph.nodes):
        if node.users or node.op in ("placeholder", "output"):
            continue
        if can_be_removed(node, pure):
            erase(node)


def can_be_removed(node: Node, known: dict[Any, bool]) -> bool:
    """Whether nothing is lost without this node, if nothing reads it. `known`: answers for targets, kept between calls."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or "unbacked_bindings" in node.meta:
        return False
    target = node.target
    if isinstance(target, _torch.OpOverload) and (
        record_of(target).may_write or torch.Tag.nondeterministic_seeded in target.tags
    ):
        return _target_is_pure(node)
    found = known.get(target)
    if found is None:
        found = known[target] = _target_is_pure(node)
    return found


def _target_is_pure(node: Node) -> bool:
    target: Any = node.target
    if isinstance(target, _torch.OpOverload):
        return is_pure(target, node.args, node.kwargs) and not node.is_impure(impure_random=False)
    if target is torch.get_rng_state:
        return True
    is_number = type(node.meta.get("val")) in (torch.SymInt, torch.SymFloat, torch.SymBool)
    return target is operator.getitem or is_number


# --- Forward-mode gradients of constants: C++ uses ZeroTensors, which have no memory and can't be written to ---------------
# Before C++ writes to a gradient in place, it copies a ZeroTensor. For stand-ins with symbolic sizes ordinary zeros are
# used, so the graph has no such copy, and needs ordinary zeros as well.

aten = torch.ops.aten
EFFICIENT = aten._efficientzerotensor.default


def make_writable(graph: Graph) -> None:
    """Replace `_efficientzerotensor` by `zeros` where a node writes to it, or to a view of it."""
    zeros = graph.find_nodes(op="call_function", target=EFFICIENT)
    if zeros:
        written = _sources(_written(graph))
        for node in zeros:
            if node in written:
                node.target = aten.zeros.default


def _written(graph: Graph) -> Iterable[Node]:
    for node in graph.nodes:
        if isinstance(node.target, _torch.OpOverload) and record_of(node.target).may_write:
            yield from flat(Node, (written_values(node.target, node.args, node.kwargs),), {})


def _sources(nodes: Iterable[Node]) -> set[Node]:
    """The nodes that these are computed from, up to copies."""
    todo, seen = list(nodes), set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            if node.target is not aten.clone.default:
                todo += node.all_input_nodes
    return seen


# --- Deferred runtime assertions on unbacked symbols, as nodes of the graph ----------------------------------
# `torch._check(n >= 2)`, for a data-dependent number `n`, is a promise: the graph is valid where it holds. Each promise
# becomes a node `aten._assert_scalar` after the node that produces the number, so that a run that violates it fails
# before anything is computed from it. What operators of the graph check themselves, as sizes being non-negative, is
# left to them.

ASSERT = torch.ops.aten._assert_scalar.default


def insert_deferred_runtime_asserts(
    gm: GraphModule, shape_env: ShapeEnv | None = None, name: str = "", export: bool = False
) -> None:
    """Write the deferred assertions of `shape_env` into the graph, and into its subgraphs.

    Graphs of `make_fx` have them already; this is for other graphs, like the pass of the same name in
    `torch.fx.passes.runtime_assert`. An assertion that is already in the graph is not repeated.
    """
    for module in gm.modules():
        if isinstance(module, GraphModule):
            env = _env_of(module.graph) if shape_env is None else shape_env
            if insert_promises(module.graph, env, is_inner=module is not gm):
                module.recompile()


def _env_of(graph: Graph) -> ShapeEnv | None:
    for node in graph.nodes:
        for fake in flat(FakeTensor, (node.meta.get("val"),), {}):
            if isinstance(fake.fake_mode.shape_env, ShapeEnv):
                return fake.fake_mode.shape_env
    return None


def insert_promises(graph: Graph, env: ShapeEnv | None, is_inner: bool = False) -> bool:
    """Write the promises on numbers of this graph; in a subgraph, only on those that it creates. Returns whether there
    were any."""
    if env is None or not env.runtime_asserts:
        return False
    writer = AssertWriter(graph, env, is_inner)
    nodes = list(graph.nodes)
    for node, following in pairwise(nodes):
        if writer.is_done:
            break
        writer.read(node)
        if following.op != "placeholder":
            with graph.inserting_before(following):
                writer.write(node)
    return writer.has_written


class AssertWriter:
    """Walks through a graph, and writes each promise as soon as all of its symbols are available."""

    def __init__(self, graph: Graph, env: ShapeEnv, is_inner: bool) -> None:
        self._env = env
        self._is_inner = is_inner
        self._born: set[Any] = set()
        self._tracer = TracerWithoutOrigins(graph)
        self._tracer.shape_env = env
        self._symbols = self._tracer.symbols
        self._symbols.simplifies = False  # the promises themselves would simplify to true
        written = {node.meta.get("promise") for node in graph.find_nodes(op="call_function", target=ASSERT)}
        promises = [p for p in env.runtime_asserts if p.text not in written and not p.is_checked_by_operator]
        self._promises = [(promise, self._symbols_of(promise)) for promise in promises]
        self._waiting: dict[Any, list[int]] = {}
        """For each symbol that is not available yet: the numbers of the promises that wait for it."""
        self._known_count = 0
        self._ready = list(range(len(promises)))
        """The numbers of the promises that may be ready to be written."""
        self._written_count = 0

    @property
    def has_written(self) -> bool:
        return self._written_count > 0

    @property
    def is_done(self) -> bool:
        return self._written_count == len(self._promises)

    def read(self, node: Node) -> None:
        """Register the symbols that can be read from this node."""
        value = node.meta.get("val")
        self._born.update(getattr(node.meta.get("unbacked_bindings"), "by_symbol", ()))
        if isinstance(value, SYMBOLIC):
            self._symbols.bind(value, node)
        elif type(value) is FakeTensor and (value._spec.is_symbolic or node.op == "placeholder"):
            self._symbols.bind_tensor(value._spec, node)

    def _symbols_of(self, promise: Guard) -> frozenset[Any]:
        definitions = self._env.definitions
        return frozenset(s for symbol in promise.condition.symbols for s in origins(symbol, definitions))

    def write(self, node: Node) -> None:
        """Write the promises whose symbols are all available after this node."""
        known = self._symbols.readable()
        found = self._symbols.readable_from(self._known_count)
        self._known_count += len(found)
        numbers = [*self._ready, *(number for symbol in found for number in self._waiting.pop(symbol, ()))]
        self._ready = []
        for number in sorted(numbers):
            promise, symbols = self._promises[number]
            missing = next((symbol for symbol in symbols if symbol not in known), None)
            if missing is not None:
                self._waiting.setdefault(missing, []).append(number)
            elif self._is_inner and self._born.isdisjoint(symbols):
                self._ready.append(number)  # it depends only on numbers from outside
            else:
                self._write(promise, node)

    def _write(self, promise: Guard, node: Node) -> None:
        self._tracer.stack_trace = str(node.meta.get("stack_trace", ""))
        condition = self._symbols.node_of(self._env.node(promise.condition, bool))
        where = f", at {promise.line}" if promise.line else ""
        message = f"expected {promise.text}, which this graph assumes{where}"
        assertion = self._tracer.append_call(ASSERT, (condition, message), {}, "_assert_scalar")
        assertion.meta.update(val=None, promise=promise.text)
        self._written_count += 1


def promise_size(tracer: PythonKeyTracer, tensor: torch.Tensor, text: str) -> None:
    """In a real run data-dependent sizes are plain numbers: record an assertion on them before they are used."""
    size = tensor.shape[0]
    read = tracer.append_call(torch.ops.aten.sym_size.int, (tracer.node_of_tensor(tensor), 0), {}, "sym_size")
    is_same = tracer.append_call(operator.eq, (read, size), {}, "eq")
    message = f"this graph assumes that {text} ({size}); trace in fake or symbolic mode for a graph that holds for any"
    assertion = tracer.append_call(ASSERT, (is_same, message), {}, "_assert_scalar")
    read.meta["val"], is_same.meta["val"], assertion.meta["val"] = size, True, None


class TracerWithoutOrigins(PythonKeyTracer):
    """A tracer for nodes without an origin in the user's program."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.stack_trace = ""

    def append_call(self, target: Any, args: object, kwargs: object, name: str | None = None) -> Node:
        node = self.append_bare(name or _torch.base_name(target), target, args, kwargs)
        if self.stack_trace:
            node.meta["stack_trace"] = self.stack_trace
        return node


# --- Tensors of wrapper classes that a program makes and returns --------------------------------------------------
# Operators on their inner tensors are recorded; the graph rebuilds the wrapper when it runs. Traceable classes define how
# (`__tensor_flatten__`, `__tensor_unflatten__`); for other classes, the attributes are copied.


@dataclass(frozen=True, eq=False)
class WrapperParts:
    """A wrapper without its inner tensors and sizes."""

    kind: Any
    names: tuple[str, ...]
    context: Any
    """The context of `__tensor_flatten__`; for a class without it, the other attributes."""
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    def __repr__(self) -> str:
        return f"Recipe({self.kind.__name__}: {', '.join(self.names)})"


def rebuild_wrapper(
    recipe: WrapperParts, parts: list[torch.Tensor], size: list[Any], stride: list[Any]
) -> torch.Tensor:
    """Make the wrapper around these tensors."""
    inner = dict(zip(recipe.names, parts, strict=True))
    if hasattr(recipe.kind, "__tensor_unflatten__"):
        put_together: torch.Tensor = recipe.kind.__tensor_unflatten__(
            inner, recipe.context, tuple(size), tuple(stride)
        )
        return put_together
    wrapper: torch.Tensor = _torch.make_wrapper(
        recipe.kind, size, stride, dtype=recipe.dtype, device=recipe.device, layout=recipe.layout
    )
    for name, value in {**recipe.context, **inner}.items():
        setattr(wrapper, name, value)
    return wrapper


def node_of_output(tracer: PythonKeyTracer, value: object) -> Any:
    """A value as an output of a graph."""
    if type(value) is FakeTensor or not isinstance(value, torch.Tensor) or not _is_wrapper(tracer, value):
        return tracer.argument(value)
    return _node_of(tracer, value)


def _is_wrapper(tracer: PythonKeyTracer, tensor: torch.Tensor) -> bool:
    """Whether the value is a wrapper whose inner tensors alone have nodes."""
    kind = type(tensor)
    is_own = _torch.uses_python_dispatch(kind) and not _torch.is_functional_wrapper(kind)
    return is_own and tracer.find_node(tensor) is None and bool(_has_computed_parts(tracer, tensor))


def _has_computed_parts(tracer: PythonKeyTracer, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [part for part in _parts(tensor)[0].values() if _is_computed(tracer, part)]


def _is_computed(tracer: PythonKeyTracer, part: torch.Tensor) -> bool:
    return tracer.find_node(part) is not None or (type(part) is not FakeTensor and _is_wrapper(tracer, part))


def _parts(tensor: torch.Tensor) -> tuple[dict[str, torch.Tensor], Any]:
    """The inner tensors by name, and the rest."""
    if _torch.is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        return {name: getattr(tensor, name) for name in names}, context
    slots = [name for kind in type(tensor).__mro__ for name in getattr(kind, "__slots__", ())]
    state = {name: getattr(tensor, name) for name in slots if hasattr(tensor, name)} | vars(tensor)
    inner = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return inner, {name: value for name, value in state.items() if name not in inner}


def _node_of(tracer: PythonKeyTracer, tensor: torch.Tensor) -> Node:
    inner, context = _parts(tensor)
    recipe = WrapperParts(type(tensor), tuple(inner), context, tensor.dtype, tensor.device, tensor.layout)
    parts = [node_of_output(tracer, part) for part in inner.values()]
    numbers = [[_number(tracer, number) for number in given] for given in (tensor.shape, tensor.stride())]
    made_of = tracer.constants.node_of_object(recipe, "_wrapper")
    node = tracer.append_call(rebuild_wrapper, (made_of, parts, *numbers), {})
    if any(isinstance(size, torch.SymInt) for size in tensor.shape):
        node.meta["val"] = tensor  # a stand-in could not represent its sizes
    else:
        set_val(node, tensor)
    tracer.remember(tensor, node)
    return node


def _number(tracer: PythonKeyTracer, number: object) -> Any:
    """A size or stride as an argument; None for a nested int, which follows from the inner tensors."""
    is_jagged = isinstance(number, torch.SymInt) and number.node.is_nested_int()
    return None if is_jagged else tracer.argument(number)
