"""`understudy.simulate`: torch as on a machine with the named cards.

    with understudy.simulate("8xa100-80g") as machine:
        model = Model().cuda()
        ...
        torch.cuda.max_memory_allocated()
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from understudy import _torch
from understudy.contexts import GuardedExit, guard_exit
from understudy.fake import native
from understudy.fake.kernels.autocast import clear_cast_cache
from understudy.patching import SIMULATION, combine
from understudy.simulation import cuda_patches as _cuda_patches  # noqa: F401  (registers them)
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
    raised where the card would. `settings` stands in the place of PYTORCH_CUDA_ALLOC_CONF, `context` is the memory
    outside of the allocator in bytes, `on_oom="record"` goes on beyond the limit. `answers` is the policy for reads of data
    that is not there, as of `FakeTensorMode`.

    `with ... as machine` gives the `Machine`: its memory, listeners (`machine.mode.add_listener`), and notes.
    """

    def __init__(
        self, device: str | Path | Card, *, count: int | None = None, settings: str | None = None,
        context: int | None = None, on_oom: OnOOM = "raise", answers: object = "error",
    ) -> None:  # fmt: skip
        self._machine: Machine | None = None
        self._entry: Any = None
        self.card, found = find_device(device)
        self.count = found if count is None else count
        self._options: dict[str, Any] = {
            "settings": settings, "context": context, "on_oom": on_oom, "answers": answers,
        }  # fmt: skip

    def __enter__(self) -> Machine:
        if self._machine is not None:
            raise SimulationError(f"this simulation of {self.card} is entered already: make another one for another run")
        if ACTIVE.machine is not None:
            raise SimulationError(
                f"{ACTIVE.machine.card} is simulated already: leave that simulation first, or name several cards at once "
                'as in understudy.simulate("2xh100")'
            )
        machine = Machine(self.card, self.count, **self._options)
        machine.moved_modules = MovedModules()
        machine.generators = [CudaGenerator(index) for index in range(machine.count)]
        scopes = machine.mode.patch_scopes | (combine(SIMULATION) if machine.count else 0)
        guard_exit(self, self._leave)
        try:
            self._machine = ACTIVE.machine = machine
            native.current_indices["cuda"] = machine.current_device
            self._entry = _torch.FakeModeEntry(machine.mode)
            self._entry.enter(scopes)
        except BaseException:  # an interrupt
            self._leave()
            raise
        return machine

    @GuardedExit
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        """May be called twice, after an interrupt at any of its lines."""
        machine = self._machine
        if machine is None:
            return
        try:
            machine.end_process_group()
        finally:
            if self._entry is not None:
                self._entry.leave()
            clear_cast_cache()
            machine.moved_modules.give_back()
            native.current_indices.pop("cuda", None)
            ACTIVE.machine = None
            self._machine = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """As a decorator: each call is a simulation of its own."""

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with simulate(self.card, count=self.count, **self._options):
                return function(*args, **kwargs)

        return run


def find_device(device: str | Path | Card) -> tuple[Card, int]:
    """The card that is meant, and how many of it."""
    if isinstance(device, Card):
        return device, 1
    return parse_devices(str(device))
