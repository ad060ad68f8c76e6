"""export: an ExportedProgram of torch, from one capture.

export              the public function
Recording           one run of the model
FunctionalProgram   the exported program: a subclass of torch's class with our decompositions
accelerate_export   `torch.export.export` and `torch.onnx.export` on our capture, for code that calls them
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import GraphModule, Node

from understudy import _torch
from understudy.capture.make_fx import Capture, CaptureOptions, TracingMode
from understudy.errors import UnsupportedOperatorException
from understudy.exporting.functional_forms import FunctionalTable
from understudy.exporting.functionalisation import functionalise
from understudy.exporting.inputs import GuardRecord, Inputs, check_requests, guard_code, read_inputs
from understudy.exporting.interop import TorchValues, convert_values
from understudy.exporting.signature import (
    Lifted,
    ModelState,
    check_leaves,
    check_results,
    lift,
    lift_retraced,
    make_signature,
    wrap_regions,
)
from understudy.fake.mode import FakeTensorMode
from understudy.fake.torch_api import maybe_get_fake_mode
from understudy.graph.borrowed_state import has_same_form
from understudy.graph.node_values import spec_of_val
from understudy.patching import ACCELERATION, EXPORTING, active, patch, patch_call
from understudy.shapes.env import ShapeEnv

Table = Mapping[Any, Callable[..., Any]]


def export(
    model: torch.nn.Module, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None, *,
    dynamic_shapes: object = None, decompositions: Table | None = None, strict: bool = False,
    preserve_module_call_signature: Sequence[str] = (), prefer_deferred_runtime_asserts_over_guards: bool = False,
    guard_zero_one: bool = True,
) -> ExportedProgram:  # fmt: skip
    """The program that `torch.export.export` returns for a model, much faster.

        batch, seq = dims("batch", "seq")
        ep = export(model, (ids,), dynamic_shapes={"input_ids": {0: batch, 1: seq}})

    `dynamic_shapes`: in any of torch's forms; `understudy.Dim` and names are accepted as well.
    `decompositions`: a table such as `torch.export.default_decompositions()`. The program is captured straight in the
    decomposed dialect, without writes; without a table it is in torch's training dialect.
    `guard_zero_one`: what the program asks about sizes of 0 and 1 (`if batch != 1:`) is a guard: where the answer is
    another one, the program is not run. `False`: it runs for these sizes, too, on the path of its example, as torch.export
    has it.
    Everything else is as in `torch.export.export`. `strict=True` asks for TorchDynamo's analysis, and is refused.
    """
    _check_arguments(model, args, strict)
    table = None if decompositions is None else _torch.materialise_table(decompositions)
    inputs = read_inputs(model, tuple(args), kwargs or {}, dynamic_shapes)
    check_leaves(inputs.names, inputs.leaves)
    preserved = tuple(preserve_module_call_signature)
    recording = Recording(
        model, inputs, prefer_deferred_runtime_asserts_over_guards, preserved, guard_zero_one
    )
    program = recording.capture(table).finish((tuple(args), dict(kwargs or {})))
    inputs.verify(program)
    return program


def _check_arguments(model: object, args: object, strict: bool) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"export: expected a torch.nn.Module, got {type(model).__name__}: put the function into a module"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "export: expected a module with Python code, got a ScriptModule; export the original module"
        )
    if not isinstance(args, tuple):
        raise ValueError(f"export: expected args as a tuple of example inputs, got {type(args).__name__}")
    if strict:
        raise ValueError(
            "export(strict=True): TorchDynamo's analysis is not available here; use strict=False, or "
            "torch.export.export(strict=True)"
        )


# --- flags that libraries check --------------------------------------------------------------------------------------


@patch("torch.compiler._is_compiling_flag", during=EXPORTING)
def report_compiling(original: bool) -> bool:
    """`torch.compiler.is_compiling()`: libraries choose traceable paths by it."""
    return True


@patch("torch._higher_order_ops.invoke_subgraph.invoke_subgraph_placeholder", during=EXPORTING)
def call_marked_region(original: Callable[..., object]) -> Callable[..., object]:
    """torch compiles regions that are marked by `nested_compile_region`; here they are parts of the program."""
    return lambda function, *args, **kwargs: function(*args, **kwargs)


@patch("torch.compiler._is_exporting_flag", during=EXPORTING)
def report_exporting(original: bool) -> bool:
    """`torch.compiler.is_exporting()`: libraries choose their paths for exports by it."""
    return True


# --- the capture -----------------------------------------------------------------------------------------------------


class Recording:
    """One model, and the inputs with which it is recorded."""

    def __init__(
        self, model: torch.nn.Module, inputs: Inputs, defers_asserts: bool, preserved: tuple[str, ...],
        guard_zero_one: bool,
    ) -> None:  # fmt: skip
        self.model, self.inputs = model, inputs
        self.guard_zero_one = guard_zero_one
        self.preserved = preserved
        self.state = ModelState.of(model)
        self.mode = self._choose_mode(defers_asserts)
        self.fakes = self._make_fakes()
        self.out_spec: Any = None
        self.calls: dict[str, CallRecorder] = {}

    def _choose_mode(self, defers_asserts: bool) -> FakeTensorMode:
        tensors = [*self.inputs.leaves, *self.state.parameters.values(), *self.state.buffers.values()]
        found = next((mode for mode in map(maybe_get_fake_mode, tensors) if mode is not None), None)
        if isinstance(found, FakeTensorMode) and (found.shape_env is not None or not self.inputs.is_dynamic):
            return found
        env = ShapeEnv(
            duck_shape=False,
            specialize_zero_one=False,
            prefer_deferred_runtime_asserts_over_guards=defers_asserts,
            trace_asserts=True,
        )
        return FakeTensorMode(
            shape_env=env, allow_non_fake_inputs=True, allow_fallback_kernels=True, export=True
        )

    def _make_fakes(self) -> list[Any]:
        """A stand-in for each tensor, a symbol for each dynamic number; other leaves unchanged."""
        env, fakes = self.mode.shape_env, []
        taken = {id(tensor) for tensor in (*self.state.parameters.values(), *self.state.buffers.values())}
        for leaf, name, request in zip(
            self.inputs.leaves, self.inputs.names, self.inputs.requests, strict=True
        ):
            if isinstance(leaf, torch.Tensor):
                if id(leaf) in taken:  # the program may be run with another tensor for this input
                    leaf = leaf.detach().requires_grad_(leaf.requires_grad)
                taken.add(id(leaf))
                if self.mode.is_our_fake(leaf) and request is None:
                    fakes.append(leaf)
                else:
                    context = request or {}
                    fakes.append(self.mode.from_tensor(leaf, source=name, symbolic_context=context))
            elif type(leaf) is int and request is not None and env is not None:
                low, high = getattr(request, "min", None), getattr(request, "max", None)
                fakes.append(env.create_symint(leaf, name, is_named=False, duck=False, low=low, high=high))
            else:
                fakes.append(leaf)
        return fakes

    def capture(self, table: Table | None) -> Captured:
        """Run the model once. Without a table it is recorded above autograd, else below, without writes."""
        is_training = table is None
        options = _options(table)
        if self.mode.shape_env is None:  # stand-ins of the user with static sizes
            options = replace(options, tracing_mode="fake")
        given = [fake for fake in self.fakes if isinstance(fake, (torch.Tensor, torch.SymInt))]
        is_grad_enabled = torch.is_grad_enabled()
        with active(EXPORTING), _torch.grad_mode(is_grad_enabled and is_training):
            module = Capture(self._program(), options).run(tuple(given))
        check_requests(self.mode.shape_env, self.inputs)
        return Captured(self, module, is_training, is_grad_enabled)

    def _program(self) -> Callable[..., Any]:
        """The model as a function of the tensor and symbolic inputs, which returns the leaves of the result."""
        model, fakes, spec = self.model, self.fakes, self.inputs.in_spec

        def run(*given: object) -> tuple[Any, ...]:
            remaining = iter(given)
            leaves = [next(remaining) if isinstance(f, (torch.Tensor, torch.SymInt)) else f for f in fakes]
            args, kwargs = _torch.tree_unflatten(leaves, spec)
            with _refuse_other_forms(model), self._record_calls():
                result = model(*args, **kwargs)
            flat, self.out_spec = _torch.tree_flatten(result)
            check_results(flat)
            return (*flat, *(value for notes in self.calls.values() for value in notes.values()))

        vars(run)["_orig_mod"] = model  # parameters keep the names that they have in it
        return run

    @contextmanager
    def _record_calls(self) -> Iterator[None]:
        """Inside, record the inputs and outputs of the modules whose signatures are preserved."""
        hooks = []
        for path in self.preserved:
            notes = self.calls[path] = CallRecorder()
            module = self.model.get_submodule(path)
            hooks.append(module.register_forward_pre_hook(notes.enter, with_kwargs=True))
            hooks.append(module.register_forward_hook(notes.leave, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _options(table: Table | None) -> CaptureOptions:
    if table is None:
        return CaptureOptions(
            tracing_mode="symbolic", allow_non_fake_inputs=True, pre_dispatch=True, record_module_stack=True,
            records_parts=False,
        )  # fmt: skip
    return CaptureOptions(
        decomposition_table=FunctionalTable(table), tracing_mode="symbolic", allow_non_fake_inputs=True,
        record_module_stack=True, whole=_torch.WholeComposites(table),
    )  # fmt: skip


@contextmanager
def _refuse_other_forms(model: torch.nn.Module) -> Iterator[None]:
    """Raise if a buffer is assigned a tensor of another shape or dtype: a program can only write to it."""
    before = dict(model.named_buffers(remove_duplicate=False))
    yield
    for path, value in model.named_buffers(remove_duplicate=False):
        buffer = before.get(path)
        if buffer is not None and value is not buffer and not has_same_form(buffer, value):
            raise UnsupportedOperatorException(
                f"the buffer {path} is {spec_of_val(buffer)}, and forward assigns {spec_of_val(value)} to it: an exported "
                "program can't change the shape or the dtype of a buffer"
            )


class CallRecorder:
    """Records the inputs and outputs of the first call of one module."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.in_spec: Any = None
        self.out_spec: Any = None

    def enter(self, module: object, args: object, kwargs: object) -> None:
        if self.in_spec is None:
            self.inputs, self.in_spec = _torch.tree_flatten((args, kwargs))

    def leave(self, module: object, args: object, kwargs: object, result: object) -> None:
        if self.out_spec is None:
            self.outputs, self.out_spec = _torch.tree_flatten(result)

    def values(self) -> list[Any]:
        """Its inputs and outputs that have nodes."""
        return [
            leaf for leaf in (*self.inputs, *self.outputs) if isinstance(leaf, (torch.Tensor, torch.SymInt))
        ]

    def signature(self, nodes: Iterator[object]) -> ModuleCallSignature:
        """`nodes`: those of `values()`."""
        inputs, outputs = (
            [
                _call_argument(next(nodes) if isinstance(leaf, (torch.Tensor, torch.SymInt)) else leaf)
                for leaf in leaves
            ]
            for leaves in (self.inputs, self.outputs)
        )
        return ModuleCallSignature(
            inputs=inputs, outputs=outputs, in_spec=self.in_spec, out_spec=self.out_spec
        )


