"""Memory snapshots of real runs: read without running code, walked through, and replayed under other settings.

    snapshot = read_snapshot("oom.pickle")          a file of torch.cuda.memory._dump_snapshot
    device = snapshot.choose_device()               the trace of one device
    device.moment(device.oom)                       who held the memory, by line of the program
    replay(device, "expandable_segments:True")      what the same requests need under another setting

A pickle can name any class and any function. These files hold plain data only, so the reader refuses every name: nothing
of the file is run. The trace may begin in the middle of a program; what was alive then is found by walking back from the
blocks that the snapshot has at its end.
"""

from __future__ import annotations

import functools
import pickle
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from understudy.errors import UnderstudyError
from understudy.simulation.allocator import Allocator, AllocatorSettings, OutOfMemory
from understudy.simulation.allocator_parts import GiB, MiB

GROWS = ("segment_alloc", "segment_map")
SHRINKS = ("segment_free", "segment_unmap")
KNOWN = (*GROWS, *SHRINKS, "alloc", "free_requested", "free_completed", "oom")

NOT_RECORDED = "(no line was recorded)"
BEFORE = "(allocated before the trace begins)"

PRECISION = 8 * MiB
"""The least by which the memory is raised that is tried next, where it was not enough."""
MOST_TRIES = 12
MOST_BYTES = 1 << 48
"""Upper limit of the addresses of a card."""


SEGMENT, LARGE_PAGE = 20 * MiB, 2 * MiB
"""Constants of the allocator: the segment for requests below 10 MiB, and the rounding of larger ones."""
MOST_CONTEXT = 4 * GiB
"""More is outside of the allocator only where something else runs on the card."""


class SnapshotError(UnderstudyError, ValueError):
    """A file that is not a memory snapshot, or that contains more than data."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path


class RefusedObject(pickle.UnpicklingError):
    """The pickle has more in it than data."""


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, texts, lists, tuples and dicts: a name of a class or function ends the reading."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise RefusedObject(f"expected data only, got a reference to {module}.{name}; nothing was executed")

    def persistent_load(self, pid: object) -> NoReturn:
        raise RefusedObject("expected data only, got references to objects outside of the file")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry of a trace. For "oom", `address` is what the driver had free."""

    action: str
    address: int
    size: int
    stream: int
    line: str
    is_empty_cache: bool = False


@dataclass(frozen=True, slots=True)
class LiveBlock:
    size: int
    line: str
    stream: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A line of the program, and the memory that it had allocated."""

    line: str
    bytes: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory of a device after an event: what programs had asked for, what torch had reserved, and who held it."""

    event: int
    requested: int
    reserved: int
    holders: tuple[Holder, ...]


