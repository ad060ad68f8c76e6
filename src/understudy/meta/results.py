"""What a traced program gets for the value of a node.

A proxy stands in the place of each tensor and each object. None, numbers, tuples, lists and dicts are what they are:
programs ask `is None` and `isinstance(y, tuple)`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from understudy.fake.tensor import FakeTensor
from understudy.meta.proxies import UNKNOWN, as_device, is_constant, make_proxy
from understudy.meta.structures import can_be_unpacked, items_of, with_parts
from understudy.shapes.bindings import KeyPath, values_in
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer


class CallResults:
    """Makes the results of the calls of one trace."""

    def __init__(self, tracer: MetaTracer) -> None:
        self._tracer = tracer
        self.parts: list[Node] = []
        """Nodes that read parts of structures; those that nobody uses are erased at the end."""

    def present(self, node: Node, meta: object) -> Any:
        """The value of a node of which this is known, with the nodes that read its parts."""
        if type(meta) is FakeTensor:
            return make_proxy(self._tracer, node, meta)
        for number, path in self.fresh_numbers(meta):
            self._tracer.symbols.bind_part(number, self._node_at(node, path))
        return self._present(node, meta)

    def _present(self, node: Node, meta: object) -> Any:
        if meta is UNKNOWN or type(meta) is FakeTensor or isinstance(meta, torch.Tensor):
            return make_proxy(self._tracer, node, meta)
        if is_constant(meta):
            return meta
        if isinstance(meta, torch.device):
            return as_device(make_proxy(self._tracer, node, meta), meta)
        if not can_be_unpacked(meta):
            return make_proxy(self._tracer, node, meta)
        parts = {key: self._present_part(node, index, part) for key, index, part in items_of(meta)}
        whole = with_parts(meta, parts)
        if isinstance(whole, tuple):
            self._tracer.arguments.remember_tuple(whole, node)
        return whole

    def _present_part(self, node: Node, index: object, part: object) -> Any:
        if is_constant(part):
            return part
        item = self._tracer.create_node("call_function", operator.getitem, (node, index), {})
        self.parts.append(item)
        self._tracer.write_meta(item, part)
        return self._present(item, part)

    def erase_unused_parts(self) -> None:
        for node in reversed(self.parts):
            if not node.users:
                node.graph.erase_node(node)

    # --- numbers that data decides -----------------------------------------------------------------------------------

    def fresh_numbers(self, meta: object) -> Iterator[tuple[SymNode, KeyPath]]:
        """Numbers that data decides, which need the node that reads them, and the path to each."""
        return ((number, path) for number, path in values_in(meta) if not self._is_readable(number))

    def _is_readable(self, number: SymNode) -> bool:
        """Whether the graph can say what a symbolic number is: only what data decides has to be taken down at once."""
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
            node = self._tracer.create_node("call_function", operator.getitem, (node, key), {})
        return node