def _call_argument(value: Any) -> Any:
    from torch.export.graph_signature import (  # why: only where signatures are preserved
        ConstantArgument,
        SymIntArgument,
        TensorArgument,
    )

    if not isinstance(value, Node):
        return ConstantArgument("", value)
    return (SymIntArgument if isinstance(value.meta.get("val"), torch.SymInt) else TensorArgument)(value.name)


def _take_last_results(module: GraphModule, count: int) -> Iterator[Any]:
    """Remove the last results of a graph, and return their nodes.

    Values in the signatures of modules are results of the capture: so they are not removed as dead code, and follow what
    passes make of them.
    """
    (output,) = module.graph.find_nodes(op="output")
    results: Any = output.args[0]
    kept = len(results) - count
    output.args = (tuple(results[:kept]),)
    return iter(results[kept:])


# --- the program -------------------------------------------------------------------------------------------------------


@dataclass
class Captured:
    """A captured graph, from which a program is made."""

    recording: Recording
    module: GraphModule
    is_training: bool
    is_grad_enabled: bool

    def finish(self, example: tuple[object, object]) -> FunctionalProgram:
        recording, module = self.recording, self.module
        state = recording.state
        inputs = list(zip(recording.inputs.names, recording.fakes, strict=True))
        with _torch.no_modes():
            lifted = lift(module, state, inputs, stand_ins(recording.mode))
            written = {} if self.is_training else functionalise(module)
            if self.is_training:
                wrap_regions(module, self.is_grad_enabled)
            calls = self._calls()
            _complete_metadata(module)
            signature = make_signature(module.graph, lifted, written)
            return self._program(lifted, signature, calls, example)

    def _program(
        self, lifted: Lifted, signature: object, calls: list[ModuleCallEntry], example: tuple[object, object]
    ) -> FunctionalProgram:
        recording = self.recording
        vals = [node.meta.get("val") for node in self.module.graph.find_nodes(op="placeholder")]
        values = TorchValues()
        env = recording.mode.shape_env
        user_vals = vals[len(vals) - len(recording.fakes) :]
        guards = guard_code(env, user_vals, recording.inputs.paths, recording.guard_zero_one)
        convert_values(self.module, values)
        return FunctionalProgram(
            self.module, signature, state_dict=recording.state.state_dict(),
            range_constraints=_range_constraints(values, user_vals), module_call_graph=calls, example_inputs=example,
            constants=lifted.constants, is_training=self.is_training, origin=Origin(recording.mode, vals, guards),
        )  # fmt: skip

    def _calls(self) -> list[ModuleCallEntry]:
        recording = self.recording
        nodes = _take_last_results(
            self.module, sum(len(notes.values()) for notes in recording.calls.values())
        )
        signatures = {
            path: notes.signature(nodes)
            for path, notes in recording.calls.items()
            if notes.out_spec is not None
        }
        root = ModuleCallSignature(
            [], [], recording.inputs.in_spec, recording.out_spec, recording.inputs.forward_names
        )
        entries = [
            ModuleCallEntry(path, signatures.get(path))
            for path, _ in recording.model.named_modules(remove_duplicate=False)
        ]
        entries[0].signature = root
        return entries


