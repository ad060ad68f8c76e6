"""Rehearsed ranks against real processes on the CPU: peaks to the byte, and communication in calls and bytes.

Peaks are compared on torch's fake process group with real tensors: gloo's threads keep buffers, so that its peaks differ from
run to run. DistributedDataParallel does not run on the fake group, and is compared with gloo.
"""

from __future__ import annotations

import collections
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from understudy.cli import main
from understudy.report.cluster_rehearsal import ClusterRehearsal

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not hasattr(os, "fork"),
    reason="ranks are forked processes of torch.distributed",
)
PROGRAM = Path(__file__).with_name("programs.py")
NAMES = {
    "allreduce_": "all_reduce", "all_reduce": "all_reduce", "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "broadcast_": "broadcast",
    "reduce_scatter_tensor": "reduce_scatter", "scatter_": "scatter", "barrier": "barrier", "broadcast": "broadcast",
}  # fmt: skip


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


def run_for_real(kind: str, world: int, what: str, group: str, folder: Path) -> list[Any]:
    """One process for each rank; what each measured."""
    common = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(world),
        "REAL": what,
        "GROUP": group,
    }
    files = [folder / f"real_{rank}.json" for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), kind],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "RESULT": str(file)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    said_by_all = []
    for process in processes:
        _, said = process.communicate(timeout=200)
        said_by_all.append(said)
    # gloo's threads may end a process with an error after its figures are written
    assert all(file.exists() for file in files), said_by_all
    return [json.loads(file.read_text()) for file in files]


def rehearse(kind: str, world: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterRehearsal:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = [
        "run",
        "--quiet",
        "--steps",
        "3",
        "--nproc-per-node",
        str(world),
        "--json",
        "run.json",
        str(PROGRAM),
        kind,
    ]
    assert main(words) == 0
    return ClusterRehearsal.from_json((folder / "run.json").read_text())


def sum_up(cluster: ClusterRehearsal, rank: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for row in cluster.communication:
        if row.rank == rank:
            found[row.collective][0] += row.calls
            found[row.collective][1] += row.bytes
    return dict(found)


@pytest.mark.parametrize(
    ("kind", "world"),
    [("fsdp2", 2), ("fsdp2", 3), ("mixed", 2), ("hsdp", 4), ("fsdp1", 2), ("tp", 2), ("sp", 2), ("cp", 2)],
    ids=lambda value: str(value),
)
def test_peaks_to_the_byte(kind: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = run_for_real(kind, world, "memory", "fake", tmp_path)
    cluster = rehearse(kind, world, tmp_path, monkeypatch)
    assert [cluster.ranks[rank].peak.allocated_bytes for rank in range(world)] == real


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("ddp", 2),
        ("zero1", 2),
        ("fsdp1", 2),
        ("fsdp2", 3),
        ("mixed", 2),
        ("hsdp", 4),
        ("tp", 2),
        ("sp", 2),
        ("cp", 2),
    ],
    ids=lambda value: str(value),
)
def test_communication(kind: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = rehearse(kind, world, tmp_path, monkeypatch)
    for rank, measured in enumerate(run_for_real(kind, world, "communication", "gloo", tmp_path)):
        real: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
        for name, (calls, nbytes) in measured.items():
            real[NAMES[name]][0] += calls
            real[NAMES[name]][1] += nbytes
        assert sum_up(cluster, rank) == dict(real)
