"""Command lines of launchers: what they start, and what each process is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.cluster.launchers import Launch, parse_launch
from understudy.cluster.layout import LayoutError

HOSTS = "# the cluster\nworker-0 slots=4\n\nworker-1 slots=4\nworker-2 slots=2\n"


def parse(line: str) -> Launch:
    launch = parse_launch(line.split(), 8)
    assert launch is not None
    return launch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text(HOSTS)
    (tmp_path / "wrong").write_text("worker-0: 4 cards\n")
    (tmp_path / "empty").write_text("# none\n")
    return tmp_path


COUNTS = {
    "torchrun train.py": (1, 8),
    "torchrun --nnodes 1:4 --nproc-per-node 2 train.py": (4, 2),
    "deepspeed train.py": (1, 8),
    "deepspeed --num_gpus 2 train.py": (1, 2),
    "deepspeed --num_nodes 2 --num_gpus 4 train.py": (2, 4),
    "deepspeed --include localhost:4,5 train.py": (1, 2),
    "deepspeed --exclude localhost:0,1,2 -q train.py": (1, 5),
    "deepspeed --include worker-0@worker-1 train.py": (2, 8),
    "deepspeed --hostfile hosts --num_gpus 2 train.py": (3, 2),
    "deepspeed --hostfile hosts --num_nodes 2 train.py": (2, 4),
    "deepspeed --hostfile hosts --include worker-0:0,1@worker-2 train.py": (2, 2),
    "deepspeed --hostfile hosts --exclude worker-2@worker-1:0@worker-0:3 train.py": (2, 3),
}


@pytest.mark.parametrize(("line", "counts"), COUNTS.items(), ids=COUNTS)
def test_nodes_and_processes(line: str, counts: tuple[int, int], folder: Path) -> None:
    launch = parse(line)
    assert (launch.layout.nodes, launch.layout.per_node, launch.program) == (*counts, ("train.py",))


WRONG = {
    "torchrun --nnodes 4:1 train.py": "torchrun --nnodes must be a positive integer, got '4:1'",
    "torchrun --nproc-per-node ² train.py": "torchrun --nproc-per-node must be a positive integer, got '²'",
    "torchrun --nproc-per-node 99999999 train.py": "expected at most 1,048,576 ranks, got 99,999,999",
    "deepspeed --no_python train.sh": "deepspeed: expected a Python program, got --no_python; rehearse the Python command that it runs",
    "deepspeed --hostfile hosts train.py": "deepspeed: expected as many cards on each host, got 4, 4, 2",
    "deepspeed --hostfile hosts --num_nodes 9 train.py": "deepspeed --num_nodes 9: hosts has 3 hosts",
    "deepspeed --hostfile hosts --include worker-9 train.py":
        "deepspeed: expected hosts as in worker-0@worker-1:0,2 of worker-0, worker-1, worker-2, got 'worker-9'",
    "deepspeed --hostfile hosts --include worker-2:2 train.py": "deepspeed: worker-2 has cards 0 to 1, got 'worker-2:2'",
    "deepspeed --include localhost:a train.py":
        "deepspeed: expected hosts as in worker-0@worker-1:0,2 of localhost, got 'localhost:a'",
    "deepspeed --exclude localhost train.py": "deepspeed --exclude localhost: no cards are left",
    "deepspeed --include a --exclude b train.py": "deepspeed: --include and --exclude can't be used together",
    "deepspeed --include localhost:1 --num_gpus 2 train.py":
        "deepspeed: --num_nodes and --num_gpus can't be used with --include and --exclude",
    "deepspeed --hostfile wrong train.py":
        "deepspeed --hostfile wrong: expected lines such as 'worker-0 slots=8', got 'worker-0: 4 cards'",
    "deepspeed --hostfile empty train.py": "deepspeed --hostfile empty: expected lines such as 'worker-0 slots=8', got none",
}  # fmt: skip


@pytest.mark.parametrize(("line", "message"), WRONG.items(), ids=WRONG)
def test_what_a_launcher_can_not_start(line: str, message: str, folder: Path) -> None:
    with pytest.raises(LayoutError) as raised:
        parse(line)
    assert str(raised.value) == message


def test_a_file_of_hosts_that_is_not_here_is_noted(folder: Path) -> None:
    launch = parse("deepspeed --hostfile none --num_nodes 2 train.py")
    assert (launch.layout.nodes, launch.layout.per_node) == (2, 8)
    assert launch.notes == ("deepspeed --hostfile none: not found; rehearsed without it",)


def test_each_process_has_the_variables_and_arguments_of_its_launcher() -> None:
    layout = parse("deepspeed --num_nodes 2 --num_gpus 4 train.py").layout
    variables = layout.environment_of(6)
    assert layout.arguments_of(6) == ("--local_rank=2",)
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == ("6", "2", "8")
    assert (variables["LOCAL_SIZE"], variables["CROSS_RANK"], variables["CROSS_SIZE"]) == ("4", "1", "2")
    assert not any(name.startswith("TORCHELASTIC") for name in variables)
    assert parse("deepspeed --no_local_rank train.py").layout.arguments_of(6) == ()
    torchrun = parse("torchrun --nproc-per-node 4 train.py").layout
    assert torchrun.arguments_of(3) == () and torchrun.environment_of(3)["LOCAL_WORLD_SIZE"] == "4"
    assert parse("-m torch.distributed.launch train.py").layout.arguments_of(3) == ("--local-rank=3",)
    assert parse("-m torch.distributed.launch --use-env train.py").layout.arguments_of(3) == ()
