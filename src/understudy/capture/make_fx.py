"""make_fx: run a function once on stand-ins or real tensors, and return the graph of the operators that ran.

names of inputs    from the signature of the function; names that clash with the code of a graph are changed
errors             an exception inside the traced function also shows the nodes recorded last
make_fx, Capture   one run: inputs become placeholders, modules are borrowed, the recorder is entered, the graph is
                   completed and put into a graph module. `capture_step` and subgraphs are captures of their own
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy.capture.borrowed_modules import BorrowedModules, modules_of
from understudy.capture.constant_values import ConstantValues
from understudy.capture.constants import ORIGINAL_PATH, OutsideTensors, restore_optimizers_after
from understudy.capture.graph_passes import insert_promises, make_writable, node_of_output, remove_dead_code
from understudy.capture.higher_order.torch_tracing import running
from understudy.capture.module_stack import recorded_modules, root_of
from understudy.capture.predispatch import PreDispatchTorchFunctionMode, settle
from understudy.capture.program_caches import ProgramCaches
from understudy.capture.recorder import ProxyTorchDispatchMode
from understudy.capture.tracer import OPEN, SYMBOLIC, PythonKeyTracer
from understudy.capture.unrecorded_effects.torch_functions import TorchFunctionMetadataMode
from understudy.errors import NotProvidedError
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.fake.torch_api import maybe_get_fake_mode
from understudy.graph import show
from understudy.graph.borrowed_state import no_collection, refuse_cycles
from understudy.graph.node_origins import mark_boundary
from understudy.graph.node_values import convert_to_fakes, set_val
from understudy.graph.random_state import KeptRandomState
from understudy.shapes.bindings import bindings_of_input
from understudy.shapes.env import ShapeEnv
from understudy.shapes.node import SymNode
from understudy.spec.call import map_structure


def argument_names(f: Callable[..., object], args: tuple[object, ...]) -> list[tuple[str, tuple[Any, ...]]]:
    """Name and default of each argument: from the signature, or arg0, arg1, … where that has none."""
    numbered: list[tuple[str, tuple[Any, ...]]] = [(f"arg{position}", ()) for position in range(len(args))]
    inner = inspect.unwrap(f)
    code = getattr(inner, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARARGS:
        return numbered
    parameters = list(inspect.signature(inner).parameters.values())
    if len(parameters) < len(args):
        return numbered
    return [
        (parameter.name, () if parameter.default is inspect.Parameter.empty else (parameter.default,))
        for parameter in parameters[: len(args)]
    ]


USED_BY_CODE = frozenset(
    {"self", "torch", "fx_pytree", "pytree", "device", "inf", "nan", "NoneType", "math", "operator", "_operator",
     "understudy", "getattr", "slice", "range", "float", "int", "bool", "complex", "len", "list", "tuple", "dict", "set",
     "frozenset"}
)  # fmt: skip
"""Names that the code of a graph may use: an input with such a name is renamed."""


def names_in_code(names: list[str]) -> list[str]:
    """The names of a program's inputs in the signature of its graph module."""
    chosen: list[str] = []
    for name in names:
        while name in USED_BY_CODE or name in chosen:
            name += "_"
        chosen.append(name)
    return chosen


def name_of(f: Callable[..., object]) -> str:
    return getattr(f, "__name__", None) or type(f).__name__


def leaf_names(names: list[tuple[str, tuple[Any, ...]]], in_spec: object) -> list[str]:
    """The name of each leaf of the arguments: `x`, or `x_1`, `x_2`, … for the leaves of a structure."""
    result = []
    for (name, _), part in zip(names, _torch.children(in_spec), strict=True):
        if _torch.is_leaf(part):
            result.append(name)
        else:
            result.extend(f"{name}_{count}" for count in range(1, part.num_leaves + 1))
    return result


# --- Errors inside a traced function show the last recorded nodes -----------------------------------------

SHOWN_NODES = 4
"""How many recorded nodes an error shows."""


def add_last_nodes(error: Exception, graph: Graph) -> None:
    """Add the last recorded nodes to an error, once."""
    notes = getattr(error, "__notes__", [])
    if any(note.startswith(HEAD) for note in notes):
        return
    nodes = [node for node in graph.nodes if node.op != "output"][-SHOWN_NODES:]
    if not nodes:
        return
    text = "\n".join(
        [f"{HEAD} {len(graph.nodes)} nodes, the last of them:", *(f"    {line_of(node)}" for node in nodes)]
    )
    vars(error)["__notes__"] = [*notes, text]


