"""This version of understudy beside the version of another commit, by processor time, in turns.

    make bench AGAINST=<commit>                      a quarter of an hour
    make bench AGAINST=<commit> ARGS=--quick         one model, one pair of processes: a look, not a figure to quote
    make bench AGAINST=<commit> ARGS="--phase 'training step' --turns 20"

Each version runs in a process of its own, with the same programs (`benchmarks.against_worker`). A turn is one run of a phase
in either process, and who begins changes from turn to turn. A turn's ratio is the time of this version divided by that of
the other: what the machine does meanwhile hits both. A process may be faster than another by some percent for its whole
life (where memory lies), so there are several pairs of them. `AGAINST=HEAD` without changes shows what noise is left.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.against_worker import MODELS, PHASES

ROOT = Path(__file__).parent.parent
ALLOWED = 1.03
"""A phase that takes more than this share of the other version's time is named at the end."""
WARM_UPS = 2
LEAST_SECONDS = 0.04
"""A run shorter than this is repeated within its turn."""


@dataclass(frozen=True)
class Effort:
    pairs: int
    turns: int
    models: tuple[str, ...]
    phases: tuple[str, ...] = tuple(PHASES)


FULL = Effort(pairs=3, turns=5, models=tuple(MODELS))
QUICK = Effort(pairs=1, turns=5, models=("transformer",))


class NoSuchCommit(SystemExit):
    """The name is no commit of this repository."""


def commit_of(name: str) -> str:
    """The full hash of a commit, by any name that git knows it by."""
    found = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if found.returncode:
        raise NoSuchCommit(f"there is no commit {name!r} in this repository: `git log --oneline` lists them")
    return found.stdout.strip()


