"""Faults of distributed programs: scripts of some lines, and the text that names the ranks and lines."""

from __future__ import annotations

import os
import re
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch.distributed as dist

from understudy.cli import main
from understudy.cluster.broker import Broker
from understudy.cluster.communication import name_groups
from understudy.cluster.faults import History, find_faults, write_ranks
from understudy.cluster.layout import LayoutError
from understudy.report.cluster_rehearsal import ClusterRehearsal
from understudy.simulation.network import CollectiveRecord, Group, MeshRecord

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"),
    reason="ranks are forked processes of torch.distributed",
)

START = """import os, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("nccl"); rank = dist.get_rank(); torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
x = torch.ones(1024, device="cuda"); layer = nn.Linear(1024, 1024).cuda(); sgd = torch.optim.SGD(layer.parameters(), 0.1)
layer(x).sum().backward()
"""
END = "sgd.step()\n"

ERRORS = {
    "deadlock": (
        """
box = [None]
if rank == 0: dist.recv_object_list(box, src=1); dist.send_object_list([1], dst=1)
elif rank == 1: dist.recv_object_list(box, src=0); dist.send_object_list([1], dst=0)
dist.barrier()
""",
        "deadlock: every rank waits: rank 0 in recv at script.py:7, waiting for rank 1; rank 1 in recv at script.py:8, waiting "
        "for rank 0; rank 2 in barrier at script.py:9, waiting for ranks 0-1",
    ),
    "missing, with values": (
        """
if rank == 2: raise SystemExit(0)
dist.barrier()
""",
        "missing: rank 2 has ended while others wait: ranks 0-1 in barrier at script.py:7, waiting for rank 2",
    ),
    "missing": (
        """
if rank == 0: dist.all_reduce(x)
""",
        "missing: collective 1 of group world: rank 0: all_reduce of 4,096 B at script.py:6; ranks 1-2: none",
    ),
    "mismatch": (
        """
dist.all_reduce(x if rank else x[:1])
""",
        "mismatch: collective 1 of group world: rank 0: all_reduce of 4 B at script.py:6; ranks 1-2: all_reduce of 4,096 B at "
        "script.py:6",
    ),
    "mismatch after divergence": (
        """
if rank == 0: dist.all_reduce(x[:1])
dist.all_reduce(x[:1]); dist.all_reduce(x)
dist.all_reduce(x[:1])
""",
        "mismatch: collective 2 of group world: rank 0: all_reduce of 4 B at script.py:7; ranks 1-2: all_reduce of 4,096 B at "
        "script.py:7; the ranks are on different lines since collective 1 of group world: rank 0: all_reduce at script.py:6; "
        "ranks 1-2: all_reduce at script.py:7",
    ),
    "another kind": (
        """
dist.broadcast(x, src=0) if rank == 1 else dist.all_reduce(x)
""",
        "mismatch: collective 1 of group world: ranks 0, 2: all_reduce of 4,096 B at script.py:6; rank 1: broadcast of 4,096 B "
        "from rank 0 at script.py:6",
    ),
    "another root": (
        """
dist.broadcast(x, src=rank // 2)
""",
        "mismatch: collective 1 of group world: ranks 0-1: broadcast of 4,096 B of float32 from rank 0 at script.py:6; rank 2: "
        "broadcast of 4,096 B of float32 from rank 1 at script.py:6",
    ),
    "another reduction": (
        """
dist.all_reduce(x, op=dist.ReduceOp.SUM if rank else dist.ReduceOp.MAX)
""",
        "mismatch: collective 1 of group world: rank 0: all_reduce of 4,096 B of float32 (max) at script.py:6; ranks 1-2: "
        "all_reduce of 4,096 B of float32 (sum) at script.py:6",
    ),
    "another dtype": (
        """
dist.all_reduce(x if rank else torch.ones(2048, dtype=torch.bfloat16, device="cuda"))
""",
        "mismatch: collective 1 of group world: rank 0: all_reduce of 4,096 B of bfloat16 (sum) at script.py:6; ranks 1-2: "
        "all_reduce of 4,096 B of float32 (sum) at script.py:6",
    ),
    "a key of a store": (
        """
store = dist.TCPStore("localhost", 29511, 3, rank == 0)
if rank == 0: store.wait(["ready"])
""",
        "deadlock: every rank waits: rank 0 in a store, for the key 'localhost:29511/ready' at script.py:7",
    ),
    "a key that is asked for again and again": (
        """
store = dist.TCPStore("localhost", 29511, 3, rank == 0)
while rank < 2 and store.add("count", 0) < 1: pass
""",
        "deadlock: every rank waits: ranks 0-1 in a store, for the key 'localhost:29511/count' at script.py:7",
    ),
    "message without a partner": (
        """
if rank == 0: dist.send(x, 1); dist.send(x, 1)
if rank == 1: dist.recv(x, 0)
""",
        "point-to-point: rank 0: send of 4,096 B to rank 1 at script.py:6; rank 1 has no matching recv",
    ),
    "sizes of messages": (
        """
if rank == 0: dist.send(x, 1)
if rank == 1: dist.recv(x[:8], 0)
""",
        "point-to-point: rank 0: send of 4,096 B at script.py:6; rank 1: recv of 32 B at script.py:7",
    ),
    "order of messages": (
        """
if rank == 0: dist.send(x, 1); dist.recv(x, 1)
if rank == 1: dist.send(x, 0); dist.recv(x, 0)
""",
        "point-to-point: rank 0: send to rank 1 at script.py:6; rank 1: send to rank 0 at script.py:7: each waits for the "
        "other; use batch_isend_irecv, or reverse the order on one rank",
    ),
    "order of groups": (
        """
first, second = dist.new_group([0, 1], group_desc="first"), dist.new_group([0, 1], group_desc="second")
if rank < 2:
    for group in ((first, second), (second, first))[rank]: dist.all_reduce(x, group=group)
""",
        "deadlock: rank 0 in all_reduce of group first at script.py:8, waiting for rank 1; rank 1 in all_reduce of group second "
        "at script.py:8, waiting for rank 0: ranks call the collectives of these groups in different orders",
    ),
    "order of groups of a mesh's ranks": (
        """
mesh = dist.init_device_mesh("cuda", (3,), mesh_dim_names=("dp",)); other = dist.new_group()
for group in (mesh.get_group(), other)[::-1 if rank else 1]: dist.all_reduce(x, group=group)
""",
        "deadlock: rank 0 in all_reduce of group dp at script.py:7, waiting for ranks 1-2; ranks 1-2 in all_reduce of group 2 of "
        "ranks 0-2 at script.py:7, waiting for rank 0: ranks call the collectives of these groups in different orders",
    ),
    "groups": (
        """
group = dist.new_group([0, 1]) if rank < 2 else None
""",
        "groups: group 2: ranks 0-1: ranks [0, 1] at script.py:6; rank 2: none; every rank has to call new_group for every "
        "group, in the same order",
    ),
}  # fmt: skip

