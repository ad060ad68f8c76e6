"""Graphs and graph modules of torch.fx, appended to without checks, and structures of values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch


def function_behind(scripted: Any) -> Any:
    """The Python function that `torch.jit.script` was given; None of what was traced, whose branches are taken already."""
    kept = vars(scripted)
    return kept.get("_torchdynamo_inline") if "__qualname__" in kept else None


def number_calls_anew(graph: torch.fx.Graph) -> None:
    """Calls as `sin`, `sin_1`, … in their order, without the numbers of calls that are no more."""
    calls = {}
    for node in graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
        if node.op == "call_function" and re.fullmatch(rf"{re.escape(name)}(_\d+)?", node.name):
            calls[node] = name
    names = graph._graph_namespace
    for table in (names._used_names, names._obj_to_name, names._base_count):
        table.clear()
    for node in graph.nodes:
        if node not in calls:
            names.create_name(node.name, node)
    for node, name in calls.items():
        node.name = names.create_name(name, node)


class NodeAppender:
    """Adds nodes to the end of a graph: `graph.create_node` without its checks, at a sixth of the price."""

    __slots__ = ("_attributes", "_buckets", "_counts", "_create_name", "_names", "_used", "add", "graph")

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        if graph._insert == graph._root.prepend:
            graph._insert = graph._root._prepend  # type: ignore[assignment]  # the same without a function in between
        names = graph._graph_namespace
        self._used, self._names, self._counts = names._used_names, names._obj_to_name, names._base_count
        self._create_name = names.create_name
        self._buckets: dict[int, tuple[Any, dict[Any, None]]] = {}
        self._attributes = graph._find_nodes_lookup_table.table["get_attr", None]
        self.add = self._adding()

    def call(self, base: str, target: Any, args: Any, kwargs: Any) -> torch.fx.Node:
        """The arguments are nodes and numbers; the name is `add`, `add_1`, `add_2`, …, as the graph itself would choose."""
        return self.add(base, self.bucket(target), target, args, kwargs)

    def bucket(self, target: Any) -> dict[Any, None]:
        """Where the graph keeps the calls of this function."""
        found = self._buckets.get(id(target))  # the hash of an operator is slow
        if found is None:
            found = target, self.graph._find_nodes_lookup_table.table["call_function", target]
            self._buckets[id(target)] = found
        return found[1]

    def _adding(self) -> Callable[[str, dict[Any, None], Any, Any, Any], torch.fx.Node]:
        graph, counts, used, names, create_name = self.graph, self._counts, self._used, self._names, self._create_name

        def add(base: str, bucket: dict[Any, None], target: Any, args: Any, kwargs: Any) -> torch.fx.Node:
            """`call`, with the bucket at hand."""
            number = counts.get(base)
            if number is None:
                name = create_name(base, None)
            else:
                number += 1
                name = f"{base}_{number}"
                while name in used:
                    number += 1
                    name = f"{base}_{number}"
                counts[base] = number
                used.add(name)
            node = new_node(NODE)
            init_node(node, graph, name, "call_function", target, None)
            set_node_arguments(node, args, kwargs)
            names[node] = name
            graph._insert(node)
            bucket[node] = None
            graph._len += 1
            return node

        return add

    def node(self, op: str, base: str, target: Any, args: Any, kwargs: Any) -> torch.fx.Node:
        """A node of any kind, by the rules of `call`."""
        number = self._counts.get(base)
        if number is None:
            name = self._create_name(base, None)
        else:
            number += 1
            while (name := f"{base}_{number}") in self._used:
                number += 1
            self._counts[base] = number
            self._used.add(name)
        graph = self.graph
        node = new_node(NODE)
        init_node(node, graph, name, op, target, None)
        set_node_arguments(node, args, kwargs)
        self._names[node] = name
        graph._insert(node)
        key = (op, target if op == "call_function" else None)
        graph._find_nodes_lookup_table.table[key][node] = None
        graph._len += 1
        return node

    def read(self, target: str) -> torch.fx.Node:
        """An attribute of the graph module."""
        name = target.replace(".", "_")
        is_simple = name.isascii() and name.isidentifier() and not name[-1].isdigit() and name not in TAKEN_NAMES
        if not is_simple or name in self._used or name in self._counts:
            name = self._create_name(name, None)
        else:  # as it would choose, too
            self._used.add(name)
            self._counts[name] = 0
        graph = self.graph
        node = new_node(NODE)
        init_node(node, graph, name, "get_attr", target, None)
        set_node_arguments(node, (), {})
        self._names[node] = name
        graph._insert(node)
        self._attributes[node] = None
        graph._len += 1
        return node


TAKEN_NAMES, NODE = torch.fx.graph._illegal_names, torch.fx.Node
new_node = NODE.__new__
init_node = torch._C._NodeBase.__init__
set_node_arguments = torch._C._NodeBase._update_args_kwargs
set_node_meta = torch._C._NodeBase.meta.__set__  # past `Node.__setattr__`, which looks whether the node is found otherwise


def last_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """The node that was added last; of an empty graph, the one that is before the first."""
    return graph._root.prev


def children(spec: Any) -> list[Any]:
    """The structures of the parts of a structure."""
    return list(spec.children())


def is_leaf(spec: Any) -> bool:
    return bool(spec.is_leaf())


def is_plain_structure(spec: Any) -> bool:
    """Whether it is made of lists, tuples and dicts only, which a graph can return as they are."""
    return is_leaf(spec) or (spec.type in (list, tuple, dict) and all(map(is_plain_structure, spec.children())))


def structured_code(names: list[str], in_spec: Any, out_spec: Any) -> Any:
    """What lets a graph of flat inputs and outputs be called with structures, and return one."""
    from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo  # why: private

    return _PyTreeCodeGen(_PyTreeInfo(names, in_spec, out_spec))


def codegen_of(graph: torch.fx.Graph) -> Any:
    return graph._codegen


def lazy_graph_module(root: Any, graph: torch.fx.Graph, name: str) -> torch.fx.GraphModule:
    """A graph module whose code is written when it is first asked for."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module  # why: private

    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph, name)


def write_code(module: torch.fx.GraphModule) -> None:
    """Write the code of a graph module now: until then, its `forward` has another signature."""
    from torch.fx._lazy_graph_module import _LazyGraphModule  # why: private

    _LazyGraphModule.force_recompile(module)


CodeOnlyModule = torch.fx.graph_module._CodeOnlyModule  # what stands for a graph module until its graph is read
MODULE_CALL = torch.nn.Module._call_impl.__code__
"""The code that calls the forward of every module."""


def symbolic_function(name: str) -> Callable[..., Any]:
    """`sqrt`, `cos`, … of a number that may be symbolic."""
    return getattr(torch, f"_sym_{name}", None) or getattr(math, name)


def functions_wrapped_for_fx() -> list[tuple[dict[str, Any], str]]:
    """What `torch.fx.wrap` was called with: the global names of modules."""
    return [(space, name) for (_, name), space in torch.fx._symbolic_trace._wrapped_fns_to_patch.items()]


def python_behind(function: Any) -> Callable[..., Any]:
    """The Python function that a function of TorchScript was made of; itself if that is not known."""
    return getattr(function, "_torchdynamo_inline", None) or function
