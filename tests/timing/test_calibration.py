"""Curves of a card, corrected by a real run: a time of a step, a trace of torch.profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import understudy
from understudy.cli import main
from understudy.report.rehearsal import Rehearsal
from understudy.timing.calibration import CalibrationError, read_profile, speed_from_step


def train(width: int = 4096, batch: int = 8192) -> None:
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.empty(batch, width, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()


def rehearse(program: Any = train) -> Rehearsal:
    return understudy.rehearse(program, device="h100")


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNDERSTUDY_CONFIG", str(tmp_path / "config"))
    path = tmp_path / "run.json"
    path.write_text(rehearse().to_json())
    return path


def seconds_of(rehearsal: Rehearsal) -> float:
    assert rehearsal.time is not None
    return rehearsal.time.seconds_per_step


def train_small() -> None:
    train(width=2048, batch=1024)


@pytest.mark.parametrize("program", [train, train_small])
def test_a_step_time_is_met_after_it_was_given(
    program: Any, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rehearse_program() -> Rehearsal:
        return rehearse(program)

    run_file.write_text(rehearse_program().to_json())
    before = seconds_of(rehearse_program())
    real = 1.5 * before
    words = ["calibrate", str(run_file), "--device", "h100", "--step-time", f"{real}s"]
    assert main(words) == 0
    assert "all: 0.6" in capsys.readouterr().out
    assert seconds_of(rehearse_program()) == pytest.approx(real, rel=0.02)
    # A second correction stands on the first.
    run_file.write_text(rehearse_program().to_json())
    assert main([*words[:-1], f"{before}s"]) == 0
    assert seconds_of(rehearse_program()) == pytest.approx(before, rel=0.02)


def test_dry_run_keeps_nothing(run_file: Path) -> None:
    before = seconds_of(rehearse())
    assert main(["calibrate", str(run_file), "--device", "h100", "--step-time", "1s", "--dry-run"]) == 2
    assert (
        main(["calibrate", str(run_file), "--device", "h100", "--step-time", f"{2 * before}s", "--dry-run"])
        == 0
    )
    assert seconds_of(rehearse()) == before


def test_a_profile_corrects_the_families_that_it_has(run_file: Path, tmp_path: Path) -> None:
    """Products of the trace take twice the time of the curves, GELU half of it."""
    before = rehearse()
    rows = {row.operator: row for row in before.operators}
    events: list[dict[str, Any]] = []
    for number, (name, operator, factor) in enumerate(
        [("aten::addmm", "aten.addmm.default", 2.0), ("aten::mm", "aten.mm.default", 2.0)]
    ):
        row = rows[operator]
        events.append(
            {"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": 9, "args": {"External id": number}}
        )
        duration = 1e6 * factor * row.seconds / row.timed_calls
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm",
                "ts": 0,
                "dur": duration,
                "args": {"External id": number},
            }
        )
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    assert read_profile(trace)["aten::mm"].calls == 1
    assert main(["calibrate", str(run_file), "--device", "h100", "--profile", str(trace)]) == 0
    after = {row.operator: row for row in rehearse().operators}
    ratio = after["aten.mm.default"].seconds / rows["aten.mm.default"].seconds
    assert ratio == pytest.approx(2, rel=0.02)
    assert after["aten.gelu.default"].seconds == pytest.approx(rows["aten.gelu.default"].seconds)


def test_a_host_bound_step_corrects_no_card() -> None:
    time = rehearse(lambda: train(width=64, batch=8)).time
    assert time is not None
    with pytest.raises(CalibrationError, match="bound by the host"):
        speed_from_step(time, time.seconds_per_step)


def test_another_program_is_noticed(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(run_file), "--device", "h100", "--step-time", "10s"]) == 2
    assert "is it the same program on the same card?" in capsys.readouterr().err
    assert main(["calibrate", str(run_file), "--device", "t4", "--step-time", "10ms"]) == 2
    assert "expected a rehearsal on t4" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["no json", "{}", '{"traceEvents": []}'])
def test_files_that_are_no_profiles(content: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(CalibrationError, match=r"trace\.json"):
        read_profile(path)
