"""What bounds a stretch of time: each moment belongs to one kind of work.

    attribute(timeline.spans, start, end)       {"products": 0.21, "launches": 0.04, "communication": 0.02}

When several clocks are busy at one moment, computing counts before copies, and copies before communication: overlapped
work costs nothing. When no card is busy, the time belongs to the host: `input`, or `launches`.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from understudy.timing.timeline import HOST, Span

COMMUNICATION, COPIES, LAUNCHES, INPUT = "communication", "copies", "launches", "input"
_RANKS = {COPIES: 1, COMMUNICATION: 2}
_ON_HOST = 3
"""Rank of work on the host; the other kinds have rank 0."""


def attribute(spans: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """Seconds for each kind of work; they add up to `end - start`."""
    inside = [span for span in spans if span.end > start and span.start < end]
    inside.sort(key=lambda span: span.start)
    shares: dict[str, float] = defaultdict(float)
    running: list[tuple[int, float, str]] = []  # rank, end, kind
    now = start
    for span in (*inside, None):
        until = end if span is None else max(start, span.start)
        while now < until:
            while running and running[0][1] <= now:
                heapq.heappop(running)
            # A finished span of a lower rank may lie below an unfinished one: it is dropped when it comes up.
            kind, until_here = (running[0][2], min(until, running[0][1])) if running else (LAUNCHES, until)
            shares[kind] += until_here - now
            now = until_here
        if span is not None:
            rank = _ON_HOST if span.clock == HOST else _RANKS.get(span.kind, 0)
            heapq.heappush(running, (rank, span.end, span.kind))
    return dict(shares)
