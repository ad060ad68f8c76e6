"""capture_step: a whole training step as one graph: forward, loss, backward, optimizer.

The step is traced on stand-ins for the parameters, the buffers and the optimizer's state; the model and the optimizer
themselves are not touched. State that an optimizer makes in its first step (moments, step counters) is found by tracing
that step, made for real by the operators that were recorded for it, and kept by the graph: run again and again, the
graph trains.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from understudy import _torch
from understudy.capture.borrowed_modules import BorrowedModules
from understudy.capture.constants import attach
from understudy.capture.make_fx import MODES, Capture, Options, TracingMode, leaf_names, names_in_code
from understudy.contexts import contextmanager, run_to_the_end
from understudy.errors import GuardOnDataDependentSymNode

STATE = "optimizer_state."
"""The prefix of the optimizer's state in the graph module."""
Numbers = dict[tuple[int, str], torch.Tensor]
"""Options of an optimizer that are read at each step, by group and name."""
State = dict[str, dict[str, Any]]
"""The optimizer's state of each parameter, by the parameter's name."""


def capture_step(
    model: torch.nn.Module, loss_fn: Callable[..., object], optimizer: torch.optim.Optimizer, *inputs: object,
    targets: int | None = None, tracing_mode: TracingMode = "fake",
    parameters: Literal["attributes", "inputs"] = "attributes",
    decomposition_table: Mapping[Any, Callable[..., Any]] | None = None, fixed_step: bool = False,
    varying: Iterable[str] = (),
) -> GraphModule:  # fmt: skip
    """The graph of one training step. It returns the loss, and writes to the parameters and the optimizer's state.

        step = capture_step(model, torch.nn.functional.cross_entropy, AdamW(model.parameters()), x, y)
        for x, y in batches:
            loss = step(x, y)

    The loss is `loss_fn(model(*first), *last)`: the last inputs are the targets, as many as `loss_fn` requires beyond
    the model's output, or as `targets` says. A `loss_fn` whose first parameter is called `model` is given the model and
    all inputs instead.

    Numbers in the optimizer's options are fixed in the graph, but for those that are named in `varying`: with
    `varying=["lr"]`, each group's learning rate is a tensor that the graph reads at each step, among the state:
    `step.get_buffer("optimizer_state.group_0.lr").fill_(1e-4)`. Options that are tensors are read as they are.

    `parameters="attributes"`: the graph module works on the memory of the model's own parameters and buffers, and holds
    the optimizer's state.
    `parameters="inputs"`: it is called with them, `step(parameters, state, *inputs)`, and holds neither;
    `step.example_parameters` and `step.example_state` are what to begin with.
    `fixed_step`: step counters keep the value that they have now. A few optimizers (RAdam, ASGD) decide by that value
    what to do, so that no graph holds for all steps.
    """
    if tracing_mode not in MODES:
        raise ValueError(f"tracing_mode is {tracing_mode!r}; it must be one of {', '.join(map(repr, MODES))}")
    if parameters not in ("attributes", "inputs"):
        raise ValueError(f'parameters is {parameters!r}; it must be "attributes" or "inputs"')
    program = _loss_program(loss_fn, len(inputs), targets)
    options = Options(decomposition_table, "fake" if tracing_mode == "real" else tracing_mode)
    state = _state_of(optimizer, _names(model))
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss as often as the values demand: its step is not one graph")
    numbers = _varying_numbers(optimizer, varying)
    capture = StepCapture(model, program, optimizer, options, state, fixed_step, numbers)
    graph = capture.run(inputs)
    made = capture.state_made_here(graph)
    if made:
        state = {name: {**state.get(name, {}), **made.get(name, {})} for name in {**state, **made}}
        capture = StepCapture(model, program, optimizer, options, state, fixed_step, numbers)
        graph = capture.run(inputs)
    if parameters == "inputs":
        return _with_parameters_as_inputs(graph, capture.tracer.constants.named_nodes(), capture.nodes_of_state())
    return graph


