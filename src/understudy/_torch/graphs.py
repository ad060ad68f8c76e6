"""Graphs and graph modules of torch.fx, appended to without checks, structures of values, exported programs."""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from understudy._torch.identity import on_demand


def python_function_of_script(scripted: object) -> Any:
    """The Python function that `torch.jit.script` compiled; None for traced functions."""
    kept = vars(scripted)
    return kept.get("_torchdynamo_inline") if "__qualname__" in kept else None


_known_to_scripts: list[object] = []


def compile_as(replacement: object, original: object) -> None:
    """Let TorchScript compile calls of this function like calls of the built-in that it replaces. TorchScript
    identifies functions by id, so the function is kept alive."""
    table = torch.jit._builtins._get_builtin_table()
    if id(original) in table:
        table[id(replacement)] = table[id(original)]
        _known_to_scripts.append(replacement)


def renumber_calls(graph: torch.fx.Graph) -> None:
    """Rename calls to `sin`, `sin_1`, … in their order, after nodes were removed."""
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
    """Adds nodes to the end of a graph: `graph.create_node` without its checks, at a sixth of the cost. The verifier of
    the tests lints the finished graphs."""

    __slots__ = ("_attributes", "_counts", "_create_name", "_names", "_used", "call", "graph")

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        if graph._insert == graph._root.prepend:
            graph._insert = graph._root._prepend  # type: ignore[assignment]  # the same without a function in between
        names = graph._graph_namespace
        self._used, self._names, self._counts = names._used_names, names._obj_to_name, names._base_count
        self._create_name = names.create_name
        self._attributes = graph._find_nodes_lookup_table.table["get_attr", None]
        self.call = self._make_call()

    def _make_call(self) -> Callable[[str, Any, Any, Any], torch.fx.Node]:
        graph, counts, used, names, create_name = (
            self.graph, self._counts, self._used, self._names, self._create_name,
        )  # fmt: skip
        calls = graph._find_nodes_lookup_table.table
        buckets: dict[int, tuple[Any, dict[Any, None]]] = {}
        """By the identity of a function, because hashing an operator is slow: the function, and the table of its calls."""

        def call(base: str, target: Any, args: Any, kwargs: Any) -> torch.fx.Node:
            """Add a call. The arguments are nodes and literals; the name is `add`, `add_1`, `add_2`, …, as the graph itself
            would choose."""
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
            set_node_arguments(node, args, kwargs or NO_KEYWORDS)
            names[node] = name
            graph._insert(node)
            found = buckets.get(id(target))
            if found is None:
                found = buckets[id(target)] = target, calls["call_function", target]
            found[1][node] = None
            graph._len += 1
            return node

        return call

    def node(self, op: str, base: str, target: Any, args: Any, kwargs: Any) -> torch.fx.Node:
        """Add a node of any kind, like `call`."""
        number = self._counts.get(base)
        if number is None:
            name = self._create_name(base, None)
        else:
            number += 1
            while (name := f"{base}_{number}") in self._used:
                number += 1
            self._counts[base] = number
            self._used.add(name)
        bucket = self.graph._find_nodes_lookup_table.table[op, target if op == "call_function" else None]
        return self._append(name, op, target, args, kwargs, bucket)

    def _append(
        self, name: str, op: str, target: Any, args: Any, kwargs: Any, bucket: dict[Any, None]
    ) -> torch.fx.Node:
        graph = self.graph
        node = new_node(NODE)
        init_node(node, graph, name, op, target, None)
        set_node_arguments(node, args, kwargs or NO_KEYWORDS)
        self._names[node] = name
        graph._insert(node)
        bucket[node] = None
        graph._len += 1
        return node

    def read(self, target: str) -> torch.fx.Node:
        """Add a `get_attr` node."""
        name, is_simple = name_of_attribute(target)
        if not is_simple or name in self._used or name in self._counts:
            name = self._create_name(name, None)
        else:  # as the graph itself would choose
            self._used.add(name)
            self._counts[name] = 0
        return self._append(name, "get_attr", target, (), {}, self._attributes)


@functools.lru_cache(maxsize=8192)
def base_name(target: Any) -> str:
    """The name of a node that calls this function, before it is numbered."""
    return _EMPTY_GRAPH._target_to_str(target)


_EMPTY_GRAPH = torch.fx.Graph()


@functools.lru_cache(maxsize=8192)
def name_of_attribute(target: str) -> tuple[str, bool]:
    """The name of a node that reads this attribute, and whether the graph would use it as it is."""
    name = target.replace(".", "_")
    # The graph takes `a_1` for the second `a`, and `a1` for a name.
    is_numbered = name.rstrip("0123456789").endswith("_")
    return name, name.isascii() and name.isidentifier() and not is_numbered and name not in TAKEN_NAMES


