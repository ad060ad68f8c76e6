"""Higher-order operators in a trace: their branches become graphs inside of the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import UnsupportedOperatorException

if TYPE_CHECKING:
    from understudy.trace.recorder import ProxyTorchDispatchMode


def record(recorder: ProxyTorchDispatchMode, op: Any, args: Any, kwargs: Any) -> Any:
    raise UnsupportedOperatorException(f"{op}: not recorded yet", func=op)
