"""Decomposition tables: around a trace, inside a trace, and for an existing graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node

from understudy import _torch
from understudy.capture.make_fx import disable_autocast_cache as disable_autocast_cache
from understudy.capture.make_fx import make_fx
from understudy.capture.proxy_slots import track_tensor_tree
from understudy.capture.recorder import AMBIENT, Decompositions, ProxyTorchDispatchMode
from understudy.capture.tracer import PythonKeyTracer


@contextmanager
def decompose(decomposition_table: Decompositions | None) -> Iterator[Decompositions]:
    """Inside, operators are decomposed by this table: in the current trace, and in new traces without their own
    table."""
    table: Decompositions = {} if decomposition_table is None else decomposition_table
    recorder = _torch.active_recorder()
    token = AMBIENT.set(table)
    try:
        if isinstance(recorder, ProxyTorchDispatchMode):
            with recorder.enable_decompositions(table):
                yield table
        else:
            yield table
    finally:
        AMBIENT.reset(token)


def maybe_handle_decomp(proxy_mode: ProxyTorchDispatchMode, op: object, args: Any, kwargs: Any) -> Any:
    """Decompose this call by the recorder's table, and record it; NotImplemented if the operator is not in it."""
    table = proxy_mode.decomposition_table
    if op not in table:
        return NotImplemented
    with proxy_mode, set_original_aten_op(op):
        return table[op](*args, **kwargs)


@contextmanager
def set_original_aten_op(func: object) -> Iterator[None]:
    """Inside, recorded nodes have this operator as `original_aten`, unless an outer one is set."""
    recorder = _torch.active_recorder()
    meta = recorder.tracer.node_meta if isinstance(recorder, ProxyTorchDispatchMode) else None
    if meta is None or meta.original_aten is not None:
        yield
        return
    meta.original_aten = func
    try:
        yield
    finally:
        meta.original_aten = None


class DecompositionInterpreter(Interpreter):
    """Runs a graph module and records it in another graph, with decompositions.

        DecompositionInterpreter(module, new_graph := Graph(), table).run(*inputs)
        decomposed = GraphModule(module, new_graph)

    Constants that a decomposition makes become attributes of `module`.
    """

    def __init__(
        self,
        module: GraphModule,
        new_graph: Graph,
        decomposition_table: Decompositions | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, **kwargs)
        self.new_graph = new_graph
        self.tracer = PythonKeyTracer(new_graph, module)
        self.decomposition_table = decomposition_table or {}
        self.mode = ProxyTorchDispatchMode(self.tracer, "real", decomposition_table=self.decomposition_table)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().placeholder(target, args, kwargs)
        return self._track(value, self.new_graph.placeholder(target))

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, torch.Tensor) and self.tracer.find_node(value) is not None:
            return value
        return self._track(value, self.new_graph.get_attr(target))

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().output(target, args, kwargs)
        self.new_graph.output(self.tracer.argument(value))
        return value

    def run(self, *args: object, **kwargs: Any) -> Any:
        with self.mode:
            return super().run(*args, **kwargs)

    def _track(self, value: object, node: Node) -> Any:
        track_tensor_tree(value, self.tracer.proxy(node), constant=None, tracer=self.tracer)
        return value


class SelectiveDecomposer(Interpreter):
    """Runs a graph module; selected nodes are decomposed by the table."""

    def __init__(
        self, module: GraphModule, decompositions: Decompositions | None, is_selected: Callable[[Node], bool]
    ) -> None:
        super().__init__(module)
        self._decompositions = decompositions
        self._is_selected = is_selected

    def run_node(self, n: Node) -> Any:
        with decompose(self._decompositions) if self._is_selected(n) else nullcontext():
            return super().run_node(n)


def selective_decompose(
    joint_gm: GraphModule, *args: object, decomposition: Decompositions | None, should_decompose: Callable[[Node], bool],
    trace_joint_graph: bool,
) -> GraphModule:  # fmt: skip
    """The graph module retraced on `args`, with the nodes decomposed for which `should_decompose(node)` is true.

    `trace_joint_graph`: the graph is a function of two lists, and its placeholders are named after `primals` and
    `tangents`, as torch's partitioner expects.
    """
    run = SelectiveDecomposer(joint_gm, decomposition, should_decompose).run

    def joint(primals: list[Any], tangents: list[Any]) -> Any:
        return run(primals, tangents)

    def inference(*args: object) -> Any:
        return run(*args)

    return make_fx(joint if trace_joint_graph else inference, decomposition_table={})(*args)