TAKEN_NAMES, NODE = torch.fx.graph._illegal_names, torch.fx.Node
new_node = NODE.__new__
init_node = torch._C._NodeBase.__init__
set_node_arguments = torch._C._NodeBase._update_args_kwargs
NO_KEYWORDS: Any = torch.fx.immutable_collections.immutable_dict()
"""One object for all nodes without keyword arguments: thousands less for Python's collector to visit."""
set_node_meta = (
    torch._C._NodeBase.meta.__set__
)  # without `Node.__setattr__`, which updates the graph's tables
mark_as_erased = torch._C._NodeBase._erased.__set__


def erase_node(node: torch.fx.Node) -> None:
    """`graph.erase_node` without its checks, for a graph that is being recorded. Its name stays taken, but the graph does
    not keep the node."""
    graph = node.graph
    graph._graph_namespace._obj_to_name.pop(node, None)
    is_call = node.op == "call_function"
    del graph._find_nodes_lookup_table.table[node.op, node.target if is_call else None][node]
    node._remove_from_list()
    mark_as_erased(node, True)
    graph._len -= 1
    set_node_arguments(node, (), NO_KEYWORDS)


def last_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """The last node; for an empty graph, its root."""
    return graph._root.prev


def children(spec: object) -> list[Any]:
    """The structures of the parts of a structure."""
    return list(spec.children())


def is_leaf(spec: object) -> bool:
    return bool(spec.is_leaf())


def is_plain_structure(spec: object) -> bool:
    """Whether it consists of lists, tuples and dicts only, which a graph can return directly."""
    return is_leaf(spec) or (
        spec.type in (list, tuple, dict) and all(map(is_plain_structure, spec.children()))
    )


def structured_code(names: list[str], in_spec: Any, out_spec: Any) -> Any:
    """The code generator for a graph of flat inputs and outputs that is called with structures."""
    from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo  # why: private

    return _PyTreeCodeGen(_PyTreeInfo(names, in_spec, out_spec))


def codegen_of(graph: torch.fx.Graph) -> Any:
    return graph._codegen


class _ForwardOnAccess:
    """The `forward` of a graph module whose code is not generated yet: reading it generates the code first.

    (Torch's own placeholder has another signature, and torch.compile and torch.jit refuse it.)
    """

    def __get__(self, module: Any, cls: Any) -> Any:
        if module is None:
            return cls._lazy_forward  # which marks the code as not generated yet
        write_code(module)
        return module.forward


def lazy_graph_module(root: Any, graph: torch.fx.Graph, name: str) -> torch.fx.GraphModule:
    """A graph module whose code is generated on first access."""
    return _lazy_class()(root, graph, name)


@functools.cache
def _lazy_class() -> type[torch.fx.GraphModule]:
    from torch.fx._lazy_graph_module import _LazyGraphModule  # why: private

    class GraphModule(_LazyGraphModule):
        forward = _ForwardOnAccess()

        @classmethod
        def recompile(cls) -> Any:
            cls.forward = _ForwardOnAccess()

    GraphModule.__jit_unused_properties__ = ["code", *torch.fx.GraphModule.__jit_unused_properties__]
    return GraphModule


def write_code(module: torch.fx.GraphModule) -> None:
    """Generate the code of a graph module now: until then, its `forward` has another signature."""
    from torch.fx._lazy_graph_module import _LazyGraphModule  # why: private

    _LazyGraphModule.force_recompile(module)


CodeOnlyModule = torch.fx.graph_module._CodeOnlyModule  # the placeholder of an unpickled graph module
engine_code = torch.autograd.graph._engine_run_backward.__code__
"""The code in which backward passes run."""


def symbolic_function(name: str) -> Callable[..., Any]:
    """`sqrt`, `cos`, … of a number that may be symbolic."""
    return getattr(torch, f"_sym_{name}", None) or getattr(math, name)


def functions_wrapped_for_fx() -> list[tuple[dict[str, Any], str]]:
    """The functions registered by `torch.fx.wrap`: global names of modules."""
    return [(space, name) for (_, name), space in torch.fx._symbolic_trace._wrapped_fns_to_patch.items()]


def original_python_function(function: Any) -> Callable[..., Any]:
    """The Python function of a TorchScript function; itself if that is unknown."""
    return getattr(function, "_torchdynamo_inline", None) or function


# --- Private parts of `torch.export` --------------------------------------------------


def bind_arguments(
    model: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, Any]:
    """The arguments by the parameter names of `forward`, keyword arguments in their order."""
    signature = inspect.signature(model.forward)
    signature.bind(*args, **kwargs)
    return {**signature.bind_partial(*args).arguments, **kwargs}