@contextmanager
def source_of(commit: str) -> Iterator[Path]:
    """A folder with the package as it was at that commit."""
    packed = subprocess.run(
        ["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory(prefix="understudy-against-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder) / "src"


class Worker:
    """A process that has imported the package of one source folder, and runs phases on request."""

    def __init__(self, source: Path) -> None:
        surroundings = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]), "PYTHONHASHSEED": "0",
            "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.against_worker"], cwd=ROOT, env=surroundings, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        imported = Path(self._answer()["source"])
        if not imported.is_relative_to(source):
            self.close()
            raise RuntimeError(f"the process was to import {source}, and imported {imported}")

    def run(self, model: str, phase: str, repeats: int = 1) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"model": model, "phase": phase, "repeats": repeats}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return float(answer["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"a worker ended with status {self.process.wait()}: its own message stands above"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # the end of its requests
        self.process.wait()


@dataclass
class Row:
    """A phase of a model: seconds of one run in every turn, of both versions."""

    phase: str
    model: str
    new: list[float] = field(default_factory=list)
    old: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ratios(self) -> list[float]:
        return [new / old for new, old in zip(self.new, self.old, strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """Between which ratios the middle half of the turns lies."""
        low, _, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, high

    @property
    def ratio_of_fastest(self) -> float:
        """Of the fastest run of either version: what is least disturbed by other programs."""
        return min(self.new) / min(self.old)


def measure(row: Row, new: Worker, old: Worker, turns: int) -> None:
    """Add the turns of one pair of processes to a row."""
    once = [worker.run(row.model, row.phase) for _ in range(WARM_UPS) for worker in (new, old)][-1]
    repeats = max(1, math.ceil(LEAST_SECONDS / once))
    for turn in range(turns):
        times = {}
        for worker in (new, old) if turn % 2 else (old, new):
            times[worker] = worker.run(row.model, row.phase, repeats) / repeats
        row.new.append(times[new])
        row.old.append(times[old])


def measure_all(source: Path, effort: Effort, console: Console) -> list[Row]:
    rows = {
        (phase, model): Row(phase, model)
        for phase in effort.phases for model in effort.models if model in PHASES[phase].models
    }  # fmt: skip
    for pair in range(effort.pairs):
        with ExitStack() as stack:
            new, old = (Worker(folder) for folder in (ROOT / "src", source))
            stack.callback(new.close)
            stack.callback(old.close)
            # A model at a time: a worker keeps one.
            for row in sorted(rows.values(), key=lambda row: effort.models.index(row.model)):
                if row.error:
                    continue
                with console.status(f"processes {pair + 1} of {effort.pairs}: {row.model}, {row.phase}"):
                    try:
                        measure(row, new, old, effort.turns)
                    except RuntimeError as error:
                        row.error = str(error)
    return list(rows.values())


def phase_ratios(rows: list[Row]) -> dict[str, float]:
    """The geometric mean over the models, for each phase that both versions have."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if not row.error:
            found.setdefault(row.phase, []).append(row.ratio)
    return {phase: statistics.geometric_mean(ratios) for phase, ratios in found.items()}


def verdict(ratios: dict[str, float]) -> str:
    slower = {phase: ratio for phase, ratio in ratios.items() if ratio > ALLOWED}
    if not slower:
        return f"no phase is more than {ALLOWED - 1:.0%} slower"
    named = ", ".join(f"{phase} ({ratio:.2f})" for phase, ratio in slower.items())
    return f"more than {ALLOWED - 1:.0%} slower: {named}"


def add_mean(table: Table, ratios: dict[str, float], phase: str | None, rows: list[Row]) -> None:
    """The end of a phase: the mean, if there is more than one model."""
    if phase in ratios and sum(row.phase == phase for row in rows) > 1:
        table.add_row("", "geometric mean", "", "", f"[bold]{ratios[phase]:.3f}[/]", "", "")
    table.add_section()


def show(console: Console, rows: list[Row], against: str, effort: Effort) -> None:
    turns = effort.pairs * effort.turns
    about = f"median of {turns} turns; spread: the middle half of them; fastest: of the fastest runs; above 1 is slower"
    table = Table(title=f"This version beside {against}, by processor time\n({about})", title_justify="left")
    for column in ("phase", "model"):
        table.add_column(column)
    for column in ("before ms", "now ms", "ratio", "spread", "fastest"):
        table.add_column(column, justify="right")
    ratios = phase_ratios(rows)
    previous = None
    for row in rows:
        if previous not in (None, row.phase):
            add_mean(table, ratios, previous, rows)
        shown = ["–"] * 5
        if not row.error:
            low, high = row.spread
            before, now = (statistics.median(times) * 1e3 for times in (row.old, row.new))
            shown = [
                f"{before:,.2f}", f"{now:,.2f}", f"{row.ratio:.3f}", f"{low:.3f} to {high:.3f}",
                f"{row.ratio_of_fastest:.3f}",
            ]  # fmt: skip
        table.add_row(row.phase if row.phase != previous else "", row.model, *shown)
        previous = row.phase
    add_mean(table, ratios, previous, rows)
    console.print(table)
    for row in rows:
        if row.error:
            console.print(f"{row.phase}, {row.model}: not measured: {row.error}", markup=False)
    console.print(verdict(ratios), markup=False)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", help="the version to compare with: a hash, a branch, HEAD~3")
    parser.add_argument("--quick", action="store_true", help="one model: a look, not a figure to quote")
    parser.add_argument(
        "--phase", action="append", choices=PHASES, help="only this phase; may be given again"
    )
    parser.add_argument("--turns", type=int, help="turns of each pair of processes")
    options = parser.parse_args(arguments)
    commit = commit_of(options.commit)
    effort = QUICK if options.quick else FULL
    effort = replace(
        effort, turns=options.turns or effort.turns, phases=tuple(options.phase or effort.phases)
    )
    console = Console()
    if not console.is_terminal:
        console.width = 120
    with source_of(commit) as source:
        rows = measure_all(source, effort, console)
    show(console, rows, commit[:10], effort)


if __name__ == "__main__":
    main()