def _loss_program(loss_fn: Callable[..., object], count: int, targets: int | None) -> Callable[..., Any]:
    """(model, inputs) → loss."""
    called = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
    try:
        required = [
            parameter
            for parameter in inspect.signature(called).parameters.values()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # a C function: most losses take an output and a target
        required = []
        targets = min(1, count - 1) if targets is None else targets
    if targets is None and required and required[0].name == "model":
        return lambda model, inputs: loss_fn(model, *inputs)
    split = count - (max(len(required) - 1, 0) if targets is None else targets)
    if not 0 <= split <= count:
        raise ValueError(f"loss_fn takes {count - split} targets, but there are {count} inputs")
    return lambda model, inputs: loss_fn(model(*inputs[:split]), *inputs[split:])


def _varying_numbers(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> Numbers:
    """The numbers with these names of each group, as float64 tensors."""
    found: Numbers = {}
    for position, group in enumerate(optimizer.param_groups):
        for name in names:
            value = group.get(name)
            if isinstance(value, torch.Tensor):
                continue  # a tensor is read at each step anyway
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                numbers = [key for key, other in group.items() if type(other) in (int, float)]
                raise ValueError(
                    f"varying: {name!r} is no number among the options of {type(optimizer).__name__}; these are: "
                    f"{', '.join(numbers)}"
                )
            found[position, name] = torch.tensor(value, dtype=torch.float64)
    return found


def _names(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _state_of(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> State:
    return {
        names[parameter]: dict(entries)
        for parameter, entries in optimizer.state.items()
        if parameter in names
    }


class StepCapture(Capture):
    """Records one training step, with a copy of the optimizer that holds stand-ins."""

    def __init__(
        self, model: torch.nn.Module, program: Callable[..., Any], optimizer: torch.optim.Optimizer, options: Options,
        state: State, fixed_step: bool, varying: Numbers,
    ) -> None:  # fmt: skip
        super().__init__(self._step, options)
        self._model = model
        self._program = program
        self._optimizer = optimizer
        self._given = state
        self._fixed_step = fixed_step
        self._varying = varying
        self._numbers: Numbers = {}
        self._shadow: Any = None
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._nodes_of_state: dict[str, dict[str, Node]] = {}
        self._lent_state: list[torch.Tensor] = []

    def _step(self, *inputs: Any) -> Any:
        for stand_in in self._stand_ins.values():
            stand_in.grad = None
        loss = self._program(self._model, inputs)
        loss.backward()
        self._optimize()
        self._note_state()
        return loss.detach()

    def _optimize(self) -> None:
        for (position, name), number in self._numbers.items():
            group = self._shadow.param_groups[position]
            is_read_inside = name == "lr" and group.get("fused")
            group[name] = number if is_read_inside else number.item()
        try:
            self._shadow.step()
        except GuardOnDataDependentSymNode as error:
            raise ValueError(self._refusal()) from error

    def _refusal(self) -> str:
        name = type(self._optimizer).__name__
        if self._varying:
            names = ", ".join(dict.fromkeys(name for _, name in self._varying))
            return (
                f"{name} decides by a number what to do, so that no graph holds for all of them: by one of {names}, which "
                "capture_step was told are varying, or by its step counter"
            )
        if self._fixed_step:
            return f"{name} decides by the values of parameters and gradients what to do: its step is not one graph"
        return (
            f"{name} decides by the value of its step counter what to do, so that no graph holds for all steps; capture one "
            "step with capture_step(..., fixed_step=True)"
        )

    @contextmanager
    def _state(self) -> Iterator[BorrowedModules]:
        state = BorrowedModules(self.fake_mode)
        reals = _names(self._model)
        with run_to_the_end(state.give_back):
            state.borrow([(self._model, True)], self.tracer.constants)
            self.tracer.constants.without_gradient = True
            self._stand_ins = dict(self._model.named_parameters())
            by_name = {name: real for real, name in reals.items()}
            pairs = {by_name[name]: stand_in for name, stand_in in self._stand_ins.items()}
            self._shadow = self._shadow_of(pairs, reals)
            self._numbers = {
                (position, name): self._lend_as(f"group_{position}.{name}", number)
                for (position, name), number in self._varying.items()
            }
            yield state

    def _shadow_of(self, stand_ins: dict[torch.Tensor, torch.Tensor], names: dict[torch.Tensor, str]) -> Any:
        """A copy of the optimizer that holds stand-ins for the parameters and for its state."""
        unknown = [p for group in self._optimizer.param_groups for p in group["params"] if p not in stand_ins]
        if unknown:
            raise ValueError(
                f"the optimizer has {len(unknown)} parameters that are not the model's: make it with model.parameters()"
            )
        shadow = copy.copy(self._optimizer)
        shadow.__dict__ = dict(self._optimizer.__dict__)
        shadow.param_groups = [
            {**self._options(position, group), "params": [stand_ins[p] for p in group["params"]]}
            for position, group in enumerate(self._optimizer.param_groups)
        ]
        shadow.state = defaultdict(dict)
        for parameter, stand_in in stand_ins.items():
            entries = self._given.get(names[parameter])
            if entries:
                shadow.state[stand_in] = {
                    key: self._lend(names[parameter], key, value) for key, value in entries.items()
                }
        return shadow

    def _options(self, position: int, group: dict[str, Any]) -> dict[str, Any]:
        """The options of a group. Tensors among them, such as a learning rate, are read at each step."""
        leaves, structure = _torch.tree_flatten({key: value for key, value in group.items() if key != "params"})
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return group
        names = leaf_names([(key, ()) for key in group if key != "params"], structure)
        lent = [
            self._lend_as(f"group_{position}.{name}", leaf) if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
        return dict(_torch.tree_unflatten(lent, structure))

    def _lend(self, parameter: str, key: str, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        stand_in = self._lend_as(f"{parameter.replace('.', '_')}.{key}", value)
        if self._fixed_step and value.numel() == 1:
            self.stand_ins.remember_literal(stand_in, value.clone())
        return stand_in

    def _lend_as(self, name: str, value: torch.Tensor) -> Any:
        """A stand-in for a tensor that is part of the state in the graph module."""
        stand_in = self.stand_ins.from_tensor(value, static_shapes=True)
        self.tracer.constants.expect(stand_in, value, f"{STATE}{name}")
        self._lent_state.append(stand_in)
        return stand_in

    def nodes_of_state(self) -> set[Node | None]:
        """The nodes that read the optimizer's state."""
        return set(map(self.tracer.constants.existing, self._lent_state))

    # --- state that the optimizer makes in its first step ------------------------------------------------------

    def _note_state(self) -> None:
        names = {stand_in: name for name, stand_in in self._stand_ins.items()}
        for stand_in, entries in self._shadow.state.items():
            name = names[stand_in]
            given = self._given.get(name, {})
            self._nodes_of_state[name] = {
                key: self.tracer.node_of_tensor(value) if isinstance(value, torch.Tensor) else value
                for key, value in entries.items()
                if key not in given
            }

    def state_made_here(self, graph: GraphModule) -> State:
        """The real initial state: what the traced step created, before it wrote to it."""
        values: dict[Node, Any] = {}
        return {
            name: {key: self._make_initial(node, graph, values) for key, node in entries.items()}
            for name, entries in self._nodes_of_state.items()
            if entries
        }

    def _make_initial(self, node: object, graph: GraphModule, values: dict[Node, Any]) -> Any:
        if not isinstance(node, Node):
            return node
        try:
            return _evaluate_node(_written_before(node), graph, values).clone()
        except StateFromInputs:
            if _begins_with_zeros(self._optimizer):
                return _zeros_like(node.meta["val"])
            name = type(self._optimizer).__name__
            raise ValueError(
                f"the first step of {name} is not like the others (its state is made from gradients): take one step with "
                "the optimizer, then capture"
            ) from None


class StateFromInputs(Exception):
    """The optimizer computes its initial state from gradients."""


def _begins_with_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether state that the first step makes from gradients equals what a later step computes from zeros."""
    return isinstance(optimizer, torch.optim.SGD) and all(
        group["dampening"] == 0 for group in optimizer.param_groups
    )


def _origin(node: Node) -> Node:
    """The node that made the tensor to which this node writes in place."""
    while isinstance(node.target, _torch.OpOverload) and _torch.is_mutable(node.target):
        written = node.args[0]
        assert isinstance(written, Node)
        node = written
    return node


def _written_before(node: Node) -> Node:
    """The same; raises for uninitialised memory, which a kernel fills from gradients."""
    origin = _origin(node)
    if isinstance(origin.target, _torch.OpOverload) and origin.target.overloadpacket.__name__ in UNWRITTEN:
        raise StateFromInputs(origin.name)
    return origin


UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
LIKE = (
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_empty",
    "new_full",
)
"""Operators that read only the metadata of their input."""


def _zeros_like(val: Any) -> torch.Tensor:
    shape, stride = [int(size) for size in val.shape], [int(step) for step in val.stride()]
    return torch.empty_strided(shape, stride, dtype=val.dtype, device=val.device).zero_()


def _evaluate_node(node: Node, graph: GraphModule, values: dict[Node, Any]) -> Any:
    """The real value of a node that depends only on parameters, constants and metadata."""
    if isinstance(node.target, _torch.OpOverload) and node.target.overloadpacket.__name__ in LIKE:
        like = node.args[0]
        assert isinstance(like, Node)
        values.setdefault(like, _zeros_like(like.meta["val"]))
    if node not in values:
        if node.op == "get_attr":
            result: Any = graph
            for part in str(node.target).split("."):
                result = getattr(result, part)
        elif node.op == "call_function" and callable(node.target):
            read = torch.fx.map_arg((node.args, node.kwargs), lambda inner: _evaluate_node(inner, graph, values))
            with _torch.grad_mode(False):
                result = node.target(*read[0], **read[1])
        else:
            raise StateFromInputs(node.name)
        values[node] = result
    return values[node]


# --- parameters as inputs -------------------------------------------------------------------------------------


def _with_parameters_as_inputs(
    graph_module: GraphModule, names: dict[Node, str], of_state: Container[Node | None]
) -> GraphModule:
    """The same graph with parameters and state as inputs: `step(parameters, state, *inputs)`. `names`: those of the
    `get_attr` nodes."""
    graph = graph_module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    held: dict[str, dict[str, tuple[Node, Any]]] = {"parameters": {}, "state": {}}
    for node in graph.find_nodes(op="get_attr"):
        if node in names:
            group = "state" if node in of_state else "parameters"
            name = names[node] if group == "parameters" else str(node.target).removeprefix(STATE)
            held[group][str(node.target) if name in held[group] else name] = (node, _evaluate_node(node, graph_module, {}))
    first = next(iter(graph.nodes))
    for group, entries in held.items():
        for node, _ in entries.values():
            name = str(node.target).removeprefix(STATE).replace(".", "_")
            with graph.inserting_before(first):
                placeholder = graph.placeholder(f"{group}_{name}")
            placeholder.meta = dict(node.meta)
            node.replace_all_uses_with(placeholder)
            graph.erase_node(node)
    parameters, state = ({name: value for name, (_, value) in held[group].items()} for group in held)
    return _called_with_structures(graph_module, parameters, state, inputs)


def _called_with_structures(
    graph_module: GraphModule, parameters: dict[str, Any], state: dict[str, Any], inputs: list[Node]
) -> GraphModule:
    graph = graph_module.graph
    _, in_spec = _torch.tree_flatten((parameters, state, *[0 for _ in inputs]))
    (output,) = graph.find_nodes(op="output")
    leaves, out_spec = _torch.tree_flatten(output.args[0])
    output.args = (leaves,)
    names = names_in_code(["parameters", "state", *(str(node.target).removesuffix("_1") for node in inputs)])
    graph.set_codegen(_torch.structured_code(names, in_spec, out_spec))
    root = torch.nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        attach(root, str(node.target), _evaluate_node(node, graph_module, {}))
    result: Any = _torch.lazy_graph_module(root, graph, "step")
    result.example_parameters = parameters
    result.example_state = state
    return result
