"""A program beside the graph that was captured from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from tests.oracle.compare import tensors_in
from tests.oracle.effects import effect_of, effects_differ
from understudy import make_fx

MODES = ("real", "fake", "symbolic")


def captured(f: Callable[..., Any], *args: Any, mode: str = "symbolic", **options: Any) -> GraphModule:
    """The graph of `f`, traced with copies of the arguments."""
    torch.manual_seed(1)
    return make_fx(f, tracing_mode=mode, **options)(*copy.deepcopy(args))


def assert_same(f: Callable[..., Any], graph: Callable[..., Any], *args: Any) -> None:
    """Results to the bit, what shares memory with what, and writes to the arguments."""
    for_program, for_graph = copy.deepcopy(args), copy.deepcopy(args)
    program = effect_of(lambda: f(*for_program), tensors_in(for_program))
    found = effects_differ(program, effect_of(lambda: graph(*for_graph), tensors_in(for_graph)))
    assert not found, "\n".join([*found, str(getattr(graph, "code", ""))])


def check(
    f: Callable[..., Any],
    *args: Any,
    modes: tuple[str, ...] = MODES,
    others: tuple[tuple[Any, ...], ...] = (),
    **options: Any,
) -> dict[str, GraphModule]:
    """Capture in each mode, and compare; the symbolic graph also with other arguments."""
    graphs = {}
    for mode in modes:
        graph = graphs[mode] = captured(f, *args, mode=mode, **options)
        graph.graph.lint()
        assert_same(f, graph, *args)
        for other in others if mode == "symbolic" else ():
            assert_same(f, graph, *other)
    return graphs


def targets(graph: GraphModule) -> list[str]:
    """The operators of a graph, by short names."""
    return [
        str(node.target).removeprefix("aten.")
        if not callable(node.target) or hasattr(node.target, "_schema")
        else node.target.__name__
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]
