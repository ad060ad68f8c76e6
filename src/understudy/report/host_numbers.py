"""Memory of the CPU that no operator of a program shows.

`x * 0.5` makes a tensor of 0.5: 8 bytes, for the time of the call. Where x needs a gradient, the node of autograd keeps it
until it has run, or is gone. `x * mask` copies the mask in the dtype of x for the time of the call.
The state of the random generator, which checkpointing keeps, is a tensor that no operator makes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy._torch import OpOverload
from understudy.fake.tensor import FakeTensor
from understudy.ops.traits.host_kernels import casts_of, saves_number, size_of_cast, tensor_positions
from understudy.ops.traits.scratch import NUMBER_DTYPES, has_other_order
from understudy.patching import OBSERVATION, patch_call
from understudy.report.measurement import Measurement
from understudy.simulation.events import AfterCall, Listener, ScratchRecord, specs_of_call
from understudy.simulation.memory import HostMemory
from understudy.simulation.storages import ObservedMode

CPU = torch.device("cpu")


class _KeptNumber:
    """A number that autograd keeps until its node has run, or is freed."""

    def __init__(self, mode: ObservedMode, record: ScratchRecord) -> None:
        self.mode = mode
        self.record: ScratchRecord | None = record

    def end(self) -> None:
        record, self.record = self.record, None
        if record is not None:
            self.mode.end_scratch(record)

    __del__ = end


class HostCasts(Listener):
    """Copies of operands in the dtype in which a kernel computes. Goes before `HostNumbers`: both are there at a time."""

    def __init__(self, mode: ObservedMode) -> None:
        self.mode = mode

    def follow_plan(self, func: Any, args: Any, kwargs: dict[str, Any], result: object) -> AfterCall | None:
        if not isinstance(func, OpOverload):
            return None
        call, results = specs_of_call(func, args, kwargs, result)
        if any(spec.device != CPU for spec in (*call.inputs, *results)):
            return None
        sizes = casts_of(call, results)
        return functools.partial(self._take, sizes, func) if sizes else None

    def _take(self, sizes: tuple[int, ...], func: OpOverload, *call: object) -> None:
        if has_other_order(func):  # the results are alive, too
            self.mode.find_births(func, *call)
        for record in [self.mode.add_scratch(size, CPU, func) for size in sizes]:
            self.mode.end_scratch(record)


class HostNumbers(Listener):
    """Goes with a measurement of the CPU's memory, as the listener before it."""

    def __init__(self, mode: ObservedMode, measurement: Measurement, memory: HostMemory) -> None:
        self.mode = mode
        self.memory = memory
        self._events = measurement.events
        measurement.places.on_real_tensor = self.follow
        self._totals = measurement.totals_of(CPU)
        self._positions: dict[int, tuple[int, ...]] = {}
        self._numbers = 0
        self._casts = 0
        self._kept: tuple[weakref.ref[torch.Tensor], ScratchRecord] | None = None
        self._in_use = 0
        """Bytes of the number that the running node of autograd keeps: its formula makes none."""

    def before_operator(self, func: object, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        if self._kept is not None:
            self._give_to_node()
        positions = self._positions.get(id(func))
        if positions is None:
            found = tensor_positions.of(func) if isinstance(func, OpOverload) else None
            positions = self._positions[id(func)] = found or ()
        for position in positions:
            if position < len(args):
                wrapped = NUMBER_DTYPES.get(type(args[position]))
                if wrapped is not None:
                    self._numbers += wrapped.itemsize - self._in_use
                    self._in_use = 0
                    self._casts += self._size_of_cast(func, args, args[position])
        if self._numbers or self._casts:
            self._count(self._numbers + self._casts)

    def after_operator(self, func: Any, args: tuple[object, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not (self._numbers or self._casts):
            return
        size = self._numbers
        self._count(-size - self._casts)
        self._numbers = self._casts = 0
        is_new = size and saves_number.of(func) and torch.is_grad_enabled()
        if is_new and type(args[0]) is FakeTensor and args[0].requires_grad:
            record = self.mode.add_scratch(size, CPU, func)
            record.category = "activations"
            self._kept = weakref.ref(result), record

    def _size_of_cast(self, func: Any, args: tuple[object, ...], number: object) -> int:
        operands = [arg._spec if type(arg) is FakeTensor else arg for arg in args[:2]]
        return size_of_cast(func, operands, number) if any(type(arg) is FakeTensor for arg in args[:2]) else 0

    def _count(self, size: int) -> None:
        self.memory.allocate(size)
        totals = self._totals
        totals.live += size
        totals.transient += size
        if totals.live > totals.peak:  # of a call that makes no tensor
            totals.peak, totals.peak_event, totals.peak_transient = totals.live, len(self._events), totals.transient

    def follow(self, tensor: torch.Tensor) -> None:
        """Count a real tensor that torch has made without the dispatcher."""
        nbytes = tensor.untyped_storage().nbytes()
        record = self.mode.add_scratch(nbytes, CPU, None)
        record.category = None
        weakref.finalize(tensor, self.mode.end_scratch, record).atexit = False

    def _give_to_node(self) -> None:
        """Autograd makes the node of a result after the call: the number is attached to it then."""
        assert self._kept is not None
        (reference, record), self._kept = self._kept, None
        result = reference()
        node = None if result is None else result.grad_fn
        if node is None:
            self.mode.end_scratch(record)
        else:
            kept = _KeptNumber(self.mode, record)
            _torch.attach_to_node(node, "understudy: a number", kept)
            node.register_prehook(functools.partial(self._begin_use, kept))
            node.register_hook(functools.partial(self._end_use, kept))

    def _begin_use(self, kept: _KeptNumber, *gradients: object) -> None:
        self._in_use = 0 if kept.record is None else kept.record.nbytes

    def _end_use(self, kept: _KeptNumber, *gradients: object) -> None:
        self._in_use = 0
        kept.end()


@patch_call("torch.get_rng_state", "torch.random.get_rng_state", during=OBSERVATION)
def follow_generator_state(original: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Checkpointing keeps the generator state of each region; no operator makes it, so it is counted here."""
    state = original()
    places = getattr(_torch.active_fake_mode(), "places", None)
    if places is not None and places.on_real_tensor is not None and not isinstance(state, FakeTensor):
        places.on_real_tensor(state)
    return state
