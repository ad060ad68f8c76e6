"""`understudy.simulate`: torch as on a machine with the named cards.

with understudy.simulate("8xa100-80g") as machine:
    model = Model().cuda()
    ...
    torch.cuda.max_memory_allocated()
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from understudy import _torch
from understudy.fake import native
from understudy.fake.kernels.autocast import clear_cast_cache
from understudy.patching import ENGINE, OBSERVATION, SIMULATION, combine
from understudy.simulation import cuda_patches as _cuda_patches  # noqa: F401  (registers them)
from understudy.simulation import network_patches as _network_patches  # noqa: F401  (registers them)
from understudy.simulation import program_patches as _program_patches  # noqa: F401  (registers them)
from understudy.simulation.catalogue import Card, parse_devices
from understudy.simulation.cuda_objects import CudaGenerator
from understudy.simulation.machine import ACTIVE, Machine, SimulationError
from understudy.simulation.memory import OnOOM
from understudy.simulation.program_patches import MovedModules

P = ParamSpec("P")
R = TypeVar("R")


class simulate:
    """Inside, torch behaves as on a machine with these cards: on any build, with or without a GPU.

        with understudy.simulate("h100"):
            train()

        @understudy.simulate("t4")
        def train(): ...

    `device` is a name of the catalogue ("h100", "8xa100-80g"), a `Card`, or the path of a TOML file with a card of one's own
    ("cards.toml", or "cards.toml:name" if it has several). Tensors are stand-ins, those on the CPU too; out of memory is
    raised where the card would. `settings` replaces PYTORCH_CUDA_ALLOC_CONF, `context` is the memory
    outside of the allocator in bytes, `on_oom="record"` goes on beyond the limit. `answers` is the policy for reads of data
    that is not there, as of `FakeTensorMode`. `rank` and `world_size`: this process is one rank of several, with the
    variables of torchrun; the others are not there (`understudy.rehearse_cluster` runs all of them).

    `with ... as machine` gives the `Machine`: its memory, listeners (`machine.mode.add_listener`), and notes.
    """

    def __init__(
        self, device: str | Path | Card, *, count: int | None = None, settings: str | None = None,
        context: int | None = None, on_oom: OnOOM = "raise", answers: object = "error", rank: int | None = None,
        world_size: int | None = None,
    ) -> None:  # fmt: skip
        self._machine: Machine | None = None
        self._entry: Any = None
        self.card, found = find_device(device)
        self.count = found if count is None else count
        self._options: dict[str, Any] = {
            "settings": settings, "context": context, "on_oom": on_oom, "answers": answers,
        }  # fmt: skip
        self._place = (rank, world_size)
        self._environment: dict[str, str | None] = {}
        if (rank is None) != (world_size is None) or (rank is not None and not 0 <= rank < (world_size or 0)):
            raise SimulationError(
                f"expected rank and world_size with 0 <= rank < world_size, got {rank}, {world_size}"
            )

    def __enter__(self) -> Machine:
        if self._machine is not None:
            raise SimulationError(
                f"this simulation of {self.card} is already active: create another one for another run"
            )
        if ACTIVE.machine is not None and not ENGINE.active & OBSERVATION.bit:  # an interrupt has left it
            _restore_after(ACTIVE.machine)
        if ACTIVE.machine is not None:
            raise SimulationError(
                f"{ACTIVE.machine.card} is already simulated: leave that simulation first, or name several cards at once "
                'as in understudy.simulate("2xh100")'
            )
        machine = Machine(self.card, self.count, **self._options)
        machine.moved_modules = MovedModules()
        machine.generators = [CudaGenerator(index) for index in range(machine.count)]
        scopes = machine.mode.patch_scopes | (combine(SIMULATION) if machine.count else 0)
        self._machine = ACTIVE.machine = machine
        native.current_indices["cuda"] = machine.current_device
        self._entry = _torch.FakeModeEntry(machine.mode)
        self._set_environment()
        try:
            self._entry.enter(scopes)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return machine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        machine = self._machine
        if machine is None:
            return
        try:
            if machine.mode.network is not None:
                machine.mode.network.end()
        finally:
            self._entry.leave(error)
            self._machine = None
            _restore_after(machine)
            self._restore_environment()

    def _set_environment(self) -> None:
        """The variables of torchrun, if this is one rank of several."""
        rank, world_size = self._place
        if rank is None or world_size is None:
            return
        cards = max(1, self.count)
        given = {
            "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % cards,
            "LOCAL_WORLD_SIZE": min(cards, world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": 29500,
        }  # fmt: skip
        self._environment = {name: os.environ.get(name) for name in given}
        os.environ.update({name: str(value) for name, value in given.items()})

    def _restore_environment(self) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment = {}

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: each call is a simulation of its own."""

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            rank, world_size = self._place
            with simulate(self.card, count=self.count, rank=rank, world_size=world_size, **self._options):
                return function(*args, **kwargs)

        return run


def _restore_after(machine: Machine) -> None:
    clear_cast_cache()
    machine.moved_modules.give_back()
    native.current_indices.pop("cuda", None)
    ACTIVE.machine = None


def find_device(device: str | Path | Card) -> tuple[Card, int]:
    """The card that is meant, and how many of it."""
    if isinstance(device, Card):
        return device, 1
    return parse_devices(str(device))
