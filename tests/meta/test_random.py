"""Random graphs, traced anew: the same graph, the same numbers, the right metadata at every node."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule

from tests.graph.random_graphs import graphs
from tests.meta.reality import assert_same, wrong_nodes
from understudy import symbolic_trace


def named(module: GraphModule, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [node.target for node in module.graph.nodes if node.op == "placeholder"]
    return {str(name): value.clone() for name, value in zip(names, inputs, strict=True)}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_random_graphs(case: tuple[GraphModule, list[torch.Tensor]]) -> None:
    module, inputs = case
    traced = symbolic_trace(module, named(module, inputs))
    assert_same(module(*[value.clone() for value in inputs]), traced(**named(module, inputs)))
    assert wrong_nodes(traced, named(module, inputs)) == []


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_random_graphs_with_symbols(case: tuple[GraphModule, list[torch.Tensor]]) -> None:
    """What holds for the sizes at hand holds at these sizes when they are symbols."""
    module, inputs = case
    traced = symbolic_trace(module, named(module, inputs), symbolic=True)
    assert_same(module(*[value.clone() for value in inputs]), traced(**named(module, inputs)))
