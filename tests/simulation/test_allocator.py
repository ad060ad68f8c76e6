"""The allocator against sequences worked out by hand from the rules."""

from __future__ import annotations

import subprocess
import sys

import pytest

from understudy.errors import UnderstudyError
from understudy.simulation.allocator import Allocator, AllocatorSettings, OutOfMemory
from understudy.simulation.allocator_parts import AllocatorSettingsError, GiB, KiB, MiB, format_bytes


def blocks_of(allocator: Allocator) -> list[list[tuple[int, str]]]:
    """For each segment: size and state of its blocks."""
    states = {"active_allocated": "used", "inactive": "free", "active_pending_free": "pending"}
    return [[(b["size"], states[b["state"]]) for b in segment["blocks"]] for segment in allocator.segments()]


# sizes


def test_no_bytes_allocate_nothing() -> None:
    allocator = Allocator()
    assert allocator.allocate(0) == 0
    allocator.free(0)
    assert allocator.segments() == []
    with pytest.raises(ValueError, match="got -4"):
        allocator.allocate(-4)


@pytest.mark.parametrize(
    ("requested", "block", "segment"),
    [
        (1, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (10 * MiB + 1, 10 * MiB + 512, 12 * MiB),
        (33_554_432, 33_554_432, 33_554_432),  # a cuBLAS workspace
        (164_626_432, 164_626_432, 165_675_008),  # the buffer of a torch.max: a rest of exactly 1 MiB ...
    ],
)
def test_sizes_of_blocks_and_segments(requested: int, block: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(requested)
    statistics = allocator.statistics()
    assert statistics["requested_bytes.all.current"] == requested
    assert statistics["reserved_bytes.all.current"] == segment
    rest = segment - block
    is_split = rest >= 512 if segment == 2 * MiB else rest > MiB
    assert statistics["allocated_bytes.all.current"] == (
        block if is_split else segment
    )  # ... is not split off


def test_a_large_rest_of_one_mebibyte_stays_with_its_block() -> None:
    allocator = Allocator()
    allocator.allocate(11 * MiB)
    assert blocks_of(allocator) == [[(12 * MiB, "used")]]
    allocator.allocate(11 * MiB - 512)
    assert blocks_of(allocator)[1] == [(11 * MiB - 512, "used"), (MiB + 512, "free")]


# the search


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = Allocator()
    sizes = (40 * MiB, 30 * MiB, 60 * MiB)
    addresses = [allocator.allocate(size) for size in sizes]
    for address in addresses:
        allocator.free(address)
    assert allocator.allocate(25 * MiB) == addresses[1]
    assert allocator.allocate(25 * MiB) == addresses[0]
    assert allocator.allocate(25 * MiB) == addresses[2]


def test_of_equal_blocks_the_one_of_the_older_segment_is_taken() -> None:
    allocator = Allocator()
    older, newer = allocator.allocate(32 * MiB), allocator.allocate(32 * MiB)
    allocator.free(newer)
    allocator.free(older)
    assert allocator.allocate(32 * MiB) == older
    assert allocator.allocate(32 * MiB) == newer


def test_pools_do_not_mix() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(40 * MiB))
    allocator.allocate(KiB)
    assert blocks_of(allocator) == [[(40 * MiB, "free")], [(KiB, "used"), (2 * MiB - KiB, "free")]]


def test_streams_do_not_mix() -> None:
    allocator = Allocator()
    first = allocator.allocate(40 * MiB, stream=0)
    allocator.free(first)
    assert allocator.allocate(40 * MiB, stream=5) != first
    assert allocator.allocate(40 * MiB, stream=0) == first


def test_neighbours_are_merged() -> None:
    allocator = Allocator()
    a, b, c = (allocator.allocate(4 * MiB) for _ in range(3))
    allocator.free(a)
    allocator.free(c)
    assert blocks_of(allocator) == [[(4 * MiB, "free"), (4 * MiB, "used"), (12 * MiB, "free")]]
    assert allocator.statistics()["inactive_split.all.current"] == 2
    allocator.free(b)
    assert blocks_of(allocator) == [[(20 * MiB, "free")]]
    assert allocator.statistics()["inactive_split.all.current"] == 0
    assert allocator.statistics()["inactive_split.all.peak"] == 2
    assert allocator.statistics()["inactive_split_bytes.all.peak"] == 16 * MiB


def test_a_wrong_address_is_refused() -> None:
    allocator = Allocator()
    address = allocator.allocate(100)
    allocator.free(address)
    with pytest.raises(ValueError, match="freed twice, or never allocated here"):
        allocator.free(address)
    with pytest.raises(ValueError, match="no block is allocated"):
        allocator.record_stream(address, 3)


# the limit


def test_what_is_wholly_free_is_released_for_a_retry() -> None:
    allocator = Allocator(100 * MiB)
    allocator.free(allocator.allocate(60 * MiB))
    kept = allocator.allocate(KiB)
    allocator.allocate(70 * MiB)
    statistics = allocator.statistics()
    assert statistics["num_alloc_retries"] == 1
    assert statistics["num_ooms"] == 0
    assert statistics["reserved_bytes.all.current"] == 72 * MiB
    assert statistics["reserved_bytes.all.peak"] == 72 * MiB
    assert statistics["segment.all.freed"] == 1
    assert (statistics["num_device_alloc"], statistics["num_device_free"]) == (3, 1)
    assert kept in [block["address"] for segment in allocator.segments() for block in segment["blocks"]]


def test_a_segment_in_use_is_not_released() -> None:
    allocator = Allocator(100 * MiB)
    big = allocator.allocate(60 * MiB)
    allocator.allocate(KiB)
    allocator.free(big)
    allocator.allocate(40 * MiB)  # splits the segment of 60 MiB
    with pytest.raises(OutOfMemory):
        allocator.allocate(50 * MiB)


def test_out_of_memory_has_its_facts_in_fields() -> None:
    allocator = Allocator(63 * MiB, outside=30 * MiB, device=2)
    allocator.allocate(11 * MiB)
    allocator.allocate(KiB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(3 * MiB)
    state = caught.value.state
    assert (state.device, state.requested, state.tried) == (2, 3 * MiB, 20 * MiB)
    assert (state.total, state.free, state.outside) == (63 * MiB, 19 * MiB, 30 * MiB)
    assert (state.allocated, state.reserved, state.allowed) == (12 * MiB + KiB, 14 * MiB, None)
    assert str(caught.value) == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 2 has 63.00 MiB in all, of which 19.00 MiB is free. This "
        "process uses 44.00 MiB: 12.00 MiB allocated by torch, 2.00 MiB reserved by torch but not allocated, and 30.00 MiB "
        "outside of the allocator."
    )


def test_an_out_of_memory_leaves_the_allocator_usable() -> None:
    allocator = Allocator(64 * MiB)
    address = allocator.allocate(40 * MiB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(50 * MiB)
    allocator.free(address)
    allocator.allocate(50 * MiB)
    assert allocator.statistics()["num_ooms"] == 1
    assert allocator.memory_info() == (14 * MiB, 64 * MiB)


def test_exactly_what_is_there_fits() -> None:
    allocator = Allocator(64 * MiB, outside=4 * MiB)
    allocator.allocate(60 * MiB)
    assert allocator.memory_info() == (0, 64 * MiB)


def test_a_memory_fraction_is_a_limit() -> None:
    allocator = Allocator(1000 * MiB)
    allocator.set_memory_fraction(0.05)
    allocator.allocate(50 * MiB)
    with pytest.raises(OutOfMemory, match=r"The allocator may reserve 50\.00 MiB"):
        allocator.allocate(1)
    with pytest.raises(ValueError, match="between 0 and 1, got"):
        allocator.set_memory_fraction(1.5)


def test_a_device_without_a_limit_has_room_for_all() -> None:
    allocator = Allocator()
    for _ in range(100):
        allocator.allocate(100 * GiB)
    assert allocator.reserved == 10_000 * GiB
    with pytest.raises(ValueError, match="no total"):
        allocator.memory_info()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (20 * MiB, "20.00 MiB"),
        (GiB, "1024.00 MiB"),
        (3 * GiB, "3.00 GiB"),
    ],
)
def test_sizes_as_text(size: int, text: str) -> None:
    assert format_bytes(size) == text


