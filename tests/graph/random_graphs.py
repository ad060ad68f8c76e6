"""Random graphs of operators, methods and views that run."""

from __future__ import annotations

import operator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

UNARY: list[Any] = [
    (aten.relu.default, ()), (aten.sin.default, ()), (aten.neg.default, ()), (aten.clone.default, ()),
    (aten.sum.dim_IntList, ([0],)), (aten.unsqueeze.default, (0,)), (aten.t.default, ()), (aten.detach.default, ()),
    (aten.transpose.int, (0, -1)), (aten.slice.Tensor, (0, 1)), (aten.view.default, ([-1],)), (aten.expand.default, ([2, -1],)),
    (aten.gt.Scalar, (0,)), (aten._to_copy.default, ()), (aten.select.int, (0, 0)), (aten.split.Tensor, (1,)),
    (aten.relu_.default, ()), (torch.relu, ()), (torch.flatten, ()), ("mean", ()), ("contiguous", ()), ("add_", (1,)),
    (aten.max.dim, (0,)), (aten.zeros_like.default, ()), (aten.argmax.default, ()), (aten.squeeze.default, ()),
]  # fmt: skip
BINARY: list[Any] = [
    (aten.add.Tensor, ()), (aten.mm.default, ()), (aten.mul.Tensor, ()), (torch.maximum, ()), (operator.sub, ()),
    (aten.where.ScalarOther, (0,)), (aten.add_.Tensor, ()), (aten.copy_.default, ()), (torch.matmul, ()),
]  # fmt: skip


class Builder:
    """Adds nodes, each run for real when it is added: what can't run is not added."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.graph = Graph()
        self.inputs = [torch.randn(shape) for shape in shapes]
        copies = [value.clone() for value in self.inputs]
        self.values: dict[Node, Any] = {
            self.graph.placeholder(f"x{i}"): value for i, value in enumerate(copies)
        }

    def add(self, target: Any, args: tuple[Any, ...]) -> bool:
        real = torch.fx.node.map_arg(args, lambda node: self.values[node])
        method = isinstance(target, str)
        try:
            value = getattr(real[0], target)(*real[1:]) if method else target(*real)
        except (RuntimeError, IndexError, TypeError):
            return False
        node = self.graph.call_method(target, args) if method else self.graph.call_function(target, args)
        self.values[node] = value
        if isinstance(value, (tuple, list)):
            for position in range(min(len(value), 2)):
                part = self.graph.call_function(operator.getitem, (node, position))
                self.values[part] = value[position]
        return True

    @property
    def tensors(self) -> list[Node]:
        return [node for node, value in self.values.items() if isinstance(value, torch.Tensor)]

    def finished(self) -> GraphModule:
        self.graph.output(tuple(self.tensors[-3:]))
        return GraphModule(nn.Module(), self.graph)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[GraphModule, list[torch.Tensor]]:
    """A graph module that runs, and inputs for it."""
    sizes = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
    builder = Builder(draw(st.lists(sizes, min_size=1, max_size=3)))
    for _ in range(draw(st.integers(1, 14))):
        nodes = builder.tensors
        first = draw(st.sampled_from(nodes))
        if draw(st.booleans()):
            target, rest = draw(st.sampled_from(UNARY))
            builder.add(target, (first, *rest))
        else:
            target, rest = draw(st.sampled_from(BINARY))
            builder.add(target, (first, draw(st.sampled_from(nodes)), *rest))
    return builder.finished(), builder.inputs
