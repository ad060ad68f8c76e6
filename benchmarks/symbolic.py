"""Forward passes with symbolic sizes: ours beside our own static ones, and beside torch's mode with torch's ShapeEnv.

    python -m benchmarks.symbolic [--quick] [--models gpt2,swin] [--no-torch] [--json build/symbolic.json]

Batch and length, or batch, height and width, are symbols. Warm: the same environment again, from the third pass on. Cold:
a new environment, a new mode, an empty cache; the model is built before the clock starts. Times are of the processor, so
that other programs on the machine disturb them less. Torch's side takes seconds to minutes for a pass, so it is repeated
less often. `swin-short` is transformers' Swin with one layer in each of two stages, of which torch's mode can run a pass
in a minute; of `swin` itself, with twelve layers in four stages, it can't without the Python dispatcher, and takes too long
with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.fx.experimental.symbolic_shapes import ShapeEnv as TorchShapeEnv

import understudy
from benchmarks.models import BATCH, WORKLOADS, Workload
from benchmarks.phases import quiet_process
from benchmarks.symbolic_models import SMALL, moved_into

WARM_TARGET, COLD_TARGET, ARITHMETIC_TARGET, STATIC_TARGET = 8.0, 4.0, 20.0, 1.5
ARITHMETIC = ("swin", "swin-short", "convnext", *SMALL)
"""Models that compute with sizes: padding to multiples, windows, interpolation."""
PYTHON_DISPATCHED = ("swin-short", *SMALL)
"""Models that torch's mode runs with the Python dispatcher only: C++ reads the sizes of a padding as plain integers."""
BEFORE_WARM = 2
"""Passes after the first that are not measured: guards of the first one send some proofs of the second on a new search."""


def swin(name: str = "swin", **size: list[int]) -> Workload:
    config = transformers.SwinConfig(num_labels=1000, **size)
    return images(name, lambda: transformers.SwinForImageClassification(config).eval())


def swin_short() -> Workload:
    return swin("swin-short", depths=[1, 1], num_heads=[3, 6])


def convnext() -> Workload:
    config = transformers.ConvNextConfig(num_labels=1000)
    return images("convnext", lambda: transformers.ConvNextForImageClassification(config).eval())


def images(name: str, build: Callable[[], torch.nn.Module]) -> Workload:
    inputs = lambda: {"pixel_values": torch.randn(BATCH, 3, 224, 256)}  # noqa: E731  (height and width apart)
    return Workload(name, build, inputs, lambda output, inputs: output.logits.sum())


def small(name: str) -> Workload:
    inputs = lambda: {"x": torch.randn(BATCH, 3, 90, 122)}  # noqa: E731  (no multiples of windows and strides)
    return Workload(name, lambda: SMALL[name]().eval(), inputs, lambda output, inputs: output.sum())


MODELS: dict[str, Callable[[], Workload]] = {
    **WORKLOADS, "swin": swin, "swin-short": swin_short, "convnext": convnext,
    **{name: partial(small, name) for name in SMALL},
}  # fmt: skip


@dataclass
class Run:
    """A model and its inputs in a mode of their own."""

    mode: Any
    model: Any
    inputs: dict[str, Any]
    beside: Callable[[], Any] = nullcontext

    def forward(self) -> Any:
        with self.mode, torch.no_grad(), self.beside():
            return self.model(**self.inputs)


def reals(workload: Workload) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(real) for name, real in workload.inputs().items()}


def is_image(real: torch.Tensor) -> bool:
    return real.dim() == 4


def ours_static(workload: Workload) -> Run:
    mode = understudy.FakeTensorMode()
    with mode:
        model = workload.build()
    return Run(mode, model, {name: mode.from_tensor(real) for name, real in reals(workload).items()})


def ours_symbolic(workload: Workload) -> Run:
    mode = understudy.FakeTensorMode(shape_env=understudy.ShapeEnv())
    with mode:
        model = workload.build()
    inputs = {}
    for name, real in reals(workload).items():
        context = ("batch", "static", "height", "width") if is_image(real) else ("batch", "seq")
        inputs[name] = mode.from_tensor(real, source=name, symbolic_context=context)
    return Run(mode, model, inputs)


def torch_symbolic(workload: Workload) -> Run:
    mode = TorchFakeTensorMode(shape_env=TorchShapeEnv())
    if workload.name in ARITHMETIC:
        model = moved_into(mode, workload.build())
    else:
        with mode:
            model = workload.build()
    inputs = {}
    for name, real in reals(workload).items():
        kinds = [DimDynamic.DUCK] * real.dim()
        if is_image(real):
            kinds[1] = DimDynamic.STATIC
        inputs[name] = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(kinds))
    beside = enable_python_dispatcher if workload.name in PYTHON_DISPATCHED else nullcontext
    return Run(mode, model, inputs, beside)


def seconds_of(run: Run) -> float:
    gc.collect()
    start = time.process_time()
    kept = run.forward()
    elapsed = time.process_time() - start
    del kept
    return elapsed


