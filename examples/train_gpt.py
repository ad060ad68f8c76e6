"""Train a small GPT on random tokens: an ordinary script for one GPU, or for several (data parallel).

python examples/train_gpt.py --layers 24 --width 1024 --batch 8 --amp
torchrun --nproc-per-node 8 examples/train_gpt.py --amp
"""

import argparse
import contextlib
import math
import os
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.heads, self.sdpa = options.heads, options.sdpa
        self.qkv = nn.Linear(options.width, 3 * options.width)
        self.proj = nn.Linear(options.width, options.width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
            hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(options.width), nn.LayerNorm(options.width)
        self.attention = Attention(options)
        self.mlp = nn.Sequential(
            nn.Linear(options.width, 4 * options.width),
            nn.GELU(),
            nn.Linear(4 * options.width, options.width),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.checkpoint = options.checkpoint
        self.tokens = nn.Embedding(options.vocabulary, options.width)
        self.positions = nn.Embedding(options.length, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoint else block(x)
        return self.head(self.norm(x))


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--sdpa", action="store_true", help="fused attention")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--checkpoint", action="store_true", help="recompute blocks in the backward pass")
    parser.add_argument("--save", metavar="FILE", help="write a checkpoint here every 100 steps")
    return parser.parse_args(arguments)


def main():
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:  # started by torchrun
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = GPT(options).to(device)
    if ranks > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters on {device}")
    for step in range(options.steps):
        began = time.perf_counter()
        for _ in range(options.accumulate):
            ids = torch.randint(options.vocabulary, (options.batch, options.length + 1), device=device)
            with torch.autocast(device, dtype=torch.bfloat16) if options.amp else contextlib.nullcontext():
                logits = model(ids[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / options.accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(
            f"step {step}: loss {loss.item() * options.accumulate:.4f}, {time.perf_counter() - began:.2f} s"
        )
        if options.save and step % 100 == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{options.save}.tmp"
            )
            os.replace(f"{options.save}.tmp", options.save)


if __name__ == "__main__":
    main()
