"""Memory of simulated machines: listeners that give each storage an address, and the out-of-memory error.

    memory = MachineMemory(card, count=8)     # one allocator for each cuda device, a counter for the CPU
    mode.add_listener(memory)
    memory.devices[0].allocated, memory.devices[0].allocator.statistics(), memory.host.peak

At the limit of a card, `on_oom="raise"` raises torch.OutOfMemoryError, with the user's line, where the card would.
`on_oom="record"` keeps the first one as `first_oom` and goes on without a limit, which shows how much would be
needed:

    one capped allocator ──► first time that it has to release what is cached: from here on a second one without limit ──►
        first OOM: the capped one is at its end, the endless one goes on

Up to that moment both would do the same, so there is only one.

The allocator is not asked while a program is far from the limit. Births and deaths wait among the events of the mode, and
are served in their order, when somebody wants to know something, or when they could run out of memory, whatever the order
of blocks is: a birth that the card refuses is refused at once. So `DeviceMemory.allocator` is asked for anew by whoever
wants to know more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from understudy.lines import user_line
from understudy.simulation.allocator import Allocator, AllocatorSettings, OutOfMemory
from understudy.simulation.allocator_parts import UNLIMITED, MemoryState, MiB
from understudy.simulation.catalogue import Card
from understudy.simulation.events import ACCOUNTING, EventQueue, Listener, MemoryRecord, StorageRecord
from understudy.simulation.storages import ObservedMode

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
        self._capped = Allocator(card.memory, outside=outside, settings=settings, device=index)
        self._endless: Allocator | None = None
        self._first_oom: FirstOOM | None = None
        self.last_raised: FirstOOM | None = None
        """With `on_oom="raise"`: where the program was refused last."""
        self.find_place: Callable[[], tuple[int, str, str]] = lambda: (0, "", "")
        """For the listener that measures: step, phase and module."""
        self._endless_addresses: dict[int, int] = {}
        """Addresses in the unlimited allocator of blocks that it holds at another address than the limited one."""
        self.events = EventQueue()
        """Those of the mode, if there is one."""
        self.give_back: Callable[[int], None] = self._capped.free
        """Frees the block at an address."""
        if on_oom == "record":
            self._capped.before_release = self._copy_endless

    @property
    def room(self) -> int:
        """Bytes that may be reserved without running out of memory, when nothing waits."""
        capped = self._capped
        if any(allocator.history is not None for allocator in (capped, self._endless or capped)):
            return -1  # it asks for the stack at each event
        if self._first_oom is not None or capped.total is None:
            return UNLIMITED
        limit = capped.total - capped.outside
        return min(limit, limit if capped.allowed is None else capped.allowed) - capped.reserved

    @property
    def rest(self) -> int:
        """What a request may reserve at most, beyond the double of its size."""
        return self._capped.settings.large_segment_size + 4 * MiB

    # --- the allocators ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Called before an allocator is handed out, because the caller may change it: the next event computes its room
        again."""
        self.events.tell()
        self.events.room = -1

    @property
    def capped(self) -> Allocator:
        self._settle()
        return self._capped

    @property
    def endless(self) -> Allocator | None:
        self._settle()
        return self._endless

    @property
    def first_oom(self) -> FirstOOM | None:
        self.events.tell()
        return self._first_oom

    @property
    def allocator(self) -> Allocator:
        """The allocator whose figures the program and the report get: the limited one, until it runs out of
        memory."""
        self._settle()
        return self._capped if self._first_oom is None or self._endless is None else self._endless

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """The address of a block, at once. Negative where only the endless allocator has it."""
        with ACCOUNTING:
            self._settle()
            return self.take(nbytes, stream)

    def free(self, address: int) -> None:
        with ACCOUNTING:
            self._settle()
            self.give_back(address)

    def take(self, nbytes: int, stream: int) -> int:
        if self._endless is not None and self._first_oom is not None:
            return -self._endless.allocate(nbytes, stream)
        try:
            address = self._capped.allocate(nbytes, stream)
        except OutOfMemory as error:
            return self._continue_after_oom(error, nbytes, stream)
        if self._endless is not None:
            self._endless_addresses[address] = self._endless.allocate(nbytes, stream)
        return address

    def serve(self, records: Iterator[Any], device: torch.device) -> Any:
        """Take and give back memory for records on this device. Returns the first one that is left to the caller."""
        return next(records, None) if self._endless is not None else self._capped.serve(records, self, device)

    def _free_twice(self, address: int) -> None:
        """Once there is an endless allocator."""
        assert self._endless is not None
        if address < 0:
            self._endless.free(-address)
            return
        if self._first_oom is None:
            self._capped.free(address)
        self._endless.free(self._endless_addresses.pop(address, address))

    def record_stream(self, storage: StorageRecord, stream: int) -> None:
        with ACCOUNTING:
            self._settle()
            address = storage.address
            if address > 0 and (self._first_oom is None or self._endless is None):
                self._capped.record_stream(address, stream)
            if address and self._endless is not None:
                self._endless.record_stream(self._endless_addresses.get(address, abs(address)), stream)

    def _copy_endless(self) -> None:
        """Copy the capped allocator before it releases its cache; the copy without a limit never has to."""
        if self._endless is None:
            self._endless = copy_without_limit(self._capped)
            self.give_back = self._free_twice

    def _continue_after_oom(self, error: OutOfMemory, nbytes: int, stream: int) -> int:
        line = user_line()
        if self.on_oom == "raise" or self._endless is None:
            self.last_raised = FirstOOM(error.state, line, self.find_place())
            at = f"\n  at:      {line}" if line else ""
            raise torch.OutOfMemoryError(f"{error}{at}") from None
        if self._first_oom is None:
            self._first_oom = FirstOOM(error.state, line, self.find_place())
        return -self._endless.allocate(nbytes, stream)

    # --- what programs ask ---------------------------------------------------------------------------------

    def allocators(self) -> tuple[Allocator, ...]:
        self._settle()
        return (self._capped,) if self._endless is None else (self._capped, self._endless)

    def memory_info(self) -> tuple[int, int]:
        """Return free and total memory, as `torch.cuda.mem_get_info`."""
        total, outside = self.card.memory, self._capped.outside
        return max(0, total - outside - self.allocator.reserved), total

    def empty_cache(self) -> None:
        with ACCOUNTING:
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
        self.events = EventQueue()
        """Those of the mode, if there is one."""
        self._allocated = 0
        self._peak = 0

    @property
    def allocated(self) -> int:
        self.events.tell()
        return self._allocated

    @property
    def peak(self) -> int:
        self.events.tell()
        return self._peak

    def allocate(self, nbytes: int) -> None:
        """At once; of a negative number, to free."""
        self.events.tell()
        self.take(nbytes)

    def take(self, nbytes: int, stream: int = 0) -> int:
        """In place of an address, the number of bytes."""
        self._allocated += nbytes
        if self._allocated > self._peak:
            self._peak = self._allocated
        return nbytes

    def give_back(self, nbytes: int) -> None:
        self._allocated -= nbytes

    def serve(self, records: Iterator[Any], device: torch.device) -> Any:
        """One at a time."""
        return next(records, None)


