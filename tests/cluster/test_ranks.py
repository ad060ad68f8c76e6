"""Ranks as processes: values that travel, launchers, failures, and that nothing is left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import torch.distributed as dist

import understudy
from understudy.cli import main
from understudy.report.cluster_rehearsal import SCHEMA_FILE, ClusterRehearsal

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"),
    reason="ranks are forked processes of torch.distributed",
)

VALUES = """
import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
total = torch.tensor([rank], device="cuda"); dist.all_reduce(total); assert total.tolist() == [3], total.tolist()
most = torch.tensor([rank], device="cuda"); dist.all_reduce(most, op=dist.ReduceOp.MAX); assert most.item() == 2
ranks = torch.zeros(3, dtype=torch.long, device="cuda")
dist.all_gather_into_tensor(ranks, torch.tensor([rank], device="cuda")); assert ranks.tolist() == [0, 1, 2]
sent = torch.tensor([7, 8] if rank == 1 else [-1, -1], device="cuda"); dist.broadcast(sent, src=1); assert sent.tolist() == [7, 8]
parts = torch.tensor([10 * rank + i for i in range(3)], device="cuda"); mine = torch.empty_like(parts)
dist.all_to_all_single(mine, parts); assert mine.tolist() == [rank, 10 + rank, 20 + rank], mine.tolist()
part = torch.zeros(1, dtype=torch.long, device="cuda")
dist.reduce_scatter_tensor(part, torch.arange(3, device="cuda")); assert part.tolist() == [3 * rank]
pieces = [torch.tensor([rank * i], device="cuda") for i in (1, 2)]; dist.all_reduce_coalesced(pieces)
assert [piece.item() for piece in pieces] == [3, 6]
names = [None] * world; dist.all_gather_object(names, f"rank {rank}"); assert names == ["rank 0", "rank 1", "rank 2"]
box = [None]; dist.scatter_object_list(box, ["a", "b", "c"] if rank == 2 else None, src=2); assert box == ["abc"[rank]]
if rank == 0: dist.send(torch.tensor([5], device="cuda"), 1); dist.send_object_list([{"x": torch.ones(3)}], 2)
if rank == 1: got = torch.zeros(1, dtype=torch.long, device="cuda"); dist.recv(got, 0); assert got.item() == 5
if rank == 2: found = [None]; dist.recv_object_list(found, 0); assert found[0]["x"].shape == (3,)
group = dist.new_group([0, 2], backend="gloo")
if rank != 1: pair = torch.tensor([rank]); dist.all_reduce(pair, group=group); assert pair.item() == 2
store = dist.distributed_c10d._get_default_store()
if rank == 0: store.set("key", "value")
assert store.get("key") == b"value"
if rank == 0: open("made_by_rank_0", "w").write("x")
dist.barrier(); assert open("made_by_rank_0").read() == "x"
torch.empty((rank + 1) * 64 * 1024 * 1024, device="cuda")
layer = torch.nn.Linear(4, 4).cuda(); layer(torch.ones(2, 4, device="cuda")).sum().backward()
print("ok", rank); torch.optim.SGD(layer.parameters()).step()
"""

TRAINING = """
import os, torch, torch.nn as nn, torch.distributed as dist
dist.init_process_group("nccl"); local = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(local)
model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda(), device_ids=[local])
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 256, device="cuda")).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""

SPAWNED = """
import os, torch, torch.nn as nn, torch.distributed as dist, torch.multiprocessing as mp
def train(rank, world, name):
    assert name == "run" and "RANK" not in os.environ
    dist.init_process_group("nccl", init_method="tcp://localhost:12345", rank=rank, world_size=world)
    model = nn.Linear(64, 64).to(rank); total = torch.tensor([rank], device=rank); dist.all_reduce(total)
    assert total.item() == sum(range(world))
    model(torch.randn(2, 64, device=rank)).sum().backward(); torch.optim.SGD(model.parameters(), 0.1).step()
if __name__ == "__main__":
    mp.spawn(train, args=(torch.cuda.device_count(), "run"), nprocs=torch.cuda.device_count())
"""

