"""From the values of a program to the arguments of nodes: stand-ins, tensors of the root, constants, structures, sizes."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node, Proxy

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.graph.random_state import node_of_generator
from understudy.graph.symbol_nodes import SymbolNodes, SymbolSource
from understudy.meta.devices import DeviceOf
from understudy.meta.errors import MetaTraceError, make_left_over_error
from understudy.meta.modules import safe_attribute_path
from understudy.meta.results import ATOMS, SYMBOLIC
from understudy.meta.structures import find_construction, holds
from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec

if TYPE_CHECKING:
    from understudy.meta.tracer import MetaTracer

PLAIN = (
    int,
    float,
    complex,
    bool,
    str,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)
"""Types of values that are node arguments as literals."""


class NodeArguments:
    """Converts values to arguments of nodes of one graph."""

    def __init__(self, tracer: MetaTracer, root: torch.nn.Module) -> None:
        self._tracer = tracer
        self._root = root
        self._names: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        """By the identity of a tensor of the root, or of its stand-in: the stand-in, the tensor, and its path."""
        self._constants: dict[int, tuple[Any, str]] = {}
        self._nodes: dict[str, Node] = {}
        self._structures: dict[int, tuple[Any, Node]] = {}
        self._safe_paths: dict[str, str] = {}
        self.added: dict[str, Any] = {}
        """Constants, and attributes under other names, which the root gets when the trace ends."""

    def expect(self, path: str, real: torch.Tensor, stand_in: torch.Tensor) -> None:
        """Register a tensor of the root."""
        known = self._names.setdefault(id(real), (stand_in, real, path))
        self._names.setdefault(id(stand_in), known)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The path of a tensor of the root, or of its stand-in; None for others."""
        found = self._names.get(id(tensor))
        return None if found is None else found[2]

    # --- one value ---------------------------------------------------------------------------------------------

    def argument(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is FakeTensor:
            return self.node_of(value)
        if kind is DeviceOf:
            return self._tracer.node_in_graph(value.node)
        if kind is tuple and id(value) not in self._structures:
            return tuple([self.argument(part) for part in value])
        if isinstance(value, Proxy):
            return self._node_of_proxy(value)
        if value is None or value is ... or isinstance(value, PLAIN):
            return _to_python_number(value)
        if isinstance(value, SYMBOLIC):
            return self._number(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._structures:
            return self._tracer.node_in_graph(self._structures[id(value)][1])
        if isinstance(value, (tuple, list, dict, slice)) and find_construction(value) is None:
            return self._parts(value)
        if isinstance(value, Node):
            return self._tracer.node_in_graph(value)
        return self._other(value)

    def node_of(self, fake: FakeTensor) -> Node:
        """The node of a stand-in."""
        node = fake._node
        if node is not None:
            graph = node.graph
            if graph is self._tracer.graph:
                return node
            if self._tracer.is_open(graph):
                return self._tracer.node_in_graph(node)
        return self._tensor(fake)

    def _node_of_proxy(self, proxy: Any) -> Node:
        if proxy.tracer is not self._tracer or self._tracer.is_over:
            raise make_left_over_error(proxy.node.name)
        return self._tracer.node_in_graph(proxy.node)

    def _parts(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._key(key): self.argument(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        parts = [self.argument(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)

    def remember(self, value: object, node: Node) -> None:
        """Register the node of a tuple or an object: where the program passes the whole of it on, this is the argument."""
        self._structures[id(value)] = value, node

    def close(self) -> None:
        """Called at the end of a trace: drop references to the values."""
        self._structures.clear()
        self._names.clear()

    def _key(self, key: object) -> Any:
        if isinstance(key, (Proxy, *SYMBOLIC)):
            raise TypeError("expected a plain value as key of a dict, got a traced value")
        return key

    def _number(self, value: Any) -> Any:
        if type(value.node) is not SymNode:
            raise TypeError(
                f"expected a symbolic number of understudy, got {value}, which was made elsewhere"
            )
        with self._tracer.outermost():
            node = self._tracer.symbols.node_of(value.node)
        return self._tracer.node_in_graph(node)

    # --- objects of the root -----------------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> Node:
        name = self.name_of(tensor)
        if name is None:
            literal = self._tracer.find_literal(tensor)
            if literal is None:
                _refuse_constant(tensor)
            name = self._add_constant(tensor if literal is None else literal, "_tensor_constant")
        return self.read(name, tensor)

    def read(self, name: str, value: object) -> Node:
        """The node that reads an attribute of the root: one for each name."""
        node = self._nodes.get(name)
        if node is None:
            with self._tracer.outermost():
                node = self._nodes[name] = self._tracer.make_read(name, value)
        return self._tracer.node_in_graph(node)

    def safe_path(self, path: str) -> str:
        """The path with which the graph reads an attribute of the root. An attribute whose name is not an identifier is
        also added to the root under another one."""
        known = self._safe_paths.get(path)
        if known is None:
            known = safe_attribute_path(path, self._is_taken)
            if known is not path:
                prefix, _, name = path.rpartition(".")
                owner = self._root.get_submodule(prefix)
                tables = (owner._parameters, owner._buffers, owner._modules, owner.__dict__)
                value = next(table[name] for table in tables if name in table)
                self.added[known] = self._names[id(value)][1] if id(value) in self._names else value
            self._safe_paths[path] = known
        return known

    def _is_taken(self, name: str) -> bool:
        return name in self.added or hasattr(self._root, name)

    def read_constant(self, value: object, prefix: str) -> Node:
        """The node that reads a constant, which is added to the root."""
        return self.read(self._add_constant(value, prefix), value)

    def _add_constant(self, value: object, prefix: str) -> str:
        """Add a constant to the root; returns its name."""
        known = self._constants.get(id(value))
        if known is None:
            name = next(name for n in itertools.count() if not self._is_taken(name := f"{prefix}{n}"))
            self.added[name] = value
            known = self._constants[id(value)] = (value, name)
        return known[1]

    # --- everything else ----------------------------------------------------------------------------------------

    def _other(self, value: object) -> Any:
        if isinstance(value, (range, _torch.OpOverload)):
            return value
        if _to_python_number(value) is not value:
            return _to_python_number(value)
        if isinstance(value, torch.nn.Module):
            return self.read(self._tracer.path_of_module(value), value)
        if (
            isinstance(value, torch.Generator)
            and (node := node_of_generator(value, self._tracer)) is not None
        ):
            return self._tracer.node_in_graph(node)
        if isinstance(value, (Iterator, Coroutine)):
            raise TypeError(
                f"expected a result with known items, got a {type(value).__name__}; convert it to a list"
            )
        if isinstance(value, type) or not holds(value, _is_traced_value):
            return self.read_constant(value, "_constant")
        made = find_construction(value)
        assert made is not None
        target, args, kwargs = made
        node = self._tracer.create_node("call_function", target, self.argument(args), self.argument(kwargs))
        self._tracer.write_meta(node, self._tracer.find_meta(value))
        return node


def _to_python_number(value: Any) -> Any:
    """A number of NumPy as a Python number: NumPy's can't be written in the code of a graph."""
    is_numpys = (
        type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item")
    )
    return value.item() if is_numpys else value


def _is_traced_value(value: object) -> bool:
    return isinstance(value, (Proxy, torch.Tensor, *SYMBOLIC)) or type(value) is DeviceOf


def _refuse_constant(tensor: torch.Tensor) -> None:
    """Raise for a tensor that can't be a constant: a stand-in from outside, or a wrapper of torch.func."""
    if type(tensor) is FakeTensor:
        # Not a TypeError, for which Python tries the other operand of an operator.
        raise MetaTraceError(
            f"the traced program uses a stand-in ({tensor.spec}) that was not made in this trace; pass it as an argument, "
            "with itself as the example"
        )
    if _torch.is_functorch_wrapped(tensor):
        raise TypeError(
            "expected a plain tensor, got one of a transform of torch.func; keep the function that calls the transform "
            "whole with torch.fx.wrap"
        )


# --- Symbolic sizes in a torch-level graph: `x.size(0)`, and arithmetic on them -----------------------------


class SizeNodes(SymbolNodes):
    """Sizes are read by methods of tensors. Arithmetic on them becomes nodes when it is used."""

    def bind_tensor(self, spec: TensorSpec, node: Node) -> None:
        if spec.sparse is not None:
            return
        for method, numbers in (("size", spec.shape), ("stride", spec.stride)):
            for dim, number in enumerate(numbers):
                if type(number) is SymNode:
                    self._sources.setdefault(number, (method, (node, dim)))
        if type(spec.offset) is SymNode:
            self._sources.setdefault(spec.offset, ("storage_offset", (node,)))

    def _read(self, number: SymNode, source: SymbolSource) -> Node:
        method, arguments = source
        node = self._tracer.graph.call_method(method, arguments)
        self._tracer.node_meta.mark(node)
        node.meta["val"] = number.symbolic
        return node

    def bind_part(self, value: Any, node: Node) -> None:
        """Register a node for a symbolic number."""
        self._nodes.setdefault(value, node)
