"""The clocks of a program: the host thread, each stream of each card, each communicator. Events in, times out.

    timeline = Timeline()
    timeline.launch("cuda:0", 0.010, host=5e-6)       a kernel of 10 ms, which takes the host 5 µs to issue
    done = timeline.record("cuda:0")                  an event: when everything on the stream so far is done
    timeline.wait("cuda:0/1", done)                   another stream goes on after it
    timeline.synchronize("cuda:0")                    the host waits: `.item()`, `synchronize()`, a copy to the host
    timeline.work(0.030, "input")                     the host is busy with something else

The host issues kernels and runs ahead of the card. A kernel starts when its launch has arrived, its stream is free, and the
events that the stream waits for are done. Seconds everywhere; a stream is any hashable name.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

QUEUE_LENGTH = 1024
"""Launches that the driver accepts for a stream before the host has to wait."""

HOST = "host"


class Span(NamedTuple):
    """Something that took time on one of the clocks: a stream, a communicator, or HOST."""

    clock: Hashable
    start: float
    end: float
    kind: str
    """What the time was spent on; `attribution` groups by it."""
    label: object
    issued: float = 0.0
    """When the host had issued a kernel; `issuing`: how long that took."""
    issuing: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


new_span: Callable[[tuple[object, ...]], Span] = functools.partial(tuple.__new__, Span)
"""A span of all its fields, for launches, which are many: without a function of Python."""


class Mark(NamedTuple):
    """A moment: the time of the host, and the time at which all that was issued until then is done."""

    host: float
    done: float


@dataclass
class Timeline:
    """`latency`: seconds from the launch of a kernel to its earliest start."""

    latency: float = 0.0
    queue_length: int = QUEUE_LENGTH
    host: float = 0.0
    """The clock of the host thread."""
    spans: list[Span] = field(default_factory=list)
    _free: dict[Hashable, float] = field(default_factory=dict)
    """When each stream has finished all issued work."""
    _queues: dict[Hashable, deque[float]] = field(default_factory=dict)
    """The ends of the kernels that were issued last, for each stream."""

    def work(self, seconds: float, kind: str = HOST, label: object = None) -> None:
        """The host is busy."""
        start = self.host
        self.host = start + seconds
        if seconds > 0:
            self.spans.append(Span(HOST, start, self.host, kind, label))

    def launch(
        self, stream: Hashable, seconds: float, host: float = 0.0, kind: str = "", label: object = None
    ) -> float:
        """A kernel on a stream; issuing it takes `host` seconds. Returns its end."""
        self.host = issued = self.host + host
        queue = self._queues.get(stream)
        if queue is None:
            queue = self._queues[stream] = deque(maxlen=self.queue_length)
        elif len(queue) == self.queue_length and queue[0] > issued:
            self.host = issued = queue[0]
        start = issued + self.latency
        free = self._free.get(stream, 0.0)
        if free > start:
            start = free
        end = start + seconds
        self._free[stream] = end
        queue.append(end)
        self.spans.append(new_span((stream, start, end, kind, label, issued, host)))
        return end

    def communicate(
        self, communicator: Hashable, stream: Hashable, seconds: float, host: float = 0.0, arrivals: Iterable[float] = (),
        kind: str = "communication", label: object = None,
    ) -> float:  # fmt: skip
        """A collective: on the communicator's own stream, after what `stream` has so far, and when the last of the other
        ranks has come (`arrivals`). Returns its end, for `wait`."""
        self.wait(communicator, max((self.record(stream), *arrivals)))
        return self.launch(communicator, seconds, host, kind, label)

    def record(self, stream: Hashable) -> float:
        """An event: when all that was issued to the stream is done."""
        return max(self._free.get(stream, 0.0), self.host)

    def wait(self, stream: Hashable, time: float) -> None:
        """What is issued to the stream from now on starts after this time."""
        if time > self._free.get(stream, 0.0):
            self._free[stream] = time

    def synchronize(self, *streams: Hashable) -> None:
        """The host waits for these streams; without any, for all."""
        self.wait_on_host(max([self._free.get(stream, 0.0) for stream in streams or self._free], default=0.0))

    def wait_on_host(self, time: float) -> None:
        """The host waits for an event."""
        if time > self.host:
            self.host = time

    def mark(self) -> Mark:
        return Mark(self.host, max(self.host, *self._free.values()) if self._free else self.host)
