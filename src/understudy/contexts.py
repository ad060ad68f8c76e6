"""Contexts that are left whatever happens, also if an interrupt comes while they are being left.

    GuardedExit      decorator of an `__exit__` that is not lost; `guard_exit` says what it stands for
    to_the_end       a step that is run when a block is over
    contextmanager   Python's, for what must be undone

Python hears of signals between two of its instructions, and one of these is the first of `__exit__`, before any `try` in it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ExitGuard:
    """Goes with a `with` statement, and leaves what this has entered if `__exit__` could not."""

    leave: Callable[[], None] | None = None

    def __init__(self, manager: object) -> None:
        self.manager = manager

    def __del__(self) -> None:
        if self.leave is not None:
            self.leave()


class GuardedExit:
    """Decorator of an `__exit__` that is not lost when an interrupt comes at its first line, before any `try` in it.

    A `with` statement takes `__exit__` before it enters, and lets go of it when it is over, however that happens. What it
    is given here is no bound method but a partial that alone holds an `ExitGuard`: no frame of a traceback keeps it.
    `__enter__` says what is to be left, by `guard_exit`; that may be done twice.
    """

    def __init__(self, leave: Callable[..., object]) -> None:
        self._leave = leave
        functools.update_wrapper(self, leave)  # type: ignore[arg-type]

    def __get__(self, manager: object, owner: type | None = None) -> Any:
        if manager is None:
            return self._leave
        guard = ExitGuard(manager)
        reference = _ENTERING.guard = weakref.ref(guard)
        leave: Any = functools.partial(_leave, reference, self._leave, manager)
        leave.guard = guard
        return leave


def _leave(reference: weakref.ref[ExitGuard], leave: Callable[..., object], manager: object, *exception: object) -> Any:
    result = leave(manager, *exception)
    guard = reference()
    if guard is not None:
        guard.leave = None
    return result


class _Entering(threading.local):
    """The guard of the `with` statement that has just begun."""

    guard: weakref.ref[ExitGuard] | None = None


_ENTERING = _Entering()


def guard_exit(manager: object, leave: Callable[[], None]) -> None:
    """Called by `__enter__`, before anything is entered."""
    guard = None if _ENTERING.guard is None else _ENTERING.guard()
    if guard is not None and guard.manager is manager:
        guard.leave = leave
    _ENTERING.guard = None


class to_the_end:
    """`with to_the_end(step):` the step is run when this is over, from its beginning once more if it is interrupted: it must
    not matter what of it was done before."""

    __slots__ = ("_is_done", "_step")

    def __init__(self, step: Callable[[], object]) -> None:
        self._step, self._is_done = step, False

    def __enter__(self) -> None:
        guard_exit(self, self._finish)

    @GuardedExit
    def __exit__(self, *exception: object) -> None:
        self._finish()

    def _finish(self) -> None:
        if not self._is_done:
            try:
                self._step()
            except Exception:
                self._is_done = True
                raise
            self._is_done = True


class _GuardedGenerator(contextlib._GeneratorContextManager[T]):
    def __enter__(self) -> T:
        guard_exit(self, self.gen.close)
        return super().__enter__()

    __exit__ = GuardedExit(contextlib._GeneratorContextManager.__exit__)


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, _GuardedGenerator[T]]:
    """As Python's, for what must be undone: what comes after the `yield` runs at once, also if an interrupt comes when the
    context is being left. Python's own then waits until nobody looks at the traceback any more."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> _GuardedGenerator[T]:
        return _GuardedGenerator(function, args, kwargs)  # type: ignore[arg-type]

    return make