def stand_ins(mode: FakeTensorMode) -> Callable[[torch.Tensor], Any]:
    """A function from tensors of the model to their stand-ins in this mode."""
    return lambda tensor: tensor if mode.is_our_fake(tensor) else mode.from_tensor(tensor, static_shapes=True)


def _complete_metadata(module: GraphModule) -> None:
    """Every call gets an `nn_module_stack`; inputs and outputs do not."""
    stacks = (node.meta["nn_module_stack"] for node in module.graph.nodes if "nn_module_stack" in node.meta)
    root = dict(list(next(stacks, {}).items())[:1])
    for inner in module.modules():
        if not isinstance(inner, GraphModule):
            continue
        for node in inner.graph.nodes:
            if node.op in ("placeholder", "output"):
                node.meta.pop("nn_module_stack", None)
                node.meta.pop("stack_trace", None)
            else:
                # Not by `setdefault`, which would make pending values.
                if "nn_module_stack" not in node.meta:
                    node.meta["nn_module_stack"] = root
                if node.op == "call_function" and "val" not in node.meta:
                    node.meta["val"] = None


def _range_constraints(values: TorchValues, user_vals: Sequence[object]) -> dict[Any, Any]:
    """The ranges of the symbols, and those of sizes that are computed from them."""
    sizes = [size for val in user_vals if isinstance(val, torch.Tensor) for size in val.shape]
    converted = [
        values.convert(size) for size in (*sizes, *(v for v in user_vals if isinstance(v, torch.SymInt)))
    ]
    derived = {n.node.expr: values.symbols.range_of(n) for n in converted if isinstance(n, torch.SymInt)}
    return {**derived, **values.symbols.ranges()}


