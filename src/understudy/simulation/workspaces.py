"""Memory besides that of tensors.

Workspaces of cuBLAS: memory that the first matrix product of each thread takes, and keeps.

Handles of cuBLAS belong to a thread, and backward passes run in a thread of their own: training has two workspaces on each
device and stream, one from the first product of the forward pass, one from the first of the backward pass.

Scratch memory of kernels: taken when the results of a call are there, and given back after it. How much is a trait of the
operator (`ops/traits/scratch.py`). What is not known from shapes, and what is an estimate, is kept for the report.
"""

from __future__ import annotations

import functools
import os
import re
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.ops.registry import record_of
from understudy.ops.traits.scratch import (
    may_need_scratch,
    scratch_of,
)
from understudy.simulation.catalogue import Card
from understudy.simulation.events import WORKSPACES, AfterCall, Listener, ScratchRecord, specs_of_call
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.simulation.machine import Machine
    from understudy.simulation.storages import ObservedMode

KiB, MiB = 1 << 10, 1 << 20
SMALL_WORKSPACE = 2 * 4096 * KiB + 8 * 16 * KiB
LARGE_WORKSPACE = 32 * MiB
WITH_LARGE_WORKSPACE = (9, 10, 12)
"""Major numbers of compute capabilities."""
CONFIGURATION = "CUBLAS_WORKSPACE_CONFIG"


def workspace_size(card: Card) -> int:
    """In bytes: what CUBLAS_WORKSPACE_CONFIG says (":KiB:count", repeated), or what torch chooses for the card."""
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get(CONFIGURATION, ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * KiB
    if card.kind == "rocm":
        return 128 * MiB if (card.capability or (0, 0))[:2] >= (9, 4) else LARGE_WORKSPACE
    return (
        LARGE_WORKSPACE if card.capability and card.capability[0] in WITH_LARGE_WORKSPACE else SMALL_WORKSPACE
    )


class Workspaces(Listener):
    """Takes a workspace in the first product of each (device, stream, direction), when its result is there. They are never
    freed."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.size = workspace_size(machine.card)
        self._taken: set[tuple[int, int, bool]] = set()
        """Device, stream, and whether it belongs to backward passes."""
        self._followers: dict[torch.device, AfterCall] = {}

    def follow_plan(
        self, func: _torch.OpOverload, args: tuple[object, ...], kwargs: dict[str, Any], result: object
    ) -> AfterCall | None:
        if not isinstance(func, _torch.OpOverload) or not record_of(func).uses_blas:
            return None
        tensor = next((fake for fake in flat(FakeTensor, args, kwargs)), None)
        device: torch.device | None = None if tensor is None else tensor._spec.device
        if device is None or device.type != "cuda" or device.index is None or self._has_all(device.index):
            return None
        return self._followers.setdefault(device, functools.partial(self._take, device))

    def _has_all(self, index: int) -> bool:
        """Whether the device has all workspaces that its products can need, unless another stream is used."""
        is_taken = all((index, 0, is_backward) in self._taken for is_backward in (False, True))
        return is_taken and self._machine.mode.stream_of is None

    def _take(self, device: torch.device, *call: object) -> None:
        mode = self._machine.mode
        place = (device.index, self._machine.current_stream(device.index), _torch.is_in_backward())
        if place not in self._taken:
            self._taken.add(place)  # once: if the memory is full, the operator fails once
            mode.add_scratch(self.size, device, mode.operator, WORKSPACES)
        if self._has_all(device.index):
            mode.stop_following(self._followers[device])


# --- kernels

Sizes = tuple[int, ...]


class ScratchMemory(Listener):
    """`unknown` has the bound of each operator that decides by itself, `estimated` the names of the others."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._facts = machine.card.facts()
        self.unknown: dict[str, int] = {}
        self.estimated: set[str] = set()

    def follow_plan(
        self, func: _torch.OpOverload, args: tuple[object, ...], kwargs: dict[str, Any], result: object
    ) -> AfterCall | None:
        if not isinstance(func, _torch.OpOverload) or not may_need_scratch(func):
            return None
        device, first, sizes = self._find_need(func, args, kwargs, result)
        if device is None or not (first or sizes):
            return None
        return functools.partial(self._take, device, first, sizes, func)

    def _find_need(
        self, func: Any, args: Any, kwargs: Any, result: object
    ) -> tuple[torch.device | None, Sizes, Sizes]:
        """The blocks that are taken before the results get their memory, and those after it."""
        call, results = specs_of_call(func, args, kwargs, result)
        device = next((spec.device for spec in (*results, *call.inputs) if spec.device.type == "cuda"), None)
        if device is None:
            return None, (), ()
        found = scratch_of(call, results, self._facts)
        name = str(func)
        if found.bound:
            self.unknown[name] = max(found.bound, self.unknown.get(name, 0))
        elif not found.is_exact:
            self.estimated.add(name)
        first = found.first if record_of(func).makes_results_late else 0
        return device, tuple(filter(None, found.sizes[:first])), tuple(filter(None, found.sizes[first:]))

    def _take(
        self, device: torch.device, first: Sizes, sizes: Sizes, func: _torch.OpOverload, *call: object
    ) -> None:
        mode = self._machine.mode
        taken: list[ScratchRecord] = []

        def take(sizes: Sizes) -> None:
            for size in sizes:
                if size > 0:
                    taken.append(mode.add_scratch(size, device, func))
                else:
                    last = max(place for place, record in enumerate(taken) if record.nbytes == -size)
                    mode.end_scratch(taken.pop(last))

        try:
            take(first)
            if record_of(func).makes_results_late:
                mode.find_births(func, *call)
            take(sizes)
        finally:
            for record in reversed(taken):
                mode.end_scratch(record)


class HostScratch(Listener):
    """Large scratch memory of CPU kernels, for the duration of a call."""

    def __init__(self, mode: ObservedMode) -> None:
        self._mode = mode

    def follow_plan(
        self, func: _torch.OpOverload, args: tuple[object, ...], kwargs: dict[str, Any], result: object
    ) -> AfterCall | None:
        formula = record_of(func).host_scratch if isinstance(func, _torch.OpOverload) else None
        if formula is None:
            return None
        call, results = specs_of_call(func, args, kwargs, result)
        size = formula(results, *call.args, **call.kwargs) if call.inputs[0].device.type == "cpu" else 0
        return functools.partial(self._count, size, call.inputs[0].device, func) if size else None

    def _count(self, size: int, device: torch.device, func: _torch.OpOverload, *call: object) -> None:
        self._mode.end_scratch(self._mode.add_scratch(size, device, func))
