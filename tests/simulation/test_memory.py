"""The memory of simulated machines: fed by storages, at its limit, and beyond it."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from typing import Any

import pytest
import torch

import understudy
from understudy.simulation.allocator import Allocator
from understudy.simulation.catalogue import Card
from understudy.simulation.events import ACCOUNTING
from understudy.simulation.memory import DeviceMemory, MachineMemory, OnOOM, copy_without_limit
from understudy.simulation.storages import ObservedMode

MiB = 1 << 20
SMALL = Card("small", "a small card", "cuda", memory=100 * MiB, context=10 * MiB)


def observe(on_oom: OnOOM = "raise", settings: str = "") -> tuple[ObservedMode, MachineMemory]:
    mode, memory = ObservedMode(), MachineMemory(SMALL, 2, settings, on_oom)
    mode.add_listener(memory)
    return mode, memory


def test_each_device_has_its_own_memory() -> None:
    mode, memory = observe()
    with mode:
        a = torch.empty(MiB, device="cuda:0")
        b = torch.empty(3, device="cuda:1")
        c = torch.empty(5)
    first, second = memory.devices
    assert (first.capped.allocated, first.capped.reserved) == (4 * MiB, 20 * MiB)
    assert (second.capped.allocated, second.capped.reserved) == (512, 2 * MiB)
    assert (memory.host.allocated, memory.host.peak) == (20, 20)
    del a, b, c
    assert first.capped.allocated == second.capped.allocated == memory.host.allocated == 0
    assert first.memory_info() == ((100 - 10 - 20) * MiB, 100 * MiB)


def test_out_of_memory_is_raised_at_the_users_line() -> None:
    mode, memory = observe()
    with mode:
        x = torch.empty(15 * MiB, device="cuda")
        with pytest.raises(
            torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 60\.00 MiB"
        ) as caught:
            y = x * 2  # the line that is named
        assert "y = x * 2  # the line that is named" in str(caught.value)
        assert "test_memory.py" in str(caught.value)
        del caught
        gc.collect()
        assert memory.devices[0].capped.allocated == 60 * MiB
        del x
        y = torch.empty(20 * MiB, device="cuda")  # what was cached is released
        assert memory.devices[0].capped.reserved == 80 * MiB
        del y


def test_a_recorded_run_goes_on_without_a_limit() -> None:
    mode, memory = observe("record")
    device = memory.devices[0]
    with mode:
        x = torch.empty(15 * MiB, device="cuda")
        assert device.endless is None
        y = x * 2
        assert device.first_oom is not None and "y = x * 2" in device.first_oom.line
        assert device.first_oom.state.requested == 60 * MiB
        z = y * 2
        assert device.allocator.allocated == 180 * MiB
        assert device.memory_info()[0] == 0
        del x, y, z
        assert device.allocator.allocated == 0
    assert device.allocator.statistics()["reserved_bytes.all.peak"] == 180 * MiB


def test_both_allocators_from_the_first_release_to_the_first_oom() -> None:
    """A card that releases its cache and lives, where an endless one keeps it."""
    mode, memory = observe("record")
    device = memory.devices[0]
    with mode:
        keep = torch.empty(MiB, device="cuda")
        torch.empty(12 * MiB, device="cuda")
        large = torch.empty(15 * MiB, device="cuda")
        assert device.first_oom is None and device.endless is not None
        assert device.capped.reserved == 80 * MiB and device.endless.reserved == (20 + 48 + 60) * MiB
        assert device.capped.allocated == device.endless.allocated == 64 * MiB
        del keep, large
        assert device.capped.allocated == device.endless.allocated == 0
        assert device.allocator is device.capped


def test_a_copy_without_limit_does_the_same_until_the_limit() -> None:
    allocator = Allocator(100 * MiB)
    blocks = [allocator.allocate(size) for size in (5000, 3 * MiB, 700, 12 * MiB)]
    allocator.free(blocks[1])
    endless = copy_without_limit(allocator)
    for size in (2 * MiB, 900, MiB):
        assert endless.allocate(size) == allocator.allocate(size)
    assert endless.statistics() == allocator.statistics()
    assert endless.allocate(1000 * MiB) > 0


LARGER = Card("larger", "a larger card", "cuda", memory=1024 * MiB, context=10 * MiB)
SETTINGS = ["", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:2"]


@pytest.mark.parametrize("on_oom", ["raise", "record"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_requests_that_wait_end_as_those_that_are_served_at_once(settings: str, on_oom: OnOOM) -> None:
    def run(is_asked: bool) -> list[Any]:
        mode, memory = ObservedMode(), MachineMemory(LARGER, 1, settings, on_oom)
        mode.add_listener(memory)
        device, draw = memory.devices[0], random.Random(7)
        kept: list[torch.Tensor] = []
        seen: list[Any] = []
        waited = 0
        with mode:
            for number in range(600):
                try:
                    kept.append(torch.empty(draw.choice((3, 900, 300_000, 2 * MiB, 5 * MiB)), device="cuda"))
                    if number % 50 == 0:
                        kept[-1].untyped_storage().resize_(draw.randrange(1, MiB))
                        for record in [
                            mode.add_scratch(size, torch.device("cuda", 0), None) for size in (MiB, 30 * MiB)
                        ]:
                            mode.end_scratch(record)
                except torch.OutOfMemoryError:
                    seen.append(number)
                while kept and draw.random() < (0.2 if number < 400 else 0.55):
                    kept.pop(draw.randrange(len(kept)))
                if is_asked:
                    assert device.capped.reserved <= LARGER.memory
                waited = max(waited, len(mode.events.waiting))
        assert (waited > 10) is not is_asked
        place = None if device.first_oom is None else device.first_oom.state
        return [seen, place, *((each.statistics(), each.segments()) for each in device.allocators())]

    at_once = run(is_asked=True)
    assert run(is_asked=False) == at_once
    assert at_once[0] if on_oom == "raise" else at_once[1] is not None, "the card is never full"


def test_a_history_has_the_stack_of_each_event() -> None:
    mode, memory = ObservedMode(), MachineMemory(LARGER)
    mode.add_listener(memory)
    device = memory.devices[0]
    lines: list[str] = []
    with mode:
        before = torch.empty(MiB, device="cuda")
        device.capped.frames = lambda: [{"name": lines[-1]}]
        device.capped.record_history()
        lines.append("born")
        after = torch.empty(MiB, device="cuda")
        lines.append("first death")
        del before
        lines.append("second death")
        del after
        lines.append("asked")
    entries = [
        (entry["action"], entry["frames"][0]["name"])
        for entry in device.capped.snapshot()["device_traces"][0]
    ]
    assert [entry for entry in entries if entry[0] in ("alloc", "free_requested")] == [
        ("alloc", "born"), ("free_requested", "first death"), ("free_requested", "second death"),
    ]  # fmt: skip


def test_memory_beside_tensors() -> None:
    memory = DeviceMemory(SMALL)
    address = memory.allocate(32 * MiB)
    assert memory.capped.allocated == 32 * MiB
    memory.free(address)
    assert memory.capped.statistics()["allocated_bytes.all.peak"] == 32 * MiB


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_a_resized_storage_moves(settings: str) -> None:
    mode, memory = observe(settings=settings)
    with mode:
        x = torch.empty(MiB, device="cuda")
        x.untyped_storage().resize_(0)
        assert memory.devices[0].capped.allocated == 0
        x.untyped_storage().resize_(4 * MiB)
        assert memory.devices[0].capped.allocated == 4 * MiB


def test_a_process_that_is_forked_while_another_thread_accounts_for_memory() -> None:
    """It has the lock, and allocators that are in the middle of nothing."""
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        with ACCOUNTING:
            held.set()
            released.wait(0.2)

    with understudy.simulate("t4"):
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # ends it, if it hangs
            kept = torch.empty(1024, device="cuda")
            os._exit(0 if torch.cuda.memory_allocated() == kept.nbytes else 1)
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