# streams


def test_a_block_that_another_stream_uses_is_free_when_that_is_done() -> None:
    allocator = Allocator(lazy_events=True)
    address = allocator.allocate(40 * MiB)
    allocator.record_stream(address, 3)
    allocator.free(address)
    statistics = allocator.statistics()
    assert statistics["allocated_bytes.all.current"] == 0
    assert statistics["active_bytes.all.current"] == statistics["requested_bytes.all.current"] == 40 * MiB
    assert allocator.allocate(40 * MiB) != address
    assert allocator.statistics()["active_bytes.all.peak"] == 80 * MiB
    assert allocator.statistics()["allocated_bytes.all.peak"] == 40 * MiB
    allocator.synchronize(stream=4)
    assert blocks_of(allocator)[0] == [(40 * MiB, "pending")]
    allocator.synchronize(stream=3)
    assert allocator.allocate(40 * MiB) == address


def test_events_are_taken_as_finished_at_the_next_request() -> None:
    allocator = Allocator()
    address = allocator.allocate(40 * MiB)
    allocator.record_stream(address, 3)
    allocator.free(address)
    assert blocks_of(allocator) == [[(40 * MiB, "pending")]]
    assert allocator.allocate(40 * MiB) == address


def test_at_the_limit_streams_are_waited_for() -> None:
    allocator = Allocator(60 * MiB, lazy_events=True)
    address = allocator.allocate(40 * MiB)
    allocator.record_stream(address, 3)
    allocator.free(address)
    allocator.allocate(50 * MiB)
    assert allocator.statistics()["num_sync_all_streams"] == 1


