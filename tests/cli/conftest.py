"""Settings for the tests of the command line."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs the tests may say how wide its terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)
