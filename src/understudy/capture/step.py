"""capture_step: a whole training step as one graph: forward, loss, backward, optimizer.

The step is traced on stand-ins for the parameters, the buffers and the optimizer's state; the model and the optimizer
themselves are not touched. State that an optimizer makes in its first step (moments, step counters) is made for real, and
kept by the graph: run again and again, the graph trains.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from understudy import _torch
from understudy.capture.borrowed_modules import BorrowedModules
from understudy.capture.constants import attach
from understudy.capture.make_fx import MODES, Capture, CaptureOptions, TracingMode, leaf_names, names_in_code
from understudy.capture.optimizer_steps import (
    StateFromInputs,
    StepState,
    initial_value,
    is_torch_optimizer,
    lazy_zeros,
    numbers_in,
)
from understudy.errors import GuardOnDataDependentSymNode
from understudy.fake.tensor import FakeTensor
from understudy.fake.torch_api import maybe_get_fake_mode
from understudy.fake.values.ranges import store_ranges
from understudy.graph.borrowed_state import has_same_form, named_parts
from understudy.ops.traits.ranges import ValueRange

STATE = "optimizer_state."
"""The prefix of the optimizer's state in the graph module."""
COUNTER = "step"
"""The key of the step counter in the state of torch's optimizers: it only grows."""
MOST_STEPS = 1 << 24
"""Where a counter in float32 stops."""
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
        raise ValueError(f"tracing_mode must be one of {', '.join(map(repr, MODES))}, got {tracing_mode!r}")
    if parameters not in ("attributes", "inputs"):
        raise ValueError(f'parameters must be "attributes" or "inputs", got {parameters!r}')
    program = _loss_program(loss_fn, len(inputs), targets)
    options = CaptureOptions(decomposition_table, "fake" if tracing_mode == "real" else tracing_mode)
    reals = _named_parameters(model)
    state = _state_of(optimizer, {parameter: name for name, parameter in reals.items()})
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS evaluates the loss a data-dependent number of times, so its step is not one graph; use another optimizer"
        )
    numbers = _varying_numbers(optimizer, varying)
    capture = StepCapture(model, reals, program, optimizer, options, state, fixed_step, numbers)
    graph = capture.run(inputs)
    if capture.from_gradients or (capture.made and not fixed_step and not is_torch_optimizer(optimizer)):
        first, first_graph = capture, graph
        capture = StepCapture(
            model, reals, program, optimizer, options, first.whole_state(), fixed_step, numbers
        )
        graph = capture.run(inputs)
        if not first.from_gradients:
            first.check_same_step(first_graph, graph)
    if parameters == "inputs":
        return _with_parameters_as_inputs(
            graph, capture.tracer.constants.named_nodes(), capture.nodes_of_state()
        )
    return graph


def state_name(parameter: str, key: str) -> str:
    return f"{parameter.replace('.', '_')}.{key}"


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
        raise ValueError(f"loss_fn: expected {count - split} targets, got {count} inputs in all")
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
                    f"varying: expected a numeric option of {type(optimizer).__name__}, got {name!r}; choose from "
                    f"{', '.join(numbers)}"
                )
            found[position, name] = torch.tensor(value, dtype=torch.float64)
    return found


def _named_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`dict(model.named_parameters())`, without a generator for each level of modules."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, part in named_parts(model):
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{path}.{name}" if path else name] = parameter
    return found


