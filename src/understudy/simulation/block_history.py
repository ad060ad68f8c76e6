"""The trace of an allocator, and its blocks, in the form of torch's memory snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from understudy.simulation.allocator_parts import Arena

Frames = list[dict[str, Any]]


class BlockHistory:
    """The trace of a snapshot: all entries, or the last ones. `frames` gives a stack, `clock` the time in microseconds."""

    def __init__(
        self, max_entries: int | None, frames: Callable[[], Frames] | None, clock: Callable[[], int] | None
    ) -> None:
        self.entries: deque[dict[str, Any]] = deque(maxlen=max_entries)
        self.frames_of: dict[int, Frames] = {}
        """By the address of a block that is allocated."""
        self._frames = frames
        self._clock = clock
        self._count = 0

    def record(self, action: str, address: int, size: int, stream: int) -> None:
        """Record an event. For "oom", `address` is the free memory of the device."""
        frames = self._frames() if self._frames else []
        if action == "alloc":
            self.frames_of[address] = frames
        elif action == "free_completed":
            self.frames_of.pop(address, None)
        self._count += 1
        self.entries.append(
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "frames": frames,
                "time_us": self._clock() if self._clock else self._count,
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": (0, 0),
            }
        )


def new_segment_record(device: int, address: int, arena: Arena) -> dict[str, Any]:
    """A segment of a snapshot, without blocks yet."""
    return {
        "device": device,
        "address": address,
        "total_size": 0,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": arena.stream,
        "segment_type": "small" if arena.pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": arena.is_expandable,
        "frames": [],
        "blocks": [],
    }


def add_block(
    segment: dict[str, Any], address: int, size: int, requested: int, state: str, frames: Frames
) -> None:
    """To a segment of a snapshot."""
    segment["total_size"] += size
    segment["allocated_size"] += size * (state == "active_allocated")
    segment["active_size"] += size * (state != "inactive")
    segment["requested_size"] += requested
    segment["blocks"].append(
        {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
    )
