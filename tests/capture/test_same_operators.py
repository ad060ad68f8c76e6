"""Programs of the kinds that people trace: their graphs have the operators of torch's graphs, in the same order, in each
mode. Where they differ, docs/differences.md has the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx as torch_make_fx

from tests.capture.everyday_programs import PROGRAMS, Program
from understudy.proxy_tensor import make_fx

MODES: dict[str, dict[str, Any]] = {
    "real": {"tracing_mode": "real"},
    "fake": {"tracing_mode": "fake"},
    "symbolic": {"tracing_mode": "symbolic"},
    "pre-dispatch": {"tracing_mode": "fake", "pre_dispatch": True},
}
DIFFERENT = {
    ("dropout_in_evaluation", "symbolic"): "dropout that drops nothing",
    ("transformer_layer", "symbolic"): "dropout that drops nothing",
    ("multi_head_attention", "symbolic"): "`matmul` inside `linear`",
    ("transforms", "symbolic"): "`matmul` inside `linear`",
    ("lstm", "symbolic"): "recurrent layers",
    ("indexing", "symbolic"): "a slice of everything",
    ("index_assignment", "symbolic"): "a slice of everything",
    ("gradient_of_a_convolution", "pre-dispatch"): "gradients inside the function",
    ("transforms", "pre-dispatch"): "transforms inside the function",
}
"""(program, mode) → the row of docs/differences.md with the reason."""


def operators(gm: GraphModule) -> list[str]:
    """The operators on tensors in the live code of a graph."""
    live: set[Node] = set()
    found: list[str] = []
    for node in reversed(gm.graph.nodes):
        if node in live or node.op == "output" or node.is_impure():
            live.update(node.all_input_nodes)
            if isinstance(node.target, torch._ops.OpOverload) and not node.target.__name__.startswith("sym_"):
                found.append(str(node.target))
    return found[::-1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_same_operators_in_the_same_order(program: Program, mode: str) -> None:
    ours, theirs = (
        operators(make(f, **MODES[mode])(*args))
        for make, (f, args) in ((make_fx, program.make()), (torch_make_fx, program.make()))
    )
    if (program.name, mode) in DIFFERENT:
        assert ours != theirs, "no longer different: remove it from the table, and from the page"
    else:
        assert ours == theirs


@pytest.mark.parametrize("reason", sorted(set(DIFFERENT.values())))
def test_every_difference_is_on_the_page(reason: str) -> None:
    page = Path(__file__).parents[2] / "docs/differences.md"
    (row,) = [line for line in page.read_text().splitlines() if line.startswith("| ") and reason in line]
    assert row.count("|") == 3 + row.count("\\|")


def test_tables_for_the_operators_of_symbolic_graphs_are_used() -> None:
    """A table's entry for `native_dropout` is called in symbolic mode, as torch's make_fx does."""
    seen: list[str] = []

    def drop(x: Any, p: float, train: bool) -> Any:
        seen.append("native_dropout")
        return x * 0.5, x > 0

    def normalise(x: Any, *rest: Any) -> Any:
        seen.append("_native_batch_norm_legit")
        return x * 2, x.mean((0, 2)), x.mean((0, 2))

    aten = torch.ops.aten
    table = {aten.native_dropout.default: drop, aten._native_batch_norm_legit.default: normalise}

    def f(x: Any, mean: Any, var: Any) -> Any:
        normal = torch.nn.functional.batch_norm(x, mean, var, training=True)
        return torch.nn.functional.dropout(normal, 0.5, training=True)

    inputs = (torch.randn(4, 3, 5), torch.zeros(3), torch.ones(3))
    for make in (make_fx, torch_make_fx):
        seen.clear()
        graph = make(f, decomposition_table=table, tracing_mode="symbolic")(*inputs)
        assert seen == ["_native_batch_norm_legit", "native_dropout"]
        assert not any("native" in operator for operator in operators(graph))


@pytest.mark.parametrize("training", [True, False])
def test_symbolic_graphs_draw_and_write_as_the_program(training: bool) -> None:
    layers = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.3)).train(training)

    def f(x: Any, mean: Any, var: Any) -> Any:
        normal = torch.nn.functional.batch_norm(x, mean, var, training=training)
        return layers[1](normal), mean + 0

    graph = make_fx(f, tracing_mode="symbolic")(torch.randn(4, 3, 5), torch.zeros(3), torch.ones(3))
    x = torch.randn(7, 3, 9)
    results = []
    for run in (f, graph):
        torch.manual_seed(0)
        mean, var = torch.zeros(3), torch.ones(3)
        results.append([*run(x, mean, var), mean, var, torch.get_rng_state()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolation_for_every_size(mode: str) -> None:
    def f(x: Any) -> Any:
        return torch.nn.functional.interpolate(x, scale_factor=2.0, mode=mode)

    graph = make_fx(f, tracing_mode="symbolic")(torch.randn(2, 3, 4, 5))
    assert not any("upsample" in operator for operator in operators(graph))
    x = torch.randn(3, 2, 6, 7)
    torch.testing.assert_close(graph(x), f(x))
    assert torch.fx.Interpreter(graph).run(x).shape == (3, 2, 12, 14)
