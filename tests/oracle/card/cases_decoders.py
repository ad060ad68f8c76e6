"""One decoder (width 2560, 32 heads, gated feed-forward 10240, vocabulary 10,000), as different people write it in plain
operators. Each style changes one part or several; the number of layers is only repetition."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

Tensor = torch.Tensor


@dataclass(frozen=True)
class Style:
    linear: str = "module"  # "module", "einsum", "matmul"
    qkv: str = "three"  # "three", "fused"
    norm: str = "float32"  # "float32", "plain", "library"
    rotary: str = "halves"  # "halves", "complex", "pairs", "indexed"
    mask: str = "tril"  # "tril", "additive", "buffer", "positions"
    softmax: str = "library"  # "library", "float32", "by hand"
    loss: str = "library"  # "library", "by hand", "log_softmax", "logsumexp"
    optimizer: str = "new tensors"  # "new tensors", "in place", "addcdiv", "lists"
    clip: str = "none"  # "none", "library", "by hand"
    autocast: torch.dtype | None = None
    forward_only: bool = False
    layers: int = 2
    length: int = 128
    accumulated: int = 1


class _RMSNorm(nn.Module):
    def __init__(self, width: int, style: Style) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.style = style.norm

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "library":
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        if self.style == "plain":
            return x / torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5) * self.weight
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.type_as(x) * self.weight


class _Linear(nn.Module):
    def __init__(self, inner: int, outer: int, style: Style) -> None:
        super().__init__()
        shape = (inner, outer) if style.linear == "matmul" else (outer, inner)
        self.weight = nn.Parameter(torch.empty(shape))
        nn.init.normal_(self.weight, std=0.02)
        self.style = style.linear

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "matmul":
            return x @ self.weight
        return (
            torch.einsum("bti,oi->bto", x, self.weight)
            if self.style == "einsum"
            else F.linear(x, self.weight)
        )


def _rotate(x: Tensor, style: Style) -> Tensor:
    """Queries or keys of shape (batch, heads, length, width of a head)."""
    length, width = x.shape[-2:]
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, width, 2, device=x.device).float() / width)
    angles = torch.outer(torch.arange(length, device=x.device).float(), frequencies)
    if style.rotary == "complex":
        turns = torch.polar(torch.ones_like(angles), angles)
        as_complex = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(as_complex * turns).flatten(3).type_as(x)
    if style.rotary == "halves":
        twice = torch.cat((angles, angles), -1)
        left, right = x.chunk(2, -1)
        return x * twice.cos() + torch.cat((-right, left), -1) * twice.sin()
    cos, sin = angles.cos(), angles.sin()
    if style.rotary == "indexed":
        cos, sin = torch.stack((cos, sin))[:, torch.arange(length, device=x.device)[None, None]]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).contiguous()


def _softmax(x: Tensor, style: Style) -> Tensor:
    if style.softmax == "by hand":
        e = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
        return e / torch.sum(e, dim=-1, keepdim=True)
    if style.softmax == "float32":
        return F.softmax(x.float(), dim=-1).type_as(x)
    return torch.softmax(x, dim=-1)


def _mask(scores: Tensor, style: Style, kept: Tensor) -> Tensor:
    length = scores.shape[-1]
    if style.mask == "additive":
        return scores + torch.triu(
            torch.full((length, length), float("-inf"), device=scores.device), diagonal=1
        )
    if style.mask == "buffer":
        return scores.masked_fill(kept[:, :, :length, :length] == 0, float("-inf"))
    if style.mask == "positions":
        places = torch.arange(length, device=scores.device)
        return torch.where(places[:, None] >= places[None, :], scores, float("-inf"))
    allowed = torch.tril(torch.ones(length, length, device=scores.device, dtype=torch.bool))
    return scores.masked_fill(~allowed, float("-inf"))


class _Attention(nn.Module):
    kept: Tensor

    def __init__(self, width: int, heads: int, style: Style) -> None:
        super().__init__()
        self.heads, self.style = heads, style
        sizes = [3 * width] if style.qkv == "fused" else [width] * 3
        self.inputs = nn.ModuleList(_Linear(width, size, style) for size in sizes)
        self.out = _Linear(width, width, style)
        self.register_buffer(
            "kept", torch.tril(torch.ones(style.length, style.length))[None, None], persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = [made for module in self.inputs for made in module(x).split(width, -1)]
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        q, k = _rotate(q, self.style), _rotate(k, self.style)
        if self.style.linear == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.shape[-1])
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        weights = _softmax(_mask(scores, self.style, self.kept), self.style)
        y = torch.einsum("bhqk,bhkd->bhqd", weights, v) if self.style.linear == "einsum" else weights @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, style: Style) -> None:
        super().__init__()
        self.norm1, self.norm2 = _RMSNorm(width, style), _RMSNorm(width, style)
        self.attention = _Attention(width, heads, style)
        self.gate, self.up = _Linear(width, inner, style), _Linear(width, inner, style)
        self.down = _Linear(inner, width, style)
        self.by_hand = style.softmax == "by hand"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        gate = self.gate(y)
        gate = gate * torch.sigmoid(gate) if self.by_hand else F.silu(gate)
        return x + self.down(gate * self.up(y))


class Decoder(nn.Module):
    def __init__(
        self, style: Style, width: int = 2560, heads: int = 32, inner: int = 10240, words: int = 10000
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(_Block(width, heads, inner, style) for _ in range(style.layers))
        self.norm = _RMSNorm(width, style)
        self.head = _Linear(width, words, style)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _find_loss(logits: Tensor, targets: Tensor, style: Style) -> Tensor:
    if style.loss == "library":
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
    if style.loss == "logsumexp":
        return (torch.logsumexp(logits, -1) - logits.gather(-1, targets[..., None]).squeeze(-1)).mean()
    if style.loss == "log_softmax":
        return -torch.log_softmax(logits.float(), -1).gather(-1, targets[..., None]).mean()
    shifted = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    logs = shifted - torch.log(torch.sum(torch.exp(shifted), dim=-1, keepdim=True))
    return torch.mean(torch.gather(-logs, -1, targets.unsqueeze(-1)))


class _AdamW(torch.optim.Optimizer):
    def __init__(self, params: Any, style: Style) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1})
        self.update: Callable[..., None] = {
            "new tensors": self._with_new_tensors, "in place": self._in_place, "addcdiv": self._by_addcdiv
        }[style.optimizer]  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(
                        p,
                        p.grad.data,
                        self.state[p],
                        group["lr"],
                        *group["betas"],
                        group["eps"],
                        group["weight_decay"],
                    )

    def _with_new_tensors(
        self, p: Any, grad: Tensor, state: Any, lr: float, b1: float, b2: float, eps: float, wd: float
    ) -> None:
        t = state.get("t", 1)
        m = b1 * state.get("m", torch.zeros_like(grad)) + (1 - b1) * grad
        v = b2 * state.get("v", torch.zeros_like(grad)) + (1 - b2) * torch.square(grad)
        size = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
        p.data -= size * m / (torch.sqrt(v) + eps)
        p.data -= lr * wd * p.data
        state["t"], state["m"], state["v"] = t + 1, m, v

    def _in_place(
        self, p: Any, grad: Tensor, state: Any, lr: float, b1: float, b2: float, eps: float, wd: float
    ) -> None:
        if not state:
            state["t"], state["m"], state["v"] = 0, torch.zeros_like(p.data), torch.zeros_like(p.data)
        state["t"] += 1
        m, v = state["m"], state["v"]
        m.mul_(b1).add_(grad, alpha=1 - b1)
        v.mul_(b2).add_(grad * grad * (1 - b2))
        m_hat, v_hat = m / (1 - b1 ** state["t"]), v / (1 - b2 ** state["t"])
        p.data.mul_(1 - lr * wd)
        p.data.add_(m_hat / (v_hat.sqrt() + eps), alpha=-lr)

    def _by_addcdiv(
        self, p: Any, grad: Tensor, state: Any, lr: float, b1: float, b2: float, eps: float, wd: float
    ) -> None:
        if not state:
            state["t"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
        state["t"] += 1
        p.mul_(1 - lr * wd)
        state["m"].lerp_(grad, 1 - b1)
        state["v"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        below = (state["v"].sqrt() / math.sqrt(1 - b2 ** state["t"])).add_(eps)
        p.addcdiv_(state["m"], below, value=-lr / (1 - b1 ** state["t"]))


class _AdamInLists:
    """No class of torch: two lists beside that of the parameters."""

    def __init__(self, params: Any) -> None:
        self.params = list(params)
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.t = 0

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        for i, p in enumerate(self.params):
            assert p.grad is not None
            self.m[i] = 0.9 * self.m[i] + 0.1 * p.grad
            self.v[i] = 0.95 * self.v[i] + 0.05 * p.grad.pow(2)
            p -= 1e-3 * (self.m[i] / (1 - 0.9**self.t)) / ((self.v[i] / (1 - 0.95**self.t)).sqrt() + 1e-8)


def _clip(params: list[nn.Parameter], style: Style) -> None:
    if style.clip == "library":
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    elif style.clip == "by hand":
        grads = [p.grad for p in params if p.grad is not None]
        total = torch.sqrt(sum((torch.sum(g**2) for g in grads), torch.zeros((), device="cuda")))
        factor = torch.clamp(1.0 / (total + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor)


def train(style: Style, steps: int = 2, batch: int = 4) -> None:
    with torch.device("cuda"):  # so that the full size needs no memory here
        model = Decoder(style)
    optimizer: Any = (
        _AdamInLists(model.parameters()) if style.optimizer == "lists" else _AdamW(model.parameters(), style)
    )
    scaler = torch.amp.GradScaler("cuda", enabled=style.autocast is torch.float16)
    ids = torch.randint(0, 10000, (batch, style.length + 1), device="cuda")
    is_cast = style.autocast is not None
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(style.accumulated):
            with (
                torch.set_grad_enabled(not style.forward_only),
                torch.autocast("cuda", style.autocast or torch.bfloat16, enabled=is_cast),
            ):
                loss = _find_loss(model(ids[:, :-1]), ids[:, 1:].contiguous(), style) / style.accumulated
            if not style.forward_only:
                scaler.scale(loss).backward()
        if style.forward_only:
            continue
        if style.clip != "none":
            scaler.unscale_(optimizer)
            _clip(list(model.parameters()), style)
        scaler.step(optimizer)
        scaler.update()


_PLAIN = Style(linear="einsum", rotary="indexed", mask="positions", softmax="by hand", loss="by hand")
_FUSED = Style(
    qkv="fused", norm="library", rotary="complex", mask="buffer", optimizer="in place", clip="library"
)
_MATMUL = Style(
    linear="matmul", norm="plain", rotary="pairs", mask="additive", softmax="float32", loss="logsumexp", optimizer="addcdiv",
    clip="by hand",
)  # fmt: skip
_LISTS = Style(loss="log_softmax", optimizer="lists", clip="library", accumulated=2)
_STYLES = {"plain": _PLAIN, "fused": _FUSED, "matmul": _MATMUL, "lists": _LISTS}


def decoder_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, style in _STYLES.items():
        for dtype in (None, torch.bfloat16, torch.float16):
            kind = f"decoder, {name}, {dtype or torch.float32}"
            is_scaled = (
                dtype is torch.float16 and style.optimizer == "lists"
            )  # GradScaler wants an optimizer of torch
            if not is_scaled:
                yield kind, partial(train, replace(style, autocast=dtype))
            yield f"{kind}, forward", partial(train, replace(style, autocast=dtype, forward_only=True))
        yield f"decoder, {name}, length 512", partial(train, replace(style, length=512))
        yield (
            f"decoder, {name}, length 512, autocast",
            partial(train, replace(style, length=512, autocast=torch.bfloat16)),
        )
    for length in (128, 256, 512):
        full = replace(_PLAIN, layers=32, length=length)
        yield f"decoder, full size, length {length}", partial(train, full)
        yield (
            f"decoder, full size, length {length}, autocast",
            partial(train, replace(full, autocast=torch.bfloat16)),
        )
