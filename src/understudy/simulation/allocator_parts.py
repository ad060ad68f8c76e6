"""Parts of the allocator: settings, its error, counters, lists of free blocks.

AllocatorSettings   the string of PYTORCH_CUDA_ALLOC_CONF, parsed
OutOfMemory         with the facts in MemoryState
Counter             one figure of `torch.cuda.memory_stats`
Pool                the small or the large pool: counters, and an arena for each stream
Arena               the free blocks of one pool and one stream
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from understudy.errors import UnderstudyError

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

UNLIMITED = 1 << 62
"""Larger than any memory: no limit for the sizes of blocks that are split."""

ROUNDING_INTERVALS = 16
"""`roundup_power2_divisions` has a number for each power of two from 1 MiB on; the last one is for all that is larger."""


class AllocatorSettingsError(UnderstudyError, ValueError):
    """A settings string that torch refuses, too. `option` is the part that is wrong, "" if there is none."""

    def __init__(self, reason: str, option: str = "") -> None:
        super().__init__(reason)
        self.option = option


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What scripts set in PYTORCH_CUDA_ALLOC_CONF, in bytes where it is a size.

    `ignored` names the options of the string that change nothing here: locks, threads, and pinned host memory.
    """

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = 20 * MiB
    large_segment_size: int = 20 * MiB
    roundup_divisions: tuple[int, ...] = (0,) * ROUNDING_INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    memory_fraction: float | None = None
    ignored: tuple[str, ...] = ()
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """From "name:value,name:value"; spaces do not count, a later value of the same option wins."""
        settings = cls(text=text)
        for name, value in _options(text):
            if name == "backend" and value != "native":
                raise AllocatorSettingsError(
                    f"expected backend:native (no other is simulated), got {value!r}", name
                )
            if name in _IGNORED:
                settings = replace(settings, ignored=(*settings.ignored, name))
            elif name in _READERS:
                field, read = _READERS[name]
                settings = replace(settings, **{field: read(name, value)})
            else:
                raise AllocatorSettingsError(f"the allocator has no option {name!r}{_similar(name)}", name)
        return settings

    def round_size(self, size: int) -> int:
        """The size of the block that is looked for."""
        if size < 512:
            return 512
        divisions = self.roundup_divisions[min(max(size.bit_length() - 21, 0), ROUNDING_INTERVALS - 1)]
        if divisions > 1 and size > 512 * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return -(-size // step) * step
        return (size + 511) & -512

    def to_record(self) -> dict[str, Any]:
        """As in torch's memory snapshot."""
        return {
            "PYTORCH_CUDA_ALLOC_CONF": self.text,
            "max_split_size": -1 if self.max_split_size == UNLIMITED else self.max_split_size,
            "garbage_collection_threshold": self.garbage_collection_threshold,
            "expandable_segments": self.expandable_segments,
            "roundup_power2_divisions": {
                str(1 << power): n for power, n in enumerate(self.roundup_divisions)
            },
        }


_IGNORED = frozenset({
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register", "pinned_num_register_threads", "pinned_use_background_threads",
    "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb", "pinned_reserve_segment_size_mb",
    "graph_capture_record_stream_reuse", "throw_on_cudamalloc_oom", "backend",
})  # fmt: skip


def _options(text: str) -> list[tuple[str, str]]:
    """The pairs of name and value; a comma inside brackets does not end a value."""
    compact = re.sub(r"\s+", "", text)
    pairs = []
    for part in re.split(r",(?![^\[]*\])", compact) if compact else []:
        name, colon, value = part.partition(":")
        if not name or not colon or not value:
            raise AllocatorSettingsError(
                f"expected name:value, separated by commas, got {part!r} in {text!r}", name
            )
        pairs.append((name, value))
    return pairs


def _similar(name: str) -> str:
    near = difflib.get_close_matches(name, [*_READERS, *_IGNORED], n=1)
    return f"; did you mean {near[0]!r}?" if near else f" (choose from {', '.join(sorted(_READERS))})"


def _read_megabytes(name: str, value: str) -> int:
    if not value.isdecimal():
        raise AllocatorSettingsError(f"{name}: expected a whole number of MiB, got {value!r}", name)
    return int(value) * MiB


def _read_split_size(name: str, value: str) -> int:
    size = _read_megabytes(name, value)
    if size < 20 * MiB:
        raise AllocatorSettingsError(f"{name}: expected at least 20, got {value}", name)
    return size


def _read_segment_size(name: str, value: str) -> int:
    size = _read_megabytes(name, value)
    if size < 2 * MiB:
        raise AllocatorSettingsError(f"{name}: expected at least 2, got {value}", name)
    return size


def _read_fraction(name: str, value: str) -> float:
    fraction = _read_number(value)
    if not 0 <= fraction <= 1:
        raise AllocatorSettingsError(f"{name}: expected a number from 0 to 1, got {value!r}", name)
    return fraction


def _read_number(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return -1.0  # outside of every range


def _read_threshold(name: str, value: str) -> float:
    threshold = _read_number(value)
    if not 0 < threshold < 1:
        raise AllocatorSettingsError(f"{name}: expected a number between 0 and 1, got {value!r}", name)
    return threshold


def _read_truth(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise AllocatorSettingsError(f"{name}: expected True or False, got {value!r}", name)
    return value == "True"


def _read_divisions(name: str, value: str) -> tuple[int, ...]:
    """One number for all sizes ("4"), or a list by size in MiB ("[256:1,512:2,>:8]")."""
    if not value.startswith("["):
        return (_read_power_of_two(name, value),) * ROUNDING_INTERVALS
    if not value.endswith("]"):
        raise AllocatorSettingsError(f"{name}: the list {value!r} has no closing bracket", name)
    divisions = [0] * ROUNDING_INTERVALS
    last = 0
    for position, entry in enumerate(value[1:-1].split(",")):
        size, colon, number = entry.partition(":")
        if not colon:
            raise AllocatorSettingsError(f"{name}: expected size:divisions, got {entry!r}", name)
        count = 0 if number == "0" else _read_power_of_two(name, number)
        if size == ">":
            divisions[last:] = [count] * (ROUNDING_INTERVALS - last)
            continue
        last = min(_read_power_of_two(name, size).bit_length() - 1, ROUNDING_INTERVALS - 1)
        if position == 0:
            divisions[:last] = [count] * last
        divisions[last] = count
    return tuple(divisions)


def _read_power_of_two(name: str, value: str) -> int:
    number = int(value) if value.isdecimal() else 0
    if number < 1 or number & (number - 1):
        raise AllocatorSettingsError(f"{name}: expected powers of two, got {value!r}", name)
    return number


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "max_split_size_mb": ("max_split_size", _read_split_size),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _read_split_size),
    "large_segment_size_mb": ("large_segment_size", _read_segment_size),
    "roundup_power2_divisions": ("roundup_divisions", _read_divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_threshold),
    "expandable_segments": ("expandable_segments", _read_truth),
    "per_process_memory_fraction": ("memory_fraction", _read_fraction),
}
"""By option: the field that it sets, and what reads its value."""


def format_bytes(size: int) -> str:
    """As in the messages of torch: "512 bytes", "20.00 MiB"."""
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if size > unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"


@dataclass(frozen=True, slots=True)
class MemoryState:
    """A device at the moment of an OutOfMemory, in bytes.

    `tried` is what was asked of the driver: a whole segment, which may be more than `requested`. `allowed` is the limit of
    a memory fraction; `outside` is what the process and others hold outside of the allocator.
    """

    device: int
    requested: int
    tried: int
    total: int
    free: int
    outside: int
    allowed: int | None
    allocated: int
    reserved: int

    def __str__(self) -> str:
        limit = (
            f" The allocator may reserve {format_bytes(self.allowed)}." if self.allowed is not None else ""
        )
        return (
            f"CUDA out of memory. Tried to allocate {format_bytes(self.tried)}. GPU {self.device} has "
            f"{format_bytes(self.total)} in all, of which {format_bytes(self.free)} is free.{limit} This process uses "
            f"{format_bytes(self.reserved + self.outside)}: {format_bytes(self.allocated)} allocated by torch, "
            f"{format_bytes(self.reserved - self.allocated)} reserved by torch but not allocated, and "
            f"{format_bytes(self.outside)} outside of the allocator."
        )


class OutOfMemory(UnderstudyError, RuntimeError):
    """No room for a request, after all that was cached has been released. `state` has the facts."""

    def __init__(self, state: MemoryState) -> None:
        super().__init__(str(state))
        self.state = state


COUNTERS = (
    "allocation", "segment", "active", "inactive_split",
    "allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
"""The names of `torch.cuda.memory_stats`."""


class Counter:
    """One figure of one pool: all that was ever added, and removed. `other` is that of the other pool, `both` keeps the
    peak of their sum.

    A peak has to be noted before anything is removed: it costs nothing while a figure only grows. Until `added` is above
    `limit`, there can't be a new one, whatever the other pool adds.
    """

    __slots__ = ("added", "added_before", "both", "limit", "other", "peak", "removed", "removed_before")

    other: Counter
    both: Counter

    def __init__(self) -> None:
        self.added = self.removed = self.peak = self.limit = self.added_before = self.removed_before = 0

    @property
    def value(self) -> int:
        return self.added - self.removed

    def add(self, amount: int) -> None:
        self.added += amount
        note_peaks((self,))

    def figures(self) -> dict[str, int]:
        return {
            "current": self.value,
            "peak": self.peak,
            "allocated": self.added - self.added_before,
            "freed": self.removed - self.removed_before,
        }

    def forget(self) -> None:
        """Start counting additions and removals."""
        self.added_before, self.removed_before = self.added, self.removed


def note_peaks(counters: tuple[Counter, ...]) -> None:
    """Update the peaks of the figures of both pools."""
    for counter in counters:
        other, both = counter.other, counter.both
        value, other_value = counter.added - counter.removed, other.added - other.removed
        total = value + other_value
        if value > counter.peak:
            counter.peak = value
        if other_value > other.peak:
            other.peak = other_value
        if total >= both.peak:
            both.peak = total
            counter.limit, other.limit = counter.added, other.added
            continue
        share = (both.peak - total) // 2
        left, other_left = counter.peak - value, other.peak - other_value
        counter.limit = counter.added + (left if left < share else share)
        other.limit = other.added + (other_left if other_left < share else share)


def flatten_figures(nested: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield ("figure.pool.kind", number) for nested figures."""
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from flatten_figures(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def counter_pair(*copied: Counter) -> tuple[Counter, Counter]:
    """The counters of the two pools; with arguments, copies of those."""
    small, large = Counter(), Counter()
    small.other, large.other = large, small
    small.both = large.both = Counter()
    for counter, original in zip(
        (small, large, small.both), (*copied, *(c.both for c in copied[:1])), strict=False
    ):
        for name in ("added", "removed", "peak", "added_before", "removed_before"):
            setattr(counter, name, getattr(original, name))
    return small, large


class Pool:
    """The small or the large pool: its counters, and its free blocks by stream.

    As long as no free had to wait for another stream, `active` is `allocation` itself.
    """

    __slots__ = (
        "arenas", "block_figures", "expandable_arenas", "has_grown", "has_more_splits", "is_small", "least_rest", "other",
        "searches", "split_figures", *COUNTERS,
    )  # fmt: skip

    other: Pool
    allocation: Counter
    segment: Counter
    active: Counter
    inactive_split: Counter
    allocated_bytes: Counter
    reserved_bytes: Counter
    active_bytes: Counter
    inactive_split_bytes: Counter
    requested_bytes: Counter
    block_figures: tuple[Counter, ...]
    """Those of blocks that are allocated."""
    split_figures: tuple[Counter, ...]
    """Those of free parts of segments."""

    def __init__(self, is_small: bool) -> None:
        self.is_small = is_small
        self.least_rest = LEAST_REST
        self.has_grown = False
        """Whether figures of blocks that are allocated may have new peaks."""
        self.has_more_splits = False
        """The same of free parts of segments."""
        self.searches = 0
        """How often a free block was looked for while garbage collection was on."""
        self.arenas: dict[int, Arena] = {}
        self.expandable_arenas: dict[int, Arena] = {}

    def note_block_peaks(self) -> None:
        """Update the peaks of blocks in both pools. Call it after growth, before any block is freed."""
        note_peaks(self.block_figures)
        for pool in (self, self.other):
            pool.has_grown = False
            size, requested = pool.allocated_bytes, pool.requested_bytes
            size.limit = min(
                size.limit, size.added + requested.limit - requested.added
            )  # a block is as large at least

    def note_split_peaks(self) -> None:
        """Update the peaks of split blocks in both pools. Call it after a split, before any free part is used."""
        note_peaks(self.split_figures)
        self.has_more_splits = self.other.has_more_splits = False

    def all_arenas(self) -> list[Arena]:
        return [*self.arenas.values(), *self.expandable_arenas.values()]


def make_pools() -> tuple[Pool, Pool]:
    small, large = Pool(is_small=True), Pool(is_small=False)
    for name in COUNTERS:
        for pool, counter in zip((small, large), counter_pair(), strict=True):
            setattr(pool, name, counter)
    small.other, large.other = large, small
    for pool in (small, large):
        pool.active, pool.active_bytes = pool.allocation, pool.allocated_bytes
        pool.block_figures = (pool.allocation, pool.allocated_bytes, pool.requested_bytes)
        pool.split_figures = (pool.inactive_split, pool.inactive_split_bytes)
    return small, large


def separate_active_counters(small: Pool, large: Pool) -> None:
    """From now on, a block may be active without being allocated."""
    small.active, large.active = counter_pair(small.allocation, large.allocation)
    small.active_bytes, large.active_bytes = counter_pair(small.allocated_bytes, large.allocated_bytes)


SHIFT = 56
ADDRESS = (1 << SHIFT) - 1
"""A free block is the number `size << SHIFT | address`."""
NO_KEY = 1 << 200
"""Larger than any of them."""

LEAST_REST = 512
LEAST_LARGE_REST = MiB + 512
"""A smaller rest is not split off. Sizes are multiples of 512: "more than 1 MiB" is "at least 1 MiB and 512"."""


class Arena:
    """The free blocks of one pool and one stream, in segments of one kind.

    `keys` is sorted; `end_of` has the end of the free block that begins at an address, `start_of` the beginning of the
    one that ends there. `segments` has the end of each segment. An expandable arena has `gaps`, too: the ranges of its
    segments that have no memory now.
    """

    __slots__ = (
        "end_of", "freed_at", "gap_end", "gaps", "is_expandable", "keys", "page", "pool", "segments", "start_of", "stream",
    )  # fmt: skip

    def __init__(self, pool: Pool, stream: int, page: int) -> None:
        self.pool = pool
        self.stream = stream
        self.page = page
        self.is_expandable = page > 0
        self.keys: list[int] = []
        self.end_of: dict[int, int] = {}
        self.start_of: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self.gaps: list[int] = []
        self.gap_end: dict[int, int] = {}
        self.freed_at: dict[int, int] = {}
        """For each wholly free segment: the number of searches in the pool when it became free."""

    def take(self, index: int, rounded: int, stays_whole: bool = False) -> tuple[int, int]:
        """Take a free block, or the first part of it: address and size."""
        keys, end_of, pool = self.keys, self.end_of, self.pool
        address = keys[index] & ADDRESS
        end = end_of.pop(address)
        rest = address + rounded
        left = end - rest
        is_part = not self.is_expandable and self.segments.get(address) != end
        if is_part and (pool.has_more_splits or pool.other.has_more_splits):
            pool.note_split_peaks()
        if left < pool.least_rest or stays_whole:
            del keys[index], self.start_of[end]
            if is_part:
                pool.inactive_split_bytes.removed += end - address
                pool.inactive_split.removed += 1
            return address, end - address
        key = left << SHIFT | rest
        if index and keys[index - 1] > key:
            del keys[index]
            insort(keys, key, 0, index)
        else:
            keys[index] = key
        end_of[rest] = end
        self.start_of[end] = rest
        if is_part:
            pool.inactive_split_bytes.removed += rounded
        elif not self.is_expandable:
            pool.inactive_split_bytes.added += left
            pool.inactive_split.added += 1
            pool.has_more_splits = True
        return address, rounded

    def insert(self, start: int, end: int) -> None:
        """Add a free block, merged with its free neighbours: one that was taken, or new memory."""
        keys, end_of, start_of, size, merges = self.keys, self.end_of, self.start_of, end - start, 0
        before = start_of.pop(start, None)
        if before is not None:
            del keys[bisect_left(keys, (start - before) << SHIFT | before)]
            start = before
            merges = 1
        after = end_of.pop(end, None)
        if after is not None:
            del keys[bisect_left(keys, (after - end) << SHIFT | end)]
            end = after
            merges += 1
        end_of[start] = end
        start_of[end] = start
        insort(keys, (end - start) << SHIFT | start)
        if self.is_expandable:
            return
        pool = self.pool
        is_whole_segment = self.segments.get(start) == end
        if (is_whole_segment or merges > 1) and (pool.has_more_splits or pool.other.has_more_splits):
            pool.note_split_peaks()
        if is_whole_segment:
            self.freed_at[start] = pool.searches
            pool.inactive_split_bytes.removed += end - start - size
            pool.inactive_split.removed += merges
            return
        sizes, count = pool.inactive_split_bytes, pool.inactive_split
        sizes.added += size
        if not merges:
            count.added += 1
        elif merges > 1:
            count.removed += 1
        if sizes.added > sizes.limit or count.added > count.limit:
            pool.has_more_splits = True

    def remove(self, start: int, end: int) -> None:
        del self.keys[bisect_left(self.keys, (end - start) << SHIFT | start)]
        del self.end_of[start], self.start_of[end]

    def free_blocks(self) -> list[tuple[int, int]]:
        """Beginning and end, the smallest first."""
        return [(key & ADDRESS, (key & ADDRESS) + (key >> SHIFT)) for key in self.keys]

    def free_segments(self) -> list[tuple[int, int]]:
        """The segments that are wholly free, the smallest first."""
        return [(start, end) for start, end in self.free_blocks() if self.segments.get(start) == end]

    def add_gap(self, start: int, end: int) -> tuple[int, int]:
        """Merged with the gaps before and after it; the whole of it is returned."""
        index = bisect_left(self.gaps, start)
        if end in self.gap_end:
            end = self.gap_end.pop(self.gaps.pop(index))
        if index and self.gap_end[self.gaps[index - 1]] == start:
            start = self.gaps[index - 1]
        else:
            self.gaps.insert(index, start)
        self.gap_end[start] = end
        return start, end

    def remove_gap(self, start: int) -> int:
        del self.gaps[bisect_left(self.gaps, start)]
        return self.gap_end.pop(start)

    def find_room(self, size: int) -> int | None:
        """The lowest address at which free blocks and gaps, side by side, have `size` bytes, one of them a gap."""
        for gap in self.gaps:
            start = end = self.start_of.get(gap, gap)
            while end - start < size and (after := self.end_of.get(end) or self.gap_end.get(end)):
                end = after
            if end - start >= size:
                return start
        return None

    def prefer_bounded(self, index: int, fixed: Arena | None, size: int) -> tuple[Arena, int]:
        """From the best fit on, go past blocks that can grow, as long as the next one would be smaller in the end.

        `fixed` has the blocks in segments that can't grow, from a time with other settings. With no fit, the index is the
        length of the list.
        """
        keys = self.keys
        fixed_index = bisect_left(fixed.keys, size << SHIFT) if fixed else 0
        fixed_key = fixed.keys[fixed_index] if fixed and fixed_index < len(fixed.keys) else NO_KEY
        while index < len(keys) and keys[index] < fixed_key:
            following = min(keys[index + 1] if index + 1 < len(keys) else NO_KEY, fixed_key)
            growth = following >> SHIFT if following == fixed_key else self.growth(following)
            if growth >= self.growth(keys[index]):
                return self, index
            index += 1
        return (fixed, fixed_index) if fixed and fixed_key != NO_KEY else (self, index)

    def growth(self, key: int) -> int:
        """The size that a free block could have with the gap behind it."""
        end = (key & ADDRESS) + (key >> SHIFT)
        return (key >> SHIFT) + self.gap_end.get(end, end) - end
