"""xformers.ops: attention without scores in memory, by torch's operators of the same kernels.

Tensors are (batch, length, heads, width), or (batch, length, width). Flash attention takes half precision without a bias
of its own; the memory-efficient kernel takes the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from understudy.simulation.library_kernels.modules import Names, StandIn, refuse

VERSION = "0.0.33"
HALF = torch.float16, torch.bfloat16
WIDEST_FLASH = 256
CAUSAL = 1
"""The number of a causal mask for the memory-efficient kernel."""


class AttentionBias:
    is_causal = False


class LowerTriangularMask(AttentionBias):
    is_causal = True

    def __init__(self, *, device: Any = None, tensor: Any = None) -> None:
        pass


class LowerTriangularFromBottomRightMask(LowerTriangularMask):
    pass


class BlockDiagonalMask(AttentionBias):
    """Sequences one after the other in a batch of one."""

    def __init__(self, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None) -> None:
        self.q_seqlen, self.kv_seqlen = list(q_seqlen), list(q_seqlen if kv_seqlen is None else kv_seqlen)

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Any:
        return cls(q_seqlen, kv_seqlen)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> Any:
        lengths = [x.shape[1] for x in tensors for _ in range(x.shape[0])]
        return cls(lengths), torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)

    def make_causal(self) -> BlockDiagonalCausalMask:
        return BlockDiagonalCausalMask(self.q_seqlen, self.kv_seqlen)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        return list(tensor.split(self.q_seqlen, dim=1))


class BlockDiagonalCausalMask(BlockDiagonalMask):
    is_causal = True


BIASES = (
    AttentionBias, LowerTriangularMask, LowerTriangularFromBottomRightMask, BlockDiagonalMask, BlockDiagonalCausalMask,
)  # fmt: skip


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    if query.dim() == 3:
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
        if isinstance(attn_bias, Tensor) and attn_bias.dim() == 3:
            attn_bias = attn_bias.unsqueeze(1)
        return memory_efficient_attention(query, key, value, attn_bias, p, scale).squeeze(2)
    if query.dim() == 5:  # with groups: the heads that share keys
        groups = query.shape[2:4]
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
        return memory_efficient_attention(query, key, value, attn_bias, p, scale).unflatten(2, groups)
    if attn_bias is not None and not isinstance(attn_bias, (AttentionBias, Tensor)):
        refuse(f"xformers.ops.fmha.attn_bias.{type(attn_bias).__name__}")()
    offsets: tuple[Any, Any] = (None, None)
    longest = query.shape[1], key.shape[1]
    if isinstance(attn_bias, BlockDiagonalMask):
        lengths = attn_bias.q_seqlen, attn_bias.kv_seqlen
        longest = max(lengths[0]), max(lengths[1])
        first, second = (
            torch.tensor(list(accumulate(part, initial=0)), dtype=torch.int32, device=query.device)
            for part in lengths
        )
        offsets = first, second
    is_causal = isinstance(attn_bias, AttentionBias) and attn_bias.is_causal
    bias = attn_bias if isinstance(attn_bias, Tensor) else None
    if bias is None and query.dtype in HALF and query.shape[-1] <= WIDEST_FLASH:
        if offsets[0] is not None:
            query, key, value = (x.squeeze(0) for x in (query, key, value))
        out = torch.ops.aten._flash_attention_forward(
            query, key, value, *offsets, *longest, p, is_causal, False, scale=scale
        )[0]
        return out.unsqueeze(0) if offsets[0] is not None else out
    needs_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    result: Tensor = torch.ops.aten._efficient_attention_forward(
        query,
        key,
        value,
        bias,
        *offsets,
        *longest,
        p,
        CAUSAL if is_causal else 0,
        needs_gradient,
        scale=scale,
    )[0]
    return result


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    return torch.unbind(x, dim)


def make_modules() -> Mapping[str, Names]:
    biases = {bias.__name__: bias for bias in BIASES}
    functions = {"memory_efficient_attention": memory_efficient_attention, "unbind": unbind}
    fmha = {**functions, **biases}
    return {
        "xformers": {},
        "xformers.ops": {
            **functions,
            "AttentionBias": AttentionBias,
            "LowerTriangularMask": LowerTriangularMask,
        },
        "xformers.ops.fmha": fmha,
        "xformers.ops.fmha.attn_bias": biases,
    }


XFORMERS = StandIn(VERSION, make_modules, refuse)
