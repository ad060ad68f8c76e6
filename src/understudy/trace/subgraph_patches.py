"""Where torch's own rules trace a function by themselves, and a capture of ours or a fake mode of ours is active."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy import _torch
from understudy._torch import while_active
from understudy.fake.mode import FakeTensorMode
from understudy.trace.subgraph_current import current_capture

Function = Callable[..., Any]


def make_fx_of_ours(f: Function, *args: Any, **options: Any) -> Function:
    from understudy.trace.capture import make_fx  # why: captures record higher-order operators

    return make_fx(f, *args, **{"_allow_fake_constant": True, **options})


@while_active("linearize")
@while_active("graphs of flex attention")
def traced_by_us(original: Function) -> Function:
    def make_fx(f: Function, *args: Any, **options: Any) -> Function:
        is_ours = current_capture() is not None or type(_torch.active_fake_mode()) is FakeTensorMode
        return (make_fx_of_ours if is_ours else original)(f, *args, **options)

    return make_fx


@while_active("what dynamo leaves alone")
def left_alone(original: Function) -> Function:
    """Dynamo takes only functions of torch here; it does not look into ours anyway."""

    def disallow(function: Function) -> Function:
        return function if _is_ours(function) else original(function)

    return disallow


def _is_ours(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).startswith("understudy.")


@while_active("graphs of functionalization")
def graph_of_branch(original: Function) -> Function:
    """Functionalization looks through a graph of each branch for writes to its operands."""

    def trace(function: Function, inputs: Any, pre_dispatch: bool) -> Any:
        capture = current_capture()
        if capture is None:
            return original(function, inputs, pre_dispatch)
        with _torch.without_recorder():
            return capture.subgraph(function, tuple(inputs))

    return trace
