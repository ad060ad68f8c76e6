"""Work in a process of its own, forked from one that has imported what it needs: the sweeps over models.

What the work leaves behind is gone with the process, and a crash or a hang in it can't stop the others.
"""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import torch

TIMERS = ((signal.ITIMER_PROF, signal.SIGPROF, 1), (signal.ITIMER_REAL, signal.SIGALRM, 10))
"""A limit of processor time; and a longer one of time, for what hangs. On a busy machine, the same classes end in time."""


def prepare_forks() -> None:
    """Before the first fork, when everything is imported. A pool of threads does not survive a fork; and objects that the
    garbage collector does not touch stay in pages that the processes share."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


def run_in_fork(work: Callable[[], Iterable[Any]], seconds: float) -> tuple[list[Any], str]:
    """What `work` gives, piece by piece (as JSON has it), in so many seconds of processor time, and how it ended: "" if well,
    "timeout", or its status."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _send(work, write, seconds)
    os.close(write)
    with os.fdopen(read) as stream:
        pieces = [json.loads(line) for line in stream if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (number for _, number, _ in TIMERS):
        return pieces, "timeout"
    return pieces, f"status {status}" if status else ""


def _send(work: Callable[[], Iterable[Any]], write: int, seconds: float) -> None:
    code = 1
    try:
        for timer, number, limit in TIMERS:
            signal.signal(number, signal.SIG_DFL)
            signal.setitimer(timer, seconds * limit)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        with os.fdopen(write, "w", buffering=1) as stream:
            for piece in work():
                stream.write(json.dumps(piece) + "\n")
        code = 0
    finally:
        os._exit(code)
