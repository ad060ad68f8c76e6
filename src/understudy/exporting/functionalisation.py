"""Functionalisation of a captured graph: writes become new values, and written inputs become outputs.

    view_inverse       operator → the new value of a tensor, from the new value of a view of it
    functionalise      removes the copies of a graph

A graph that was recorded with `FunctionalTable` has only one kind of write, `aten.copy_(target, source)`, and views.
Aliasing is known from the storages of the stand-ins. A memory has a *base*, the node that made it, and *views*, each a
call on the base or on another view. A copy into a view becomes

    v = source, as the view looks                          the new value of the view
    b = slice_scatter(base, v, …)                          the new value of its base, one view at a time

and later reads of the memory use the new values: of the base, `b`; of a view, the same view of `b`. Written bases from
outside (inputs, parameters, buffers) become outputs of the program.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import Context
from understudy.exporting.functional_forms import COPY, NotFunctionalError, find_functional
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_origins import line_of_node
from understudy.ops.registry import Slot, declare, record_of
from understudy.shapes.sizes import is_provably_equal
from understudy.spec.call import flat

aten = torch.ops.aten


# --- the inverse of a view ------------------------------------------------------------------------------------------


class Scattering(NamedTuple):
    """`view` is a view of `parent`, made by `call`, with the new `value`. `before` is the parent's previous value."""

    graph: Graph
    call: Node
    view: Node
    parent: Node
    before: Node
    value: Node
    position: int | None
    """The position of the view among the results of the call."""
    write: Node

    def argument(self, position: int, name: str, default: object = None) -> Any:
        """An argument of the call that made the view."""
        given = self.call.args
        return given[position] if position < len(given) else self.call.kwargs.get(name, default)

    @property
    def parent_shape(self) -> tuple[Any, ...]:
        shape: tuple[Any, ...] = self.parent.meta["val"]._spec.shape
        return shape

    @property
    def view_shape(self) -> tuple[Any, ...]:
        shape: tuple[Any, ...] = self.view.meta["val"]._spec.shape
        return shape

    def add(self, op: Any, *args: Any) -> Node:
        """Add a node for the parent's new value."""
        return add_call(self.graph, op, args, self.write, self.parent.meta["val"])


Inverse = Callable[[Scattering], Node | None]
view_inverse: Slot[Inverse] = declare("view_inverse", Slot())
"""The value of a tensor, from that of a view of it."""


def add_call(graph: Graph, op: Any, args: Any, origin: Node | None, val: object, kwargs: Any = None) -> Node:
    """Add a call for `origin`, the write or read that needs it: they are of one line, and one call of a module."""
    node = graph.call_function(op, args, kwargs or {})
    about = {} if origin is None else origin.meta
    node.meta = {
        name: about[name] for name in about if name not in ("val", "tensor_meta", "unbacked_bindings")
    }
    node.meta["val"] = val
    return node


def sizes_of(s: Scattering) -> list[Any]:
    """The sizes of the parent as arguments: numbers, and `sym_size` nodes for symbolic ones."""
    val = s.parent.meta["val"]
    return [
        size
        if isinstance(size, int)
        else add_call(s.graph, aten.sym_size.int, (s.parent, dim), s.write, val.shape[dim])
        for dim, size in enumerate(val._spec.shape)
    ]


@view_inverse("detach", "alias", "lift_fresh", "view_as", "contiguous")
def same(s: Scattering) -> Node:
    return s.value


@view_inverse("slice.Tensor")
def slice_(s: Scattering) -> Node:
    dim, start, end = s.argument(1, "dim", 0), s.argument(2, "start"), s.argument(3, "end")
    return s.add(aten.slice_scatter.default, s.before, s.value, dim, start, end, s.argument(4, "step", 1))


@view_inverse("select.int")
def select(s: Scattering) -> Node:
    return s.add(aten.select_scatter.default, s.before, s.value, s.argument(1, "dim"), s.argument(2, "index"))