NOTES = {
    "divergence": (
        """
if rank == 0: dist.all_reduce(x)
else: dist.all_reduce(x)
""",
        "divergence: collective 1 of group world: rank 0: all_reduce at script.py:6; ranks 1-2: all_reduce at script.py:7",
    ),
    "data": (
        """
for _ in torch.utils.data.DataLoader(list(range(8 - rank // 2)), batch_size=1): pass
""",
        "data: rank 2 has 7 batches, ranks 0-1 have 8 batches at script.py:6: the ranks with more wait at the end of the epoch",
    ),
    "memory": (
        """
state = torch.zeros(1 << 28, device="cuda:0")
""",
        "memory: ranks 1-2 hold 1.0 GiB each on cuda:0, script.py:6, and a context of 0.7 GiB each; in all 5.1 of 79.1 GiB: "
        "call torch.cuda.set_device(local_rank) first, and load with map_location",
    ),
    "order of groups, without waiting": (
        """
first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
if rank < 2:
    works = [dist.all_reduce(x, group=group, async_op=True) for group in ((first, second), (second, first))[rank]]
    for work in works: work.wait()
""",
        "",
    ),
    "a group without this rank": (
        """
import warnings; warnings.simplefilter("ignore")  # torch warns, too
group = dist.new_group([0, 1]); dist.all_reduce(x, group=group)
""",
        "groups: rank 2: all_reduce at script.py:7 on a group without this rank does nothing",
    ),
    "a mesh that does not cover the world": (
        """
mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("tp",))
""",
        "layout: the mesh tp 2 has 2 ranks, without rank 2: the product of its sizes must be the world size",
    ),
    "data that ends early, with Join": (
        """
from torch.distributed.algorithms.join import Join
model = nn.parallel.DistributedDataParallel(layer)
with Join([model]):
    for _ in range(1 + (rank == 2)): model(x).sum().backward()
""",
        "divergence: collective 7 of group world: ranks 0-1: all_reduce at script.py:8; rank 2: all_reduce at script.py:9",
    ),
    "keys that are asked for until all ranks have set them": (
        """
store = dist.TCPStore("localhost", 29511, 3, rank == 0); store.add("count", 1)
while store.add("count", 0) < 3: pass
""",
        "",
    ),
    "a batch of messages": (
        """
peers = {0: 1, 1: 0}
if rank in peers:
    ops = [dist.P2POp(dist.isend, x, peers[rank]), dist.P2POp(dist.irecv, torch.empty_like(x), peers[rank])]
    for work in dist.batch_isend_irecv(ops): work.wait()
""",
        "",
    ),
}


