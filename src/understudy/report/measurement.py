"""The listener that measures: each storage with the place of its birth, each call with its work.

Every birth and every death is one entry of `events`, the same record twice. At a birth, only the place is recorded;
the rest follows when the mode reports its events, at the end of each phase at the latest. At that time only the live
bytes of each device are summed: the category of a storage (a gradient, optimizer state) is often known only later, so
the report goes through the events again when all is known (`summary`).
"""

from __future__ import annotations

import gc
import weakref
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from understudy._torch import OpOverload, native_storage, unsharded_gradients
from understudy.fake.subclasses import find_stand_in
from understudy.fake.tensor import FakeTensor
from understudy.ops.registry import record_of
from understudy.ops.traits.flops import Work, work_of
from understudy.report.places import AFTER_BACKWARD, BACKWARD, BETWEEN, EVALUATION, SETUP, Places, StepPhase
from understudy.simulation.events import (
    AfterCall,
    CollectiveEvent,
    Listener,
    MemoryRecord,
    StorageRecord,
    StreamEvent,
    WaitEvent,
    specs_of_call,
)
from understudy.simulation.storages import ObservedMode
from understudy.spec import TensorSpec
from understudy.spec.call import flat
from understudy.timing.clock import CallTime, RunClock

MOST_FED = 1000
"""So many different inputs of models are kept."""
BLOCK = 512
"""What the allocator of a card rounds up to."""
NO_DEVICE = torch.device("meta")
RECORDS_TO_OBJECTS = 4
"""About so many records are kept for each object that a training step leaves for Python's collector to look at."""
TOKEN_DTYPES = (torch.int64, torch.int32)
INPUT_PHASES = (SETUP, AFTER_BACKWARD, BETWEEN)
"""In which batches are made; after a backward pass, those of gradient accumulation."""


class DeviceTotals:
    """Live bytes of one device, and the moment of the most. Sizes on cards are those of blocks."""

    __slots__ = (
        "device",
        "is_card",
        "live",
        "mask",
        "peak",
        "peak_event",
        "unit",
    )

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_card = device.type not in ("cpu", "meta")
        self.unit, self.mask = (BLOCK - 1, -BLOCK) if self.is_card else (0, -1)
        """Bytes that memory takes of the device: `(nbytes + unit) & mask`."""
        self.live = 0
        self.peak = 0
        self.peak_event = 0


class CallTotals:
    """All calls of one key. `dtype` and `device` are those of the first result."""

    __slots__ = ("count", "device", "dtype", "is_mutable", "operator", "time", "work")

    def __init__(
        self,
        operator: OpOverload,
        work: Work,
        dtype: str = "",
        device: torch.device | None = None,
        time: CallTime | None = None,
    ) -> None:
        self.operator = operator
        self.dtype = dtype
        self.device = device
        self.work = work
        self.time = time
        """Where time is estimated."""
        self.count = 0
        self.is_mutable = record_of(operator).is_mutable


class PhaseTotals:
    """One phase of one step."""

    __slots__ = ("bytes_moved", "macs", "operations", "operators", "phase", "step")

    def __init__(self, step: int, phase: str) -> None:
        self.step, self.phase = step, phase
        self.operators = self.macs = self.operations = self.bytes_moved = 0


