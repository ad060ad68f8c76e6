"""MetaTracer: a torch-level symbolic trace in which every value knows its metadata."""

from __future__ import annotations

import copy
import inspect
import math
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from understudy import _torch
from understudy.contexts import contextmanager, to_the_end
from understudy.errors import UnderstudyError
from understudy.fake.inputs import describe_tensors
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import no_collection, refuse_cycles
from understudy.graph.node_origins import at_node, begins_here
from understudy.graph.node_values import NodeMeta, set_val, snapshot
from understudy.meta import functions, modules
from understudy.meta.arguments import CallResults, NodeArguments, SizeNodes
from understudy.meta.derivation import CALLS, Derivation, RefusedCall, method_call, module_call, override_for
from understudy.meta.errors import MetaTraceError, left_over_error, refused_error, unregistered_error
from understudy.meta.functions import VmapBody, apply_function, call_scripted, call_vmap, erase_empty_regions
from understudy.meta.inputs import ExampleInputs, TraceInputs
from understudy.meta.modules import ORIGINAL_PATH, AssignedAttributes, empty_caches_of
from understudy.meta.patches import patch_calls
from understudy.meta.proxies import (
    UNKNOWN,
    MetaProxy,
    attribute,
    is_fact,
    make_proxy,
    move_to_node,
    parts_in_turn,
    proxies_in,
    read_own,
)
from understudy.meta.structures import holds, is_stand_in, transform

ENDS = ("placeholder", "output")
READS = ("get_attr", "call_module")
"""Nodes whose target is a path into the root."""