HEAD = "while make_fx was tracing: it had recorded"


def line_of(node: Node) -> str:
    """`mul = aten.mul.Tensor(x_1, 2)    f32[2, 3]@cpu`"""
    shown = ", ".join([*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())])
    call = (
        f"{node.name} = {node.target}({shown})" if node.op == "call_function" else f"{node.name}  ({node.op})"
    )
    return f"{call}    {describe_val(node.meta.get('val'))}".rstrip()


def describe_val(val: object) -> str:
    if isinstance(val, torch.Tensor):
        return show.describe_val(val)
    if isinstance(val, (list, tuple)):
        return ", ".join(map(describe_val, val))
    return "" if val is None else str(val)


# --- make_fx --------------------------

TracingMode = Literal["real", "fake", "symbolic"]
MODES: tuple[TracingMode, ...] = get_args(TracingMode)


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The options of a capture: the keywords of `make_fx`."""

    decomposition_table: Mapping[Any, Callable[..., Any]] | None = None
    tracing_mode: TracingMode = "real"
    allow_non_fake_inputs: bool = False
    pre_dispatch: bool = False
    record_module_stack: bool = False
    allow_fake_constant: bool = False
    error_on_data_dependent_ops: bool = True
    proxy_module_inputs: bool = False
    torch_functions: bool = True
    records_parts: bool = True
    """Above autograd: also record the inner operators of composites, for a backward pass inside the program."""
    knows_constants: bool = False
    """Whether values of parameters and buffers are constants of the graph: see `Constants.read_value`."""
    whole: Container[Any] | None = None
    """Composite operators that are recorded without decomposition. Autograd, which would decompose them, is skipped."""


def make_fx(
    f: Callable[..., object], decomposition_table: Mapping[Any, Callable[..., Any]] | None = None,
    tracing_mode: TracingMode = "real", _allow_non_fake_inputs: bool = False, *, pre_dispatch: bool = False,
    record_module_stack: bool = False, allow_non_fake_inputs: bool = False, _allow_fake_constant: bool = False,
    _error_on_data_dependent_ops: bool = True,
    record_stack_traces: bool = True, proxy_module_inputs: bool = False, _disable_torch_fn_metadata_mode: bool = False,
    dynamic_shapes: object = None,
) -> Callable[..., GraphModule]:  # fmt: skip
    """A function that runs `f` once on its arguments and returns the graph of the operators that ran.

        gm = make_fx(f, tracing_mode="symbolic")(torch.randn(8, 128))
        gm(torch.randn(3, 50))

    `tracing_mode`: "real" runs the operators, "fake" runs stand-ins of the same sizes, "symbolic" makes sizes symbols:
    the graph is then valid for all sizes that satisfy the guards of `gm.shape_env`.
    `decomposition_table`: operator → the function that replaces it. `pre_dispatch`: record above autograd and autocast.
    `allow_non_fake_inputs` (torch's name for it is `_allow_non_fake_inputs`): in fake and symbolic mode, real tensors that
    the function refers to, besides those of its modules, are constants of the graph; without it they are an error.
    `record_module_stack`: `node.meta["nn_module_stack"]` holds the modules that were being called.
    """
    if dynamic_shapes is not None or _torch.has_declared_shapes(f):
        raise NotProvidedError(
            "make_fx does not read torch's declarations of dynamic sizes (dynamic_shapes=, @dynamic_spec). Use "
            "tracing_mode='symbolic', which makes every size symbolic, or pass inputs made by "
            "mode.from_tensor(x, symbolic_context=(dim, 'static', …)) with the dims of understudy.dims"
        )
    if tracing_mode not in MODES:
        raise ValueError(f"tracing_mode must be one of {', '.join(map(repr, MODES))}, got {tracing_mode!r}")
    options = CaptureOptions(
        decomposition_table, tracing_mode, allow_non_fake_inputs or _allow_non_fake_inputs, pre_dispatch,
        record_module_stack, _allow_fake_constant, _error_on_data_dependent_ops, proxy_module_inputs,
        torch_functions=not _disable_torch_fn_metadata_mode, knows_constants=True,
    )  # fmt: skip

    @functools.wraps(f)
    def trace(*args: object) -> GraphModule:
        try:
            return Capture(f, options).run(args)
        except RecursionError:
            refuse_cycles(args)
            raise

    return trace


class Capture:
    """One run of one function under a recorder."""

    def __init__(
        self, f: Callable[..., object], options: CaptureOptions, outer: Capture | None = None
    ) -> None:
        self.f = f
        self.options = options
        self.outer = outer
        self.tracer = PythonKeyTracer()
        if options.tracing_mode != "real" and outer is None:
            self.tracer.random_state = KeptRandomState()
        self.tracer.constants.knows_values = options.knows_constants
        if outer is not None:
            self.tracer.constants.outer = outer.tracer.constants
        self.fake_mode: FakeTensorMode | None = None
        self.constant_values: ConstantValues | None = None
        self.recorder: ProxyTorchDispatchMode
        self._modules_given: list[torch.nn.Module] = []

    def run(self, args: tuple[object, ...]) -> GraphModule:
        if self.options.tracing_mode == "real":  # real tensors may be large: garbage collection stays enabled
            return self._run(args)
        with no_collection():
            return self._run(args)

    def _run(self, args: tuple[object, ...]) -> GraphModule:
        leaves, in_spec = _torch.tree_flatten(args)
        self.fake_mode = self.outer.stand_ins if self.outer is not None else self._mode_for(leaves)
        if self.fake_mode is not None:
            self.tracer.shape_env = self.fake_mode.shape_env
        names = argument_names(self.f, args)
        inputs = list(map(self._as_input, leaves, leaf_names(names, in_spec)))
        self.recorder = ProxyTorchDispatchMode(
            self.tracer, self.options.tracing_mode, self.options.pre_dispatch, self.options.allow_fake_constant,
            self.options.error_on_data_dependent_ops, self.options.decomposition_table,
        )  # fmt: skip
        self.recorder.records_parts = self.options.records_parts
        self.recorder.whole = self.options.whole or ()
        self._make_placeholders(names, in_spec, inputs)
        self._bind_symbols_of_data(inputs)
        with ExitStack() as restore:
            restore.callback(self._close, inputs)
            OPEN.add(self.tracer.graph)
            has_constants = self.options.knows_constants or self.options.allow_non_fake_inputs
            if self.fake_mode is not None and self.outer is None and has_constants:
                self.constant_values = ConstantValues(self.fake_mode, self.tracer.constants)
            self._modules_given = [
                value
                for value in inputs
                if type(value) is not FakeTensor and isinstance(value, torch.nn.Module)
            ]
            with self._state() as state:
                given = self._call_arguments(inputs) if self.options.proxy_module_inputs else inputs
                result = self._run_program(_torch.tree_unflatten(given, in_spec), state)
                out_spec = self._finish(result)
        return self._graph_module(names, in_spec, out_spec)

    def _close(self, inputs: list[Any]) -> None:
        """Remove references to the trace from objects that existed before."""
        OPEN.remove(self.tracer.graph)
        if self.tracer.random_state is not None:
            self.tracer.random_state.restore()
        if self.constant_values is not None:
            self.constant_values.forget()
        self.tracer.constants.put_back()
        self.tracer.node_meta.close()
        for leaf in inputs:
            if type(leaf) is FakeTensor and leaf._node is not None and leaf._node.graph is self.tracer.graph:
                leaf._node = None

    # --- subgraphs -----------------------------------------------------------------------------

    @functools.cached_property
    def stand_ins(self) -> FakeTensorMode:
        """The mode in which branches are traced. They run on stand-ins even if the program runs for real, because only
        one of them may touch data."""
        mode = self.fake_mode or _torch.active_fake_mode()
        if type(mode) is FakeTensorMode:
            return mode
        return FakeTensorMode(
            shape_env=ShapeEnv(trace_asserts=True), static_shapes=True, allow_non_fake_inputs=True
        )

    def subgraph(
        self,
        f: Callable[..., object],
        args: tuple[object, ...],
        table: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> GraphModule:
        """Trace a branch."""
        is_real = self.options.tracing_mode == "real"
        options = replace(
            self.options,
            tracing_mode="fake" if is_real else self.options.tracing_mode,
            decomposition_table=self.options.decomposition_table if table is None else table,
        )
        return type(self)(f, options, outer=self).run(args)

    # --- before ----------------------------------------------------------------------------------------------

    def _mode_for(self, leaves: list[Any]) -> FakeTensorMode | None:
        """The fake mode of the inputs; else the active one; else a new one."""
        given = _mode_among(leaves)
        self.tracer.constants.mode_of_program = given or self.tracer.constants.mode_of_program
        if self.options.tracing_mode == "real":
            return None
        found = given or _torch.active_fake_mode()
        if found is None:
            is_static = self.options.tracing_mode == "fake"
            env: ShapeEnv | None = None
            for leaf in leaves:
                if type(leaf) in SYMBOLIC and type(leaf.node) is SymNode:
                    env = leaf.node.shape_env
                    break
            made = FakeTensorMode(
                shape_env=env or ShapeEnv(trace_asserts=True), static_shapes=is_static,
                allow_non_fake_inputs=self.options.allow_non_fake_inputs,
                allow_fallback_kernels=True,
            )  # fmt: skip
            made.can_skip_dispatch = False  # every operator is recorded: no stand-in has to look for a recipe
            return made
        if self.options.tracing_mode == "symbolic" and found.shape_env is None:
            raise ValueError(
                'make_fx(tracing_mode="symbolic"): the inputs belong to a FakeTensorMode without shape_env; make it with '
                "FakeTensorMode(shape_env=ShapeEnv())"
            )
        return found

    def _as_input(self, leaf: object, name: str) -> Any:
        mode = self.fake_mode
        if mode is None:
            return leaf
        if self.outer is not None:
            inner = _torch.innermost(leaf)
            return leaf if _torch.is_stand_in(inner) else convert_to_fakes(mode, inner)
        if isinstance(leaf, torch.Tensor):
            return leaf if mode.is_our_fake(leaf) else mode.from_tensor(leaf, source=name)
        if type(leaf) is int and self.options.tracing_mode == "symbolic":
            return mode.shape_env.create_symint(leaf, name)
        return leaf

    def _make_placeholders(self, names: list[tuple[str, Any]], in_spec: object, inputs: list[Any]) -> None:
        """`x_1`, or `x_1, x_2, …` for an argument that is a structure."""
        remaining = iter(inputs)
        for (name, default), part in zip(names, _torch.children(in_spec), strict=True):
            for count in range(1, part.num_leaves + 1):
                node = self.tracer.placeholder(f"{name}_{count}", default)
                if name in USED_BY_CODE:
                    node.meta[ORIGINAL_PATH] = name
                self._bind_input(next(remaining), node)

    def _bind_symbols_of_data(self, inputs: list[Any]) -> None:
        """Bind unbacked sizes of inputs (`torch._dynamo.mark_unbacked`) to the inputs."""
        env = getattr(self.fake_mode or _torch.active_fake_mode(), "shape_env", None)
        if type(env) is ShapeEnv and env.pending_fresh_unbacked_symbols and self.outer is None:
            for node, value in zip(self.tracer.graph.find_nodes(op="placeholder"), inputs, strict=True):
                bindings = bindings_of_input(env, value)
                if bindings is not None:
                    node.meta["unbacked_bindings"] = bindings

    def _bind_input(self, value: object, node: Node) -> None:
        """Register the placeholder of an input."""
        tracer = self.tracer
        if self.outer is not None:
            value = _torch.innermost(value)
        set_val(node, value)
        if isinstance(value, torch.Tensor):
            # If one tensor is given twice, the last placeholder is read, as in torch's graphs.
            if self.outer is None or tracer.find_node(value) is None:
                tracer.remember(value, node)
            if type(value) is FakeTensor:
                tracer.symbols.bind_tensor(value._spec, node)
            elif not value.is_nested or self.fake_mode is not None:
                tracer.symbols.bind_symbols_of(value, node)
        elif isinstance(value, SYMBOLIC):
            tracer.symbols.bind(value, node)
        elif isinstance(value, torch.ScriptObject):
            tracer.script_object_tracker[value] = tracer.proxy(node)

    def _call_arguments(self, inputs: list[Any]) -> list[Any]:
        """The arguments of `f` with `proxy_module_inputs`: the inputs, with modules replaced by proxies."""
        placeholders = self.tracer.graph.find_nodes(op="placeholder")
        return [
            self.tracer.proxy(node) if isinstance(value, torch.nn.Module) else value
            for node, value in zip(placeholders, inputs, strict=True)
        ]

    @contextmanager
    def _state(self) -> Iterator[BorrowedModules]:
        """Borrow the modules that `f` refers to or gets as arguments, if stand-ins are traced."""
        state = BorrowedModules(self.fake_mode, self.constant_values)
        given = [(module, False) for module in self._modules_given]
        modules = [] if self.outer is not None else [*modules_of(self.f), *given]
        try:
            state.borrow(modules, self.tracer.constants)
            yield state
        finally:
            state.give_back()

    # --- the run ---------------------------------------------------------------------------------------------

    def _run_program(self, args: object, state: BorrowedModules) -> Any:
        below = nullcontext() if self.options.whole is None else _torch.below_autograd()
        surroundings = self._surroundings(state)
        has_modules = self.options.record_module_stack or self.outer is not None
        with (
            self.fake_mode or nullcontext(),
            surroundings,
            running(self),
            below,
            self.recorder,
            self._modules() if has_modules else nullcontext() as stack,
        ):
            self.tracer.node_meta.module_stack = stack
            with disable_autocast_cache():  # casts cached before the trace have no nodes
                try:
                    result = _call_program(self.f, args)
                    _call_program(state.record_assigned, ())
                    return result
                except Exception as error:
                    add_last_nodes(error, self.tracer.graph)
                    raise

    @contextmanager
    def _surroundings(self, state: BorrowedModules) -> Iterator[None]:
        """The global settings of the run, besides its modes."""
        options, mode = self.options, self.fake_mode
        # torch's Python decompositions check whether a recorder above autograd is active
        above = _torch.python_versions() if options.pre_dispatch else nullcontext()
        regions = PreDispatchTorchFunctionMode(self.tracer) if options.pre_dispatch else nullcontext()
        names = TorchFunctionMetadataMode(self.tracer) if options.torch_functions else nullcontext()
        if mode is None or self.outer is not None:
            with above, regions, names:
                yield
            return
        cached = ProgramCaches(self.f, state.parts, mode)
        self.tracer.outside_tensors = OutsideTensors(self.tracer.constants, mode, cached)
        sizes = cached.accept_symbols() if options.tracing_mode == "symbolic" else nullcontext()
        try:
            with above, regions, sizes, restore_optimizers_after(), names:
                yield
        finally:
            cached.empty()

    @contextmanager
    def _modules(self) -> Iterator[Callable[[], Any] | None]:
        """The context that tracks the module stack, if it is recorded."""
        if self.outer is not None:
            yield self.outer.tracer.node_meta.module_stack
            return
        if not self.options.record_module_stack:
            yield None
            return
        with recorded_modules(root_of(self.f)) as modules:
            yield None if modules is None else modules.current

    # --- after -----------------------------------------------------------------------------------------------

    def _finish(self, result: object) -> Any:
        """Add the output node; returns the structure of the output."""
        # A `torch.Size` is returned as a tuple, which compares equal and needs no pytree spec.
        if type(result) is not FakeTensor:
            result = map_structure(tuple, torch.Size, result)
        leaves, out_spec = _torch.tree_flatten(result)
        if self.outer is not None:  # a branch, possibly inside a transform
            leaves = list(map(_torch.innermost, leaves))
        nodes = [node_of_output(self.tracer, leaf) for leaf in leaves]
        is_plain = _torch.is_plain_structure(out_spec)
        self.tracer.graph.output(_torch.tree_unflatten(nodes, out_spec) if is_plain else nodes)
        if self.tracer.parts:
            settle(self.tracer)
        self.tracer.constants.check_reads()
        make_writable(self.tracer.graph)
        remove_dead_code(self.tracer.graph)
        insert_promises(self.tracer.graph, self.tracer.shape_env, is_inner=self.outer is not None)
        if self.options.pre_dispatch:  # may include inner operators of composites
            _torch.renumber_calls(self.tracer.graph)
        return out_spec

    def _graph_module(self, names: Any, in_spec: object, out_spec: object) -> GraphModule:
        graph = self.tracer.graph
        structured = not all(map(_torch.is_leaf, _torch.children(in_spec)))
        if structured or not _torch.is_plain_structure(out_spec):
            (output,) = graph.find_nodes(op="output")
            output.args = (_torch.tree_flatten(output.args[0])[0],)
            graph.set_codegen(
                _torch.structured_code(names_in_code([name for name, _ in names]), in_spec, out_spec)
            )
        gm = self.tracer.constants.graph_module(graph, name_of(self.f))
        if self.fake_mode is not None and self.options.tracing_mode == "symbolic":
            gm.shape_env = self.fake_mode.shape_env
        return gm


@contextmanager
def disable_autocast_cache() -> Iterator[None]:
    """Inside, autocast casts a weight each time: a cached cast would have no node in the graph."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _mode_among(leaves: Iterable[object]) -> FakeTensorMode | None:
    """The fake mode of the first stand-in among these."""
    return next((mode for mode in map(maybe_get_fake_mode, leaves) if mode is not None), None)


@mark_boundary
def _call_program(f: Callable[..., object], args: Any) -> Any:
    return f(*args)
