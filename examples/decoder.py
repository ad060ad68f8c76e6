"""A decoder of any published size, trained on random tokens: one card, or sharded over many by torch's own fully_shard.

    understudy run --device h100 examples/decoder.py --size 1b --context 2048 --batch 4
    understudy run --device 8xh100 torchrun --nproc-per-node 8 examples/decoder.py --size 7b --checkpoint

Sizes are those of the MPT family: layer norms, GELU, four times the width in the MLP, learned positions, tied embeddings.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZES = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
"""Layers, width, heads."""


def parse_options(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="125m")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4, help="sequences of one card in one pass")
    parser.add_argument("--accumulate", type=int, default=1, help="passes of one step")
    parser.add_argument("--vocabulary", type=int, default=50368)
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block in the backward pass")
    parser.add_argument(
        "--keep-gathered", action="store_true", help="shard gradients and optimizer state only"
    )
    parser.add_argument("--pure", action="store_true", help="parameters and activations in bfloat16")
    parser.add_argument("--steps", type=int, default=2)
    return parser.parse_args(arguments)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, options):
        super().__init__()
        layers, width, heads = SIZES[options.size]
        self.has_checkpoints = options.checkpoint
        self.tokens = nn.Embedding(options.vocabulary, width)
        self.positions = nn.Embedding(options.context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.has_checkpoints else block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def shard(model, options):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=not options.keep_gathered)
    fully_shard(model, mp_policy=policy, reshard_after_forward=False)


def main(options):
    is_sharded = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_sharded:
        dist.init_process_group("nccl")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    device = torch.device("cuda", torch.cuda.current_device())
    with device:
        model = Decoder(options)
    if options.pure:
        model = model.bfloat16()
    if is_sharded:
        shard(model, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    for _ in range(options.steps):
        for _ in range(options.accumulate):
            ids = torch.randint(options.vocabulary, (options.batch, options.context + 1), device=device)
            with torch.autocast("cuda", torch.bfloat16, enabled=not options.pure):
                logits = model(ids[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if is_sharded:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_options())