def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> tuple[int, ClusterRehearsal]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "script.py").write_text(f"{START}{body}{END}")
    words = ["run", "--quiet", "--device", "h100", "--nproc-per-node", "3", "--json", "run.json", "script.py"]
    code = main(words)
    return code, ClusterRehearsal.from_json((tmp_path / "run.json").read_text())


@pytest.mark.parametrize(("body", "text"), ERRORS.values(), ids=ERRORS)
def test_what_would_hang_is_named(
    body: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, cluster = rehearse(tmp_path, monkeypatch, body)
    assert [str(fault) for fault in cluster.faults] == [text]
    assert (code, cluster.verdict) == (1, "failed") and capsys.readouterr().out.strip() == text
    assert all(row.peak.reserved_bytes for row in cluster.rows)  # the figures until then


@pytest.mark.parametrize(("body", "text"), NOTES.values(), ids=NOTES)
def test_what_may_hang_is_noted(
    body: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, cluster = rehearse(tmp_path, monkeypatch, body)
    assert [str(fault) for fault in cluster.faults] == [text] * bool(text)
    assert (code, cluster.verdict) == (0, "fits")


ATTENTION = """
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
class Attention(nn.Module):
    def __init__(self):
        super().__init__(); self.q = nn.Linear(WIDTH, WIDTH, bias=False)
    def forward(self, x): return self.q(x).view(4, -1, 64)
attention = Attention().cuda()
parallelize_module(attention, dist.init_device_mesh("cuda", (3,), mesh_dim_names=("tp",)), {"q": ColwiseParallel()})
attention(torch.ones(4, WIDTH, device="cuda"))
"""


@pytest.mark.parametrize(
    ("width", "why"),
    [
        (256, ", but q.weight has 256 in dimension 0, which can't be divided evenly"),
        (384 - 192, ": heads, batch size and vocabulary size must be divisible by it"),
    ],
)
def test_sizes_that_ranks_cannot_divide(
    width: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = ATTENTION.replace("WIDTH", str(width)).replace("-1, 64", f"-1, {48 if width == 192 else 64}")
    code, cluster = rehearse(tmp_path, monkeypatch, body)
    (fault,) = map(str, cluster.faults)
    # The first rank that fails ends the others: some may not have come that far.
    ranks, text = re.fullmatch(r"layout: (ranks? [-0-2, ]+): (.*)", fault).groups()  # type: ignore[union-attr]
    assert code == 1 and text == f"Attention at script.py:10 is sharded over tp (3){why}", ranks


def test_both_lines_where_a_rank_waits_for_a_call_that_others_do_not_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "\nif rank == 0: dist.barrier()\ndist.broadcast(x, src=0)\n"
    code, cluster = rehearse(tmp_path, monkeypatch, body)
    assert code == 1 and [str(fault) for fault in cluster.faults] == [
        "missing: ranks 1-2 have ended while others wait: rank 0 in barrier at script.py:6, waiting for ranks 1-2",
        "mismatch: collective 1 of group world: rank 0: barrier at script.py:6; ranks 1-2: broadcast of 4,096 B from rank 0 at "
        "script.py:7",
    ]


def test_where_a_rank_has_ended_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, cluster = rehearse(tmp_path, monkeypatch, "\nif rank == 1: os._exit(7)\ndist.barrier()\n")
    assert (code, cluster.headline) == (
        1,
        "failed: rank 1 of 3: rank 1 ended with exit code 7 at script.py:6",
    )


def test_the_message_of_an_exception_of_several_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cluster = rehearse(tmp_path, monkeypatch, '\nraise ValueError("too few rows\\n\\nIn addition, ask")\n')
    assert re.fullmatch(r"failed: rank \d of 3: ValueError: too few rows", cluster.headline)


def test_branches_of_a_library_are_not_divergence() -> None:
    group = Group("0", (0, 1), "nccl")

    def history(rank: int, line: str) -> History:
        return History(rank, [CollectiveRecord("broadcast", "0", 8, "float32", line)], {"0": group})

    inside = [history(rank, f"train.py:8: prepare(), in site-packages/a.py:{rank}: x") for rank in (0, 1)]
    assert find_faults(inside) == []
    (fault,) = find_faults([history(rank, f"train.py:{rank}: x") for rank in (0, 1)])
    assert str(fault) == (
        "divergence: collective 1 of group 0: rank 0: broadcast at train.py:0; rank 1: broadcast at train.py:1"
    )


def test_more_ranks_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(rank: int) -> tuple[int, object]:
        ours, theirs = Pipe()
        process = os.fork()
        if not process:
            theirs.send(("store", "wait", ["never"], None, ""))
            theirs.recv()
            os._exit(0)
        return process, ours

    monkeypatch.setattr("understudy.cluster.broker.read_private_bytes", lambda pid: 3 << 30)
    monkeypatch.setattr("understudy.cluster.broker.read_available_bytes", lambda: 5 << 30)
    with pytest.raises(
        LayoutError,
        match="1 ranks are alive at once with 3,072 MiB each, and 5,120 MiB are left for 7 more; rehearse with --ranks classes",
    ):
        Broker(range(8), 2, start).run()  # type: ignore[arg-type]


def test_groups_of_the_same_ranks_have_names_of_their_own() -> None:
    pair, made = (0, 1), {}
    for name, ranks, description in [
        ("0", (0, 1, 2, 3), "default_pg"), ("1", pair, "undefined"), ("2", pair, "mesh_tp"), ("3", pair, "experts"),
        ("4", pair, "experts"), ("5", pair, "mesh_tp"), ("6", (0, 1, 2, 3), ""), ("7", (0, 2), ""),
    ]:  # fmt: skip
        made[name] = Group(name, ranks, "nccl", description)
    named = name_groups(made.values(), [MeshRecord(("dp", "tp"), (2, 2), (0, 1, 2, 3))])
    assert [named[group] for group in made.values()] == [
        "world", "1 of ranks 0-1", "tp", "experts", "4 of ranks 0-1", "5 of ranks 0-1", "2 of ranks 0-3", "dp",
    ]  # fmt: skip
    unnamed = name_groups([made["7"]], [])
    assert list(unnamed.values()) == ["ranks 0,2"]


def test_names_of_ranks() -> None:
    assert write_ranks([3]) == "rank 3" and write_ranks([0, 1, 2, 8, 10, 11]) == "ranks 0-2, 8, 10-11"
