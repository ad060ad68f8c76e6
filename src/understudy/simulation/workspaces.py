"""Workspaces of cuBLAS: memory that the first matrix product of each thread takes, and keeps.

Handles of cuBLAS belong to a thread, and backward passes run in a thread of their own: training has two workspaces on each
device and stream, one from the first product of the forward pass, one from the first of the backward pass.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.ops.traits.workspaces import uses_blas
from understudy.simulation.catalogue import Card
from understudy.simulation.storages import Listener
from understudy.spec.call import flat

if TYPE_CHECKING:
    from understudy.simulation.machine import Machine

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
    return LARGE_WORKSPACE if card.capability and card.capability[0] in WITH_LARGE_WORKSPACE else SMALL_WORKSPACE


class Workspaces(Listener):
    """Takes a workspace before the first product of each (device, stream, direction). They are never freed."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.size = workspace_size(machine.card)
        self.addresses: dict[tuple[int, int, bool], int] = {}
        """By device, stream, and whether it belongs to backward passes."""
        self.on_workspace: Callable[[int, torch.device, _torch.OpOverload], object] | None = None
        """Called with size, device and operator."""
        self._uses_blas: dict[int, bool] = {}

    def before_operator(self, func: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        uses = self._uses_blas.get(id(func))
        if uses is None:
            is_operator = isinstance(func, _torch.OpOverload)
            uses = self._uses_blas[id(func)] = is_operator and uses_blas.of(func) is not None
        if uses:
            self._take(func, args, kwargs)

    def _take(self, func: _torch.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = next((fake for fake in flat(FakeTensor, args, kwargs)), None)
        device: torch.device | None = None if tensor is None else tensor._spec.device
        if device is None or device.type != "cuda" or device.index is None:
            return
        stream = self._machine.current_stream(device.index)
        place = (device.index, stream, _torch.is_in_backward())
        if place not in self.addresses:
            self.addresses[place] = 0  # once: where there is no room for it, the operator is refused once
            self.addresses[place] = self._machine.memory.devices[device.index].allocate(self.size, stream)
            if self.on_workspace is not None:
                self.on_workspace(self.size, device, func)
