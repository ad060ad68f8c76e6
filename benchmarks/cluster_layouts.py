"""Processor time of large cluster rehearsals: a Llama by FSDP2, tensor and context parallelism and a pipeline.

    python -m benchmarks.cluster_layouts               1,024 ranks by classes (pp 8 x dp 16 x tp 8; 32 layers of width 4,096)
    python -m benchmarks.cluster_layouts --405b        405 billion parameters on 512 ranks (pp 8 x dp 4 x cp 2 x tp 8)

Prints seconds of the processor and the largest memory of one process. In a rank, this file is the training script.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
from typing import Any

LAYOUTS: dict[str, tuple[list[str], list[str]]] = {
    "1024": (["--nnodes", "128"], []),
    "405b": (
        ["--nnodes", "64", "--ranks", ",".join(str(64 * stage) for stage in range(8))],
        "--pp 8 --dp 4 --tp 8 --cp 2 --layers 126 --width 16384 --inner 53248 --heads 128 --sequence 8192 --steps 1 "
        "--checkpoints --sequence-parallel".split(),
    ),
}
"""Options of torchrun, and of the script."""


def measure(name: str) -> None:
    launch, options = LAYOUTS[name]
    words = [sys.executable, "-m", "understudy", "torchrun", "--nproc-per-node", "8", "--device", "h100"]
    shown = subprocess.run(
        [*words, *launch, __file__, *options], capture_output=True, text=True, check=False
    ).stdout
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print("\n".join(shown.splitlines()[:2]))
    print(
        f"{used.ru_utime + used.ru_stime:.0f} s of the processor; {used.ru_maxrss >> 10} MiB in one process"
    )


def train(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )
    from torch.nn import functional as F

    width, head = options.width, options.width // options.heads

    def linear(inputs: int, outputs: int) -> nn.Linear:
        return nn.Linear(inputs, outputs, bias=False)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
            self.q, self.o = linear(width, width), linear(width, width)
            self.k, self.v = linear(width, 8 * head), linear(width, 8 * head)
            self.gate, self.up = linear(width, options.inner), linear(width, options.inner)
            self.down = linear(options.inner, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            q, k, v = (part(y).unflatten(-1, (-1, head)).transpose(1, 2) for part in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(mixed.transpose(1, 2).flatten(2))
            y = self.second_norm(x)
            out: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
            return out

    class Stage(nn.Module):
        def __init__(self, stage: int) -> None:
            super().__init__()
            first, last = (options.layers * number // options.pp for number in (stage, stage + 1))
            is_last = stage == options.pp - 1
            self.embedding = nn.Embedding(128256, width) if stage == 0 else None
            self.blocks = nn.ModuleList(Block() for _ in range(first, last))
            self.norm = nn.RMSNorm(width) if is_last else None
            self.out = linear(width, 128256) if is_last else None

        def forward(self, x: torch.Tensor) -> Any:
            x = x if self.embedding is None else self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return x if self.out is None or self.norm is None else self.out(self.norm(x))

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    sizes = (options.pp, options.dp, options.cp, options.tp)
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))
    stage = mesh["pp"].get_local_rank()
    with torch.device("meta"):
        model = Stage(stage)
    is_split = options.sequence_parallel
    layout = Shard(1) if is_split else Replicate()
    ends: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=layout),
        "out": ColwiseParallel(input_layouts=layout, output_layouts=Replicate()),
    }
    plan: dict[str, Any] = {
        name: ColwiseParallel(input_layouts=layout) for name in ("q", "k", "v", "gate", "up")
    }
    plan |= {name: RowwiseParallel(output_layouts=layout) for name in ("o", "down")}
    if is_split:
        ends["norm"] = plan["norm"] = plan["second_norm"] = SequenceParallel()
    parts = dict(model.named_children())
    parallelize_module(model, mesh["tp"], {name: style for name, style in ends.items() if name in parts})
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    data = mesh["dp", "cp"]._flatten("data")
    for number, block in enumerate(model.blocks):
        parallelize_module(block, mesh["tp"], plan)
        model.blocks[number] = checkpoint_wrapper(block) if options.checkpoints else block
        fully_shard(model.blocks[number], mesh=data, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = Schedule1F1B(
        PipelineStage(model, stage, options.pp, device, group=mesh.get_group("pp")),
        n_microbatches=16,
        loss_fn=lambda y, target: F.cross_entropy(y.flatten(0, 1).float(), target.flatten()),
    )
    for _ in range(options.steps):
        x = torch.randint(0, 128256, (16, options.sequence), device=device)
        shards: Any = contextlib.nullcontext()
        target: Any = {"target": x} if stage == options.pp - 1 else {}
        if options.cp > 1:
            shards = context_parallel(mesh["cp"], buffers=[x], buffer_seq_dims=[1], no_restore_buffers={x})
        with shards:
            schedule.step(*[x] * (stage == 0), **target)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--405b", dest="is_large", action="store_true")
    for name, size in {"pp": 8, "dp": 16, "cp": 1, "tp": 8, "layers": 32, "width": 4096, "inner": 14336, "heads": 32,
                       "sequence": 4096, "steps": 2}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--sequence-parallel", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options)
    else:
        measure("405b" if options.is_large else "1024")


if __name__ == "__main__":
    main()
