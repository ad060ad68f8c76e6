"""The examples say what they promise."""

from __future__ import annotations

import pytest

from examples import symbolic


def test_one_run_of_a_transformer_for_every_size(capsys: pytest.CaptureFixture[str]) -> None:
    symbolic.main()
    said = capsys.readouterr().out
    for line in (
        "input:   i64[batch, seq]@cpu",
        "output:  f32[batch*seq//8, 1000]@cpu",
        "batch*seq % 8 == 0    because examples/symbolic.py:",
        "seq <= 2048    because examples/symbolic.py:",
        ": windows = logits.view(-1, WINDOW, logits.shape[-1])",
        "tokens of shape (16, 100): fine",
        "but batch = 3 (tokens.size(0)), seq = 100 (tokens.size(1))",
    ):
        assert line in said