@dataclass(slots=True)
class DeviceTrace:
    """The part of a snapshot for one device. `before`: the blocks that are alive when the trace begins."""

    device: int
    events: list[TraceEvent]
    segments: list[dict[str, Any]]
    settings: str
    before: dict[int, LiveBlock] = field(default_factory=dict)
    reserved_before: int = 0
    peak: int = -1
    """The index of the event after which most was requested; -1 is before the first."""

    def __post_init__(self) -> None:
        self._walk_back()
        top = -1
        for index, (requested, _) in enumerate(self._totals(), -1):
            if requested > top:
                top, self.peak = requested, index

    @property
    def oom(self) -> int | None:
        """The index of the last event "oom": programs that catch the error and try again have several."""
        return next((i for i in range(len(self.events) - 1, -1, -1) if self.events[i].action == "oom"), None)

    @property
    def reserved_at_end(self) -> int:
        return sum(segment["total_size"] for segment in self.segments)

    @property
    def peak_reserved(self) -> int:
        return max(reserved for _, reserved in self._totals())

    @property
    def capacity(self) -> int | None:
        """What torch could have reserved: known where memory ran out."""
        if self.oom is None:
            return None
        return self.moment(self.oom).reserved + self.events[self.oom].address

    def _walk_back(self) -> None:
        alive = {
            block["address"]: LiveBlock(
                block.get("requested_size", block["size"]), line_of(block), segment["stream"]
            )
            for segment in self.segments
            for block in list_addressed_blocks(segment)
            if block["state"] != "inactive"
        }
        reserved = self.reserved_at_end
        for event in reversed(self.events):
            if event.action == "alloc":
                alive.pop(event.address, None)
            elif event.action == "free_completed":
                alive[event.address] = LiveBlock(event.size, BEFORE, event.stream)
            elif event.action in GROWS:
                reserved -= event.size
            elif event.action in SHRINKS:
                reserved += event.size
        self.before, self.reserved_before = alive, max(reserved, 0)

    def _totals(self) -> Iterator[tuple[int, int]]:
        """(requested, reserved) before the first event, and after each."""
        requested, reserved = sum(block.size for block in self.before.values()), self.reserved_before
        yield requested, reserved
        for event in self.events:
            if event.action == "alloc":
                requested += event.size
            elif event.action == "free_completed":
                requested -= event.size
            elif event.action in GROWS:
                reserved += event.size
            elif event.action in SHRINKS:
                reserved -= event.size
            yield requested, reserved

    def moment(self, event: int) -> Moment:
        """The state after an event; -1 is before the first."""
        alive = dict(self.before)
        reserved = self.reserved_before
        for entry in self.events[: event + 1]:
            if entry.action == "alloc":
                alive[entry.address] = LiveBlock(entry.size, entry.line, entry.stream)
            elif entry.action == "free_completed":
                alive.pop(entry.address, None)
            elif entry.action in GROWS:
                reserved += entry.size
            elif entry.action in SHRINKS:
                reserved -= entry.size
        sizes, counts = Tally[str](), Tally[str]()
        for block in alive.values():
            sizes[block.line] += block.size
            counts[block.line] += 1
        holders = tuple(Holder(line, size, counts[line]) for line, size in sizes.most_common())
        return Moment(event, sum(sizes.values()), reserved, holders)


@dataclass(frozen=True, slots=True)
class Snapshot:
    path: str
    devices: tuple[DeviceTrace, ...]

    def choose_device(self, number: int | None = None) -> DeviceTrace:
        """The one with this number; else one that ran out of memory, or the one that reserves most."""
        if number is None:
            return max(self.devices, key=lambda device: (device.oom is not None, device.peak_reserved))
        for device in self.devices:
            if device.device == number:
                return device
        there = ", ".join(str(device.device) for device in self.devices)
        raise SnapshotError(f"GPU {number} is not in the snapshot; choose from {there}", self.path)


# reading


def read_snapshot(path: str | Path) -> Snapshot:
    """Read a file of `torch.cuda.memory._dump_snapshot`; raises SnapshotError for anything else."""
    try:
        with open(path, "rb") as file:
            record = _PlainUnpickler(file).load()
    except OSError as error:
        raise SnapshotError(error.strerror or str(error), str(path)) from None
    except RefusedObject as error:
        raise SnapshotError(f"invalid memory snapshot: {error}", str(path)) from None
    except Exception as error:
        # A broken pickle raises almost anything: EOFError, IndexError, UnicodeDecodeError, MemoryError, …
        raise SnapshotError(
            f"expected a memory snapshot, got an unreadable pickle ({type(error).__name__})", str(path)
        ) from None
    return parse_snapshot(record, str(path))


def parse_snapshot(record: object, path: str = "snapshot") -> Snapshot:
    """The content of a snapshot, also that of `Allocator.snapshot`."""
    try:
        devices = tuple(_parse_devices(record))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise SnapshotError(f"invalid memory snapshot: {type(error).__name__} at {error}", path) from None
    if not devices:
        raise SnapshotError(
            "the snapshot is empty: call torch.cuda.memory._record_memory_history() before the run", path
        )
    return Snapshot(path, devices)


