"""Some ranks run for all: the figures are those of a run of all ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from understudy.cli import main
from understudy.cluster.classes import (
    choose_first_ranks,
    choose_representatives,
    infer_mesh,
    list_represented,
    place_ranks,
    split,
)
from understudy.cluster.communication import Schedule, find_schedule
from understudy.report.cluster_rehearsal import ClusterRehearsal, RankRow
from understudy.report.cluster_runs import _describe_differences
from understudy.report.rehearsal import Peak
from understudy.simulation.network import CollectiveRecord, Group, MeshRecord

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"),
    reason="ranks are forked processes of torch.distributed",
)

MiB, GiB = 1 << 20, 1 << 30

SHARDED = """
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cuda", (2, 5), mesh_dim_names=("replicate", "shard"))
torch.cuda.set_device(dist.get_rank()); model = nn.Sequential(nn.Linear(1000, 1001), nn.Linear(1001, 1000)).cuda()
fully_shard(model, mesh=mesh); optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
rows = torch.tensor([4], device="cuda"); dist.broadcast(rows, src=3)
for _ in range(2): model(torch.randn(int(rows), 1000, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


def rehearse(ranks: str) -> ClusterRehearsal:
    words = ["run", "--quiet", "--device", "10xh100", "--nproc-per-node", "10", "--ranks", ranks]
    assert main([*words, "--json", "run.json", "script.py"]) == 0
    return ClusterRehearsal.from_json(Path("run.json").read_text())


def test_figures_are_those_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "script.py").write_text(SHARDED)
    some, whole = rehearse("classes"), rehearse("all")
    assert (len(some.rows), len(whole.rows)) == (6, 10)  # both sizes of shards, last, two drawn, the root
    assert any(
        "were run and compared with the ranks that represent them" in note for note in some.assumptions
    )
    found = {rank: row.peak.allocated_bytes for rank, row in some.ranks.items()}
    assert found == {row.rank: row.peak.allocated_bytes for row in whole.rows}


ASKS_THE_FIRST = """
import torch, torch.distributed as dist
dist.init_process_group("nccl"); torch.cuda.set_device(dist.get_rank())
trains = torch.tensor([int(dist.get_rank() == 0)], device="cuda"); dist.broadcast(trains, src=0)
model = torch.nn.Linear(100, 100).cuda(); optimizer = torch.optim.AdamW(model.parameters())
if trains.item(): model(torch.randn(4, 100, device="cuda")).sum().backward(); optimizer.step()
"""


def test_what_a_rank_that_is_not_run_sends_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not what the receiver had before, as where the first rank alone reads the data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "script.py").write_text(ASKS_THE_FIRST)
    (row,) = rehearse("9").rows
    assert row.steps == 1
    assert row.rehearsal is not None
    assert [(found["read"], found["answer"]) for found in row.rehearsal.answers] == [("item", 1)]


def test_columns_of_a_pipeline() -> None:
    mesh = MeshRecord(("pp", "dp", "tp"), (2, 4, 2), tuple(range(16)))
    chosen = choose_representatives(place_ranks(mesh, 16), 0, per_node=16)
    assert sorted(chosen) == [0, 2, 7, 8, 10, 15]  # each at both stages
    assert sorted([*chosen, *list_represented(chosen)]) == list(range(16)) and chosen[0] == []
    without = choose_representatives(place_ranks(None, 64), None, per_node=8)
    assert sorted(without) == [0, 1, 8, 63] and (len(without[1]), len(without[8])) == (6, 54)


def test_first_ranks_of_stages_and_of_unequal_shards() -> None:
    places = place_ranks(MeshRecord(("pp", "dp", "tp"), (2, 4, 2), tuple(range(16))), 16)
    assert sorted(choose_first_ranks([], {}, places)) == [0]
    # The second stage has shards that are smaller on the last two of its four places.
    chosen = choose_first_ranks([0], {8: {(8, 10, 12, 14): {2}}}, places)
    assert chosen == {0: [1, 2, 3, 4, 5, 6, 7], 8: [9, 10, 11], 12: [13, 14, 15]}


def test_dimensions_of_a_program_that_makes_groups_itself() -> None:
    def group(start: int, stop: int, step: int, name: str) -> Group:
        return Group(name, tuple(range(start, stop, step)), "nccl", name.upper())

    world = group(0, 32, 1, "default_pg")
    tensor, data, pipe = (
        group(0, 4, 1, "tensor_group"),
        group(0, 8, 4, "data_group"),
        group(0, 32, 8, "pipe_group"),
    )
    both = group(0, 8, 1, "tensor_and_data")
    found = infer_mesh([world, both, tensor, pipe, data, group(0, 1, 1, "one")], 32)
    assert found == MeshRecord(("pipe", "data", "tensor"), (4, 2, 4), tuple(range(32)))
    assert infer_mesh([world, pipe], 32) == MeshRecord(("pipe", "dim0"), (4, 8), tuple(range(32)))
    assert infer_mesh([world, tensor], 32) == MeshRecord(("dim1", "tensor"), (8, 4), tuple(range(32)))
    assert infer_mesh([world], 32) is None and infer_mesh([Group("1", (0, 1, 3), "nccl")], 32) is None


