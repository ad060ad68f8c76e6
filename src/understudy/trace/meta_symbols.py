"""Symbolic sizes in a torch-level graph: `x.size(0)`, and arithmetic on such."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec
from understudy.trace.sym_nodes import Source, SymbolNodes


class SizeNodes(SymbolNodes):
    """Sizes are read by the tensors' own methods. What is computed from them is made when it is used."""

    def bind_tensor(self, spec: TensorSpec, node: Node) -> None:
        if spec.sparse is not None:
            return
        for method, numbers in (("size", spec.shape), ("stride", spec.stride)):
            for dim, number in enumerate(numbers):
                if type(number) is SymNode:
                    self._sources.setdefault(number, (method, (node, dim)))
        if type(spec.offset) is SymNode:
            self._sources.setdefault(spec.offset, ("storage_offset", (node,)))

    def _read(self, number: SymNode, source: Source) -> Node:
        method, arguments = source
        node = self._tracer.graph.call_method(method, arguments)
        self._tracer.node_meta.mark(node)
        node.meta["val"] = number.symbolic
        return node

    def bind_part(self, value: Any, node: Node) -> None:
        """This node gives this symbolic number."""
        self._nodes.setdefault(value, node)
