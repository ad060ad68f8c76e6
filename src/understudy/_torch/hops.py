"""Higher-order operators of torch, and the tracer that they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from understudy._torch.identity import torch_recorder_class


def recording_of(op: Any) -> Callable[..., Any] | None:
    """The function by which a higher-order operator says how torch's recorder is to record it."""
    return op.python_key_table.get(torch_recorder_class())


def tracing_functions_of(handler: Any, names: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
    """Which of these functions the handler's module took from torch's tracing module: (its names, name)."""
    import torch.fx.experimental.proxy_tensor as tracing  # why: only to find the names that were taken from it

    while hasattr(handler, "__wrapped__") or hasattr(handler, "__func__"):
        handler = getattr(handler, "__func__", None) or handler.__wrapped__
    space = getattr(handler, "__globals__", {})
    # Another thread may have replaced it just now: what it stands for is behind `__wrapped__`.
    return [
        (space, name) for name in names
        if name in space and inspect.unwrap(space[name]) is inspect.unwrap(getattr(tracing, name))
    ]  # fmt: skip


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
