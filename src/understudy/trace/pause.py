"""What has to wait while a graph is recorded: Python's collector of garbage, which would look through all that has been
recorded, again and again, and find nothing to free; and the user's interrupt, while things are put back in their places."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pause:
    """Lasts until the last of those who want it so, in any thread, is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: set[object] = set()
        self._was_enabled = False

    def begin(self, wish: object) -> None:
        with self._lock:
            if not self._wanted:
                self._was_enabled = gc.isenabled()
            self._wanted.add(wish)
            gc.disable()

    def end(self, wish: object) -> None:
        with self._lock:
            if self._wanted == {wish} and self._was_enabled:
                gc.enable()
            self._wanted.discard(wish)


_PAUSE = Pause()


def to_the_end(step: Callable[[], None]) -> None:
    """Run it, from its beginning once more if it is interrupted: it must not matter what of it was done before."""
    try:
        step()
    except BaseException:
        step()
        raise


@contextmanager
def no_collection() -> Iterator[None]:
    wish = object()
    try:
        _PAUSE.begin(wish)
        yield
    finally:
        to_the_end(lambda: _PAUSE.end(wish))
