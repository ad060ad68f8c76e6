"""Running a script as `python script.py` would, for a few steps, without harm.

    result = run_script(Script("train.py", ("--batch", "8")), steps=2, mode=mode)
    result.exit_code, result.steps, result.writes

The script runs as `__main__`, in this process, inside of the mode. A step is one `Optimizer.step` that ran; with several
optimizers, the one that steps most seldom counts. After so many steps the script is ended as by `sys.exit`: `finally` and
`atexit` run, what comes after the training does not.
"""

from __future__ import annotations

import copy
import io
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import understudy.simulation.processes  # registers its patches
import understudy.simulation.quantised  # noqa: F401  # registers what bitsandbytes needs
from understudy import _torch
from understudy.contexts import contextmanager
from understudy.fake.mode import FakeTensorMode
from understudy.lines import drop_own_frames, frames_to_show, is_own_file
from understudy.patching import REHEARSAL, active, patch_call
from understudy.simulation.libraries import adapt_libraries, add_note
from understudy.simulation.machine import ACTIVE, SimulationError
from understudy.simulation.offline_data import make_missing_data
from understudy.simulation.overlay import Overlay, Write
from understudy.simulation.steps import EndOfScript, StepCounter

Function = Callable[..., Any]
INTERRUPTED = 130


@dataclass(frozen=True)
class Script:
    """A file, or a module as of `python -m`, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        return self.target if self.is_module else os.path.basename(self.target)


@dataclass
class ScriptResult:
    """`exit_code` as of `python script.py`; `error` is the script's own traceback, "" if there is none."""

    exit_code: int = 0
    error: str = ""
    is_out_of_memory: bool = False
    """Whether that error is torch's OutOfMemoryError."""
    steps: int = 0
    was_ended: bool = False
    """Whether it was ended after the steps that were wanted."""
    writes: list[Write] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@patch_call("torch.compile", during=REHEARSAL)
def label_compilation(original: Function, *args: object, **kwargs: object) -> Any:
    """Inside a mode a compiled function runs as eager: the report says so."""
    if _torch.active_fake_mode() is not None:
        add_note("torch.compile: rehearsed as eager; the compiler may fuse kernels and free memory earlier")
    return original(*args, **kwargs)


class _FinishedProcesses:
    """What `spawn` gives without `join`."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


@patch_call("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", during=REHEARSAL)
def run_first_process(
    original: Function, fn: Function, args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *rest: object,
    **settings: object,
) -> Any:  # fmt: skip
    """Another process would run for real, and would not be measured: the function of the first one is called here. The
    process group of a simulated machine stands for the others."""
    if _torch.active_fake_mode() is None:
        return original(fn, args, nprocs, join, *rest, **settings)
    if nprocs > 1 and ACTIVE.machine is None:
        raise SimulationError(
            f"{nprocs} processes that talk to each other can be rehearsed on cards only: name them, as in "
            f"--device {nprocs}xh100"
        )
    if nprocs > 1:
        add_note(f"torch.multiprocessing.spawn: the first of {nprocs} processes is rehearsed, in this one")
    fn(0, *args)
    return None if join else _FinishedProcesses()


@patch_call("warnings.showwarning", during=REHEARSAL)
def name_line_of_script(
    original: Function, message: Warning | str, category: type[Warning], filename: str, lineno: int, *args: object,
    **kwargs: object,
) -> None:  # fmt: skip
    """A warning names the caller of a function of torch: where that is a patch of ours, the script's own line instead."""
    if is_own_file(filename):
        frame, _ = frames_to_show()
        filename, lineno = (filename, lineno) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    original(message, category, filename, lineno, *args, **kwargs)


# --- data ------------------------------------------------------------------------------------------------------------

MOST_BATCHES = 1000
"""That are looked at for the longest one."""
_takes_longest: list[bool] = []