@dataclass(frozen=True)
class Origin:
    """The parts of the capture that a program keeps: the mode, the stand-ins of its placeholders, and its guards."""

    mode: FakeTensorMode
    vals: list[Any]
    guards: list[GuardRecord]

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        """A copy of the program has the same origin."""
        return self

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(
            "exported programs can't be pickled, as in torch; use torch.export.save and load"
        )


class FunctionalProgram(ExportedProgram):
    """An exported program with its capture."""

    def __init__(
        self, module: GraphModule, signature: Any, *, state_dict: Any, range_constraints: Any, module_call_graph: Any,
        example_inputs: Any, constants: Any, is_training: bool, origin: Origin,
    ) -> None:  # fmt: skip
        graph = module.graph
        graph.set_codegen(torch.fx.graph.CodeGen())
        self._graph_module = _torch.lazy_graph_module(_submodules(module), graph, "GraphModule")
        self._graph_signature = signature
        self._state_dict = state_dict
        self._range_constraints = range_constraints
        self._module_call_graph = module_call_graph
        self._example_inputs = example_inputs
        self._constants = constants
        self._verifiers = [_torch.training_verifier()] if is_training else [_torch.verifier()]
        self._guards_code = [guard.code for guard in origin.guards]
        self._origin = origin
        # Not validated here: torch's verifier would make the value of every node.

    def run_decompositions(
        self, decomp_table: Table | None = None, decompose_custom_triton_ops: bool = False
    ) -> ExportedProgram:
        """As in torch: the program in a decomposed dialect, by default with the core ATen table."""
        table = _torch.materialise_table(
            torch.export.default_decompositions() if decomp_table is None else decomp_table
        )
        vals = self._stand_ins()
        if vals is None or decompose_custom_triton_ops:  # the inputs were changed: use torch's implementation
            return super().run_decompositions(decomp_table, decompose_custom_triton_ops)
        return _decompose(self, vals, table)

    def _stand_ins(self) -> list[Any] | None:
        """The stand-ins of the placeholders, if these are still those of the capture."""
        names = [node.name for node in self.graph.find_nodes(op="placeholder")]
        return (
            self._origin.vals
            if names == [spec.arg.name for spec in self._graph_signature.input_specs]
            else None
        )


