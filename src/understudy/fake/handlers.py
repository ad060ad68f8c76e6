"""Calls that need tensors, not only their specs: traits of operators that modules of this room register."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from understudy import _torch
from understudy.ops.registry import Trait

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

Handler = Callable[["FakeTensorMode", Any, Any, Any], Any]
"""(mode, operator, args, kwargs) → the result, or `NotImplemented` to leave the call to inference."""

PASSED_THROUGH = frozenset({"profiler"})
"""Namespaces whose operators have nothing to do with tensors' contents: they run for real."""


def _pass_through(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    with _torch.PastDispatch():
        return func(*args, **kwargs)


handler: Trait[Handler] = Trait(
    "handler", derive=lambda op: _pass_through if op.namespace in PASSED_THROUGH else None
)
real_handler: Trait[Handler] = Trait("handler of calls that are given real tensors")
