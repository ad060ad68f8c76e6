"""`make bench AGAINST=<commit>`: what it says, not how fast anything is."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import against
from benchmarks.against_worker import PHASES, Program, seconds_of, transformer, windows


def test_a_name_that_is_no_commit_is_refused() -> None:
    with pytest.raises(against.NoSuchCommit, match=r"there is no commit 'no-such-commit' in this repository"):
        against.main(["no-such-commit"])


def row(phase: str, model: str, *ratios: float) -> against.Row:
    return against.Row(phase, model, new=list(ratios), old=[1.0] * len(ratios))


def test_slower_phases_are_named_by_the_mean_over_their_models(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("forward", "a", 1.2, 1.1, 1.0), row("forward", "b", 1.1, 1.1, 9.0), row("step", "a", 1.02, 1.0, 1.0),
        row("trace", "a", 1.5, 1.0, 1.0), row("trace", "b", 0.5, 1.0, 1.01),
        against.Row("export", "a", error="AttributeError: no such name"),
    ]  # fmt: skip
    against.show(Console(width=120), rows, "0123456789", against.QUICK)
    said = capsys.readouterr().out
    assert "1.050 to 1.150" in said  # the middle half of 1.0, 1.1, 1.2
    assert "export, a: not measured: AttributeError: no such name" in said
    assert said.splitlines()[-1] == "more than 3% slower: forward (1.10)"
    assert against.verdict({"step": 1.02}) == "no phase is more than 3% slower"


@pytest.mark.parametrize("phase", PHASES)
def test_each_phase_runs(phase: str) -> None:
    workload = windows() if "windows" in PHASES[phase].models else transformer()
    assert seconds_of(PHASES[phase], Program(workload), repeats=1) > 0


def test_a_worker_runs_the_source_that_it_is_given() -> None:
    worker = against.Worker(against.ROOT / "src")
    try:
        assert worker.run("transformer", "enter and leave a mode", repeats=2) > 0
        with pytest.raises(RuntimeError, match="KeyError"):
            worker.run("transformer", "no such phase")
    finally:
        worker.close()
