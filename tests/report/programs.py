"""A small GPT and the ways in which people train it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 64, 4, 32, 4, 100


class Attention(nn.Module):
    def __init__(self, sdpa: bool) -> None:
        super().__init__()
        self.sdpa = sdpa
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        head = width // HEADS
        q, k, v = (t.view(batch, length, HEADS, head).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            a = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(head))
            a = a.masked_fill(~self.mask[:length, :length], float("-inf"))
            y = a.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, sdpa: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attention = Attention(sdpa)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.ln1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.ln2(x)))))


class GPT(nn.Module):
    def __init__(
        self, sdpa: bool = False, layers: int = 2, is_checkpointed: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(sdpa, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(self.norm(x))


def train(
    make_optimizer: Callable[..., torch.optim.Optimizer], *, steps: int = 2, autocast: bool = False, accumulate: int = 1,
    clip: float | None = None, device: str = "cpu", set_to_none: bool = True, **model: Any,
) -> None:  # fmt: skip
    gpt = GPT(**model).to(device)
    optimizer = make_optimizer(gpt.parameters())
    x = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)
    y = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)
    for _ in range(steps):
        for _ in range(accumulate):
            with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
                logits = gpt(x)
                loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.view(-1))
            (loss / accumulate).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(gpt.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def regress(loss: Callable[..., torch.Tensor]) -> None:
    """The loss is alive in the backward pass: what memory it keeps counts."""
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512), nn.Sigmoid())
    optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        found = loss(net(torch.randn(64, 64)), torch.zeros(64, 512))
        found.backward()
        optimizer.step()


def fit_by_closure(**options: Any) -> None:
    """L-BFGS, until it has all the directions that it keeps."""
    net = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), history_size=10, **options)
    x, y = torch.randn(50, 64), torch.randn(50, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


def compare_rows() -> None:
    """The gradient of the loss of logits goes on to a sum, whose gradient is a view of it."""
    users, items = nn.Embedding(50, 64), nn.Embedding(20, 64)
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        scores = (users(torch.randint(0, 50, (128,))) * items(torch.randint(0, 20, (128,)))).sum(-1)
        F.binary_cross_entropy_with_logits(scores, torch.ones(128)).backward()
        optimizer.step()


def mix_dtypes() -> None:
    """Operands in other dtypes than the kernel computes in, as masks and integers are, are copied by the CPU's kernels."""
    x = torch.randn(64, 512, requires_grad=True)
    mask, count = torch.ones(64, 512, dtype=torch.bool), torch.arange(512)
    kept = (x * mask + count / 2) * (count > 100.5)
    weights = torch.where(mask, x.bfloat16() * x, count)
    total = (kept.sum() + weights.mean()) / mask.sum()
    total.backward()
    with torch.no_grad():
        x.mul_(mask).sub_(x.grad.bfloat16()).mul_(0.5)


optim = torch.optim
PROGRAMS: dict[str, Callable[[], None]] = {
    "adam": partial(train, optim.Adam),
    "sdpa": partial(train, optim.Adam, sdpa=True),
    "adamw foreach": partial(train, partial(optim.AdamW, foreach=True)),
    "adamw fused": partial(train, partial(optim.AdamW, fused=True)),
    "amsgrad": partial(train, partial(optim.Adam, amsgrad=True)),
    "sgd": partial(train, partial(optim.SGD, lr=0.1)),
    "sgd momentum": partial(train, partial(optim.SGD, lr=0.1, momentum=0.9)),
    "sgd nesterov foreach": partial(
        train, partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True)
    ),
    "rmsprop": partial(train, optim.RMSprop),
    "adagrad": partial(train, optim.Adagrad),
    "autocast": partial(train, optim.AdamW, autocast=True),
    "autocast sdpa": partial(train, optim.AdamW, autocast=True, sdpa=True),
    "checkpointing": partial(train, optim.AdamW, is_checkpointed=True, layers=4),
    "checkpointing autocast": partial(train, optim.AdamW, is_checkpointed=True, layers=4, autocast=True),
    "accumulation": partial(train, optim.AdamW, accumulate=3),
    "clipping": partial(train, optim.AdamW, clip=1.0),
    "clipping foreach": partial(train, partial(optim.AdamW, foreach=True), clip=1.0),
    "dropout": partial(train, optim.AdamW, dropout=0.1),
    "gradients kept as zeros": partial(train, optim.AdamW, set_to_none=False),
    "one step": partial(train, optim.Adam, steps=1),
    "lbfgs": partial(fit_by_closure, lr=0.01),
    "mixed dtypes": mix_dtypes,
    "logits of a sum": compare_rows,
    **{
        f"{loss.__name__}": partial(regress, loss)
        for loss in (
            F.mse_loss,
            F.smooth_l1_loss,
            F.huber_loss,
            F.soft_margin_loss,
            F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits,
        )
    },
    "logits, weighted": partial(
        regress, lambda x, y: F.binary_cross_entropy_with_logits(x, y, weight=torch.ones(512))
    ),
    "logits, positive examples weighted": partial(
        regress, lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.ones(512))
    ),
    "logits, each by itself": partial(
        regress, lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none").mean()
    ),
}
