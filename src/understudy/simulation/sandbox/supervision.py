"""Waiting for a child process: signals that this process gets are forwarded to it, orphans are reaped.

The processes of a sandbox share the group of the terminal. So a Ctrl-C reaches all of them, and only signals that another
process has sent to this one alone (`kill PID`) are forwarded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from understudy.simulation.sandbox import system_calls as calls

FORWARDED = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
WAITED_FOR = FORWARDED | {signal.SIGCHLD}
SI_KERNEL = 0x80
"""`si_code` of signals that a terminal sends."""


@contextmanager
def block_signals() -> Iterator[set[signal.Signals]]:
    """Signals wait until `supervise` takes them. Gives the mask from before, for the child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def supervise(child: int) -> int:
    """The exit code of the child, negative for a signal. To be called with signals blocked."""
    while True:
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                return os.waitstatus_to_exitcode(status)
            if ended == 0:
                break
        found = signal.sigwaitinfo(WAITED_FOR)
        if found.si_signo in FORWARDED and found.si_code != SI_KERNEL:
            _send(child, found.si_signo)


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.kill(process, number)


# --- processes that outlive the one that started them --------------------------------------------------------------


@contextmanager
def end_orphans() -> Iterator[None]:
    """Inside, orphans become children of this process. Those that are left are killed at the end, as the kernel does
    with a PID namespace."""
    before = find_children()
    calls.set_process_attribute(calls.PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        while remaining := find_children() - before:  # their own children become orphans in turn
            for process in remaining:
                _send(process, signal.SIGKILL)
            for process in remaining:
                with suppress(ChildProcessError):
                    os.waitpid(process, 0)
        calls.set_process_attribute(calls.PR_SET_CHILD_SUBREAPER, 0)


def find_children() -> set[int]:
    """The processes whose parent is this one."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit() and _parent_of(name) == os.getpid()}


def _parent_of(process: str) -> int | None:
    try:
        with open(f"/proc/{process}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return None
