"""Repeated blocks: what two layers of a model have recorded alike, the next ones like them record without being run.

A block is a module among siblings in a `ModuleList` or `Sequential`. Siblings are alike if they have the same class, the
same attributes, and tensors of the same specs all the way down. If two runs of such siblings on inputs of the same specs
have recorded the same calls, a third is written into the graph with its own parameters in their place. A block is run
as usual wherever that could make a difference: gradients, hooks, other modes, autocast, writes in place, constants and
data-dependent sizes, changed attributes, used-up random numbers, tensors that somebody kept.
"""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate

from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_new, make_view
from understudy.fake.tensor import FakeTensor
from understudy.shapes.node import SymNode
from understudy.trace.effects import may_write

if TYPE_CHECKING:
    from understudy.trace.tracer import PythonKeyTracer

LEAST = 4
"""Siblings below which it does not pay: the first two are run and compared."""
TRIES = 3
"""Runs that may differ from the one before, until a group is given up."""
CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential)
TABLES = ("_parameters", "_buffers", "_modules")
COMPARED = (
    int,
    float,
    bool,
    str,
    bytes,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
IDENTICAL = (FunctionType, BuiltinFunctionType, ModuleType, type, functools.partial)
Key = tuple[Any, ...]


class Unlike(Exception):
    """A module, an argument or a recording that can't be compared."""


# --- which modules are alike ------------------------------------------------------------------------------------------


def signature_of(module: torch.nn.Module, tensors: list[torch.Tensor]) -> Key:
    """All that a module's forward can read from it. Collects its tensors, in an order that siblings share."""
    parts: list[Any] = [type(module)]
    for name, value in vars(module).items():
        if name in TABLES:
            parts.append(name)
            for inner_name, inner in value.items():
                parts.append((inner_name, _described(inner, tensors)))
        elif not (name in HOOKS and not value):
            parts.append((name, _described(value, tensors)))
    return tuple(parts)


def _hooks() -> frozenset[str]:
    empty = vars(torch.nn.Module())
    return frozenset(
        name for name, value in empty.items() if isinstance(value, (dict, set)) and name not in TABLES
    )


HOOKS = _hooks()


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if type(value) is not FakeTensor or value._known is not None:
            raise Unlike
        position = next((i for i, other in enumerate(tensors) if other is value), len(tensors))
        tensors.append(value)
        return position, value._spec, value.requires_grad
    if isinstance(value, torch.nn.Module):
        return signature_of(value, tensors)
    if type(value) in (tuple, torch.Size):
        return tuple(_described(part, tensors) for part in value)
    if type(value) in COMPARED:
        return type(value), value
    if isinstance(value, IDENTICAL) or not hasattr(type(value), "__setattr__"):
        return id(value)
    if isinstance(value, (list, dict, set)):
        raise Unlike  # nobody would notice that it changed
    return id(value)  # the same object is the same to both


@dataclass
class Group:
    """Modules that are alike, and what was recorded of them for each kind of input."""

    last: dict[Key, Recording] = field(default_factory=dict)
    known: dict[Key, Recording] = field(default_factory=dict)
    misses: int = 0


def groups_in(module: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """Siblings of one class, where there are enough of them."""
    for container in module.modules():
        if isinstance(container, CONTAINERS):
            by_class: dict[type, list[torch.nn.Module]] = {}
            for child in container.children():
                by_class.setdefault(type(child), []).append(child)
            yield from (siblings for siblings in by_class.values() if len(siblings) >= LEAST)


# --- what a block has recorded ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """A stretch of the graph, the values that went in, and what came out."""

    nodes: list[Node]
    inputs: list[Node]
    own: list[Node | None]
    tensors: list[torch.Tensor]
    result: Any
    structure: Any
    prefix: str
    counts: dict[tuple[str, str], int]

    @functools.cached_property
    def outside(self) -> dict[int, torch.Tensor]:
        """By storage: tensors that the block reads and that are neither its inputs nor its own."""
        inside = {*self.nodes, *self.inputs, *(node for node in self.own if node is not None)}
        vals = [
            read.meta.get("val") for node in self.nodes for read in node.all_input_nodes if read not in inside
        ]
        return {_torch.storage_id(val): val for val in vals if type(val) is FakeTensor}

    def canonical(self) -> list[Any]:
        """Equal for recordings that differ in nothing but their inputs and own tensors."""
        numbers: dict[Node, Any] = {node: ("node", i) for i, node in enumerate(self.nodes)}
        numbers.update((node, ("input", i)) for i, node in enumerate(self.inputs))
        own = {node: ("own", i) for i, node in enumerate(self.own) if node is not None}
        numbers.update(own)

        def named(part: Any) -> Any:
            return numbers.get(part, part) if isinstance(part, Node) else (type(part), part)

        calls = [
            (
                own.get(node, node.target),
                map_aggregate(node.args, named),
                map_aggregate(node.kwargs, named),
                _specs(node.meta.get("val")),
            )
            for node in self.nodes
        ]
        return [
            calls,
            [named(leaf) if isinstance(leaf, Node) else leaf for leaf in self.result],
            self.structure,
        ]


def _specs(val: Any) -> Any:
    def leaf(part: Any) -> Any:
        return part._spec if type(part) is FakeTensor else part

    return map_aggregate(val, leaf)


class Blocks:
    """The repeated blocks of one trace."""

    def __init__(self, tracer: PythonKeyTracer, mode: FakeTensorMode, recorder: Any) -> None:
        self._tracer = tracer
        self._mode = mode
        self._recorder = recorder
        self._open = 0

    def watch(self, module: torch.nn.Module) -> None:
        """Listen to calls of blocks. The modules are lent: what is set on them goes when they are given back."""
        for siblings in groups_in(module):
            groups: dict[Key, Group] = {}
            for block in siblings:
                tensors: list[torch.Tensor] = []
                try:
                    group = groups.setdefault(signature_of(block, tensors), Group())
                except (Unlike, TypeError):
                    continue
                vars(block)["forward"] = self._listening(block, group, tensors)

    def _listening(
        self, block: torch.nn.Module, group: Group, tensors: list[torch.Tensor]
    ) -> Callable[..., Any]:
        forward = block.forward
        is_trained = any(tensor.requires_grad for tensor in tensors)

        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._open or group.misses >= TRIES or not self._is_plain(is_trained):
                return forward(*args, **kwargs)
            leaves, structure = _torch.tree_flatten((args, kwargs))
            try:
                with _torch.NoFunctionModes():
                    key = self._key(leaves, structure)
            except Unlike:
                return forward(*args, **kwargs)
            known = group.known.get(key)
            if known is not None:
                with _torch.NoFunctionModes():
                    return self._replayed(known, leaves, tensors)
            return self._recorded(block, group, key, leaves, tensors, lambda: forward(*args, **kwargs))

        return call

    def _is_plain(self, is_trained: bool) -> bool:
        """Whether nothing but the recorder would hear the operators, and autograd has no part in it."""
        if is_trained and torch.is_grad_enabled():
            return False
        return _torch.is_recorded_alone(self._mode, self._recorder)

    def _key(self, leaves: list[Any], structure: Any) -> Key:
        storages: list[int] = []
        parts: list[Any] = [str(structure), torch.is_grad_enabled(), torch.get_default_dtype()]
        for leaf in leaves:
            if type(leaf) is FakeTensor:
                if leaf._known is not None:  # the block may look at its values
                    parts.append(id(leaf))
                needs_grad = leaf.requires_grad and torch.is_grad_enabled()
                if leaf.fake_mode is not self._mode or needs_grad or self._tracer.recorded(leaf) is None:
                    raise Unlike
                storages.append(_torch.storage_id(leaf))
                parts += [leaf._spec, storages.index(storages[-1])]
            elif isinstance(leaf, torch.SymInt) and type(leaf.node) is SymNode:
                parts.append(leaf.node)
            elif type(leaf) in COMPARED:
                parts += [type(leaf), leaf]
            else:
                raise Unlike
        return tuple(parts)

    # --- running and comparing ---------------------------------------------------------------------------------

    def _recorded(
        self,
        block: Any,
        group: Group,
        key: Key,
        leaves: list[Any],
        tensors: list[torch.Tensor],
        run: Callable[[], Any],
    ) -> Any:
        tracer = self._tracer
        graph = tracer.graph
        before = next(iter(reversed(graph.nodes)))
        state = random.getstate(), _attributes(block)
        counts = {_described_function(func): count for func, count in tracer.torch_fn_counts.items()}
        prefix = tracer.node_meta.stack_trace()
        self._open += 1
        made = tracer.made = []
        try:
            result = run()
        finally:
            tracer.made = None
            self._open -= 1
        flat, structure = _torch.tree_flatten(result)
        try:
            is_known = any(type(leaf) is FakeTensor and leaf._known is not None for leaf in flat)
            if is_known or (random.getstate(), _attributes(block)) != state or _kept(made, [*flat, *leaves]):
                raise Unlike
            nodes = _after(before)
            recording = Recording(
                nodes, [self._node(leaf) for leaf in leaves if type(leaf) is FakeTensor],
                [tracer.constants.existing(tensor) for tensor in tensors],
                [*(leaf for leaf in leaves if type(leaf) is FakeTensor), *tensors],
                [self._node(leaf) if isinstance(leaf, torch.Tensor) else _plain(leaf) for leaf in flat],
                structure, prefix, counts,
            )  # fmt: skip
            _check_pure(recording)
        except Unlike:
            group.misses = TRIES
            return result
        last = group.last.get(key)
        if last is not None and last.canonical() == recording.canonical():
            group.known[key] = recording
        else:
            group.misses += last is not None
        group.last[key] = recording
        return result

    def _node(self, tensor: Any) -> Node:
        """Of an input or a result."""
        node = self._tracer.recorded(tensor) or self._tracer.constants.existing(tensor)
        if node is None:
            raise Unlike
        return node

    # --- writing it down again ---------------------------------------------------------------------------------

    def _replayed(self, known: Recording, leaves: list[Any], tensors: list[torch.Tensor]) -> Any:
        tracer, mode = self._tracer, self._mode
        given = [leaf for leaf in leaves if type(leaf) is FakeTensor]
        env: dict[Node, Node] = dict(zip(known.inputs, map(tracer.node_of_tensor, given), strict=True))
        own = {node: tensor for node, tensor in zip(known.own, tensors, strict=True) if node is not None}
        inside = set(known.nodes)
        env.update(
            (node, tracer.constants.node_of(tensor)) for node, tensor in own.items() if node not in inside
        )
        bases = dict(known.outside)
        for old, new in zip(known.tensors, [*given, *tensors], strict=True):
            bases[_torch.storage_id(old)] = new
        marks = _Marks(tracer, known)

        def in_place_of(part: Any) -> Any:
            return env.get(part, part) if type(part) is Node else part

        for node in known.nodes:
            if node.op == "get_attr":
                env[node] = tracer.constants.node_of(own[node])
                continue
            args, kwargs = map_aggregate((node.args, node.kwargs), in_place_of)
            copied = env[node] = tracer.append_bare(_base_name(node.target), node.target, args, kwargs)
            marks.copy(node, copied)
            val = node.meta.get("val")
            if type(val) is FakeTensor:
                copied.meta["val"] = _again(mode, val, bases)
            elif val is not None:
                copied.meta["val"] = map_aggregate(
                    val, lambda part: _again(mode, part, bases) if type(part) is FakeTensor else part
                )
        marks.close()
        return _torch.tree_unflatten(self._results(known, env, given), known.structure)

    def _results(self, known: Recording, env: dict[Node, Node], given: list[Any]) -> list[Any]:
        passed = dict(zip(known.inputs, given, strict=True))
        made: dict[Node, Any] = {}
        for leaf in known.result:
            if isinstance(leaf, Node) and leaf not in made:
                made[leaf] = passed.get(leaf)
                if made[leaf] is None:
                    val = env[leaf].meta["val"]
                    made[leaf] = make_view(self._mode, val, val._spec)
                    made[leaf]._node = env[leaf]
        return [made[leaf] if isinstance(leaf, Node) else leaf for leaf in known.result]


class _Marks:
    """Where the nodes of a repeated block come from: the lines around it are its own, those inside are the same."""

    def __init__(self, tracer: PythonKeyTracer, known: Recording) -> None:
        self._tracer = tracer
        self._known = known
        self._prefix = tracer.node_meta.stack_trace()
        self._counts = {
            _described_function(func): (func, count) for func, count in tracer.torch_fn_counts.items()
        }
        self._calls: dict[Any, Any] = {}
        self._highest: dict[Any, int] = {}
        self._traces: dict[str, str] = {}

    def copy(self, old: Node, new: Node) -> None:
        meta = new.meta
        for name, value in old.meta.items():
            if name == "torch_fn":
                meta[name] = self._calls.get(value) or self._numbered(value)
            elif name == "stack_trace":
                trace = self._traces.get(value)
                if trace is None:
                    trace = self._traces[value] = self._prefix + value[len(self._known.prefix) :]
                meta[name] = trace
            elif name != "val":
                meta[name] = value

    def _numbered(self, call: tuple[str, str]) -> tuple[str, str]:
        name, _, number = call[0].rpartition("_")
        key = (name, call[1])
        func, so_far = self._counts.get(key, (None, 0))
        count = so_far + int(number) - self._known.counts.get(key, 0)
        if func is not None:
            self._highest[func] = max(count, self._highest.get(func, 0))
        self._calls[call] = (f"{name}_{count}", call[1])
        return self._calls[call]

    def close(self) -> None:
        self._tracer.torch_fn_counts.update(self._highest)


def _base_name(target: Any) -> str:
    return str(target.overloadpacket.__name__ if isinstance(target, _torch.OpOverload) else target.__name__)


def _described_function(func: Any) -> tuple[str, str]:
    name = getattr(func, "__name__", str(func))
    return name, f"{type(func).__name__}.{name}"


def _again(mode: FakeTensorMode, val: FakeTensor, bases: dict[int, Any]) -> FakeTensor:
    """A stand-in like this one, on a storage of its own, or of what this one's storage stands for now."""
    storage = _torch.storage_id(val)
    base = bases.get(storage)
    if base is None:
        base = bases[storage] = make_new(mode, val._spec)
        return base
    return make_view(mode, base, val._spec)


def _attributes(block: torch.nn.Module) -> list[list[int]]:
    return [[id(value) for value in vars(part).values()] for part in block.modules()]


def _after(before: Node) -> list[Node]:
    nodes = []
    node = before.next
    while node.op != "root":
        nodes.append(node)
        node = node.next
    return nodes


def _plain(leaf: Any) -> Any:
    if type(leaf) not in COMPARED:
        raise Unlike
    return leaf


def _kept(made: list[weakref.ref[Any]], expected: list[Any]) -> bool:
    """Whether somebody holds on to a tensor that was made inside."""
    known = {id(tensor) for tensor in expected}
    return any(
        tensor is not None and id(tensor) not in known for tensor in (reference() for reference in made)
    )


def _check_pure(recording: Recording) -> None:
    own = set(recording.own)
    for node in recording.nodes:
        target: Any = node.target
        if node.op == "get_attr" and node in own:
            continue
        is_operator = isinstance(target, _torch.OpOverload)
        if node.op != "call_function" or isinstance(target, _torch.HigherOrderOperator):
            raise Unlike
        if (is_operator and may_write(target)) or "unbacked_bindings" in node.meta:
            raise Unlike
