"""From the values of a program to the arguments of nodes: tensors of the root, constants, structures, sizes.

And back: the values that a traced program gets for the result of a node. Tensors and objects are replaced by proxies.
None, numbers, tuples, lists and dicts are passed as they are: programs check `is None` and `isinstance(y, tuple)`.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.graph.random_state import node_of_generator
from understudy.graph.symbol_nodes import SymbolNodes, SymbolSource
from understudy.meta.errors import make_left_over_error
from understudy.meta.modules import safe_attribute_path
from understudy.meta.proxies import (
    ATOMS,
    SYMBOLIC,
    UNKNOWN,
    DeviceOf,
    MetaProxy,
    as_device,
    is_constant,
    make_proxy,
    read_own,
)
from understudy.meta.structures import can_be_unpacked, find_construction, holds, items_of, with_parts
from understudy.shapes.bindings import KeyPath, values_in
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
        self._names: dict[int, str] = {}
        self._constants: dict[int, tuple[Any, str]] = {}
        self._nodes: dict[str, Node] = {}
        self._tuples: dict[int, tuple[tuple[Any, ...], Node]] = {}
        self._safe_paths: dict[str, str] = {}
        self.added: list[str] = []
        for prefix, module in root.named_modules():
            for name, value in (
                *module._parameters.items(),
                *module._buffers.items(),
                *module.__dict__.items(),
            ):
                if isinstance(value, torch.Tensor):
                    self._names.setdefault(id(value), f"{prefix}.{name}" if prefix else name)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor of the root; None for others."""
        return self._names.get(id(tensor))

    # --- one value ---------------------------------------------------------------------------------------------

    def argument(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is tuple and id(value) not in self._tuples:
            return tuple([self.argument(part) for part in value])
        if isinstance(value, MetaProxy):
            if read_own(value, "tracer").is_over:
                raise make_left_over_error(value.node.name)
            return self._tracer.node_in_graph(read_own(value, "node"))
        if value is None or value is ... or isinstance(value, PLAIN):
            if type(value) is DeviceOf:
                return self._tracer.node_in_graph(value._attribute.node)
            return _to_python_number(value)
        if isinstance(value, SYMBOLIC):
            return self._number(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if id(value) in self._tuples:
            return self._tracer.node_in_graph(self._tuples[id(value)][1])
        if isinstance(value, (tuple, list, dict, slice)) and find_construction(value) is None:
            return self._parts(value)
        return self._other(value)

    def _parts(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._key(key): self.argument(part) for key, part in value.items()}
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        parts = [self.argument(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)

    def remember_tuple(self, value: tuple[object, ...], node: Node) -> None:
        """Register the node of a tuple: where the program passes the whole tuple on, the node is the argument."""
        self._tuples[id(value)] = value, node

    def forget_tuples(self) -> None:
        """Called at the end of a trace: drop references to the values."""
        self._tuples.clear()

    def _key(self, key: object) -> Any:
        if isinstance(key, (MetaProxy, *SYMBOLIC)):
            raise TypeError("a value of the trace can't be the key of a dict: its hash is not known")
        return key

    def _number(self, value: Any) -> Any:
        if type(value.node) is not SymNode:
            raise TypeError(f"{value} is a symbolic number of another library")
        with self._tracer.outermost():
            node = self._tracer.symbols.node_of(value.node)
        return self._tracer.node_in_graph(node)

    # --- what is in the root -----------------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> Node:
        name = self._names.get(id(tensor))
        if name is None:
            _refuse_constant(tensor)
            name = self._add_constant(tensor, "_tensor_constant")
        return self.read(name, tensor)

    def read(self, name: str, value: object) -> Node:
        """The node that reads an attribute of the root: one for each name."""
        node = self._nodes.get(name)
        if node is None:
            with self._tracer.outermost():
                node = self._nodes[name] = self._tracer.create_node("get_attr", name, (), {})
            if isinstance(value, torch.Tensor):
                self._tracer.write_meta(node, self._tracer.derivation.stand_in(value))
        return self._tracer.node_in_graph(node)

    def safe_path(self, path: str) -> str:
        """The path with which the graph reads an attribute of the root. An attribute whose name is not an identifier is
        also added to the root under another one."""
        known = self._safe_paths.get(path)
        if known is None:
            known = safe_attribute_path(path, lambda name: hasattr(self._root, name))
            if known is not path:
                prefix, _, name = path.rpartition(".")
                owner = self._root.get_submodule(prefix)
                tables = (owner._parameters, owner._buffers, owner._modules, owner.__dict__)
                value = next(table[name] for table in tables if name in table)
                setattr(self._root, known, value)
                self.added.append(known)
            self._safe_paths[path] = known
        return known

    def move_to_node(self, tensor: torch.Tensor, node: Node) -> None:
        """From now on this node is the tensor's node, because it returns the same tensor: `self.count.add_(1)`."""
        name = self._names.get(id(tensor)) or self._constants[id(tensor)][1]
        self._nodes[name] = node

    def read_constant(self, value: object, prefix: str) -> Node:
        """The node that reads a constant, which is added to the root."""
        return self.read(self._add_constant(value, prefix), value)

    def _add_constant(self, value: object, prefix: str) -> str:
        """Add a constant to the root; returns its name."""
        known = self._constants.get(id(value))
        if known is None:
            name = self._tracer.get_fresh_qualname(prefix)
            setattr(self._root, name, value)
            self.added.append(name)
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
        if isinstance(value, torch.Generator) and (node := node_of_generator(value, self._tracer)) is not None:
            return self._tracer.node_in_graph(node)
        if isinstance(value, (Iterator, Coroutine)):
            raise TypeError(
                f"a {type(value).__name__} leaves the traced program, and what it will give is not known: make a list of it"
            )
        if isinstance(value, type) or not holds(value, _is_traced_value):
            return self.read_constant(value, "_constant")
        made = find_construction(value)
        assert made is not None
        target, args, kwargs = made
        node = self._tracer.create_node("call_function", target, self.argument(args), self.argument(kwargs))
        self._tracer.write_meta(node, self._tracer.derivation.find_meta(value))
        return node


def _to_python_number(value: Any) -> Any:
    """A number of NumPy as a Python number: NumPy's can't be written in the code of a graph."""
    is_numpys = (
        type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item")
    )
    return value.item() if is_numpys else value


def _is_traced_value(value: object) -> bool:
    return isinstance(value, (MetaProxy, torch.Tensor, *SYMBOLIC)) or type(value) is DeviceOf


def _refuse_constant(tensor: torch.Tensor) -> None:
    """Raise for a tensor that can't be a constant: a stand-in from outside, or a wrapper of torch.func."""
    if type(tensor) is FakeTensor:
        raise TypeError(
            f"a stand-in ({tensor.spec}) that is none of the arguments is used in the traced program: "
            "pass it as an argument, with itself as the example"
        )
    if _torch.is_functorch_wrapped(tensor):
        raise TypeError(
            "a tensor inside of a transform of torch.func is used with values of the trace: keep the function that calls "
            "the transform whole with torch.fx.wrap"
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


class CallResults:
    """Makes the values that the program gets for the results of calls."""

    def __init__(self, tracer: MetaTracer) -> None:
        self._tracer = tracer
        self.parts: list[Node] = []
        """Nodes that read parts of structures; unused ones are erased at the end."""

    def present(self, node: Node, meta: object) -> Any:
        """The value of a node with this metadata, with nodes that read its parts."""
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
            node = self._tracer.create_node("call_function", operator.getitem, (node, key), {})
        return node
