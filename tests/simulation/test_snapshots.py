"""Memory snapshots: read without running code, walked through, replayed, and a card calibrated by them."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import UnderstudyError
from understudy.simulation import catalogue
from understudy.simulation.allocator import Allocator, OutOfMemory
from understudy.simulation.allocator_parts import GiB, MiB
from understudy.simulation.snapshots import (
    BEFORE,
    NOT_RECORDED,
    SnapshotError,
    calibrate,
    find_missing_memory,
    line_of,
    parse_snapshot,
    read_snapshot,
    replay,
)


def frame(filename: str, line: int, name: str = "f") -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def snapshot_of_a_run(
    seed: int = 1, history_after: int = 0, settings: str = ""
) -> tuple[Allocator, dict[str, Any]]:
    """Random requests until memory runs out; the line of each follows from its size."""
    draw = random.Random(seed)
    line = [0]
    allocator = Allocator(
        2000 * MiB, outside=100 * MiB, settings=settings, frames=lambda: [frame("train.py", line[0], "step")]
    )
    live: list[int] = []
    events = 0
    if not history_after:
        allocator.record_history()
    with pytest.raises(OutOfMemory):
        while True:
            events += 1
            if events == history_after:
                allocator.record_history()
            if live and draw.random() < 0.45:
                allocator.free(live.pop(draw.randrange(len(live))))
            else:
                size = draw.randrange(1, 40 * MiB)
                line[0] = size % 3 + 1
                live.append(allocator.allocate(size))
    return allocator, allocator.snapshot()


@pytest.mark.parametrize("settings", ["", "expandable_segments:True", "max_split_size_mb:128"])
@pytest.mark.parametrize("seed", range(4))
def test_the_state_and_the_replay_are_those_of_the_run(seed: int, settings: str) -> None:
    allocator, record = snapshot_of_a_run(seed, settings=settings)
    trace = parse_snapshot(record).choose_device()
    statistics = allocator.statistics()
    assert trace.oom == len(trace.events) - 1
    assert trace.capacity == 1900 * MiB
    moment = trace.moment(trace.oom)
    assert moment.requested == statistics["requested_bytes.all.current"]
    assert moment.reserved == statistics["reserved_bytes.all.current"]
    assert sum(holder.bytes for holder in moment.holders) == moment.requested
    assert {holder.line for holder in moment.holders} == {f"train.py:{n} (step)" for n in (1, 2, 3)}
    again = replay(trace, None, trace.capacity)
    assert again.died_at == trace.oom
    assert again.peak_reserved == statistics["reserved_bytes.all.peak"] == trace.peak_reserved
    assert again.peak_allocated == statistics["allocated_bytes.all.peak"]
    assert calibrate(trace, 2000 * MiB).context == 100 * MiB
    assert calibrate(trace, 2000 * MiB).error == 0


def test_what_is_missing_is_enough_and_not_too_much() -> None:
    trace = parse_snapshot(snapshot_of_a_run()[1]).choose_device()
    assert trace.capacity is not None
    missing = find_missing_memory(trace, trace.capacity)
    assert missing > 0
    assert replay(trace, None, trace.capacity + missing).fits
    assert not replay(trace, None, trace.capacity + missing - 16 * MiB).fits
    assert find_missing_memory(trace, 4 * GiB) == 0


def test_another_setting_may_live() -> None:
    """Blocks of 6 MiB, every second one freed: 12 MiB find a place only where pages can be mapped anew."""
    allocator = Allocator(420 * MiB)
    allocator.record_history()
    blocks = [allocator.allocate(6 * MiB) for _ in range(60)]
    for block in blocks[::2]:
        allocator.free(block)
    with pytest.raises(OutOfMemory):
        for _ in range(100):
            allocator.allocate(21 * MiB)
    trace = parse_snapshot(allocator.snapshot()).choose_device()
    assert not replay(trace, None, trace.capacity).fits
    assert replay(trace, "expandable_segments:True", trace.capacity).fits


def test_a_trace_that_begins_in_the_middle() -> None:
    allocator, record = snapshot_of_a_run(history_after=300)
    trace = parse_snapshot(record).choose_device()
    assert trace.before
    assert trace.oom is not None
    moment = trace.moment(trace.oom)
    assert moment.requested == allocator.statistics()["requested_bytes.all.current"]
    assert moment.reserved == allocator.reserved
    assert trace.capacity == 1900 * MiB
    assert BEFORE in {holder.line for holder in trace.moment(-1).holders}
    assert calibrate(trace, 2000 * MiB).error is None


def test_what_a_program_released_itself_is_released_again() -> None:
    allocator = Allocator(None)
    allocator.record_history()
    for _ in range(3):
        allocator.free(allocator.allocate(100 * MiB))
        allocator.empty_cache()
        allocator.free(allocator.allocate(60 * MiB))
        allocator.empty_cache()
    trace = parse_snapshot(allocator.snapshot()).choose_device()
    assert replay(trace).peak_reserved == 100 * MiB


def test_an_oom_that_was_caught_is_not_the_end() -> None:
    allocator = Allocator(200 * MiB)
    allocator.record_history()
    with pytest.raises(OutOfMemory):
        allocator.allocate(300 * MiB)
    for _ in range(4):
        allocator.allocate(40 * MiB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(50 * MiB)
    trace = parse_snapshot(allocator.snapshot()).choose_device()
    assert trace.moment(trace.oom or 0).requested == 160 * MiB
    assert replay(trace, None, 200 * MiB).died_at == trace.oom
    assert replay(trace, None, 220 * MiB).fits


def test_lines_are_those_of_the_program() -> None:
    torch_file = "/usr/lib/python3/dist-packages/torch/nn/modules/linear.py"
    assert (
        line_of({"frames": [frame("??", 0, "c10::alloc"), frame(torch_file, 1), frame("a/model.py", 7, "g")]})
        == "a/model.py:7 (g)"
    )
    assert line_of({"frames": [frame(torch_file, 1, "forward")]}) == f"{torch_file}:1 (forward)"
    assert line_of({"frames": [frame("/home/me/torch/train.py", 2, "m")]}) == "/home/me/torch/train.py:2 (m)"
    assert line_of({"frames": []}) == NOT_RECORDED
    assert line_of({}) == NOT_RECORDED


class Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            pickle.dumps({"segments": [Harmful()], "device_traces": []}),
            "expected data only, got a reference to posix.system",
        ),
        (b"", "got an unreadable pickle (EOFError)"),
        (b"\x80\x04garbage", "expected a memory snapshot"),
        (pickle.dumps([1, 2]), "invalid memory snapshot: TypeError"),
        (pickle.dumps({"segments": []}), "invalid memory snapshot: KeyError at 'device_traces'"),
        (pickle.dumps({"segments": [], "device_traces": []}), "the snapshot is empty"),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": "x", "size": 1}]]}),
            "expected a size or an address, got 'x'",
        ),
        (
            pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": -1}]]}),
            "expected a size or an address, got -1",
        ),
        (pickle.dumps({"segments": [{"blocks": []}], "device_traces": []}), "KeyError at 'total_size'"),
    ],
)
def test_files_that_are_no_snapshots(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "bad.pickle"
    file.write_bytes(content)
    with pytest.raises(SnapshotError) as caught:
        read_snapshot(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(file))
    assert not (tmp_path / "harmed").exists()


def test_every_truncation_and_many_broken_bytes_are_refused_or_read(tmp_path: Path) -> None:
    allocator = Allocator(None, frames=lambda: [frame("t.py", 1)])
    allocator.record_history()
    allocator.free(allocator.allocate(5))
    whole = pickle.dumps(allocator.snapshot())
    draw = random.Random(0)
    file = tmp_path / "broken.pickle"
    for _ in range(300):
        broken = bytearray(whole)
        broken[draw.randrange(len(whole))] = draw.randrange(256)
        file.write_bytes(
            bytes(broken[: draw.randrange(1, len(whole) + 1)] if draw.random() < 0.5 else broken)
        )
        try:
            read_snapshot(file)
        except SnapshotError:
            continue


def test_devices_are_chosen_by_number() -> None:
    record = Allocator(None, device=1).snapshot()
    busy = Allocator(None, device=1)
    busy.record_history()
    busy.allocate(4)
    record = busy.snapshot()
    snapshot = parse_snapshot(record)
    assert snapshot.choose_device().device == 1
    with pytest.raises(SnapshotError, match="GPU 0 is not in the snapshot; choose from 1"):
        snapshot.choose_device(0)


def test_a_calibration_is_kept_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_CONFIG", str(tmp_path / "new"))
    before = catalogue.find_card("t4")
    path = catalogue.save_calibration("t4", context=333 * MiB, error=0.01)
    assert path == tmp_path / "new" / "calibration.toml"
    after = catalogue.find_card("Tesla T4")
    assert (after.outside, after.error) == (333 * MiB, 0.01)
    assert after.memory == before.memory
    assert after.usable == before.memory - 333 * MiB
    catalogue.save_calibration("h100", context=None, error=0.5)
    assert catalogue.find_card("h100").context is not None
    assert catalogue.find_card("t4").context == 333 * MiB
    path.write_text("[t4]\ncontext = 'much'\n")
    with pytest.raises(catalogue.CatalogueError, match="expected a calibration with a context in GiB"):
        catalogue.find_card("t4")


def test_a_snapshot_of_another_card_is_refused() -> None:
    trace = parse_snapshot(snapshot_of_a_run()[1]).choose_device()
    with pytest.raises(
        UnderstudyError,
        match=r"a card with 80\.00 GiB, got one with 1\.86 GiB for torch: choose the card of the run",
    ):
        calibrate(trace, 80 * GiB)


@pytest.mark.parametrize("size", [1 << 49, 1 << 62, 1 << 70])
def test_sizes_that_no_device_has(size: int) -> None:
    event = {"action": "alloc", "addr": 4096, "size": size, "stream": 0}
    block = {"size": size, "state": "active_allocated"}
    segment = {"address": 4096, "total_size": 4096, "stream": 0, "blocks": [block]}
    for record in (
        {"segments": [], "device_traces": [[event]]},
        {"segments": [segment], "device_traces": []},
    ):
        with pytest.raises(SnapshotError, match=rf"expected a size of at most \d+ bytes, got {size}"):
            parse_snapshot(record)


def test_missing_memory_takes_few_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay of a large trace takes part of a second."""
    trace = parse_snapshot(snapshot_of_a_run()[1]).choose_device()
    assert trace.capacity is not None
    recorded = replay(trace, None, trace.capacity)
    tried: list[int | None] = []

    def count(*args: Any) -> Any:
        tried.append(args[2])
        return replay(*args)

    monkeypatch.setattr("understudy.simulation.snapshots.replay", count)
    assert find_missing_memory(trace, trace.capacity, recorded) > 0
    assert 1 <= len(tried) <= 3


def test_the_line_is_that_of_the_innermost_python_frame_of_the_program() -> None:
    torch_frame = frame("/usr/lib/python3/dist-packages/torch/nn/modules/linear.py", 3)
    frames = [frame("alloc.cpp", 1), torch_frame, frame("model.py", 7, "forward"), frame("train.py", 9)]
    assert line_of({"frames": frames}) == "model.py:7 (forward)"
    assert line_of({"frames": frames[:2]}) == f"{torch_frame['filename']}:3 (f)"
    assert line_of({"frames": frames[:1]}) == NOT_RECORDED
