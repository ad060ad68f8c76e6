"""The current capture of this thread.

torch's higher-order operators trace their functions in several places: where they are recorded, and in their rules for
autograd. All of them read torch's current tracer. While a capture runs, that is `CurrentTracer`, which makes our subgraphs.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from understudy import _torch
from understudy.capture import proxy_slots
from understudy.capture.tracer import PythonKeyTracer
from understudy.errors import Context, UnderstudyError, UnsupportedOperatorException
from understudy.fake.mode import FakeTensorMode
from understudy.lines import user_line
from understudy.patching import RECORDING, Hold, active, patch, patch_call, patch_found

if TYPE_CHECKING:
    from understudy.capture.make_fx import Capture
    from understudy.capture.recorder import ProxyTorchDispatchMode


class _CurrentCaptures(threading.local):
    def __init__(self) -> None:
        self.captures: list[Capture] = []


_running = _CurrentCaptures()


def current_capture() -> Capture | None:
    return _running.captures[-1] if _running.captures else None


def capture_of_branches() -> Capture:
    """The capture to which a branch belongs; raises outside of `make_fx`."""
    capture = current_capture()
    if capture is None:
        raise UnderstudyError(
            "expected an active make_fx, got none: a higher-order operator records its functions as parts of a graph; "
            "call make_fx on the program"
        )
    return capture


@contextmanager
def running(capture: Capture) -> Iterator[None]:
    """Inside, this is the current capture of the thread."""
    depth = len(_running.captures)
    try:
        _running.captures.append(capture)
        with active(RECORDING):
            yield
    finally:
        del _running.captures[depth:]


@contextmanager
def branches_below_autograd() -> Iterator[None]:
    """Inside, branches are traced below autograd, even in a `pre_dispatch` trace."""
    capture = current_capture()
    if capture is None or not capture.options.pre_dispatch:
        yield
        return
    assert capture.stand_ins is not None  # made now, so that both use the same mode
    below = copy.copy(capture)
    below.options = replace(capture.options, pre_dispatch=False)
    with running(below):
        yield


@patch("torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER", during=RECORDING)
class CurrentTracer:
    """Replaces torch's current tracer: torch's higher-order operators trace their functions with it."""

    def __init__(self, original: Any) -> None:
        self._original = original

    @property
    def fake_tensor_mode(self) -> Any:
        capture = current_capture()
        if capture is None:
            return getattr(self._original, "fake_tensor_mode", None)
        return capture.fake_mode

    def trace_subgraph(self, f: Callable[..., object], *args: object) -> Any:
        if (
            current_capture() is None and self._original is not None
        ):  # torch's own tracer is active in this thread
            return self._original.trace_subgraph(f, *args)
        return capture_of_branches().subgraph(f, args)

    def trace_subgraph_custom_decomp(
        self, f: Callable[..., object], decomp_table: Mapping[Any, Callable[..., Any]], *args: object
    ) -> Any:
        if current_capture() is None and self._original is not None:
            return self._original.trace_subgraph_custom_decomp(f, decomp_table, *args)
        return capture_of_branches().subgraph(f, args, decomp_table)


# --- Where torch's own rules trace a function, while our capture or our fake mode is active ----------------------------

Function = Callable[..., object]


def our_make_fx(f: Function, *args: Any, **options: Any) -> Function:
    from understudy.capture.make_fx import make_fx  # why: captures record higher-order operators

    return make_fx(f, *args, **{"_allow_fake_constant": True, **options})


@patch("torch._higher_order_ops.flex_attention.make_fx", during=RECORDING)
@patch_found("make_fx in the module of a higher-order operator that records itself", during=RECORDING)
def trace_with_our_make_fx(original: Function) -> Function:
    """The function is part of the graph that this thread records."""

    @functools.wraps(original)
    def make_fx(f: Function, *args: object, **options: object) -> object:
        is_ours = current_capture() is not None or type(_torch.active_fake_mode()) is FakeTensorMode
        return (our_make_fx if is_ours else original)(f, *args, **options)

    return make_fx


@patch_call("torch._higher_order_ops.utils._maybe_fake_tracing", during=RECORDING)
def trace_branch_for_functionalization(
    original: Function, function: Function, inputs: Any, pre_dispatch: bool
) -> Any:
    """Functionalisation traces each branch to find writes to its operands."""
    capture = current_capture()
    if capture is None:
        return original(function, inputs, pre_dispatch)
    with _torch.without_recorder():
        return capture.subgraph(function, tuple(inputs))


# --- Higher-order operators that record themselves ----------------------------------------------------------
# Most higher-order operators have a function that records them with torch's own recorder. It is called with ours, which
# has the same interface; the functions of torch's tracing module that it uses are replaced.


@patch_found(
    "track_tensor_tree in the module of a higher-order operator that records itself", during=RECORDING
)
def track_with_our_tracer(original: Callable[..., object]) -> Any:
    """torch's function writes into torch's own tracer."""

    @functools.wraps(original)
    def track_tensor_tree(inner_res: object, proxy_res: object, *, constant: object, tracer: Any) -> Any:
        track = proxy_slots.track_tensor_tree if isinstance(tracer, PythonKeyTracer) else original
        return track(inner_res, proxy_res, constant=constant, tracer=tracer)

    return track_tensor_tree


@patch_found("get_proxy_slot in the module of a higher-order operator that records itself", during=RECORDING)
def read_slot_of_our_tracer(original: Any) -> Any:
    """torch's function reads from torch's own tracer."""

    @functools.wraps(original)
    def get_proxy_slot(obj: object, tracer: Any, *rest: Any) -> Any:
        return (proxy_slots.get_proxy_slot if isinstance(tracer, PythonKeyTracer) else original)(
            obj, tracer, *rest
        )

    return get_proxy_slot


TRACING_FUNCTIONS = {
    "track_tensor_tree": track_with_our_tracer,
    "get_proxy_slot": read_slot_of_our_tracer,
    "make_fx": trace_with_our_make_fx,
}
"""By their names in torch's tracing module."""


def record(recorder: ProxyTorchDispatchMode, op: object, args: Any, kwargs: Any) -> Any:
    handler = _torch.recording_of(op)
    if handler is None:
        raise UnsupportedOperatorException(
            f"the higher-order operator {op} has no implementation for recording",
            func=op,
            context=Context(
                line=user_line(),
                hint=f"register a function for it: {op}.py_impl(torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode)",
            ),
        )
    with Hold() as hold:
        for names, name in _torch.tracing_functions_of(handler, TRACING_FUNCTIONS):
            hold.replace(names, name, TRACING_FUNCTIONS[name])
        return handler(recorder, *args, **kwargs)
