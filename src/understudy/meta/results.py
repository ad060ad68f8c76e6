"""The values that a traced program gets for the results of nodes: stand-ins with their node, and structures of them."""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from understudy.fake.tensor import FakeTensor
from understudy.meta.devices import DeviceOf, make_device
from understudy.meta.proxies import UNKNOWN, make_proxy
from understudy.meta.structures import parts_of, step_target, with_parts
from understudy.shapes.bindings import KeyPath, values_in
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
FACTS = (int, float, complex, str, torch.dtype, torch.layout, torch.memory_format, torch.qscheme, *SYMBOLIC)
ATOMS = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments that contain no traced values, and are literals in nodes."""
CONSTANTS = (*FACTS, type(None), bytes, range, enum.Enum, type(...), type, FunctionType, BuiltinFunctionType)


def is_fact(value: object) -> bool:
    """Whether this is a plain fact about a tensor: a number, a dtype, sizes. In a graph it is a constant, or computed
    from sizes."""
    if isinstance(value, (tuple, list)):
        return all(is_fact(part) for part in value)
    return isinstance(value, FACTS)


def is_constant(value: Any) -> bool:
    """Whether no part of a value needs a node: the program gets the value itself."""
    kind = type(value)
    if kind is FakeTensor:
        return False
    if kind in (tuple, list, torch.Size, set, frozenset):
        return all(map(is_constant, value))
    if kind is dict:
        return all(map(is_constant, value.values()))
    return isinstance(value, CONSTANTS) and kind is not DeviceOf


class CallResults:
    """Makes the values that the program gets for the results of calls."""

    def __init__(self, tracer: MetaTracer) -> None:
        self._tracer = tracer
        self.parts: list[Node] = []
        """Nodes that read parts of structures, and attributes; unused ones are erased at the end."""
        self.tensors: list[weakref.ref[Any]] = []
        """All stand-ins that the program was given: those alive after the trace are held by something else."""

    def assign_node(self, fake: FakeTensor, node: Node) -> FakeTensor:
        """From now on this node is the node of this stand-in."""
        before = fake._node
        if before is None or before.graph is node.graph or not self._tracer.is_open(before.graph):
            fake._node = node
            self.tensors.append(weakref.ref(fake))
        return fake

    def present(self, node: Node, meta: Any) -> Any:
        """The value of a node with this metadata, with nodes that read its parts."""
        if type(meta) is FakeTensor:
            return self.assign_node(meta, node)
        for number, path in self.fresh_numbers(meta):
            self._tracer.symbols.bind_part(number, self._node_at(node, path))
        return self._present(node, meta)

    def _present(self, node: Node, meta: Any) -> Any:
        if type(meta) is FakeTensor:
            return self.assign_node(meta, node)
        if meta is UNKNOWN:
            return self._tracer.proxy(node)
        if isinstance(meta, torch.Tensor):
            return make_proxy(self._tracer, node, meta)
        if is_constant(meta):
            return meta
        if isinstance(meta, torch.device):
            return make_device(node, meta)
        steps = parts_of(meta)
        parts = {
            key: self._present_part(node, step_target(meta, how, key, n), part)
            for n, (how, key, part) in enumerate(steps)
        }
        is_changed = any(parts[key] is not part for _, key, part in steps)
        whole = with_parts(meta, parts) if is_changed else meta
        if not isinstance(whole, (list, dict)):
            self._tracer.arguments.remember(whole, node)
        return whole

    def _present_part(self, node: Node, read: tuple[Any, object], part: object) -> Any:
        if is_constant(part):
            return part
        item = self._tracer.append_call(read[0], (node, read[1]), {})
        self.parts.append(item)
        self._tracer.write_meta(item, part)
        return self._present(item, part)

    def erase_unused_parts(self) -> None:
        for node in reversed(self.parts):
            if not node.users:
                node.graph.erase_node(node)

    # --- unbacked symbols -----------------------------------------------------------------------------------

    def fresh_numbers(self, meta: object) -> Iterator[tuple[SymNode, KeyPath]]:
        """The unbacked symbols that need a node, with their paths."""
        return ((number, path) for number, path in values_in(meta) if not self._is_readable(number))

    def _is_readable(self, number: SymNode) -> bool:
        """Whether the graph can compute a symbolic number: only unbacked symbols have to be read at once."""
        symbols = self._tracer.symbols
        if number.is_plain or symbols.has(number.symbolic):
            return True
        env = self._tracer.shape_env
        return all(
            not env.is_unbacked(symbol) or symbols.has(env.node(symbol, int).symbolic)
            for symbol in number.value.symbols
        )

    def _node_at(self, node: Node, path: KeyPath) -> Node:
        for _, key in path.steps:
            node = self._tracer.append_call(operator.getitem, (node, key), {})
        return node
