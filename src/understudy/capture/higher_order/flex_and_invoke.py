"""Flex attention: what its `score_mod` and `mask_mod` refer to becomes buffers that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.capture.higher_order.closures import Branch, ClosureFinder, is_ready, unbound_numbers

if TYPE_CHECKING:
    from understudy.capture.make_fx import Capture

SCORE, BLOCK_MASK, SCORE_BUFFERS = 3, 4, 7
INDICES = 4
"""Batch, head, query and key: what both functions are given."""


def prepare_flex(capture: Capture, op: Any, args: Any, kwargs: Any) -> Any:
    score, mask = args[SCORE], args[BLOCK_MASK][-1]
    if is_ready(score) and is_ready(mask):
        return NotImplemented
    args = list(args)
    buffers = [*args[SCORE_BUFFERS:], (), ()][:2]
    query = args[0]
    with _torch.without_recorder(), capture.stand_ins:
        indices = [torch.zeros((), dtype=torch.int, device=query.device) for _ in range(INDICES)]
        first = torch.zeros((), dtype=query.dtype, device=query.device)
    args[SCORE], score_buffers = _lift_buffers(capture, score, [first, *indices], buffers[0])
    mask, mask_buffers = _lift_buffers(capture, mask, indices, buffers[1])
    args[BLOCK_MASK] = (*args[BLOCK_MASK][:-1], mask)
    return op(*args[:SCORE_BUFFERS], score_buffers, mask_buffers, **kwargs)


def _lift_buffers(
    capture: Capture, function: Callable[..., Any], examples: list[Any], buffers: Any
) -> tuple[Any, tuple[Any, ...]]:
    if is_ready(function):
        return function, tuple(buffers)
    call = [*examples, *buffers]
    rehearsal = ClosureFinder(capture, call)
    with _torch.without_recorder(), capture.stand_ins, _torch.indexing_by_tensors(), rehearsal:
        rehearsal.look_at(function(*call))
    tensors = list(rehearsal.tensors.values())
    numbers = unbound_numbers(list(rehearsal.numbers), [*call, *tensors])
    in_spec = _torch.tree_flatten(tuple(buffers))[1]
    branch = Branch(function, len(examples), in_spec, tensors, is_bare=True)
    return branch, (*buffers, *tensors, *numbers)


# --- `invoke_subgraph` with gradients: the backward graph is a subgraph too ---------------------------------
# torch's own rule shares backward graphs through the cache of its compiler, which is not at work here.


def with_gradients(capture: Capture, op: Any, args: Any, kwargs: Any) -> Any:
    subgraph, identifier, *operands = args
    is_wanted = torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in operands
    )
    if not is_wanted or capture.options.pre_dispatch:
        return NotImplemented
    return tuple(InvokedSubgraph.apply(op, subgraph, identifier, *operands))  # type: ignore[no-untyped-call]


class InvokedSubgraph(torch.autograd.Function):
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
