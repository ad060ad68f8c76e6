"""Higher-order operators that record themselves.

Every higher-order operator of torch, and many of others, brings a function that records it with torch's own recorder.
It is called with ours, which has the same face; what it takes from torch's tracing module on the way is answered by us.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy import _torch
from understudy.errors import Context, UnsupportedOperatorException
from understudy.lines import user_line
from understudy.trace import slots
from understudy.trace.subgraph_patches import traced_by_us
from understudy.trace.tracer import PythonKeyTracer

if TYPE_CHECKING:
    from understudy.trace.recorder import ProxyTorchDispatchMode


def _tracked(original: Any) -> Any:
    def track_tensor_tree(inner_res: Any, proxy_res: Any, *, constant: Any, tracer: Any) -> Any:
        track = slots.track_tensor_tree if isinstance(tracer, PythonKeyTracer) else original
        return track(inner_res, proxy_res, constant=constant, tracer=tracer)

    return track_tensor_tree


def _slot(original: Any) -> Any:
    def get_proxy_slot(obj: Any, tracer: Any, *rest: Any) -> Any:
        return (slots.get_proxy_slot if isinstance(tracer, PythonKeyTracer) else original)(obj, tracer, *rest)

    return get_proxy_slot


ANSWERS = {"track_tensor_tree": _tracked, "get_proxy_slot": _slot, "make_fx": traced_by_us}
"""By the names under which torch's tracing module has them."""


def record(recorder: ProxyTorchDispatchMode, op: Any, args: Any, kwargs: Any) -> Any:
    handler = _torch.recording_of(op)
    if handler is None:
        raise UnsupportedOperatorException(
            f"the higher-order operator {op} does not say how it is recorded",
            func=op,
            context=Context(
                line=user_line(),
                hint=f"register a function for it: {op}.py_impl(torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode)",
            ),
        )
    with _torch.answered_by(handler, ANSWERS):
        return handler(recorder, *args, **kwargs)
