"""Events for listeners of an ObservedMode: records of memory, and the queue of births and deaths.

    record, twice ──► EventQueue ──► on_events of each listener, when somebody asks, or when there is no `room` for more

`storages` makes the records, and documents the order of events.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.simulation.allocator_parts import UNLIMITED
from understudy.spec import TensorSpec
from understudy.spec.call import Call, flat, map_structure

if TYPE_CHECKING:
    from understudy.simulation.storages import ObservedMode

AfterCall = Callable[[tuple[Any, ...], dict[str, Any], Any], None]
"""Called with the arguments and the result of a call."""
LEAST_REST = 1 << 25
MOST_EVENTS = 4096
"""About so many wait at most."""
WORKSPACES = "(workspaces of libraries)"
"""The owner of memory that a library keeps."""


NOWHERE = (None, None, None)


class StreamEvent(NamedTuple):
    """What a program does with streams and events of a card. `kind`: "select", "record", "wait", "host waits", or
    "synchronize" (of all streams where `stream` is negative)."""

    kind: str
    device: int
    stream: int
    event: int = 0
    """The identity of an event."""


ACCOUNTING = threading.RLock()
"""Held while listeners process births and deaths of storages, and while a program requests memory directly."""
if hasattr(
    os, "register_at_fork"
):  # a process that is forked while another thread holds it would wait for ever
    os.register_at_fork(
        before=ACCOUNTING.acquire, after_in_parent=ACCOUNTING.release, after_in_child=ACCOUNTING.release
    )


class CollectiveEvent(NamedTuple):
    """A collective of this process. `ranks`: of its group; of a message, its two ends. `is_functional`: a `wait_tensor`
    follows where its result is used. `number`: by which a `WaitEvent` refers to it. `peer`: the other end, or the root.
    `device`: the card whose tensors it takes, -1 for the host."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    nbytes: int
    is_async: bool
    is_functional: bool = False
    number: int = 0
    peer: int | None = None
    tag: int = 0
    device: int = 0


class WaitEvent(NamedTuple):
    """The program waits for a collective: `work.wait()`. The current stream of the card goes on after it."""

    number: int
    device: int = 0


class WithBirthplace:
    """`places` holds the moment, module and line once for all memory of one call."""

    __slots__ = ()

    birthplace: tuple[Any, Any, Any]

    @property
    def born(self) -> Any:
        return self.birthplace[0]

    @property
    def module(self) -> Any:
        return self.birthplace[1]

    @property
    def line(self) -> Any:
        return self.birthplace[2]


class StorageRecord(weakref.ref[torch.UntypedStorage], WithBirthplace):
    """A storage: its size, where it is, and the spec of the tensor that it was made for."""

    __slots__ = (
        "address", "birthplace", "call", "category", "device", "died", "is_updated", "key", "maker", "memory", "nbytes",
        "owner", "position", "serial", "spec", "stream", "totals",
    )  # fmt: skip

    key: int
    serial: int
    spec: TensorSpec
    nbytes: int
    device: torch.device
    """As the program sees it: cuda:0, cpu."""
    stream: int
    """The number of the stream on which it was made, 0 for the default one."""
    maker: Any
    """The operator that was running; None outside of operators."""
    call: int
    """The number of the call that was running."""
    position: int
    """How many calls had been finished since the listener that measures has last taken them."""

    # Fields of the listener that allocates.
    memory: Any
    address: int

    # Fields of the listener that measures.
    died: Any
    totals: Any
    """Totals of its device; None until its birth is reported."""
    category: str | None
    owner: str | None
    """The module whose parameter it is, or belongs to, if it is not the one that made it."""
    is_updated: bool
    """Whether it was written to in place where no gradients are recorded."""

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    def __repr__(self) -> str:
        return f"<storage {self.serial}: {self.nbytes} bytes for {self.spec}>"


class ScratchRecord(WithBirthplace):
    """Memory of a kernel, or of a library that keeps it: no tensor is on it. Fields as of StorageRecord."""

    __slots__ = (
        "address", "birthplace", "call", "category", "device", "died", "is_updated", "maker", "memory", "nbytes", "owner",
        "stream", "totals",
    )  # fmt: skip

    def __init__(
        self, nbytes: int, device: torch.device, stream: int, maker: object, call: int, owner: str | None
    ) -> None:
        self.nbytes, self.device, self.stream, self.maker, self.call = nbytes, device, stream, maker, call
        self.category: str | None = "scratch"
        self.owner = owner
        self.address = 0
        self.is_updated = False
        self.memory: Any = None
        self.totals: Any = None
        self.died: Any = None
        self.birthplace = NOWHERE