# expandable segments


def test_an_expandable_segment_grows_by_pages() -> None:
    allocator = Allocator(GiB, settings="expandable_segments:True")
    first = allocator.allocate(3 * MiB)
    assert allocator.reserved == 20 * MiB
    second = allocator.allocate(30 * MiB)
    assert second == first + 3 * MiB  # the 17 MiB that are free, and one page more
    assert allocator.reserved == 40 * MiB
    assert blocks_of(allocator) == [[(3 * MiB, "used"), (30 * MiB, "used"), (7 * MiB, "free")]]
    allocator.allocate(100)
    assert allocator.reserved == 42 * MiB
    statistics = allocator.statistics()
    assert statistics["segment.all.current"] == statistics["inactive_split.all.current"] == 0
    assert statistics["num_device_alloc"] == 3


def test_free_pages_inside_of_an_expandable_segment_are_returned_and_filled_again() -> None:
    allocator = Allocator(GiB, settings="expandable_segments:True")
    a, b, c = (allocator.allocate(50 * MiB) for _ in range(3))
    assert allocator.reserved == 160 * MiB
    allocator.free(b)  # from 50 to 100 MiB: the pages from 60 to 100
    allocator.empty_cache()
    assert allocator.reserved == 120 * MiB
    assert [segment["address"] - a for segment in allocator.segments()] == [0, 100 * MiB]
    assert allocator.allocate(45 * MiB) == b
    assert allocator.reserved == 160 * MiB
    assert a < b < c


def test_a_block_at_the_growing_end_is_taken_last() -> None:
    allocator = Allocator(GiB, settings="expandable_segments:True")
    a = allocator.allocate(6 * MiB)
    allocator.allocate(30 * MiB)  # 4 MiB are left at the end
    allocator.free(a)
    assert allocator.allocate(3 * MiB) == a  # not in the 4 MiB, though they fit better


def test_an_expandable_segment_without_a_limit_has_room_for_all() -> None:
    allocator = Allocator(settings="expandable_segments:True")
    allocator.allocate(20_000 * GiB)
    allocator.allocate(MiB * 3)
    assert allocator.allocated == 20_000 * GiB + 3 * MiB


def test_fragmentation_that_expandable_segments_avoid() -> None:
    def run(settings: str) -> int:
        allocator = Allocator(200 * MiB, settings=settings)
        kept = []
        for _ in range(4):
            big = allocator.allocate(40 * MiB)
            kept.append(allocator.allocate(KiB))
            allocator.free(big)
        kept += [allocator.allocate(size * MiB) for size in (41, 42, 43, 44)]
        return allocator.reserved

    assert run("expandable_segments:True") == 182 * MiB
    assert run("") == 174 * MiB  # with a retry: the segment of 40 MiB had to be released


# settings