@patch_call("torch.utils.data.DataLoader.__iter__", during=REHEARSAL)
def take_longest_batch(original: Function, self: object) -> Iterator[Any]:
    """With `--longest`, every batch is the one with the most numbers in it: a rehearsal takes only the first few."""
    if not _takes_longest or not _takes_longest[-1]:
        return original(self)
    return _repeat_longest(original(self))


def _repeat_longest(batches: Iterator[object]) -> Iterator[Any]:
    longest, most, count = None, -1, 0
    for batch in islice(batches, MOST_BATCHES):
        count += 1
        size = sum(tensor.numel() for tensor in find_tensors(batch))
        if size > most:
            longest, most = batch, size
    if not count:
        return
    shapes = ", ".join(str(list(tensor.shape)) for tensor in find_tensors(longest))
    of = f"the first {count:,}" if count == MOST_BATCHES else f"{count:,}"
    add_note(f"--longest: every batch is the longest of {of}: {shapes}")
    for _ in range(count):
        # Programs take entries out of a batch (`batch.pop("labels")`).
        yield copy_containers(longest)


def find_tensors(batch: object) -> list[torch.Tensor]:
    """The tensors of a batch, whatever its containers are."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [tensor for part in batch.values() for tensor in find_tensors(part)]
    if isinstance(batch, (list, tuple)):
        return [tensor for part in batch for tensor in find_tensors(part)]
    return [value for value in getattr(batch, "__dict__", {}).values() if isinstance(value, torch.Tensor)]


def copy_containers(batch: Any) -> Any:
    """The same tensors in new containers."""
    if isinstance(batch, torch.Tensor) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        return batch
    if isinstance(batch, Mapping):
        new = copy.copy(batch)
        if isinstance(new, MutableMapping):
            new.update({key: copy_containers(part) for key, part in batch.items()})
        return new
    if type(batch) in (list, tuple):
        return type(batch)(copy_containers(part) for part in batch)
    return copy.copy(batch)


# --- threads and exits -----------------------------------------------------------------------------------------------

_modes: list[FakeTensorMode] = []


@patch_call("threading.Thread.start", during=REHEARSAL)
def start_in_mode(original: Function, self: threading.Thread) -> None:
    """A mode is active in one thread: the threads of a script, such as those that load weights, enter it themselves."""
    mode = _torch.active_fake_mode()
    if _modes and mode is _modes[-1] and not self.daemon:
        run = self.run

        def run_in_mode() -> None:
            with mode:
                run()

        vars(self)["run"] = run_in_mode
    original(self)


_at_exit: list[list[tuple[Function, Any, Any]]] = []


@patch_call("atexit.register", during=REHEARSAL)
def collect_exit_functions(original: Function, function: Function, *args: object, **kwargs: object) -> Function:
    """Exit functions of the script run when the script ends, which is before this process does; those of libraries stay
    registered."""
    if not _at_exit or sys._getframe(2).f_globals.get("__name__") != "__main__":
        return original(function, *args, **kwargs)
    _at_exit[-1].append((function, args, kwargs))
    return function


def _run_exit_functions(functions: list[tuple[Function, Any, Any]]) -> None:
    while functions:
        function, args, kwargs = functions.pop()
        try:
            function(*args, **kwargs)
        except Exception:  # as Python does at its end
            traceback.print_exc()


def _close_progress_bars() -> None:
    """Close the progress bars of tqdm, as the end of Python does: a bar that is open leaves the cursor in its line."""
    bars = getattr(getattr(sys.modules.get("tqdm.std"), "tqdm", None), "_instances", ())
    for bar in list(bars):
        bar.close()


# --- the script ------------------------------------------------------------------------------------------------------


def run_script(
    script: Script, *, mode: FakeTensorMode, steps: int | None = 2, allow_writes: bool = False,
    notes: list[str] | None = None, takes_longest: bool = False, makes_data: bool = False,
) -> ScriptResult:  # fmt: skip
    """Run it inside of a mode that the caller has entered. `notes` is a list to add to. `takes_longest`: batches of loaders
    are the longest one. `makes_data`: data sets that are not here are made up."""
    result = ScriptResult(notes=[] if notes is None else notes)
    counter = StepCounter(steps)
    with ExitStack() as stack:
        stack.callback(os.chdir, os.getcwd())  # reports are written where the user is
        overlay = None if allow_writes else stack.enter_context(Overlay())
        stack.enter_context(_replace_main(script))
        hold = stack.enter_context(active(REHEARSAL))
        stack.enter_context(counter)
        stack.enter_context(_push(_modes, mode))
        stack.enter_context(_push(_takes_longest, takes_longest))
        stack.enter_context(make_missing_data(makes_data))
        stack.enter_context(adapt_libraries(hold, result.notes, allow_writes))
        handle = register_optimizer_step_post_hook(counter.count)
        stack.callback(handle.remove)
        exits = stack.enter_context(_push(_at_exit, []))
        stack.enter_context(_push(_processes, os.getpid()))
        try:
            _run_as_main(script)
        except EndOfScript:
            result.was_ended = True
        except SystemExit as ended:
            result.exit_code = _read_exit_code(ended.code)
        except KeyboardInterrupt:
            result.exit_code = INTERRUPTED
        except BaseException as error:
            result.exit_code = 1
            result.error = format_error(error)
            result.is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        finally:
            _run_exit_functions(exits)
            _close_progress_bars()
        result.steps = counter.steps
        if overlay is not None:
            result.writes = overlay.writes
    return result


_processes: list[int] = []
"""Of rehearsals; those that a script forks are no part of it."""


@patch_call("os._exit", during=REHEARSAL)
def leave_as_by_exit(original: Callable[[int], Any], status: int) -> Any:
    """The process is that of the report, too."""
    is_own = _processes[-1:] == [os.getpid()] and threading.current_thread() is threading.main_thread()
    if is_own:
        raise SystemExit(status)
    original(status)


@contextmanager
def _push(stack: list[Any], value: object) -> Iterator[Any]:
    stack.append(value)
    try:
        yield value
    finally:
        stack.remove(value)


def _read_exit_code(code: object) -> int:
    """The exit code for an argument of `sys.exit`. As in Python, a text is printed to standard error and means 1."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _run_as_main(script: Script) -> None:
    if script.is_module:
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        return
    path = script.target
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec")
    main = ModuleType("__main__")
    main.__file__ = path
    vars(main).update(__cached__=None, __spec__=None, __annotations__={})
    sys.modules["__main__"] = main
    exec(code, vars(main))


@contextmanager
def _replace_main(script: Script) -> Iterator[None]:
    """`sys.argv`, `sys.path[0]` and `__main__` as the script expects them; no byte code is written beside it."""
    before = sys.argv, sys.path[:], sys.modules.get("__main__"), sys.dont_write_bytecode
    folder = os.getcwd() if script.is_module else os.path.dirname(os.path.realpath(script.target))
    sys.argv = [script.target, *script.arguments]
    sys.path[:] = [folder, *sys.path[1:]]
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.argv, sys.path[:], main, sys.dont_write_bytecode = before
        if main is not None:
            sys.modules["__main__"] = main


# --- tracebacks ------------------------------------------------------------------------------------------------------


def format_error(error: BaseException) -> str:
    """The traceback that Python would print, without frames of ours."""
    shown = traceback.TracebackException(type(error), error, drop_own_frames(error.__traceback__), compact=True)
    chain: list[Any] = [shown]
    while chain:
        part = chain.pop()
        kept = [frame for frame in part.stack if not is_own_file(frame.filename)]
        part.stack = traceback.StackSummary.from_list(kept)
        chain += [other for other in (part.__cause__, part.__context__) if other is not None]
    return "".join(shown.format())
