"""Random programs: invariants of the allocator, and the same answers as a slow and obvious model of it."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulation.reference_allocator import NoMemory, ReferenceAllocator
from understudy.simulation.allocator import Allocator, OutOfMemory
from understudy.simulation.allocator_parts import COUNTERS, MiB

MANY = settings(max_examples=60, deadline=None)

SIZES = st.one_of(
    st.integers(1, 3000),
    st.sampled_from(
        [512, 1024, 4096, MiB - 512, MiB, MiB + 1, 2 * MiB, 3 * MiB, 10 * MiB - 512, 10 * MiB, 19 * MiB]
    ),
    st.integers(1, 30).map(lambda n: n * MiB + 300),
    st.sampled_from([24 * MiB, 40 * MiB, 64 * MiB, 90 * MiB]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), SIZES, st.sampled_from([0, 0, 0, 7])),
        st.tuples(st.just("free"), st.integers(0, 1 << 30), st.just(0)),
        st.tuples(st.just("free"), st.integers(0, 1 << 30), st.just(0)),
        st.tuples(st.just("use"), st.integers(0, 1 << 30), st.sampled_from([0, 7, 9])),
        st.tuples(st.sampled_from(["empty", "synchronize"]), st.just(0), st.just(0)),
    ),
    max_size=60,
)
TOTALS = st.sampled_from([60 * MiB, 150 * MiB, 400 * MiB, 2000 * MiB])


class Machine:
    """The allocator and the model side by side."""

    def __init__(self, total: int, conf: str, fraction: float | None, lazy: bool, **model: Any) -> None:
        self.ours = Allocator(total, outside=7 * MiB, settings=conf, lazy_events=lazy)
        if fraction is not None:
            self.ours.set_memory_fraction(fraction)
        self.model = ReferenceAllocator(total, 7 * MiB, fraction=fraction, lazy=lazy, **model)
        self.blocks: list[tuple[int, Any, Any]] = []

    def step(self, kind: str, number: int, stream: int) -> None:
        if kind == "allocate":
            self.allocate(number, stream)
        elif kind == "empty":
            self.ours.empty_cache()
            self.model.empty_cache()
        elif kind == "synchronize":
            self.ours.synchronize()
            self.model.synchronize()
        elif self.blocks:
            address, segment, block = self.blocks[number % len(self.blocks)]
            if kind == "free":
                self.blocks.pop(number % len(self.blocks))
                self.ours.free(address)
                self.model.free(segment, block)
            elif stream != segment.stream:
                self.ours.record_stream(address, stream)
                block.waits_for.add(stream)

    def allocate(self, size: int, stream: int) -> None:
        try:
            found = self.model.allocate(size, stream)
        except NoMemory as error:
            with pytest.raises(OutOfMemory) as caught:
                self.ours.allocate(size, stream)
            assert caught.value.state.tried == error.tried
            return
        self.blocks.append((self.ours.allocate(size, stream), *found))

    def check_same(self) -> None:
        """Segments in order of creation, their blocks, and every counter."""
        theirs = []
        for segment in self.model.segments:
            ranges: list[list[tuple[int, str, int]]] = [[]]
            for block in segment.blocks:
                if block.state == "unmapped":
                    ranges.append([])
                else:
                    ranges[-1].append((block.size, block.state, block.requested))
            theirs += [(segment.stream, segment.is_small, r) for r in ranges if r]
        names = {"inactive": "free", "active_allocated": "used", "active_pending_free": "pending"}
        ours = [
            (
                segment["stream"],
                segment["segment_type"] == "small",
                [(b["size"], names[b["state"]], b["requested_size"]) for b in segment["blocks"]],
            )
            for segment in self.ours.segments()
        ]
        assert ours == theirs
        statistics = self.ours.statistics()
        current = {name: statistics[f"{name}.current"] for name in self.model.peaks}
        assert current == self.model.current()
        assert {name: statistics[f"{name}.peak"] for name in self.model.peaks} == self.model.peaks
        assert statistics["num_alloc_retries"] == self.model.retries
        assert statistics["num_ooms"] == self.model.ooms


@MANY
@given(steps=STEPS, total=TOTALS, lazy=st.booleans())
def test_default_settings_as_the_model(steps: Any, total: int, lazy: bool) -> None:
    machine = Machine(total, "", None, lazy)
    for step in steps:
        machine.step(*step)
        machine.check_same()


@MANY
@given(steps=STEPS, total=TOTALS, lazy=st.booleans())
def test_expandable_segments_as_the_model(steps: Any, total: int, lazy: bool) -> None:
    machine = Machine(total, "expandable_segments:True", None, lazy, expandable=True)
    for step in steps:
        machine.step(*step)
        machine.check_same()


@MANY
@given(steps=STEPS, total=TOTALS, split=st.sampled_from([20, 24, 40]))
def test_max_split_size_as_the_model(steps: Any, total: int, split: int) -> None:
    machine = Machine(total, f"max_split_size_mb:{split}", None, False, max_split=split * MiB)
    for step in steps:
        machine.step(*step)
        machine.check_same()


@MANY
@given(steps=STEPS, total=TOTALS, fraction=st.sampled_from([0.5, 0.9]), threshold=st.sampled_from([0.2, 0.6]))
def test_garbage_collection_as_the_model(steps: Any, total: int, fraction: float, threshold: float) -> None:
    machine = Machine(
        total, f"garbage_collection_threshold:{threshold}", fraction, False, gc_threshold=threshold
    )
    for step in steps:
        machine.step(*step)
        machine.check_same()


FEW_SIZES = (512, 2048, MiB, 2 * MiB, 3 * MiB, 10 * MiB, 20 * MiB, 23 * MiB, 40 * MiB, 60 * MiB, 64 * MiB)

LONG_PROGRAMS: dict[str, dict[str, Any]] = {
    "": {},
    "expandable_segments:True": {"expandable": True},
    "max_split_size_mb:24": {"max_split": 24 * MiB},
    "garbage_collection_threshold:0.3": {"fraction": 0.8, "gc_threshold": 0.3},
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("conf", LONG_PROGRAMS)
def test_long_programs_with_few_sizes_as_the_model(conf: str, seed: int) -> None:
    """Few sizes make ties, and room that is just enough."""
    draw = random.Random(seed)
    options = {"fraction": None} | LONG_PROGRAMS[conf]
    machine = Machine(draw.choice([300, 600, 1500]) * MiB, conf, lazy=bool(seed % 2), **options)
    for number in range(300):
        kind = draw.choices(["allocate", "free", "use", "empty", "synchronize"], [50, 46, 2, 1, 1])[0]
        size = draw.choice(FEW_SIZES) - draw.choice([0, 0, 0, 300])
        machine.step(kind, size if kind == "allocate" else draw.randrange(1 << 30), draw.choice([0, 0, 0, 7]))
        if number % 5 == 0 or kind == "empty":
            machine.check_same()
    machine.check_same()


CONFS = st.sampled_from(
    ["", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4"]
)


def check_invariants(allocator: Allocator) -> None:
    """No two blocks overlap, bytes are conserved, neighbours are merged, and the counters equal a recount."""
    statistics = allocator.statistics()
    segments = allocator.segments()
    end = 0
    for segment in segments:
        assert segment["address"] >= end
        position = segment["address"]
        states = [block["state"] for block in segment["blocks"]]
        assert all(pair != ("inactive", "inactive") for pair in itertools.pairwise(states))
        for block in segment["blocks"]:
            assert block["address"] == position
            assert block["size"] > 0 and block["size"] % 512 == 0
            assert block["requested_size"] <= block["size"]
            position += block["size"]
        end = position
        assert end - segment["address"] == segment["total_size"]
    for pool in ("all", "small_pool", "large_pool"):
        mine = [s for s in segments if pool == "all" or s["segment_type"] == pool.removesuffix("_pool")]
        recount = {
            "reserved_bytes": sum(s["total_size"] for s in mine),
            "allocated_bytes": sum(s["allocated_size"] for s in mine),
            "active_bytes": sum(s["active_size"] for s in mine),
            "requested_bytes": sum(s["requested_size"] for s in mine),
            "allocation": sum(b["state"] == "active_allocated" for s in mine for b in s["blocks"]),
            "active": sum(b["state"] != "inactive" for s in mine for b in s["blocks"]),
        }
        assert {name: statistics[f"{name}.{pool}.current"] for name in recount} == recount
        for name in COUNTERS:
            current, peak, added, removed = (
                statistics[f"{name}.{pool}.{kind}"] for kind in ("current", "peak", "allocated", "freed")
            )
            assert 0 <= current <= peak <= added
            assert added - removed == current


@MANY
@given(
    steps=STEPS,
    total=st.one_of(st.none(), TOTALS),
    confs=st.lists(CONFS, min_size=1, max_size=4),
    lazy=st.booleans(),
)
def test_invariants_hold_while_settings_change(
    steps: Any, total: int | None, confs: list[str], lazy: bool
) -> None:
    allocator = Allocator(total, settings=confs[0], lazy_events=lazy)
    live: list[tuple[int, int]] = []
    for number, (kind, amount, stream) in enumerate(steps):
        if number % 15 == 14:
            allocator.change_settings(confs[number // 15 % len(confs)])
        try:
            if kind == "allocate":
                live.append((allocator.allocate(amount, stream), amount))
            elif kind == "empty":
                allocator.empty_cache()
            elif live and kind == "free":
                allocator.free(live.pop(amount % len(live))[0])
            elif live and kind == "use":
                allocator.record_stream(live[amount % len(live)][0], stream)
        except OutOfMemory:
            assert total is not None
        check_invariants(allocator)
        ranges = sorted(live)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(ranges))


@MANY
@given(steps=STEPS, conf=CONFS)
def test_freeing_everything_leaves_whole_segments_and_an_empty_cache_nothing(steps: Any, conf: str) -> None:
    allocator = Allocator(settings=conf)
    live = [allocator.allocate(amount, stream) for kind, amount, stream in steps if kind == "allocate"]
    for address in sorted(live, key=lambda address: address * 2654435761 % 1000003):
        allocator.free(address)
    assert all(len(segment["blocks"]) == 1 for segment in allocator.segments())
    assert allocator.allocated == 0
    assert allocator.statistics()["inactive_split_bytes.all.current"] == 0
    allocator.empty_cache()
    assert allocator.segments() == []
    assert allocator.reserved == 0


@MANY
@given(
    steps=STEPS, total=st.one_of(st.none(), TOTALS), conf=CONFS, lazy=st.booleans(), reset=st.integers(0, 60)
)
def test_peaks_do_not_depend_on_when_they_are_asked_for(
    steps: Any, total: int | None, conf: str, lazy: bool, reset: int
) -> None:
    asked, silent = (Allocator(total, settings=conf, lazy_events=lazy) for _ in range(2))
    live: list[int] = []
    for number, (kind, amount, stream) in enumerate(steps):
        position = amount % len(live) if live else 0
        address = live.pop(position) if live and kind == "free" else live[position] if live else 0
        for allocator in (asked, silent):
            with contextlib.suppress(OutOfMemory):
                if number == reset:
                    allocator.reset_peak_statistics()
                if kind == "allocate":
                    address = allocator.allocate(amount, stream)
                elif kind == "empty":
                    allocator.empty_cache()
                elif address and kind == "free":
                    allocator.free(address)
                elif address and kind == "use":
                    allocator.record_stream(address, stream)
        if kind == "allocate" and address in asked._live and address not in live:
            live.append(address)
        asked.statistics()
    assert silent.statistics() == asked.statistics() and silent.peaks() == asked.peaks()


class OneRequest:
    def __init__(self, nbytes: int, device: str, stream: int) -> None:
        self.nbytes, self.device, self.stream = nbytes, device, stream
        self.memory: object = None
        self.address = 0


@MANY
@given(steps=STEPS, has_arenas=st.booleans(), devices=st.lists(st.sampled_from("aab"), min_size=1))
def test_requests_that_are_served_together(steps: Any, has_arenas: bool, devices: list[str]) -> None:
    """As those that come one by one; what is left to the caller is of another device or stream, or finds no free block."""
    together, apart = Allocator(), Allocator()
    if has_arenas:
        for allocator in (together, apart):
            for address in [allocator.allocate(size) for size in (MiB, 30 * MiB)]:
                allocator.free(address)
    events: list[OneRequest] = []
    live: list[OneRequest] = []
    for number, (kind, amount, stream) in enumerate(steps):
        if kind == "allocate":
            live.append(OneRequest(amount, devices[number % len(devices)], stream % 2))
            events.append(live[-1])
        elif live and kind == "free":
            events.append(live.pop(amount % len(live)))
    addresses: dict[int, int] = {}
    for event in events:
        if event.device == "a" and id(event) in addresses:
            apart.free(addresses[id(event)])
        elif event.device == "a":
            addresses[id(event)] = apart.allocate(event.nbytes, event.stream)
    waiting = iter(events)
    left = together.serve(waiting, "memory", "a")
    while left is not None:
        if left.device == "a" and left.memory is not None:
            together.free(left.address)
        elif left.device == "a":
            left.memory, left.address = "memory", together.allocate(left.nbytes, left.stream)
        left = together.serve(waiting, "memory", "a")
    assert {id(event): event.address for event in events if event.device == "a"} == addresses
    assert together.statistics() == apart.statistics() and together.segments() == apart.segments()
