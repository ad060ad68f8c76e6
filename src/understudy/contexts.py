"""Context managers that are safe against interrupts, also during `__exit__`.

    GuardedExit      decorator of an `__exit__` that runs even after an interrupt; `guard_exit` registers its function
    run_to_the_end   runs a function at the end of a block
    Restoring        base class of context managers that restore something, by their method `restore`
    contextmanager   as contextlib's, with a guarded `__exit__`
    ReplacedWhere    a patched method of a context manager of torch's, which is torch's own where nothing has to change

Python handles signals between two instructions, also before the first instruction of `__exit__`, where no `try` is active.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ExitGuard:
    """Belongs to a `with` statement, and leaves what it has entered if `__exit__` could not run."""

    leave: Callable[[], None] | None = None

    def __init__(self, manager: object) -> None:
        self.manager = manager

    def __del__(self) -> None:
        if self.leave is not None:
            self.leave()


class GuardedExit:
    """Decorator of an `__exit__` that takes effect even if an interrupt comes at its first line.

    A `with` statement reads `__exit__` before it enters, and drops it when it ends, in every case. Here it gets,
    instead of a bound method, a partial with the only reference to an `ExitGuard`, which no frame of a traceback keeps
    alive. `__enter__` registers the function that leaves, by `guard_exit`; it may be called twice.
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


class _StartingWith(threading.local):
    """The guard of the `with` statement that is being entered."""

    guard: weakref.ref[ExitGuard] | None = None


_ENTERING = _StartingWith()


def guard_exit(manager: object, leave: Callable[[], None]) -> None:
    """Called by `__enter__`, before it enters anything."""
    guard = None if _ENTERING.guard is None else _ENTERING.guard()
    if guard is not None and guard.manager is manager:
        guard.leave = leave
    _ENTERING.guard = None


class Restoring:
    """A context manager whose end is `restore`, which may be called twice. Its `__enter__` calls
    `guard_exit(self, self.restore)` before it changes anything."""

    __slots__ = ()

    def restore(self) -> None:
        raise NotImplementedError

    @GuardedExit
    def __exit__(self, *exception: object) -> None:
        self.restore()


class run_to_the_end(Restoring):
    """`with run_to_the_end(step):` runs `step` at the end of the block, and again from its start if it is interrupted:
    it must be idempotent."""

    __slots__ = ("_is_done", "_step")

    def __init__(self, step: Callable[[], object]) -> None:
        self._step, self._is_done = step, False

    def __enter__(self) -> None:
        guard_exit(self, self.restore)

    def restore(self) -> None:
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
    """As contextlib's, but the code after the `yield` runs at once even if an interrupt comes in `__exit__`. Python's
    own would run it when the traceback is freed."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> _GuardedGenerator[T]:
        return _GuardedGenerator(function, args, kwargs)  # type: ignore[arg-type]

    return make


class ReplacedWhere:
    """A method of a context manager, in whose place `replacement` is called where `is_concerned` says so of the manager.

    A `with` statement reads both methods before it enters. So elsewhere it calls torch's own, and an interrupt finds no
    more moments than without us in which the block is over and nobody will restore what it has changed.
    """

    def __init__(
        self, original: Callable[..., Any], replacement: Callable[..., Any], is_concerned: Callable[[Any], bool]
    ) -> None:
        self.original, self.replacement, self.is_concerned = original, replacement, is_concerned
        functools.update_wrapper(self, original)

    def __get__(self, manager: Any, owner: type | None = None) -> Any:
        if manager is None:
            return self  # `contextlib.ExitStack` reads it of the class
        return MethodType(self.replacement if self.is_concerned(manager) else self.original, manager)

    def __call__(self, manager: Any, *args: object) -> Any:
        return self.__get__(manager)(*args)
