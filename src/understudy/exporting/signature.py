"""A captured graph as the graph of an exported program: state as inputs, names, the signature.

    ModelState        parameters and buffers of a model, by name
    lift              attributes that a graph reads become placeholders before those of the user
    make_signature    what each placeholder and each output is
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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
from understudy.graph.node_origins import line_behind

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
    """Buffers that are no part of the state dict."""
    attributes: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Other tensors that its modules hold, by identity."""

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
        return cls(parameters, dict(model.named_buffers(remove_duplicate=False)), temporary, attributes)

    def state_dict(self) -> dict[str, torch.Tensor]:
        every = {**self.parameters, **self.buffers}
        return {name: value for name, value in every.items() if name not in self.temporary}


@dataclass
class Lifted:
    """A graph whose state is among its inputs."""

    inputs: list[InputSpec]
    constants: dict[str, Any]


def lift(
    module: GraphModule, state: ModelState, inputs: Sequence[tuple[str, Any]], stand_in: Callable[[torch.Tensor], Any]
) -> Lifted:
    """Make placeholders of the state that the graph reads, and name all placeholders.

    `inputs`: name and leaf of each input of the user, of which the graph has those that are tensors or symbols already.
    `stand_in`: what stands for a tensor of the state.
    """
    graph = module.graph
    specs: list[InputSpec] = []
    names: dict[Node, str] = {}
    constants: dict[str, Any] = {name: state.buffers[name] for name in state.buffers if name in state.temporary}
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


def lift_again(
    module: GraphModule, lifted: Lifted, vals: Sequence[Any], stand_in: Callable[[torch.Tensor], Any]
) -> None:
    """The same for the graph of a program that was run once more: its state is among its inputs already.

    `vals`: of all placeholders. Constants that decompositions have made are lifted, and `lifted` is completed.
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
    position = next((i for i, spec in enumerate(lifted.inputs) if spec.kind is InputKind.USER_INPUT), len(lifted.inputs))
    lifted.inputs[position:position] = specs
    _torch.rename_nodes(graph, names)
    for spec, node in zip(lifted.inputs, graph.find_nodes(op="placeholder"), strict=True):
        spec.arg.name = node.name


def _first_call(graph: Graph) -> Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _put_in_order(graph: Graph, nodes: list[Node]) -> None:
    """Placeholders of the user in the order of the arguments."""
    first = _first_call(graph)
    if [node for node in graph.find_nodes(op="placeholder")][-len(nodes) :] != nodes:
        for node in nodes:
            first.prepend(node)


def _lift_reads(module: GraphModule, state: ModelState, known: dict[int, Node], constants: dict[str, Any], place: Any) -> None:
    """Tensors that the graph reads as attributes: of the state, or constants."""
    for node in list(module.graph.find_nodes(op="get_attr")):
        value = _read(module, str(node.target))
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Module):
                raise ExportError(f"{node.target} is a {type(value).__name__}, which an exported program can't hold")
            continue
        found = known.get(id(value))
        if found is None:
            name = state.attributes[id(value)][0] if id(value) in state.attributes else f"lifted_tensor_{_count(constants)}"
            constants[name] = value
            found = place(InputKind.CONSTANT_TENSOR, name, value)
        node.replace_all_uses_with(found)
        module.graph.erase_node(node)


def _count(constants: Mapping[str, Any]) -> int:
    return sum(name.startswith("lifted_tensor_") for name in constants)


def _read(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _argument(node: Node, leaf: Any) -> Any:
    val = node.meta.get("val", leaf) if not isinstance(leaf, torch.Tensor) else leaf
    if isinstance(val, torch.Tensor):
        return TensorArgument(node.name)
    if isinstance(val, torch.SymInt):
        return SymIntArgument(node.name)
    if isinstance(val, torch.SymFloat):
        return SymFloatArgument(node.name)
    if isinstance(val, torch.SymBool):
        return SymBoolArgument(node.name)
    if val is None or isinstance(val, (int, float, bool, str)):
        return ConstantArgument(node.name, val)
    raise ExportError(
        f"the input {node.name} is a {type(val).__name__}: inputs are tensors, numbers, text, None, and structures of them "
        "(torch.utils._pytree.register_pytree_node, torch.export.register_dataclass)"
    )


def make_signature(
    graph: Graph, lifted: Lifted, written: Mapping[Node, Node], before: Sequence[OutputSpec] = ()
) -> ExportGraphSignature:
    """The signature; values of inputs that were written to become outputs, before those of the user.

    `before`: the outputs of the program that was run, some of which may be such values already.
    """
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])  # type: ignore[arg-type]
    by_name = {spec.arg.name: spec for spec in lifted.inputs}
    mutations, outputs = [], []
    for node in graph.find_nodes(op="placeholder"):
        if node in written:
            mutations.append(written[node])
            outputs.append(_mutation(node, written[node], by_name[node.name]))
    output.args = ((*mutations, *results),)
    kinds = [(spec.kind, spec.target) for spec in before] or [(OutputKind.USER_OUTPUT, None)] * len(results)
    outputs += [OutputSpec(kind, _result_argument(r), target) for r, (kind, target) in zip(results, kinds, strict=True)]
    return ExportGraphSignature(lifted.inputs, outputs)


def _mutation(node: Node, value: Node, spec: InputSpec) -> OutputSpec:
    kinds = {InputKind.BUFFER: OutputKind.BUFFER_MUTATION, InputKind.USER_INPUT: OutputKind.USER_INPUT_MUTATION}
    if spec.kind is InputKind.PARAMETER:
        kind = getattr(OutputKind, "PARAMETER_MUTATION", None)
    else:
        kind = kinds.get(spec.kind)
    if kind is None:
        raise ExportError(
            f"the program writes to {spec.target}, which is neither an input nor a buffer",
            context=Context("", "", line_behind(value), f'self.register_buffer("{spec.target}", …)'),
        )
    return OutputSpec(kind, TensorArgument(value.name), spec.target or node.name)


def _result_argument(result: Any) -> Any:
    if isinstance(result, Node):
        return _argument(result, result.meta.get("val"))
    if result is None or isinstance(result, (int, float, bool, str)):
        return ConstantArgument("", result)
    raise ExportError(
        f"the program returns a {type(result).__name__}: it may return tensors, numbers, text, None, and structures of them"
    )