def test_settings_are_parsed() -> None:
    settings = AllocatorSettings.parse(
        " max_split_size_mb : 128, garbage_collection_threshold:0.8,expandable_segments:True,backend:native,"
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],large_segment_size_mb:40,pinned_use_background_threads:True"
    )
    assert settings.max_split_size == 128 * MiB
    assert settings.garbage_collection_threshold == 0.8
    assert settings.expandable_segments
    assert (
        settings.roundup_divisions == (1,) * 9 + (2,) + (8,) * 6
    )  # ">" begins at the last size, as in torch
    assert settings.large_segment_size == 40 * MiB
    assert settings.ignored == ("backend", "pinned_use_background_threads")
    assert AllocatorSettings.parse("") == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:10", "max_split_size_mb: expected at least 20, got 10"),
        ("max_split_size_mb:many", "max_split_size_mb: expected a whole number of MiB, got 'many'"),
        (
            "garbage_collection_threshold:1.5",
            "garbage_collection_threshold: expected a number between 0 and 1, got '1.5'",
        ),
        ("expandable_segments:yes", "expandable_segments: expected True or False, got 'yes'"),
        ("expandable_segment:True", "no option 'expandable_segment'; did you mean 'expandable_segments'?"),
        ("xyz:1", "no option 'xyz' (choose from expandable_segments, garbage_collection_threshold"),
        ("expandable_segments", "expected name:value, separated by commas, got 'expandable_segments'"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions: expected powers of two, got '3'"),
        ("roundup_power2_divisions:[256:4", "has no closing bracket"),
        ("backend:cudaMallocAsync", "expected backend:native (no other is simulated), got 'cudaMallocAsync'"),
    ],
)
def test_wrong_settings_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(AllocatorSettingsError) as caught:
        Allocator(settings=text)
    assert message in str(caught.value)
    assert isinstance(caught.value, UnderstudyError)


