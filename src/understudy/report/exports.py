"""Files that other tools open, from a rehearsal.

    write_trace(rehearsal, "run.json.gz")        Perfetto and chrome://tracing: memory by category, steps and phases
    write_speedscope(rehearsal, "peak.json")     speedscope: what holds the memory at the peak, by module and by line
    write_folded(rehearsal, "peak.folded")       folded stacks, for flame graphs
    write_snapshot(allocator, "run.pickle")      torch's memory snapshot, for its viewer and for `understudy replay`

A trace has two processes. In the one of memory, the unit of time is the operator: its "microseconds" are calls, not time.
The other one is the timeline of one step: the host, streams and communicators, in microseconds as they are estimated.
"""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from understudy.report.page import find_holders_by_line, find_holders_by_module
from understudy.report.rehearsal import Rehearsal
from understudy.report.times import write_step
from understudy.simulation.allocator import Allocator
from understudy.timing.step_time import TimeEstimate

PROCESS, TIME_PROCESS = 1, 2


def write_trace(rehearsal: Rehearsal, path: str | Path) -> None:
    """A Chrome trace; compressed where the name ends in .gz."""
    data = json.dumps({"traceEvents": list(_make_trace_events(rehearsal)), "displayTimeUnit": "ms"}).encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _make_trace_events(rehearsal: Rehearsal) -> Iterator[dict[str, Any]]:
    yield from make_memory_events(rehearsal, PROCESS, rehearsal.headline)
    if rehearsal.time is not None:
        yield from make_time_events(rehearsal.time, TIME_PROCESS, write_step(rehearsal.time))


def make_memory_events(rehearsal: Rehearsal, process: int, name: str) -> Iterator[dict[str, Any]]:
    """Allocated memory by operator, with steps and phases."""
    timeline = rehearsal.timeline
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    for number, thread in enumerate(("steps", "phases"), 1):
        yield {"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": thread}}
    for i, operator in enumerate(timeline.operators):
        sizes = {name: column[i] for name, column in timeline.bytes.items()}
        yield {"ph": "C", "pid": process, "tid": 0, "ts": operator, "name": "allocated bytes", "args": sizes}
    steps = list(zip(timeline.steps, timeline.operators, strict=True))
    yield from _make_slices(process, 1, [(f"step {step + 1}", at) for step, at in steps])
    phases = zip(timeline.steps, timeline.phases, timeline.operators, strict=True)
    yield from _make_slices(process, 2, [(phase, at) for _, phase, at in phases])
    if timeline.operators:
        peak = rehearsal.peak
        args = {"module": peak.module, "line": peak.line, "allocated_bytes": peak.allocated_bytes}
        at = timeline.operators[timeline.peak_index]
        yield {"ph": "i", "s": "g", "pid": process, "tid": 0, "ts": at, "name": "peak", "args": args}


def make_time_events(time: TimeEstimate, process: int, name: str) -> Iterator[dict[str, Any]]:
    """One step on its clocks."""
    trace = time.trace
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
    for number, clock in enumerate(trace.clock_names):
        yield {"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": clock}}
    columns = zip(trace.clocks, trace.names, trace.starts, trace.durations, strict=True)
    for clock_number, name_number, start, duration in columns:
        yield {
            "ph": "X", "pid": process, "tid": clock_number, "ts": start, "dur": duration,
            "name": trace.span_names[name_number],
        }  # fmt: skip


def _make_slices(process: int, thread: int, moments: list[tuple[str, int]]) -> Iterator[dict[str, Any]]:
    """One slice for each stretch of the same name, up to the beginning of the next."""
    stretches = [
        (name, next(iter(group))[1]) for name, group in groupby(moments, key=lambda moment: moment[0])
    ]
    end = moments[-1][1] if moments else 0
    for (name, start), following in zip(stretches, [*(at for _, at in stretches[1:]), end], strict=True):
        yield {"ph": "X", "pid": process, "tid": thread, "ts": start, "dur": following - start, "name": name}


def _list_stacks(rehearsal: Rehearsal, by: str) -> list[tuple[tuple[str, ...], int]]:
    """What was alive at the peak, by "module" or by "line": names, the outermost first, and bytes."""
    holders = find_holders_by_module(rehearsal) if by == "module" else find_holders_by_line(rehearsal)
    return [(holder.path, holder.bytes) for holder in holders if holder.bytes]


def write_folded(rehearsal: Rehearsal, path: str | Path, by: str = "module") -> None:
    """`a;b;c bytes`, a line for each stack."""
    sizes: dict[str, int] = {}
    for names, size in _list_stacks(rehearsal, by):
        stack = ";".join(_write_folded_frame(name) for name in names)
        sizes[stack] = sizes.get(stack, 0) + size
    Path(path).write_text("".join(f"{stack} {size}\n" for stack, size in sizes.items()), encoding="utf-8")


def _write_folded_frame(name: str) -> str:
    """`;` separates frames, a line ends a stack: neither may be in a name."""
    shown = name.replace(";", ":")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def write_speedscope(rehearsal: Rehearsal, path: str | Path) -> None:
    frames: dict[str, int] = {}
    profiles = []
    for by in ("module", "line"):
        stacks = _list_stacks(rehearsal, by)
        samples = [[frames.setdefault(name, len(frames)) for name in names] for names, _ in stacks]
        weights = [size for _, size in stacks]
        profiles.append(
            {
                "type": "sampled", "name": f"peak by {by}", "unit": "bytes", "startValue": 0, "endValue": sum(weights),
                "samples": samples, "weights": weights,
            }
        )  # fmt: skip
    record = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "name": rehearsal.headline,
        "exporter": "understudy",
        "shared": {"frames": [{"name": name} for name in frames]},
        "profiles": profiles,
    }
    Path(path).write_text(json.dumps(record), encoding="utf-8")


def write_snapshot(allocator: Allocator, path: str | Path) -> None:
    """What `torch.cuda.memory._dump_snapshot` writes; with a trace where the allocator has recorded its history."""
    with open(path, "wb") as file:
        pickle.dump(allocator.snapshot(), file, protocol=4)


MOST_FRAMES = 12


def describe_frames() -> list[dict[str, Any]]:
    """The lines of the program that are being run, the innermost first, as snapshots have them."""
    from understudy.lines import user_frames  # why: it imports torch, and reports are read without it

    frames = islice(user_frames(), MOST_FRAMES)
    return [{"filename": f.f_code.co_filename, "line": f.f_lineno, "name": f.f_code.co_name} for f in frames]
