"""Programs that start their ranks themselves: `torch.multiprocessing.spawn`, Lightning with `devices=8`.

A rehearsal that can start ranks (`CLUSTER.can_start`) ends the program there with `RanksWanted`, and runs each rank as the
program would have started it. Elsewhere the first process is rehearsed alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from understudy import _torch
from understudy.patching import REHEARSAL, patch_call
from understudy.simulation.libraries import when_imported
from understudy.simulation.machine import ACTIVE, SimulationError
from understudy.simulation.network import CLUSTER
from understudy.simulation.run_notes import add_note

Function = Callable[..., Any]


@dataclass
class RanksWanted(BaseException):
    """A program starts `per_node` ranks on each of `nodes` machines. `entry`: a pickled function and its arguments, which
    each rank calls after its number; b"" if each rank runs the whole program with the variables of torchrun."""

    per_node: int
    nodes: int = 1
    entry: bytes = b""
    how: str = ""


class _FinishedProcesses:
    """What `spawn` gives without `join`."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


@patch_call("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", during=REHEARSAL)
def start_rehearsed_ranks(
    original: Function, fn: Function, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *rest: object,
    **settings: object,
) -> Any:  # fmt: skip
    """Another process would run for real, and would not be measured."""
    if _torch.active_fake_mode() is None:
        return original(fn, args, nprocs, join, *rest, **settings)
    if nprocs > 1 and CLUSTER.can_start:
        raise RanksWanted(nprocs, entry=pickle.dumps((fn, args)), how="torch.multiprocessing.spawn")
    if nprocs > 1 and ACTIVE.machine is None:
        raise SimulationError(
            f"{nprocs} communicating processes can be rehearsed on cards only: name them, as in --device {nprocs}xh100"
        )
    if nprocs > 1:
        add_note(f"torch.multiprocessing.spawn: the first of {nprocs} processes is rehearsed, in this one")
    fn(0, *args)
    return None if join else _FinishedProcesses()


@when_imported(
    "lightning.fabric.strategies.launchers.subprocess_script",
    "_SubprocessScriptLauncher._call_children_scripts",
)
@when_imported(
    "lightning.pytorch.strategies.launchers.subprocess_script",
    "_SubprocessScriptLauncher._call_children_scripts",
)
@when_imported(
    "pytorch_lightning.strategies.launchers.subprocess_script",
    "_SubprocessScriptLauncher._call_children_scripts",
)
@when_imported(
    "lightning_fabric.strategies.launchers.subprocess_script",
    "_SubprocessScriptLauncher._call_children_scripts",
)
def start_ranks_of_lightning(original: Function) -> Function:
    """Lightning runs the script again for each other rank."""

    def call_children(self: Any) -> Any:
        if CLUSTER.can_start and self.num_processes * self.num_nodes > 1:
            raise RanksWanted(self.num_processes, self.num_nodes, how="Lightning")
        add_note(
            f"Lightning: the first of {self.num_processes * self.num_nodes} processes is rehearsed alone"
        )
        return None

    return call_children
