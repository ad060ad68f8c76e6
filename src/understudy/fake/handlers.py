"""The table of calls that need tensors, not only their specs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from understudy import _torch

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

Handler = Callable[["FakeTensorMode", Any, Any, Any], Any]
HANDLERS: dict[str, Handler] = {}
"""By operator name; a handler returns `NotImplemented` to leave the call to inference."""
REAL_HANDLERS: dict[str, Handler] = {}
"""For calls that are given real tensors."""


_by_operator: dict[Any, Handler | None] = {}


def handler_of(func: Any) -> Handler | None:
    """The handler of an operator, looked up by name once."""
    try:
        return _by_operator[func]
    except KeyError:
        found = _by_operator[func] = pass_through if func.namespace in PASSED_THROUGH else HANDLERS.get(func.name())
        return found


_for_real: dict[Any, Handler | None] = {}


def real_handler_of(func: Any) -> Handler | None:
    """The handler of an operator for calls that are given real tensors, looked up by name once."""
    try:
        return _for_real[func]
    except KeyError:
        found = _for_real[func] = REAL_HANDLERS.get(func.name())
        return found


PASSED_THROUGH = frozenset({"profiler"})
"""Namespaces whose operators have nothing to do with tensors' contents: they run for real."""


def pass_through(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    with _torch.PastDispatch():
        return func(*args, **kwargs)


def handles(*names: str, table: dict[str, Handler] = HANDLERS) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for name in names:
            table[name] = handler
        return handler

    return register
