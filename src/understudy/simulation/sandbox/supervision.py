"""Waiting for a child process: signals that this process gets are forwarded to it, orphans are reaped.

The processes of a sandbox share the group of the terminal. So a Ctrl-C reaches all of them, and only signals that another
process has sent to this one alone (`kill PID`) are forwarded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