def test_a_class_is_split_at_a_rank_that_differs() -> None:
    chosen = {0: [], 1: [2, 3, 4, 5, 6], 7: []}
    split(chosen, 5)
    assert chosen == {0: [], 1: [2, 3], 5: [4, 6], 7: []}


def send(peer: int, dtype: str = "float32", step: int = 0) -> CollectiveRecord:
    return CollectiveRecord("send", "0", 4, dtype, "train.py:1", step=step, peer=peer)


def test_the_schedule_of_a_pipeline() -> None:
    logs = {
        0: [send(1, "uint8"), *[send(1)] * 8],
        1: [*[send(2)] * 8, *[send(0)] * 8],
        2: [*[send(3)] * 8, *[send(1)] * 8],
        3: [send(2)] * 8,
    }
    assert find_schedule(logs) == Schedule(4, 8, 3 / 11)
    assert find_schedule({rank: [send((rank + 1) % 4)] for rank in range(4)}) is None  # a ring
    assert find_schedule({0: [], 1: []}) is None


LATE = """
import os, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("nccl"); rank = dist.get_rank()
model = nn.Linear(1000, 8000 if rank >= 6 else 1000).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2): model(torch.randn(8, 1000, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_ranks_that_differ_inside_of_a_class_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "script.py").write_text(LATE)
    some, whole = rehearse("classes"), rehearse("all")
    found = {rank: row.peak.allocated_bytes for rank, row in some.ranks.items()}
    assert found == {row.rank: row.peak.allocated_bytes for row in whole.rows}
    assert len(some.rows) < 10


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({}, "the ranks that were run have equal memory, and other communication"),
        (
            {"peak": Peak(allocated_bytes=GiB, reserved_bytes=3 * GiB), "nccl_high_bytes": 5 * MiB},
            "of the ranks that were run, reserved memory is 2.00 GiB to 3.00 GiB and NCCL's memory is 2.00 MiB to 5.00 MiB",
        ),
        (
            {"peak": Peak(allocated_bytes=GiB + MiB, reserved_bytes=2 * GiB)},
            "of the ranks that were run, allocated memory differs by 1.00 MiB",
        ),
    ],
)
def test_the_note_says_what_differs(change: dict[str, Any], what: str) -> None:
    row = RankRow(
        0, 0, 0, "fits", 2, Peak(allocated_bytes=GiB, reserved_bytes=2 * GiB), nccl_high_bytes=2 * MiB
    )
    assert _describe_differences([row, replace(row, rank=1, **change)]) == what


COLUMNS = """
import os, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("nccl"); torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = dist.init_device_mesh("cuda", (2, 6), mesh_dim_names=("pp", "dp")); pipe, data = mesh["pp"].get_group(), mesh["dp"].get_group()
stage = mesh["pp"].get_local_rank(); rows = torch.tensor([64 if stage == 0 and mesh["dp"].get_local_rank() == 0 else 1], device="cuda")
if stage == 0: dist.broadcast(rows, group=data, group_src=0); dist.send(rows, group=pipe, group_dst=1)
else: dist.recv(rows, group=pipe, group_src=0)
if stage == 1: dist.broadcast(rows, group=data, group_src=0)
model = nn.Linear(1000, 1000 * (1 + stage)).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2): model(torch.ones(int(rows), 1000, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_messages_of_ranks_that_are_not_run_are_those_of_the_first_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "script.py").write_text(COLUMNS)
    found = {}
    for ranks in ("classes", "all"):
        words = ["run", "--quiet", "--device", "12xh100", "--nproc-per-node", "12", "--ranks", ranks]
        assert main([*words, "--json", "run.json", "script.py"]) == 0
        found[ranks] = ClusterRehearsal.from_json(Path("run.json").read_text())
    some = found["classes"]
    assert [row.rank for row in some.rows if row.stands_for] == [0, 6] and len(some.rows) == 5
    peaks = [{rank: row.peak.allocated_bytes for rank, row in each.ranks.items()} for each in found.values()]
    assert peaks[0] == peaks[1] and not any(fault.is_error for fault in some.faults)
    assert (
        "values from ranks that were not run are assumed equal to those of run ranks: recv at script.py:7"
        in some.assumptions
    )


CHAIN = """
import os, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("nccl"); rank, world = dist.get_rank(), dist.get_world_size(); torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = dist.init_device_mesh("cuda", (world // 2, 2), mesh_dim_names=("pp", "tp"))
count = torch.tensor([4], device="cuda"); model = nn.Linear(8, 8).cuda(); optimizer = torch.optim.SGD(model.parameters(), 0.1)
if rank + 2 < world: dist.send(count, rank + 2)
if rank >= 2: dist.recv(count, rank - 2)
for _ in range(2): model(torch.ones(int(count), 8, device="cuda")).sum().backward(); optimizer.step()
"""


def test_a_message_of_a_rank_that_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "script.py").write_text(CHAIN)
    words = ["run", "--device", "h100", "--nnodes", "4", "--nproc-per-node", "2", "--ranks", "2", "script.py"]
    assert main(words) == 4
    shown = capsys.readouterr().out
    expected = (
        "no verdict: rank 2 was ended in recv at script.py:7: it waits for rank 0, which is not rehearsed; add it to --ranks, or "
        "use --ranks classes"
    )
    assert shown.splitlines()[0] == expected
    assert "8 ranks (4 nodes x 2), 1 run: rank 2; pp 4 x tp 2" in shown
