"""Random programs: in all three modes, the graph does what the program does, and elsewhere where the guards admit it."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.trace.captured import MODES, assert_same, captured
from tests.trace.random_programs import Program, programs


def check_program(program: Program, inputs: list[torch.Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for mode in MODES:
            graph = captured(program, *inputs, mode=mode)
            graph.graph.lint()
            assert_same(program, graph, *inputs)
        check_elsewhere(program, graph, inputs)


def check_elsewhere(program: Program, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
    env = graph.shape_env
    specs = [node.meta["val"]._spec for node in graph.graph.find_nodes(op="placeholder")]
    for change in (lambda size: size + 1, lambda size: 2 * size):
        sizes = {symbol: change(hint) for symbol, hint in env.hints.items() if symbol not in env.definitions}
        for symbol, expression in env.definitions.items():
            if all(part in sizes for part in expression.symbols):
                sizes[symbol] = int(expression.evaluate(sizes))
        if not sizes or not all(guard.holds(sizes) for guard in env.guards):
            continue
        shapes = [
            [size if type(size) is int else int(size.value.evaluate(sizes)) for size in spec.shape]
            for spec in specs
        ]
        others = [torch.randn(shape) for shape in shapes]
        assert_same(program, graph, *others)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_random_programs(case: tuple[Program, list[torch.Tensor]]) -> None:
    check_program(*case)


@pytest.mark.conformance
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs())
def test_many_random_programs(case: tuple[Program, list[torch.Tensor]]) -> None:
    check_program(*case)
