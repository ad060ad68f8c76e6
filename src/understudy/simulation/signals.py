"""Signals wait while memory is accounted for.

Python runs the handler of a signal between any two instructions of the main thread, and the handler may raise, as that of
Ctrl-C does. An allocator that is left in the middle of a request is wrong from then on, and a program may catch the
interrupt and go on. So while storages are observed, handlers are called when the main thread does not hold `ACCOUNTING`:

    signal ──► DeferredHandler ──► the lock is held here: raise the signal again when it is released
                               └─► else: the program's handler

Handlers can be changed in the main thread only: where another thread is the first to enter a mode, none is deferred.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any, cast

from understudy.patching import OBSERVATION, patch_call, switch

Function = Callable[..., Any]


class SignalSafeLock:
    """A reentrant lock. Handlers of signals do not run in a thread that holds it."""

    def __init__(self) -> None:
        self._lock = cast(Any, threading.RLock())
        self.is_held: Callable[[], bool] = self._lock._is_owned
        """By this thread."""
        self.deferred: list[int] = []
        """Signals that came while it was held."""

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        if self.deferred and not self.is_held():
            signal.raise_signal(self.deferred.pop())


    def guard_forks(self) -> None:
        """A process that is forked while another thread holds the lock would wait for it for ever."""
        if hasattr(os, "register_at_fork"):
            acquire, release = self._lock.acquire, self._lock.release
            os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)


ACCOUNTING = SignalSafeLock()
ACCOUNTING.guard_forks()
"""Held where births and deaths of storages are told to listeners, and where a program asks for memory by itself."""


class DeferredHandler:
    """Handles a signal as `handler` does, when the lock is free."""

    def __init__(self, handler: Function) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> Any:
        if ACCOUNTING.is_held():
            ACCOUNTING.deferred.append(number)
            return None
        return self.handler(number, frame)


def defer(handler: Any) -> Any:
    return DeferredHandler(handler) if callable(handler) and not isinstance(handler, DeferredHandler) else handler


def find_own(handler: Any) -> Any:
    """The program's handler."""
    return handler.handler if isinstance(handler, DeferredHandler) else handler


original_signal, original_getsignal = signal.signal, signal.getsignal


@switch("handlers of signals", during=OBSERVATION)
def defer_signals(is_on: bool) -> None:
    """An interrupt in the middle of a request would leave an allocator with neither the old nor the new blocks."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in signal.valid_signals():
        handler = original_getsignal(number)
        wanted = defer(handler) if is_on else find_own(handler)
        if wanted is not handler:
            original_signal(number, wanted)


@patch_call("signal.signal", during=OBSERVATION)
def set_deferred_handler(original: Function, number: int, handler: Any) -> Any:
    """A handler that the program sets is deferred as those before it."""
    return find_own(original(number, defer(handler)))


@patch_call("signal.getsignal", during=OBSERVATION)
def get_own_handler(original: Function, number: int) -> Any:
    """The program finds the handler that it has set."""
    return find_own(original(number))
