"""Functionalisation of a captured graph: writes become values, and what is written to from outside becomes an output.

A graph that was recorded through `FunctionalTable` has one kind of write left, `aten.copy_(target, source)`, and views. Which
nodes share memory is known: their stand-ins do. A memory has a *base*, the node that made it, and *views*, each a call on
the base or on another view. A copy into a view becomes

    v = source, as the view looks                          the new value of the view
    b = slice_scatter(base, v, …)                          the new value of what it is a view of, up to the base

and whoever reads the memory afterwards reads the new values: of the base, `b`; of a view, the call that made it, on `b`.
Bases that came from outside (inputs, parameters, buffers) and were written to are what the program has to give back.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from understudy import _torch
from understudy.errors import Context
from understudy.exporting.functional_forms import COPY, NotFunctionalError
from understudy.exporting.view_inverses import Scattering, sizes_of, view_inverse
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_origins import line_behind
from understudy.ops.registry import record_of
from understudy.shapes.sizes import surely_equal

aten = torch.ops.aten


def functionalise(graph: Graph) -> dict[Node, Node]:
    """Resolve all writes of a graph. Gives, for each placeholder that was written to, the node of its last value."""
    if not any(map(_is_write, graph.nodes)):
        return {}
    return _Functionalisation(graph).run()


def _is_write(node: Node) -> bool:
    return isinstance(node.target, _torch.OpOverload) and record_of(node.target).is_mutable


def refuse(node: Node, why: str, hint: str = "") -> NotFunctionalError:
    return NotFunctionalError(why, func=node.target, context=Context(str(node.target), "", line_behind(node), hint))


@dataclass
class Memory:
    """What shares one memory: the base, and by how many writes it has changed."""

    base: Node
    writes: int = 0
    values: dict[Node, tuple[int, Node]] = field(default_factory=dict)
    """For base and views: the node that has their value, and since which write."""
    born: defaultdict[Node, int] = field(default_factory=lambda: defaultdict(int))
    """For views that were made after a write: after which."""


class _Functionalisation:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._memories: dict[int, Memory] = {}
        self._memory_of: dict[Node, Memory] = {}
        self._parents: dict[Node, Node] = {}
        self._list_sources: dict[Node, Node] = {}
        """For calls that give several views: what they are views of."""
        self._targets: dict[Node, Node] = {}
        """For each copy: the node whose tensor it writes to, and returns."""

    def run(self) -> dict[Node, Node]:
        for node in list(self._graph.nodes):
            # The arguments that were recorded say what is a view of what; then they are replaced by their values.
            if node.op == "call_function" and _is_write(node):
                self._resolve_write(node)
                continue
            if node.op != "output":
                self._note(node)
            self._read_new_values(node)
        changed = {
            memory.base: self._value_of(memory.base, None)
            for memory in self._memories.values()
            if memory.writes and memory.base.op in ("placeholder", "get_attr")
        }
        for copy in reversed(list(self._targets)):
            self._graph.erase_node(copy)
        return {base: value for base, value in changed.items() if value is not base}

    # --- memory ----------------------------------------------------------------------------------------------

    def _note(self, node: Node) -> None:
        """Which memory a node's tensor has, and what it is a view of."""
        val = node.meta.get("val")
        source = node.args[0] if node.op == "call_function" and node.args else None
        if isinstance(val, (list, tuple)) and isinstance(source, Node):
            self._list_sources[node] = self._original(source)
        if type(val) is not FakeTensor:
            return
        storage = _torch.storage_id(val)
        memory = self._memories.get(storage)
        parent = None if memory is None else self._parent_of(source, memory)
        if memory is None or parent is None:
            self._memories[storage] = self._memory_of[node] = Memory(node)
        else:
            self._memory_of[node] = memory
            self._parents[node] = parent
            memory.born[node] = memory.writes

    def _parent_of(self, source: Any, memory: Memory) -> Node | None:
        if not isinstance(source, Node):
            return None
        source = self._list_sources.get(source) or self._original(source)
        return source if self._memory_of.get(source) is memory else None

    def _original(self, node: Node) -> Node:
        """The node that made the tensor that a copy has written to and returned."""
        while node in self._targets:
            node = self._targets[node]
        return node

    # --- values ----------------------------------------------------------------------------------------------

    def _read_new_values(self, node: Node) -> None:
        """The arguments of a node are what they are by now."""
        if any(self._is_stale(argument) for argument in node.all_input_nodes):
            node.args = torch.fx.node.map_arg(node.args, lambda n: self._value_of(n, node))
            node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: self._value_of(n, node))

    def _is_stale(self, node: Node) -> bool:
        memory = self._memory_of.get(node)
        return node in self._targets or (memory is not None and memory.writes > 0)

    def _value_of(self, node: Node, before: Node | None) -> Node:
        """What has the value of a base or view after all writes so far."""
        node = self._original(node)
        memory = self._memory_of.get(node)
        if memory is None:
            return node
        since, value = memory.values.get(node, (memory.born[node], node))
        if since == memory.writes or node is memory.base:  # each write gives the base a value
            return value
        value = self._view_again(node, self._value_of(self._parents[node], before), before)
        memory.values[node] = (memory.writes, value)
        return value

    def _view_again(self, view: Node, parent: Node, before: Node | None) -> Node:
        with self._inserting(before):
            source = parent
            if view.target is operator.getitem:
                several: Any = view.args[0]
                source = self._repeat(several, parent)
            return self._repeat(view, source)

    def _repeat(self, call: Node, source: Node) -> Node:
        """The same call on another tensor."""
        made = self._graph.call_function(call.target, (source, *call.args[1:]), dict(call.kwargs))  # type: ignore[arg-type]
        made.meta = call.meta.copy()
        return made

    def _inserting(self, before: Node | None) -> Any:
        if before is None:
            (before,) = self._graph.find_nodes(op="output")
        return self._graph.inserting_before(before)

    # --- writes ----------------------------------------------------------------------------------------------

    def _resolve_write(self, node: Node) -> None:
        if node.target is not COPY:
            self._resolve_other(node)
            return
        target = self._original(node.args[0])  # type: ignore[arg-type]
        memory = self._memory_of.get(target)
        if memory is None:
            raise refuse(node, f"{node.target} writes to a tensor that no node of the graph has made")
        with self._graph.inserting_before(node):
            value = self._as_written(target, node)
            self._set_value(memory, target, value, node)
        memory.writes += 1
        self._targets[node] = target

    def _set_value(self, memory: Memory, view: Node, value: Node, write: Node) -> None:
        """After the next write a view has this value; what it is a view of has another one, too."""
        new = {view: value}
        while view is not memory.base:
            parent = self._parents[view]
            value = new[parent] = self._scatter(view, parent, self._value_of(parent, write), value, write)
            view = parent
        for node, value in new.items():
            memory.values[node] = (memory.writes + 1, value)

    def _scatter(self, view: Node, parent: Node, before: Node, value: Node, write: Node) -> Node:
        call: Any = view
        position: Any = None
        if view.target is operator.getitem:
            call, position = view.args
        invert = view_inverse.of(call.target)
        made = None if invert is None else invert(Scattering(self._graph, call, view, parent, before, value, position))
        if made is None:
            raise refuse(
                write,
                f"a write through {call.target}: no operator gives the whole tensor again",
                "write to the tensor itself, or build the new one with torch.cat or torch.where",
            )
        return made

    def _as_written(self, target: Node, write: Node) -> Node:
        """What is copied, as the target looks: of its shape, dtype and device."""
        source = write.args[1]
        if not isinstance(source, Node):
            raise refuse(write, f"a copy of {source!r}, which is no tensor of the program")
        made = self._value_of(source, write)
        into, given = target.meta["val"]._spec, source.meta["val"]._spec
        if given.dtype is not into.dtype or given.device != into.device:
            kwargs: dict[str, Any] = {"dtype": into.dtype}
            if given.device != into.device:
                kwargs["device"] = into.device
            made = self._call(aten._to_copy.default, (made,), kwargs, target, write, given.shape)
        if len(given.shape) != len(into.shape) or not all(map(surely_equal, given.shape, into.shape)):
            sizes = sizes_of(self._graph, target)
            made = self._call(aten.expand.default, (made, sizes), {}, target, write, into.shape)
        return made

    def _call(self, op: Any, args: Any, kwargs: Any, like: Node, write: Node, shape: Any) -> Node:
        node = self._graph.call_function(op, args, kwargs)
        node.meta = {name: value for name, value in write.meta.items() if name not in ("val", "tensor_meta")}
        val = like.meta["val"]
        node.meta["val"] = make_new(val.fake_mode, val._spec.like(shape))
        return node

    def _resolve_other(self, node: Node) -> None:
        """Changes of metadata in place are views; anything else has no functional form."""
        op: Any = node.target
        record = record_of(op)
        if record.changes_metadata and record.packet.endswith("_"):
            overload = getattr(getattr(aten, record.packet[:-1], None), op._overloadname, None)
            if overload is not None and not record_of(overload).is_mutable:
                node.target = overload
                self._note(node)
                self._read_new_values(node)
                return
        raise refuse(node, f"{op} writes to a tensor, and no such operator gives a new one")
