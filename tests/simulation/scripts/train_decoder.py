"""A script as people write it: a decoder of 3.4 billion parameters, attention and AdamW in plain torch operators.

python train_decoder.py [--length 128] [--autocast] [--forward] [--width 2560 --layers 32 ...]
"""

import argparse
import math

import torch
import torch.nn as nn


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * (x * rms)).to(dtype)


class Linear(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner))
        nn.init.trunc_normal_(self.weight, std=math.sqrt(2 / (inner + outer)))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Rotary(nn.Module):
    def __init__(self, head, length, theta=10000.0):
        super().__init__()
        angles = torch.outer(
            torch.arange(length).float(), theta ** (-torch.arange(0, head, 2).float() / head)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x):
        length = x.shape[-2]
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos[:length], self.sin[:length]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def softmax(x):
    x = x - x.max(dim=-1, keepdim=True).values
    e = torch.exp(x)
    return e / e.sum(dim=-1, keepdim=True)


def attention(q, k, v, mask):
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("...qk,...kd->...qd", softmax(scores), v)


class Attention(nn.Module):
    def __init__(self, width, heads, rotary):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (Linear(width, width) for _ in range(4))
        self.rotary = rotary

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (m(x).view(batch, length, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        mask = torch.tril(torch.ones(length, length, dtype=torch.bool, device=x.device))
        y = attention(self.rotary(q), self.rotary(k), v, mask)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class GatedFeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate, self.up, self.down = Linear(width, inner), Linear(width, inner), Linear(inner, width)

    def forward(self, x):
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class Block(nn.Module):
    def __init__(self, width, heads, inner, rotary):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, rotary)
        self.feed_forward = GatedFeedForward(width, inner)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(o.vocabulary, o.width))
        nn.init.trunc_normal_(self.embedding)
        rotary = Rotary(o.width // o.heads, o.length)
        self.blocks = nn.ModuleList(Block(o.width, o.heads, o.inner, rotary) for _ in range(o.layers))
        self.norm = RMSNorm(o.width)
        self.head = Linear(o.width, o.vocabulary)

    def forward(self, ids):
        x = self.embedding[ids]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def cross_entropy(logits, targets):
    logits = logits - logits.max(dim=-1, keepdim=True).values
    total = torch.log(torch.exp(logits).sum(dim=-1))
    return (total - logits.gather(-1, targets[..., None])[..., 0]).mean()


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                t = state.get("t", 1)
                m = state.get("m", torch.zeros_like(p))
                v = state.get("v", torch.zeros_like(p))
                m = beta1 * m + (1 - beta1) * p.grad
                v = beta2 * v + (1 - beta2) * p.grad**2
                lr = group["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)
                p -= lr * m / (torch.sqrt(v) + group["eps"])
                p -= group["lr"] * group["weight_decay"] * p
                state["t"], state["m"], state["v"] = t + 1, m, v


def main(argv=None):
    parser = argparse.ArgumentParser()
    sizes = {"width": 2560, "layers": 32, "heads": 32, "inner": 10240, "vocabulary": 10000}
    for name, value in {**sizes, "batch": 4, "length": 128, "steps": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--forward", action="store_true")
    o = parser.parse_args(argv)
    model = Decoder(o).to(o.device)
    optimizer = AdamW(model.parameters())
    ids = torch.randint(0, o.vocabulary, (o.batch, o.length), device=o.device)
    for _ in range(o.steps):
        with torch.autocast(o.device, torch.bfloat16, enabled=o.autocast):
            if o.forward:
                with torch.no_grad():
                    loss = cross_entropy(model(ids), ids)
                continue
            optimizer.zero_grad()
            loss = cross_entropy(model(ids), ids)
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
