"""FakeTensorProp side by side with torch's: the graphs of the benchmark's models, cold, warm, and after an edit.

    python -m benchmarks.prop            all models
    python -m benchmarks.prop --quick    few repetitions: a look, not a figure to quote

The graphs are those of a forward pass without gradients: parameters are attributes of the graph module and real, as
are the inputs. Both sides get the same graph module, a mode of their own, and convert what is real by themselves.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as TorchFakeTensorProp

import understudy
from benchmarks.models import WORKLOADS
from benchmarks.phases import Budget, quiet_process
from benchmarks.run import chosen_models, geometric_mean

TARGET = 16.0
EDIT_TARGET = 0.01
EDITED_NODES = 5000
EDITS = 20  # one alone is too short to be timed
FULL = Budget(least=7, most=25, seconds=20.0)
QUICK = Budget(least=3, most=3, seconds=1.0)


@dataclass(frozen=True)
class Subject:
    """One side's propagation over one graph."""

    prop: Any
    mode_class: Any
    module: GraphModule
    inputs: tuple[torch.Tensor, ...]

    def run(self, mode: Any) -> None:
        with torch.no_grad():
            self.prop(self.module, mode).propagate(*self.inputs)

    def cold(self) -> float:
        self.mode_class.cache_clear()
        return timed(lambda: self.run(self.mode_class(allow_non_fake_inputs=True)))

    def warm(self) -> float:
        mode = self.mode_class(allow_non_fake_inputs=True)
        return timed(lambda: self.run(mode))


def timed(body: Callable[[], object]) -> float:
    """Processor time: what else the machine does is not counted."""
    gc.collect()
    start = time.process_time()
    body()
    return time.process_time() - start


def graph_of(name: str) -> tuple[GraphModule, tuple[torch.Tensor, ...]]:
    """The operators of a forward pass, recorded by torch."""
    workload = WORKLOADS[name]()
    torch.manual_seed(0)
    model, inputs = workload.build().eval(), workload.inputs()

    def forward(*values: torch.Tensor) -> Any:
        output = model(**dict(zip(inputs, values, strict=True)))
        return output if isinstance(output, torch.Tensor) else dict(output)

    with torch.no_grad():
        # Recorded on torch's own stand-ins, so that models take the paths that they keep for tracing.
        record = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)
        return record(*inputs.values()), tuple(inputs.values())


def take_turns(bodies: list[Callable[[], float]], budget: Budget) -> list[float]:
    """Median seconds of each; who begins changes with every round."""
    times: list[list[float]] = [[] for _ in bodies]
    with quiet_process():
        for body in bodies:
            body()
        begin = time.perf_counter()
        for round_number in range(budget.most):
            order = range(len(bodies)) if round_number % 2 == 0 else reversed(range(len(bodies)))
            for position in order:
                times[position].append(bodies[position]())
            if round_number + 1 >= budget.least and time.perf_counter() - begin > budget.seconds:
                break
    return [statistics.median(taken) for taken in times]


def measure_model(name: str, budget: Budget) -> list[dict[str, Any]]:
    module, inputs = graph_of(name)
    ours = Subject(understudy.FakeTensorProp, understudy.FakeTensorMode, module, inputs)
    theirs = Subject(TorchFakeTensorProp, TorchFakeTensorMode, module, inputs)
    rows = []
    for phase in ("cold", "warm"):
        bodies = [getattr(ours, phase), getattr(theirs, phase)]
        our_seconds, their_seconds = take_turns(bodies, budget)
        rows.append({
            "model": name,
            "phase": phase,
            "nodes": len(module.graph.nodes),
            "understudy_seconds": our_seconds,
            "torch_seconds": their_seconds,
            "ratio": their_seconds / our_seconds,
        })  # fmt: skip
    return rows


def measure_edit(budget: Budget) -> dict[str, Any]:
    """One node of a long chain becomes another operator, and nothing changes downstream."""
    aten = torch.ops.aten
    graph = Graph()
    node = graph.placeholder("x")
    for position in range(EDITED_NODES):
        node = graph.call_function(aten.relu.default if position % 2 else aten.exp.default, (node,))
        if position == EDITED_NODES // 2:
            edited = node
    graph.output(node)
    module = GraphModule(torch.nn.Module(), graph)
    prop = understudy.FakeTensorProp(module)
    x = torch.randn(8, 16)

    def full() -> float:
        return timed(lambda: prop.propagate(x))

    def edits() -> None:
        for target in (aten.sin.default, aten.cos.default) * (EDITS // 2):
            edited.target = target
            prop.repropagate([edited])

    def after_an_edit() -> float:
        return timed(edits) / EDITS

    full_seconds, edit_seconds = take_turns([full, after_an_edit], budget)
    return {
        "nodes": EDITED_NODES,
        "full_seconds": full_seconds,
        "edit_seconds": edit_seconds,
        "share": edit_seconds / full_seconds,
    }


def show(console: Console, rows: list[dict[str, Any]], edit: dict[str, Any]) -> None:
    table = Table(title="FakeTensorProp: milliseconds, and microseconds for each node", title_justify="left")
    for column in ("model", "phase"):
        table.add_column(column)
    for column in ("nodes", "understudy ms", "torch ms", "understudy µs/node", "torch µs/node", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        ours, theirs, nodes = row["understudy_seconds"], row["torch_seconds"], row["nodes"]
        table.add_row(
            row["model"], row["phase"], f"{nodes:,}", f"{ours * 1e3:,.1f}", f"{theirs * 1e3:,.1f}",
            f"{ours * 1e6 / nodes:.1f}", f"{theirs * 1e6 / nodes:.1f}", f"{row['ratio']:.1f}×",
        )  # fmt: skip
    console.print(table)
    for phase in ("cold", "warm"):
        ratios = [row["ratio"] for row in rows if row["phase"] == phase]
        console.print(f"{phase}: {geometric_mean(ratios):.1f}× in the geometric mean (target {TARGET:.0f}×)")
    console.print(
        f"one edit in {edit['nodes']:,} nodes: {edit['edit_seconds'] * 1e6:,.0f} µs, {edit['share']:.2%} of a full "
        f"propagation (target {EDIT_TARGET:.0%})"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: a look, not a figure to quote")
    parser.add_argument("--models", default="", help=f"some of: {','.join(WORKLOADS)}")
    parser.add_argument(
        "--json", type=Path, default=Path("build/benchmark-prop.json"), help="where figures go"
    )
    options = parser.parse_args(arguments)
    budget = QUICK if options.quick else FULL
    console = Console()
    if not console.is_terminal:
        console.width = 120
    rows = []
    for name in chosen_models(options.models):
        with console.status(f"{name}: recording and propagating"):
            measured = measure_model(name, budget)
        console.print(f"{name}: " + ", ".join(f"{row['phase']} {row['ratio']:.1f}×" for row in measured))
        rows += measured
        gc.collect()
    edit = measure_edit(budget)
    show(console, rows, edit)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "python": platform.python_version(), "quick": options.quick}
    options.json.write_text(json.dumps({"about": about, "models": rows, "edit": edit}, indent=2) + "\n")
    console.print(f"figures: {options.json}")


if __name__ == "__main__":
    main()