def _parse_devices(record: Any) -> Iterator[DeviceTrace]:
    segments, traces = list(record["segments"]), list(record["device_traces"])
    settings = _write_settings(record.get("allocator_settings") or {})
    numbers = {segment.get("device", 0) for segment in segments} | {
        i for i, trace in enumerate(traces) if trace
    }
    for number in sorted(numbers):
        own = [_check_segment(segment) for segment in segments if segment.get("device", 0) == number]
        events = list(_parse_trace(traces[number])) if number < len(traces) else []
        yield DeviceTrace(number, events, own, settings)


def _check_segment(segment: dict[str, Any]) -> dict[str, Any]:
    total, stream = _read_size(segment["total_size"]), _read_number(segment.get("stream", 0))
    checked = {**segment, "total_size": total, "stream": stream}
    for block in list_addressed_blocks(checked):
        _read_number(block["address"]), _read_size(block["size"]), str(block["state"])
        _read_size(block.get("requested_size", 0))
    return checked


def list_addressed_blocks(segment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The blocks of a segment with their addresses, which older snapshots leave out: blocks follow one another."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield {"address": address, **block}
        address = block.get("address", address) + block["size"]


def _parse_trace(trace: Iterable[dict[str, Any]]) -> Iterator[TraceEvent]:
    for entry in trace:
        action = entry["action"]
        if action not in KNOWN:
            continue
        address = entry["device_free"] if action == "oom" else entry["addr"]
        stream = _read_number(entry.get("stream", 0))
        empties = action in SHRINKS and any(
            frame.get("name") == "empty_cache" for frame in entry.get("frames") or ()
        )
        yield TraceEvent(
            action, _read_number(address), _read_size(entry["size"]), stream, line_of(entry), empties
        )


def _read_number(value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a size or an address, got {value!r}")
    return value


def _read_size(value: object) -> int:
    size = _read_number(value)
    if size > MOST_BYTES:
        raise ValueError(f"expected a size of at most {MOST_BYTES} bytes, got {size}")
    return size


def _write_settings(record: dict[str, Any]) -> str:
    """The settings in the form of PYTORCH_CUDA_ALLOC_CONF."""
    text = record.get("PYTORCH_CUDA_ALLOC_CONF")
    if text:
        return str(text)
    parts = []
    if record.get("expandable_segments"):
        parts.append("expandable_segments:True")
    if record.get("max_split_size", -1) > 0:
        parts.append(f"max_split_size_mb:{record['max_split_size'] // MiB}")
    return ",".join(parts)


def line_of(entry: dict[str, Any]) -> str:
    """`train.py:88 (forward)`: the innermost Python frame that is not torch's, else the innermost one."""
    innermost = None
    for frame in entry.get("frames") or ():
        kind = _find_kind(str(frame["filename"]))
        if kind == "own":
            innermost = frame
            break
        if kind == "torch" and innermost is None:
            innermost = frame
    if innermost is None:
        return NOT_RECORDED
    return f"{innermost['filename']}:{innermost['line']} ({innermost['name']})"


@functools.lru_cache(maxsize=4096)
def _find_kind(filename: str) -> str:
    if not filename.endswith(".py"):
        return "C++"
    return "torch" if _is_of_torch(filename) else "own"


def _is_of_torch(filename: str) -> bool:
    parts = filename.replace("\\", "/").split("/")
    return any(part == "torch" and before.endswith("-packages") for before, part in pairwise(parts))


# replays


@dataclass(frozen=True, slots=True)
class Replay:
    """The requests of a trace under some settings. `died_at` is the event that found no memory, None if all did."""

    settings: str
    capacity: int | None
    peak_reserved: int
    peak_allocated: int
    retries: int
    died_at: int | None
    allocated: int
    reserved: int
    largest_free: int
    """Size of the largest free block at the end: larger requests need more memory from the driver."""
    lacking: int = 0
    """What the driver had too little of, for the request that found no memory."""

    @property
    def fits(self) -> bool:
        return self.died_at is None


def replay(trace: DeviceTrace, settings: str | None = None, capacity: int | None = None) -> Replay:
    """Replay the requests up to the last OOM (or to the end) through the simulated allocator, with this much memory."""
    settings = trace.settings if settings is None else settings
    allocator = Allocator(capacity, settings=AllocatorSettings.parse(settings))
    addresses: dict[int, int] = {}
    died_at: int | None = -1
    lacking = 0
    try:
        # The order of these allocations is unknown: the order of addresses is the likeliest.
        for address, block in sorted(trace.before.items()):
            addresses[address] = allocator.allocate(block.size, block.stream)
        died_at = _replay_events(trace, allocator, addresses)
    except OutOfMemory as error:
        lacking = error.state.requested
    if died_at is not None and died_at >= 0:
        lacking = trace.events[died_at].size
    if lacking and capacity is not None:
        lacking = max(0, _round_to_segment(lacking) - (capacity - allocator.reserved))
    statistics = allocator.statistics()
    blocks = [
        block["size"] for s in allocator.segments() for block in s["blocks"] if block["state"] == "inactive"
    ]
    return Replay(
        settings, capacity, statistics["reserved_bytes.all.peak"], statistics["allocated_bytes.all.peak"],
        statistics["num_alloc_retries"], died_at, allocator.allocated, allocator.reserved, max(blocks, default=0),
        lacking,
    )  # fmt: skip


def _round_to_segment(size: int) -> int:
    """What the allocator asks the driver for."""
    return SEGMENT if size < SEGMENT // 2 else -(-size // LARGE_PAGE) * LARGE_PAGE


def _replay_events(trace: DeviceTrace, allocator: Allocator, addresses: dict[int, int]) -> int | None:
    """Returns the event at which memory runs out, or None."""
    last = trace.oom
    events = trace.events
    for index, event in enumerate(events):
        if event.action == "free_completed":
            allocator.free(addresses.pop(event.address, 0))
        elif event.action in ("alloc", "oom"):
            try:
                got = allocator.allocate(event.size, event.stream)
            except OutOfMemory:
                if event.action == "oom" and index != last:
                    continue
                return index
            if event.action == "alloc":
                addresses[event.address] = got
            elif index == last:
                return None
            else:
                allocator.free(got)
        elif event.action in SHRINKS and _is_call_of_empty_cache(events, index):
            allocator.empty_cache()
    return None


def _is_call_of_empty_cache(events: list[TraceEvent], index: int) -> bool:
    """Whether segments were released by the program, and not for a request: this is seen at the last one of them."""
    following = events[index + 1].action if index + 1 < len(events) else ""
    if following in SHRINKS:
        return False
    return events[index].is_empty_cache or following not in (*GROWS, "oom")


def find_missing_memory(trace: DeviceTrace, capacity: int, recorded: Replay | None = None) -> int:
    """How much more memory the requests would have needed; 0 if they fit. Each failed request shows how much it
    lacked; the replay with that much more finds the next failure. `recorded`: an earlier replay with this
    capacity."""
    result = recorded or replay(trace, None, capacity)
    tried = capacity
    for _ in range(MOST_TRIES):
        if result.fits:
            return tried - capacity
        tried += max(result.lacking, PRECISION)
        result = replay(trace, None, tried)
    return max(tried, replay(trace).peak_reserved) - capacity


# calibration


@dataclass(frozen=True, slots=True)
class Calibration:
    """Results of a real run on a card: `context` in bytes, if memory ran out, and the error of the replay."""

    context: int | None
    error: float | None
    reserved: int
    replayed: int


def calibrate(trace: DeviceTrace, memory: int) -> Calibration:
    """`memory` is the card's, as the driver reports it."""
    capacity = trace.capacity
    if capacity is not None and not 0 <= memory - capacity <= MOST_CONTEXT:
        raise UnderstudyError(
            f"expected a snapshot of a card with {memory / GiB:.2f} GiB, got one with {capacity / GiB:.2f} GiB for torch: "
            "choose the card of the run, and a run without other processes on it"
        )
    real, ours = trace.peak_reserved, replay(trace, None, capacity).peak_reserved
    # Where the trace begins with memory in use, the layout of that memory is a guess: no measure of the allocator.
    error = abs(ours - real) / real if trace.events and not trace.before and real else None
    return Calibration(None if capacity is None else memory - capacity, error, real, ours)
