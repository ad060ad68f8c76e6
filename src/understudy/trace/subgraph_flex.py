"""Flex attention: what its `score_mod` and `mask_mod` refer to becomes buffers that it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.trace.subgraph_closures import Branch, Rehearsal, is_ready, unbound_numbers

if TYPE_CHECKING:
    from understudy.trace.capture import Capture

SCORE, BLOCK_MASK, SCORE_BUFFERS = 3, 4, 7
INDICES = 4
"""Batch, head, query and key: what both functions are given."""


def prepared(capture: Capture, op: Any, args: Any, kwargs: Any) -> Any:
    score, mask = args[SCORE], args[BLOCK_MASK][-1]
    if is_ready(score) and is_ready(mask):
        return NotImplemented
    args = list(args)
    buffers = [*args[SCORE_BUFFERS:], (), ()][:2]
    query = args[0]
    with _torch.without_recorder(), capture.stand_ins:
        indices = [torch.zeros((), dtype=torch.int, device=query.device) for _ in range(INDICES)]
        first = torch.zeros((), dtype=query.dtype, device=query.device)
    args[SCORE], score_buffers = _lifted(capture, score, [first, *indices], buffers[0])
    mask, mask_buffers = _lifted(capture, mask, indices, buffers[1])
    args[BLOCK_MASK] = (*args[BLOCK_MASK][:-1], mask)
    return op(*args[:SCORE_BUFFERS], score_buffers, mask_buffers, **kwargs)


def _lifted(
    capture: Capture, function: Callable[..., Any], examples: list[Any], buffers: Any
) -> tuple[Any, tuple[Any, ...]]:
    if is_ready(function):
        return function, tuple(buffers)
    call = [*examples, *buffers]
    rehearsal = Rehearsal(capture, call)
    with _torch.without_recorder(), capture.stand_ins, _torch.indexing_by_tensors(), rehearsal:
        rehearsal.look_at(function(*call))
    tensors = list(rehearsal.tensors.values())
    numbers = unbound_numbers(list(rehearsal.numbers), [*call, *tensors])
    in_spec = _torch.tree_flatten(tuple(buffers))[1]
    branch = Branch(function, len(examples), in_spec, tensors, is_bare=True)
    return branch, (*buffers, *tensors, *numbers)
