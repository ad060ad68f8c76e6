"""Every storage of a program, from birth to death, and every operator: a mode that notifies listeners.

    class Largest(Listener):
        nbytes = 0

        def on_birth(self, record: MemoryRecord) -> None:
            self.nbytes = max(self.nbytes, record.nbytes)

    mode = ObservedMode()
    mode.add_listener(largest := Largest())
    with mode:
        torch.nn.Linear(1000, 1000)(torch.empty(8, 1000))

The events of one operator call, in order:

    before_operator(func, args, kwargs)
      on_birth(record)                   of each storage that the call makes
    after_operator(func, args, kwargs, result), and what `follow_plan` has given for calls like this one

    on_events(records)                   births and deaths since the last time, in order

- A *storage* is what memory is allocated for. Views, aliases, `detach`, wrappers (DTensor, Parameter) share that of
  another tensor and cause no event. A storage of 0 bytes does: it may be resized.
- A `StorageRecord` keeps nothing alive: it is a weak reference to the storage. Its `serial` counts births. It stays usable
  after the death, and is all that is known of a storage: who allocates and who measures write to fields of their own.
- *Events* are births and deaths: the record comes once when it is born, and once more when it has died. They wait until
  `report_events` is called, or until a listener has no `room` for more. A storage dies when the last tensor on
  it is gone: at any time, in any thread, inside of any call; that is only written down, and listeners go through many
  events in one loop.
- A storage that is resized gets a new record, whose birth comes before the death of the old one: the contents are copied.
- Memory of kernels and libraries, which no tensor is on, is born and dies in the same list: `add_scratch`, `end_scratch`.
- Where kernels ask for their results in another order, or after scratch memory (`has_other_order`), births come last.
- Births outside of operators (conversions of real tensors, copies, loaded checkpoints) come without an operator around them.
- Work of the inference causes no events: stand-ins inside a decomposition, the global tensors on which DTensor
  computes the sharding of its results. So the first and second run of a program report the same events.
- A composite operator that arrives undecomposed, as in inference mode or from a jagged tensor, is decomposed: its
  parts are reported.
- `on_birth` and `before_operator` may raise. `on_events` may take births that it refuses out of the list, and return an
  error (out of memory) that is raised after all listeners got the rest: the operator's caller gets it, and the
  storage was not born. `after_operator` is not called for an operator that raised.
- Listeners are called in the order in which they were added, a method only if the listener's class defines it. They may
  not call operators on tensors.

What depends on operator and specs alone (FLOPs, workspaces) is found once for each plan of the cache, at its first call.
What `follow_plan` gives is called after each call of the plan. What `label_plan` gives is added to `finished`, so that calls
that are alike can be counted later, all at once. None costs nothing.

Cost, beside that of the listeners: about 0.6 µs for an operator, 2 µs for a storage.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.inputs import has_own_dispatch
from understudy.fake.mode import FakeTensorMode
from understudy.fake.tensor import FakeTensor
from understudy.infer.cache import UnusualArgument
from understudy.infer.plan import FIRST_ITSELF, ONE_NEW, Plan
from understudy.ops.registry import record_of
from understudy.ops.traits.scratch import has_other_order, put_in_order
from understudy.patching import OBSERVATION, combine, patch
from understudy.simulation.events import (
    AfterCall,
    CollectiveEvent,
    EventQueue,
    Listener,
    MemoryRecord,
    ScratchRecord,
    StorageRecord,
    StreamEvent,
    WaitEvent,
    find_methods,
)
from understudy.simulation.plain_writes import IN_PLACE, PlainWrites
from understudy.spec.call import NUMBER_TYPES, Call, flat_exact
from understudy.spec.sparse import count_bytes

native_storage = _torch.native_storage
dispatch = FakeTensorMode.__torch_dispatch__
META = torch.device("meta")
STAND_INS = (FakeTensor,)
"""The types of tensors in nearly every call."""
get_ident = threading.get_ident
NO_KEYWORDS: dict[str, Any] = {}
MOST_PLANS = 1 << 16
"""A number that changes all the time makes new plans all the time."""

CallEnding = tuple[object, tuple[AfterCall, ...]]
"""The label of a call, and what is called after it."""
PlanEnding = tuple[bool, object, tuple[AfterCall, ...]]
"""What comes after the calls of a plan: whether the result may be on a new storage, the label, what is called."""


class Pause:
    """Counts how often the thread that enters it has paused."""

    __slots__ = ("_before", "_paused", "_thread")

    def __init__(self, paused: dict[int, int]) -> None:
        self._paused = paused
        self._thread = get_ident()
        self._before = paused.get(self._thread, 0)

    def __enter__(self) -> None:
        self._paused[self._thread] = self._before + 1

    def __exit__(self, *exception: object) -> None:
        if self._before:
            self._paused[self._thread] = self._before
        else:
            self._paused.pop(self._thread, None)


class ObservedMode(FakeTensorMode):
    """A FakeTensorMode that notifies listeners of storages and operators.

    `stream_of` gives the number of the current stream of a device; None where there are none but the default ones.
    """

    is_observed = True
    can_skip_dispatch = False
    # Not in the instance's dict: with more than 30 attributes in it, Python no longer reads any of them by its position.
    __slots__ = (
        "_before_operator",
        "_by_key",
        "_by_plan",
        "_device",
        "_devices",
        "_endings",
        "_listeners",
        "_on_birth",
        "_on_death",
        "_paused",
        "_plain_writes",
        "births",
        "calls",
        "events",
        "finished",
        "network",
        "on_event",
        "operator",
        "places",
        "report_events",
        "storages",
        "stream_of",
    )  # fmt: skip

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.patch_scopes |= combine(OBSERVATION)
        self.stream_of: Callable[[torch.device], int] | None = None
        self.storages: dict[int, StorageRecord] = {}
        """All that are alive, by the identity of the storage."""
        self.events = EventQueue()
        self.report_events = self.events.tell
        self._on_death = self.forget_storage
        self.finished: list[Any] = []
        """The label of each call."""
        self.on_event: Callable[[StreamEvent | CollectiveEvent | WaitEvent], None] | None = None
        """Called with what happens to streams, and with collectives, by the one who follows time."""
        self.births = 0
        self.calls = 0
        """Number of operator calls, including the running one."""
        self.operator: Any = None
        """The one that is running."""
        self._endings: dict[object, dict[int, PlanEnding]] = {}
        """What comes after the calls of a plan, by its serial number, in each situation."""
        self._by_plan = self._endings[None] = {}
        """In this situation."""
        self._by_key: dict[tuple[Any, ...], CallEnding] = {}
        """The same of calls that have no plan and give no tensors, as `item`: by their keys, or by operator and spec."""
        self.places: Any = None
        """For the listener that measures: where the program is."""
        self.network: Any = None
        """The process groups of the program (`network.Network`), once it has some."""
        self._devices: set[torch.device] = set()
        self._device: torch.device | None = None
        """The one of the last birth."""
        self._paused: dict[int, int] = {}
        """Threads without events now, with the depth of their pauses."""
        self._plain_writes = PlainWrites()
        self._listeners: tuple[Listener, ...] = ()
        self._choose_calls()

    # --- listeners -----------------------------------------------------------------------------------------

    def add_listener(self, listener: Listener) -> None:
        self._listeners = (*self._listeners, listener)
        self._choose_calls()
        listener.on_added(self)

    def remove_listener(self, listener: Listener) -> None:
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        self._choose_calls()

    def _choose_calls(self) -> None:
        self.events.change_listeners(self._listeners)
        self._on_birth = find_methods(self._listeners, "on_birth")
        self._before_operator = find_methods(self._listeners, "before_operator")
        self._devices.clear()
        self._device = None
        self.reset_endings()

    def reset_endings(self) -> None:
        """Listeners may follow calls in another way than before: their answers for each plan are dropped."""
        for endings in self._endings.values():
            endings.clear()
        self._by_key.clear()

    def stop_following(self, follower: AfterCall) -> None:
        """What a listener gave for calls has no more to do after any of them."""
        for endings in self._endings.values():
            for serial, (may_give_birth, label, ends) in list(endings.items()):
                if follower in ends:
                    endings[serial] = may_give_birth, label, tuple(end for end in ends if end is not follower)

    def change_situation(self, situation: object) -> None:
        """From now on, listeners may follow calls in another way: their answers for each plan are dropped."""
        self._by_plan = self._endings.setdefault(situation, {})

    def pause(self) -> Pause:
        """Suspend events of this thread inside a `with` block."""
        return Pause(self._paused)

    # --- operators -----------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._paused and get_ident() in self._paused:
            try:
                return dispatch(self, func, types, args, kwargs)
            finally:
                self.last_plan = None  # a call around this one has another
        if types != STAND_INS and types and any(map(has_own_dispatch, types)):
            return self._dispatch_unusual(
                func, types, args, kwargs
            )  # not for this mode: the tensors inside will come
        run: Callable[..., Any] = dispatch
        if id(func) not in _usual and (kind := _kinds.get(id(func)) or _find_kind(func)):
            if kind == COMPOSITE:
                return self.decompose(func, args, kwargs or NO_KEYWORDS)
            if kind == MAY_WRITE:
                func = self._plain_writes.find(self, func, args)
            else:
                run = dispatch_paused  # births are looked for after it
        self.operator = func
        self.calls += 1
        if self._before_operator:
            for begin in self._before_operator:
                begin(func, args, kwargs or NO_KEYWORDS)
        try:
            result = run(self, func, types, args, kwargs)
        except BaseException:
            self.last_plan = None
            self._end_failed()
            raise
        plan = self.last_plan
        self.last_plan = None  # if this call is a part of another one, that one's plan is not this
        if plan is None or plan.op is not func:
            self._end_unplanned(func, args, kwargs or NO_KEYWORDS, result)
        else:
            ending = self._by_plan.get(plan.serial) or self._learn(
                plan, func, args, kwargs or NO_KEYWORDS, result
            )
            may_give_birth, label, ends = ending
            if may_give_birth:  # else on a storage that is known
                self._find_birth(result)
            if ends:
                for end in ends:
                    end(args, kwargs or NO_KEYWORDS, result)
            if label is not None:
                self.finished.append(label)
        self.operator = None
        return result

    def _find_birth(self, fake: FakeTensor, is_allocated: bool = True) -> None:
        """Report the birth of the storage of a result, unless it is known. `is_allocated`: by torch, not by NumPy or
        others."""
        spec = fake._spec
        storage: Any = native_storage(fake) if spec.sparse is None else fake
        key = id(storage)
        if key in self.storages:
            return
        record = StorageRecord(storage, self._on_death)
        record.key = key
        record.spec = spec
        record.nbytes = (
            0 if not is_allocated else storage.nbytes() if storage is not fake else count_bytes(spec)
        )
        record.device = device = spec.device
        record.stream = 0 if self.stream_of is None else self.stream_of(device)
        record.maker = self.operator
        record.call = self.calls
        record.position = len(self.finished)
        record.serial = self.births = self.births + 1
        record.address = 0
        record.memory = record.totals = record.died = record.category = record.owner = None
        record.is_updated = False
        self.storages[key] = record
        self._announce(record)

    def _announce(self, record: MemoryRecord) -> None:
        """Called by who makes a record, which is called by an operator: `places` counts on that."""
        try:
            if record.device is not self._device:  # most memory is of one device
                self._meet_device(record.device)
            places = self.places
            if places is not None:
                places.locate(record)
            if self._on_birth:
                for tell in self._on_birth:
                    tell(record)
        except BaseException:
            self._forget(record)
            raise
        events = self.events
        events.waiting.append(record)  # from here on, its death is reported as well
        events.room = room = events.room - 2 * record.nbytes - events.rest
        if room < 0 and (refusals := events.notify_listeners()):
            self._forget(record)
            raise refusals.pop(0)

    def _forget(self, record: MemoryRecord) -> None:
        """A listener has refused it."""
        if isinstance(record, StorageRecord):
            self.storages.pop(record.key, None)
        self._end_failed()

    def _end_failed(self) -> None:
        """End an operator call that failed."""
        self.operator = None
        if self.places is not None:
            self.places.end_failed_step()

    def _meet_device(self, device: torch.device) -> None:
        if device not in self._devices:
            for meet in find_methods(self._listeners, "on_device"):
                meet(device)
            self._devices.add(device)
        self._device = device

    def _learn(self, plan: Plan, func: object, args: object, kwargs: Any, result: Any) -> PlanEnding:
        if len(self._by_plan) >= MOST_PLANS:
            self._by_plan.clear()
        is_one = plan.kind == ONE_NEW or (plan.kind > FIRST_ITSELF and type(result) is FakeTensor)
        is_late = _kinds.get(id(func)) == OTHER_ORDER
        label, ends = self._find_ending(func, args, kwargs, result)
        found = self._by_plan[plan.serial] = (is_one and not is_late, label, ends)
        return found

    def _find_ending(self, func: Any, args: Any, kwargs: Any, result: object) -> CallEnding:
        """Return the label of equal calls, and the functions to call after them."""
        label: object = None
        ends: list[AfterCall] = []
        for listener in self._listeners:
            if type(listener).after_operator is not Listener.after_operator:
                ends.append(functools.partial(listener.after_operator, func))
            if (end := listener.follow_plan(func, args, kwargs, result)) is not None:
                ends.append(end)
            label = label or listener.label_plan(func, args, kwargs, result)
        if type(result) is FakeTensor and not result.dim() and record_of(func).keeps_whole:
            ends.insert(0, self._keep_whole)
        if _kinds.get(id(func)) == OTHER_ORDER:
            ends.append(functools.partial(self.find_births, func))
        return label, tuple(ends)

    def find_births(self, func: Any, args: object, kwargs: object, result: object) -> None:
        """Report the births of new results, in the order in which they get their memory."""
        for fake in put_in_order(func, flat_exact(FakeTensor, (result,), {})):
            self._find_birth(fake)

    def _keep_whole(self, args: Any, kwargs: Any, result: Any) -> None:
        """Give a sum the storage of its operand."""
        record, nbytes = self.find_record(result), args[0].numel() * result.element_size()
        if record is not None and nbytes > record.nbytes:
            self._replace_record(record, native_storage(result), nbytes)

    def _end_unplanned(self, func: object, args: Any, kwargs: Any, result: object) -> None:
        """End a call without a replayed plan, or with other calls inside."""
        if type(result) is FakeTensor:
            is_borrowed = bool(args) and type(args[0]) is torch.Tensor and _torch.has_borrowed_memory(args[0])
            self._find_birth(result, is_allocated=not is_borrowed)
        if result is NotImplemented or not isinstance(func, _torch.OpOverload):
            return  # a higher-order operator: those inside of it are observed
        if type(result) not in NUMBER_TYPES:
            ending = self._find_ending(func, args, kwargs, result)
        elif len(args) == 1 and type(args[0]) is FakeTensor and not kwargs:  # `item`
            key = id(func), args[0]._spec
            ending = self._by_key.get(key) or self._remember(
                key, self._find_shared_ending(func, args, kwargs, result)
            )
        else:
            ending = self._find_shared_ending(func, args, kwargs, result)
        label, ends = ending
        for end in ends:
            end(args, kwargs, result)
        if label is not None:
            self.finished.append(label)

    def _find_shared_ending(self, func: object, args: object, kwargs: object, result: object) -> CallEnding:
        """Return the ending of a call without a plan, shared by calls with the same key."""
        key = self.key_of(func, args, kwargs)
        found = None if key is None else self._by_key.get(key)
        if found is None:
            found = self._find_ending(func, args, kwargs, result)
            if key is not None:
                self._remember(key, found)
        return found

    def _remember(self, key: tuple[Any, ...], ending: CallEnding) -> CallEnding:
        if len(self._by_key) >= MOST_PLANS:
            self._by_key.clear()
        self._by_key[key] = ending
        return ending

    def key_of(self, func: object, args: object, kwargs: object) -> tuple[Any, ...] | None:
        """What the answer to a call may depend on; None where an argument can't be a part of it."""
        try:
            return self._make_key(func, args, kwargs)[0]
        except UnusualArgument:
            return None

    def _dispatch_unusual(self, func: object, types: Any, args: object, kwargs: object) -> Any:
        if any(kind.__module__.startswith("torch.distributed.tensor") for kind in types):
            # why: its patch imports torch.distributed.tensor
            import understudy.simulation.sharding  # noqa: F401
        return super()._dispatch_unusual(func, types, args, kwargs)

    def _infer(self, call: Call) -> Plan:
        with self.pause():
            plan = super()._infer(call)
        self.last_plan = plan
        return plan

    # --- storages ------------------------------------------------------------------------------------------

    def observe_new_storage(self, fake: FakeTensor) -> None:
        """A stand-in was made on a storage of its own."""
        if not (self._paused and get_ident() in self._paused):
            self._find_birth(fake)

    def observe_resize(self, storage: torch.UntypedStorage) -> None:
        """Called when the size of a storage may have changed."""
        record = self.storages.get(id(storage))
        if record is not None and record.nbytes != storage.nbytes():
            self._replace_record(record, storage, storage.nbytes())

    def _replace_record(self, old: StorageRecord, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Replace the record of a resized storage: the new block is allocated before the old one is freed."""
        record = StorageRecord(storage, self._on_death)
        for name in ("key", "spec", "device", "stream", "maker", "serial", "category", "owner"):
            setattr(record, name, getattr(old, name))
        record.nbytes, record.call, record.address, record.position = (
            nbytes,
            self.calls,
            0,
            len(self.finished),
        )
        record.memory = record.totals = record.died = None
        record.is_updated = False
        self.storages[record.key] = record
        try:
            self._announce(record)
        except BaseException:
            self.storages[record.key] = old
            raise
        self.events.add_death(old)

    def find_record(self, tensor: torch.Tensor) -> StorageRecord | None:
        """Return the record of the storage of a stand-in, if its birth was reported."""
        spec = getattr(tensor, "_spec", None)
        is_sparse = tensor.layout is not torch.strided if spec is None else spec.sparse is not None
        return self.storages.get(id(tensor if is_sparse else native_storage(tensor)))

    def forget_storage(self, record: Any) -> None:
        """Called by the weak reference to a storage that is gone."""
        key, storages = record.key, self.storages
        is_known = storages.get(key) is record
        if not is_known:
            return  # it was refused, or resized
        del storages[key]
        events = self.events
        events.waiting.append(record)
        if events.room < 0:
            events.tell()

    def add_scratch(
        self, nbytes: int, device: torch.device, maker: object, owner: str | None = None
    ) -> ScratchRecord:
        """Memory that a kernel or a library takes beside its results; `end_scratch` gives it back."""
        stream = 0 if self.stream_of is None else self.stream_of(device)
        record = ScratchRecord(nbytes, device, stream, maker, self.calls, owner)
        self._announce(record)
        return record

    def end_scratch(self, record: ScratchRecord) -> None:
        self.events.add_death(record)


USUAL, COMPOSITE, MAY_WRITE, OTHER_ORDER, OF_REAL = range(5)
_usual: set[int] = set()
_kinds: dict[int, int] = {}
"""Kinds of operators, by identity: operators live as long as the process."""


def _find_kind(func: Any) -> int:
    """COMPOSITE, if eager breaks it up on every device; MAY_WRITE, if C++ writes in place where no mode is active;
    OF_REAL, if results are made of real tensors, whose memory may be another library's."""
    is_operator = isinstance(func, _torch.OpOverload)
    if is_operator and _torch.is_decomposed_by_autograd(func) and not record_of(func).has_cuda_kernel:
        kind = COMPOSITE
    elif is_operator and has_other_order(func):
        kind = OTHER_ORDER
    elif is_operator and record_of(func).real_handler is not None:
        kind = OF_REAL
    else:
        kind = MAY_WRITE if id(func) in IN_PLACE else USUAL
    _kinds[id(func)] = kind
    if kind == USUAL:
        _usual.add(id(func))
    return kind


def dispatch_paused(mode: ObservedMode, func: object, types: Any, args: Any, kwargs: Any) -> Any:
    with mode.pause():
        return dispatch(mode, func, types, args, kwargs)


_torch.hide_from_compiler(ObservedMode.__torch_dispatch__)


# --- what happens to storages past the dispatcher -------------------------------------------------------------------


@patch("torch.UntypedStorage.resize_", during=OBSERVATION)
def follow_storage_resize(original: Callable[..., object]) -> Callable[..., Any]:
    """`tensor.untyped_storage().resize_(0)` frees memory (as in FSDP) without an operator call."""

    def resize_(storage: torch.UntypedStorage, size: object) -> Any:
        result = original(storage, size)
        mode = _torch.active_fake_mode()
        if isinstance(mode, ObservedMode):
            mode.observe_resize(storage)
        return result

    return resize_
