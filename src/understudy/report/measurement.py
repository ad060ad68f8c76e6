"""The listener that measures: each storage with the place of its birth, each call with its work.

Every birth and every death is one entry of `events`, the same `Birth` twice. Nothing is summed up on the way but the live
bytes of each device: what a storage was for (a gradient, optimizer state) is often known only later, so the report goes
through the events again when all is known (`summary`). A `Birth` holds no tensor.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from understudy._torch import OpOverload, native_storage
from understudy.fake.tensor import FakeTensor
from understudy.ops.registry import record_of
from understudy.ops.traits.flops import Work, work_of
from understudy.report.places import BACKWARD, FORWARD, LinePlace, ModulePlace, Places, StepPhase
from understudy.simulation.storages import AfterCall, Listener, ObservedMode, StorageRecord
from understudy.spec.call import Call, flat, map_structure

BLOCK = 512
"""What the allocator of a card rounds up to."""


WORKSPACES = "(workspaces of libraries)"


class Birth:
    """A storage, or scratch memory, that was allocated: where, and what it turned out to be."""

    __slots__ = (
        "born", "category", "device", "died", "is_updated", "line", "module", "nbytes", "operator", "owner", "shape",
    )  # fmt: skip

    nbytes: int
    category: str | None
    module: ModulePlace
    owner: str | None
    """The module whose parameter it is, or belongs to, if it is not the one that made it."""
    line: LinePlace | None
    operator: Any
    shape: tuple[Any, ...] | None
    device: DeviceTotals
    born: StepPhase
    died: StepPhase | None
    is_updated: bool
    """Whether it was written to in place where no gradients are recorded."""

    @property
    def step(self) -> int:
        return self.born.step

    @property
    def phase(self) -> str:
        return self.born.phase

    @property
    def died_in_forward(self) -> bool:
        return self.died is not None and self.died.phase == FORWARD

    @property
    def lives_on(self) -> bool:
        """Whether it is alive, or a module was called from outside before it died."""
        return self.died is None or self.died.root_calls > self.born.root_calls


class DeviceTotals:
    """Live bytes of one device, and the moment of the most. Sizes on cards are those of blocks."""

    __slots__ = ("device", "is_card", "live", "peak", "peak_event", "peak_transient", "transient")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_card = device.type not in ("cpu", "meta")
        self.live = 0
        self.peak = 0
        self.peak_event = 0
        self.transient = 0
        """Of the live bytes, those that have no `Birth`: of numbers, for the time of a call."""
        self.peak_transient = 0


class CallTotals:
    """All calls of one key. `dtype` is that of the first result."""

    __slots__ = ("count", "dtype", "is_mutable", "operator", "work")

    def __init__(self, operator: OpOverload, work: Work, dtype: str = "") -> None:
        self.operator = operator
        self.dtype = dtype
        self.work = work
        self.count = 0
        self.is_mutable = record_of(operator).is_mutable


class PhaseTotals:
    """One phase of one step."""

    __slots__ = ("bytes_moved", "macs", "operations", "operators", "phase", "step")

    def __init__(self, step: int, phase: str) -> None:
        self.step, self.phase = step, phase
        self.operators = self.macs = self.operations = self.bytes_moved = 0


class Measurement(Listener):
    """Add it to an ObservedMode behind the listener that allocates, and enter it around the run."""

    def __init__(self, mode: ObservedMode) -> None:
        self.mode = mode
        self.places = Places()
        self.places.on_root_call = self._take_inputs
        self.places.on_optimizer = self._follow_optimizer
        self.places.on_backward_end = self._end_backward
        self.places.on_moment_end = self._count_calls
        self.events: list[Birth] = []
        self.event_operators: list[int] = []
        """The number of the call that was running, for each event."""
        self.devices: dict[torch.device, DeviceTotals] = {}
        self.calls: dict[Any, CallTotals] = {}
        self.phases: dict[tuple[int, str], PhaseTotals] = {}
        self.has_backward = False
        self.parameter_shapes: set[tuple[int, ...]] = set()
        self._finished: list[CallTotals] = []
        """Of each call since the phase began."""

    def __enter__(self) -> Measurement:
        self.mode.places = self.places
        self.mode.add_listener(self)
        self.places.__enter__()
        for storage in self.mode.storages.values():
            if storage.label is None:
                self.on_birth(storage)
        return self

    def __exit__(self, *exception: object) -> None:
        self.places.__exit__(*exception)
        self.mode.remove_listener(self)
        self.mode.places = None
        self._count_calls(self.places.moment)
        self.find_gradients()
        self.find_parameters()

    # --- storages

    def on_birth(self, storage: StorageRecord) -> None:
        storage.label = self._add(storage.nbytes, storage.device, storage.spec.shape, self.mode.operator)

    def on_death(self, storage: StorageRecord) -> None:
        birth = storage.label
        if birth is not None:
            self._end(birth)

    def on_resize(self, storage: StorageRecord, before: int) -> None:
        """A new block is there before the old one is gone."""
        old = storage.label
        self.on_birth(storage)
        if old is not None:
            storage.label.category, storage.label.owner = old.category, old.owner
            self._end(old)

    def add_scratch(self, nbytes: int, device: torch.device, operator: object) -> Birth:
        """Memory that a kernel or a library takes beside its results."""
        birth = self._add(nbytes, device, None, operator)
        birth.category = "scratch"
        return birth

    def add_workspace(self, nbytes: int, device: torch.device, operator: object) -> None:
        """Of a library, which keeps it: it belongs to no module."""
        self.add_scratch(nbytes, device, operator).owner = WORKSPACES

    def add_held_scratch(self, device: torch.device, sizes: tuple[int, ...], operator: object) -> None:
        """Of a kernel, held while the call ends."""
        for birth in [self.add_scratch(size, device, operator) for size in sizes]:
            self._end(birth)

    def totals_of(self, device: torch.device) -> DeviceTotals:
        totals = self.devices.get(device)
        if totals is None:
            totals = self.devices[device] = DeviceTotals(device)
        return totals

    def _add(self, nbytes: int, device: torch.device, shape: tuple[Any, ...] | None, operator: object) -> Birth:
        places = self.places
        birth = Birth()
        birth.nbytes = nbytes
        birth.shape = shape
        birth.operator = operator
        birth.category = birth.owner = birth.died = None
        birth.is_updated = False
        birth.born = moment = places.moment
        birth.module = places.module if moment.phase is not BACKWARD else places.module_of(BACKWARD)
        birth.line = places.find_line()
        birth.device = totals = self.devices.get(device) or self.totals_of(device)
        self.events.append(birth)
        self.event_operators.append(self.mode.calls)
        totals.live += (nbytes + BLOCK - 1) & -BLOCK if totals.is_card else nbytes
        if totals.live > totals.peak:
            totals.peak = totals.live
            totals.peak_event = len(self.events)
            totals.peak_transient = totals.transient
        return birth

    def _end(self, birth: Birth) -> None:
        birth.died = self.places.moment
        self.events.append(birth)
        self.event_operators.append(self.mode.calls)
        totals = birth.device
        totals.live -= (birth.nbytes + BLOCK - 1) & -BLOCK if totals.is_card else birth.nbytes

    end_scratch = _end

    def list_requests(self) -> array[int]:
        """Of the first card, or of the CPU, in order: bytes that were asked for, and, negative, that were given back."""
        cards = [totals for totals in self.devices.values() if totals.is_card] or list(self.devices.values())
        sizes = array("q")
        alive: set[Birth] = set()
        for birth in self.events:
            if birth.device is cards[0]:
                sizes.append(-birth.nbytes if birth in alive else birth.nbytes)
                alive.add(birth)
        return sizes

    # --- operators

    @property
    def operators(self) -> int:
        """How many were called."""
        return self.mode.calls

    def follow_plan(self, func: Any, args: tuple[object, ...], kwargs: dict[str, Any], result: object) -> AfterCall:
        """Counts all calls that are alike. No work depends on a float: a step size that changes is no other call."""
        key = self.mode.key_of(func, args, kwargs)
        alike = object() if key is None else tuple([part for part in key if type(part) is not float])
        totals = self.calls.get(alike)
        if totals is None:
            first = next(iter(flat(FakeTensor, (result,), {})), None)
            dtype = "" if first is None else str(first._spec.dtype).removeprefix("torch.")
            totals = self.calls[alike] = CallTotals(func, _work_of(func, args, kwargs, result), dtype)
        return self._make_counter(totals)

    def _make_counter(self, totals: CallTotals) -> AfterCall:
        """Called after each operator: nothing is done here that can be done once for a plan, or at the end of a phase."""
        finish, mark_updated, is_grad_enabled = self._finished.append, self._mark_updated, torch.is_grad_enabled
        places = self.places
        macs = totals.work.macs if totals.work.bytes_moved else 0

        def count(args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
            finish(totals)

        def count_macs(args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
            places.module_of(places.phase).macs += macs
            then(args, kwargs, result)

        def count_update(args: tuple[Any, ...], kwargs: dict[str, Any], result: object) -> None:
            finish(totals)
            if args and not is_grad_enabled():
                for tensor in args[0] if type(args[0]) in (list, tuple) else args[:1]:
                    mark_updated(tensor)

        then = count_update if totals.is_mutable else count
        return count_macs if macs else then

    def _count_calls(self, moment: StepPhase) -> None:
        """Those that were finished since the last time."""
        if not self._finished:
            return
        place = moment.step, moment.phase
        phase = self.phases.get(place)
        if phase is None:
            phase = self.phases[place] = PhaseTotals(*place)
        for totals, count in Counter(self._finished).items():
            totals.count += count
            phase.operators += count
            if totals.work.bytes_moved:
                phase.macs += count * totals.work.macs
                phase.operations += count * totals.work.operations
                phase.bytes_moved += count * totals.work.bytes_moved
        self._finished.clear()

    def _mark_updated(self, tensor: object) -> None:
        """What an operator has written to."""
        birth = self.birth_of(tensor)
        if birth is not None:
            birth.is_updated = True

    # --- what storages are for

    def birth_of(self, tensor: Any) -> Birth | None:
        if type(tensor) is not FakeTensor:
            tensor = getattr(tensor, "_local_tensor", None)  # of a DTensor
            if type(tensor) is not FakeTensor:
                return None
        storage = native_storage(tensor) if tensor._spec.sparse is None else tensor
        record = self.mode.storages.get(id(storage))
        birth: Birth | None = None if record is None else record.label
        return birth

    def _name(self, tensor: object, category: str, owner: str | None = None) -> None:
        birth = self.birth_of(tensor)
        if birth is not None and birth.category is None:
            birth.category, birth.owner = category, owner

    def find_parameters(self) -> None:
        for path, module in self._modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._name(parameter, "parameters", path)
                    self.parameter_shapes.add(_shape_of(parameter))
            for buffer in module._buffers.values():
                self._name(buffer, "buffers", path)

    def _end_backward(self) -> None:
        self.has_backward = True
        self.find_gradients()

    def find_gradients(self) -> None:
        """What parameters have as their gradients now."""
        for path, module in self._modules():
            for parameter in module._parameters.values():
                if parameter is not None and (gradient := _gradient_of(parameter)) is not None:
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
                        waiting += [(f"{path}.{name}", part) for name, part in reversed(module._modules.items())]

    def _take_inputs(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.find_parameters()
        for tensor in flat(FakeTensor, (*args, *(tuple(v.values()) if isinstance(v, dict) else v for v in args)), kwargs):
            birth = self.birth_of(tensor)
            if birth is not None and birth.category is None and birth.phase in ("setup", "between steps"):
                birth.category = "inputs"

    def _follow_optimizer(self, optimizer: torch.optim.Optimizer, is_done: bool) -> None:
        unnamed: list[tuple[Birth, str, int]] = []

        def look(tensor: object, category: str) -> None:
            birth = self.birth_of(tensor)
            if birth is not None and birth.category is None:
                unnamed.append((birth, category, id(parameter)))

        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.parameter_shapes.add(_shape_of(parameter))
                look(parameter, "parameters")
                look(_gradient_of(parameter), "gradients")
                for value in optimizer.state.get(parameter, {}).values() if is_done else ():
                    for tensor in (value,) if type(value) is FakeTensor else flat(FakeTensor, (value,), {}):
                        look(tensor, "optimizer_state")
        owners = self._owners() if unnamed else {}
        for birth, category, parameter in unnamed:
            if birth.category is None:
                birth.category, birth.owner = category, owners.get(parameter)

    def _owners(self) -> dict[int, str]:
        return {
            id(parameter): path
            for path, module in self._modules()
            for parameter in module._parameters.values()
            if parameter is not None
        }


def _work_of(func: Any, args: tuple[object, ...], kwargs: dict[str, Any], result: object) -> Work:
    args, kwargs = map_structure(lambda fake: fake._spec, FakeTensor, (args, kwargs))
    results = [fake._spec for fake in flat(FakeTensor, (result,), {})]
    return work_of(Call.of(func, tuple(args), kwargs), results)


def _shape_of(parameter: torch.Tensor) -> tuple[Any, ...]:
    return parameter._spec.shape if type(parameter) is FakeTensor else tuple(parameter.shape)


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient: torch.Tensor | None = parameter.grad if parameter.is_leaf else None
    return gradient