STARTED = (
    SPAWNED.partition("if __name__")[0]
    + """
def read(rank, results):  # does not train: runs as it is
    results.put(rank)
if __name__ == "__main__":
    results = mp.get_context("spawn").Queue(); reader = mp.get_context("fork").Process(target=read, args=(7, results))
    reader.start(); assert results.get() == 7; reader.join()
    mp.set_start_method("spawn"); processes = []
    for rank in range(3):
        processes.append(mp.Process(target=train, args=(rank, 3, "run"))); processes[-1].start()
    for process in processes: process.join()
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for name, text in {"values": VALUES, "train": TRAINING, "spawned": SPAWNED, "started": STARTED}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def rehearse(*words: str) -> ClusterRehearsal:
    assert main(["run", "--quiet", "--json", "run.json", "--device", "3xh100", *words]) == 0
    return ClusterRehearsal.from_json(Path("run.json").read_text())


def test_values_travel_between_ranks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--device", "h100", "--nproc-per-node", "3", "--json", "run.json", "values.py"]) == 0
    shown = capfd.readouterr().out
    assert "ok 0" in shown and "ok 1" not in shown  # the first rank's output
    cluster = ClusterRehearsal.from_json((folder / "run.json").read_text())
    peaks = [cluster.ranks[rank].peak.allocated_bytes for rank in range(3)]
    assert [peak // (256 << 20) for peak in peaks] == [1, 2, 3] and cluster.worst.rank == 2
    assert not (folder / "made_by_rank_0").exists()
    jsonschema.validate(json.loads((folder / "run.json").read_text()), json.loads(SCHEMA_FILE.read_text()))


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_ranks_that_wait_give_their_place_away(folder: Path, jobs: str) -> None:
    assert (
        main(["run", "--quiet", "--device", "h100", "--nproc-per-node", "3", "--jobs", jobs, "values.py"])
        == 0
    )


@pytest.mark.parametrize(
    "words",
    [
        ("--nproc-per-node", "3", "train.py"),
        ("torchrun", "--nproc_per_node=3", "--master-port", "1234", "train.py"),
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu", "train.py"),
        ("spawned.py",),
        ("started.py",),
    ],
    ids=lambda words: words[0],
)
def test_launchers(folder: Path, words: tuple[str, ...]) -> None:
    start_method = multiprocessing.get_start_method(allow_none=True)
    cluster = rehearse(*words)
    assert multiprocessing.get_start_method(allow_none=True) == start_method
    assert (cluster.world_size, cluster.verdict, len(cluster.rows)) == (3, "fits", 3)
    assert all(row.peak.reserved_bytes for row in cluster.rows)


def test_options_of_several_ranks_on_one_process(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "single.py").write_text("import torch; torch.ones(4, device='cuda').sum()\n")
    assert main(["run", "--quiet", "--device", "h100", "--rank", "3", "single.py"]) == 0
    expected = (
        "understudy: --rank has no effect on one process: give the number of ranks with --nproc-per-node"
    )
    assert expected in capfd.readouterr().err


def test_launchers_that_give_each_process_its_number(folder: Path) -> None:
    (folder / "numbered.py").write_text(
        "import argparse, os\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int)\n"
        "parser.add_argument('--local-rank', type=int, dest='local_rank'); parser.add_argument('--lr')\n"
        "options = parser.parse_args(); assert options.local_rank == int(os.environ['LOCAL_RANK']) and options.lr == '1'\n"
        f"{TRAINING}"
    )
    for launcher in (["deepspeed", "--num_gpus"], ["-m", "torch.distributed.launch", "--nproc_per_node"]):
        for count in ("1", "3"):
            assert (
                main(["run", "--quiet", "--device", "3xh100", *launcher, count, "numbered.py", "--lr", "1"])
                == 0
            )


def test_processes_that_train_with_a_queue_are_refused(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "queue.py").write_text(
        "import torch, torch.multiprocessing as mp\n"
        "def train(results): torch.ones(1, requires_grad=True).sum().backward(); results.put(1)\n"
        "if __name__ == '__main__':\n"
        "    results = mp.Queue(); processes = [mp.Process(target=train, args=(results,)) for _ in range(2)]\n"
        "    [process.start() for process in processes]; print(results.get())\n"
    )
    assert main(["run", "--quiet", "--device", "2xh100", "queue.py"]) == 1
    assert (
        "multiprocessing.Process: the arguments of 2 processes cannot be sent to rehearsed ranks"
        in capfd.readouterr().err
    )


def test_ranks_on_one_card(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """set_device was forgotten; or each rank sees its own card only."""
    training = TRAINING.replace("torch.cuda.set_device(local)", "").replace("device_ids=[local]", "")
    (folder / "forgotten.py").write_text(training)
    assert main(["run", "--quiet", "--device", "2xh100", "--nproc-per-node", "2", "forgotten.py"]) == 1
    said = capfd.readouterr().out
    assert "memory: rank 1 holds 0.1 GiB on cuda:0, forgotten.py:7" in said
    assert "NCCL refuses two ranks on one card; call torch.cuda.set_device(local_rank) first" in said
    hidden = "import os; os.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']\n"
    (folder / "hidden.py").write_text(hidden + training)
    assert main(["run", "--quiet", "--device", "2xh100", "--nproc-per-node", "2", "hidden.py"]) == 0
    shown = capfd.readouterr()
    assert "fits on 2 x NVIDIA H100" in shown.out
    assert (
        "Time stats" not in shown.err
    )  # of the timers of DistributedDataParallel, which know two kinds of devices


def test_accelerate_launch(folder: Path) -> None:
    pytest.importorskip("accelerate")
    (folder / "script.py").write_text(
        "import accelerate, torch\na = accelerate.Accelerator(mixed_precision='bf16')\nassert a.num_processes == 3\n"
        "m, o = a.prepare(m := torch.nn.Linear(8, 8), torch.optim.SGD(m.parameters(), 0.1))\n"
        "a.backward(m(torch.randn(2, 8, device=a.device)).sum()); o.step()\n"
        "assert a.gather(torch.tensor([a.process_index], device=a.device)).tolist() == [0, 1, 2]\n"
    )
    assert (
        rehearse("accelerate", "launch", "--multi_gpu", "--num_processes", "3", "script.py").verdict == "fits"
    )


def test_accelerate_is_asked_without_torch(folder: Path) -> None:
    """Also for DeepSpeed, whose fields it hands to the ranks."""
    pytest.importorskip("accelerate")
    (folder / "ds.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
        "num_machines: 1\nmachine_rank: 0\ndeepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 1}\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", "import sys; from understudy.cluster.launchers import parse_launch\n"
         "launch = parse_launch(['accelerate', 'launch', '--config_file', 'ds.yaml', 'train.py', '--x'], 8)\n"
         "print('torch' in sys.modules, launch.layout.per_node, launch.program, launch.layout.environment)\n"
         "for words in (['--config_file', 'none.yaml', 'train.py'], ['--wrong', 'train.py']):\n"
         "  try: parse_launch(['accelerate', 'launch', *words], 8)\n"
         "  except Exception as error: print(type(error).__name__, error)"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert found.startswith("False 4 ('train.py', '--x') {"), found
    assert "'ACCELERATE_DEEPSPEED_ZERO_STAGE': '3'" in found and "zero_stage" in found
    assert "LayoutError accelerate launch: The passed configuration file `none.yaml` does not exist" in found
    assert "LayoutError accelerate launch: unrecognized arguments: --wrong" in found


def test_the_users_own_line(folder: Path) -> None:
    words = [
        "torchrun",
        "--quiet",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--device",
        "h100",
    ]
    assert main([*words, "--json", "run.json", "train.py"]) == 0
    cluster = ClusterRehearsal.from_json((folder / "run.json").read_text())
    assert (cluster.nodes, cluster.per_node, [row.node for row in cluster.rows]) == (2, 2, [0, 0, 1, 1])
    assert any(row.is_between_nodes for row in cluster.communication)


def test_a_function_in_each_rank() -> None:
    def train() -> None:
        dist.init_process_group("nccl")
        total = torch.tensor([dist.get_rank()], device="cuda")
        dist.all_reduce(total)
        torch.empty(int(total) * 1024 * 1024, device="cuda")

    cluster = understudy.rehearse_cluster(train, device="4xh100", is_quiet=True)
    assert [row.peak.allocated_bytes >= 6 * 4 << 20 for row in cluster.rows] == [True] * 4
    assert "4 ranks (4 on one node), all run" in str(cluster)


def test_one_rank_in_this_process() -> None:
    with understudy.simulate("4xh100", rank=3, world_size=8, answers="plausible"):
        dist.init_process_group("nccl")
        assert (dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"]) == (3, 8, "3")
    assert "RANK" not in os.environ and not dist.is_initialized()
    with pytest.raises(
        understudy.UnderstudyError, match="expected rank and world_size with 0 <= rank < world_size"
    ):
        understudy.simulate("h100", rank=4, world_size=4)


def run(*words: str) -> Any:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    os.makedirs("temporary", exist_ok=True)
    environment["TMPDIR"] = os.path.abspath("temporary")
    return subprocess.Popen(
        [sys.executable, "-m", "understudy.cli", "run", "--device", "h100", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def test_a_rank_that_raises(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "raises.py").write_text(
        textwrap.dedent("""
        import torch, torch.distributed as dist
        dist.init_process_group("nccl")
        if dist.get_rank() == 1:
            raise ValueError("only here")
        dist.barrier()
        """)
    )
    assert main(["run", "--quiet", "--device", "h100", "--nproc-per-node", "3", "raises.py"]) == 1
    shown = capfd.readouterr()
    assert 'raises.py", line 5' in shown.err and shown.err.rstrip().endswith("ValueError: only here")
    assert shown.out.strip() == "failed: rank 1 of 3: ValueError: only here"


def test_a_rank_that_is_killed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "killed.py").write_text(
        "import os, signal, torch.distributed as dist\ndist.init_process_group('nccl')\n"
        "dist.barrier()\nif dist.get_rank() == 2: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()\n"
    )
    assert main(["run", "--quiet", "--device", "h100", "--nproc-per-node", "3", "killed.py"]) == 1
    expected = "failed: rank 2 of 3: rank 2 was killed by signal 9 (SIGKILL) after barrier at killed.py:3"
    assert capfd.readouterr().out.strip() == expected


def test_ranks_that_compute_while_another_one_fails_are_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("understudy.cluster.broker.GRACE", 0.5)
    (folder / "late.py").write_text(
        "import time, torch, torch.distributed as dist\ndist.init_process_group('nccl')\ndist.barrier()\n"
        "if dist.get_rank() == 0: time.sleep(600)\nif dist.get_rank() == 1: raise ValueError('only here')\ndist.barrier()\n"
    )
    words = [
        "run",
        "--device",
        "h100",
        "--nproc-per-node",
        "3",
        "--jobs",
        "3",
        "--json",
        "run.json",
        "late.py",
    ]
    assert main(words) == 1
    assert "failed: rank 1 of 3: ValueError: only here" in capfd.readouterr().out
    cluster = ClusterRehearsal.from_json((folder / "run.json").read_text())
    assert [(row.verdict, bool(row.failure)) for row in cluster.rows[:2]] == [
        ("no verdict", False),
        ("failed", True),
    ]


def children_of(group: int) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid=,pgid="], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if int(line.split()[1]) == group]


def test_remote_calls_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "remote.py").write_text(
        "import os\nfrom torch.distributed import rpc\nrank = int(os.environ['RANK'])\n"
        "rpc.init_rpc(f'worker{rank}', rank=rank, world_size=2)\n"
    )
    assert main(["run", "--device", "h100", "--nproc-per-node", "2", "remote.py"]) == 1
    captured = capfd.readouterr()
    assert "torch.distributed.rpc is not supported in a rehearsal; use torch" in captured.out.splitlines()[0]
    assert 'File "remote.py", line 4' in captured.err.replace(f"{folder}/", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the list of processes")
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_an_interrupt(folder: Path, kind: signal.Signals) -> None:
    (folder / "endless.py").write_text(
        "import time, torch.distributed as dist\ndist.init_process_group('nccl')\nprint('begun', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = run("--nproc-per-node", "2", "endless.py")
    try:
        assert process.stdout is not None
        while "begun" not in process.stdout.readline():
            assert process.poll() is None
        os.kill(process.pid, kind)
        code = process.wait(60)
        assert code == (130 if kind is signal.SIGINT else -9)
        deadline = time.monotonic() + 60
        while children_of(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not children_of(process.pid)
        if kind is signal.SIGINT:
            assert not os.listdir("temporary")
    finally:
        for pid in children_of(process.pid):
            os.kill(pid, signal.SIGKILL)


WRONG = {
    ("--nproc-per-node", "2", "--folded", "a.html", "train.py"): "--folded is not supported for several ranks; use --json, which contains every rank",
    ("--nproc-per-node", "0", "train.py"): "--nproc-per-node must be a positive integer, got '0'",
    ("--nproc-per-node", "-1", "train.py"): "--nproc-per-node must be a positive integer, got '-1'",
    ("--nproc-per-node", "abc", "train.py"): "--nproc-per-node must be a positive integer, got 'abc'",
    ("--nproc-per-node", "8", "--device", "4xh100", "train.py"): "expected one card per process of a node, got 8 processes and --device 4xh100",
    ("--nproc-per-node", "8", "--ranks", "12", "train.py"): "--ranks: expected ranks from 0 to 7, got 12",
    ("--nproc-per-node", "8", "--ranks", "", "train.py"): "--ranks must be all, classes or a list such as 0,8,16-19, got ''",
    ("--nproc-per-node", "8", "--ranks", "3-1", "train.py"): "--ranks must be all, classes or a list such as 0,8,16-19, got '3-1'",
    ("--nproc-per-node", "8", "--ranks", "classes,all", "train.py"):
        "--ranks must be all, classes or a list such as 0,8,16-19, got 'classes,all'",
    ("--nproc-per-node", "8", "--ranks", "0,1", "--rank", "4", "train.py"): "--rank 4 is not among --ranks 0,1",
    ("--nproc-per-node", "8", "--rank", "8", "train.py"): "--rank must be one of the 8 ranks, 0 to 7, got '8'",
    ("--nproc-per-node", "8", "--rank", "0,1", "train.py"): "--rank must be one of the 8 ranks, 0 to 7, got '0,1'",
    ("--nproc-per-node", "8", "--rank", "all", "train.py"): "--rank must be one of the 8 ranks, 0 to 7, got 'all'",
    ("--nproc-per-node", "8", "torchrun", "--nproc-per-node", "4", "train.py"):
        "expected one number of processes, got --nproc-per-node 8 and torchrun --nproc-per-node 4",
    ("--nnodes", "3", "torchrun", "--nnodes", "2", "--nproc-per-node", "4", "train.py"):
        "expected one number of nodes, got --nnodes 3 and 2 of the launcher",
    ("--nproc-per-node", "2", "--interconnect", "nvlink=0", "train.py"):
        "--interconnect: expected values as in nvlink=450,network=50,latency=70 (GB/s, µs), got 'nvlink=0'",
    ("--nproc-per-node", "2", "--interconnect", "", "train.py"):
        "--interconnect: expected values as in nvlink=450,network=50,latency=70 (GB/s, µs), got ''",
    ("--nproc-per-node", "2", "--interconnect", "nvlink", "train.py"):
        "--interconnect: expected values as in nvlink=450,network=50,latency=70 (GB/s, µs), got 'nvlink'",
    ("torchrun", "--nproc-per-node", "2"): "torchrun: expected a script: torchrun [options] script.py [arguments]",
    ("torchrun", "--nproc-per-nodes", "2", "train.py"): "torchrun: unrecognized arguments: --nproc-per-nodes",
    ("torchrun", "--nproc-per-node"): "torchrun: argument --nproc-per-node/--nproc_per_node: expected one argument",
    ("--device", "h100,4090", "--nproc-per-node", "2", "train.py"):
        "several ranks are rehearsed on one kind of card, got --device h100,4090",
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"), WRONG.items(), ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_wrong_input_is_one_line(
    folder: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    assert capsys.readouterr().err.strip() == f"understudy run: {message}"


def test_two_world_sizes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["run", "--nproc-per-node", "8", "train.py"]) == 2
    expected = "WORLD_SIZE=4 in the environment, but the command line asks for 8 ranks; unset it"
    assert capsys.readouterr().err.strip() == f"understudy run: {expected}"
