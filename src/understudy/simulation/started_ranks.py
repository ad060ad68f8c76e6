"""Programs that start their ranks themselves: `torch.multiprocessing.spawn`, `multiprocessing.Process`, Lightning with
`devices=8`.

A rehearsal that can start ranks (`CLUSTER.can_start`) ends the program there with `RanksWanted`, and runs each rank as the
program would have started it. Elsewhere the first process is rehearsed alone.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from understudy import _torch
from understudy.lines import is_installed, is_user_file
from understudy.patching import REHEARSAL, patch_call
from understudy.simulation.libraries import when_imported
from understudy.simulation.machine import ACTIVE, SimulationError
from understudy.simulation.network import CLUSTER
from understudy.simulation.run_notes import add_note

Function = Callable[..., Any]
Call = tuple[Function, tuple[Any, ...], dict[str, Any]]


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
    _run_calls([(fn, (rank, *args), {}) for rank in range(nprocs)], "torch.multiprocessing.spawn")
    return None if join else _FinishedProcesses()


def _run_calls(calls: list[Call], how: str) -> None:
    """Each call is what one process would run."""
    count = len(calls)
    if count > 1 and CLUSTER.can_start:
        raise RanksWanted(count, entry=_pickle_calls(calls, how), how=how)
    if count > 1 and ACTIVE.machine is None:
        raise SimulationError(
            f"{count} communicating processes can be rehearsed on cards only: name them, as in --device {count}xh100"
        )
    if count > 1:
        add_note(f"{how}: the first of {count} processes is rehearsed, in this one")
    function, args, kwargs = calls[0]
    function(*args, **kwargs)


def _pickle_calls(calls: list[Call], how: str) -> bytes:
    try:
        return pickle.dumps((call_of_rank, (calls,)))
    except (RuntimeError, TypeError, AttributeError, pickle.PicklingError) as error:
        raise SimulationError(
            f"{how}: the arguments of {len(calls)} processes cannot be sent to rehearsed ranks ({error}). Start the ranks "
            "with torchrun, or rehearse the function of one process"
        ) from error


def call_of_rank(rank: int, calls: list[Call]) -> object:
    """In a rank."""
    function, args, kwargs = calls[rank]
    return function(*args, **kwargs)


# --- multiprocessing.Process: started one after the other, and awaited ---------------------------------------------

TRAINING_WORDS = frozenset({"backward", "init_process_group"})


def trains(function: object) -> bool:
    """Whether a function of the program, or what it calls by global names, computes gradients or joins a process group.
    Other processes, such as environments and readers of data, run as they are."""
    seen: set[CodeType] = set()
    left: list[Any] = [function]
    while left:
        found = inspect.unwrap(left.pop())
        if isinstance(found, type):
            left += [member for member in vars(found).values() if isinstance(member, FunctionType)]
            continue
        if not isinstance(found, FunctionType) or found.__code__ in seen:
            continue
        seen.add(found.__code__)
        if not is_user_file(found.__code__.co_filename) or is_installed(found.__code__.co_filename):
            continue
        names = set(_names_in(found.__code__))
        if names & TRAINING_WORDS:
            return True
        left += [found.__globals__[name] for name in names if callable(found.__globals__.get(name))]
    return False


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


_waiting: list[Call] = []


class _WaitingProcess:
    """In place of the process of the system: it runs, with the others, once the program asks for its end."""

    pid = None
    sentinel = -1

    def poll(self) -> int:
        run_waiting_processes()
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return self.poll()

    def terminate(self) -> None:
        """It has ended by then."""

    kill = close = terminate


def run_waiting_processes() -> None:
    """Run the processes that the program has started, and that train, as ranks."""
    if _waiting:
        calls = _waiting[:]
        _waiting.clear()
        _run_calls(calls, "multiprocessing.Process")


@patch_call("multiprocessing.process.BaseProcess.start", during=REHEARSAL)
def start_training_process(original: Function, self: Any) -> None:
    """As for `torch.multiprocessing.spawn`; how many there are is known when the program waits for the first."""
    if self._target is None or _torch.active_fake_mode() is None or not trains(self._target):
        original(self)
        return
    _waiting.append((self._target, self._args, self._kwargs))
    self._popen = _WaitingProcess()


@patch_call("multiprocessing.queues.Queue.get", during=REHEARSAL)
def get_from_processes(original: Function, self: object, *args: object, **kwargs: object) -> Any:
    """Programs wait here for results of processes that train: these are run first."""
    run_waiting_processes()
    return original(self, *args, **kwargs)


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
