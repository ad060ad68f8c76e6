"""Nothing stays behind of earlier calls. `python -m tests.repeats` makes 1,000 of each; here are some of two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repeats import measure_growth

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["make_fx, symbolic", "from_tensor, one ShapeEnv"])
def test_calls_leave_nothing_behind(name: str) -> None:
    """In a process of its own: pytest keeps what is logged."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.repeats", "100", name], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "objects more after 100 calls" in done.stdout


def test_what_stays_is_seen() -> None:
    kept: list[object] = []
    assert measure_growth(lambda: kept.append([]), repeats=12, first=1)["list"] >= 12
