"""A captured graph as the graph of an exported program: state as inputs, names, the signature, regions.

ModelState        parameters and buffers of a model, by name
lift              attributes that a graph reads become placeholders before those of the user
make_signature    the signature: the kind of each placeholder and each output
wrap_regions      regions without gradients or with autocast become subgraphs
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymBoolArgument,
    SymFloatArgument,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy.errors import Context, UnderstudyError
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_origins import line_of_node
from understudy.ops.registry import record_of

PREFIXES = {InputKind.PARAMETER: "p_", InputKind.BUFFER: "b_", InputKind.CONSTANT_TENSOR: "c_"}
NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9]")


class ExportError(UnderstudyError, RuntimeError):
    """A program that can't be exported."""


@dataclass
class ModelState:
    """The tensors of a model."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    temporary: set[str]
    """Non-persistent buffers, which are not part of the state dict."""
    attributes: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Other tensor attributes of its modules, by identity."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> ModelState:
        temporary: set[str] = set()
        attributes: dict[int, tuple[str, torch.Tensor]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            temporary.update(f"{prefix}{name}" for name in module._non_persistent_buffers_set)
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    attributes.setdefault(id(value), (f"{prefix}{name}", value))
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        buffers: dict[str, torch.Tensor] = dict(model.named_buffers(remove_duplicate=False))
        _check_paths([*parameters, *buffers])
        return cls(parameters, buffers, temporary, attributes)

    @property
    def is_on_stand_ins(self) -> bool:
        """Whether the model has no data itself."""
        return any(
            type(tensor) is FakeTensor for tensor in (*self.parameters.values(), *self.buffers.values())
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        every = {**self.parameters, **self.buffers}
        return {name: value for name, value in every.items() if name not in self.temporary}


@dataclass
class Lifted:
    """A graph whose state is part of its inputs."""

    inputs: list[InputSpec]
    constants: dict[str, Any]


def lift(
    module: GraphModule,
    state: ModelState,
    inputs: Sequence[tuple[str, object]],
    stand_in: Callable[[torch.Tensor], object],
) -> Lifted:
    """Replace the state that the graph reads by placeholders, and name all placeholders.

    `inputs`: name and leaf of each input of the user; the graph already has those that are tensors or symbols.
    `stand_in`: the function from a tensor of the state to its stand-in.
    """
    graph = module.graph
    specs: list[InputSpec] = []
    names: dict[Node, str] = {}
    constants: dict[str, Any] = {
        name: state.buffers[name] for name in state.buffers if name in state.temporary
    }
    given = list(graph.find_nodes(op="placeholder"))
    first = next(iter(graph.nodes))
    by_identity: dict[int, Node] = {}

    def place(kind: InputKind, target: str, tensor: Any) -> Node:
        with graph.inserting_before(first):
            node = graph.placeholder(f"state_{len(specs)}")
        node.meta["val"] = stand_in(tensor)
        by_identity.setdefault(id(tensor), node)
        names[node] = PREFIXES[kind] + NOT_IN_NAMES.sub("_", target).lower()
        persistent = target not in state.temporary if kind is InputKind.BUFFER else None
        specs.append(InputSpec(kind, TensorArgument(node.name), target, persistent))
        return node

    for name, tensor in state.parameters.items():
        place(InputKind.PARAMETER, name, tensor)
    for name, tensor in state.buffers.items():
        place(InputKind.BUFFER, name, tensor)
    _lift_reads(module, state, by_identity, constants, place)
    remaining = iter(given)
    user_names: dict[Node, str] = {}
    for name, leaf in inputs:
        is_input = isinstance(leaf, (torch.Tensor, torch.SymInt))
        if is_input:
            node = next(remaining)
        else:
            with graph.inserting_before(_first_call(graph)):
                node = graph.placeholder("constant")
            node.meta["val"] = leaf
        node.args = ()
        user_names[node] = name
        specs.append(InputSpec(InputKind.USER_INPUT, _argument(node, leaf), None))
    _put_in_order(graph, list(user_names))
    _torch.rename_nodes(graph, {**user_names, **names})
    for spec, node in zip(specs, graph.find_nodes(op="placeholder"), strict=True):
        spec.arg.name = node.name
    return Lifted(specs, constants)


def lift_retraced(
    module: GraphModule, lifted: Lifted, vals: Sequence[object], stand_in: Callable[[torch.Tensor], object]
) -> None:
    """The same for the graph of a program that was retraced: its state is already part of its inputs.

    `vals`: the values of all placeholders. Constants that decompositions made are lifted and added to `lifted`.
    """
    graph = module.graph
    names: dict[Node, str] = {}
    remaining = iter(graph.find_nodes(op="placeholder"))
    first_of_user = None
    placed: list[Node] = []
    for spec, val in zip(lifted.inputs, vals, strict=True):
        if isinstance(val, (torch.Tensor, torch.SymInt)):
            node = next(remaining)
        else:
            with graph.inserting_before(_first_call(graph)):
                node = graph.placeholder("constant")
            node.meta["val"] = val
        placed.append(node)
        names[node] = spec.arg.name
        if first_of_user is None and spec.kind is InputKind.USER_INPUT:
            first_of_user = node
    _put_in_order(graph, placed)
    specs: list[InputSpec] = []

    def place(kind: InputKind, target: str, tensor: Any) -> Node:
        with graph.inserting_before(first_of_user or _first_call(graph)):
            node = graph.placeholder(f"constant_{len(specs)}")
        node.meta["val"] = stand_in(tensor)
        names[node] = PREFIXES[kind] + NOT_IN_NAMES.sub("_", target).lower()
        specs.append(InputSpec(kind, TensorArgument(node.name), target, None))
        return node

    _lift_reads(module, ModelState({}, {}, set()), {}, lifted.constants, place)
    position = next(
        (i for i, spec in enumerate(lifted.inputs) if spec.kind is InputKind.USER_INPUT), len(lifted.inputs)
    )
    lifted.inputs[position:position] = specs
    _torch.rename_nodes(graph, names)
    for spec, node in zip(lifted.inputs, graph.find_nodes(op="placeholder"), strict=True):
        spec.arg.name = node.name


def _first_call(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _put_in_order(graph: Graph, nodes: list[Node]) -> None:
    """Move the user's placeholders into the order of the arguments."""
    first = _first_call(graph)
    if list(graph.find_nodes(op="placeholder"))[-len(nodes) :] != nodes:
        for node in nodes:
            first.prepend(node)


