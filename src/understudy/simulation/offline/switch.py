"""Whether missing data is made up in the active run, and the notes about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from understudy import _torch
from understudy.simulation.run_notes import active_notes, add_note

_makes_data: list[bool] = []


@contextmanager
def make_missing_data(is_wanted: bool) -> Iterator[None]:
    """Inside, data that is not here is made up if this is wanted; else it is an error."""
    _makes_data.append(is_wanted)
    try:
        yield
    finally:
        _makes_data.pop()


def is_made_up() -> bool:
    """Whether a rehearsal with `--offline-data` is active."""
    return bool(_makes_data) and _makes_data[-1] and _torch.active_fake_mode() is not None


def note_made_up(name: str, text: str) -> None:
    """The report says that this was made up, and under its verdict that rows are not real."""
    notes = active_notes()
    if notes is not None and name not in notes.made_up:
        notes.made_up.append(name)
    add_note(text)
