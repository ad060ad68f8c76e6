"""Our stand-in tensors against torch's own, in one process, by turns.

    python -m benchmarks.run [--quick] [--models gpt2,llama] [--json out.json] [--docs docs/measurements.md]

Each figure is the median of its repetitions; a ratio is torch's median divided by ours.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode

import understudy
from benchmarks import page, process
from benchmarks.models import WORKLOADS
from benchmarks.phases import PHASES, WARM, Budget, Side, Subject, count_operators, measure_floor, take_turns

FULL = Budget(least=7, most=40, seconds=12.0)
QUICK = Budget(least=3, most=5, seconds=2.0)

SIDES = (Side("understudy", understudy.FakeTensorMode), Side("torch", TorchFakeTensorMode))
MODULES = {"understudy": "understudy", "torch": "torch._subclasses.fake_tensor"}

IMPORT_TARGET_SECONDS = 0.2
TENSOR_TARGET_BYTES = 2048


def measure_model(name: str, budget: Budget, console: Console) -> list[dict[str, Any]]:
    """One row for each phase: seconds of both sides, their ratio, the number of operators."""
    workload = WORKLOADS[name]()
    subjects = [Subject(workload, side) for side in SIDES]
    for subject in subjects:
        subject.set_up()
    rows = []
    for phase in PHASES:
        with console.status(f"{name}: {phase.name}"):
            ours, theirs = take_turns(phase, subjects, budget)
            counts = [count_operators(phase, subject) for subject in subjects]
            if len(set(counts)) > 1:
                console.print(f"{name}, {phase.name}: not the same operators on both sides: {counts}")
            rows.append({
                "model": name,
                "phase": phase.name,
                "operators": counts[0],
                "understudy_seconds": ours,
                "torch_seconds": theirs,
                "ratio": theirs / ours,
            })  # fmt: skip
            if phase.name == WARM:
                forward, floor = measure_floor(subjects[0], budget.least)
                rows[-1]["floors"] = forward / floor
    return rows


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def summary_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each phase: the geometric mean over the models, the worst of them, and the target."""
    summary = []
    for phase in PHASES:
        ratios = {row["model"]: row["ratio"] for row in rows if row["phase"] == phase.name}
        mean = geometric_mean(list(ratios.values()))
        slowest = min(ratios, key=lambda model: ratios[model])
        summary.append({
            "phase": phase.name,
            "ratio": mean,
            "least_ratio": ratios[slowest],
            "least_model": slowest,
            "target": phase.target,
            "reached": mean >= phase.target and ratios[slowest] >= 1.0,
        })  # fmt: skip
    return summary


def show_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="Milliseconds, and microseconds for each operator", title_justify="left")
    for column in ("model", "phase"):
        table.add_column(column)
    for column in (
        "operators",
        "understudy ms",
        "torch ms",
        "understudy µs/op",
        "torch µs/op",
        "ratio",
        "floors",
    ):
        table.add_column(column, justify="right")
    previous = None
    for row in rows:
        if previous not in (None, row["model"]):
            table.add_section()
        ours, theirs, operators = row["understudy_seconds"], row["torch_seconds"], row["operators"]
        table.add_row(
            row["model"] if row["model"] != previous else "",
            row["phase"],
            f"{operators:,}",
            f"{ours * 1e3:,.1f}",
            f"{theirs * 1e3:,.1f}",
            f"{ours * 1e6 / operators:.1f}",
            f"{theirs * 1e6 / operators:.1f}",
            f"{row['ratio']:.2f}×",
            f"{row['floors']:.2f}" if "floors" in row else "",
        )
        previous = row["model"]
    console.print(table)


def show_summary(console: Console, summary: list[dict[str, Any]]) -> None:
    table = Table(title="Geometric mean over the models", title_justify="left")
    table.add_column("phase")
    for column in ("ratio", "target", "least, and where", ""):
        table.add_column(column, justify="right")
    for row in summary:
        table.add_row(
            row["phase"],
            f"{row['ratio']:.2f}×",
            f"{row['target']:.0f}×",
            f"{row['least_ratio']:.2f}× {row['least_model']}",
            "[green]reached[/]" if row["reached"] else "[red]not yet[/]",
        )
    console.print(table)


def measure_processes(console: Console, quick: bool) -> dict[str, Any]:
    with console.status("import time"):
        found: dict[str, Any] = {"import_seconds": process.import_seconds("understudy", 3 if quick else 7)}
    for name, module in MODULES.items():
        with console.status(f"memory of {name}'s tensors"):
            found[f"{name}_bytes_per_tensor"] = process.bytes_per_tensor(module)
        if not quick:
            with console.status(f"a model of 405B parameters in {name}"):
                found[f"{name}_405b"] = process.large_model(module)
    return found


def show_processes(console: Console, found: dict[str, Any]) -> None:
    table = Table(title="In processes of their own", title_justify="left")
    table.add_column("")
    for column in (*MODULES, "target"):
        table.add_column(column, justify="right")
    table.add_row(
        "first name, beyond `import torch`",
        f"{found['import_seconds']:.3f} s",
        "",
        f"≤ {IMPORT_TARGET_SECONDS} s",
    )
    for kind in found["torch_bytes_per_tensor"]:
        shown = [f"{found[f'{name}_bytes_per_tensor'][kind]:,.0f} B" for name in MODULES]
        table.add_row(f"memory of a tensor, {kind}", *shown, f"≤ {TENSOR_TARGET_BYTES:,} B")
    if "torch_405b" in found:
        large = [found[f"{name}_405b"] for name in MODULES]
        table.add_row("building 405B parameters", *[f"{x['seconds']:.2f} s" for x in large], "seconds")
        table.add_row("  memory of it", *[f"{x['bytes'] / 1e6:,.0f} MB" for x in large], "< 1,000 MB")
    console.print(table)


def chosen_models(text: str) -> list[str]:
    names = [name for name in text.split(",") if name] or list(WORKLOADS)
    unknown = sorted(set(names) - set(WORKLOADS))
    if unknown:
        raise SystemExit(f"unknown models: {', '.join(unknown)}; there are: {', '.join(WORKLOADS)}")
    return names


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: a look, not a figure to quote")
    parser.add_argument("--models", default="", help=f"some of: {','.join(WORKLOADS)}")
    parser.add_argument("--json", type=Path, default=Path("build/benchmark.json"), help="where figures go")
    parser.add_argument("--docs", type=Path, help="a page to write them into, such as docs/measurements.md")
    options = parser.parse_args(arguments)

    console = Console()
    if not console.is_terminal:
        console.width = 120
    rows = []
    for name in chosen_models(options.models):
        measured = measure_model(name, QUICK if options.quick else FULL, console)
        console.print(f"{name}: " + ", ".join(f"{row['phase']} {row['ratio']:.2f}×" for row in measured))
        rows += measured
        gc.collect()
    summary = summary_of(rows)
    processes = measure_processes(console, options.quick)

    show_rows(console, rows)
    show_summary(console, summary)
    show_processes(console, processes)

    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "python": platform.python_version(), "quick": options.quick}
    result = {"about": about, "summary": summary, "models": rows, "processes": processes}
    options.json.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"figures: {options.json}")
    if options.docs:
        page.write_figures(options.docs, result)


if __name__ == "__main__":
    main()