@view_inverse("diagonal")
def diagonal(s: Scattering) -> Node:
    where = s.argument(1, "offset", 0), s.argument(2, "dim1", 0), s.argument(3, "dim2", 1)
    return s.add(aten.diagonal_scatter.default, s.before, s.value, *where)


@view_inverse("as_strided")
def as_strided(s: Scattering) -> Node:
    where = s.argument(1, "size"), s.argument(2, "stride"), s.argument(3, "storage_offset")
    return s.add(aten.as_strided_scatter.default, s.before, s.value, *where)


@view_inverse("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten.using_ints", "unflatten.int")
def view(s: Scattering) -> Node:
    kwargs = {"memory_format": torch.contiguous_format}
    packed = add_call(s.graph, aten.clone.default, (s.value,), s.write, s.view.meta["val"], kwargs)
    return s.add(aten.view.default, packed, sizes_of(s))


@view_inverse("view.dtype")
def view_dtype(s: Scattering) -> Node:
    return s.add(aten.view.dtype, s.value, s.parent.meta["val"].dtype)


@view_inverse("unsqueeze")
def unsqueeze(s: Scattering) -> Node:
    return s.add(aten.squeeze.dim, s.value, s.argument(1, "dim"))


@view_inverse("squeeze", "squeeze.dim", "squeeze.dims")
def squeeze(s: Scattering) -> Node | None:
    count = len(s.parent_shape)
    asked = s.argument(1, "dim", range(count))
    dims = sorted({dim % count for dim in ([asked] if isinstance(asked, int) else asked)}) if count else []
    value = s.value
    for dim in dims:
        if is_provably_equal(s.parent_shape[dim], 1):
            value = s.add(aten.unsqueeze.default, value, dim)
    return value


@view_inverse("permute")
def permute(s: Scattering) -> Node:
    dims = s.argument(1, "dims")
    order = [dim % len(dims) for dim in dims]
    return s.add(aten.permute.default, s.value, [order.index(dim) for dim in range(len(order))])


@view_inverse("transpose.int")
def transpose(s: Scattering) -> Node:
    return s.add(aten.transpose.int, s.value, s.argument(1, "dim0"), s.argument(2, "dim1"))


@view_inverse("t")
def t(s: Scattering) -> Node:
    return s.add(aten.t.default, s.value)


@view_inverse("expand")
def expand(s: Scattering) -> Node | None:
    is_same = len(s.parent_shape) == len(s.view_shape) and all(
        map(is_provably_equal, s.parent_shape, s.view_shape)
    )
    return s.value if is_same else None


@view_inverse("view_as_real")
def view_as_real(s: Scattering) -> Node:
    return s.add(aten.view_as_complex.default, s.value)


@view_inverse("view_as_complex")
def view_as_complex(s: Scattering) -> Node:
    return s.add(aten.view_as_real.default, s.value)


@view_inverse("unbind.int")
def unbind(s: Scattering) -> Node:
    return s.add(aten.select_scatter.default, s.before, s.value, s.argument(1, "dim", 0), s.position)


@view_inverse("split.Tensor", "split_with_sizes", "chunk")
def split(s: Scattering) -> Node | None:
    dim = s.argument(2, "dim", 0)
    parts: Sequence[Any] = s.call.meta["val"]
    assert s.position is not None
    lengths = [part._spec.shape[dim] for part in parts[: s.position + 1]]
    if not all(isinstance(length, int) for length in lengths):
        return None
    end = sum(lengths)
    return s.add(aten.slice_scatter.default, s.before, s.value, dim, end - lengths[-1], end)


# --- the copies of a graph ------------------------------------------------------------------------------------------