def _lift_reads(
    module: GraphModule, state: ModelState, known: dict[int, Node], constants: dict[str, Any],
    place: Callable[[InputKind, str, torch.Tensor], Node],
) -> None:  # fmt: skip
    """Tensors that the graph reads as attributes: of the state, or constants."""
    for node in list(module.graph.find_nodes(op="get_attr")):
        value = _read(module, str(node.target))
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Module):
                raise ExportError(
                    f"{node.target} is a {type(value).__name__}, which an exported program can't hold"
                )
            continue
        found = known.get(id(value))
        if (
            found is None
            and type(value) is FakeTensor
            and not state.is_on_stand_ins
            and id(value) not in state.attributes
        ):
            reader = next(iter(node.users), node)
            raise ExportError(
                f"the program reads {value._spec}, which was not made by a recorded operator",
                context=Context(
                    str(reader.target), "", line_of_node(reader), "compute it with operators of torch"
                ),
            )
        if found is None:
            name = (
                state.attributes[id(value)][0]
                if id(value) in state.attributes
                else f"lifted_tensor_{_count(constants)}"
            )
            # torch keeps constants as buffers, which a parameter of a layer that is not registered can't be.
            value = value.detach() if isinstance(value, torch.nn.Parameter) else value
            constants[name] = value
            found = place(InputKind.CONSTANT_TENSOR, name, value)
        node.replace_all_uses_with(found)
        module.graph.erase_node(node)


def _count(constants: Mapping[str, object]) -> int:
    return sum(name.startswith("lifted_tensor_") for name in constants)


