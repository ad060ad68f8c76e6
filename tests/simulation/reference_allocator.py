"""The rules of the caching allocator once more, slow and obvious: lists of blocks, linear search, counters by recounting.

Nothing is shared with `understudy.simulation`. Addresses are (number of the segment, offset).
"""

from __future__ import annotations

from dataclasses import dataclass, field

MiB = 1 << 20


class NoMemory(Exception):
    def __init__(self, tried: int) -> None:
        super().__init__(tried)
        self.tried = tried


@dataclass(eq=False)
class Block:
    size: int
    state: str = "free"  # free, used, pending, unmapped
    requested: int = 0
    waits_for: set[int] = field(default_factory=set)
    freed_at: int = 0


@dataclass(eq=False)
class Segment:
    number: int
    stream: int
    is_small: bool
    page: int  # 0: a segment of fixed size
    blocks: list[Block]

    def offset(self, block: Block) -> int:
        return sum(b.size for b in self.blocks[: self.blocks.index(block)])

    def merge(self) -> None:
        """Neighbours of the same kind become one."""
        merged: list[Block] = []
        for block in self.blocks:
            if merged and merged[-1].state == block.state and block.state in ("free", "unmapped"):
                merged[-1] = Block(
                    merged[-1].size + block.size,
                    block.state,
                    freed_at=max(merged[-1].freed_at, block.freed_at),
                )
            else:
                merged.append(block)
        self.blocks = merged


