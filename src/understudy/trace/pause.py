"""Python's collector of garbage, paused while a graph is recorded: it would look through all that has been recorded, again
and again, and find nothing to free. With 80 layers, captures one after another take 60 ms in place of 150."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()
_depth = 0
_was_enabled = False


@contextmanager
def no_collection() -> Iterator[None]:
    """Until the last of those who want it so, in any thread, is done."""
    global _depth, _was_enabled
    with _LOCK:
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _LOCK:
            _depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()