def _read(module: object, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _argument(node: Node, leaf: object) -> Any:
    val = node.meta.get("val", leaf) if not isinstance(leaf, torch.Tensor) else leaf
    if isinstance(val, torch.Tensor):
        return TensorArgument(node.name)
    if isinstance(val, torch.SymInt):
        return SymIntArgument(node.name)
    if isinstance(val, torch.SymFloat):
        return SymFloatArgument(node.name)
    if isinstance(val, torch.SymBool):
        return SymBoolArgument(node.name)
    return ConstantArgument(node.name, val)


CONSTANTS = (int, float, bool, str, type(None))
"""What inputs and results may be besides tensors and symbols."""


def _check_paths(paths: Iterable[str]) -> None:
    """Raise for parameters and buffers whose paths torch could not write into the code of a program."""
    for path in paths:
        parts = path.split(".")
        is_taken = hasattr(GraphModule, parts[0]) or parts[0] == "meta"
        if is_taken or any(keyword.iskeyword(part) or not UNWRITABLE.isdisjoint(part) for part in parts):
            raise ExportError(
                f"{path!r} can't be the path of a parameter or buffer of an exported program: torch generates code "
                "with it, so it must not contain a keyword, quote, backslash or line break, or be an attribute of "
                "graph modules (graph, code, meta). Rename it, or use make_fx, which gives it a safe name"
            )


UNWRITABLE = frozenset('"\\\n\r')


def check_leaves(names: Sequence[str], leaves: Sequence[object]) -> None:
    """Raise for inputs that an exported program can't have."""
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *CONSTANTS)):
            raise ExportError(
                f"the input {name} is a {type(leaf).__name__}: inputs are tensors, numbers, text, None, and structures of "
                "them (torch.utils._pytree.register_pytree_node, torch.export.register_dataclass)"
            )


def make_signature(
    graph: Graph, lifted: Lifted, written: Mapping[Node, Node], before: Sequence[OutputSpec] = ()
) -> ExportGraphSignature:
    """The signature; new values of written inputs become outputs, before those of the user.

    `before`: the outputs of the retraced program, some of which may be such values already.
    """
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    by_name = {spec.arg.name: spec for spec in lifted.inputs}
    mutations, outputs = [], []
    for node in graph.find_nodes(op="placeholder"):
        if node in written:
            mutations.append(written[node])
            outputs.append(_mutation(node, written[node], by_name[node.name]))
    output.args = ((*mutations, *results),)
    kinds = [(spec.kind, spec.target) for spec in before] or [(OutputKind.USER_OUTPUT, None)] * len(results)
    outputs += [
        OutputSpec(kind, _result_argument(r), target)
        for r, (kind, target) in zip(results, kinds, strict=True)
    ]
    return ExportGraphSignature(lifted.inputs, outputs)


def _mutation(node: Node, value: Node, spec: InputSpec) -> OutputSpec:
    kinds = {
        InputKind.BUFFER: OutputKind.BUFFER_MUTATION,
        InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION,
    }
    if spec.kind is InputKind.PARAMETER:
        kind = getattr(OutputKind, "PARAMETER_MUTATION", None)
    else:
        kind = kinds.get(spec.kind)
    if kind is None:
        raise ExportError(
            f"the program writes to {spec.target}, which is neither an input nor a buffer",
            context=Context("", "", line_of_node(value), f'self.register_buffer("{spec.target}", …)'),
        )
    return OutputSpec(kind, TensorArgument(value.name), spec.target or node.name)


def check_results(results: Sequence[object]) -> None:
    """Raise for results that an exported program can't return."""
    for result in results:
        if not isinstance(result, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            _result_argument(result)


def _result_argument(result: object) -> Any:
    if isinstance(result, Node):
        return _argument(result, result.meta.get("val"))
    if isinstance(result, CONSTANTS):
        return ConstantArgument("", result)
    raise ExportError(
        f"the program returns a {type(result).__name__}: it may return tensors, numbers, text, None, and structures of them"
    )


# --- regions with another grad mode or autocast ------------------------------------------------------------


@dataclass
class Region:
    """The nodes between two changes of grad mode or autocast."""

    operator: Any
    settings: tuple[Any, ...]
    first: Node
    nodes: list[Node] = field(default_factory=list)


def wrap_regions(module: GraphModule, is_grad_enabled: bool) -> None:
    """Move the regions of a graph module into submodules. `is_grad_enabled`: the grad mode at its start."""
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
        """End a region: its nodes become a subgraph, and are replaced by a call of it."""
        region = self._open.pop()
        nodes = [
            node for node in region.nodes if node.graph is self._graph and not getattr(node, "_erased", False)
        ]
        made = self._wrap(region, nodes) if nodes else []
        self._graph.erase_node(region.first)
        if self._open:
            self._open[-1].nodes.extend(made)

    def _wrap(self, region: Region, nodes: list[Node]) -> list[Node]:
        inside = set(nodes)
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
        last = nodes[-1]
        if not results:  # the region may have effects
            results = [node for node in nodes if _writes(node)]
        if not results:
            for node in reversed(nodes):
                self._graph.erase_node(node)
            return []
        graphs = [n for n in inputs if n.op == "get_attr"]  # submodules: each graph reads its own
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
