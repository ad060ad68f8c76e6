"""FSDP2 and DistributedDataParallel on CPU stand-ins with torch's fake process group: as with gloo on real tensors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from understudy import FakeTensorMode

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this build of torch has no torch.distributed"
)


@contextlib.contextmanager
def process_group(backend: str, size: int) -> Iterator[None]:
    dist.init_process_group(
        backend, store=FakeStore() if backend == "fake" else dist.HashStore(), rank=0, world_size=size
    )
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()


def shard(model: nn.Sequential, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


WRAPPED: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "fsdp": shard,
    "fsdp, bfloat16": lambda model: shard(
        nn.Sequential(model[0], nn.LayerNorm(16), *model[2:]),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    ),
    "fsdp, not resharded": lambda model: shard(model, reshard_after_forward=False),
    "ddp": lambda model: nn.parallel.DistributedDataParallel(model),
    "ddp, views": lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True),
}


def describe(tensor: Any) -> tuple[Any, ...]:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tuple(
        (
            type(part).__name__ if hasattr(part, "to_local") else "",
            tuple(part.shape),
            part.stride(),
            part.dtype,
            str(part.device),
        )
        for part in (tensor, local)
    )


def train(wrap: Callable[[nn.Sequential], nn.Module]) -> list[Any]:
    model = wrap(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[Any] = []
    for _ in range(3):
        out = model(torch.randn(3, 8))
        out.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        seen += [describe(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [describe(out), *(describe(parameter) for parameter in model.parameters())]
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*seen, *(describe(value) for value in states), sorted(model.state_dict())]


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_steps_as_on_real_tensors(wrap: Callable[[nn.Sequential], nn.Module]) -> None:
    with process_group("gloo", 1):
        expected = train(wrap)
    with process_group("fake", 1), FakeTensorMode():
        assert train(wrap) == expected


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_steps_among_four(wrap: Callable[[nn.Sequential], nn.Module]) -> None:
    with process_group("fake", 4), FakeTensorMode():
        seen = train(wrap)
    rows = 4 if wrap not in (WRAPPED["ddp"], WRAPPED["ddp, views"]) else 16
    assert seen[0][1][1] == (rows, 8)