def _decompose(program: FunctionalProgram, vals: list[Any], table: Table) -> FunctionalProgram:
    """Retrace the graph of a program on its stand-ins."""
    module, origin = program.graph_module, program._origin
    is_given = [isinstance(val, (torch.Tensor, torch.SymInt)) for val in vals]
    calls = copy.deepcopy(program.module_call_graph)
    names = {node.name for node in module.graph.nodes}  # without those that a pass has removed since
    in_calls = [
        a
        for entry in calls[1:]
        if entry.signature
        for a in _node_arguments(entry.signature)
        if a.name in names
    ]
    interpreter = KeepingInterpreter(module, {argument.name for argument in in_calls})

    def run(*given: object) -> Any:
        remaining = iter(given)
        with torch.fx.traceback.preserve_node_meta():
            inputs = (next(remaining) if is_one else val for val, is_one in zip(vals, is_given, strict=True))
            return (*interpreter.run(*inputs), *(interpreter.kept[argument.name] for argument in in_calls))

    tracing_mode: TracingMode = "fake" if origin.mode.shape_env is None else "symbolic"
    options = replace(_options(table), record_module_stack=False, tracing_mode=tracing_mode)
    with active(EXPORTING), _torch.grad_mode(False):
        made = Capture(run, options).run(
            tuple(val for val, is_one in zip(vals, is_given, strict=True) if is_one)
        )
    signature = program.graph_signature
    specs = [
        InputSpec(spec.kind, copy.copy(spec.arg), spec.target, spec.persistent)
        for spec in signature.input_specs
    ]
    lifted = Lifted(specs, dict(program.constants))
    with _torch.no_modes():
        lift_retraced(made, lifted, vals, stand_ins(origin.mode))
        written = functionalise(made)
        for argument, node in zip(in_calls, _take_last_results(made, len(in_calls)), strict=True):
            argument.name = node.name
        _complete_metadata(made)
        new_signature = make_signature(made.graph, lifted, written, signature.output_specs)
        values = TorchValues()
        user_vals = [
            val
            for val, spec in zip(vals, signature.input_specs, strict=True)
            if spec.kind is InputKind.USER_INPUT
        ]
        convert_values(made, values)
    return FunctionalProgram(
        made, new_signature, state_dict=program.state_dict, range_constraints=_range_constraints(values, user_vals),
        module_call_graph=calls, example_inputs=program.example_inputs,
        constants=lifted.constants, is_training=False, origin=replace(origin, vals=vals),
    )  # fmt: skip


