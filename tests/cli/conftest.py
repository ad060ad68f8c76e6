"""Settings and tools for the tests of the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs the tests may say how wide its terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def on_small_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, float], list[str]]:
    """Writes a script, and a card of so many GiB, into a folder of its own, and says the options that name the card."""

    def write(name: str, text: str, memory: float) -> list[str]:
        monkeypatch.chdir(tmp_path)
        Path(name).write_text(text)
        Path("cards.toml").write_text(f"[small]\nmemory = {memory}\ncontext = 0.0\n")
        return ["--cards", "cards.toml", "--device", "small"]

    return write
