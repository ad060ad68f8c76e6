"""`invoke_subgraph` with gradients: the backward graph is a subgraph too.

torch's own rule shares backward graphs through the cache of its compiler, which is not at work here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch

if TYPE_CHECKING:
    from understudy.trace.capture import Capture


def with_gradients(capture: Capture, op: Any, args: Any, kwargs: Any) -> Any:
    subgraph, identifier, *operands = args
    is_wanted = torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in operands
    )
    if not is_wanted or capture.options.pre_dispatch:
        return NotImplemented
    return tuple(Invoked.apply(op, subgraph, identifier, *operands))  # type: ignore[no-untyped-call]


class Invoked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, subgraph: Any, identifier: Any, *operands: Any) -> Any:
        ctx.call = op, subgraph, identifier
        ctx.keys = _torch.dispatch_keys_of_thread()
        ctx.others = {
            place: value for place, value in enumerate(operands) if not isinstance(value, torch.Tensor)
        }
        ctx.save_for_backward(*[value for value in operands if isinstance(value, torch.Tensor)])
        with _torch.below_autograd():
            return op(subgraph, identifier, *operands)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        op, subgraph, identifier = ctx.call
        tensors = iter(ctx.saved_tensors)
        count = len(ctx.saved_tensors) + len(ctx.others)
        operands = tuple(
            [ctx.others[place] if place in ctx.others else next(tensors) for place in range(count)]
        )
        backward = _torch.backward_of(subgraph, operands)

        def of_tensors(*values: Any) -> tuple[Any, ...]:
            return tuple([grad for grad in backward(*values) if isinstance(grad, torch.Tensor)])

        graph = _torch.as_graph(of_tensors, (*operands, *grads), ctx.keys)
        found = iter(op(graph, f"{identifier}_backward", *operands, *grads))
        return None, None, None, *[None if place in ctx.others else next(found) for place in range(count)]