def _state_of(optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> State:
    return {
        names[parameter]: dict(entries)
        for parameter, entries in optimizer.state.items()
        if parameter in names
    }


class StepCapture(Capture):
    """Records one training step, with a copy of the optimizer that holds stand-ins."""

    def __init__(
        self, model: torch.nn.Module, reals: dict[str, torch.Tensor], program: Callable[..., Any],
        optimizer: torch.optim.Optimizer, options: CaptureOptions, state: State, fixed_step: bool, varying: Numbers,
    ) -> None:  # fmt: skip
        super().__init__(self._step, options)
        self._model = model
        self._reals = reals
        self._program = program
        self._optimizer = optimizer
        self._given = state
        self._fixed_step = fixed_step
        self._varying = varying
        self._numbers: Numbers = {}
        self._shadow: Any = None
        self._stand_ins: dict[str, torch.Tensor] = {}
        self._numbers_before: dict[str, Any] = {}
        self._state_stand_ins: list[Any] = []
        self._below = next(filter(None, map(maybe_get_fake_mode, reals.values())), None) or nullcontext()
        """The mode of the model's own parameters, if they are stand-ins."""
        self._stand_in_of_entry: dict[tuple[str, str], torch.Tensor] = {}
        """The stand-ins in the optimizer's state, by the name of the parameter and the key."""
        self.made: State = {}
        """The state that the optimizer makes in this step, with its real initial values."""
        self.from_gradients = False
        """Whether the optimizer computes some of it from gradients."""
        self._made_by: dict[tuple[str, str], Node] = {}
        """The nodes of the tensors that the optimizer stored in its state."""

    def _step(self, *inputs: Any) -> Any:
        for stand_in in self._stand_ins.values():
            stand_in.grad = None
        loss = self._program(self._model, inputs)
        loss.backward()
        self._optimize()
        self._keep_state()
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
                f"{name} branches on a number (one of {names}, or its step counter), so no graph holds for all of its "
                "values; leave it out of varying="
            )
        if self._fixed_step:
            return f"{name} branches on the values of parameters and gradients, so its step is not one graph"
        return (
            f"{name} branches on the value of its step counter, so no graph holds for all steps; capture one "
            "step with capture_step(..., fixed_step=True)"
        )

    @contextmanager
    def _state(self) -> Iterator[BorrowedModules]:
        state = BorrowedModules(self.fake_mode)
        try:
            state.borrow([(self._model, True)], self.tracer.constants)
            self.tracer.constants.without_gradient = True
            self._stand_ins = _named_parameters(self._model)
            pairs = {self._reals[name]: stand_in for name, stand_in in self._stand_ins.items()}
            self._shadow = self._shadow_of(pairs, {real: name for name, real in self._reals.items()})
            self._numbers = {
                (position, name): self._stand_in_as(f"group_{position}.{name}", number)
                for (position, name), number in self._varying.items()
            }
            yield state
        finally:
            state.give_back()

    def _shadow_of(self, stand_ins: dict[torch.Tensor, torch.Tensor], names: dict[torch.Tensor, str]) -> Any:
        """A copy of the optimizer that holds stand-ins for the parameters and for its state."""
        unknown = [p for group in self._optimizer.param_groups for p in group["params"] if p not in stand_ins]
        if unknown:
            raise ValueError(
                f"the optimizer has {len(unknown)} parameters that are not the model's: make it with model.parameters()"
            )
        shadow: Any = copy.copy(self._optimizer)
        shadow.__dict__ = _attributes_of(self._optimizer)
        shadow.param_groups = [
            {**self._options(position, group), "params": [stand_ins[p] for p in group["params"]]}
            for position, group in enumerate(self._optimizer.param_groups)
        ]
        shadow.state = StepState(
            {stand_in: names[parameter] for parameter, stand_in in stand_ins.items()}, self._store
        )
        for parameter, stand_in in stand_ins.items():
            entries = self._given.get(names[parameter])
            if entries:
                entries_of_trace = {
                    key: self._stand_in_for_entry(names[parameter], key, value)
                    for key, value in entries.items()
                }
                dict.update(shadow.state[stand_in], entries_of_trace)
        self._numbers_before = numbers_in(shadow)
        return shadow

    def _options(self, position: int, group: dict[str, Any]) -> dict[str, Any]:
        """The options of a group. Tensors among them, such as a learning rate, are read at each step."""
        leaves, structure = _torch.tree_flatten(
            {key: value for key, value in group.items() if key != "params"}
        )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return group
        names = leaf_names([(key, ()) for key in group if key != "params"], structure)
        replaced = [
            self._stand_in_as(f"group_{position}.{name}", leaf) if isinstance(leaf, torch.Tensor) else leaf
            for name, leaf in zip(names, leaves, strict=True)
        ]
        return dict(_torch.tree_unflatten(replaced, structure))

    def _stand_in_for_entry(self, parameter: str, key: str, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        stand_in = self._stand_in_as(state_name(parameter, key), value)
        self._note_entry(parameter, key, stand_in, value)
        return stand_in

    def _note_entry(self, parameter: str, key: str, stand_in: Any, value: torch.Tensor) -> None:
        """Register the stand-in of a state tensor, and its known values."""
        self._stand_in_of_entry[parameter, key] = stand_in
        if self._fixed_step and value.numel() == 1:
            self.stand_ins.remember_literal(stand_in, value.clone())
        elif key == COUNTER and is_torch_optimizer(self._optimizer) and value.numel() == 1:
            least = 0 if type(value) is FakeTensor else value.item()
            store_ranges(ValueRange(least, max(least, MOST_STEPS), False), [stand_in], is_written=False)

    def _stand_in_as(self, name: str, value: torch.Tensor) -> Any:
        """A stand-in for a tensor that is part of the state in the graph module."""
        stand_in = self.stand_ins.from_tensor(value, static_shapes=True)
        self._register(name, stand_in, value)
        return stand_in

    def _register(self, name: str, stand_in: Any, value: torch.Tensor) -> None:
        self.tracer.constants.expect(stand_in, value, f"{STATE}{name}")
        self._state_stand_ins.append(stand_in)

    def nodes_of_state(self) -> set[Node | None]:
        """The nodes that read the optimizer's state."""
        return set(map(self.tracer.constants.existing, self._state_stand_ins))

    # --- state that the optimizer makes in its first step ------------------------------------------------------

    def _store(self, parameter: str, key: str, value: object) -> Any:
        """Called when the optimizer stores the first value of a key: a tensor is made for real, and the graph reads it."""
        if not isinstance(value, torch.Tensor):
            self.made.setdefault(parameter, {})[key] = value
            return value
        node = self.tracer.node_of_tensor(value)
        self._made_by[parameter, key] = node
        # for real, or as stand-ins if the model's own parameters are stand-ins
        with _torch.NoFunctionModes(), _torch.no_modes(), _torch.grad_mode(False), self._below:
            real = self._make_initial(parameter, key, node, self.tracer.constants.value_read_by)
            if not self.from_gradients:
                self._adopt(parameter, key, value, real)
        return value

    def _make_initial(
        self, parameter: str, key: str, node: Node, read: Callable[[Node], Any]
    ) -> torch.Tensor:
        """The real initial value of a state tensor, which this node has made."""
        try:
            real = initial_value(node, read)
        except StateFromInputs:
            if not _begins_with_zeros(self._optimizer):
                raise ValueError(self._first_step_differs("its state is made from gradients")) from None
            real = lazy_zeros(node.meta["val"])
            self.from_gradients = True
        self.made.setdefault(parameter, {})[key] = real
        return real

    def _adopt(self, parameter: str, key: str, value: Any, real: torch.Tensor) -> None:
        """From now on, a tensor that the optimizer has made stands for its real initial value, which the graph reads."""
        if value._determined is not None:
            value._determined.forget()
        value._node = value._determined = None
        self._register(state_name(parameter, key), value, real)
        self._note_entry(parameter, key, value, real)

    def _first_step_differs(self, why: str) -> str:
        name = type(self._optimizer).__name__
        return f"the first step of {name} differs from later steps ({why}): take one step with the optimizer, then capture"

    def whole_state(self) -> State:
        """The optimizer's state before the step: existing entries, and new ones."""
        return {
            name: {**self._given.get(name, {}), **self.made.get(name, {})}
            for name in {**self._given, **self.made}
        }

    def check_same_step(self, first: GraphModule, later: GraphModule) -> None:
        """Raise if the step that created the state computes something else than a step with existing state."""
        if _calls_of(first) != _calls_of(later):
            raise ValueError(self._first_step_differs("it runs other operators"))

    def _keep_state(self) -> None:
        """Record that a state tensor that the optimizer has replaced is written; refuse numbers that it has changed."""
        for entries in self._shadow.state.values():
            for key, value in entries.items():
                stand_in = self._stand_in_of_entry.get((entries.name, key))
                if stand_in is not None and stand_in is not value and isinstance(value, torch.Tensor):
                    if not has_same_form(stand_in, value):
                        raise ValueError(
                            f"{type(self._optimizer).__name__} replaces its state {key!r} by a tensor of another shape, "
                            "dtype or device, so no graph holds for all steps"
                        )
                    stand_in.copy_(value)
        for node in self._made_by.values():
            _erase_writes(node)
        if not self._fixed_step:
            self._refuse_changed_numbers()

    def _refuse_changed_numbers(self) -> None:
        now = numbers_in(self._shadow)
        changed = [name for name, before in self._numbers_before.items() if now.get(name, before) != before]
        changed += [f"the entry {key!r} of its state" for key in sorted(self._shadow.state.changed)]
        if changed:
            raise ValueError(
                f"{type(self._optimizer).__name__} changes {changed[0]}, a plain number, at each step: the graph would hold "
                "it fixed. Keep it in a tensor, or capture one step with capture_step(..., fixed_step=True)"
            )


def _attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer for a copy of it, without a `step` that is bound to the original."""
    attributes = dict(vars(optimizer))
    step = attributes.pop("step", None)
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # schedulers only count the steps
        raise ValueError(
            f"expected the step method of {type(optimizer).__name__}, got {step!r} assigned to the object, which may not "
            "support stand-ins; capture before the assignment"
        )
    return attributes


def _erase_writes(node: Node) -> None:
    """Erase the writes that made a state tensor, which the graph reads as an attribute."""
    while isinstance(node.target, _torch.OpOverload) and _torch.is_mutable(node.target) and not node.users:
        written = node.args[0]
        assert isinstance(written, Node)
        node.graph.erase_node(node)
        node = written


def _begins_with_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether state that the first step makes from gradients equals what a later step computes from zeros."""
    return isinstance(optimizer, torch.optim.SGD) and all(
        group["dampening"] == 0 for group in optimizer.param_groups
    )


def _calls_of(graph_module: GraphModule) -> list[Any]:
    """What the nodes compute, without their names, and wherever attributes are read. Constants are numbered in each trace
    anew."""
    known: dict[Node, Any] = {}
    calls: list[Any] = []
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            known[node] = str(node.target).rstrip("0123456789")
        else:
            known[node] = len(calls)
            arguments = torch.fx.map_arg((node.args, node.kwargs), lambda read: str((Node, known[read])))
            calls.append((node.op, node.target, arguments))
    return calls


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
            held[group][str(node.target) if name in held[group] else name] = (
                node,
                _attribute_of(graph_module, node),
            )
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


def _attribute_of(graph_module: GraphModule, node: Node) -> Any:
    return functools.reduce(getattr, str(node.target).split("."), graph_module)


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
        attach(root, str(node.target), _attribute_of(graph_module, node))
    result: Any = _torch.lazy_graph_module(root, graph, "step")
    result.example_parameters = parameters
    result.example_state = state
    return result
