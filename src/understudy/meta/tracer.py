"""MetaTracer: a torch-level symbolic trace in which every value has metadata.

The program runs once on stand-ins, which carry their node. Torch functions are recorded by a function mode
(`FunctionRecorder`), modules where they are called.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.fx.proxy import Scope

from understudy import _torch
from understudy.errors import UnderstudyError
from understudy.fake.inputs import describe_tensors
from understudy.fake.tensor import FakeTensor
from understudy.graph.borrowed_state import (
    BorrowedState,
    has_same_form,
    named_parts,
    no_collection,
    refuse_cycles,
    write_assigned,
)
from understudy.graph.node_origins import locate_error, mark_boundary
from understudy.graph.node_values import NodeMeta, set_val, snapshot
from understudy.graph.random_state import KeptRandomState
from understudy.meta import modules
from understudy.meta.arguments import NodeArguments, SizeNodes
from understudy.meta.derivation import Derivation, is_of_torch, run_on_metadata
from understudy.meta.devices import DeviceOf
from understudy.meta.errors import MetaTraceError, make_left_over_error, make_refused_error
from understudy.meta.inputs import ExampleInputs, TraceInputs
from understudy.meta.modules import ORIGINAL_PATH, clear_caches_of
from understudy.meta.patches import gen_constructor_wrapper, patch_calls, recording_tracer
from understudy.meta.proxies import UNKNOWN, MetaAttribute, MetaProxy, make_proxy, meta_of_proxy
from understudy.meta.recorder import FunctionRecorder
from understudy.meta.regions import erase_empty_regions
from understudy.meta.results import CallResults, is_fact
from understudy.meta.structures import holds, is_stand_in, leaves_in, transform
from understudy.meta.vmap import VmapBody

ENDS = ("placeholder", "output")
READS = ("get_attr", "call_module")
"""Nodes whose target is a path into the root."""


class Suspended:
    """A region in which nothing is recorded. Regions may be nested."""

    __slots__ = ("_taken", "_tracer")

    def __init__(self, tracer: MetaTracer) -> None:
        self._tracer = tracer

    def __enter__(self) -> None:
        tracer = self._tracer
        self._taken: list[Any] = []
        if tracer.depth == 0:
            self._taken = _torch.function_modes_from(tracer.recorder)
            _torch.pop_function_modes(len(self._taken))
        tracer.depth += 1

    def __exit__(self, *error: object) -> None:
        self._tracer.depth -= 1
        if self._taken:
            _torch.push_function_modes(self._taken)


class MetaTracer(torch.fx.Tracer):
    """`torch.fx.Tracer` with metadata: the traced Python code can read the shape of a value.

        graph = MetaTracer().trace(model, meta_args={"x": torch.empty(8, 128)})

    Modules of `torch.nn` are leaves, others are traced through (`is_leaf_module` decides, as in fx).
    `allow_insert_stateless_mods`: a module without parameters that the program makes is added to the root.

    A subclass may override `is_leaf_module`, `call_module`, `path_of_module`, `getattr`, `create_node`, `create_arg`,
    `to_bool`, `iter` and `keys`. One that overrides `create_proxy` is called for each node, with proxies for stand-ins;
    if `proxy` is overridden, the traced program gets these proxies.
    """

    allow_insert_stateless_mods: bool = True
    proxy_buffer_attributes: bool = True
    _TORCH_METHODS_TO_PATCH = ["arange", "zeros", "ones", "full_like", "eye"]  # noqa: RUF012 - as in torch's module
    """Functions of torch that become nodes when they are called with traced values. The function mode records all of
    torch's functions; a subclass adds functions that no mode sees."""

    root: torch.nn.Module
    is_over: bool = False
    recorder: Any = None
    """None before the first trace: then `root` and `graph` are set by hand, and nodes are made as in `torch.fx.Tracer`."""
    random_state: KeptRandomState | None = None
    orig_forward: Any = None
    """The forward of the module that was called last."""

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
        self.called: Any = None
        """The module that is being called, and its forward."""
        self.shape_env: Any = None
        self.node_meta = NodeMeta()
        self.meta_args: Mapping[str, Any] = {}
        self.parameter_proxies: dict[str, Any] = {}

    def overrides(self, name: str) -> bool:
        """Whether a subclass overrides a method or attribute of `MetaTracer`."""
        return getattr(type(self), name) is not getattr(MetaTracer, name) or name in vars(self)

    @functools.cached_property
    def orig_fns(self) -> set[Any]:
        return {getattr(torch, name) for name in self._TORCH_METHODS_TO_PATCH}

    @functools.cached_property
    def patched_torch_methods(self) -> dict[str, Any]:
        return {name: gen_constructor_wrapper(getattr(torch, name)) for name in self._TORCH_METHODS_TO_PATCH}

    # --- tracing -------------------------------------------------------------------------------------------------

    def trace(  # type: ignore[override]
        self,
        root: torch.nn.Module | Callable[..., object],
        meta_args: Mapping[str, object] | None = None,
        concrete_args: Mapping[str, object] | None = None,
        *,
        symbolic: bool | Mapping[str, object] = False,
        strict: bool = False,
    ) -> Graph:
        """The graph of a module or a function.

        `meta_args`: examples (real, meta or fake tensors, or structures of them) by the names of the arguments.
        `concrete_args`: arguments that are fixed.
        `symbolic`: sizes of the examples are symbols; or, by the names of arguments, which: `{"x": dims("batch")}`.
        `strict`: raise for a call whose metadata can't be computed, instead of a warning.
        """
        if meta_args is not None and not isinstance(meta_args, Mapping):
            raise TypeError(
                f"meta_args: expected a dict from names of arguments to examples, got a {type(meta_args).__name__}"
            )
        outer = recording_tracer()
        if outer is not None:
            with outer.suspend():
                return self.trace(root, meta_args, concrete_args, symbolic=symbolic, strict=strict)
        function = self._begin(root, meta_args, symbolic, strict)
        pending = [] if self.shape_env is None else self.shape_env.pending_fresh_unbacked_symbols
        were_pending = len(pending)
        try:
            self._borrow()
            whole = self._wrapped_functions(function)
            mode = self._examples.mode
            with no_collection(), patch_calls(self, mode, whole), mode, self.recorder:
                self._record(root, function, TraceInputs(self, meta_args, concrete_args or {}))
        except RecursionError:
            refuse_cycles(meta_args, path="meta_args")
            raise
        finally:
            self._close()
            del pending[were_pending:]  # their nodes are in the graph
        for name, value in self.arguments.added.items():
            setattr(self.root, name, value)
        self.graph._tracer_extras = {"meta_args": meta_args}
        return self.graph

    def _begin(
        self, root: Any, meta_args: Mapping[str, object] | None, symbolic: object, strict: bool
    ) -> Callable[..., object]:
        is_module = isinstance(root, torch.nn.Module)
        if isinstance(root, GraphModule):
            _torch.write_code(root)
        self.root = root if is_module else torch.nn.Module()
        function: Callable[..., Any] = getattr(root, self.traced_func_name) if is_module else root
        self.submodule_paths = {module: name for name, module in named_parts(self.root)}
        self.graph = Graph(tracer_cls=type(self))
        self.module_stack.clear()
        self.num_calls: dict[str, int] = {}
        self.tensor_attrs: dict[Any, str] = {}
        self.meta_args = meta_args or {}
        self.parameter_proxies.clear()
        self.generators: dict[int, tuple[torch.Generator, Node]] = {}
        self.random_state = KeptRandomState()
        examples = ExampleInputs(self.root, meta_args, symbolic)
        self._examples = examples
        self.shape_env = examples.env
        self.is_over = False
        self.depth = 0
        """How many regions around the current call are not recorded."""
        self.recorder = FunctionRecorder(self)
        self.derivation = Derivation(self, examples.mode, strict)
        self.symbols = SizeNodes(self)
        self.arguments = NodeArguments(self, self.root)
        self.results = CallResults(self)
        self.hollow = _torch.hollow()
        self._argument = self.create_arg if self.overrides("create_arg") else self.arguments.argument
        self._has_own_proxies = self.overrides("proxy")
        self._has_hooks = self._has_own_proxies or self.overrides("create_proxy")
        self.is_plain = not (self._has_hooks or self.overrides("create_node") or self.overrides("create_arg"))
        """Whether no hook is called for each node."""
        self._derived: Any = None
        """The kind and target of the call for which `create_proxy` is being called, and its metadata."""
        self._bodies: list[VmapBody] = []
        self._appender = _torch.NodeAppender(self.graph)
        self._base_names: dict[int, tuple[Any, str]] = {}
        """By the identity of a target: the target, and the base name of its nodes."""
        self._stack_copy: tuple[str, Any] | None = None
        """The innermost module, and its `nn_module_stack`: a key of the stack stands for one call."""
        self._refused: list[Node] = []
        return function

    def _borrow(self) -> None:
        """Replace the tensors of the root by stand-ins, until `_close`."""
        self._borrowed = BorrowedState(self._examples.mode)
        self._could_skip_dispatch = self._examples.mode.can_skip_dispatch
        self._examples.mode.can_skip_dispatch = False  # every function is recorded
        for path, part in self._borrowed.borrow_parts(self.root):
            for name, real, stand_in in self._borrowed.replaced[part]:
                self.arguments.expect(f"{path}.{name}" if path else name, real, stand_in)
                if type(real) is torch.Tensor:
                    self.derivation.read_values(real, stand_in)

    def _close(self) -> None:
        """Restore the root, and remove references to the trace from objects that existed before."""
        self._borrowed.give_back()
        self._examples.mode.can_skip_dispatch = self._could_skip_dispatch
        if self.random_state is not None:
            self.random_state.restore()
        self.derivation.warn()
        self.node_meta.close()
        self.arguments.close()
        self.derivation.close()
        self._examples.close()
        clear_caches_of(self.results.tensors)
        self.results.tensors.clear()
        self.submodule_paths = None
        self.is_over = True

    def _record(self, root: object, function: Callable[..., object], inputs: TraceInputs) -> None:
        entry = self._entry(root, function)
        args, kwargs = inputs.arguments(function, by_position=entry is not function)
        self._examples.check_names()
        result = _program(entry, args, kwargs)
        self._record_assigned_buffers()
        self._end(function, result)

    def _entry(self, root: Any, function: Callable[..., object]) -> Callable[..., object]:
        """The function to call: a module with hooks is called with its hooks."""
        has_hooks = isinstance(root, torch.nn.Module) and (root._forward_hooks or root._forward_pre_hooks)
        self._is_entering = bool(has_hooks) and self.traced_func_name == "forward"
        return root if self._is_entering else function

    def _record_assigned_buffers(self) -> None:
        """Record that tensors which the program has assigned to buffers are written into them."""
        assigned = self._borrowed.list_assigned()
        for buffer, value in assigned:
            if type(value) is FakeTensor and not has_same_form(buffer, value):
                form = getattr(buffer, "_spec", None)
                raise self.make_refusal(
                    f"expected a value with the metadata of the buffer, {form}, got another one", value
                )
        if assigned:
            write_assigned(assigned)

    def _end(self, function: Callable[..., object], result: object) -> None:
        returned = inspect.get_annotations(inspect.unwrap(function)).get("return")
        if isinstance(returned, str):
            returned = None  # annotations may refer to names that the graph does not have
        self.create_node("output", "output", (self._argument(result),), {}, type_expr=returned)
        for node in self._refused:  # the program caught the error
            node.graph.erase_node(node)
        self.results.erase_unused_parts()
        erase_empty_regions(self.graph)

    def _wrapped_functions(self, function: Callable[..., object]) -> list[tuple[dict[str, Any], str]]:
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

    @property
    def listed_functions(self) -> list[str]:
        """Functions of torch that are replaced, because no function mode sees them, or C++ refuses the arguments."""
        is_needed = self._has_own_proxies or self.overrides("_TORCH_METHODS_TO_PATCH")
        return self._TORCH_METHODS_TO_PATCH if is_needed else []

    # --- calls of the program ------------------------------------------------------------------------------------

    def suspend(self) -> Suspended:
        """Inside, nothing is recorded."""
        return Suspended(self)

    @property
    def is_deriving(self) -> bool:
        return self.depth > 0

    @property
    def _disable_module_getattr(self) -> bool:
        """Whether attributes of modules are read without a call of `getattr`."""
        return self.depth > 0

    def call(
        self, kind: str, target: Any, args: Any, kwargs: Any, run: Callable[..., object] | None = None
    ) -> Any:
        """Run a call of the program on stand-ins, and record it; returns the value that the program gets. Facts about
        tensors need no node. `run`: the function to run, by default that of the target."""
        if self.is_over:
            raise make_left_over_error(str(target))
        if self.depth == 0:
            with Suspended(self):
                return self.call(kind, target, args, kwargs, run)
        meta = self._derive(kind, target, args, kwargs, run)
        if type(meta) is FakeTensor or kind == "call_module" or not is_of_torch(kind, target):
            return self.record(kind, target, args, kwargs, meta)
        return self.record_result(kind, target, args, kwargs, meta)

    def record_result(self, kind: str, target: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        """Record a call of torch with this result, unless the result is a fact."""
        if is_fact(meta):
            has_fresh = any(self.results.fresh_numbers(meta))
            if not has_fresh:
                return meta
        return self.record(kind, target, args, kwargs, meta)

    def _derive(
        self, kind: str, target: Any, args: Any, kwargs: Any, run: Callable[..., object] | None = None
    ) -> Any:
        """The metadata of a call."""
        meta = self.derivation.run(kind, target, args, kwargs, run)
        if kind == "call_module" or (kind == "call_function" and not is_of_torch(kind, target)):
            return self._make_new(meta)
        return meta

    def locate_error(
        self, error: Exception, inputs: tuple[object, object], kind: str, target: Any, args: Any, kwargs: Any
    ) -> Exception:
        """The error to raise for a call that raises on real tensors as well, with its node and its line."""
        node = self._node(kind, target, args, kwargs)
        self._refused.append(node)
        return locate_error(error, node, inputs)

    def _make_new(self, meta: Any) -> Any:
        """The result of a module or a function of the user, with arguments that it returns replaced by aliases: when the
        graph runs, it may return another tensor, as `nn.Dropout` does in training mode."""
        if type(meta) is FakeTensor:
            return self._make_alias(meta) if self._is_known(meta) else meta
        if meta is UNKNOWN or not holds(meta, self._is_known):
            return meta
        return transform(meta, lambda fake, path: self._make_alias(fake), self._is_known)

    def _is_known(self, value: Any) -> bool:
        if type(value) is not FakeTensor:
            return False
        node = value._node
        return (node is not None and self.is_open(node.graph)) or self.name_of(value) is not None

    def _make_alias(self, fake: FakeTensor) -> Any:
        with self.suspend():
            return torch.ops.aten.alias.default(fake)

    def record(self, kind: str, target: Any, args: Any, kwargs: Any, meta: object) -> Any:
        """Add a node with this metadata; returns the value that the program gets."""
        if self._has_hooks:
            self._derived = kind, target, meta
            made = self.create_proxy(kind, target, self._as_proxies(args), self._as_proxies(kwargs))
            return self._as_program_value(made)
        node = self._node(kind, target, args, kwargs)
        self.write_meta(node, meta)
        return self.results.present(node, meta)

    def handles(self, args: object, kwargs: object) -> bool:
        """Whether the arguments contain traced values."""
        return any(
            type(leaf) is FakeTensor or isinstance(leaf, MetaProxy) or type(leaf) is DeviceOf
            for leaf in leaves_in((args, kwargs))
        )

    # --- hooks, with proxies -------------------------------------------------------------------------------------

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: str | None = None, type_expr: object = None,
        proxy_factory_fn: Callable[[Node], Any] | None = None,
    ) -> Any:  # fmt: skip
        """Add a node for a call; returns its proxy, with the metadata of the result in `_tensor_meta`."""
        if self.recorder is None:
            return self._create_proxy_by_hand(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        if self.is_over:
            raise make_left_over_error(str(target))
        derived, self._derived = self._derived, None
        if derived is not None and derived[:2] == (kind, target):
            meta = derived[2]
        elif kind in ENDS or kind == "get_attr":
            meta = self._meta_of_input(kind, target)
        else:
            with Suspended(self):
                meta = self._derive(kind, target, args, kwargs)
        node = self._node(kind, target, args, kwargs, name, type_expr)
        self.write_meta(node, meta)
        made = self.proxy(node) if proxy_factory_fn is None else proxy_factory_fn(node)
        if meta is not UNKNOWN and isinstance(made, MetaProxy):
            object.__setattr__(made, "_tensor_meta", meta)
        return made

    def _create_proxy_by_hand(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any, type_expr: Any, factory: Any
    ) -> Any:
        """`create_proxy` outside of a trace: the metadata is that of the same call on the metadata of the arguments."""
        made = super().create_proxy(kind, target, args, kwargs, name, type_expr, factory)
        if not isinstance(made, MetaProxy) or kind == "output":
            return made
        if kind == "placeholder":
            if target in self.meta_args:
                made.install_tensor_meta(self.meta_args[target])
            return made
        try:
            meta = run_on_metadata(kind, target, args, kwargs, self.root)
        except Exception as error:  # a call may fail in any way
            warnings.warn(f"Could not compute metadata for {kind} target {target}: {error}", stacklevel=2)
        else:
            made.install_tensor_meta(meta)
        return made

    def _meta_of_input(self, kind: str, target: Any) -> Any:
        if kind == "get_attr":
            value: Any = functools.reduce(getattr, target.split("."), self.root)
            return self.stand_in(value) if isinstance(value, torch.Tensor) else UNKNOWN
        example = self.meta_args.get(target) if kind == "placeholder" else None
        return self.example(example, target) if isinstance(example, torch.Tensor) else UNKNOWN

    def proxy(self, node: Node) -> Any:
        """The proxy of a node."""
        return MetaProxy(node, self) if self.recorder is None else make_proxy(self, node)

    def _as_proxies(self, value: Any) -> Any:
        """The arguments of a call with stand-ins replaced by proxies."""
        return map_aggregate(value, self._as_proxy)

    def _as_proxy(self, value: Any) -> Any:
        if type(value) is not FakeTensor:
            return value
        made = self.proxy(self.arguments.node_of(value))
        if isinstance(made, MetaProxy):
            object.__setattr__(made, "_tensor_meta", value)
        return made

    def _as_program_value(self, made: Any) -> Any:
        if not isinstance(made, MetaProxy) or self._has_own_proxies:
            return made
        meta = meta_of_proxy(made)
        return made if meta is UNKNOWN else self.results.present(made.node, meta)

    def install_meta(self, proxy: MetaProxy, example: Any) -> None:
        """Set the metadata of a proxy. After the trace, or before it, the example is not converted."""
        is_tracing = hasattr(self, "derivation") and not self.is_over
        meta = self.derivation.meta_of(example) if is_tracing else example
        object.__setattr__(proxy, "_tensor_meta", meta)
        if is_tracing:
            self.write_meta(proxy.node, meta)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        """The value of a parameter, buffer or submodule that the program reads: called if a subclass overrides it."""
        return attr_val

    def to_bool(self, obj: Any) -> bool:
        return bool(self.convert(obj, bool, (obj,), {}))

    def iter(self, obj: Any) -> Iterator[Any]:
        meta = meta_of_proxy(obj)
        if meta is UNKNOWN:
            raise self.make_refusal("a loop iterates over a value with unknown metadata", obj)
        return iter([obj[position] for position in range(len(meta))])

    def keys(self, obj: Any) -> Any:
        return MetaAttribute(obj, "keys")()

    def convert(self, value: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A traced value as a Python number: `bool(x)`, `int(x)`."""
        asked = function.__name__.strip("_")
        if asked == "bool" and type(value) is FakeTensor and self.overrides("to_bool"):
            return self.to_bool(self._as_proxy(value))
        metas = self.find_meta(args)
        if metas is UNKNOWN:
            raise self.make_refusal(f"{asked}() of a value with unknown metadata", value)
        try:
            with self.suspend():
                return function(*metas, **kwargs)
        except UnderstudyError as error:
            raise self.make_refusal(
                f"{asked}() of a value that depends on data: {error.reason}", value
            ) from error

    def make_refusal(self, reason: str, value: Any) -> MetaTraceError:
        asked = reason.split("()", 1)[0] if "()" in reason else ""
        node = self.arguments.node_of(value) if type(value) is FakeTensor else value.node
        meta = self.find_meta(value)
        shown = "unknown" if meta is UNKNOWN else describe_tensors((meta,), {})
        return make_refused_error(reason, asked, shown, node)

    # --- nodes ---------------------------------------------------------------------------------------------------

    def create_node(
        self,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        name: str | None = None,
        type_expr: object = None,
    ) -> Node:
        if self.recorder is None:
            return super().create_node(kind, target, args, kwargs, name, type_expr)
        path = self.arguments.safe_path(target) if kind in READS else target
        if kind in ENDS or name is not None or type_expr is not None:
            node = super().create_node(kind, path, args, kwargs, name, type_expr)
        else:
            node = self.append_node(kind, path, args, kwargs)
        if kind not in ENDS:
            self.node_meta.mark(node)
        if path is not target:
            node.meta[ORIGINAL_PATH] = target
        return node

    def append_node(
        self, kind: str, target: Any, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Node:
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

    def create_arg(self, a: object) -> Any:
        return super().create_arg(a) if self.recorder is None else self.arguments.argument(a)

    def _node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: object = None
    ) -> Node:
        argument = self._argument
        node_args = tuple([argument(value) for value in args])
        named = {key: argument(value) for key, value in kwargs.items()} if kwargs else {}
        return self.create_node(kind, target, node_args, named, name, type_expr)

    def append_call(self, target: object, args: object, kwargs: object, name: str | None = None) -> Node:
        """Append a call whose arguments are nodes and literals already."""
        return self.create_node("call_function", target, args, kwargs, name)

    def record_state(
        self, kind: str, target: Any, args: Any, kwargs: Any, result: object
    ) -> tuple[Node, Any]:
        """Record a call that reads or changes the state of a generator, or of the process."""
        node = self._node(kind, target, args, kwargs)
        if not isinstance(result, torch.Tensor):
            return node, result
        meta = self.stand_in(result)
        self.write_meta(node, meta)
        return node, self.results.present(node, meta)

    def last_node(self) -> Node:
        return _torch.last_node(self.graph)

    def write_meta(self, node: Node, meta: Any) -> None:
        if meta is UNKNOWN:
            return
        if self.depth == 0:
            with Suspended(self):
                self.write_meta(node, meta)
        elif type(meta) is FakeTensor:
            node.meta["val"] = snapshot(meta)
            node.meta["tensor_meta"] = self.node_meta.tensor_meta(meta, meta.requires_grad)
            if meta._spec.is_symbolic and not self._bodies:
                self.symbols.bind_tensor(meta._spec, node)
        else:
            set_val(node, meta)
            if "val" not in node.meta and holds(
                meta, is_stand_in
            ):  # an object, which pytree does not flatten
                node.meta["val"] = transform(meta, lambda tensor, path: snapshot(tensor), is_stand_in)

    # --- values --------------------------------------------------------------------------------------------------

    def make_placeholder(self, target: str, default: tuple[Any, ...], name: str) -> Node:
        if self._has_hooks:
            node: Node = self.create_proxy("placeholder", target, default, {}, name=name).node
            return node
        return self.create_node("placeholder", target, default, {}, name=name)

    def make_read(self, path: str, value: object) -> Node:
        """A node that reads an attribute of the root."""
        meta = self.stand_in(value) if isinstance(value, torch.Tensor) else UNKNOWN
        if self._has_hooks:
            self._derived = "get_attr", path, meta
            made: Node = self.create_proxy("get_attr", path, (), {}).node
            return made
        node = self.create_node("get_attr", path, (), {})
        self.write_meta(node, meta)
        return node

    def present_input(self, node: Node, meta: Any) -> Any:
        """The value of an argument, or of a part of one."""
        if node.op != "placeholder":
            self.results.parts.append(node)
        self.write_meta(node, meta)
        if not self._has_own_proxies:
            return self.results.present(node, meta)
        made = self.proxy(node)
        if meta is not UNKNOWN and isinstance(made, MetaProxy):
            object.__setattr__(made, "_tensor_meta", meta)
        return made

    def example(self, tensor: torch.Tensor, source: str) -> Any:
        """The metadata of an argument."""
        with self.suspend():
            return self._examples.stand_in(tensor, source)

    def stand_in(self, tensor: torch.Tensor) -> Any:
        return self.derivation.stand_in(tensor)

    def find_literal(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The value of a stand-in that was made by a constructor which no function mode sees (`torch.IntTensor([3])`)."""
        mode = self._examples.mode
        if type(tensor) is not FakeTensor or tensor.fake_mode is not mode or tensor._node is not None:
            return None
        value: torch.Tensor | None = mode.value_of(tensor)
        return value

    def find_meta(self, value: object) -> Any:
        """The metadata of a structure of values; `UNKNOWN` if one of them is unknown."""
        return self.derivation.find_meta(value)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        return self.arguments.name_of(tensor)

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

    def is_open(self, graph: Graph) -> bool:
        """Whether nodes of this graph can be arguments: it is being recorded, or a subgraph of it is."""
        if self.is_over:
            return False
        return graph is self.graph or any(graph in (body.graph, body.outside) for body in self._bodies)

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

    def add_body(self, module: GraphModule) -> Node:
        """Add the graph of a body to the root; returns the node that reads it."""
        with self.outermost():
            node = self.arguments.read_constant(module, "_body")
        made: Node = self.node_in_graph(node)
        return made

    # --- modules -------------------------------------------------------------------------------------------------

    def record_module(
        self,
        module: torch.nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Any:
        if self._is_entering:  # the root itself
            self._is_entering = False
            return forward(*args, **kwargs)
        return self.call_module(module, forward, args, kwargs)

    def call_module(
        self,
        m: torch.nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Any:
        """Called for each module that the program calls: a leaf becomes a node, the calls inside of others are recorded."""
        if modules.has_known_parts(self, m):
            return forward(*args, **kwargs)
        path = self.path_of_module(m)
        count = self.num_calls.get(path, 0)
        self.num_calls[path] = count + 1
        key = f"{path}@{count}" if count else path
        self.module_stack[key] = path, type(m)
        before = self.scope, self.called
        self.scope = Scope(path, type(m))
        try:
            if not self.is_leaf_module(m, path):
                return forward(*args, **kwargs)
            self.called = m, forward
            self.orig_forward = forward
            return self.call("call_module", path, args, kwargs)
        finally:
            self.scope, self.called = before
            self.module_stack.pop(key, None)

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        is_script = isinstance(m, torch.jit.ScriptModule)  # it runs in C++
        return is_script or super().is_leaf_module(m, module_qualified_name)

    def path_of_module(self, mod: torch.nn.Module) -> str:
        return modules.path_of(self, mod)

    def _insert_module_as_submodule(self, mod: torch.nn.Module) -> str:
        """Add a module that the program has made to the root; returns its name there."""
        path = modules.find_fresh_name(self.root, type(mod).__name__.lower())
        self.root.add_module(path, mod)
        return path


@mark_boundary
def _program(function: Callable[..., object], args: list[object], kwargs: dict[str, object]) -> Any:
    return function(*args, **kwargs)


def symbolic_trace(
    root: torch.nn.Module | Callable[..., object],
    meta_args: Mapping[str, object] | None = None,
    concrete_args: Mapping[str, object] | None = None,
    *,
    symbolic: bool | Mapping[str, object] = False,
    strict: bool = False,
    tracer: MetaTracer | None = None,
) -> GraphModule:
    """A module that does what `root` does, as a graph of calls of torch: `torch.fx.symbolic_trace`, with examples.

        traced = symbolic_trace(model, meta_args={"x": torch.empty(8, 128, device="meta")})

    The arguments are those of `MetaTracer.trace`. `shape_env` of the result has the guards of a symbolic trace.
    """
    tracer = tracer or MetaTracer()
    graph = tracer.trace(root, meta_args, concrete_args, symbolic=symbolic, strict=strict)
    name = type(root).__name__ if isinstance(root, torch.nn.Module) else getattr(root, "__name__", "traced")
    module = _torch.lazy_graph_module(tracer.root, graph, name)
    for constant in tracer.arguments.added:
        delattr(tracer.root, constant)  # restore the original module: the new one has them
    module.shape_env = tracer.shape_env
    module.training = tracer.root.training  # submodules keep their own modes
    return module
