"""Python's collector of garbage, paused while a graph is recorded: it would look through all that has been recorded, again
and again, and find nothing to free."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pause:
    """Lasts until the last of those who want it so, in any thread, is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_enabled = False

    def begin(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._depth += 1

    def end(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._was_enabled:
                gc.enable()


_PAUSE = Pause()


@contextmanager
def no_collection() -> Iterator[None]:
    _PAUSE.begin()
    try:
        yield
    finally:
        _PAUSE.end()
