"""PythonKeyTracer: the graph that is being recorded, and the node of each value."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from types import CodeType, ModuleType
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from understudy import _torch
from understudy.capture.constants import Constants
from understudy.capture.trackers import SymbolTracker, TensorTracker
from understudy.errors import Context, UnsupportedOperatorException
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import NodeMeta, set_val
from understudy.graph.random_state import KeptRandomState, node_of_generator
from understudy.graph.symbol_nodes import SymbolNodes
from understudy.lines import user_line
from understudy.patching import RECORDING, Hold, patch_found
from understudy.shapes.node import SymNode

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), type(...), torch.dtype, torch.layout, torch.memory_format,
     torch.device, range, type(NotImplemented)}
)  # fmt: skip
"""Types of values that are node arguments as literals."""


class PythonKeyTracer(torch.fx.Tracer):
    """Records the operators of a program as the nodes of a graph.

    A stand-in has a reference to its node; other tensors are in a weak dict. `root` holds the constants.
    """

    def __init__(
        self, graph: Graph | None = None, root: torch.nn.Module | None = None, *,
        autowrap_modules: tuple[ModuleType, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(autowrap_modules=autowrap_modules)  # type: ignore[arg-type]
        self.root = torch.nn.Module() if root is None else root
        self.graph = Graph(tracer_cls=type(self)) if graph is None else graph
        self.shape_env: Any = None
        self.tensor_attrs: dict[Any, str] = {}
        self.symbols = SymbolNodes(self)
        self.constants = Constants(self)
        self.node_meta = NodeMeta()
        self.known_values: MutableMapping[torch.Tensor, torch.Tensor] = WeakTensorKeyDictionary()
        self.script_object_tracker: MutableMapping[Any, Proxy] = WeakIdKeyDictionary()
        self.generators: dict[int, tuple[torch.Generator, Node]] = {}
        self.random_state: KeptRandomState | None = None
        self.parts: list[Any] = []
        self.keep_in_step: Callable[[], None] | None = None
        """Callbacks to run before the next call is recorded."""
        self._others: MutableMapping[torch.Tensor, Node] | None = None
        """The nodes of tensors that are not stand-ins, or have a node in an outer graph; None if there are none."""
        self._appender: _torch.NodeAppender | HookedAppender | None = None
        self.outside_tensors: Any = None
        """The stand-ins of real tensors, if stand-ins are traced."""
        self.torch_fn_counts: dict[Any, int] = {}
        self.proxy_module_inputs = False
        self.enable_thunkify = False

    # --- nodes ---------------------------------------------------------------------------------------------

    def append_call(self, target: Any, args: object, kwargs: object, name: str | None = None) -> Node:
        """Add a call to the graph. Its arguments must be nodes and literals already."""
        appender = self._appender
        if appender is None or appender.graph is not self.graph:
            appender = self.appender()
        node = appender.call(name or _torch.base_name(target), target, args, kwargs)
        self.node_meta.mark(node, sys._getframe(1))
        return node

    def append_bare(self, name: str, target: object, args: object, kwargs: object) -> Node:
        """Add a call without metadata."""
        return self.appender().call(name, target, args, kwargs)

    def append_read(self, target: str) -> Node:
        """Add a `get_attr` node."""
        return self.appender().read(target)

    def appender(self) -> _torch.NodeAppender | HookedAppender:
        """What adds nodes to the graph: by the shortest way, or by the methods that a subclass overrides."""
        appender = self._appender
        if appender is None or appender.graph is not self.graph:
            kind: Any = type(self)
            is_hooked = has_hooks(kind)
            appender = self._appender = HookedAppender(self) if is_hooked else _torch.NodeAppender(self.graph)
        return appender

    @property
    def torch_fn_metadata(self) -> Any:
        """The torch function that was called last."""
        return None if self.node_meta.torch_call is None else self.node_meta.torch_call[0]

    def trace(self, root: Any, concrete_args: Any = None) -> Graph:
        """As in torch.fx. Unpickling a graph module calls this, to rebuild the graph from its code."""
        if not isinstance(root, _torch.CodeOnlyModule):
            return super().trace(root, concrete_args)
        before = TRACER_OF_CODE.get()
        try:
            TRACER_OF_CODE.set(self)
            with Hold() as hold, RecordAllCalls(self):
                for owner, name in (*FUNCTIONS_WITHOUT_TENSORS, *_higher_order_in(root.forward.__code__)):
                    hold.replace(owner, name, record_call)
                return super().trace(root, concrete_args)
        finally:
            TRACER_OF_CODE.set(before)

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """The inputs of the traced function. The code of a graph with structured inputs or outputs is traced on their
        leaves: a proxy of a structure could not be unpacked, and would be returned as another class."""
        in_spec = vars(self.root).get("_in_spec") if TRACER_OF_CODE.get() is self else None
        if in_spec is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        names = list(inspect.signature(root_fn).parameters)[1:]
        inputs = [
            self.proxy(self.placeholder(f"{name}_{count}"))
            for name, part in zip(names, _torch.children(in_spec), strict=True)
            for count in range(1, part.num_leaves + 1)
        ]

        def run(*leaves: Proxy) -> list[Any]:
            result = root_fn(self.root, *_torch.tree_unflatten(leaves, in_spec))
            results, out_spec = _torch.tree_flatten(result)
            self.graph.set_codegen(_torch.structured_code(names, in_spec, out_spec))
            return results

        run.__annotations__.clear()  # torch.fx would write them into the code of the graph
        return run, inputs

    def placeholder(self, name: str, default: tuple[Any, ...] = ()) -> Node:
        return self.graph.create_node("placeholder", name, default, {}, name=name)

    # --- nodes of values ----------------------------------------------------------------------------------

    def remember(self, tensor: torch.Tensor, node: Node) -> None:
        """Register the node of a tensor."""
        if type(tensor) is FakeTensor:
            before = tensor._node
            if before is None or before.graph is self.graph or before.graph is not self._outer_graph(before):
                tensor._node = node
                return
        if self._others is None:
            self._others = WeakTensorKeyDictionary()
        self._others[tensor] = node

    def _outer_graph(self, node: Node) -> Graph | None:
        """The graph of a node, if it is still being recorded: the tensor must keep its node there."""
        return node.graph if node.graph in OPEN else None

    def find_node(self, tensor: torch.Tensor) -> Node | None:
        """The node of this tensor in this graph, None if it has none."""
        if type(tensor) is FakeTensor:
            node: Node | None = tensor._node
            if node is not None and node.graph is self.graph:
                return node
        return None if self._others is None else self._others.get(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the node of a tensor: it becomes a constant where it is used again."""
        if type(tensor) is FakeTensor and tensor._node is not None and tensor._node.graph is self.graph:
            tensor._node = None
        if self._others is not None:
            self._others.pop(tensor, None)

    def tensors_apart(self) -> Iterator[torch.Tensor]:
        """The tensors that do not refer to their nodes themselves."""
        return iter(()) if self._others is None else iter(list(self._others))

    def node_of_tensor(self, tensor: torch.Tensor) -> Node:
        """The node of this tensor; if it has none, it becomes a constant of the module."""
        # `find_node`, without a call for each use of a parameter
        node: Node | None = tensor._node if type(tensor) is FakeTensor else None
        if node is not None and node.graph is self.graph:
            return node
        if self._others is not None and (node := self._others.get(tensor)) is not None:
            return node
        return self.constants.node_of(tensor)

    def argument(self, value: Any) -> Any:
        """A value as an argument of a node."""
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is FakeTensor or isinstance(value, torch.Tensor):
            return self.node_of_tensor(value)
        if kind in SYMBOLIC:
            return self.argument_of_symbol(value)
        if kind is list or kind is tuple:
            return kind([self.argument(part) for part in value])
        if kind is torch.Size:
            return [self.argument(part) for part in value]
        if kind is dict:
            return {key: self.argument(part) for key, part in value.items()}
        if isinstance(value, SYMBOLIC):
            return self.argument_of_symbol(value)
        if isinstance(value, Proxy):
            return value.node
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if isinstance(value, torch.ScriptObject) and value in self.script_object_tracker:
            return self.script_object_tracker[value].node
        if isinstance(value, torch.Generator):
            return node_of_generator(value, self) or self.constants.node_of_object(value, "_generator")
        if isinstance(value, torch.UntypedStorage):
            raise UnsupportedOperatorException(
                "expected tensors as arguments of an operator, got a storage, which a graph can't hold; copy and load "
                "(copy.deepcopy, torch.load) before the trace",
                context=Context(line=user_line()),
            )
        return self.create_arg(value)

    def record_state(
        self, kind: str, target: Any, args: Any, kwargs: Any, result: object
    ) -> tuple[Node, Any]:
        """Record a call that reads or changes the state of a generator, or of the process."""
        node = self.create_node(kind, target, self.argument(args), self.argument(kwargs))
        node.meta["val"] = None
        if isinstance(result, torch.Tensor):
            set_val(node, result)
            self.remember(result, node)
        return node, result

    def argument_of_symbol(self, value: Any) -> Any:
        node = value.node
        if type(node) is not SymNode:
            return self.symbols.node_of_torch_number(value)
        if self.shape_env is None:
            self.shape_env = node.shape_env
        return self.symbols.node_of(node)

    def has_symbol(self, value: object) -> bool:
        """Whether the graph can compute a symbolic number."""
        return self.symbols.can_compute(value)

    # --- methods that torch.fx calls ------------------------------------------------------------------------------

    def call_module(self, m: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: object, parameter_proxy_cache: object) -> Any:
        return attr_val

    def create_arg(self, a: object) -> Any:
        if isinstance(a, torch.Tensor):
            return self.node_of_tensor(a)
        if isinstance(a, SYMBOLIC):
            return self.argument_of_symbol(a)
        return super().create_arg(a)

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: object = None
    ) -> Node:
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if kind not in ("placeholder", "output"):
            self.node_meta.mark(node)
        return node

    def unwrap_proxy(self, e: object) -> Any:
        """The proxy of a value, the value itself if it has none."""
        if isinstance(e, torch.Tensor):
            node = self.find_node(e)
            return e if node is None else self.proxy(node)
        if isinstance(e, SYMBOLIC):
            node = self.argument_of_symbol(e)
            return self.proxy(node) if isinstance(node, Node) else e
        return self.script_object_tracker.get(e, e) if isinstance(e, torch.ScriptObject) else e

    @property
    def tensor_tracker(self) -> TensorTracker:
        """Tensor → proxy, as a mapping, for code that uses torch's tracer."""
        return TensorTracker(self)

    @property
    def symnode_tracker(self) -> SymbolTracker:
        """Symbolic number → proxy, likewise."""
        return SymbolTracker(self)


