"""Ranks as forked processes: `run_ranks` starts them, and returns how each ended.

    outcomes, faults = run_ranks(layout, ranks, jobs, body)
    make_broker(layout, ranks, jobs, body, is_sample=True).run()      some ranks for all, in several goes

`body(rank)` runs in the forked process, in the environment of the launcher, and returns what can be pickled. All ranks are
forked by `_start`: whatever is to hold for all of them (a sandbox, a working folder) is entered around `run_ranks`.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from typing import Any

from understudy.cluster.broker import Broker, RankOutcome, Started
from understudy.cluster.faults import Fault
from understudy.cluster.layout import Layout
from understudy.cluster.peers import BrokerPeers
from understudy.simulation.network import CLUSTER

Body = Callable[[int], dict[str, Any]]
DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


def run_ranks(
    layout: Layout, ranks: Sequence[int], jobs: int, body: Body
) -> tuple[dict[int, RankOutcome], list[Fault]]:
    """Returns when all have ended; an interrupt ends all of them."""
    broker = make_broker(layout, ranks, jobs, body)
    return broker.run(), broker.faults


def make_broker(
    layout: Layout, ranks: Sequence[int], jobs: int, body: Body, *, is_sample: bool = False
) -> Broker:
    ends: list[Any] = []

    def start(rank: int) -> Started:
        return _start(rank, layout, body, ends)

    return Broker(ranks, jobs, start, world_size=layout.world_size, is_sample=is_sample)


def _start(rank: int, layout: Layout, body: Body, ends: list[Any]) -> Started:
    """Fork one rank. `ends`: connections of the parent to others, which are closed in this one."""
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    process = os.fork()
    if process:
        theirs.close()
        ends.append(ours)
        return process, ours
    code = 1
    try:
        _end_with_parent(parent)
        for end in (*ends, ours):
            end.close()
        _run(rank, layout, body, BrokerPeers(theirs))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with_parent(parent: int) -> None:
    """An interrupt goes to the parent, which ends its ranks. If the parent is killed, the kernel ends them (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(DIES_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _run(rank: int, layout: Layout, body: Body, peers: BrokerPeers) -> None:
    os.environ.update(layout.environment_of(rank))
    random.seed(rank)
    CLUSTER.peers = peers
    result = body(rank)
    peers.finish({**result, "was_cut_off": peers.was_cut_off})