def functionalise(module: GraphModule) -> dict[Node, Node]:
    """Remove all writes of a graph and its subgraphs.

    Returns, for each placeholder of the graph that was written to, the node of its last value.
    """
    for inner in module.children():
        if isinstance(inner, GraphModule):
            written = functionalise(inner)
            if written:
                target, value = next(iter(written.items()))
                raise make_refusal(
                    value, f"a branch or loop body writes to {target}, a tensor from outside",
                    "write to a copy, and return it: x.clone()",
                )  # fmt: skip
            inner.recompile()
    if not any(map(_is_write, module.graph.nodes)):
        return {}
    return _Functionalisation(module.graph).run()


def _is_write(node: Node) -> bool:
    return isinstance(node.target, _torch.OpOverload) and record_of(node.target).is_mutable


def make_refusal(node: Node, why: str, hint: str = "") -> NotFunctionalError:
    return NotFunctionalError(
        why, func=node.target, context=Context(str(node.target), "", line_of_node(node), hint)
    )


@dataclass
class Memory:
    """The nodes that share one memory: the base, its views, and the number of writes."""

    base: Node
    writes: int = 0
    values: dict[Node, tuple[int, Node]] = field(default_factory=dict)
    """For the base and its views: the number of the write since which the node has their value."""
    first_write: defaultdict[Node, int] = field(default_factory=lambda: defaultdict(int))
    """For views that were made after a write: the number of that write."""