HOOKS = ("create_node", "create_proxy", "create_arg")
"""Methods that make nodes, which subclasses override."""


@functools.cache
def has_hooks(kind: Any) -> bool:
    """Whether a class of tracers overrides one of these."""
    return any(getattr(kind, name) is not getattr(PythonKeyTracer, name) for name in HOOKS)


class HookedAppender:
    """Adds nodes by `create_proxy`, as torch's own recorder does, for tracers that override how nodes are made."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self._tracer = tracer
        self.graph = tracer.graph

    def call(self, base: str, target: Any, args: Any, kwargs: Any) -> Node:
        make: Any = self._tracer.proxy
        args, kwargs = torch.fx.map_arg((args, kwargs), make)
        node: Node = self._tracer.create_proxy("call_function", target, args, kwargs, name=base).node
        return node

    def read(self, target: str) -> Node:
        node: Node = self._tracer.create_proxy("get_attr", target, (), {}).node
        return node


class RecordAllCalls(_torch.FunctionMode):
    """While the code of a graph is traced: calls without proxies among their arguments become nodes as well. If they
    ran, their results would be constants: random numbers that are always the same, or zeros that are written to. And
    C++ does not accept lists with proxies of sizes."""

    def __init__(self, tracer: PythonKeyTracer) -> None:
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, _torch.OpOverload) or func in CHANGES_OF_STATE:
            return self._tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


def _higher_order_in(code: CodeType) -> Iterator[tuple[Any, str]]:
    """The places in torch of the higher-order operators that the code of a graph names."""
    for name in code.co_names:
        if isinstance(getattr(torch.ops.higher_order, name, None), _torch.HigherOrderOperator):
            yield torch.ops.higher_order, name


TRACER_OF_CODE: ContextVar[PythonKeyTracer | None] = ContextVar("reads_code", default=None)
"""The tracer that traces the code of a graph in this thread."""


@patch_found(
    "functions of the random state and higher-order operators that the code of a graph names",
    during=RECORDING,
)
def record_call(original: Callable[..., object]) -> Callable[..., Any]:
    """Unpickling a graph module traces its code. No mode sees these functions, so they are replaced to become nodes."""

    def call(*args: object, **kwargs: object) -> Any:
        tracer = TRACER_OF_CODE.get()
        if tracer is None:
            return original(*args, **kwargs)
        return tracer.create_proxy("call_function", inspect.unwrap(original), args, kwargs)

    return call


FUNCTIONS_WITHOUT_TENSORS = (
    *((torch.random, name) for name in ("get_rng_state", "set_rng_state", "manual_seed")),
    (torch, "set_default_dtype"),
    _torch.place_of_generator,
)
"""As they are named in the code of a graph."""
CHANGES_OF_STATE = (_torch.set_grad_enabled, _torch.enter_autocast, _torch.exit_autocast)


class OpenGraphs:
    """The graphs that are being recorded, in any thread."""

    def __init__(self) -> None:
        self._graphs: dict[int, Graph] = {}

    def __contains__(self, graph: Graph) -> bool:
        return id(graph) in self._graphs

    def __iter__(self) -> Iterator[Graph]:
        return iter(list(self._graphs.values()))

    def add(self, graph: Graph) -> None:
        self._graphs[id(graph)] = graph

    def remove(self, graph: Graph) -> None:
        self._graphs.pop(id(graph), None)


OPEN = OpenGraphs()
