"""Ctrl-C while a callback of ours runs: Python prints and ignores an exception that is raised there, so the interrupt would
be lost, and the callback left half done. It is sent again afterwards."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import sleep
from types import FrameType

PAUSE = 0.01
"""Seconds after which the interrupt is sent again."""


@contextmanager
def keep_interrupts(*callbacks: Callable[..., None]) -> Iterator[None]:
    """`callbacks` are called by weak references. Nothing changes where the user has a handler of his own, and in other
    threads, which have no signals."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    codes = {getattr(callback, "__code__", None) for callback in callbacks}

    def interrupt(number: int, frame: FrameType | None) -> None:
        where = frame
        while where is not None and where.f_code not in codes:
            where = where.f_back
        if where is None:
            raise KeyboardInterrupt
        _thread.start_new_thread(_send_again, ())

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _send_again() -> None:
    sleep(PAUSE)
    _thread.interrupt_main()
