"""A Llama-like language model in plain torch: nothing in it knows of stand-in tensors.

Grouped-query attention, rotary positions, RMS norm, gated feed-forward. The sizes are the published ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaSize:
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128_256
    rotary_base: float = 500_000.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads


SIZES = {
    "tiny": LlamaSize(layers=2, width=256, heads=8, kv_heads=4, hidden=1024, vocabulary=1000),
    "8b": LlamaSize(layers=32, width=4096, heads=32, kv_heads=8, hidden=14_336),
    "70b": LlamaSize(layers=80, width=8192, heads=64, kv_heads=8, hidden=28_672),
    "405b": LlamaSize(layers=126, width=16_384, heads=128, kv_heads=8, hidden=53_248),
}


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        normal = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-5)
        return normal.to(x.dtype) * self.weight


def rotary_tables(length: int, size: LlamaSize, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle: one row for each position, one column for each pair of channels."""
    exponents = torch.arange(0, size.head_width, 2, device=like.device, dtype=torch.float32) / size.head_width
    angles = torch.outer(
        torch.arange(length, device=like.device, dtype=torch.float32), size.rotary_base**-exponents
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.size = size
        kv_width = size.kv_heads * size.head_width
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, kv_width, bias=False)
        self.value = nn.Linear(size.width, kv_width, bias=False)
        self.output = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = rotate(self.by_head(self.query(x), self.size.heads), cos, sin)
        key = rotate(self.by_head(self.key(x), self.size.kv_heads), cos, sin)
        value = self.by_head(self.value(x), self.size.kv_heads)
        shared = self.size.heads // self.size.kv_heads
        key, value = (t.repeat_interleave(shared, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(x.shape))

    def by_head(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.size.head_width).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(size.width)
        self.attention = Attention(size)
        self.feed_forward_norm = RMSNorm(size.width)
        self.feed_forward = FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotary_tables(tokens.shape[1], self.size, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
