"""ProxyTorchDispatchMode: while it is active, every operator call becomes a node of a graph.

call ──► decomposition? ──► arguments as nodes ──► the result (from the fake mode, or for real) ──► node
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.fx import Node
from torch.fx.immutable_collections import immutable_list

from understudy import _torch
from understudy.capture.higher_order import subgraphs
from understudy.capture.tracer import OPEN, PLAIN, SYMBOLIC, PythonKeyTracer
from understudy.capture.unrecorded_effects.tensor_data import DeterminedRealValues, refuse_read
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import is_snapshot, make_snapshot
from understudy.fake.tensor import FakeTensor
from understudy.graph.node_values import as_val, set_val
from understudy.ops.registry import record_of
from understudy.ops.shared.decompositions import decompose
from understudy.ops.traits.autocast import is_cast_in_kernel
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.bindings import compute_unbacked_bindings, unbacked_symbols_in
from understudy.shapes.env import ShapeEnv
from understudy.spec.call import flat
from understudy.spec.error_context import refuse_order

log = logging.getLogger(__name__)
active_fake_mode = _torch.active_fake_mode
aten = torch.ops.aten
Decompositions = Mapping[Any, Callable[..., Any]]
AMBIENT: ContextVar[Decompositions | None] = ContextVar("decompositions", default=None)
"""The decomposition table of traces without their own."""


class Route:
    """How calls of one operator are recorded. `is_direct`: the fake mode can be called directly, and the node appended."""

    __slots__ = (
        "breaks_up",
        "breaks_up_in_autocast",
        "decomposition",
        "is_direct",
        "name",
        "record",
        "target",
    )

    def __init__(self, op: Any, decomposition: Any, keeps_composites: bool) -> None:
        self.decomposition = decomposition
        self.target = op
        self.is_direct = False
        if isinstance(op, _torch.HigherOrderOperator):
            return
        self.record = record = record_of(op)
        self.target = record.recorded_as or op
        self.name = self.target.overloadpacket.__name__
        is_unrecorded = record.unrecorded is not None
        if (
            record.reads_value is not None
        ):  # its result is a Python bool: the graph contains its inputs, not the call
            keeps_composites = False
        self.breaks_up = not keeps_composites and not is_unrecorded and _torch.is_decomposed_by_autograd(op)
        self.breaks_up_in_autocast = not keeps_composites and record.caller_in_kernel is not None
        is_special = record.is_data_dependent or record.changes_metadata or record.has_out or is_unrecorded
        # Above autograd, the call still has to run through autograd.
        self.is_direct = decomposition is None and not (
            keeps_composites or self.breaks_up or self.breaks_up_in_autocast or is_special
        )


@functools.lru_cache(maxsize=4096)
def route_of(op: object, keeps_composites: bool) -> Route:
    """The route of an operator that is not decomposed."""
    return Route(op, None, keeps_composites)


INTEGERS = frozenset({int})


class ProxyTorchDispatchMode(_torch.TorchDispatchMode):
    """Records every operator in the graph of its tracer.

    With a `FakeTensorMode` active, results are stand-ins; without, operators run for real.
    """

    _mode_key = _torch.PROXY
    supports_higher_order_operators = True
    enable_tracing = True
    """If it is set to False, operators run without being recorded."""
    records_parts = True
    """Above autograd, also record the inner operators of composites: a backward pass inside the program reads them."""
    whole: Container[Any] = ()
    """Below autograd: composite operators that are recorded without decomposition."""

    def __init__(
        self, tracer: PythonKeyTracer, tracing_mode: str = "real", pre_dispatch: bool = False,
        _allow_fake_constant: bool = False, _error_on_data_dependent_ops: bool = True,
        decomposition_table: Decompositions | None = None,
    ) -> None:  # fmt: skip
        if pre_dispatch:
            _torch.mark_above_autograd(self)
            self._modes_before = _torch.list_program_modes()
        self.tracer = tracer
        self.tracing_mode = tracing_mode
        self.pre_dispatch = pre_dispatch
        self._allow_fake_constant = _allow_fake_constant
        self._error_on_data_dependent_ops = _error_on_data_dependent_ops
        ambient = AMBIENT.get() if decomposition_table is None else decomposition_table
        self.decomposition_table = {} if ambient is None else ambient
        self._routes: dict[int, Route] = {}
        self._parts: Any = None
        tracer.constants.allow_fakes = _allow_fake_constant

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would wrap __torch_dispatch__ in a layer that costs more than the dispatch itself

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    # torch accepts only its own classes above autograd, which it checks by isinstance.
    def _claimed_class(self) -> Any:
        return _torch.torch_recorder_class() if self.pre_dispatch else type(self)

    __class__ = property(_claimed_class)

    @functools.cached_property
    def _values(self) -> DeterminedRealValues:
        return DeterminedRealValues(self.tracer)

    # --- entering and leaving ------------------------------------------------------------------------------

    def __enter__(self) -> ProxyTorchDispatchMode:
        graph = self.tracer.graph
        is_first = graph not in OPEN and _torch.latest_entry(_torch.ENTERED.recorders, self) is None
        entry = _torch.RecorderEntry(self, functools.partial(OPEN.remove, graph) if is_first else None)
        if is_first:
            OPEN.add(graph)
        entry.enter()
        return self

    def __exit__(self, *exception: object) -> None:
        entry = _torch.latest_entry(_torch.ENTERED.recorders, self)
        if entry is not None and not entry.leave(*exception[1:2]):
            refuse_order(entry, self, exception)

    # --- decompositions ------------------------------------------------------------------------------------

    @property
    def decomposition_table(self) -> Decompositions:
        return self._decompositions

    @decomposition_table.setter
    def decomposition_table(self, table: Decompositions) -> None:
        self._decompositions = table
        self._routes = {}

    @contextmanager
    def enable_decompositions(self, decomposition_table: Decompositions | None) -> Iterator[Decompositions]:
        """Inside, operators are decomposed by this table only."""
        before = self.decomposition_table
        self.decomposition_table = {} if decomposition_table is None else decomposition_table
        try:
            yield self.decomposition_table
        finally:
            self.decomposition_table = before

    def _route_of(self, op: object) -> Route:
        # torch's own tables are mappings whose `get` misses entries.
        decomposition = self._decompositions[op] if op in self._decompositions else None  # noqa: SIM401
        route = (
            route_of(op, self.pre_dispatch or op in self.whole)
            if decomposition is None
            else Route(op, decomposition, self.pre_dispatch)
        )
        self._routes[id(op)] = route
        return route

    # --- one operator call ---------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """The hot path: stand-ins in, one stand-in out. Everything else goes to `_dispatch_unusual`."""
        fake_mode = active_fake_mode()
        route = self._routes.get(id(func)) or self._route_of(func)  # hashing an operator is slow
        if not route.is_direct or type(fake_mode) is not FakeTensorMode or not self.enable_tracing:
            return self._dispatch_unusual(func, types, args, kwargs or {}, fake_mode)
        tracer = self.tracer
        graph = tracer.graph
        node_args: list[Any] = []
        for value in args:
            kind = type(value)
            if kind is FakeTensor:
                node = value._node
                if node is None or node.graph is not graph:
                    node = tracer.node_of_tensor(value)
                node_args.append(node)
            elif kind in PLAIN or (kind is list and INTEGERS.issuperset(map(type, value))):
                node_args.append(value)
            else:
                if (
                    kind is not list
                    and isinstance(value, torch.Tensor)
                    and self._needs_own_dispatch(value, kind)
                ):
                    return NotImplemented
                node_args.append(tracer.argument(value))
        node_kwargs = {name: tracer.argument(value) for name, value in kwargs.items()} if kwargs else {}
        result = fake_mode.__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:  # a subclass handles the call
            result = func(*args, **(kwargs or {}))
        appender = tracer._appender
        if appender is None or appender.graph is not graph:
            appender = tracer.appender()
        node = appender.call(route.name, route.target, tuple(node_args), node_kwargs)
        node_meta = tracer.node_meta
        meta = node_meta.mark(node, sys._getframe(1))
        if type(result) is FakeTensor:
            before = result._node
            if before is None:
                result._node = node
                val = make_snapshot(fake_mode, result)
            elif before.graph is graph:  # an input, written in place or returned: it has a snapshot
                result._node = node
                val = before.meta.get("val")
                if not is_snapshot(val, result):
                    val = make_snapshot(fake_mode, result)
            else:  # also tensors that were written in place, and have a node in an outer graph
                tracer.remember(result, node)
                val = make_snapshot(fake_mode, result)
            meta["val"] = val
            meta["tensor_meta"] = node_meta.tensor_metas.get(result._spec) or node_meta.tensor_meta(result)
            env = fake_mode.shape_env
            if env is not None:
                if route.record.has_dynamic_shape:
                    self._note_symbols_of_before(env, unbacked_symbols_in(result))
                if env.pending_fresh_unbacked_symbols:
                    self._bind_fresh(env, result, node)
        elif (type(result) is tuple or type(result) is list) and not route.record.has_dynamic_shape:
            self._track_parts(fake_mode, result, node, meta)
        else:
            if route.record.has_dynamic_shape:
                self._note_symbols_of_before(fake_mode.shape_env, unbacked_symbols_in(result))
            self.track(result, node)
        return result

    def _track_parts(self, fake_mode: FakeTensorMode, result: Any, node: Node, meta: dict[str, Any]) -> None:
        """`track` for several stand-ins."""
        tracer = self.tracer
        vals: list[Any] = []
        for position, part in enumerate(result):
            if type(part) is not FakeTensor:
                if part is not None:
                    self.track(part, tracer.append_call(operator.getitem, (node, position), {}, "getitem"))
                vals.append(as_val(part))
                continue
            item = tracer.appender().call("getitem", operator.getitem, (node, position), {})
            item_meta = tracer.node_meta.mark(item, sys._getframe(2))
            val = item_meta["val"] = make_snapshot(fake_mode, part)
            item_meta["tensor_meta"] = tracer.node_meta.tensor_meta(part)
            tracer.remember(part, item)
            vals.append(val)
        meta["val"] = tuple(vals) if type(result) is tuple else immutable_list(vals)
        env = fake_mode.shape_env
        if env is not None and env.pending_fresh_unbacked_symbols:
            self._bind_fresh(env, result, node)

    def __sym_dispatch__(self, func: Any, types: object, args: Any, kwargs: Any) -> Any:
        """Arithmetic on torch's own symbolic numbers. It becomes nodes when a number reaches the graph, as for ours."""
        with _torch.without_recorder():
            return func(*args, **kwargs)

    def _needs_own_dispatch(self, tensor: torch.Tensor, kind: type) -> bool:
        """Whether this is a subclass with its own `__torch_dispatch__`, which has to be called first."""
        if not _torch.uses_python_dispatch(kind) or self.tracer.find_node(tensor) is not None:
            return False
        log.debug("the recorder leaves operators on %s to its own __torch_dispatch__", kind.__name__)
        return True

    def call_higher_order(self, original: Any, op: object, key: object, args: object, kwargs: object) -> Any:
        """Called for a higher-order operator; `original` is torch's own dispatch."""
        return subgraphs.enter(self, original, op, key, args, kwargs)

    def _dispatch_unusual(self, func: Any, types: object, args: Any, kwargs: Any, fake_mode: object) -> Any:
        if not self.enable_tracing:
            return func(*args, **kwargs)
        if self.pre_dispatch and (
            _torch.has_transforms() or _torch.list_program_modes() != self._modes_before
        ):
            return self.record_below_autograd(func, args, kwargs)
        if isinstance(func, _torch.HigherOrderOperator):
            return subgraphs.record(self, func, args, kwargs)
        tensors = flat(torch.Tensor, args, kwargs)
        if any(self._needs_own_dispatch(t, type(t)) for t in tensors if type(t) is not FakeTensor):
            return self.record_below_autograd(func, args, kwargs) if self.pre_dispatch else NotImplemented
        route = self._routes[id(func)]
        # Strided nested tensors have their own kernels for composite operators.
        breaks_up = route.breaks_up and not any(tensor.is_nested for tensor in tensors)
        if route.breaks_up_in_autocast and _torch.enabled_autocast_keys():
            breaks_up = is_cast_in_kernel(func, {tensor.device.type for tensor in tensors})
        if route.decomposition is not None or breaks_up:
            answer = self._decompose(func, route, args, kwargs)
            if answer is not NotImplemented:
                return answer
        if record_of(func).unrecorded is not None:
            return func(*args, **kwargs)
        if self.pre_dispatch and self.tracer.keep_in_step is not None:
            self.tracer.keep_in_step()
        if (
            route.record.is_data_dependent
            and (known := self._values.read(func, args, kwargs, tensors, fake_mode)) is not None
        ):
            return known[0]
        if fake_mode is None:
            return self._run_for_real(func, route, args, kwargs, tensors)
        node_args, node_kwargs = self._as_arguments(route, args, kwargs)
        specs = [fake._spec for fake in tensors if type(fake) is FakeTensor] if route.record.has_out else None
        result = self._result(fake_mode, func, types, args, kwargs)
        if result is NotImplemented:
            return result
        is_read = route.record.is_data_dependent
        unbacked = (
            unbacked_symbols_in(result) if is_read or route.record.has_dynamic_shape else frozenset[Expr]()
        )
        if is_read and self._is_known_number(result, unbacked):
            return result
        if specs is not None:
            self._read_before_resizes(tensors, specs)
        node = self.tracer.append_call(route.target, node_args, node_kwargs, route.name)
        if unbacked:
            self._note_symbols_of_before(env_of_result(result), unbacked)
        self.track(result, node)
        self._of_parts(node)
        return result

    def _is_known_number(self, value: object, unbacked: Set[Expr]) -> bool:
        """Whether a number that was read from a tensor needs no node: it is determined, and the graph can compute it. The
        number in a tensor that is an input is neither data-dependent nor among the sizes of the inputs."""
        return type(value) in PLAIN or (
            isinstance(value, SYMBOLIC) and not unbacked and self.tracer.has_symbol(value)
        )

    def _read_before_resizes(self, tensors: Any, specs: Any) -> None:
        """Read the sizes of an `out=` tensor before the call that resized it."""
        fakes = [fake for fake in tensors if type(fake) is FakeTensor]
        if any(fake._spec is not spec for fake, spec in zip(fakes, specs, strict=True)):
            self.tracer.symbols.read_all()

    def _result(self, fake_mode: object, func: Any, types: object, args: Any, kwargs: Any) -> Any:
        if self.pre_dispatch:
            return self._run_through_autograd(func, args, kwargs)
        if type(fake_mode) is FakeTensorMode:
            result = fake_mode.__torch_dispatch__(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _run_through_autograd(self, func: Any, args: Any, kwargs: Any) -> Any:
        # why: it is a recorder itself
        from understudy.capture.predispatch import InnerRecorder, needs_parts

        self._parts = None
        with _torch.NoFunctionModes():
            if not self.records_parts or not needs_parts(args, kwargs):
                return func(*args, **kwargs)
            inner = InnerRecorder(self)
            with inner:
                result = func(*args, **kwargs)
        inner.parts.close(result)
        self._parts = inner.parts
        return result

    def _of_parts(self, node: Node) -> None:
        """Link the node of a composite to its inner nodes."""
        if self._parts is not None:
            self._parts.replace_parts(node)
            self._parts = None

    def record_below_autograd(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record the operators of a call below autograd, if something else handles it first: a transform of
        torch.func, a subclass or a dispatch mode of the program."""
        with self.below_autograd(), _torch.NoFunctionModes():
            return func(*args, **kwargs)

    def below_autograd(self) -> ProxyTorchDispatchMode:
        """A recorder of the same trace below autograd."""
        return ProxyTorchDispatchMode(
            self.tracer, self.tracing_mode, False, self._allow_fake_constant, self._error_on_data_dependent_ops,
            self.decomposition_table,
        )  # fmt: skip

    def _as_arguments(self, route: Route, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tracer = self.tracer
        if route.record.changes_metadata:
            tracer.symbols.read_all()
        node_args = tuple([tracer.argument(value) for value in args])
        return node_args, {name: tracer.argument(value) for name, value in kwargs.items()}

    def _decompose(self, func: Any, route: Route, args: Any, kwargs: Any) -> Any:
        """Run the user's decomposition, or eager's own for a composite operator."""
        meta = self.tracer.node_meta
        before = meta.original_aten
        if before is None:
            meta.original_aten = func
        try:
            with self:
                if route.decomposition is not None:
                    return route.decomposition(*args, **kwargs)
                with _torch.inside_composite(func):
                    return decompose(func, args, kwargs)
        finally:
            meta.original_aten = before

    def _run_for_real(self, func: Any, route: Route, args: Any, kwargs: Any, tensors: Any) -> Any:
        if route.record.is_data_dependent and self._error_on_data_dependent_ops and tensors:
            raise refuse_read(func, tensors)
        node_args, node_kwargs = self._as_arguments(route, args, kwargs)
        if route.record.may_write:
            self.tracer.constants.before_write(func, args, kwargs)
        known = self._values.before(func, args, kwargs, tensors)
        result = (
            self._run_through_autograd(func, args, kwargs) if self.pre_dispatch else func(*args, **kwargs)
        )
        node = self.tracer.append_call(route.target, node_args, node_kwargs, route.name)
        self.track(result, node)
        self._of_parts(node)
        self._values.after(func, route, known, args, result)
        return result

    # --- results ---------------------------------------------------------------------------------------

    def track(self, result: object, node: Node) -> None:
        """Register a node for the tensors and symbols in its result."""
        set_val(node, result)
        self._track(result, node)
        fake_mode = _torch.active_fake_mode()
        if fake_mode is None:  # stand-ins can be traced although their mode is not entered
            env = env_of_result(result)
        else:
            env = fake_mode.shape_env if type(fake_mode) is FakeTensorMode else None
        if env is not None:
            self._bind_fresh(env, result, node)

    def _track(self, result: object, node: Node) -> None:
        if isinstance(result, torch.Tensor):
            self.tracer.remember(result, node)
        elif isinstance(result, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self.tracer.symbols.bind(result, node)
        elif isinstance(result, (list, tuple)):
            for position, part in enumerate(result):
                if part is not None and not isinstance(part, (int, float, str)):
                    item = self.tracer.append_call(operator.getitem, (node, position), {}, "getitem")
                    set_val(item, part)
                    self._track(part, item)
        elif isinstance(result, dict):
            for name, part in result.items():
                item = self.tracer.append_call(operator.getitem, (node, name), {}, "getitem")
                set_val(item, part)
                self._track(part, item)

    def _note_symbols_of_before(self, env: ShapeEnv | None, symbols: Set[Expr]) -> None:
        """A stand-in memoises symbols that were read from its data before; in this graph, this call produces them."""
        if env is not None and not symbols <= set(pending := env.pending_fresh_unbacked_symbols):
            known = self.tracer.symbols.readable()
            pending.extend(s for s in symbols if s not in known and s not in pending)

    def _bind_fresh(self, env: ShapeEnv, result: object, node: Node) -> None:
        """Bind the unbacked symbols that this call created to its results."""
        if not env.pending_fresh_unbacked_symbols:
            return
        self.tracer.shape_env = env
        bindings = compute_unbacked_bindings(env, result)
        if bindings:
            node.meta["unbacked_bindings"] = bindings
        for tensor in flat(FakeTensor, (result,), {}):
            self.tracer.symbols.bind_tensor(tensor._spec, self.tracer.node_of_tensor(tensor))


def env_of_result(result: object) -> ShapeEnv | None:
    """The environment of the symbols in a result."""
    for value in flat((FakeTensor, *SYMBOLIC), (result,), {}):
        env = (
            value.fake_mode.shape_env
            if isinstance(value, FakeTensor)
            else getattr(value.node, "shape_env", None)
        )
        if type(env) is ShapeEnv:
            return env
    return None


_torch.hide_from_compiler(ProxyTorchDispatchMode.__torch_dispatch__)