MemoryRecord = StorageRecord | ScratchRecord


class Listener:
    """The events that a listener can receive; methods that a class does not define cost nothing."""

    room = UNLIMITED
    """Bytes that may be born before events have to be reported: twice each size, plus `rest` for each birth.
    Negative: every event is reported at once."""
    rest = 0

    def on_added(self, mode: ObservedMode) -> None:
        """To the listeners of a mode."""

    def on_device(self, device: torch.device) -> None:
        """Before the first birth on it. May raise, then for each birth."""

    def on_birth(self, record: MemoryRecord) -> None:
        """Before it is one of the events."""

    def on_events(self, events: list[MemoryRecord]) -> BaseException | None: ...

    def before_operator(
        self, func: _torch.OpOverload, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> None: ...

    def after_operator(
        self, func: _torch.OpOverload, args: tuple[object, ...], kwargs: dict[str, Any], result: object
    ) -> None: ...

    def follow_plan(
        self, func: _torch.OpOverload, args: tuple[object, ...], kwargs: dict[str, Any], result: object
    ) -> AfterCall | None:
        """Return a function to call after this call and all equal ones (same operator, specs and numbers)."""

    def label_plan(
        self, func: _torch.OpOverload, args: tuple[object, ...], kwargs: dict[str, Any], result: object
    ) -> object | None:
        """Return the item to append to `finished` after this call and all equal ones. For the one listener that
        measures."""


def specs_of_call(func: Any, args: Any, kwargs: Any, result: object) -> tuple[Call, list[TensorSpec]]:
    """A call as formulas of operators see it, and the specs of its results."""
    args, kwargs = map_structure(lambda fake: fake._spec, FakeTensor, (tuple(args), kwargs))
    return Call.of(func, args, kwargs), [fake._spec for fake in flat(FakeTensor, (result,), {})]


class EventQueue:
    """Unreported births and deaths, in order. They come from several threads, and from finalizers inside of any
    call."""

    def __init__(self) -> None:
        self.waiting: list[MemoryRecord] = []
        self.room = -1
        """Bytes that may be born before the events are reported; negative: each is reported at once."""
        self.rest = LEAST_REST
        """What each birth takes of the room beside the double of its size."""
        self._is_notifying = False
        self._listeners: tuple[Listener, ...] = ()
        self._on_events: tuple[Callable[..., BaseException | None], ...] = ()

    def add_death(self, record: MemoryRecord) -> None:
        self.waiting.append(record)
        if self.room < 0:
            self.tell()

    def tell(self) -> None:
        if refusals := self.notify_listeners():
            raise refusals.pop(0)

    def notify_listeners(self) -> list[BaseException]:
        """Returns the errors of births that are refused. Who raises one takes it out of the list: a frame that referred to
        it would keep all frames of the program alive, and their tensors.

        A finalizer may come here in the middle of it: what it brings waits for its turn."""
        with ACCOUNTING:
            if self._is_notifying:
                return []
            self._is_notifying = True
            try:
                events = self.waiting[:]
                del self.waiting[: len(events)]
                return list(filter(None, [tell(events) for tell in self._on_events]))
            finally:
                self._is_notifying = False
                self.rest = max([LEAST_REST, *[listener.rest for listener in self._listeners]])
                self.room = min([MOST_EVENTS * self.rest, *[listener.room for listener in self._listeners]])

    def change_listeners(self, listeners: tuple[Listener, ...]) -> None:
        self.tell()
        self._listeners = listeners
        self._on_events = find_methods(listeners, "on_events")
        self.room = -1  # until they have been asked


def find_methods(listeners: tuple[Listener, ...], name: str) -> tuple[Callable[..., Any], ...]:
    """Those that the classes of the listeners define."""
    own = getattr(Listener, name)
    return tuple(getattr(found, name) for found in listeners if getattr(type(found), name) is not own)