class KeepingInterpreter(torch.fx.Interpreter):
    """An interpreter that keeps the values of some nodes."""

    def __init__(self, module: GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self.names = names
        self.kept: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.name in self.names:
            self.kept[n.name] = value
        return value


def _node_arguments(signature: ModuleCallSignature) -> list[Any]:
    """The arguments and results of a module that are nodes."""
    return [
        argument for argument in (*signature.inputs, *signature.outputs) if not hasattr(argument, "value")
    ]


def _submodules(module: GraphModule) -> torch.nn.Module:
    """The subgraphs of a graph module, without parameters, which are inputs."""
    root = torch.nn.Module()
    for node in module.graph.find_nodes(op="get_attr"):
        setattr(root, str(node.target), getattr(module, str(node.target)))
    return root


# --- for code that calls torch.export -------------------------------------------------------------------------------

ACCELERATED: ContextVar[bool] = ContextVar("accelerated", default=False)


LINES_OF_REASON = 6
"""What went wrong, the operator, the line and what to do; or the first of the violated requests."""


class AccelerationWarning(UserWarning):
    """An export fell back to torch's own path."""


@contextmanager
def accelerate_export() -> Iterator[None]:
    """Inside, in this thread, `torch.export.export` captures with understudy, and so does `torch.onnx.export`, which calls
    it.

    If that fails, the program is exported by torch, with an `AccelerationWarning` that says why.
    """
    token = ACCELERATED.set(True)
    try:
        with active(ACCELERATION):
            yield
    finally:
        ACCELERATED.reset(token)


@patch_call("torch.export.export", during=ACCELERATION)
def capture_quickly(
    original: Callable[..., Any], mod: torch.nn.Module, args: Any, kwargs: Any = None, **options: Any
) -> Any:
    """Exports by our capture; if that fails, by torch's."""
    if not ACCELERATED.get() or options.get("strict"):
        return original(mod, args, kwargs, **options)
    token = ACCELERATED.set(False)
    try:
        return export(mod, args, kwargs, **options)
    except Exception as error:  # torch may still be able to export the program
        reason = "\n".join(str(error).splitlines()[:LINES_OF_REASON])
        warnings.warn(
            f"accelerate_export: torch's own export is used, because {type(error).__name__}: {reason}",
            AccelerationWarning, stacklevel=3,
        )  # fmt: skip
        return original(mod, args, kwargs, **options)
    finally:
        ACCELERATED.reset(token)
