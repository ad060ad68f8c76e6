"""Work counted in calls of functions: the same on every machine, where times are not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Calls:
    """How many functions, of Python and of C, were called."""

    count = 0


@contextmanager
def count_calls(most: float = float("inf")) -> Iterator[Calls]:
    """Counts the calls of this thread; more than `most` of them fail at once, instead of taking minutes."""
    calls = Calls()

    def notice(frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            calls.count += 1
            if calls.count > most:
                sys.setprofile(None)
                raise AssertionError(f"more than {most:,} calls")

    before = sys.getprofile()
    sys.setprofile(notice)
    try:
        yield calls
    finally:
        sys.setprofile(before)
