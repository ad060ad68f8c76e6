"""Parameters from steps: what the fit of `tools/fit_kernels` leaves to rows, and what to kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tools.fit_kernels.fitting import FAMILIES, PASSES, VARIANTS, Parameters, Row, fit, predict
from tools.fit_kernels.generations import SPEEDS, TRITON

BACKWARD = FAMILIES.index("attention_backward")


def make_row(source: str, card: str = "h100", seconds: float = 1.0) -> Row:
    """One kernel of attention's backward pass that computes for a second at the peak."""
    return Row(
        facts={"source": source, "model": "mpt 1b"},
        card=card,
        seconds=seconds,
        family=np.array([BACKWARD]),
        compute=np.array([1.0]),
        memory=np.array([0.0]),
        variants=np.full((1, 2), len(VARIANTS)),
        passes=np.array([len(PASSES)]),
        order=np.array([0]),
        families=frozenset({BACKWARD}),
        calls=np.zeros((1, 6)),
    )


def test_attention_of_older_rows_is_slower_than_that_of_the_curve() -> None:
    parameters = Parameters(["h100"], {"h100": 0.9})
    today, older = (predict(parameters.start, parameters, make_row(name)) for name in ("timm", "llm-foundry"))
    assert today == pytest.approx(1 / 0.47 / 0.9, rel=1e-3)
    assert older == pytest.approx(today / SPEEDS[TRITON]["h100"][1], rel=1e-3)


def test_older_rows_leave_the_measured_speed_of_attention_alone() -> None:
    parameters = Parameters(["h100"], {"h100": 0.9})
    row = make_row("llm-foundry")
    slow = [replace(row, seconds=2 * predict(parameters.start, parameters, row)) for _ in range(8)]
    found = dict(zip(parameters.names, np.exp(fit(slow, parameters)), strict=True))
    assert found["speed.h100.attention_backward"] == pytest.approx(0.9, rel=0.02)
    assert found["compute.attention_backward"] == pytest.approx(0.47, rel=0.02)
    assert found["old.h100.attention_backward"] == pytest.approx(SPEEDS[TRITON]["h100"][1] / 2, rel=0.05)
    assert found["old.a100.attention_backward"] == pytest.approx(SPEEDS[TRITON]["a100"][1])
