"""One process of several on a simulated machine: values after collectives, objects, groups, the log, categories."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

import understudy
from understudy.report.runs import MeasuredRun
from understudy.simulation.machine import Machine
from understudy.simulation.network import NotRehearsedError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch is built without torch.distributed")


@pytest.fixture
def rank_1_of_4(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Machine]:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with understudy.simulate("4xh100", answers=getattr(request, "param", "error")) as machine:
        dist.init_process_group("nccl")
        yield machine


def is_determined(tensor: Any) -> bool:
    return tensor.fake_mode.value_of(tensor) is not None


def test_values_of_other_processes_are_not_determined(rank_1_of_4: Machine) -> None:
    total = torch.tensor([1], device="cuda")
    dist.all_reduce(total)
    sent = torch.tensor([-1, -1], device="cuda")
    dist.broadcast(sent, src=0)
    received = torch.zeros(2, dtype=torch.long, device="cuda")
    dist.recv(received, src=0)
    assert not any(map(is_determined, (total, sent, received)))
    own = torch.tensor([3, 4], device="cuda")
    dist.broadcast(own, src=1)
    assert own.tolist() == [3, 4]


def test_gathered_sizes_are_taken_to_be_equal(rank_1_of_4: Machine) -> None:
    gathered = torch.zeros(4, dtype=torch.long, device="cuda")
    dist.all_gather(list(gathered.chunk(4)), torch.tensor([7], device="cuda"))
    most = torch.tensor([5], device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert gathered.tolist() == [7, 7, 7, 7] and most.tolist() == [5]
    assert any("assuming that other ranks send the values of this one" in note
               for note in rank_1_of_4.mode.network.notes)  # fmt: skip


@pytest.mark.parametrize("rank_1_of_4", ["plausible"], indirect=True)
@pytest.mark.parametrize("operation", ["SUM", "MAX", "AVG"])
def test_gradients_overflow_on_no_process(rank_1_of_4: Machine, operation: str) -> None:
    """As Megatron's optimizer for float16 asks, which leaves a step out if they do."""
    found, inverse_scale = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    torch._amp_foreach_non_finite_check_and_unscale_([torch.randn(3, device="cuda")], found, inverse_scale)
    dist.all_reduce(found, op=getattr(dist.ReduceOp, operation))
    assert not is_determined(found) and found.item() == 0


@pytest.mark.parametrize("rank_1_of_4", ["plausible"], indirect=True)
def test_others_send_what_is_likely_here(rank_1_of_4: Machine) -> None:
    total, most = torch.tensor([3.0], device="cuda"), torch.tensor([3.0], device="cuda")
    dist.all_reduce(total)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert (total.item(), most.item()) == (12, 3)
    assert functional.all_reduce(torch.tensor([3.0], device="cuda"), "sum", dist.group.WORLD).item() == 12
    routes = torch.randn(2048, 8, device="cuda").topk(2).indices
    chosen = torch.zeros(2048, 8, dtype=torch.int, device="cuda").scatter(1, routes, 1).bool()
    gathered = torch.empty(8192, 8, dtype=torch.bool, device="cuda")
    dist.all_gather_into_tensor(gathered, chosen)
    assert gathered[:, 2:4].sum(0).tolist() == [2048, 2048]


@pytest.mark.parametrize("rank_1_of_4", ["plausible"], indirect=True)
def test_unequal_counts_are_read_on_a_simulated_card(rank_1_of_4: Machine) -> None:
    """The policy computes them with real tensors."""
    counts = torch.bincount(torch.randint(0, 3, (16,), device="cuda"), minlength=3)
    assert sorted(counts.tolist()) == [5, 5, 6]


def test_groups_of_any_backend(rank_1_of_4: Machine) -> None:
    group = dist.new_group([0, 1], backend="gloo")
    assert dist.get_backend(group) == "gloo" and dist.get_backend() == "nccl"
    value = torch.ones(3)
    dist.all_reduce(value, group=group)
    assert dist.get_process_group_ranks(group) == [0, 1] and not is_determined(value)


