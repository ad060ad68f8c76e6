"""After an edit: what is run again, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from tests.counting import count_calls
from tests.graph.reality import account, aliasing, differences
from understudy import FakeTensorMode, FakeTensorProp, make_fx, symbolic_trace

aten = torch.ops.aten


def chain(length: int) -> GraphModule:
    graph = Graph()
    node = graph.placeholder("x")
    for _ in range(length):
        node = graph.call_function(aten.relu.default, (node,))
    graph.output(node)
    return GraphModule(nn.Module(), graph)


def nodes_of(module: GraphModule) -> list[Node]:
    return list(module.graph.nodes)


def test_only_the_edited_node_runs_where_nothing_changes_downstream() -> None:
    module = chain(10)
    prop = FakeTensorProp(module)
    prop.propagate(torch.randn(2, 3))
    edited = nodes_of(module)[4]
    edited.target = aten.sin.default
    assert prop.repropagate([edited]) == [edited]


def test_what_a_change_reaches_runs_in_order_and_no_further() -> None:
    module = chain(6)
    nodes = nodes_of(module)
    prop = FakeTensorProp(module)
    prop.propagate(torch.randn(3, 3))
    nodes[4].target, nodes[4].args = aten.expand.default, (nodes[3], [3, 3])  # now a view of what it reads
    nodes[2].target, nodes[2].args = aten._to_copy.default, (nodes[1],)
    nodes[2].kwargs = {"dtype": torch.float64}
    assert prop.repropagate([nodes[4], nodes[2]]) == nodes[2:]
    assert differences(module, torch.randn(3, 3)) == []
    nodes[5].target, nodes[5].args = aten.sum.default, (nodes[4],)
    assert prop.repropagate([nodes[5]]) == nodes[5:]
    nodes[2].kwargs = {"dtype": torch.float32}
    assert prop.propagate(changed=[nodes[2]]).shape == ()
    assert prop.repropagate([]) == []
    assert differences(module, torch.randn(3, 3)) == []


TRACES = (lambda f, x: make_fx(f, pre_dispatch=True)(x, x), lambda f, x: symbolic_trace(f, {"x": x, "y": x}))


@pytest.mark.parametrize("trace", TRACES)
def test_an_edit_inside_of_a_region(trace: Any) -> None:
    """What a node gives there depends on autocast, and on the default dtype."""

    def program(x: Any, y: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            z = x @ y
        torch.set_default_dtype(torch.float64)
        ones = torch.ones(3)
        torch.set_default_dtype(torch.float32)
        return z + 1, ones

    module = trace(program, torch.randn(3, 3))
    prop = FakeTensorProp(module)
    prop.propagate(torch.randn(3, 3), torch.randn(3, 3))
    for name, dtype in (("matmul", torch.bfloat16), ("ones", torch.float64)):
        node = next(node for node in module.graph.nodes if node.name == name)
        node.args = tuple(reversed(node.args))
        prop.repropagate([node])
        assert node.meta["val"].dtype is dtype


def test_new_nodes_and_erased_nodes() -> None:
    module = chain(4)
    prop = FakeTensorProp(module)
    prop.propagate(torch.randn(2, 3))
    _, first, second, *_ = nodes_of(module)
    with module.graph.inserting_after(first):
        new = module.graph.call_function(aten.t.default, (first,))
    second.args = (new,)
    prop.repropagate([second])  # the new node is found through its user
    assert new.meta["val"].shape == (3, 2)
    assert differences(module, torch.randn(2, 3)) == []
    second.args = (first,)
    module.graph.erase_node(new)
    prop.repropagate([second, new])
    assert differences(module, torch.randn(2, 3)) == []
    assert aliasing(module)[0] != []


def test_views_follow_the_storage_that_they_are_views_of() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    base = graph.call_function(aten.sin.default, (x,))
    view = graph.call_function(aten.t.default, (base,))
    viewed = graph.call_function(aten.view.default, (base, [6]))
    far = graph.call_function(aten.exp.default, (view,))
    graph.output((far, viewed))
    module = GraphModule(nn.Module(), graph)
    prop = FakeTensorProp(module)
    prop.propagate(torch.randn(2, 3))
    base.target = aten.cos.default
    ran = prop.repropagate([base])
    assert far not in ran
    assert {view, viewed} <= set(ran)
    assert [base.name, view.name, viewed.name, "output"] in aliasing(module)


def test_another_input() -> None:
    module = chain(3)
    mode = FakeTensorMode()
    prop = FakeTensorProp(module, mode)
    prop.propagate(torch.randn(2, 3))
    x = nodes_of(module)[0]
    x.meta["val"] = mode.from_tensor(torch.randn(5))
    assert prop.propagate(changed=[x]).shape == (5,)
    assert all(node.meta["val"].shape == (5,) for node in nodes_of(module))


def test_values_that_are_known_count_as_different() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    count = graph.call_function(aten.full.default, ([], 2))
    number = graph.call_function(aten._local_scalar_dense.default, (count,))
    wide = graph.call_function(aten.expand.default, (x, [number, 3]))
    graph.output(wide)
    module = GraphModule(nn.Module(), graph)
    prop = FakeTensorProp(module)
    assert prop.propagate(torch.randn(3)).shape == (2, 3)
    count.args = ([], 7)
    assert prop.propagate(changed=[count]).shape == (7, 3)


def test_metadata_that_changes_in_place_means_a_full_run() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(aten.t_.default, (x,))
    graph.output(graph.call_function(aten.relu.default, (x,)))
    module = GraphModule(nn.Module(), graph)
    mode = FakeTensorMode()
    with mode:
        given = torch.empty(2, 3)
    prop = FakeTensorProp(module, mode)
    prop.propagate_dont_convert_inputs(given)
    for _ in range(2):
        assert len(prop.repropagate([nodes_of(module)[2]])) == 4
        assert differences(module, torch.randn(2, 3)) == []
    another = FakeTensorProp(module, mode)
    another.repropagate([nodes_of(module)[2]])
    assert differences(module, torch.randn(2, 3)) == []


def test_another_object_goes_on_from_what_is_written() -> None:
    module = chain(5)
    mode = FakeTensorMode()
    with pytest.raises(ValueError, match="propagate first"):
        FakeTensorProp(module, mode).repropagate(nodes_of(module)[1:2])
    FakeTensorProp(module, mode).propagate(torch.randn(2, 3))
    edited = nodes_of(module)[2]
    edited.target = aten.t.default
    assert FakeTensorProp(module, mode).repropagate([edited]) == nodes_of(module)[2:]
    assert differences(module, torch.randn(2, 3)) == []


def test_arguments_and_changes_exclude_each_other() -> None:
    prop = FakeTensorProp(chain(1))
    with pytest.raises(TypeError, match="expected no other arguments"):
        prop.propagate(torch.randn(2), changed=[])


def test_an_edit_costs_what_it_reaches() -> None:
    """Under a hundredth of a full run in a graph of 5,000 nodes."""
    module = chain(5000)
    prop = FakeTensorProp(module)
    x = torch.randn(2, 3)
    prop.propagate(x)
    with count_calls() as full:
        prop.propagate(x)
    edited = nodes_of(module)[2500]
    for target in (aten.sin.default, aten.cos.default):
        edited.target = target
        with count_calls(most=full.count / 100):
            prop.repropagate([edited])


def test_a_second_propagation_with_the_same_object() -> None:
    module = chain(3)
    prop = FakeTensorProp(module)
    prop.propagate(torch.randn(2))
    prop.propagate(torch.randn(4, 2))
    assert set(map(str, account(module).values())) == {"float32[4, 2][2, 1]"}
