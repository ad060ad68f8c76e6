"""Files for other tools: read back, and said the same as the rehearsal."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tests.report.samples import HOSTILE, MiB, make_rehearsal
from understudy.report.exports import write_folded, write_snapshot, write_speedscope, write_trace
from understudy.simulation.allocator import Allocator
from understudy.simulation.snapshots import read_snapshot, replay


def test_traces_have_the_memory_and_the_phases(tmp_path: Path) -> None:
    rehearsal = make_rehearsal()
    file = tmp_path / "run.json.gz"
    write_trace(rehearsal, file)
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counters) == rehearsal.peak.allocated_bytes
    assert [event["ts"] for event in counters] == rehearsal.timeline.operators
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == 2]
    assert [event["name"] for event in slices] == ["forward", "backward"]
    assert slices[0]["ts"] + slices[0]["dur"] == slices[1]["ts"]
    (peak,) = [event for event in events if event["name"] == "peak"]
    assert peak["args"]["line"] == "model.py:22"
    assert all({"ph", "pid", "name"} <= set(event) for event in events)


def test_speedscope(tmp_path: Path) -> None:
    rehearsal = make_rehearsal(extra=MiB)
    write_speedscope(rehearsal, tmp_path / "peak.json")
    record = json.loads((tmp_path / "peak.json").read_text())
    frames = [frame["name"] for frame in record["shared"]["frames"]]
    for profile in record["profiles"]:
        assert sum(profile["weights"]) == profile["endValue"] == rehearsal.peak.allocated_bytes
        assert len(profile["samples"]) == len(profile["weights"])
        assert all(0 <= number < len(frames) for stack in profile["samples"] for number in stack)
    first = record["profiles"][1]["samples"][0]
    assert [frames[number] for number in first] == ["model.py", "model.py:5", "x = model.py(x)"]
    assert ["layers", "3", "mlp", "activations"] in [
        [frames[n] for n in s] for s in record["profiles"][0]["samples"]
    ]


def test_folded_stacks(tmp_path: Path) -> None:
    rehearsal = make_rehearsal(name=f"a;b\n{HOSTILE}")
    for by in ("module", "line"):
        write_folded(rehearsal, tmp_path / "peak.folded", by)
        rows = (tmp_path / "peak.folded").read_text().splitlines()
        assert sum(int(row.rpartition(" ")[2]) for row in rows) == rehearsal.peak.allocated_bytes
        assert all(row.rpartition(" ")[0].count(";") in (1, 2, 3) for row in rows)
        assert "\x1b" not in "".join(rows)


def test_snapshots_are_read_by_our_own_reader(tmp_path: Path) -> None:
    allocator = Allocator(None, frames=lambda: [{"filename": "a.py", "line": 1, "name": "f"}])
    allocator.record_history()
    kept = [allocator.allocate(n * MiB) for n in (3, 30, 11)]
    allocator.free(kept[1])
    write_snapshot(allocator, tmp_path / "run.pickle")
    trace = read_snapshot(tmp_path / "run.pickle").choose_device()
    assert trace.moment(trace.peak).requested == 44 * MiB
    assert replay(trace).peak_reserved == allocator.statistics()["reserved_bytes.all.peak"]
