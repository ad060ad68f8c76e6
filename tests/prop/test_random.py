"""Random graphs: every `val` is what a real run gives, and re-propagation after an edit is as good as a full one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule

from tests.graph.random_graphs import UNARY, graphs
from tests.graph.reality import RealRun, account, aliasing, differences
from understudy import FakeTensorMode, FakeTensorProp

slowly = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
REPLACEMENTS: list[Any] = [(target, rest) for target, rest in UNARY if not isinstance(target, str)]


def runs(module: GraphModule, inputs: list[torch.Tensor]) -> bool:
    try:
        RealRun(module).run(*[value.clone() for value in inputs])
    except (RuntimeError, IndexError, TypeError, AttributeError):
        return False
    return True


@slowly
@given(graphs())
def test_every_val_is_what_a_real_run_gives(made: tuple[GraphModule, list[torch.Tensor]]) -> None:
    module, inputs = made
    FakeTensorProp(module).propagate(*inputs)
    assert differences(module, *[value.clone() for value in inputs]) == []


@slowly
@given(graphs(), st.data())
def test_repropagation_is_as_good_as_a_full_one(
    made: tuple[GraphModule, list[torch.Tensor]], data: st.DataObject
) -> None:
    module, inputs = made
    mode = FakeTensorMode()
    prop = FakeTensorProp(module, mode)
    prop.propagate(*inputs)
    for _ in range(data.draw(st.integers(1, 3))):
        single = [n for n in module.graph.nodes if n.op == "call_function" and len(n.all_input_nodes) == 1]
        assume(single)
        node = data.draw(st.sampled_from(single))
        before = node.target, node.args
        target, rest = data.draw(st.sampled_from(REPLACEMENTS))
        node.target, node.args = target, (node.args[0], *rest)
        if not runs(module, inputs):
            node.target, node.args = before
            continue
        prop.repropagate([node])
        full = copy.deepcopy(module)
        for other in full.graph.nodes:
            other.meta.clear()
        FakeTensorProp(full).propagate(*inputs)
        assert account(module) == account(full)
        assert aliasing(module) == aliasing(full)
