"""MetaTracer: a torch-level symbolic trace in which every value knows its metadata."""

from __future__ import annotations

import inspect
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy.contexts import contextmanager, run_to_the_end
from understudy.errors import UnderstudyError
from understudy.fake.inputs import describe_tensors
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import no_collection, refuse_cycles
from understudy.graph.node_origins import locate_error, mark_boundary
from understudy.graph.node_values import NodeMeta, set_val, snapshot
from understudy.graph.random_state import KeptRandomState
from understudy.meta import functions, modules
from understudy.meta.arguments import CallResults, NodeArguments, SizeNodes
from understudy.meta.derivation import CALLS, Derivation, RefusedCall, method_call, module_call, override_for
from understudy.meta.errors import (
    MetaTraceError,
    make_left_over_error,
    make_refused_error,
)
from understudy.meta.functions import VmapBody, erase_empty_regions
from understudy.meta.inputs import ExampleInputs, TraceInputs
from understudy.meta.modules import ORIGINAL_PATH, AssignedAttributes, clear_caches_of
from understudy.meta.patches import patch_calls
from understudy.meta.proxies import (
    UNKNOWN,
    MetaProxy,
    attribute,
    is_fact,
    iterate,
    make_proxy,
    move_to_node,
    proxies_in,
    read_own,
)
from understudy.meta.structures import holds, is_stand_in, transform

ENDS = ("placeholder", "output")
READS = ("get_attr", "call_module")
"""Nodes whose target is a path into the root."""


