"""The caching allocator of CUDA devices, simulated: requests and frees in; addresses, segments and counters out.

    allocator = Allocator(total=80 * GiB, outside=500 * MiB)
    address = allocator.allocate(3_000_000)      # raises OutOfMemory where the device would
    allocator.free(address)
    allocator.statistics()["reserved_bytes.all.peak"]

How it works, in the order of a request (`docs/simulation.md` has the longer story):

    round the size ──► best fit among the free blocks of (pool, stream) ──► split off the rest
                             │ none
                             └──► new segment ──► (no room) release what is wholly free, retry ──► OutOfMemory

Blocks are not objects. A free block is a number in a sorted list, `size << SHIFT | address`, so that `bisect` is the
search for the best fit. Addresses grow with the creation of segments and are never used twice: the order of addresses is
the order of creation, which is the tie-break of the search. Two dicts give the free block that begins or ends at an
address: merging needs no links. Segments lie apart, so that neighbours in memory are neighbours in one segment.

An allocator belongs to one device, and takes one call at a time: what comes from several threads, or from finalizers in the
middle of a call, needs a queue before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from understudy.simulation.allocator_parts import (
    COUNTERS,
    LEAST_LARGE_REST,
    LEAST_REST,
    SHIFT,
    UNLIMITED,
    AllocatorSettings,
    Arena,
    Counter,
    MemoryState,
    MiB,
    OutOfMemory,
    Pool,
    counter_pair,
    flatten_figures,
    make_pools,
    separate_active_counters,
)
from understudy.simulation.block_history import BlockHistory, Frames, add_block, new_segment_record

__all__ = ["Allocator", "AllocatorSettings", "OutOfMemory"]

EVENTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")
"""The names of `torch.cuda.memory_stats`."""

LARGEST_SMALL = MiB
SMALL_SEGMENT = 2 * MiB
LARGE_SEGMENT_UNIT = 2 * MiB
OWN_SEGMENT_FROM = 10 * MiB
"""Smaller requests of the large pool share segments of `large_segment_size`."""
FIRST_ADDRESS = 1 << 36
ENDLESS_RANGE = 1 << 44
"""Addresses that an expandable segment of a device without a limit may use."""


class Request(Protocol):
    """A request for memory while `memory` is None; the release of it when the same request comes again."""

    nbytes: int
    device: Any
    stream: int
    memory: Any
    address: int


class Allocator:
    """The allocator of one device.

    `total` is the memory of the device as the driver reports it, None for a device without a limit; `outside` is what the
    CUDA context and other processes hold. `frames` gives the stack for snapshots, `clock` the time in microseconds; both
    are asked while history is recorded. Events of streams that used a block are taken as finished at the next request,
    or, with `lazy_events`, only when `synchronize` says so or memory runs out.
    """

    def __init__(
        self,
        total: int | None = None,
        *,
        outside: int = 0,
        settings: AllocatorSettings | str = "",
        device: int = 0,
        lazy_events: bool = False,
        frames: Callable[[], Frames] | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.device = device
        self.total = total
        self.outside = outside
        self.lazy_events = lazy_events
        self.frames = frames
        self.clock = clock
        self.allowed: int | None = None  # the limit of `set_memory_fraction`, in bytes
        self.before_release: Callable[[], None] | None = None
        """Called at a limit, before anything that is cached is released."""
        self.history: BlockHistory | None = None
        self._small, self._large = make_pools()
        self._tells_active_apart = False
        self._live: dict[int, tuple[int, int, Arena]] = {}
        self._stream_uses: dict[int, set[int]] = {}
        self._pending: dict[int, tuple[int, int, Arena, set[int]]] = {}
        self._next_address = FIRST_ADDRESS
        self._oversize = {name: counter_pair() for name in ("oversize_allocations", "oversize_segments")}
        (self._oversize_allocations, _), (self._oversize_segments, _) = self._oversize.values()
        self._events = dict.fromkeys(EVENTS, 0)
        self._peaks_before = dict.fromkeys(COUNTERS, 0)
        self.change_settings(settings)

    # requests and frees

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocate a block of `size` bytes and return its address; 0 (not an address) for 0 bytes."""
        if size <= 0:
            return self._allocate_nothing(size)
        if self._pending:
            self._free_finished()
        rounded = self._round(size) if self._rounds else (size + 511) & -512
        pool = self._small if rounded <= LARGEST_SMALL else self._large
        arena = pool.arenas.get(stream)
        if arena is None or self._is_special:
            arena, index = self._search(pool, stream, rounded)
        else:
            index = bisect_left(arena.keys, rounded << SHIFT)
        if index == len(arena.keys):
            index = self._grow(arena, rounded, size)
        stays_whole = self._is_special and self._stays_whole(pool, rounded)
        address, block_size = arena.take(index, rounded, stays_whole)
        self._live[address] = (block_size, size, arena)
        pool.allocation.added += 1
        pool.allocated_bytes.added += block_size
        pool.requested_bytes.added += size
        pool.has_grown = True
        if self._is_watched:
            if self._tells_active_apart:
                pool.active.add(1)
                pool.active_bytes.add(block_size)
            if block_size >= self._max_split:
                self._oversize_allocations.add(1)
            self._record("alloc", address, size, stream)
        return address

    def free(self, address: int) -> None:
        """Give a block back. It is free at once, unless another stream has used it."""
        block = self._live.pop(address, None)
        if block is None:
            self._refuse_free(address)
            return
        size, requested, arena = block
        pool = arena.pool
        if pool.has_grown or pool.other.has_grown:
            pool.note_block_peaks()
        pool.allocation.removed += 1
        pool.allocated_bytes.removed += size
        if self._is_watched:
            if size >= self._max_split:
                self._oversize_allocations.removed += 1
            self._record("free_requested", address, requested, arena.stream)
            if address in self._stream_uses:
                self._pending[address] = (size, requested, arena, self._stream_uses.pop(address))
                return
        self._complete_free(address, size, requested, arena)

    def serve(self, requests: Iterator[Request], memory: object, device: object) -> Request | None:
        """Requests and frees in turn, as `allocate` and `free` answer them, as long as nothing is out of the ordinary: free
        blocks of one device's default stream. Returns the first one that is left to the caller."""
        small, large = self._small.arenas.get(0), self._large.arenas.get(0)
        if (
            small is None
            or large is None
            or self._is_special
            or self._is_watched
            or self._rounds
            or self._pending
        ):
            return next(requests, None)
        live = self._live
        # Most requests are of a few sizes, and most blocks of a size are alike.
        by_size: dict[int, tuple[int, int, Arena, list[int], Pool, tuple[int, int, Arena]]] = {}
        for request in requests:
            if request.memory is None:
                size = request.nbytes
                known = by_size.get(size)
                if known is None:
                    rounded = (size + 511) & -512
                    arena = small if rounded <= LARGEST_SMALL else large
                    block = (rounded, size, arena)
                    known = by_size[size] = (rounded, rounded << SHIFT, arena, arena.keys, arena.pool, block)
                rounded, key, arena, keys, pool, block = known
                index = bisect_left(keys, key)
                if index == len(keys) or request.stream or not size:
                    return request
                if request.device is not device and request.device != device:
                    return request
                address, block_size = arena.take(index, rounded)
                live[address] = block if block_size == rounded else (block_size, size, arena)
                request.memory, request.address = memory, address
                sizes, count = pool.allocated_bytes, pool.allocation
                sizes.added += block_size
                count.added += 1
                pool.requested_bytes.added += size
                if sizes.added > sizes.limit or count.added > count.limit:
                    pool.has_grown = True
            elif request.memory is memory and (address := request.address):
                block_size, size, arena = live.pop(address)
                pool = arena.pool
                if pool.has_grown or pool.other.has_grown:
                    pool.note_block_peaks()
                pool.allocation.removed += 1
                pool.allocated_bytes.removed += block_size
                pool.requested_bytes.removed += size
                arena.insert(address, address + block_size)
            else:
                return request
        return None

    def _complete_free(self, address: int, size: int, requested: int, arena: Arena) -> None:
        pool = arena.pool
        pool.requested_bytes.removed += requested
        if self._is_watched:
            if self._tells_active_apart:
                pool.active.removed += 1
                pool.active_bytes.removed += size
            self._record("free_completed", address, requested, arena.stream)
        arena.insert(address, address + size)

    def _allocate_nothing(self, size: int) -> int:
        if size < 0:
            raise ValueError(f"expected a block size of at least 0 bytes, got {size}")
        return 0

    def _refuse_free(self, address: int) -> None:
        if address:
            raise ValueError(
                f"no block is allocated at address {address:#x}: freed twice, or never allocated here"
            )

    # the search and what follows where it finds nothing

    def _search(self, pool: Pool, stream: int, rounded: int) -> tuple[Arena, int]:
        """The best fit under any settings, and the arena it is in. With no fit, the index is the length of its list."""
        if self._collects_garbage:
            pool.searches += 1
        arena = self._arena(pool, stream)
        index = bisect_left(arena.keys, rounded << SHIFT)
        if arena.is_expandable:
            arena, index = arena.prefer_bounded(index, pool.arenas.get(stream), rounded)
        if index < len(arena.keys) and not self._may_serve(arena.keys[index] >> SHIFT, rounded):
            index = len(arena.keys)
        return arena, index

    def _arena(self, pool: Pool, stream: int) -> Arena:
        """That of the kind of segments which the settings ask for."""
        is_expandable = self.settings.expandable_segments
        arenas = pool.expandable_arenas if is_expandable else pool.arenas
        if stream not in arenas:
            page = (
                (SMALL_SEGMENT if pool.is_small else self.settings.large_segment_size) if is_expandable else 0
            )
            arenas[stream] = Arena(pool, stream, page)
        return arenas[stream]

    def _may_serve(self, block: int, rounded: int) -> bool:
        """Whether a request may take a block of this size. Oversize blocks are for oversize requests of about their size."""
        if rounded < self._max_split:
            return block < self._max_split
        return block < rounded + self.settings.max_non_split_rounding

    def _stays_whole(self, pool: Pool, rounded: int) -> bool:
        return rounded >= self._max_split and not pool.is_small and not self.settings.expandable_segments

    def _grow(self, arena: Arena, rounded: int, requested: int) -> int:
        """Add memory for a request that no free block serves; the index of the block for it."""
        if self._collects_garbage:
            self._announce_release()
            self._collect_garbage()
        size = self._segment_size(rounded)
        address = self._add_memory(arena, rounded, size)
        if address is None:
            self._announce_release()
        if address is None and self._max_split < UNLIMITED and self._release_oversize(arena, rounded):
            address = self._add_memory(arena, rounded, size)
        if address is None:
            self._release_cached()
            self._events["num_alloc_retries"] += 1
            address = self._add_memory(arena, rounded, size)
        if address is None:
            self._events["num_ooms"] += 1
            raise self._out_of_memory(arena, rounded, requested, size)
        block = arena.end_of[address] - address
        return bisect_left(arena.keys, block << SHIFT | address)

    def _announce_release(self) -> None:
        if self.before_release is not None:
            self.before_release()

    def _out_of_memory(self, arena: Arena, rounded: int, requested: int, size: int) -> OutOfMemory:
        free, total = self.memory_info()
        self._record("oom", free, rounded, arena.stream)
        limits = (total, free, self.outside, self.allowed)
        return OutOfMemory(MemoryState(self.device, requested, size, *limits, self.allocated, self.reserved))

    def _segment_size(self, rounded: int) -> int:
        if rounded <= LARGEST_SMALL:
            return SMALL_SEGMENT
        shared = self.settings.large_segment_size if rounded < OWN_SEGMENT_FROM else 0
        return max(shared, -(-rounded // LARGE_SEGMENT_UNIT) * LARGE_SEGMENT_UNIT)

    def _add_memory(self, arena: Arena, rounded: int, size: int) -> int | None:
        """Reserve a segment. Return the address of a free block that is large enough, or None if the memory is full."""
        if self.allowed is not None and self.reserved + size > self.allowed:
            return None
        if arena.is_expandable:
            return self._expand(arena, rounded)
        if not self._has_room(size):
            return None
        address = self._new_addresses(size, SMALL_SEGMENT)
        arena.segments[address] = address + size
        arena.insert(address, address + size)
        arena.pool.segment.add(1)
        if size >= self._max_split:
            self._oversize_segments.add(1)
        self._reserve(arena, address, size, "segment_alloc")
        return address

    def _expand(self, arena: Arena, rounded: int) -> int | None:
        start = arena.find_room(rounded)
        if start is None:
            length = ENDLESS_RANGE if self.total is None else self.total + self.total // 8
            length = -(-max(length, rounded) // arena.page) * arena.page
            start = self._new_addresses(length, arena.page)
            arena.segments[start] = start + length
            arena.add_gap(start, start + length)
        end = arena.end_of.get(start, start)
        while end - start < rounded:
            if not self._map(arena, end, min(rounded - (end - start), arena.gap_end[end] - end)):
                return None
            end = arena.end_of[start]
        return start

    def _map(self, arena: Arena, gap: int, wanted: int) -> bool:
        """Give memory to the first pages of a gap."""
        size = -(-wanted // arena.page) * arena.page
        if not self._has_room(size):
            return False
        end = arena.remove_gap(gap)
        if gap + size < end:
            arena.add_gap(gap + size, end)
        arena.insert(gap, gap + size)
        self._reserve(arena, gap, size, "segment_map")
        return True

    def _has_room(self, size: int) -> bool:
        return self.total is None or self.reserved + self.outside + size <= self.total

    def _new_addresses(self, size: int, alignment: int) -> int:
        """Behind all earlier ones, and apart from them."""
        start = -(-self._next_address // alignment) * alignment
        self._next_address = start + size + SMALL_SEGMENT
        return start

    def _reserve(self, arena: Arena, address: int, size: int, action: str) -> None:
        arena.pool.reserved_bytes.add(size)
        self._events["num_device_alloc"] += 1
        self._record(action, address, size, arena.stream)

    def _release(self, arena: Arena, address: int, size: int, action: str) -> None:
        arena.pool.reserved_bytes.removed += size
        self._events["num_device_free"] += 1
        self._record(action, address, size, arena.stream)

    # releases

    def empty_cache(self) -> None:
        """Give the segments that are wholly free, and the free pages of expandable ones, back to the driver."""
        self._release_cached()

    def _release_cached(self) -> None:
        self._events["num_sync_all_streams"] += 1
        self.synchronize()
        self._free_finished()
        for pool in (self._large, self._small):
            for arena in pool.arenas.values():
                for start, end in arena.free_segments():
                    self._release_segment(arena, start, end)
            for arena in pool.expandable_arenas.values():
                for start, end in arena.free_blocks():
                    self._unmap(arena, start, end)

    def _release_segment(self, arena: Arena, start: int, end: int) -> None:
        arena.remove(start, end)
        del arena.segments[start]
        arena.freed_at.pop(start, None)
        arena.pool.segment.removed += 1
        if end - start >= self._max_split:
            self._oversize_segments.removed += 1
        self._release(arena, start, end - start, "segment_free")

    def _unmap(self, arena: Arena, start: int, end: int) -> None:
        """Take the memory of the whole pages inside of a free block."""
        first, last = -(-start // arena.page) * arena.page, end // arena.page * arena.page
        if first >= last:
            return
        arena.remove(start, end)
        if start < first:
            arena.insert(start, first)
        if last < end:
            arena.insert(last, end)
        gap_start, gap_end = arena.add_gap(first, last)
        if arena.segments.get(gap_start) == gap_end:
            arena.remove_gap(gap_start)
            del arena.segments[gap_start]
        self._release(arena, first, last - first, "segment_unmap")

    def _release_oversize(self, arena: Arena, rounded: int) -> bool:
        """Release one oversize segment that is large enough, else the largest ones until they are; True if they were."""
        wanted = max(rounded, self._max_split)
        segments = [(start, end) for start, end in arena.free_segments() if end - start >= self._max_split]
        enough = [(start, end) for start, end in segments if end - start >= wanted][:1]
        released = 0
        for start, end in enough or reversed(segments):
            if released < wanted:
                self._release_segment(arena, start, end)
                released += end - start
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Above the threshold, release large segments that have been free for longer than the average."""
        assert self.allowed is not None
        excess = self.reserved - int(self.settings.garbage_collection_threshold * self.allowed)
        while excess > 0:
            candidates = [
                (self._large.searches - arena.freed_at.get(start, 0), arena, start, end)
                for _, arena in sorted(self._large.arenas.items())
                for start, end in arena.free_segments()
            ]
            total_age = sum(age for age, *_ in candidates)
            for age, arena, start, end in candidates:
                if age * len(candidates) >= total_age:
                    self._release_segment(arena, start, end)
                    excess -= end - start
            if not candidates:
                return

    # streams

    def record_stream(self, address: int, stream: int) -> None:
        """Another stream uses the block: it is not free before this stream has come so far."""
        block = self._live.get(address)
        if block is None:
            raise ValueError(f"no block is allocated at address {address:#x}")
        if stream != block[2].stream:
            self._stream_uses.setdefault(address, set()).add(stream)
            if not self._tells_active_apart:
                self._note_peaks()
                separate_active_counters(self._small, self._large)
                self._tells_active_apart = True
                self._choose_path()

    def synchronize(self, stream: int | None = None) -> None:
        """All work of a stream (or of all streams) is done: the next request finds its events finished."""
        for *_, streams in self._pending.values():
            streams.difference_update(tuple(streams) if stream is None else (stream,))

    def _free_finished(self) -> None:
        self._note_peaks()
        for address, (size, requested, arena, streams) in list(self._pending.items()):
            if not streams or not self.lazy_events:
                del self._pending[address]
                self._complete_free(address, size, requested, arena)

    # settings and limits

    def change_settings(self, settings: AllocatorSettings | str) -> None:
        """From now on; blocks that exist stay as they are."""
        self.settings = AllocatorSettings.parse(settings) if isinstance(settings, str) else settings
        self._max_split = self.settings.max_split_size
        self._rounds = any(self.settings.roundup_divisions)
        self._round = self.settings.round_size
        self._large.least_rest = LEAST_REST if self.settings.expandable_segments else LEAST_LARGE_REST
        if self.settings.memory_fraction is not None:
            self.set_memory_fraction(self.settings.memory_fraction)
        self._choose_path()

    def set_memory_fraction(self, fraction: float) -> None:
        """The part of the device's memory that the allocator may reserve."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"expected a fraction of memory between 0 and 1, got {fraction}")
        self.allowed = None if self.total is None else int(fraction * self.total)
        self._choose_path()

    def remove_limits(self) -> None:
        """Remove the limits of this copy, which may have been made during a request."""
        self.total = self.allowed = None
        self._choose_path()

    def _choose_path(self) -> None:
        self._collects_garbage = self.allowed is not None and self.settings.garbage_collection_threshold > 0
        is_split_limited = self._max_split < UNLIMITED
        self._is_special = self.settings.expandable_segments or is_split_limited or self._collects_garbage
        self._is_watched = is_split_limited or self._tells_active_apart or self.history is not None

    def _note_peaks(self) -> None:
        """Update the peaks of all figures, including those that have been reset."""
        self._small.note_block_peaks()
        self._small.note_split_peaks()

    # answers

    @property
    def allocated(self) -> int:
        return self._small.allocated_bytes.value + self._large.allocated_bytes.value

    @property
    def reserved(self) -> int:
        return self._small.reserved_bytes.value + self._large.reserved_bytes.value

    def memory_info(self) -> tuple[int, int]:
        """What is free on the device, and its total: the answer of `torch.cuda.mem_get_info`."""
        if self.total is None:
            raise ValueError("an allocator without a limit has no total")
        return self.total - self.outside - self.reserved, self.total

    def statistics(self) -> dict[str, int]:
        """The names and meanings of `torch.cuda.memory_stats`."""
        return dict(sorted(flatten_figures(self.nested_statistics())))

    def nested_statistics(self) -> dict[str, Any]:
        """The same as torch's C++ gives them: figure, pool, kind."""
        self._note_peaks()
        found: dict[str, Any] = {}
        for name in COUNTERS:
            counter: Counter = getattr(self._small, name)
            small, large = counter.figures(), counter.other.figures()
            both = {kind: number + large[kind] for kind, number in small.items()} | {
                "peak": counter.both.peak
            }
            found[name] = {"small_pool": small, "large_pool": large, "all": both}
        found |= {name: counter.figures() for name, (counter, _) in self._oversize.items()} | self._events
        found["max_split_size"] = -1 if self._max_split == UNLIMITED else self._max_split
        return found

    def peaks(self) -> dict[str, int]:
        """The most that each figure of both pools has been, also before the program has reset its own."""
        self._note_peaks()
        return {
            name: max(before, getattr(self._small, name).both.peak)
            for name, before in self._peaks_before.items()
        }

    def reset_peak_statistics(self) -> None:
        self._peaks_before = self.peaks()
        for small, large in self._counters().values():
            small.peak, large.peak, small.both.peak = small.value, large.value, small.value + large.value
        self._note_peaks()

    def reset_accumulated_statistics(self) -> None:
        for pair in self._counters().values():
            for counter in pair:
                counter.forget()
        self._events = dict.fromkeys(EVENTS, 0)

    def _counters(self) -> dict[str, tuple[Counter, Counter]]:
        """The counters of the small and the large pool; oversize blocks are counted in the first."""
        return self._oversize | {
            name: (getattr(self._small, name), getattr(self._large, name)) for name in COUNTERS
        }

    # history and snapshots

    def record_history(self, enabled: bool = True, max_entries: int | None = None) -> None:
        """Keep the trace of what happens from now on: all of it, or the last entries."""
        self.history = BlockHistory(max_entries, self.frames, self.clock) if enabled else None
        self._choose_path()

    def _record(self, action: str, address: int, size: int, stream: int) -> None:
        if self.history is not None:
            self.history.record(action, address, size, stream)

    def snapshot(self) -> dict[str, Any]:
        """The content of torch's memory snapshot (`torch.cuda.memory._snapshot`), for this device."""
        segments = self.segments()
        self._record("snapshot", 0, sum(segment["active_size"] for segment in segments), 0)
        return {
            "segments": segments,
            "device_traces": [[] for _ in range(self.device)]
            + [list(self.history.entries) if self.history else []],
            "allocator_settings": self.settings.to_record(),
            "external_annotations": [],
        }

    def segments(self) -> list[dict[str, Any]]:
        """Each segment with its blocks, by address; of an expandable one, each range that has memory."""
        blocks: list[tuple[int, int, int, str, Arena]] = [
            *((start, size, asked, "active_allocated", a) for start, (size, asked, a) in self._live.items()),
            *(
                (start, size, asked, "active_pending_free", a)
                for start, (size, asked, a, _) in self._pending.items()
            ),
            *(
                (start, end - start, 0, "inactive", arena)
                for arena in (*self._small.all_arenas(), *self._large.all_arenas())
                for start, end in arena.free_blocks()
            ),
        ]
        frames_of = self.history.frames_of if self.history else {}
        found: list[dict[str, Any]] = []
        for start, size, asked, state, arena in sorted(blocks, key=lambda block: block[0]):
            if not found or found[-1]["address"] + found[-1]["total_size"] != start:
                found.append(new_segment_record(self.device, start, arena))
            add_block(found[-1], start, size, asked, state, frames_of.get(start, []))
        return found
