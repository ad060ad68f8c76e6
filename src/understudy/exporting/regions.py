"""Regions of a graph in which gradients or autocast are switched, each as a graph of its own under a higher-order operator.

Above autograd, a trace has calls that switch something on and off. The dialects of torch.export have in their place

    wrap_with_set_grad_enabled(False, submod_0, x, y)

One walk over the graph finds the regions, innermost first; nothing is compiled on the way.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy.ops.registry import record_of


@dataclass
class Region:
    """What is between two switches."""

    operator: Any
    settings: tuple[Any, ...]
    first: Node
    nodes: list[Node] = field(default_factory=list)


def wrap_regions(module: GraphModule, is_grad_enabled: bool) -> None:
    """Put the regions of a graph module into graph modules inside of it. Gradients are on, or off, where it begins."""
    for name, inner in list(module.named_children()):
        if isinstance(inner, GraphModule):
            wrap_regions(getattr(module, name), is_grad_enabled)
    targets = (_torch.set_grad_enabled, _torch.enter_autocast)
    if not any(node.target in targets for node in module.graph.nodes if node.op == "call_function"):
        return
    _Walk(module, is_grad_enabled).run()


def _writes(node: Node) -> bool:
    return isinstance(node.target, _torch.OpOverload) and record_of(node.target).may_write


class _Walk:
    def __init__(self, module: GraphModule, is_grad_enabled: bool) -> None:
        self._module, self._graph = module, module.graph
        self._open: list[Region] = []
        self._grad = [is_grad_enabled]
        self._count = 0

    def run(self) -> None:
        for node in list(self._graph.nodes):
            if node.op in ("placeholder", "output"):
                continue
            if node.target is _torch.set_grad_enabled:
                self._switch_grad(node)
            elif node.target is _torch.enter_autocast:
                self._open.append(Region(_torch.wrap_autocast(), tuple(node.args), node))
            elif node.target is _torch.exit_autocast:
                self._leave_autocast(node)
            elif self._open:
                self._open[-1].nodes.append(node)
        while self._open:
            self._close(None)

    def _switch_grad(self, node: Node) -> None:
        enabled = bool(node.args[0])
        if self._open and self._open[-1].operator is _torch.wrap_set_grad():
            self._close(node)
            self._grad.pop()
        if enabled is not self._grad[-1]:
            self._open.append(Region(_torch.wrap_set_grad(), (enabled,), node))
            self._grad.append(enabled)
        else:
            self._graph.erase_node(node)

    def _leave_autocast(self, node: Node) -> None:
        entered = node.args[0]
        self._graph.erase_node(node)
        while self._open:
            region = self._open[-1]
            self._close(None)
            if region.first is entered:
                return
            self._grad.pop()

    def _close(self, before: Node | None) -> None:
        """The region ends: its nodes become a graph, and a call of it takes their place."""
        region = self._open.pop()
        nodes = [node for node in region.nodes if node.graph is self._graph and not getattr(node, "_erased", False)]
        made = self._wrap(region, nodes) if nodes else []
        self._graph.erase_node(region.first)
        if self._open:
            self._open[-1].nodes.extend(made)

    def _wrap(self, region: Region, nodes: list[Node]) -> list[Node]:
        inside = set(nodes)
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
        last = nodes[-1]
        if not results:  # a region may be there for what it writes
            results = [node for node in nodes if _writes(node)]
        if not results:
            for node in reversed(nodes):
                self._graph.erase_node(node)
            return []
        graphs = [n for n in inputs if n.op == "get_attr"]  # of modules: a graph reads its own
        inputs = [n for n in inputs if n.op != "get_attr"]
        name = self._choose_name()
        setattr(self._module, name, self._make_module(nodes, inputs, graphs, results))
        with self._graph.inserting_after(last):
            module = self._graph.get_attr(name)
        with self._graph.inserting_after(module):
            call = self._graph.call_function(region.operator, (*region.settings, module, *inputs))
        meta = {key: value for key, value in region.first.meta.items() if key not in ("val", "tensor_meta")}
        module.meta, call.meta = dict(meta), dict(meta)
        call.meta["val"] = tuple(node.meta.get("val") for node in results)
        return [module, call, *self._read_results(call, results, nodes)]

    def _read_results(self, call: Node, results: list[Node], nodes: list[Node]) -> list[Node]:
        items: list[Node] = []
        after = call
        for position, node in enumerate(results):
            with self._graph.inserting_after(after):
                item = after = self._graph.call_function(operator.getitem, (call, position))
            item.meta = node.meta.copy()
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in set(nodes))
            items.append(item)
        for node in reversed(nodes):
            self._graph.erase_node(node)
        return items

    def _make_module(
        self, nodes: list[Node], inputs: list[Node], graphs: list[Node], results: list[Node]
    ) -> GraphModule:
        graph = Graph()
        known: dict[Node, Node] = {}
        for node in inputs:
            known[node] = graph.placeholder(node.name)
            if "val" in node.meta:
                known[node].meta["val"] = node.meta["val"]
        for node in graphs:
            known[node] = graph.node_copy(node)
        for node in nodes:
            known[node] = graph.node_copy(node, lambda n: known[n])
        graph.output(tuple(known[node] for node in results))
        root = torch.nn.Module()
        for node in graph.find_nodes(op="get_attr"):
            setattr(root, str(node.target), getattr(self._module, str(node.target)))
        return _torch.lazy_graph_module(root, graph, "GraphModule")

    def _choose_name(self) -> str:
        while hasattr(self._module, name := f"submod_{self._count}"):
            self._count += 1
        return name
