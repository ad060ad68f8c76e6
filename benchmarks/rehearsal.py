"""What it costs to measure a training step: beside the bare step on stand-ins, and beside torch's MemTracker.

    python -m benchmarks.rehearsal             a step of two models on three sides, in turns; long steps
    python -m benchmarks.rehearsal --quick     fewer turns

"bare" is the step in a plain `FakeTensorMode`, on stand-ins for cuda; "memory" the same step on a simulated card, with
all that a report on memory needs; "rehearsal" with the timeline as well; "MemTracker" is torch's own measurement under
torch's own fake mode, on the CPU. Two sides at a time take turns in one process: each kind of rehearsal with bare, then a
rehearsal with MemTracker, which is so slow that it would change the state of the processor between the others. A turn builds
the model, makes one step to warm up, and times the second by processor time. A rehearsal asks for the memory at the end of
its step: what waits for the simulated allocator is a part of the cost.
Long steps show whether the cost grows faster than the number of operators.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.models import WORKLOADS, Workload
from understudy import FakeTensorMode
from understudy.report.runs import MeasuredRun

MODELS = ("gpt2", "transformer")
MOST_OF_BARE = {"memory": 1.5, "rehearsal": 1.8}
LEAST_OF_TRACKER = 10.0
LONG_STEPS = (12_500, 25_000, 50_000, 100_000)

Step = Callable[[], object]
Wrap = Callable[[torch.nn.Module, torch.optim.Optimizer], AbstractContextManager[Step]]
"""Gives what is called between two steps."""


@contextmanager
def unmeasured(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Step]:
    yield lambda: None


@contextmanager
def tracked(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Step]:
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        yield tracker.reset_mod_stats


class RunWithoutTimeline(MeasuredRun):
    def _make_clock(self) -> None:
        return None


def ask_for_memory() -> object:
    return torch.cuda.max_memory_allocated()


def second_step(
    mode: Any, workload: Workload, device: str, wrap: Wrap = unmeasured, end: Step = lambda: None
) -> float:
    """Seconds of the second step of a training that is built and run inside of a mode."""
    with mode:
        with torch.device(device):
            model, inputs = workload.build(), workload.inputs()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

        def train() -> None:
            workload.loss(model(**inputs), inputs).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            end()

        with wrap(model, optimizer) as go_on:
            train()
            go_on()
            return seconds_of(train)


def seconds_of(run: Step) -> float:
    """Processor time, with the collector as a program has it."""
    gc.collect()
    begin = time.process_time()
    run()
    return time.process_time() - begin


SIDES: dict[str, Callable[[Workload], float]] = {
    "bare": lambda workload: second_step(FakeTensorMode(), workload, "cuda"),
    "memory": lambda workload: second_step(RunWithoutTimeline("h100"), workload, "cuda", end=ask_for_memory),
    "rehearsal": lambda workload: second_step(MeasuredRun("h100"), workload, "cuda", end=ask_for_memory),
    "MemTracker": lambda workload: second_step(TorchFakeTensorMode(), workload, "cpu", tracked),
}


def take_turns(name: str, first: str, second: str, turns: int) -> tuple[list[float], list[float]]:
    """Seconds of two sides."""
    times: dict[str, list[float]] = {first: [], second: []}
    for turn in range(turns):
        for side in (first, second) if turn % 2 else (second, first):
            times[side].append(SIDES[side](WORKLOADS[name]()))
    return times[first], times[second]


def median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(map(float.__truediv__, over, under))


def compare(console: Console, turns: int) -> None:
    table = Table(
        title=f"One training step, by processor time (median of {turns} turns)", title_justify="left"
    )
    table.add_column("model")
    for column in (*SIDES, "memory of bare", "rehearsal of bare", "MemTracker's over ours"):
        table.add_column(column, justify="right")
    for name in MODELS:
        bare, memory = take_turns(name, "bare", "memory", turns)
        bare_again, rehearsal = take_turns(name, "bare", "rehearsal", turns)
        beside, tracker = take_turns(name, "rehearsal", "MemTracker", turns // 3)
        shown = [f"{statistics.median(times) * 1e3:,.0f} ms" for times in (bare, memory, rehearsal, tracker)]
        of_bare = {
            "memory": median_ratio(memory, bare),
            "rehearsal": median_ratio(rehearsal, bare_again),
        }
        table.add_row(
            name,
            *shown,
            *[f"{ratio:.2f} (at most {MOST_OF_BARE[side]})" for side, ratio in of_bare.items()],
            f"{median_ratio(tracker, beside):.1f} (at least {LEAST_OF_TRACKER:.0f})",
        )
    console.print(table)


def grow(console: Console) -> None:
    """Steps of one parameter and many operators."""
    table = Table(title="Long steps on a simulated card", title_justify="left")
    for column in ("operators", "seconds", "µs an operator"):
        table.add_column(column, justify="right")
    for count in LONG_STEPS:
        recorder = MeasuredRun("h100")
        with recorder:
            weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))

            def run(weight: torch.Tensor = weight, count: int = count) -> None:
                x = weight
                for _ in range(count // 2):  # the other half are their gradients
                    x = x * 1.5
                x.sum().backward()
                ask_for_memory()

            seconds = seconds_of(run)
        table.add_row(f"{recorder.measurement.operators:,}", f"{seconds:.2f}", f"{seconds / count * 1e6:.1f}")
    console.print(table)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few turns: a look, not a figure to quote")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 120
    compare(console, 3 if options.quick else 15)
    grow(console)


if __name__ == "__main__":
    main()
