"""A rehearsed cluster as a Chrome trace: a process for each rank that was run, collectives as arrows between them.

    write_cluster_trace(cluster, "trace.json.gz")

Where time is estimated, each process has one step on its clocks, in microseconds; elsewhere allocated memory by operator.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from understudy.report.cluster_rehearsal import ClusterRehearsal
from understudy.report.exports import make_memory_events, make_time_events

Event = dict[str, Any]
COMMUNICATOR = "group "
"""How names of the clocks of communicators begin."""


def write_cluster_trace(cluster: ClusterRehearsal, path: str | Path) -> None:
    """Compressed where the name ends in .gz."""
    data = json.dumps({"traceEvents": list(_make_events(cluster)), "displayTimeUnit": "ms"}).encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _make_events(cluster: ClusterRehearsal) -> Iterator[Event]:
    spans: dict[str, dict[int, list[Event]]] = {}
    """Spans of communicators, by clock and rank."""
    for row in cluster.rows:
        if row.rehearsal is None:
            continue
        name = f"rank {row.rank}: {row.verdict}"
        sort = {"ph": "M", "pid": row.rank, "tid": 0, "name": "process_sort_index"}
        yield {**sort, "args": {"sort_index": row.rank}}
        if row.rehearsal.time is None:
            yield from make_memory_events(row.rehearsal, row.rank, name)
            continue
        clocks = row.rehearsal.time.trace.clock_names
        for event in make_time_events(row.rehearsal.time, row.rank, name):
            yield event
            if event["ph"] == "X" and clocks[event["tid"]].startswith(COMMUNICATOR):
                spans.setdefault(clocks[event["tid"]], {}).setdefault(row.rank, []).append(event)
    number = 0
    for by_rank in spans.values():
        if (
            len({len(events) for events in by_rank.values()}) == 1
        ):  # short ones may have been left out of some ranks
            for together in zip(*by_rank.values(), strict=True):
                number += 1
                yield from _make_arrows(number, together)


def _make_arrows(number: int, together: Sequence[Event]) -> Iterator[Event]:
    """From the rank that comes last to the others, which wait for it."""
    last = max(together, key=lambda span: float(span["ts"]))
    for span in together:
        if span is not last:
            arrow = {"cat": "collective", "name": last["name"], "id": f"{number}.{span['pid']}"}
            yield {**arrow, "ph": "s", "pid": last["pid"], "tid": last["tid"], "ts": last["ts"]}
            end = span["ts"] + span["dur"]
            yield {**arrow, "ph": "f", "bp": "e", "pid": span["pid"], "tid": span["tid"], "ts": end}