class _Functionalisation:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._memories: dict[int, Memory] = {}
        self._memory_of: dict[Node, Memory] = {}
        self._parents: dict[Node, Node] = {}
        self._list_sources: dict[Node, Node] = {}
        """For calls that return several views: their base or parent."""
        self._targets: dict[Node, Node] = {}
        """For each copy: the node whose tensor it writes to, and returns."""
        self._shared: dict[int, list[Node]] = {}
        """Storages with several unrelated bases: they can't be written to."""

    def run(self) -> dict[Node, Node]:
        for node in list(self._graph.nodes):
            # Aliasing is read from the recorded arguments, before these are replaced by their current values.
            if node.op == "call_function" and _is_write(node):
                self._resolve_write(node)
                continue
            if node.op != "output":
                self._register_memory(node)
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

    def _register_memory(self, node: Node) -> None:
        """Register the memory of a node's tensor, and its parent."""
        val = node.meta.get("val")
        source = node.args[0] if node.op == "call_function" and node.args else None
        if isinstance(val, (list, tuple)) and isinstance(source, Node):
            self._list_sources[node] = self._original(source)
        if type(val) is not FakeTensor:
            return
        storage = _torch.storage_id(val)
        memory = self._memories.get(storage)
        parent = None if memory is None else self._parent_of(source, memory)
        if memory is not None and node.op == "placeholder" and not node.users:
            return  # of tied parameters and buffers, one is used
        if memory is None or parent is None:
            if memory is not None and memory.base.users:
                self._shared.setdefault(storage, [memory.base]).append(node)
            self._memories[storage] = self._memory_of[node] = Memory(node)
        else:
            self._memory_of[node] = memory
            self._parents[node] = parent
            memory.first_write[node] = memory.writes

    def _parent_of(self, source: object, memory: Memory) -> Node | None:
        if not isinstance(source, Node):
            return None
        source = self._list_sources.get(source) or self._original(source)
        return source if self._memory_of.get(source) is memory else None

    def _original(self, node: Node) -> Node:
        """The node that made the tensor to which a copy writes."""
        while node in self._targets:
            node = self._targets[node]
        return node

    # --- values ----------------------------------------------------------------------------------------------

    def _read_new_values(self, node: Node) -> None:
        """Replace the arguments of a node by their current values."""
        if any(self._is_stale(argument) for argument in node.all_input_nodes):
            node.args = torch.fx.node.map_arg(node.args, lambda n: self._value_of(n, node))
            node.kwargs = torch.fx.node.map_arg(node.kwargs, lambda n: self._value_of(n, node))

    def _is_stale(self, node: Node) -> bool:
        memory = self._memory_of.get(node)
        return node in self._targets or (memory is not None and memory.writes > 0)

    def _value_of(self, node: Node, before: Node | None) -> Node:
        """The node with the current value of a base or view."""
        node = self._original(node)
        memory = self._memory_of.get(node)
        if memory is None:
            return node
        since, value = memory.values.get(node, (memory.first_write[node], node))
        if since == memory.writes or node is memory.base:  # each write sets the base
            return value
        value = self._view_again(node, self._value_of(self._parents[node], before), before)
        memory.values[node] = (memory.writes, value)
        return value

    def _view_again(self, view: Node, parent: Node, before: Node | None) -> Node:
        with self._inserting(before):
            source = parent
            if view.target is operator.getitem:
                several: Any = view.args[0]
                source = self._repeat(several, parent, before)
            return self._repeat(view, source, before)

    def _repeat(self, call: Node, source: Node, reader: Node | None) -> Node:
        """The same call on another tensor."""
        return add_call(
            self._graph, call.target, (source, *call.args[1:]), reader, call.meta["val"], dict(call.kwargs)
        )

    def _inserting(self, before: Node | None) -> Any:
        if before is None:
            (before,) = self._graph.find_nodes(op="output")
        return self._graph.inserting_before(before)

    # --- writes ----------------------------------------------------------------------------------------------

    def _resolve_write(self, node: Node) -> None:
        if node.target is not COPY:
            self._resolve_other(node)
            return
        written: Any = node.args[0]
        target = self._original(written)
        memory = self._memory_of.get(target)
        if memory is None:
            raise make_refusal(node, f"{node.target} writes to a tensor without a node in the graph")
        with self._graph.inserting_before(node):
            value = self._convert_source(target, node)
            self._set_value(memory, target, value, node)
        memory.writes += 1
        self._targets[node] = target

    def _set_value(self, memory: Memory, view: Node, value: Node, write: Node) -> None:
        """Set the value of a view after the next write, and the values of its parents."""
        sharing = self._shared.get(_torch.storage_id(view.meta["val"]), ())
        if sharing:
            names = " and ".join(map(str, sharing))
            raise make_refusal(
                write, f"a write to the shared memory of {names}, where the base tensor is unknown",
                "copy one of them first: x.clone()",
            )  # fmt: skip
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
        invert = record_of(call.target).view_inverse
        scattering = Scattering(self._graph, call, view, parent, before, value, position, write)
        made = None if invert is None else invert(scattering)
        if made is None:
            raise make_refusal(
                write,
                f"a write through {call.target}, which has no inverse operator",
                "write to the tensor itself, or build the new one with torch.cat or torch.where",
            )
        return made

    def _convert_source(self, target: Node, write: Node) -> Node:
        """The copied value, with the shape, dtype and device of the target, in memory of its own.

        A copy must not share memory with its source in the graph either: inputs are written to while the program runs, or
        when it ends, and the copy must keep the earlier values.
        """
        source = write.args[1]
        if not isinstance(source, Node):
            raise make_refusal(write, f"a copy of {source!r}, which is not a tensor of the program")
        made = self._value_of(source, write)
        into, given = target.meta["val"]._spec, source.meta["val"]._spec
        is_same_shape = len(given.shape) == len(into.shape) and all(
            map(is_provably_equal, given.shape, into.shape)
        )
        if is_same_shape and (given.device != into.device or given.dtype is not into.dtype):
            device = {"device": into.device} if given.device != into.device else {}
            kwargs = {"dtype": into.dtype, **device}
            return add_call(self._graph, aten._to_copy.default, (made,), write, _new_value(target), kwargs)
        if is_same_shape and made is source and source not in self._parents and _is_made_for(write, source):
            return made
        args = (self._value_of(target, write), made)
        return add_call(self._graph, aten.copy.default, args, write, _new_value(target))

    def _resolve_other(self, node: Node) -> None:
        """In-place changes of metadata become views; other writes have no functional form."""
        op: Any = node.target
        record = record_of(op)
        if record.changes_metadata and record.packet.endswith("_"):
            overload = find_functional(op)
            if overload is not None:
                changed: Any = node.args[0]
                if self._original(changed).op == "placeholder":
                    why = f"{op} changes the shape or strides of {changed}, which a program without writes can't express"
                    raise make_refusal(node, why, f"use the result of torch.{record.packet[:-1]}")
                node.target = overload
                self._register_memory(node)
                self._read_new_values(node)
                return
        if op.namespace in ("aten", "prims"):
            raise make_refusal(node, f"{op} writes to a tensor and has no functional variant")
        self._resolve_custom(node, op)

    def _resolve_custom(self, node: Node, op: OpOverload) -> None:
        """Use `auto_functionalized`, which calls a custom operator on copies of its written arguments, and returns
        these last."""
        written = [_by_name(node, op)[name] for _, name in _torch.written_arguments(op)]
        self._check_apart(node, written)
        self._read_new_values(node)
        now = _by_name(node, op)
        results = len(op._schema.returns)
        values = node.meta["val"] if results > 1 else (node.meta.get("val"),)
        with self._graph.inserting_before(node):
            call = self._graph.call_function(torch.ops.higher_order.auto_functionalized, (op,), now)
        call.meta = {**node.meta, "val": (*values, *(_map_targets(_new_value, target) for target in written))}
        with self._graph.inserting_before(node.next):
            for position, target in enumerate(written, len(values)):
                self._set_targets(target, self._item(call, position), node)
        if results == 1:
            node.target, node.args, node.kwargs = operator.getitem, (call, 0), {}
            self._register_memory(node)
        else:
            node.replace_all_uses_with(call)
            self._graph.erase_node(node)

    def _check_apart(self, node: Node, written: list[Any]) -> None:
        """Raise if another argument shares memory with a written one: their copies would not."""
        memories = [self._memory_of.get(self._original(argument)) for argument in node.all_input_nodes]
        shared = {id(memory) for memory in memories if memory is not None and memories.count(memory) > 1}
        for target in flat(Node, written, {}):
            if id(self._memory_of.get(self._original(target))) in shared:
                raise make_refusal(
                    node, f"{node.target} writes to {target}, which shares memory with another argument",
                    "give it a copy: x.clone()",
                )  # fmt: skip

    def _item(self, several: Node, position: int) -> Node:
        item = self._graph.call_function(operator.getitem, (several, position))
        item.meta = {**several.meta, "val": several.meta["val"][position]}
        return item

    def _set_targets(self, target: Any, value: Node, write: Node) -> None:
        if isinstance(target, (list, tuple)):
            for position, one in enumerate(target):
                self._set_targets(one, self._item(value, position), write)
        elif isinstance(target, Node):
            original = self._original(target)
            memory = self._memory_of.get(original)
            if memory is None:
                raise make_refusal(write, f"{write.target} writes to a tensor without a node in the graph")
            self._set_value(memory, original, value, write)
            memory.writes += 1


def _is_made_for(write: Node, source: Node) -> bool:
    """Whether a value is made only to be written: by the calls just before."""
    if len(source.users) > 1 or source.op != "call_function":
        return False
    before = write.prev
    while before is not source and (before.target is operator.getitem or before.target is COPY):
        before = before.prev
    return before is source


def _by_name(node: Node, op: OpOverload) -> dict[str, Any]:
    arguments = op._schema.arguments
    given = {
        argument.name: value for argument, value in zip(arguments, node.args, strict=False)
    } | node.kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in arguments}


def _map_targets(function: Callable[[Node], object], target: Any) -> Any:
    if isinstance(target, (list, tuple)):
        return [_map_targets(function, one) for one in target]
    return function(target) if isinstance(target, Node) else None


def _new_value(target: Node) -> FakeTensor:
    """A new stand-in like a written tensor."""
    val = target.meta["val"]
    return make_new(val.fake_mode, val._spec)