class ReferenceAllocator:
    def __init__(
        self, total: int | None, outside: int = 0, *, expandable: bool = False, max_split: int | None = None,
        fraction: float | None = None, gc_threshold: float = 0.0, lazy: bool = False,
    ) -> None:  # fmt: skip
        self.total, self.outside, self.expandable, self.max_split = total, outside, expandable, max_split
        self.allowed = int(fraction * total) if fraction is not None and total is not None else None
        self.gc_threshold, self.lazy = gc_threshold, lazy
        self.segments: list[Segment] = []
        self.pending: list[tuple[Segment, Block]] = []  # in the order of their frees
        self.created = 0
        self.searches = {True: 0, False: 0}
        self.retries = self.ooms = 0
        self.peaks: dict[str, int] = {}
        self.note_peaks()

    # counters: everything is counted anew

    def current(self) -> dict[str, int]:
        found = {}
        for pool in ("all", "small_pool", "large_pool"):
            segments = [s for s in self.segments if pool == "all" or s.is_small == (pool == "small_pool")]
            blocks = [b for s in segments for b in s.blocks]
            used = [b for b in blocks if b.state == "used"]
            active = [b for b in blocks if b.state in ("used", "pending")]
            inactive = [
                b for s in segments if not s.page and len(s.blocks) > 1 for b in s.blocks if b.state == "free"
            ]
            fixed = [s for s in segments if not s.page]
            found |= {
                f"allocation.{pool}": len(used),
                f"allocated_bytes.{pool}": sum(b.size for b in used),
                f"active.{pool}": len(active),
                f"active_bytes.{pool}": sum(b.size for b in active),
                f"requested_bytes.{pool}": sum(b.requested for b in active),
                f"inactive_split.{pool}": len(inactive),
                f"inactive_split_bytes.{pool}": sum(b.size for b in inactive),
                f"segment.{pool}": len(fixed),
                f"reserved_bytes.{pool}": sum(b.size for b in blocks if b.state != "unmapped"),
            }
        return found

    def note_peaks(self) -> None:
        for name, value in self.current().items():
            self.peaks[name] = max(self.peaks.get(name, 0), value)

    @property
    def reserved(self) -> int:
        return self.current()["reserved_bytes.all"]

    # requests and frees

    def allocate(self, requested: int, stream: int) -> tuple[Segment, Block]:
        self.free_finished()
        size = max(512, -(-requested // 512) * 512)
        is_small = size <= MiB
        collects = self.allowed is not None and self.gc_threshold > 0
        self.searches[is_small] += collects
        found = self.search(size, stream, is_small)
        if found is None:
            if collects:
                self.collect_garbage()
            found = self.add_memory(size, stream, is_small)
        if found is None and self.max_split and self.release_oversize(size, stream, is_small):
            found = self.add_memory(size, stream, is_small)
        if found is None:
            self.empty_cache()
            self.retries += 1
            found = self.add_memory(size, stream, is_small)
        if found is None:
            self.ooms += 1
            raise NoMemory(self.segment_size(size))
        segment, block = found
        rest = block.size - size
        if self.expandable or is_small:
            splits = rest >= 512
        else:
            splits = rest > MiB and (self.max_split is None or size < self.max_split)
        if splits:
            index = segment.blocks.index(block)
            segment.blocks[index : index + 1] = [block, Block(rest)]
            block.size = size
        block.state, block.requested = "used", requested
        self.note_peaks()
        return segment, block

    def search(self, size: int, stream: int, is_small: bool) -> tuple[Segment, Block] | None:
        fits = [
            (block.size, segment.number, segment.offset(block), segment, block)
            for segment in self.segments
            if segment.stream == stream
            and segment.is_small == is_small
            and bool(segment.page) == self.expandable
            for block in segment.blocks
            if block.state == "free" and block.size >= size
        ]
        fits.sort(key=lambda fit: fit[:3])
        if self.expandable:
            while len(fits) > 1 and self.growth(*fits[1][3:]) < self.growth(*fits[0][3:]):
                fits.pop(0)
        if not fits:
            return None
        *_, segment, block = fits[0]
        if self.max_split is not None:
            if size < self.max_split <= block.size:
                return None
            if size >= self.max_split and block.size >= size + 20 * MiB:
                return None
        return segment, block

    @staticmethod
    def growth(segment: Segment, block: Block) -> int:
        after = segment.blocks[segment.blocks.index(block) + 1 :][:1]
        return block.size + sum(b.size for b in after if b.state == "unmapped")

    @staticmethod
    def segment_size(size: int) -> int:
        if size <= MiB:
            return 2 * MiB
        return 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB

    def has_room(self, size: int) -> bool:
        return self.total is None or self.reserved + self.outside + size <= self.total

    def add_memory(self, size: int, stream: int, is_small: bool) -> tuple[Segment, Block] | None:
        asked = self.segment_size(size)
        if self.allowed is not None and self.reserved + asked > self.allowed:
            return None
        if self.expandable:
            return self.expand(size, stream, is_small)
        if not self.has_room(asked):
            return None
        block = Block(asked)
        segment = Segment(self.created, stream, is_small, 0, [block])
        self.created += 1
        self.segments.append(segment)
        return segment, block

    def expand(self, size: int, stream: int, is_small: bool) -> tuple[Segment, Block] | None:
        page = 2 * MiB if is_small else 20 * MiB
        mine = [s for s in self.segments if s.page and s.stream == stream and s.is_small == is_small]
        for segment in mine:
            for index, block in enumerate(segment.blocks):
                if block.state != "unmapped":
                    continue
                first = index - 1 if index and segment.blocks[index - 1].state == "free" else index
                run = []
                for candidate in segment.blocks[first:]:
                    if candidate.state not in ("free", "unmapped") or sum(b.size for b in run) >= size:
                        break
                    run.append(candidate)
                if sum(b.size for b in run) >= size:
                    return self.map_pages(segment, first, size)
        assert self.total is not None
        length = self.total + self.total // 8
        segment = Segment(
            self.created, stream, is_small, page, [Block(-(-length // page) * page, "unmapped")]
        )
        self.created += 1
        self.segments.append(segment)
        return self.map_pages(segment, 0, size)

    def map_pages(self, segment: Segment, first: int, size: int) -> tuple[Segment, Block] | None:
        """Until the block at this index is large enough."""
        while True:
            head = segment.blocks[first]
            if head.state == "free" and head.size >= size:
                return segment, head
            index = first + (head.state == "free")
            gap = segment.blocks[index]
            missing = size - (head.size if head.state == "free" else 0)
            mapped = -(-min(missing, gap.size) // segment.page) * segment.page
            if not self.has_room(mapped):
                return None
            pieces = [Block(mapped), Block(gap.size - mapped, "unmapped")]
            segment.blocks[index : index + 1] = [piece for piece in pieces if piece.size]
            segment.merge()
            self.note_peaks()

    def free(self, segment: Segment, block: Block) -> None:
        if block.waits_for:
            block.state = "pending"
            self.pending.append((segment, block))
        else:
            self.complete(segment, block)
        self.note_peaks()

    def complete(self, segment: Segment, block: Block) -> None:
        block.state, block.requested, block.freed_at = "free", 0, self.searches[segment.is_small]
        block.waits_for = set()
        segment.merge()

    def free_finished(self) -> None:
        waiting, self.pending = self.pending, []
        for segment, block in waiting:
            if self.lazy and block.waits_for:
                self.pending.append((segment, block))
            else:
                self.complete(segment, block)
                self.note_peaks()

    def synchronize(self) -> None:
        for _, block in self.pending:
            block.waits_for.clear()

    # releases

    def release(self, segment: Segment) -> None:
        self.segments.remove(segment)

    def is_free(self, segment: Segment) -> bool:
        return not segment.page and [b.state for b in segment.blocks] == ["free"]

    def empty_cache(self) -> None:
        self.synchronize()
        self.free_finished()
        for segment in list(self.segments):
            if self.is_free(segment):
                self.release(segment)
            elif segment.page:
                self.unmap(segment)

    def unmap(self, segment: Segment) -> None:
        position, pieces, changed = 0, [], False
        for block in segment.blocks:
            end = position + block.size
            first, last = -(-position // segment.page) * segment.page, end // segment.page * segment.page
            if block.state == "free" and first < last:
                pieces += [Block(first - position), Block(last - first, "unmapped"), Block(end - last)]
                changed = True
            else:
                pieces.append(block)
            position = end
        segment.blocks = [piece for piece in pieces if piece.size]
        segment.merge()
        # A range that never had memory, because there was none for it, stays.
        if changed and [b.state for b in segment.blocks] == ["unmapped"]:
            self.release(segment)

    def release_oversize(self, size: int, stream: int, is_small: bool) -> bool:
        assert self.max_split is not None
        wanted = max(size, self.max_split)
        oversize = sorted(
            (s for s in self.segments if self.is_free(s) and s.stream == stream and s.is_small == is_small),
            key=lambda s: (s.blocks[0].size, s.number),
        )
        oversize = [s for s in oversize if s.blocks[0].size >= self.max_split]
        for segment in oversize:
            if segment.blocks[0].size >= wanted:
                self.release(segment)
                return True
        released = 0
        while oversize and released < wanted:
            released += oversize[-1].blocks[0].size
            self.release(oversize.pop())
        return released >= wanted

    def collect_garbage(self) -> None:
        assert self.allowed is not None
        excess = self.reserved - int(self.gc_threshold * self.allowed)
        while excess > 0:
            free = [s for s in self.segments if self.is_free(s) and not s.is_small]
            if not free:
                return
            age = {s.number: self.searches[False] - s.blocks[0].freed_at for s in free}
            average = sum(age.values()) / len(free)
            for segment in free:
                if age[segment.number] >= average:
                    excess -= segment.blocks[0].size
                    self.release(segment)
