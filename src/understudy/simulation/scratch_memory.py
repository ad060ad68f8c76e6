"""Scratch memory of kernels on simulated cards: taken when the results of a call are there, and given back after it.

How much is a trait of the operator (`ops/traits/scratch.py`). What is not known from shapes, and what is an estimate, is
kept for the report: `unknown` has the bound of each operator that decides by itself, `estimated` the names of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.ops.traits.scratch import may_need_scratch, scratch_of
from understudy.simulation.storages import Listener
from understudy.spec.call import Call, flat, map_structure

if TYPE_CHECKING:
    from understudy.simulation.machine import Machine

Sizes = tuple[int, ...]


class ScratchMemory(Listener):
    """`on_scratch(device, sizes, operator)` is called while the memory is held."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._mode = machine.mode
        self._mode.keep_keys()
        self._facts = machine.card.facts()
        self._may_need: dict[int, bool] = {}
        self._needs: dict[Any, tuple[torch.device | None, Sizes]] = {}
        self.on_scratch: Callable[[torch.device, Sizes, _torch.OpOverload], None] | None = None
        self.unknown: dict[str, int] = {}
        self.estimated: set[str] = set()

    def after_operator(
        self, func: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        may_need = self._may_need.get(id(func))
        if may_need is None:
            may_need = self._may_need[id(func)] = isinstance(func, _torch.OpOverload) and may_need_scratch(func)
        if not may_need:
            return
        key = self._mode.last_key
        need = self._needs.get(key) if key is not None else None
        if need is None:
            need = self._find_need(func, args, kwargs, result)
            if key is not None:
                self._needs[key] = need
        device, sizes = need
        if sizes and device is not None:
            self._take(device, sizes, func)

    def _find_need(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[torch.device | None, Sizes]:
        args, kwargs = map_structure(lambda fake: fake._spec, FakeTensor, (args, kwargs))
        call = Call.of(func, tuple(args), kwargs)
        results = [fake._spec for fake in flat(FakeTensor, (result,), {})]
        device = next((spec.device for spec in (*results, *call.inputs) if spec.device.type == "cuda"), None)
        if device is None:
            return None, ()
        found = scratch_of(call, results, self._facts)
        name = str(func)
        if found.bound:
            self.unknown[name] = max(found.bound, self.unknown.get(name, 0))
        elif not found.is_exact:
            self.estimated.add(name)
        return device, tuple(size for size in found.sizes if size)

    def _take(self, device: torch.device, sizes: Sizes, func: _torch.OpOverload) -> None:
        memory = self._machine.memory.devices[device.index or 0]
        stream = self._machine.current_stream(device.index or 0)
        addresses: list[int] = []
        try:
            for size in sizes:
                addresses.append(memory.allocate(size, stream))
            if self.on_scratch is not None:
                self.on_scratch(device, sizes, func)
        finally:
            for address in reversed(addresses):
                memory.free(address)
