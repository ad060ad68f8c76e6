"""The graphs of the benchmark's models, at full size: what propagation and capture say of every node is what a real run
gives, in shape, stride, dtype and device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Interpreter, Node

from benchmarks.make_fx import program
from benchmarks.models import WORKLOADS
from benchmarks.prop import graph_of
from understudy import FakeTensorProp, make_fx

pytestmark = pytest.mark.conformance


class Compared(Interpreter):
    """Runs a graph for real and notes where a node's `val` says something else."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.different: list[str] = []
        self.compared = 0

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            self.compared += 1
            self.different += [f"{n.name}: {text}" for text in differences(n.meta.get("val"), result)]
        return result


def differences(val: Any, real: Any) -> Iterator[str]:
    if isinstance(real, torch.Tensor):
        said = [metadata(tensor) if isinstance(tensor, torch.Tensor) else tensor for tensor in (val, real)]
        if said[0] != said[1]:
            yield f"{said[0]} is really {said[1]}"
    elif isinstance(real, (list, tuple)):
        if not isinstance(val, (list, tuple)) or len(val) != len(real):
            yield f"{val} is really {len(real)} values"
        else:
            for one, other in zip(val, real, strict=True):
                yield from differences(one, other)
    elif isinstance(real, (int, float)) and val != real:
        yield f"{val} is really {real}"


def metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_val_of_a_propagated_graph_is_right(name: str) -> None:
    module, inputs = graph_of(name)
    with torch.no_grad():
        FakeTensorProp(module).propagate(*inputs)
        real = Compared(module)
        real.run(*inputs)
    assert real.compared == len(module.graph.nodes) - 1
    assert not real.different


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_val_of_a_captured_graph_is_right(name: str) -> None:
    forward, inputs = program(WORKLOADS[name]())
    with torch.no_grad():
        module = make_fx(forward, tracing_mode="fake")(*inputs)
        real = Compared(module)
        result = real.run(*inputs)
        assert torch.equal(result, forward(*inputs))
    assert not real.different