class Measurement(Listener):
    """For a mode that has the listener that allocates; `listen` is around the run."""

    def __init__(self, mode: ObservedMode, clock: RunClock | None = None) -> None:
        self.mode = mode
        self.clock = clock
        self.places = Places()
        self.places.on_root_call = self._take_inputs
        self.places.on_optimizer = self._follow_optimizer
        self.places.on_backward_end = self._end_backward
        self.places.on_moment_end = self._end_moment
        self.events: list[MemoryRecord] = []
        self.devices: dict[torch.device, DeviceTotals] = {}
        self.calls: dict[Any, CallTotals] = {}
        self.phases: dict[tuple[int, str], PhaseTotals] = {}
        self.has_backward = False
        self.fed: Counter[tuple[TensorSpec, ...]] = Counter()
        """What modules with parameters were called with."""
        self.passes = 0
        """Calls of models from outside."""
        self.tokens: dict[int, int] = defaultdict(int)
        """In the inputs of models, by step."""
        self.samples: dict[int, int] = defaultdict(int)
        self.ideal: dict[int, float] = defaultdict(float)
        """Seconds of products at the published peak, by step."""
        self.recomputed: dict[int, float] = defaultdict(float)
        """The part of it that checkpointing recomputes."""
        self._timed_events = 0
        """How many events there were at the end of the last phase."""
        self.parameter_shapes: set[tuple[int, ...]] = set()
        self._parameters_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = (
            weakref.WeakKeyDictionary()
        )
        """The identities of the parameters that an optimizer had at its last step."""
        self._state_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        """What the state of an optimizer was known by when it was last named."""
        self._has_others: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        """Whether an optimizer has parameters that belong to none of the modules that were called."""
        self._births_at_gradients = 0
        """How many births there were when gradients were last looked for."""
        self._births_before = 0
        """How many births there were before the step of an optimizer that is running, or the last one."""

    @contextmanager
    def listen(self) -> Iterator[None]:
        """What happens inside is measured."""
        with self.places, collect_as_in_the_program():
            self.mode.places = self.places
            self.mode.add_listener(self)
            unheard: list[MemoryRecord] = [
                record for record in self.mode.storages.values() if record.totals is None
            ]
            for record in unheard:
                self.places.locate(record)
            self.on_events(unheard)
            try:
                yield
            finally:
                self._end_moment(self.places.moment)
                self.mode.remove_listener(self)
                self.mode.change_situation(None)
                self.mode.places = None
                self.find_gradients()
                self.find_parameters()

    # --- storages

    def on_events(self, events: list[MemoryRecord]) -> None:
        moment = self.places.moment
        device: torch.device | None = None
        totals, live, unit, mask = DeviceTotals(NO_DEVICE), 0, 0, -1
        for number, record in enumerate(events, len(self.events) + 1):
            if record.device is not device:  # most events are of one device
                totals.live = live
                device = record.device
                totals = self.totals_of(device)
                live, unit, mask = totals.live, totals.unit, totals.mask
            if record.totals is None:
                record.totals = totals
                live += (record.nbytes + unit) & mask
                if live > totals.peak:
                    totals.peak, totals.peak_event = live, number
            else:
                record.died = moment
                live -= (record.nbytes + unit) & mask
        totals.live = live
        self.events += events

    def totals_of(self, device: torch.device) -> DeviceTotals:
        totals = self.devices.get(device)
        if totals is None:
            totals = self.devices[device] = DeviceTotals(device)
        return totals

    def list_requests(self) -> array[int]:
        """List the memory requests on the first card, or the CPU, in order: allocated bytes, and freed ones as
        negative."""
        cards = [totals for totals in self.devices.values() if totals.is_card] or list(self.devices.values())
        sizes = array("q")
        born: set[int] = set()
        for record in self.events:
            if record.totals is cards[0]:
                sizes.append(-record.nbytes if id(record) in born else record.nbytes)
                born.add(id(record))
        return sizes

    # --- operators

    @property
    def operators(self) -> int:
        """How many were called."""
        return self.mode.calls

    def label_plan(
        self, func: Any, args: tuple[object, ...], kwargs: dict[str, Any], result: object
    ) -> CallTotals:
        """Return the totals of all equal calls. Floats are ignored, because the work does not depend on a learning
        rate."""
        key = self.mode.key_of(func, args, kwargs)
        alike = object() if key is None else tuple([part for part in key if type(part) is not float])
        totals = self.calls.get(alike)
        if totals is None:
            call, results = specs_of_call(func, args, kwargs, result)
            dtype = str(results[0].dtype).removeprefix("torch.") if results else ""
            device = results[0].device if results else None
            work = work_of(call, results)
            time = None if self.clock is None else self.clock.describe(call, results, work.flops)
            totals = self.calls[alike] = CallTotals(func, work, dtype, device, time)
        return totals

    def follow_plan(self, func: Any, args: Any, kwargs: dict[str, Any], result: object) -> AfterCall | None:
        """Return the totals of the few calls that differ by their place, or by their written tensors."""
        totals = self.label_plan(func, args, kwargs, result)
        mode, places = self.mode, self.places
        mark_updated, is_grad_enabled = self._mark_updated, torch.is_grad_enabled
        macs = totals.work.macs if totals.work.bytes_moved else 0
        ideal = totals.time.ideal if totals.time is not None else 0.0
        # What an optimizer of torch updates is in its state, and is looked for there.
        is_update = totals.is_mutable and places.torch_optimizer_line is None

        def count_macs(args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
            places.module_of_call(mode.calls).macs += macs
            if places.phase is BACKWARD and is_grad_enabled():
                self.recomputed[places.step] += ideal
            if is_update:
                follow_update(args, kwargs, result)

        def follow_update(args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
            if args and not is_grad_enabled():
                for tensor in args[0] if type(args[0]) in (list, tuple) else args[:1]:
                    mark_updated(tensor)

        return count_macs if macs else follow_update if is_update else None

    def _end_moment(self, moment: StepPhase) -> None:
        """Assign all events and calls since the previous moment to this one."""
        self.mode.change_situation(
            "optimizer of torch" if self.places.torch_optimizer_line is not None else None
        )
        self.mode.report_events()
        finished = self.mode.finished
        if not finished:
            return
        if self.clock is not None:
            births = self._find_births(moment)
            self.clock.take(moment, finished, births, is_input=moment.phase in (SETUP, BETWEEN))
        place = moment.step, moment.phase
        phase = self.phases.get(place)
        if phase is None:
            phase = self.phases[place] = PhaseTotals(*place)
        for totals, count in Counter(finished).items():
            if type(totals) is not CallTotals:
                continue
            totals.count += count
            if totals.time is not None and moment.phase not in (SETUP, EVALUATION):
                self.ideal[moment.step] += count * totals.time.ideal
                self.recomputed[moment.step] += count * totals.time.recomputed
            phase.operators += count
            if totals.work.bytes_moved:
                phase.macs += count * totals.work.macs
                phase.operations += count * totals.work.operations
                phase.bytes_moved += count * totals.work.bytes_moved
        finished.clear()

    def _find_births(self, moment: StepPhase) -> dict[int, tuple[Any, Any, Any]]:
        """Where memory was born in this phase, by the position of the call in `finished`."""
        events = self.events[self._timed_events :]
        self._timed_events = len(self.events)
        return {
            record.position: record.birthplace
            for record in events
            if record.birthplace[0] is moment and type(record) is StorageRecord
        }

    def follow_event(self, event: StreamEvent | CollectiveEvent | WaitEvent) -> None:
        """What the program does with streams, and collectives, stand among its calls."""
        if self.clock is not None:
            self.mode.finished.append(event)

    def _mark_updated(self, tensor: object) -> None:
        """What an operator has written to."""
        record = self.record_of(tensor)
        if record is not None:
            record.is_updated = True

    # --- what storages are for

    def record_of(self, tensor: Any) -> StorageRecord | None:
        if type(tensor) is not FakeTensor:
            tensor = getattr(find_stand_in(tensor), "_local_tensor", find_stand_in(tensor))  # of a DTensor
            if type(tensor) is not FakeTensor:
                return None
        return self.mode.storages.get(id(native_storage(tensor) if tensor._spec.sparse is None else tensor))

    def _name(self, tensor: object, category: str, owner: str | None = None) -> None:
        record = self.record_of(tensor)
        if record is not None and record.category is None:
            record.category, record.owner = category, owner

    def find_parameters(self) -> None:
        for path, module in self._modules():
            for parameter in module._parameters.values():
                if parameter is not None and not is_lazy(parameter):
                    self._name(parameter, "parameters", path)
                    self.parameter_shapes.add(_shape_of(parameter))
            for buffer in module._buffers.values():
                self._name(buffer, "buffers", path)

    def _end_backward(self) -> None:
        self.has_backward = True
        self.find_gradients()

    def find_gradients(self) -> None:
        """What parameters have as their gradients now."""
        self._births_at_gradients = self.mode.births
        for path, module in self._modules():
            for parameter in module._parameters.values():
                if parameter is not None and (gradient := _gradient_of(parameter)) is not None:
                    self._name(gradient, "gradients", path)
            for gradient in unsharded_gradients(module):
                self._name(gradient, "gradients", path)

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """All below the modules that were called from outside, with their paths, as `named_modules` gives them."""
        for name, reference in self.places.roots.items():
            root = reference.module()
            waiting: list[tuple[str, Any]] = [] if root is None else [(name, root)]
            seen: set[int] = set()
            while waiting:
                path, module = waiting.pop()
                if module is not None and id(module) not in seen:
                    seen.add(id(module))
                    yield path, module
                    if module._modules:
                        waiting += [
                            (f"{path}.{name}", part) for name, part in reversed(module._modules.items())
                        ]

    def _take_inputs(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.find_parameters()
        given = flat(
            torch.Tensor, (*args, *(tuple(v.values()) if isinstance(v, dict) else v for v in args)), kwargs
        )
        tensors = [inner for inner in map(find_stand_in, given) if isinstance(inner, FakeTensor)]
        if len(self.fed) < MOST_FED and next(module.parameters(), None) is not None:
            different = {id(tensor): tensor._spec for tensor in tensors}
            self.fed[tuple(different.values())] += 1
        if self.places.phase is not EVALUATION and next(module.parameters(), None) is not None:
            self._count_inputs(tensors)
        for tensor in tensors:
            record = self.record_of(tensor)
            if record is not None and record.category is None and record.born.phase in INPUT_PHASES:
                record.category = "inputs"

    def _count_inputs(self, tensors: list[FakeTensor]) -> None:
        """The first dimension counts samples; integers of two dimensions are tokens, if it is the same."""
        self.passes += 1
        step = self.places.step
        shapes = [(tensor._spec.shape, tensor._spec.dtype) for tensor in tensors if tensor.dim()]
        if shapes:
            self.samples[step] += shapes[0][0][0]
        texts = [
            shape
            for shape, dtype in shapes
            if shape[:1] == shapes[0][0][:1] and len(shape) == 2 and dtype in TOKEN_DTYPES
        ]
        if texts:
            self.tokens[step] += texts[0][0] * texts[0][1]

    def _follow_optimizer(self, optimizer: torch.optim.Optimizer, is_done: bool) -> None:
        """Before a step, it has parameters and gradients; after it, also its state."""
        found = _identify_state(optimizer) if is_done else None
        if (
            is_done
            and self._state_of.get(optimizer) == found
            and not self._has_births_since(self._births_before)
        ):
            return  # all that it has was named
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if is_done:
            self._state_of[optimizer] = found
            state = [(p, value) for p in parameters for value in optimizer.state.get(p, {}).values()]
            self._name_all(
                "optimizer_state", [(p, tensor) for p, value in state for tensor in _tensors_in(value)]
            )
        else:
            if self._parameters_of.get(optimizer) != (identities := list(map(id, parameters))):
                self._parameters_of[optimizer] = identities
                self.parameter_shapes.update(map(_shape_of, parameters))
                self._name_all("parameters", [(p, p) for p in parameters])
                self._has_others[optimizer] = not self._owners().keys() >= set(identities)
            if self._has_others[optimizer] or self.mode.births != self._births_at_gradients:
                self._name_all("gradients", [(p, _gradient_of(p)) for p in parameters])
            self._births_before = self.mode.births

    def _has_births_since(self, births: int) -> bool:
        """Whether memory is alive that was born after so many births. Storages are kept in the order of their birth."""
        newest = next(reversed(self.mode.storages.values()), None)
        return newest is not None and newest.serial > births

    def _name_all(self, category: str, tensors: list[tuple[torch.Tensor, object]]) -> None:
        """Tensors that belong to parameters."""
        unnamed = [
            (record, parameter)
            for parameter, tensor in tensors
            if (record := self.record_of(tensor)) is not None and record.category is None
        ]
        owners = self._owners() if unnamed else {}
        for record, parameter in unnamed:
            record.category, record.owner = category, owners.get(id(parameter))

    def _owners(self) -> dict[int, str]:
        return {
            id(parameter): path
            for path, module in self._modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }


@contextmanager
def collect_as_in_the_program() -> Iterator[None]:
    """The collector runs after a number of new objects. Records count as well: it would run several times as often as in the
    program, and free tensors in reference cycles earlier."""
    before = gc.get_threshold()
    changed = (before[0] * (1 + RECORDS_TO_OBJECTS), *before[1:])
    gc.set_threshold(*changed)
    try:
        yield
    finally:
        if gc.get_threshold() == changed:  # the program has not chosen others
            gc.set_threshold(*before)


def _identify_state(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """What changes if a state is loaded or made anew outside of a step."""
    entries = next(iter(optimizer.state.values()), None)
    return (
        id(optimizer.state),
        len(optimizer.state),
        id(entries),
        *map(id, entries.values() if entries else ()),
    )


def _tensors_in(value: object) -> list[Any]:
    """Stand-ins, and DTensors around them."""
    return [value] if isinstance(value, torch.Tensor) else flat(torch.Tensor, (value,), {})


def _shape_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    return parameter._spec.shape if type(parameter) is FakeTensor else tuple(parameter.shape)


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient: torch.Tensor | None = parameter.grad if parameter.is_leaf else None
    return gradient
