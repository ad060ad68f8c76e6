"""The program behind each row of step times, written again: vision models of timm, decoders in plain operators.

What differs from the originals: the release of torch and timm is the installed one. Rows of torch 1.12 are run without fused
attention, which that release did not have.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from examples.decoder import main as train_sharded
from examples.decoder import parse_options

DECODERS = {
    "small": (12, 768, 12, 3072),
    "medium": (24, 1024, 16, 4096),
    "large": (36, 1280, 20, 5120),
    "xl": (48, 1600, 25, 6400),
    "b27": (32, 2560, 32, 10240),
    "b10": (50, 4608, 36, 12288),
}
"""Layers, width, heads, width of the feed-forward network."""
VOCABULARY = 10_000

Run = Callable[[], Any]


def make_program(row: dict[str, Any]) -> Run:
    """A function that builds the model, runs a warm-up step and then one step. For a simulated card."""
    if row["model"].startswith("decoder "):
        return lambda: run_decoder(row)
    if row["model"].startswith("mpt "):
        return lambda: run_sharded(row)
    import_timm()
    return lambda: run_vision(row)


def describe_program(row: dict[str, Any]) -> tuple[Any, ...]:
    """What the operators of a row depend on, beside the card."""
    source = row["source"]
    return (
        row["model"], row.get("image"), row.get("context"), row["batch"], row["precision"], row["kind"], row.get("phase"),
        *row.get("words", ()), "nhwc" in source, "1.12" in source, "pt291" in source,
    )  # fmt: skip


def run_sharded(row: dict[str, Any]) -> None:
    """One rank of eight."""
    places = {
        "RANK": "0",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    os.environ.update(places)
    try:
        train_sharded(parse_options(row["words"]))
    finally:
        for name in places:
            del os.environ[name]


# --- vision models


def run_vision(row: dict[str, Any]) -> None:
    timm = import_timm()
    timm.layers.set_fused_attn(enable="1.12" not in row["source"])
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        model = timm.create_model(row["model"], img_size=row["image"])
    except TypeError:  # models that take images of any size
        model = timm.create_model(row["model"])
    if "pt291" in row["source"]:  # these tables are of models with their branches merged
        model = importlib.import_module("timm.utils").reparameterize_model(model)
    model = model.cuda()
    layout = torch.channels_last if "nhwc" in row["source"] else torch.contiguous_format
    model = model.to(memory_format=layout)
    images = torch.empty(row["batch"], 3, row["image"], row["image"], device="cuda").to(memory_format=layout)
    if row["kind"] == "inference":
        model.eval()
        for _ in range(2):
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
                model(images)
            torch.cuda.synchronize()
        return
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
    loss = nn.CrossEntropyLoss().cuda()
    target = torch.empty(row["batch"], dtype=torch.long, device="cuda").random_(1000)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            value = loss(model(images), target)
        value.backward()
        optimizer.step()
        torch.cuda.synchronize()


def import_timm() -> Any:
    """A torchvision of another build of torch does not find its own operators, and can't be imported without them."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    return importlib.import_module("timm")


# --- decoders


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * x * scale).to(dtype)


class Rotary(nn.Module):
    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(context).float(), 1e4 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("table", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.table[:, positions, :]
        return torch.stack((cos * first - sin * second, sin * first + cos * second), -1).flatten(-2)


def softmax(x: Tensor) -> Tensor:
    x = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
    return x / torch.sum(x, dim=-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(width, width) for _ in range(4))
        self.heads, self.rotary = heads, rotary

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for f in (self.q, self.k, self.v))
        positions = torch.arange(x.shape[-2], device=x.device)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        mask = positions[None, :] <= positions[:, None]
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
        weights = softmax(torch.where(mask, scores, float("-inf")))
        return self.out(torch.einsum("...qk,...kd->...qd", weights, v).transpose(-3, -2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = Linear(width, inner), Linear(inner, width), Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, rotary: Rotary) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.ffn = Attention(width, heads, rotary), SwiGLU(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, inner: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, width))
        rotary = Rotary(context, width // heads)
        self.layers = nn.ModuleList(Block(width, heads, inner, rotary) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class AdamW(torch.optim.Optimizer):
    """As a student writes it: a loop over parameters, one operator after the other."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                t = state.get("t", 1)
                m, v = state.get("m", torch.zeros_like(p)), state.get("v", torch.zeros_like(p))
                m = b1 * m + (1 - b1) * p.grad
                v = b2 * v + (1 - b2) * p.grad**2
                rate = group["lr"] * math.sqrt(1 - b2**t) / (1 - b1**t)
                p.data -= rate * m / (torch.sqrt(v) + group["eps"])
                p.data -= group["lr"] * group["decay"] * p.data
                state["m"], state["v"], state["t"] = m, v, t + 1


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits - logits.max(dim=-1, keepdim=True)[0]
    return (torch.log(torch.exp(logits).sum(-1)) - logits.gather(-1, target[..., None])[..., 0]).mean()


def run_decoder(row: dict[str, Any]) -> None:
    context, batch = row["context"], row["batch"]
    model = Decoder(*DECODERS[row["model"].split()[1]], context).cuda()
    tokens = torch.empty(batch, context, dtype=torch.long, device="cuda").random_(VOCABULARY)
    autocast = torch.autocast("cuda", dtype=torch.bfloat16, enabled=row["precision"] == "bf16")
    phase = row["phase"]
    optimizer = AdamW(model.parameters()) if phase in ("step", "opt") else None
    for _ in range(2):
        if phase == "fwd":
            with torch.no_grad(), autocast:
                model(tokens)
        else:
            model.zero_grad()
            with autocast:
                loss = cross_entropy(model(tokens), tokens)
            loss.backward()
            if optimizer is not None:
                optimizer.step()
        torch.cuda.synchronize()
