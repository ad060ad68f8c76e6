"""A decoder on several cards, by FSDP2, tensor parallelism or a pipeline: as torchrun would start it.

understudy torchrun --nproc-per-node 8 --device h100 examples/cluster.py fsdp2
understudy torchrun --nproc-per-node 8 --device h100 examples/cluster.py tp
understudy torchrun --nproc-per-node 8 --device h100 examples/cluster.py pipeline
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

VOCABULARY, SEQUENCE = 32000, 1024


class Block(nn.Module):
    def __init__(self, width: int, head: int = 64) -> None:
        super().__init__()
        self.head = head
        self.norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.second_norm(x))))
        return out


class Decoder(nn.Module):
    """All of it, or the stage of a pipeline that has some of its blocks."""

    def __init__(self, width: int, blocks: int, is_first: bool = True, is_last: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width) if is_first else None
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, VOCABULARY, bias=False) if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.out is None else self.out(x)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def shard(model: Decoder, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def divide(model: Decoder, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "out": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    columns, rows = ("q", "k", "v", "up"), ("o", "down")
    for block in model.blocks:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in rows})


def make_step(
    layout: str, width: int, blocks: int, batch: int, device: torch.device
) -> tuple[nn.Module, Any]:
    """The model of this rank, and a function that runs it forward and backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if layout == "pipeline":
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        stage = Decoder(width, blocks // world, rank == 0, rank == world - 1).to(device)
        schedule = Schedule1F1B(
            PipelineStage(stage, rank, world, device), n_microbatches=2 * world, loss_fn=loss_of
        )

        def run_stage() -> None:
            tokens = torch.randint(0, VOCABULARY, (2 * world * batch, SEQUENCE), device=device)
            schedule.step(*[tokens] * (rank == 0), **({"target": tokens} if rank == world - 1 else {}))

        return stage, run_stage
    model = Decoder(width, blocks).to(device)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp" if layout == "fsdp2" else "tp",))
    shard(model, mesh) if layout == "fsdp2" else divide(model, mesh)

    def run_model() -> None:
        tokens = torch.randint(0, VOCABULARY, (batch, SEQUENCE), device=device)
        loss_of(model(tokens), tokens).backward()

    return model, run_model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", choices=("fsdp2", "tp", "pipeline"))
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    model, run = make_step(options.layout, options.width, options.blocks, options.batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=options.layout != "tp")
    for _ in range(3):
        run()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
