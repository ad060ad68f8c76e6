"""Captures beside each other: symbolic_trace beside make_fx, capture_step beside the capture of gradients.

    python -m benchmarks.captures            all models
    python -m benchmarks.captures --quick    few repetitions: a look, not a figure to quote

Real models on real inputs, by processor time, in turns. make_fx and symbolic_trace capture a forward pass with gradients
enabled, as both do by default; beside it stands make_fx in `torch.no_grad()`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import understudy
from benchmarks.against_worker import Program
from benchmarks.models import WORKLOADS
from benchmarks.phases import Budget
from benchmarks.prop import take_turns, timed
from benchmarks.run import chosen_models, geometric_mean

MOST_OF_MAKE_FX, MOST_OF_GRADIENTS = 1.5, 3.0
FULL = Budget(least=5, most=9, seconds=10.0)
QUICK = Budget(least=3, most=3, seconds=1.0)


def capture_with_gradients_enabled(program: Program) -> Any:
    trace = understudy.make_fx(program.forward, tracing_mode="fake", _allow_non_fake_inputs=True)
    return trace(*program.real[1].values())


CAPTURES: dict[str, Callable[[Program], Any]] = {
    "make_fx": capture_with_gradients_enabled,
    "make_fx, no_grad": lambda program: program.capture("fake"),
    "symbolic_trace": Program.trace,
    "gradients": Program.capture_gradients,
    "capture_step": Program.capture_step,
}
RATIOS = {
    "symbolic_trace / make_fx": ("symbolic_trace", "make_fx", MOST_OF_MAKE_FX),
    "symbolic_trace / make_fx, no_grad": ("symbolic_trace", "make_fx, no_grad", None),
    "capture_step / gradients": ("capture_step", "gradients", MOST_OF_GRADIENTS),
}


def measure(name: str, budget: Budget) -> dict[str, float]:
    """Seconds of each capture of a model."""
    program = Program(WORKLOADS[name]())
    for capture in CAPTURES.values():
        capture(program)
    bodies = [lambda capture=capture: timed(lambda: capture(program)) for capture in CAPTURES.values()]
    return dict(zip(CAPTURES, take_turns(bodies, budget), strict=True))  # type: ignore[arg-type]


def show(console: Console, rows: dict[str, dict[str, float]]) -> None:
    table = Table(title="Captures: milliseconds, and ratios", title_justify="left")
    table.add_column("model")
    for column in (*CAPTURES, *RATIOS):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        ratios = [row[one] / row[other] for one, other, _ in RATIOS.values()]
        table.add_row(
            name,
            *[f"{row[capture] * 1e3:.1f}" for capture in CAPTURES],
            *[f"{ratio:.2f}" for ratio in ratios],
        )
    console.print(table)
    for name, (one, other, most) in RATIOS.items():
        ratios = {model: row[one] / row[other] for model, row in rows.items()}
        worst = max(ratios, key=lambda model: ratios[model])
        goal = "" if most is None else f" (at most {most:g})"
        console.print(
            f"{name}: {geometric_mean(list(ratios.values())):.2f}{goal}, most {ratios[worst]:.2f} {worst}"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: a look, not a figure to quote")
    parser.add_argument("--models", default="", help=f"some of: {','.join(WORKLOADS)}")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 170
    torch.set_num_threads(1)
    show(
        console,
        {name: measure(name, QUICK if options.quick else FULL) for name in chosen_models(options.models)},
    )


if __name__ == "__main__":
    main()