@pytest.mark.parametrize(
    ("size", "rounded"), [(1200, 1536), (2049, 2560), (5000, 5120), (MiB + 1, MiB + MiB // 4), (100, 512)]
)
def test_rounding_to_parts_of_powers_of_two(size: int, rounded: int) -> None:
    allocator = Allocator(settings="roundup_power2_divisions:4")
    allocator.allocate(size)
    assert blocks_of(allocator)[0][0] == (rounded, "used")


def test_oversize_blocks_are_not_split_and_are_released_first() -> None:
    allocator = Allocator(200 * MiB, settings="max_split_size_mb:32")
    big = allocator.allocate(100 * MiB)
    assert allocator.statistics()["oversize_allocations.current"] == 1
    allocator.free(big)
    assert allocator.allocate(60 * MiB) != big  # more than 20 MiB larger than the request
    assert allocator.statistics()["oversize_segments.peak"] == 2
    allocator.allocate(90 * MiB)  # takes the block of 100 MiB whole
    assert allocator.statistics()["allocated_bytes.all.current"] == 160 * MiB
    small = allocator.allocate(30 * MiB)
    allocator.free(small)
    with pytest.raises(OutOfMemory):
        allocator.allocate(50 * MiB)


def test_one_oversize_segment_makes_room_without_a_retry() -> None:
    allocator = Allocator(200 * MiB, settings="max_split_size_mb:32")
    allocator.free(allocator.allocate(150 * MiB))
    allocator.free(allocator.allocate(24 * MiB))
    allocator.allocate(60 * MiB)
    assert allocator.statistics()["num_alloc_retries"] == 0
    assert blocks_of(allocator) == [[(24 * MiB, "free")], [(60 * MiB, "used")]]


def test_garbage_collection_releases_what_is_old() -> None:
    allocator = Allocator(1000 * MiB, settings="garbage_collection_threshold:0.2")
    allocator.set_memory_fraction(1.0)
    old, young = allocator.allocate(100 * MiB), allocator.allocate(150 * MiB)
    allocator.free(old)
    for _ in range(10):
        allocator.free(allocator.allocate(12 * MiB))  # splits and merges the older one
    allocator.free(young)
    allocator.allocate(300 * MiB)
    assert allocator.statistics()["num_alloc_retries"] == 0
    assert allocator.statistics()["num_device_free"] >= 1


# counters


def test_counters_can_be_reset() -> None:
    allocator = Allocator()
    address = allocator.allocate(40 * MiB)
    allocator.allocate(KiB)
    allocator.free(address)
    allocator.reset_peak_statistics()
    allocator.reset_accumulated_statistics()
    statistics = allocator.statistics()
    assert statistics["allocated_bytes.all.peak"] == statistics["allocated_bytes.all.current"] == KiB
    assert statistics["allocated_bytes.all.allocated"] == statistics["allocated_bytes.all.freed"] == 0
    assert statistics["num_device_alloc"] == 0
    allocator.allocate(3 * KiB)
    statistics = allocator.statistics()
    assert statistics["allocated_bytes.all.allocated"] == 3 * KiB
    assert statistics["allocated_bytes.small_pool.peak"] == 4 * KiB
    assert statistics["allocated_bytes.large_pool.peak"] == 0


def test_the_peak_of_both_pools_is_not_the_sum_of_their_peaks() -> None:
    allocator = Allocator()
    allocator.free(allocator.allocate(MiB))
    allocator.free(allocator.allocate(40 * MiB))
    statistics = allocator.statistics()
    assert statistics["allocated_bytes.all.peak"] == 40 * MiB


def test_statistics_have_the_names_of_torch() -> None:
    names = set(Allocator().statistics())
    assert len(names) == 9 * 3 * 4 + 2 * 4 + 6
    assert {
        "active.all.current",
        "inactive_split_bytes.small_pool.freed",
        "oversize_segments.peak",
        "num_ooms",
    } <= names


# history and snapshots


def test_the_history_has_the_actions_in_their_order() -> None:
    stack = [{"filename": "train.py", "line": 88, "name": "step"}]
    allocator = Allocator(64 * MiB, frames=lambda: stack)
    allocator.record_history()
    address = allocator.allocate(100)
    allocator.free(address)
    with pytest.raises(OutOfMemory):
        allocator.allocate(100 * MiB)
    snapshot = allocator.snapshot()
    trace = snapshot["device_traces"][0]
    assert [entry["action"] for entry in trace] == [
        "segment_alloc", "alloc", "free_requested", "free_completed", "segment_free", "oom", "snapshot",
    ]  # fmt: skip
    assert trace[1] | {"time_us": 0} == {
        "action": "alloc", "addr": address, "size": 100, "stream": 0, "frames": stack, "time_us": 0,
        "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0),
    }  # fmt: skip
    assert trace[5]["device_free"] == 64 * MiB
    assert "addr" not in trace[5]
    assert [entry["time_us"] for entry in trace] == sorted(entry["time_us"] for entry in trace)


def test_a_snapshot_has_the_keys_of_torch() -> None:
    allocator = Allocator(GiB, device=1, frames=lambda: [{"name": "f"}])
    allocator.record_history(max_entries=2)
    address = allocator.allocate(3 * MiB)
    snapshot = allocator.snapshot()
    assert set(snapshot) == {"segments", "device_traces", "allocator_settings", "external_annotations"}
    assert [len(trace) for trace in snapshot["device_traces"]] == [0, 2]
    assert snapshot["segments"] == [
        {
            "device": 1, "address": address, "total_size": 20 * MiB, "allocated_size": 3 * MiB, "active_size": 3 * MiB,
            "requested_size": 3 * MiB, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [],
            "blocks": [
                {"address": address, "size": 3 * MiB, "requested_size": 3 * MiB, "state": "active_allocated", "frames": [{"name": "f"}]},
                {"address": address + 3 * MiB, "size": 17 * MiB, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }
    ]  # fmt: skip


def test_expandable_segments_are_mapped_and_unmapped_in_the_history() -> None:
    allocator = Allocator(GiB, settings="expandable_segments:True")
    allocator.record_history()
    allocator.free(allocator.allocate(30 * MiB))
    allocator.empty_cache()
    assert allocator.history is not None
    entries = [(entry["action"], entry["size"]) for entry in allocator.history.entries]
    assert entries[0] == ("segment_map", 40 * MiB)
    assert entries[-1] == ("segment_unmap", 40 * MiB)
    assert allocator.segments() == []


def test_a_history_replayed_gives_the_same_addresses() -> None:
    first = Allocator(GiB)
    first.record_history()
    live = []
    for number in range(200):
        live.append(first.allocate(1 + number * 7919 % 5 * MiB * (number % 3)))
        if number % 2:
            first.free(live.pop(number * 31 % len(live)))
    assert first.history is not None
    second = Allocator(GiB)
    for entry in first.history.entries:
        if entry["action"] == "alloc":
            assert second.allocate(entry["size"]) == entry["addr"]
        elif entry["action"] == "free_requested":
            second.free(entry["addr"])


def test_torch_is_not_imported() -> None:
    code = "import sys, understudy.simulation.allocator, understudy.simulation.catalogue; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
