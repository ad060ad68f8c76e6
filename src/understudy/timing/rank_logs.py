"""What one rank did, as far as other ranks wait for it: its work between collectives, and what it waits for.

    log = RankLog()
    log.launch(stream, seconds=0.010, host=5e-6)          a kernel, as of `Timeline.launch`
    log.add(LoggedCollective("all_reduce", "0", (0, 1), 1 << 20, stream, number=0))
    log.add(Awaited(stream, number=0))

Work between two entries is kept as three numbers for each stretch on one stream, whatever the number of kernels: a host that
issues kernels ahead of a stream is a linear map in (max, +), and such maps compose. `ranks` replays several logs together.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

MESSAGES = ("send", "recv")


class LoggedCollective(NamedTuple):
    """One of a rank's log. `number`: by which `Awaited` refers to it. `ranks`: of a message, its two ends. `is_waited`: the
    stream goes on after it; a message is waited for only where the program says so, another one at the end of the phase
    at the latest."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    nbytes: int
    stream: Hashable
    number: int
    peer: int | None = None
    tag: int = 0
    is_waited: bool = False

    @property
    def is_message(self) -> bool:
        return self.peer is not None and self.kind in MESSAGES


class Awaited(NamedTuple):
    """A stream goes on after a collective."""

    stream: Hashable
    number: int


class Recorded(NamedTuple):
    """An event of a stream."""

    event: int
    stream: Hashable


class EventWait(NamedTuple):
    """A stream, or the host where there is none, goes on after an event."""

    event: int
    stream: Hashable | None


class Synchronized(NamedTuple):
    """The host waits for a stream, or for all."""

    stream: Hashable | None


class PhaseEnd(NamedTuple):
    step: int
    phase: str


@dataclass(slots=True)
class LocalWork:
    """A stretch of kernels on one stream. `reach`: from the host's time at its beginning to the end of the last kernel, if
    the stream were free before."""

    stream: Hashable
    host: float = 0.0
    busy: float = 0.0
    reach: float = 0.0


Entry = LoggedCollective | Awaited | Recorded | EventWait | Synchronized | PhaseEnd | LocalWork


@dataclass
class RankLog:
    entries: list[Entry] = field(default_factory=list)
    _last: LocalWork | None = None

    def launch(self, stream: Hashable, seconds: float, host: float) -> None:
        last = self._last
        if last is None or last.stream != stream:
            last = self._last = LocalWork(stream)
            self.entries.append(last)
        last.host += host
        last.busy += seconds
        last.reach = max(last.reach, last.host) + seconds

    def work(self, seconds: float) -> None:
        """Add work of the host."""
        if self._last is None:
            self._last = LocalWork(None)
            self.entries.append(self._last)
        self._last.host += seconds

    def add(self, entry: Entry) -> None:
        self._last = None
        self.entries.append(entry)
