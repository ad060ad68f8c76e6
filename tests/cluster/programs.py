"""Small distributed programs, run by real processes on the CPU and rehearsed: `python programs.py KIND` runs one.

`python programs.py serve` imports torch once, and runs real ranks in forked processes: for each line `KIND WORLD WHAT GROUP`
on its input, it prints what the ranks measured, as JSON. WHAT is memory or communication. GROUP is gloo, or torch's fake
process group, which needs no other process.
"""

from __future__ import annotations

import collections
import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, HEADS, VOCABULARY = 64, 4, 1000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.sequence: DeviceMesh | None = None
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(x)
        q, k, v = (
            part(y).view(*y.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        if self.sequence is not None:
            k, v = (all_gather_tensor_autograd(part, 2, (self.sequence, 0)) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.sequence is None)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def wrap(kind: str, model: Model) -> nn.Module:
    if kind in ("ddp", "zero1"):
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=kind == "zero1")
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        for i, block in enumerate(model.blocks):
            model.blocks[i] = FullyShardedDataParallel(block, device_id=torch.device("cpu"))
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if kind in ("fsdp2", "mixed", "hsdp"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        shape, names = ((2, world // 2), ("replicate", "shard")) if kind == "hsdp" else ((world,), ("dp",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "mixed" else MixedPrecisionPolicy()
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    if kind == "cp":  # each rank has a part of the sequence, and gathers keys and values of the others
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
        for block in model.blocks:
            block.sequence = mesh
        return model
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    parts = {"q": "c", "k": "c", "v": "c", "o": "r", "up": "c", "down": "r"}
    if kind == "tp":
        rows: Any = {"c": ColwiseParallel(), "r": RowwiseParallel()}
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "out": ColwiseParallel(output_layouts=Replicate()),
        }
    else:
        rows = {"c": ColwiseParallel(input_layouts=Shard(1)), "r": RowwiseParallel(output_layouts=Shard(1))}
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        inner = {name: rows[side] for name, side in parts.items()}
        if kind == "sp":
            inner |= {"norm": SequenceParallel(), "second_norm": SequenceParallel()}
        parallelize_module(block, mesh, inner)
    return model


def train(kind: str) -> None:
    torch.manual_seed(0)
    model = Model()
    wrapped = wrap(kind, model)
    if kind == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-3, foreach=False
        )
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, foreach=False)
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (4, 64))
        if kind == "cp":
            tokens = tokens.chunk(world, dim=1)[rank].contiguous()
        out = wrapped(tokens)
        F.cross_entropy(out.flatten(0, 1).float(), tokens.flatten()).backward()
        del out
        optimizer.step()
        optimizer.zero_grad()


def count_bytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(count_bytes, value)) if isinstance(value, (list, tuple)) else 0


def measure_memory(kind: str) -> int:
    """The peak of what torch allocates on the CPU, by its profiler."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        train(kind)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events):
        live += size
        peak = max(peak, live)
    return peak


def measure_communication(kind: str) -> dict[str, list[int]]:
    """Calls and bytes by operator: the larger of what is given and returned, of a scatter what is received."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # it runs operators on its local tensors, collectives included
            result = func(*args, **(kwargs or {}))
            if (
                func.namespace in ("c10d", "_c10d_functional")
                and "wait" not in str(func)
                and "wrap" not in str(func)
            ):
                name = func._schema.name.split("::")[1]
                sides = [count_bytes(value) for value in (args[:1] if name == "scatter_" else args)]
                sides.append(count_bytes(result) if func.namespace != "c10d" else 0)
                found[name][0] += 1
                found[name][1] += max(sides)
            return result

    with Log():
        train(kind)
    return dict(found)


def measure(kind: str, what: str, group: str) -> Any:
    if group == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    else:
        dist.init_process_group(group)
    return measure_memory(kind) if what == "memory" else measure_communication(kind)


def start_rank(number: int, count: int, port: str, job: tuple[str, str, str], file: Path) -> int:
    """In a forked process, which may end with an error of gloo's threads after its figures are written."""
    global rank, world
    process = os.fork()
    if process == 0:
        try:
            rank, world = number, count
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ.update(places, MASTER_ADDR="localhost", MASTER_PORT=port)
            file.write_text(json.dumps(measure(*job)))
        finally:
            os._exit(0)
    return process


def run_ranks(count: int, job: tuple[str, str, str]) -> list[Any]:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(count)]
        processes = [start_rank(number, count, port, job, file) for number, file in enumerate(files)]
        for process in processes:
            os.waitpid(process, 0)
        return [json.loads(file.read_text()) if file.exists() else None for file in files]


def serve() -> None:
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.distributed.tensor.parallel
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    for line in sys.stdin:
        kind, count, what, group = line.split()
        print(json.dumps(run_ranks(int(count), (kind, what, group))), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "serve":
        serve()
    else:
        dist.init_process_group("gloo")
        train(sys.argv[1])
