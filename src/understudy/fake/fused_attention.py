"""flex attention as the fused kernels of a compiled program: scores are never in memory.

Eager computes all scores, and keeps them for the backward pass. A compiled program has one kernel for the forward pass and
some for the backward pass, which exist nowhere else: two operators of our own stand for them. Their rules, multiply-adds and
scratch memory stand beside those of torch's own attention kernels. All blocks are counted: which ones a mask leaves out is
data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

SCHEMAS = (
    "flex_attention(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)",
    "flex_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp) "
    "-> (Tensor, Tensor, Tensor)",
)


@functools.cache
def define_operators() -> torch.library.Library:
    """Once in a process; operators go with their library."""
    library = torch.library.Library("understudy", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    return library


class FusedAttention(torch.autograd.Function):
    """Keeps its operands, the result and the sums of scores."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        out, logsumexp = torch.ops.understudy.flex_attention(query, key, value)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.set_materialize_grads(False)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, out, logsumexp = ctx.saved_tensors
        grad = torch.zeros_like(out) if grads[0] is None else grads[0]
        return torch.ops.understudy.flex_attention_backward(grad, query, key, value, out, logsumexp)


def run_fused_attention(query: Any, key: Any, value: Any, *rest: object) -> tuple[object, ...]:
    """With the results of torch's operator: the third, the largest scores, is made on request only, and is of this shape."""
    define_operators()
    apply: Callable[..., Any] = FusedAttention.apply
    out, logsumexp = apply(query, key, value)
    return out, logsumexp, logsumexp