def name_of_keywords(model: torch.nn.Module) -> str | None:
    """`kwargs` of `forward(self, x, **kwargs)`; None if it has no such parameter."""
    parameters = inspect.signature(model.forward).parameters.values()
    return next((parameter.name for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD), None)


def flatten_with_paths(tree: object) -> list[tuple[tuple[Any, ...], Any]]:
    return pytree.tree_flatten_with_path(tree)[0]


def key_text(path: Sequence[Any]) -> str:
    """`['x'][0]`"""
    return pytree.keystr(tuple(path))


def check_dynamic_shapes(arguments: dict[str, Any], dynamic_shapes: Any) -> None:
    """Raises torch's own error for dynamic shapes that do not match the arguments."""
    # why: private, and slow to import
    from torch.export.dynamic_shapes import _check_dynamic_shapes, _IntWrapper

    def wrap(leaf: object) -> Any:
        return _IntWrapper(leaf) if type(leaf) is int else leaf

    _check_dynamic_shapes(pytree.tree_map(wrap, arguments), dynamic_shapes)


def flatten_shapes(arguments: dict[str, Any], dynamic_shapes: object) -> list[Any]:
    """The dynamic shapes of each leaf of the arguments."""
    from torch.export.dynamic_shapes import _tree_map_with_path  # why: private, and slow to import

    found: list[Any] = []

    def note(path: object, leaf: object, asked: object) -> None:
        found.append(asked)

    tree: Any = arguments
    if isinstance(dynamic_shapes, (tuple, list)):
        tree = type(dynamic_shapes)(arguments.values())
    else:
        dynamic_shapes = {name: dynamic_shapes.get(name) for name in arguments}
    _tree_map_with_path(note, tree, dynamic_shapes, tree_name="inputs")
    return found


training_verifier = on_demand("torch._export.verifier", "TrainingIRVerifier")
verifier = on_demand("torch._export.verifier", "Verifier")
wrap_set_grad = on_demand("torch._higher_order_ops.wrap", "wrap_with_set_grad_enabled")
wrap_autocast = on_demand("torch._higher_order_ops.wrap", "wrap_with_autocast")


def broken_guards(guards: torch.nn.Module, leaves: Sequence[object]) -> list[str]:
    """All checks of an input-checking module that fail: the module itself stops at the first."""
    found: list[str] = []

    def note(condition: object, message: str) -> None:
        if not condition:
            found.append(message)

    inner: Any = guards.forward
    while inner.__closure__:  # torch has wrapped it for its compiler
        inner = next(
            cell.cell_contents for cell in inner.__closure__ if inspect.isfunction(cell.cell_contents)
        )
    code = type(inner)(inner.__code__, {**inner.__globals__, "torch": _Asserts(note)}, inner.__name__)
    code(*leaves)
    return found


class _Asserts:
    """Replaces torch in code that only calls `torch._assert`."""

    def __init__(self, note: Callable[[Any, str], None]) -> None:
        self._assert = note


def materialise_table(table: Any) -> dict[Any, Callable[..., Any]]:
    """A decomposition table as a dict; torch's own are filled lazily."""
    made = table.materialize() if hasattr(table, "materialize") else table
    return dict(made)


class WholeComposites:
    """The composite operators that a decomposition table preserves: those that torch can preserve, and that are not in
    it."""

    def __init__(self, table: Mapping[Any, Any]) -> None:
        self._table = table
        self._known: dict[Any, bool] = {}

    def __contains__(self, op: object) -> bool:
        found = self._known.get(op)
        if found is None:
            from torch._export.utils import _is_preservable_cia_op  # why: private, and slow to import

            found = (
                isinstance(op, torch._ops.OpOverload) and op not in self._table and _is_preservable_cia_op(op)
            )
            self._known[op] = found
        return found


def rename_nodes(graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str]) -> None:
    """Give these nodes exactly these names; other nodes with one of the names are renamed."""
    space = graph._graph_namespace
    for table in (space._used_names, space._obj_to_name, space._base_count):
        table.clear()
    for node, name in names.items():
        free, count = name, 0
        while (
            free in space._used_names
        ):  # `a_1_1` after `a_1`, as in torch.export; the namespace would choose `a_2`
            count += 1
            free = f"{name}_{count}"
        chosen = space.create_name(free, node)
        node.name = chosen
        if node.op == "placeholder":
            node.target = chosen
    for node in graph.nodes:
        if node not in names:
            node.name = space.create_name(node.name, node)


def has_declared_shapes(f: object) -> bool:
    """Whether a function, or the forward of a module, has dynamic sizes declared by `@dynamic_spec` (torch 2.14)."""
    function = f.forward if isinstance(f, torch.nn.Module) else f
    return getattr(function, "_dynamic_spec", None) is not None