def test_class_and_options_of_nccl(rank_1_of_4: Machine, recwarn: pytest.WarningsRecorder) -> None:
    """A build without NCCL has neither."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    group = dist.new_group([0, 1], pg_options=options)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    assert dist.get_world_size(group) == 2 and not recwarn.list


def test_objects_of_a_process_that_is_alone(rank_1_of_4: Machine) -> None:
    names: list[Any] = [None] * 4
    dist.all_gather_object(names, {"rank": 1})
    assert names == [{"rank": 1}] * 4
    expected = "rank 1 waits for an object of rank 0, which is not rehearsed; rehearse all ranks"
    for receive in (dist.recv_object_list, lambda box, src: dist.scatter_object_list(box, None, src=src)):
        with pytest.raises(NotRehearsedError, match=expected):
            receive([None], src=0)


def test_functional_collectives_allocate_once(rank_1_of_4: Machine) -> None:
    """As eager: `wait_tensor` returns the tensor that it is given."""
    shard = torch.empty(4, 64, 500, device="cuda")
    before = torch.cuda.memory_allocated()
    assert dist.group.WORLD is not None
    whole = functional.all_gather_single(shard, 0, dist.group.WORLD)
    assert whole.shape == (16, 64, 500)
    assert torch.cuda.max_memory_allocated() - before == 4 * shard.nbytes


def test_log_of_collectives(rank_1_of_4: Machine) -> None:
    x = torch.ones(8, 4, device="cuda")
    dist.all_reduce(x, async_op=True).wait()
    dist.all_gather_single(torch.empty(32, 4, device="cuda"), x)
    dist.send(x.bfloat16(), dst=2)
    dist.barrier()
    found = [
        (r.kind, r.nbytes, r.dtype, r.peer, r.is_async, r.line.partition(":")[0].rpartition("/")[2])
        for r in rank_1_of_4.mode.network.log
    ]
    here = "test_network.py"
    assert found == [
        ("all_reduce", 128, "float32", None, True, here),
        ("all_gather", 512, "float32", None, False, here),
        ("send", 64, "bfloat16", 2, True, here),
        ("barrier", 0, "", None, False, here),
    ]


def test_unknown_integers_are_chosen_once() -> None:
    with understudy.FakeTensorMode(answers="plausible"):
        counts = torch.bincount(torch.randint(0, 6, (100,)), minlength=6)
        first = counts.tolist()
        assert sum(first) == 100 and counts[1].item() == first[1]
        rows, columns = counts.view(2, 3).sum(1), counts.view(2, 3).sum(0)
        assert rows.tolist() == [sum(first[:3]), sum(first[3:])]
        assert columns.tolist() == [first[i] + first[i + 3] for i in range(3)]


def test_written_integers_are_not_kept() -> None:
    with understudy.FakeTensorMode(answers="plausible"):
        counts = torch.bincount(torch.randint(0, 4, (8,)), minlength=4)
        counts.tolist()
        counts.add_(torch.tensor(1))
        assert sum(counts.tolist()) == 12
        counts.copy_(torch.randint(50, 60, (4,)))
        assert not is_determined(counts)


@pytest.mark.parametrize("accumulates", [False, True])
def test_categories_of_sharded_state(monkeypatch: pytest.MonkeyPatch, accumulates: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # why: an optional package of torch
    from torch.distributed.fsdp import fully_shard  # why: as above

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    recorder = MeasuredRun("4xh100")
    with recorder:
        mesh = init_device_mesh("cuda", (4,))
        model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)).cuda()
        sharded: Any = fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for step in range(3):
            sharded.set_requires_gradient_sync(not accumulates)
            sharded(torch.randn(2, 256, device="cuda")).sum().backward()
            if step < 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=not accumulates)
    nbytes = 2 * 256 * 512 * 4
    found = recorder.rehearsal().categories
    if accumulates:
        assert found["gradients"] >= nbytes  # of the whole parameters: nothing was reduced
    else:
        assert found["optimizer_state"] == nbytes // 2  # a quarter, twice


class Bucketed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(512, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 8192), nn.Linear(8192, 16)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def test_data_parallel_rebuilds_its_buckets(rank_1_of_4: Machine) -> None:
    """The figures of real processes on gloo: see tests/cluster for the comparison with them."""
    model = nn.parallel.DistributedDataParallel(Bucketed().cuda())
    log = rank_1_of_4.mode.network.log
    assert [(r.kind, r.nbytes) for r in log] == [
        ("all_gather", 32), ("broadcast", 176), ("broadcast", 36229184), ("broadcast", 8),
    ]  # fmt: skip
    for _ in range(3):
        model(torch.randn(4, 512, device="cuda")).sum().backward()
    reduced = [r.nbytes for r in log if r.kind == "all_reduce"]
    assert reduced == [36220992, 34111552, 2109440, 34111552, 2109440]
    assert [r.nbytes for r in log if r.dtype == "int32"] == [36, 8]