class MetaTracer(torch.fx.Tracer):
    """`torch.fx.Tracer` with metadata: the traced Python code can read the shape of a value.

        graph = MetaTracer().trace(model, meta_args={"x": torch.empty(8, 128)})

    Modules of `torch.nn` are leaves, others are traced through (`is_leaf_module` decides, as in fx).
    `allow_insert_stateless_mods`: a module without parameters that the program makes is added to the root.
    """

    allow_insert_stateless_mods: bool = True
    proxy_buffer_attributes: bool = True

    root: torch.nn.Module
    is_over: bool = False
    random_state: KeptRandomState | None = None
    derivation: Derivation
    symbols: SizeNodes
    arguments: NodeArguments

    def __init__(
        self,
        autowrap_modules: tuple[Any, ...] = (math,),
        autowrap_functions: tuple[Callable[..., object], ...] = (),
        param_shapes_constant: bool = True,
    ) -> None:
        super().__init__(autowrap_modules, autowrap_functions, param_shapes_constant)
        self._searched = autowrap_modules
        self._whole = {id(function) for module in autowrap_modules for function in vars(module).values()}
        self._whole.update(map(id, autowrap_functions))
        self._called: Any = None
        """The module that is being called, and its forward."""
        self.shape_env: Any = None
        self.node_meta = NodeMeta()

    # --- tracing -------------------------------------------------------------------------------------------------

    def trace(  # type: ignore[override]
        self,
        root: torch.nn.Module | Callable[..., object],
        meta_args: Mapping[str, object] | None = None,
        concrete_args: Mapping[str, object] | None = None,
        *,
        symbolic: bool | Mapping[str, object] = False,
    ) -> Graph:
        """The graph of a module or a function.

        `meta_args`: examples (real, meta or fake tensors, or structures of them) by the names of the arguments.
        `concrete_args`: arguments that are fixed.
        `symbolic`: sizes of the examples are symbols; or, by the names of arguments, which: `{"x": dims("batch")}`.
        """
        if meta_args is not None and not isinstance(meta_args, Mapping):
            raise TypeError(
                f"meta_args maps names of arguments to examples; it is a {type(meta_args).__name__}"
            )
        function = self._begin(root, meta_args, symbolic)
        state = AssignedAttributes(self.root, function)
        pending = [] if self.shape_env is None else self.shape_env.pending_fresh_unbacked_symbols
        were_pending = len(pending)
        with run_to_the_end(lambda: self._close(state, pending, were_pending)):
            whole = self._wrapped_functions(function)
            try:
                with no_collection(), patch_calls(self, whole), self.recording:
                    self._record(root, function, TraceInputs(self, meta_args, concrete_args or {}), state)
            except BaseException as error:
                while self.arguments.added:
                    vars(self.root).pop(self.arguments.added[-1], None)
                    self.arguments.added.pop()
                if isinstance(error, RecursionError):
                    refuse_cycles(meta_args, path="meta_args")
                raise
        self.graph._tracer_extras = {"meta_args": meta_args}
        return self.graph

    def _close(self, state: AssignedAttributes, pending: list[Any], were_pending: int) -> None:
        """Remove references to the trace from objects that existed before. An interrupt may cause a second call."""
        state.restore()
        if self.random_state is not None:
            self.random_state.restore()
        self.derivation.warn()
        self.node_meta.close()
        self.arguments.forget_tuples()
        del pending[were_pending:]  # their nodes are in the graph
        clear_caches_of(self.tensors)
        self.submodule_paths = None
        self.is_over = True

    def _begin(self, root: Any, meta_args: Mapping[str, object] | None, symbolic: object) -> Callable[..., object]:
        is_module = isinstance(root, torch.nn.Module)
        if isinstance(root, GraphModule):
            _torch.write_code(root)
        self.root = root if is_module else torch.nn.Module()
        function: Callable[..., Any] = getattr(root, self.traced_func_name) if is_module else root
        self.submodule_paths = {module: name for name, module in root.named_modules()} if is_module else {}
        self.graph = Graph(tracer_cls=type(self))
        self.module_stack.clear()
        self.num_calls: dict[str, int] = {}
        self.tensor_attrs: dict[Any, str] = {}
        self.generators: dict[int, tuple[torch.Generator, Node]] = {}
        self.random_state = KeptRandomState()
        examples = ExampleInputs(self.root, meta_args, symbolic)
        self._examples = examples
        self.shape_env = examples.env
        self.is_over = False
        self.recording = functions.FunctionRecorder(self)
        self.derivation = Derivation(examples.mode, self.recording)
        self.symbols = SizeNodes(self)
        self.arguments = NodeArguments(self, self.root)
        self.hollow = _torch.hollow()
        self._bodies: list[VmapBody] = []
        self._appender = _torch.NodeAppender(self.graph)
        self._base_names: dict[int, tuple[Any, str]] = {}
        """By the identity of a target: the target, and the base name of its nodes."""
        self._stack_copy: tuple[str, Any] | None = None
        """The innermost module, and its `nn_module_stack`: a key of the stack stands for one call."""
        self._refused: list[Node] = []
        self.results = CallResults(self)
        self.tensors: list[weakref.ref[Any]] = []
        """Weak references to all tensor proxies: those alive after the trace are held by something else."""
        return function

    def _entry(self, root: Any, function: Callable[..., object]) -> Callable[..., object]:
        """The function to call: a module with hooks is called with its hooks."""
        has_hooks = isinstance(root, torch.nn.Module) and (root._forward_hooks or root._forward_pre_hooks)
        self._is_entering = bool(has_hooks) and self.traced_func_name == "forward"
        return root if self._is_entering else function

    def _record(self, root: object, function: Callable[..., object], inputs: TraceInputs, state: AssignedAttributes) -> None:
        entry = self._entry(root, function)
        args, kwargs = inputs.arguments(function, by_position=entry is not function)
        self._examples.check_names()
        result = _program(entry, args, kwargs)
        state.record_assigned_buffers(self)
        self._end(function, result)

    def _end(self, function: Callable[..., object], result: object) -> None:
        returned = inspect.get_annotations(inspect.unwrap(function)).get("return")
        if isinstance(returned, str):
            returned = None  # annotations may refer to names that the graph does not have
        self.create_node("output", "output", (self.create_arg(result),), {}, type_expr=returned)
        for node in self._refused:  # the program caught the error
            node.graph.erase_node(node)
        self.results.erase_unused_parts()
        erase_empty_regions(self.graph)

    def _wrapped_functions(self, function: Callable[..., object]) -> list[tuple[object, str]]:
        """The functions that become nodes when they are called with traced values: (namespace, name)."""
        found = _torch.functions_wrapped_for_fx()
        spaces = [vars(module) for module in self._searched]
        spaces.append(getattr(inspect.unwrap(function), "__globals__", {}))
        for space in spaces:
            found += [
                (space, name)
                for name, value in space.items()
                if not name.startswith("_") and callable(value) and id(value) in self._whole
            ]
        unique = {(id(space), name): (space, name) for space, name in found}
        return list(unique.values())

    # --- recording -----------------------------------------------------------------------------------------------

    @property
    def is_deriving(self) -> bool:
        return self.derivation.is_active

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: object = None
    ) -> Node:
        path = self.arguments.safe_path(target) if kind in READS else target
        if kind in ENDS or name is not None or type_expr is not None:
            node = super().create_node(kind, path, args, kwargs, name, type_expr)
        else:
            node = self._append_node(kind, path, args, kwargs)
        if kind not in ENDS:
            self.node_meta.mark(node)
        if path is not target:
            node.meta[ORIGINAL_PATH] = target
        return node

    def _append_node(self, kind: str, target: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Node:
        """As `torch.fx.Tracer.create_node`, without checks of the arguments, which are nodes and literals already."""
        base = self._base_names.get(id(target))
        if base is None:
            base = target, self.graph._target_to_str(target)
            self._base_names[id(target)] = base
        if self._appender.graph is not self.graph:
            self._appender = _torch.NodeAppender(self.graph)
        node = self._appender.node(kind, base[1], target, args, kwargs)
        self.node_name_to_scope[node.name] = self.scope.module_path, self.scope.module_type
        stack = self.module_stack
        if stack:
            innermost = next(reversed(stack))
            if self._stack_copy is None or self._stack_copy[0] != innermost:
                self._stack_copy = innermost, type(stack)(stack)
            node.meta["nn_module_stack"] = self._stack_copy[1]
        return node

    def proxy_of(self, tensor: torch.Tensor) -> MetaProxy:
        """A real tensor, of the root or a constant, as a traced value."""
        return make_proxy(self, self.create_arg(tensor), self.derivation.stand_in(tensor))

    def last_node(self) -> Node:
        return _torch.last_node(self.graph)

    def append_call(self, target: object, args: object, kwargs: object, name: str | None = None) -> Node:
        """Append a call whose arguments are nodes and literals already."""
        return self.create_node("call_function", target, args, kwargs, name)

    def record_state(self, kind: str, target: Any, args: Any, kwargs: Any, result: object) -> tuple[Node, Any]:
        """Record a call that reads or changes the state of a generator, or of the process."""
        meta = self.derivation.stand_in(result) if isinstance(result, torch.Tensor) else None
        node = self.node_for(kind, target, args, kwargs, meta)
        return node, result if meta is None else self.results.present(node, meta)

    def create_arg(self, a: object) -> Any:
        return self.arguments.argument(a)

    def create_proxy(
        self, kind: str, target: object, args: object, kwargs: object, name: str | None = None, type_expr: object = None,
        proxy_factory_fn: object = None,
    ) -> Any:  # fmt: skip
        """Run a call on metadata and record it. Facts about tensors are returned without a node."""
        if self.is_over:
            raise make_left_over_error(str(target))
        with self.derivation.suspend_recording():
            return self._derive_and_record(kind, target, args, kwargs, name, type_expr)

    def _derive_and_record(
        self, kind: str, target: object, args: object, kwargs: object, name: str | None, type_expr: object
    ) -> Any:
        try:
            meta = self._derive(kind, target, args, kwargs)
        except RefusedCall as refused:
            node = self._node(kind, target, args, kwargs, name, type_expr)
            self._refused.append(node)
            raise locate_error(refused.error, node, refused.inputs) from refused.error
        if self._answers(kind, target, args, meta) and not any(self.results.fresh_numbers(meta)):
            return meta
        same = self._find_same(kind, target, args, kwargs, meta)
        node = self.node_for(kind, target, args, kwargs, meta, name, type_expr)
        return self.results.present(node, meta) if same is None else self._move_to_node(same, node)

    def _find_same(self, kind: str, target: object, args: Any, kwargs: Any, meta: object) -> Any:
        """The argument that a call returns itself, as `x.add_(1)` and `x.contiguous()` may: `is` has to work.

        Only for torch's functions: others may return something else when the graph runs, as `nn.Dropout` in training mode.
        """
        if type(meta) is not FakeTensor or kind == "call_module" or not (kind == "call_method" or _is_torchs(target)):
            return None
        made = self.derivation.find_stand_in
        for value in (*args, *kwargs.values()):
            if isinstance(value, MetaProxy):
                if read_own(value, "_meta") is meta and value.node.graph is self.graph:
                    return value
            elif isinstance(value, torch.Tensor) and made(value) is meta and not self._bodies:
                return value
        return None

    def _move_to_node(self, value: Any, node: Node) -> Any:
        """From now on this node is the value's node, because it returns the same tensor."""
        if isinstance(value, MetaProxy):
            move_to_node(value, node)
        else:
            self.arguments.move_to_node(value, node)
        return value

    def _node(
        self, kind: str, target: object, args: Any, kwargs: Any, name: Any = None, type_expr: object = None
    ) -> Node:
        named = self.create_arg(dict(kwargs)) if kwargs else {}
        return self.create_node(kind, target, self.create_arg(tuple(args)), named, name, type_expr)

    def node_for(self, kind: str, target: object, args: object, kwargs: object, meta: object, *rest: object) -> Node:
        node = self._node(kind, target, args, kwargs, *rest)
        self.write_meta(node, meta)
        return node

    def proxy_for(self, kind: str, target: object, args: object, kwargs: object, meta: object) -> Any:
        """Add a node for this call; returns its value."""
        return self.results.present(self.node_for(kind, target, args, kwargs, meta), meta)

    def write_meta(self, node: Node, meta: object) -> None:
        if meta is UNKNOWN:
            return
        if type(meta) is FakeTensor:
            if self.derivation.region is not None:
                self._write_tensor(node, meta)
            else:
                with self.derivation.suspend_recording():
                    self._write_tensor(node, meta)
            if meta._spec.is_symbolic and not self._bodies:
                self.symbols.bind_tensor(meta._spec, node)
            return
        set_val(node, meta)
        if "val" not in node.meta and holds(meta, is_stand_in):  # an object, which pytree does not flatten
            node.meta["val"] = transform(meta, lambda tensor, path: snapshot(tensor), is_stand_in)

    def _write_tensor(self, node: Node, meta: FakeTensor) -> None:
        node.meta["val"] = snapshot(meta)
        node.meta["tensor_meta"] = self.node_meta.tensor_meta(meta, meta.requires_grad)

    def proxy(self, node: Node) -> Any:
        return make_proxy(self, node, UNKNOWN)

    def make_known_proxy(self, node: Node, meta: object) -> MetaProxy:
        """The value of a node with this metadata."""
        if node.op != "placeholder":
            self.results.parts.append(node)
        self.write_meta(node, meta)
        return make_proxy(self, node, meta)

    def example(self, tensor: torch.Tensor, source: str) -> Any:
        """The metadata of an argument."""
        with self.derivation.suspend_recording():
            return self._examples.stand_in(tensor, source)

    # --- metadata ------------------------------------------------------------------------------------------------

    def _derive(self, kind: str, target: Any, args: object, kwargs: object) -> Any:
        run = self.derivation.run
        if kind == "call_method":
            return run(method_call(target), f".{target}", args, kwargs)
        if kind == "call_module":
            module, forward = self._called
            is_torchs = type(module).__module__.startswith("torch.")
            return run(
                module_call(module, forward, self.derivation.stand_in),
                f"{type(module).__name__} {target}",
                args,
                kwargs,
                is_torchs,
            )
        if kind == "call_function":
            override = override_for(target)
            name = getattr(target, "__name__", None) or str(target)
            return run(
                override or CALLS.get(target, target),
                name,
                args,
                kwargs,
                override is None and _is_torchs(target),
            )
        return UNKNOWN

    def try_to_derive(self, function: Callable[..., object], args: object) -> Any:
        """The result of a call on metadata, without a warning if it can't be derived."""
        noted = len(self.derivation.underivable)
        try:
            return self.derivation.run(function, "", args, {}, is_torchs=False)
        finally:
            del self.derivation.underivable[noted:]

    def _answers(self, kind: str, target: object, args: Any, meta: object) -> bool:
        """Whether a call of torch only read facts, which need no node."""
        if meta is UNKNOWN or not is_fact(meta) or kind == "call_module":
            return False
        first = args[0] if args else None
        on_object = isinstance(first, MetaProxy) and not isinstance(first, torch.Tensor)
        return any(target is access for access in ACCESSES) if on_object else kind == "call_method" or _is_torchs(target)

    # --- subgraphs ---------------------------------------------------------------------------------

    @contextmanager
    def record_into(self, graph: Graph) -> Iterator[None]:
        """Inside, nodes are added to this graph."""
        before, self.graph = self.graph, graph
        try:
            yield
        finally:
            self.graph = before

    @contextmanager
    def record_body(self, body: VmapBody) -> Iterator[None]:
        """Inside, the body of a function is recorded."""
        self._bodies.append(body)
        try:
            with self.record_into(body.graph):
                yield
        finally:
            self._bodies.pop()

    def outermost(self) -> Any:
        return self.record_into(self._bodies[0].outside if self._bodies else self.graph)

    def node_in_graph(self, node: object) -> Any:
        """A node of the current graph for this node: in a body, nodes from outside become arguments."""
        if not isinstance(node, Node) or node.graph is self.graph:
            return node
        depth = next(i for i, body in enumerate(self._bodies) if body.outside is node.graph)
        for body in self._bodies[depth:]:
            node = body.take(node)
            if body.graph is self.graph:
                break
        return node

    def value_of(self, node: Node) -> MetaProxy:
        return make_proxy(self, node, node.meta.get("val", UNKNOWN))

    def add_body(self, module: GraphModule) -> MetaProxy:
        """Add a body to the root; returns its value."""
        with self.outermost():
            node = self.arguments.read_constant(module, "_body")
        return MetaProxy(node, self, module)

    # --- calls of the program ----------------------------------------------------------------------------------

    def name_of(self, tensor: torch.Tensor) -> str | None:
        return self.arguments.name_of(tensor)

    def handles(self, args: object, kwargs: object) -> bool:
        """Whether the arguments contain values of this trace."""
        return next(proxies_in((args, kwargs)), None) is not None

    def call_torch_function(self, func: object, args: object, kwargs: object) -> Any:
        return functions.call_torch_function(self, func, args, kwargs)

    def record_module(
        self, module: torch.nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        if self._is_entering:  # the root itself
            self._is_entering = False
            return forward(*args, **kwargs)
        return self.call_module(module, forward, args, kwargs)

    def call_module(
        self, m: torch.nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        if modules.has_known_parts(self, m):
            return forward(*args, **kwargs)
        before, self._called = self._called, (m, forward)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._called = before

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        is_script = isinstance(m, torch.jit.ScriptModule)  # it runs in C++
        return is_script or super().is_leaf_module(m, module_qualified_name)

    def path_of_module(self, mod: torch.nn.Module) -> str:
        return modules.path_of(self, mod)

    # --- conversions of values --------------------------------------------------------------------------

    def to_bool(self, obj: Any) -> bool:
        return bool(self.number(obj, bool))

    def iter(self, obj: Any) -> Iterator[Any]:
        return iterate(obj)

    def keys(self, obj: Any) -> Any:
        return attribute(obj, "keys")()

    def attribute_of(self, meta: object, name: str) -> Any:
        with self.derivation.enter_mode():
            return getattr(meta, name)

    def number(self, proxy: MetaProxy, convert: Callable[[Any], Any]) -> Any:
        """A value as a Python number."""
        meta = proxy._meta
        asked = getattr(convert, "__name__", str(convert))
        if meta is UNKNOWN:
            raise self.make_refusal(f"{asked}() was asked of a value of which nothing is known", proxy)
        try:
            with self.derivation.enter_mode():
                return convert(meta)
        except UnderstudyError as error:
            raise self.make_refusal(
                f"{asked}() was asked of a value, and only its data would tell: {error.reason}", proxy
            ) from error

    def make_refusal(self, reason: str, proxy: MetaProxy) -> MetaTraceError:
        asked = reason.split("()", 1)[0] if "()" in reason else ""
        return make_refused_error(reason, asked, self.describe(proxy._meta), proxy.node)

    def describe(self, meta: object) -> str:
        return "unknown" if meta is UNKNOWN else describe_tensors((meta,), {})


ACCESSES = (operator.getitem, getattr)
"""Functions that only read parts of an object."""


@mark_boundary
def _program(function: Callable[..., object], args: list[object], kwargs: dict[str, object]) -> Any:
    return function(*args, **kwargs)


def _is_torchs(target: object) -> bool:
    """Whether it is a function of torch or a Python operator: these raise for stand-ins only if they raise for tensors."""
    module = (
        getattr(target, "__module__", None)
        or getattr(getattr(target, "__self__", None), "__name__", "")
        or ""
    )
    return (
        isinstance(target, _torch.OpOverload)
        or module in ("_operator", "builtins")
        or module.split(".")[0] == "torch"
    )


def symbolic_trace(
    root: torch.nn.Module | Callable[..., object],
    meta_args: Mapping[str, object] | None = None,
    concrete_args: Mapping[str, object] | None = None,
    *,
    symbolic: bool | Mapping[str, object] = False,
    tracer: MetaTracer | None = None,
) -> GraphModule:
    """A module that does what `root` does, as a graph of calls of torch: `torch.fx.symbolic_trace`, with examples.

        traced = symbolic_trace(model, meta_args={"x": torch.empty(8, 128, device="meta")})

    The arguments are those of `MetaTracer.trace`. `shape_env` of the result has the guards of a symbolic trace.
    """
    tracer = tracer or MetaTracer()
    graph = tracer.trace(root, meta_args, concrete_args, symbolic=symbolic)
    name = type(root).__name__ if isinstance(root, torch.nn.Module) else getattr(root, "__name__", "traced")
    module = _torch.lazy_graph_module(tracer.root, graph, name)
    for constant in tracer.arguments.added:
        delattr(tracer.root, constant)  # restore the original module: the new one has them
    module.shape_env = tracer.shape_env
    module.training = tracer.root.training  # submodules keep their own modes
    return module
