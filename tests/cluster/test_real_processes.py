"""Rehearsed ranks against real processes on the CPU: peaks to the byte, and communication in calls and bytes.

Peaks are compared on torch's fake process group with real tensors: gloo's threads keep buffers, so that its peaks differ from
run to run. DistributedDataParallel does not run on the fake group, and is compared with gloo.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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

Rehearse = Callable[[str, int], ClusterRehearsal]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """A process that has imported torch, and forks real ranks."""
    words = [sys.executable, str(PROGRAM), "serve"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run_for_real(server: subprocess.Popen[str], kind: str, world: int, what: str, group: str) -> list[Any]:
    """What each rank measured, in a process of its own."""
    assert server.stdin is not None and server.stdout is not None
    print(kind, world, what, group, file=server.stdin, flush=True)
    measured: list[Any] = json.loads(server.stdout.readline())
    assert None not in measured
    return measured


@pytest.fixture(scope="module")
def rehearse(tmp_path_factory: pytest.TempPathFactory) -> Rehearse:
    """Each program is rehearsed once."""

    @functools.cache
    def rehearse(kind: str, world: int) -> ClusterRehearsal:
        file = tmp_path_factory.mktemp(kind) / "run.json"
        words = ["run", "--quiet", "--steps", "3", "--nproc-per-node", str(world), "--json", str(file)]
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("WORLD_SIZE", raising=False)
            assert main([*words, str(PROGRAM), kind]) == 0
        return ClusterRehearsal.from_json(file.read_text())

    return rehearse


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
def test_peaks_to_the_byte(kind: str, world: int, server: subprocess.Popen[str], rehearse: Rehearse) -> None:
    real = run_for_real(server, kind, world, "memory", "fake")
    cluster = rehearse(kind, world)
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
def test_communication(kind: str, world: int, server: subprocess.Popen[str], rehearse: Rehearse) -> None:
    cluster = rehearse(kind, world)
    for rank, measured in enumerate(run_for_real(server, kind, world, "communication", "gloo")):
        real: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
        for name, (calls, nbytes) in measured.items():
            real[NAMES[name]][0] += calls
            real[NAMES[name]][1] += nbytes
        assert sum_up(cluster, rank) == dict(real)