class MachineMemory(Listener):
    """The memory of a machine with some cards of one kind, or with none: a listener of an ObservedMode."""

    def __init__(
        self, card: Card | None = None, count: int = 1, settings: AllocatorSettings | str = "",
        on_oom: OnOOM = "raise", context: int | None = None,
    ) -> None:  # fmt: skip
        indices = range(count) if card is not None and card.kind != "cpu" else ()
        self.devices = [DeviceMemory(card, i, settings, on_oom, context) for i in indices if card is not None]
        self.host = HostMemory()
        self._by_device: dict[torch.device, DeviceMemory | HostMemory] = {
            torch.device("cuda", memory.index): memory for memory in self.devices
        }
        self._by_device[torch.device("cpu")] = self.host

    def on_added(self, mode: ObservedMode) -> None:
        self.host.events = mode.events
        for memory in self.devices:
            memory.events = mode.events

    @property
    def room(self) -> int:  # type: ignore[override]
        return min([UNLIMITED, *[memory.room for memory in self.devices]])

    @property
    def rest(self) -> int:  # type: ignore[override]
        return max([0, *[memory.rest for memory in self.devices]])

    def on_device(self, device: torch.device) -> None:
        if device not in self._by_device:
            self.check_device(device)

    def check_device(self, device: torch.device) -> None:
        """Asked for devices that have no memory here."""

    def on_events(self, events: list[MemoryRecord]) -> BaseException | None:
        refused: list[MemoryRecord] = []
        refusal: BaseException | None = None
        waiting = iter(events)
        record = next(waiting, None)
        while record is not None:
            memory = record.memory
            if memory is not None:
                if record.address:
                    memory.give_back(record.address)
            elif (memory := self._by_device.get(record.device)) is not None:
                record.memory = memory
                try:
                    record.address = memory.take(record.nbytes, record.stream)
                except torch.OutOfMemoryError as error:
                    # Its frames refer to this one, which refers to it, and so the frames of the program would live on.
                    refusal = error.with_traceback(None)
                    refusal.__context__ = None
                    refused.append(record)
            # What follows is mostly of the same device.
            record = next(waiting, None) if memory is None else memory.serve(waiting, record.device)
        if refused:
            events[:] = [record for record in events if not any(record is other for other in refused)]
        return refusal