class MetaTracer(torch.fx.Tracer):
    """`torch.fx.Tracer`, with metadata: Python code that asks a value for its shape gets an answer.

        graph = MetaTracer().trace(model, meta_args={"x": torch.empty(8, 128)})

    Modules of `torch.nn` stay whole, others are traced through (`is_leaf_module` decides, as in fx).
    `allow_insert_stateless_mods`: a module without parameters that the program makes on the fly becomes one of the root.
    """

    allow_insert_stateless_mods: bool = True
    proxy_buffer_attributes: bool = True

    root: torch.nn.Module
    is_over: bool = False
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
        self._forward: Callable[..., Any] | None = None
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
        state = AssignedAttributes(self.root)
        pending = [] if self.shape_env is None else self.shape_env.pending_fresh_unbacked_symbols
        were_pending = len(pending)
        with to_the_end(lambda: self._close(state, pending, were_pending)):
            whole = self._functions_kept_whole(function)
            recording = _torch.function_mode(self.recording)
            try:
                with no_collection(), patch_calls(self, whole), recording:
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
        """Nothing that was there before keeps a mark of the trace. May be called again, after an interrupt."""
        state.restore()
        self.derivation.warn()
        self.node_meta.close()
        self.arguments.forget_tuples()
        del pending[were_pending:]  # the nodes that read them are in the graph
        empty_caches_of(self.tensors)
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
        """By the identity of a target: the target, and the name that its nodes are numbered under."""
        self._stack_copy: tuple[str, Any] | None = None
        """The innermost module, and what `nn_module_stack` is in it: a key of the stack stands for one call."""
        self._refused: list[Node] = []
        self.results = CallResults(self)
        self.tensors: list[weakref.ref[Any]] = []
        """All proxies of tensors. None is left when the trace is over, unless something has kept it."""
        return function

    def _entry(self, root: Any, function: Callable[..., object]) -> Callable[..., object]:
        """What to call: a module with hooks is called with them, as a caller of the program would."""
        has_hooks = isinstance(root, torch.nn.Module) and (root._forward_hooks or root._forward_pre_hooks)
        self._is_entering = bool(has_hooks) and self.traced_func_name == "forward"
        return root if self._is_entering else function

    def _record(self, root: object, function: Callable[..., object], inputs: TraceInputs, state: AssignedAttributes) -> None:
        entry = self._entry(root, function)
        args, kwargs = inputs.arguments(function, by_position=entry is not function)
        self._examples.check_names()
        result = _program(entry, args, kwargs)
        for buffer, value in state.assigned_buffers():
            if value._meta is not self.derivation.stand_in(buffer):
                self.create_proxy("call_method", "copy_", (buffer, value), {})
        self._end(function, result)

    def _end(self, function: Callable[..., object], result: object) -> None:
        returned = inspect.get_annotations(inspect.unwrap(function)).get("return")
        if isinstance(returned, str):
            returned = None  # written for later: what it means is only known where it stands
        self.create_node("output", "output", (self.create_arg(result),), {}, type_expr=returned)
        for node in self._refused:  # and the program went on without
            node.graph.erase_node(node)
        self.results.erase_unused_parts()
        erase_empty_regions(self.graph)

    def _functions_kept_whole(self, function: Callable[..., object]) -> list[tuple[object, str]]:
        """Where functions are that become nodes when they are called with values of the trace: (namespace, name)."""
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
        """As `torch.fx.Tracer` makes a node, without checks of arguments that are nodes and numbers already."""
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
                self._stack_copy = innermost, copy.copy(stack)
            node.meta["nn_module_stack"] = self._stack_copy[1]
        return node

    def proxy_of(self, tensor: torch.Tensor) -> MetaProxy:
        """A tensor that is there, of the root or a constant, as a value of the trace."""
        return make_proxy(self, self.create_arg(tensor), self.derivation.stand_in(tensor))

    def last_node(self) -> Node:
        return _torch.last_node(self.graph)

    def append_call(self, target: object, args: object, kwargs: object, name: str | None = None) -> Node:
        """A node whose arguments are nodes and numbers already."""
        return self.create_node("call_function", target, args, kwargs, name)

    def create_arg(self, a: object) -> Any:
        return self.arguments.argument(a)

    def create_proxy(
        self, kind: str, target: object, args: object, kwargs: object, name: str | None = None, type_expr: object = None,
        proxy_factory_fn: object = None,
    ) -> Any:  # fmt: skip
        """Record a call, after it was run on the metadata. Facts about tensors are answered, and not recorded."""
        if self.is_over:
            raise left_over_error(str(target))
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
            raise at_node(refused.error, node, refused.inputs) from refused.error
        if self._answers(kind, target, args, meta) and not any(self.results.fresh_numbers(meta)):
            return meta
        same = self._find_same(kind, target, args, kwargs, meta)
        node = self.node_for(kind, target, args, kwargs, meta, name, type_expr)
        return self.results.present(node, meta) if same is None else self._move_to_node(same, node)

    def _find_same(self, kind: str, target: object, args: Any, kwargs: Any, meta: object) -> Any:
        """The argument that a call of torch gives back, as `x.add_(1)` and `x.contiguous()` do: `is` has to say so.

        Modules and functions of others may give back something else when the graph runs: `nn.Dropout`, by its mode.
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
        """What is done with a value from here on is done with what this node gives, which is the same tensor."""
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
        """The value of a node that is made for this call."""
        return self.results.present(self.node_for(kind, target, args, kwargs, meta), meta)

    def write_meta(self, node: Node, meta: object) -> None:
        if meta is UNKNOWN:
            return
        if type(meta) is FakeTensor:
            with self.derivation.suspend_recording():
                node.meta["val"] = snapshot(meta)
                node.meta["tensor_meta"] = self.node_meta.tensor_meta(meta, meta.requires_grad)
            if meta._spec.is_symbolic and not self._bodies:
                self.symbols.bind_tensor(meta._spec, node)
            return
        set_val(node, meta)
        if "val" not in node.meta and holds(meta, is_stand_in):  # an object, which fx does not look into
            node.meta["val"] = transform(meta, lambda tensor, path: snapshot(tensor), is_stand_in)

    def proxy(self, node: Node) -> Any:
        return make_proxy(self, node, UNKNOWN)

    def make_known_proxy(self, node: Node, meta: object) -> MetaProxy:
        """The value of a node of which this is known."""
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
            module = self.root.get_submodule(target)
            assert self._forward is not None
            is_torchs = type(module).__module__.startswith("torch.")
            return run(
                module_call(module, self._forward),
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
        """What a call gives if it can be run on metadata, and nothing is said if it can't."""
        noted = len(self.derivation.underivable)
        try:
            return self.derivation.run(function, "", args, {}, is_torchs=False)
        finally:
            del self.derivation.underivable[noted:]

    def _answers(self, kind: str, target: object, args: Any, meta: object) -> bool:
        """Whether a call of torch only asked for facts, which are no part of a graph."""
        if meta is UNKNOWN or not is_fact(meta) or kind == "call_module":
            return False
        first = args[0] if args else None
        on_object = isinstance(first, MetaProxy) and not isinstance(first, torch.Tensor)
        return any(target is access for access in ACCESSES) if on_object else kind == "call_method" or _is_torchs(target)

    # --- graphs inside of the graph ---------------------------------------------------------------------------------

    @contextmanager
    def within(self, graph: Graph) -> Iterator[None]:
        """Nodes are added to this graph."""
        before, self.graph = self.graph, graph
        try:
            yield
        finally:
            self.graph = before

    @contextmanager
    def inside(self, body: VmapBody) -> Iterator[None]:
        """What is recorded is the body of a function."""
        self._bodies.append(body)
        try:
            with self.within(body.graph):
                yield
        finally:
            self._bodies.pop()

    def outermost(self) -> Any:
        return self.within(self._bodies[0].outside if self._bodies else self.graph)

    def here(self, node: object) -> Any:
        """A node as one of the graph that is being recorded: a body takes what it does not have from around it."""
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

    def keep_body(self, module: GraphModule) -> MetaProxy:
        """A body as a value: it is kept in the root."""
        with self.outermost():
            node = self.arguments.read_constant(module, "_body")
        return MetaProxy(node, self, module)

    # --- what the program calls ----------------------------------------------------------------------------------

    def name_of(self, tensor: torch.Tensor) -> str | None:
        return self.arguments.name_of(tensor)

    def handles(self, args: object, kwargs: object) -> bool:
        """Whether there are values of this trace among the arguments."""
        return next(proxies_in((args, kwargs)), None) is not None

    def call_torch_function(self, func: object, args: object, kwargs: object) -> Any:
        return functions.call_torch_function(self, func, args, kwargs)

    def called_whole(self, function: Callable[..., object], args: object, kwargs: object) -> Any:
        """A function that is to be a node of its own."""
        return self.create_proxy("call_function", function, args, kwargs)

    def called_vmap(self, *call: Any) -> Any:
        return call_vmap(self, *call)

    def called_script(self, function: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        return self.create_proxy("call_function", call_scripted, (function, *args), kwargs)

    def called_autograd_function(self, function: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        return self.create_proxy("call_function", apply_function, (function, *args), kwargs)

    def called_module(
        self, module: torch.nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        if self._is_entering:  # the root itself
            self._is_entering = False
            return forward(*args, **kwargs)
        return self.call_module(module, forward, args, kwargs)

    def call_module(
        self, m: torch.nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        if modules.is_made_of_known_parts(self, m):
            return forward(*args, **kwargs)
        before, self._forward = self._forward, forward
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._forward = before

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        is_script = isinstance(m, torch.jit.ScriptModule)  # which runs in C++
        return is_script or super().is_leaf_module(m, module_qualified_name)

    def path_of_module(self, mod: torch.nn.Module) -> str:
        return modules.path_of(self, mod)

    def has_made_a_parameter(self) -> MetaTraceError:
        return unregistered_error("a parameter is made while the program is traced", "nn.Parameter")

    # --- what the program asks of values --------------------------------------------------------------------------

    def to_bool(self, obj: Any) -> bool:
        return bool(self.number(obj, bool))

    def iter(self, obj: Any) -> Iterator[Any]:
        return parts_in_turn(obj)

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
        return refused_error(reason, asked, self.describe(proxy._meta), proxy.node)

    def describe(self, meta: object) -> str:
        return "unknown" if meta is UNKNOWN else describe_tensors((meta,), {})


ACCESSES = (operator.getitem, getattr)
"""They only look into an object."""


@begins_here
def _program(function: Callable[..., object], args: list[object], kwargs: dict[str, object]) -> Any:
    return function(*args, **kwargs)


def _is_torchs(target: object) -> bool:
    """A function of torch, or one of Python's operators: they refuse stand-ins only when they refuse tensors."""
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
        delattr(tracer.root, constant)  # they are in the new module, the old one is as it was
    module.shape_env = tracer.shape_env
    module.training = tracer.root.training  # its parts are those of the program, each in a mode of its own
    return module
