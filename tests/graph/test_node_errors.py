"""An error while a graph runs on stand-ins: it names the node, its module and its line, and is of the kind that happened."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from understudy import FakeTensorMode, FakeTensorProp, PropagationError, make_fx
from understudy.errors import ShapeMismatch
from understudy.graph.node_origins import describe_node, line_of_node, locate_error


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x.t() + 0)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def failing_graph() -> tuple[GraphModule, Node]:
    """A graph whose product gets other shapes than it was captured with."""
    graph = make_fx(Outer(), tracing_mode="fake", record_module_stack=True)(torch.randn(2, 3))
    product = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default)
    product.args = (product.args[0], product.args[0])
    return graph, product


def test_the_error_names_node_module_and_line() -> None:
    graph, product = failing_graph()
    with pytest.raises(PropagationError) as caught:
        FakeTensorProp(graph).propagate(torch.randn(2, 3))
    error = caught.value
    assert (
        error.node is product
        and isinstance(error, ShapeMismatch)
        and isinstance(error.__cause__, ShapeMismatch)
    )
    text = str(error)
    assert "mm: f32[2, 3]@cpu has 3 columns, f32[2, 3]@cpu has 2 rows" in text
    assert "node:    %mm = call_function aten.mm.default" in text
    assert "in:      inner" in text
    assert "test_node_errors.py" in text and "return torch.mm(x, x.t() + 0)" in text


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (IndexError, IndexError), (KeyError, KeyError), (TypeError, TypeError), (ValueError, ValueError),
        (NotImplementedError, NotImplementedError), (RuntimeError, RuntimeError), (ShapeMismatch, ShapeMismatch),
        (ZeroDivisionError, PropagationError),
    ],
)  # fmt: skip
def test_the_error_is_of_the_kind_that_happened(kind: type[Exception], expected: type[Exception]) -> None:
    graph = Graph()
    node = graph.call_function(len, (graph.placeholder("x"),))
    located = locate_error(kind("why"), node, ((1,), {}))
    assert isinstance(located, PropagationError) and isinstance(located, expected)
    assert located.node is node
    assert "why" in str(located) and "%len_1 = call_function len" in str(located)
    assert locate_error(located, graph.placeholder("y"), ((), {})) is located  # located already


def test_an_error_without_words_has_the_name_of_its_kind() -> None:
    node = Graph().placeholder("x")
    assert str(locate_error(ValueError(), node, ((), {}))).startswith("ValueError")


def test_nodes_in_one_line() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    assert describe_node(x) == "%x = placeholder x"
    assert describe_node(graph.call_method("relu", (x,))) == "%relu = call_method relu"
    assert describe_node(graph.call_function(torch.relu, (x,))) == "%relu_1 = call_function relu"
    assert describe_node(graph.call_function(torch.ops.aten.relu.default, (x,))).endswith("aten.relu.default")


def test_the_line_of_a_node_is_the_innermost_one_of_the_program() -> None:
    node = Graph().placeholder("x")
    assert line_of_node(node) == ""
    node.stack_trace = (
        f'  File "{__file__}", line 7, in outer\n    y = inner(x)\n'
        f'  File "{__file__}", line 9, in inner\n    return x + 1\n'
        f'  File "{torch.__file__}", line 3, in relu\n    pass\n'
    )
    assert line_of_node(node).endswith("test_node_errors.py:9: return x + 1")


def test_the_graph_itself_runs_when_nothing_was_changed() -> None:
    graph = make_fx(Outer(), tracing_mode="fake")(torch.randn(2, 3))
    with FakeTensorMode():
        assert FakeTensorProp(graph).propagate(torch.randn(2, 3)).shape == (2, 2)
