"""Layers that repeat are written into exported programs without being run, and make no difference there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import understudy
from understudy import run_every_layer
from understudy.capture.repeated_layers.replay import LayerPlan

COUNT = 5


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout, self.act = nn.Dropout(0.1), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.to(torch.float32))
        with torch.no_grad():
            scale = y.abs().mean()
        return x + self.dropout(self.down(self.act(self.up(y)))) * scale


class Model(nn.Module):
    """Above autograd `x.to(float32)` is a call that gives `x` itself; `+=` needs a result that is no leaf."""

    def __init__(self, calls_twice: bool = False) -> None:
        super().__init__()
        self.calls_twice = calls_twice
        self.layers = nn.ModuleList(map(Layer, range(COUNT)))
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.calls_twice:
                x = layer(x)
        self.seen.append(x.requires_grad)
        x += 1
        return x


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LayerPlan]]:
    found: list[LayerPlan] = []
    original = LayerPlan._results
    monkeypatch.setattr(LayerPlan, "_results", lambda plan, *given: found.append(plan) or original(plan, *given))
    yield found


def describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str((*value.shape, *value.stride())), value.dtype, value.requires_grad
    return tuple(map(describe, value)) if isinstance(value, (list, tuple)) else str(value)


def rows(program: Any) -> list[Any]:
    """All that the nodes of a program say."""
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return [
        (
            node.format_node(), str(node.args), str(node.kwargs), sorted(node.meta), describe(node.meta.get("val")),
            list((node.meta.get("nn_module_stack") or {}).items()), node.meta.get("torch_fn"),
            re.sub(r"line \d+, in (test|rows)", "", node.meta.get("stack_trace") or ""),
        )
        for module in modules for node in module.graph.nodes
    ]  # fmt: skip


def export(model: nn.Module, is_dynamic: bool, is_decomposed: bool) -> Any:
    return understudy.export(
        model, (torch.randn(3, 8),), dynamic_shapes=({0: "n"},) if is_dynamic else None,
        decompositions=torch.export.default_decompositions() if is_decomposed else None,
    )  # fmt: skip


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("is_decomposed", [False, True])
@pytest.mark.parametrize("calls_twice", [False, True])
def test_nodes_are_the_same(
    is_dynamic: bool, is_decomposed: bool, calls_twice: bool, replays: list[LayerPlan]
) -> None:
    model = Model(calls_twice)
    program = export(model, is_dynamic, is_decomposed)
    count = len(replays)
    # Above autograd the first layer is given an input without gradient, and is not like the others; a layer that is
    # called again reads parameters that are in the graph already, and is not like one that is called first.
    run = 1 if is_decomposed else 3 if calls_twice else 2
    assert count == (2 * COUNT if calls_twice else COUNT) - run
    with run_every_layer():
        other = export(model, is_dynamic, is_decomposed)
    assert len(replays) == count
    assert rows(program) == rows(other)
    assert model.seen == [not is_decomposed] * 2, "whether the result of a layer needs a gradient can be asked"
    program.validate()
    model.eval()
    trained, x = export(model, is_dynamic, is_decomposed), torch.randn(3, 8)
    torch.testing.assert_close(trained.module()(x.clone()), model(x.clone()))


def test_a_backward_pass_inside_of_the_program_runs_all_layers(replays: list[LayerPlan]) -> None:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(map(Layer, range(COUNT))).eval()

        def forward(self, x: torch.Tensor) -> Any:
            y = x.detach().requires_grad_()
            for layer in self.layers:
                y = layer(y)
            return torch.autograd.grad(y.sum(), self.layers[0].up.bias)

    with run_every_layer():
        try:
            wanted: Any = len(understudy.export(Slope(), (torch.randn(3, 8),)).graph.nodes)
        except Exception as error:  # the same error comes then
            wanted = type(error)
    assert not replays
    if isinstance(wanted, int):
        assert len(understudy.export(Slope(), (torch.randn(3, 8),)).graph.nodes) == wanted
    else:
        with pytest.raises(wanted):
            understudy.export(Slope(), (torch.randn(3, 8),))
    assert replays, "they were tried"


def test_signatures_that_are_preserved_are_recorded_in_every_layer(replays: list[LayerPlan]) -> None:
    program = understudy.export(Model().eval(), (torch.randn(3, 8),), preserve_module_call_signature=("layers.3",))
    assert not replays
    (entry,) = (entry for entry in program.module_call_graph if entry.fqn == "layers.3")
    assert entry.signature is not None
    assert len(entry.signature.inputs) == 1