def cold(make: Callable[[Workload], Run], workload: Workload, repeats: int) -> tuple[float, Run]:
    """The median of first passes, and the last of the runs for warm ones."""
    times = []
    for _ in range(repeats):
        run = make(workload)
        understudy.FakeTensorMode.cache_clear()
        TorchFakeTensorMode.cache_clear()
        times.append(seconds_of(run))
    return statistics.median(times), run


def warm(runs: list[Run], repeats: int) -> list[float]:
    """Medians of passes that take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for position, run in enumerate(runs):
            times[position].append(seconds_of(run))
    return [statistics.median(t) for t in times]


def measure(name: str, quick: bool, with_torch: bool) -> dict[str, Any]:
    workload = MODELS[name]()
    repeats, few = (3, 1) if quick else (15, 2)
    static = ours_static(workload)
    static.forward()
    cold(ours_symbolic, workload, 1)  # what Python and torch load on first use
    row: dict[str, Any] = {"model": name}
    row["cold_seconds"], symbolic = cold(ours_symbolic, workload, 1 if quick else 5)
    for _ in range(BEFORE_WARM):
        symbolic.forward()
        static.forward()  # its plans were dropped with the cache
    row["warm_seconds"], row["static_seconds"] = warm([symbolic, static], repeats)
    row["to_static"] = row["warm_seconds"] / row["static_seconds"]
    row["guards"] = [str(guard) for guard in symbolic.mode.shape_env.guards]
    if with_torch:
        try:
            row["torch_cold_seconds"], theirs = cold(torch_symbolic, workload, few)
            (row["torch_warm_seconds"],) = warm([theirs], few)
        except Exception as error:  # a model that torch can't run with symbols has no ratio
            row["torch_error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            row["warm_ratio"] = row["torch_warm_seconds"] / row["warm_seconds"]
            row["cold_ratio"] = row["torch_cold_seconds"] / row["cold_seconds"]
    return row


def verdict(row: dict[str, Any]) -> str:
    targets = (
        (ARITHMETIC_TARGET, ARITHMETIC_TARGET) if row["model"] in ARITHMETIC else (WARM_TARGET, COLD_TARGET)
    )
    reached = [row["to_static"] <= STATIC_TARGET]
    if "warm_ratio" in row:
        reached += [row["warm_ratio"] >= targets[0], row["cold_ratio"] >= targets[1]]
    return "[green]reached[/]" if all(reached) else "[red]not yet[/]"


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    of_torch = f"{WARM_TARGET:.0f}× warm, {COLD_TARGET:.0f}× cold, {ARITHMETIC_TARGET:.0f}× for {', '.join(ARITHMETIC)}"
    about = f"targets: at most {STATIC_TARGET}× static; {of_torch}"
    table = Table(title=f"Forward passes with symbolic sizes, milliseconds\n({about})", title_justify="left")
    table.add_column("model")
    for column in (
        "static",
        "warm",
        "to static",
        "torch warm",
        "ratio",
        "cold",
        "torch cold",
        "ratio",
        "guards",
        "",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        theirs = "warm_ratio" in row
        table.add_row(
            row["model"],
            f"{row['static_seconds'] * 1e3:,.1f}",
            f"{row['warm_seconds'] * 1e3:,.1f}",
            f"{row['to_static']:.2f}×",
            f"{row['torch_warm_seconds'] * 1e3:,.0f}" if theirs else "–",
            f"{row['warm_ratio']:.1f}×" if theirs else "–",
            f"{row['cold_seconds'] * 1e3:,.1f}",
            f"{row['torch_cold_seconds'] * 1e3:,.0f}" if theirs else "–",
            f"{row['cold_ratio']:.1f}×" if theirs else "–",
            str(len(row["guards"])),
            verdict(row),
        )
    console.print(table)
    for row in rows:
        if "torch_error" in row:
            console.print(f"{row['model']}: torch's side failed: {row['torch_error']}", markup=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions: a look, not a figure to quote")
    parser.add_argument("--models", default="", help=f"some of: {','.join(MODELS)}")
    parser.add_argument("--no-torch", action="store_true", help="only our own side")
    parser.add_argument("--json", type=Path, default=Path("build/symbolic.json"), help="where figures go")
    options, _ = parser.parse_known_args(arguments)
    names = [name for name in options.models.split(",") if name] or list(MODELS)
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        raise SystemExit(f"unknown models: {', '.join(unknown)}; there are: {', '.join(MODELS)}")

    console = Console()
    if not console.is_terminal:
        console.width = 140
    rows = []
    with quiet_process():
        for name in names:
            with console.status(name):
                rows.append(measure(name, options.quick, not options.no_torch))
            gc.collect()
    show(console, rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "python": platform.python_version(), "quick": options.quick}
    options.json.write_text(json.dumps({"about": about, "models": rows}, indent=2) + "\n")
    console.print(f"figures: {options.json}")


if __name__ == "__main__":
    main()
