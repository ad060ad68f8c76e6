"""Memory of simulated machines: listeners that give each storage an address, and the error where there is none left.

    memory = MachineMemory(card, count=8)     # one allocator for each cuda device, a counter for the CPU
    mode.add_listener(memory)
    memory.devices[0].allocated, memory.devices[0].allocator.statistics(), memory.host.peak

At the limit of a card, `on_oom="raise"` raises torch.OutOfMemoryError, with the user's line, where the card would.
`on_oom="record"` keeps the first one as `first_oom` and goes on without a limit, which tells how much would be needed:

    one capped allocator ──► first time that it has to release what is cached: from here on a second one without limit ──►
        first OOM: the capped one is at its end, the endless one goes on

Up to that moment both would do the same, so there is only one.

Memory that is no tensor's (workspaces, scratch memory of an operator) is asked for by `DeviceMemory.allocate` and `free`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from understudy.lines import user_line
from understudy.simulation.allocator import Allocator, AllocatorSettings, OutOfMemory
from understudy.simulation.allocator_parts import MemoryState
from understudy.simulation.catalogue import Card
from understudy.simulation.storages import Listener, StorageRecord

OnOOM = Literal["raise", "record"]


@dataclass(frozen=True, slots=True)
class FirstOOM:
    """Where a card had no more memory: the state of its allocator, the user's line; step, phase and module."""

    state: MemoryState
    line: str
    place: tuple[int, str, str] = (0, "", "")


class DeviceMemory:
    """The memory of one simulated card. Calls may come from several threads, and from finalizers inside of a call.

    `capped` has the card's capacity; `endless`, made when it is first needed, has no limit.
    """

    def __init__(
        self, card: Card, index: int = 0, settings: AllocatorSettings | str = "", on_oom: OnOOM = "raise",
        context: int | None = None,
    ) -> None:  # fmt: skip
        self.card = card
        self.index = index
        self.on_oom = on_oom
        outside = card.outside if context is None else context
        self.capped = Allocator(card.memory, outside=outside, settings=settings, device=index)
        self.endless: Allocator | None = None
        self.first_oom: FirstOOM | None = None
        self.find_place: Callable[[], tuple[int, str, str]] = lambda: (0, "", "")
        """For the listener that measures: step, phase and module."""
        self._endless_addresses: dict[int, int] = {}
        """Of blocks that both allocators have, where the endless one has them elsewhere."""
        self._lock = threading.RLock()
        if on_oom == "record":
            self.capped.before_release = self._part_ways

    @property
    def allocator(self) -> Allocator:
        """The one whose figures the program and the report are told: the capped one, until it is at its end."""
        return self.capped if self.first_oom is None or self.endless is None else self.endless

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """The address of a block. Negative where only the endless allocator has it."""
        with self._lock:
            if self.first_oom is not None and self.endless is not None:
                return -self.endless.allocate(nbytes, stream)
            try:
                address = self.capped.allocate(nbytes, stream)
            except OutOfMemory as error:
                return self._go_on(error, nbytes, stream)
            if self.endless is not None:
                self._endless_addresses[address] = self.endless.allocate(nbytes, stream)
            return address

    def free(self, address: int) -> None:
        with self._lock:
            if address < 0:
                if self.endless is not None:
                    self.endless.free(-address)
                return
            if self.first_oom is None or self.endless is None:
                self.capped.free(address)
            if self.endless is not None:
                self.endless.free(self._endless_addresses.pop(address, address))

    def record_stream(self, address: int, stream: int) -> None:
        with self._lock:
            if address >= 0 and (self.first_oom is None or self.endless is None):
                self.capped.record_stream(address, stream)
            if self.endless is not None:
                self.endless.record_stream(self._endless_addresses.get(address, abs(address)), stream)

    def _part_ways(self) -> None:
        """The capped allocator is about to release what is cached, which the endless one never has to."""
        if self.endless is None:
            self.endless = copy_without_limit(self.capped)

    def _go_on(self, error: OutOfMemory, nbytes: int, stream: int) -> int:
        line = user_line()
        if self.on_oom == "raise" or self.endless is None:
            at = f"\n  at:      {line}" if line else ""
            raise torch.OutOfMemoryError(f"{error}{at}") from None
        if self.first_oom is None:
            self.first_oom = FirstOOM(error.state, line, self.find_place())
        return -self.endless.allocate(nbytes, stream)

    # --- what programs ask ---------------------------------------------------------------------------------

    def allocators(self) -> tuple[Allocator, ...]:
        return (self.capped,) if self.endless is None else (self.capped, self.endless)

    def memory_info(self) -> tuple[int, int]:
        """As `torch.cuda.mem_get_info`: what is free, and the total."""
        total, outside = self.card.memory, self.capped.outside
        return max(0, total - outside - self.allocator.reserved), total

    def empty_cache(self) -> None:
        with self._lock:
            for allocator in self.allocators():
                allocator.empty_cache()


def copy_without_limit(allocator: Allocator) -> Allocator:
    """The same blocks and figures, and no limit from here on. It may be in the middle of a request."""
    shared = (allocator.frames, allocator.clock, allocator.before_release)
    memo: dict[int, Any] = {id(part): part for part in shared}
    endless: Allocator = copy.deepcopy(allocator, memo)
    endless.before_release = None
    endless.remove_limits()
    return endless


class HostMemory:
    """The memory of the CPU: no rounding, no cache."""

    def __init__(self) -> None:
        self.allocated = 0
        self.peak = 0

    def allocate(self, nbytes: int) -> None:
        self.allocated += nbytes
        if self.allocated > self.peak:
            self.peak = self.allocated

    def free(self, nbytes: int) -> None:
        self.allocated -= nbytes


class MachineMemory(Listener):
    """The memory of a machine with some cards of one kind, or with none: a listener of an ObservedMode."""

    def __init__(
        self, card: Card | None = None, count: int = 1, settings: AllocatorSettings | str = "",
        on_oom: OnOOM = "raise", context: int | None = None,
    ) -> None:  # fmt: skip
        indices = range(count) if card is not None and card.kind != "cpu" else ()
        self.devices = [DeviceMemory(card, i, settings, on_oom, context) for i in indices if card is not None]
        self.host = HostMemory()
        self._by_device = {torch.device("cuda", memory.index): memory for memory in self.devices}

    def on_birth(self, storage: StorageRecord) -> None:
        memory = self._by_device.get(storage.device)
        if memory is not None:
            if storage.nbytes:
                storage.address = memory.allocate(storage.nbytes, storage.stream)
        elif storage.device.type == "cpu":
            self.host.allocate(storage.nbytes)
        else:
            self.check_device(storage.device)

    def check_device(self, device: torch.device) -> None:
        """Asked for devices that have no memory here."""

    def on_death(self, storage: StorageRecord) -> None:
        memory = self._by_device.get(storage.device)
        if memory is not None:
            if storage.address:
                memory.free(storage.address)
        elif storage.device.type == "cpu":
            self.host.free(storage.nbytes)

    def on_resize(self, storage: StorageRecord, before: int) -> None:
        """A new block, into which the contents are copied; then the old one is freed."""
        memory = self._by_device.get(storage.device)
        if memory is not None:
            old, storage.address = storage.address, 0
            if storage.nbytes:
                storage.address = memory.allocate(storage.nbytes, storage.stream)
            if old:
                memory.free(old)
        elif storage.device.type == "cpu":
            self.host.allocate(storage.nbytes)
            self.host.free(before)
