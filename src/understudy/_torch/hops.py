"""Higher-order operators of torch, and the tracer that they ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from understudy._torch.identity import torch_recorder_class

_tracer_lock = threading.Lock()
_tracer_depth = 0
_tracer_before: Any = None


@contextmanager
def announced_tracer(tracer: Any) -> Iterator[None]:
    """torch's higher-order operators ask a process-wide name for the tracer that is at work. Counted, as the flags are."""
    import torch.fx.experimental.proxy_tensor as tracing  # why: only the name in it is set

    global _tracer_depth, _tracer_before
    with _tracer_lock:
        before = tracing._CURRENT_MAKE_FX_TRACER
        _tracer_before = _tracer_before if _tracer_depth else before
        tracing._CURRENT_MAKE_FX_TRACER = tracer
        _tracer_depth += 1
    try:
        yield
    finally:
        with _tracer_lock:
            _tracer_depth -= 1
            here = tracer if before is _tracer_before else before  # another thread may have come later, and stay longer
            tracing._CURRENT_MAKE_FX_TRACER = here if _tracer_depth else _tracer_before


def recording_of(op: Any) -> Callable[..., Any] | None:
    """The function by which a higher-order operator says how torch's recorder is to record it."""
    return op.python_key_table.get(torch_recorder_class())


_answered: dict[int, tuple[int, dict[str, Any]]] = {}
"""By the identity of a module's names: how many handlers of it run, in all threads, and what it had before."""


@contextmanager
def answered_by(handler: Any, answers: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """While it runs, what the handler's module took from torch's tracing module by these names is replaced.

    `answers`: name → function from torch's own object to the one in its place, which other threads meet as well.
    """
    import torch.fx.experimental.proxy_tensor as tracing  # why: only to find the names that were taken from it

    while hasattr(handler, "__wrapped__") or hasattr(handler, "__func__"):
        handler = getattr(handler, "__func__", None) or handler.__wrapped__
    names = getattr(handler, "__globals__", {})
    with _tracer_lock:
        count, originals = _answered.get(id(names), (0, {}))
        if count == 0:
            originals = {name: names[name] for name in answers if names.get(name) is getattr(tracing, name)}
            names.update({name: answers[name](original) for name, original in originals.items()})
        _answered[id(names)] = count + 1, originals
    try:
        yield
    finally:
        with _tracer_lock:
            count, originals = _answered.pop(id(names))
            if count > 1:
                _answered[id(names)] = count - 1, originals
            else:
                names.update(originals)


def indexing_by_tensors() -> Any:
    """A context in which `table[i]`, for a tensor `i` of one element, is an operator and reads no value."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # why: slow to load

    return TransformGetItemToIndex()


def while_loop() -> Any:
    from torch._higher_order_ops.while_loop import while_loop_op  # why: seldom needed

    return while_loop_op


def while_loop_with_all_rounds() -> Any:
    """A loop that gives its state after every round."""
    from torch._higher_order_ops.while_loop import while_loop_stack_output_op  # why: seldom needed

    return while_loop_stack_output_op


def backward_of(function: Callable[..., Any], operands: tuple[Any, ...]) -> Callable[..., Any]:
    """The function from operands and gradients of the results to the gradients of the operands."""
    import torch._higher_order_ops.utils as utils  # why: loads parts of the compiler when it is called

    return utils.create_bw_fn(function, operands)


def as_graph(function: Callable[..., Any], operands: Any, keys: tuple[Any, Any]) -> torch.fx.GraphModule:
    """The graph of a function with gradients in it, made under the dispatch keys of another moment."""
    import torch._higher_order_ops.utils as utils  # why: the same

    return utils.materialize_as_graph(function, operands, *keys, force_enable_grad=True)


def registered_higher_order_fake(op: Any) -> Callable[..., Any] | None:
    import torch._higher_order_ops.utils as utils  # why: slow to load, and seldom needed

    return utils.registered_hop_fake_fns.get(op)


def plain_flex_attention(*args: Any) -> Any:
    """The mathematics of flex attention, written out in operators."""
    from torch._higher_order_ops.flex_attention import _permute_strides, math_attention  # why: slow to load

    out, *rest = math_attention(*args)
    return _permute_strides(out, args[0].stride()), *rest
