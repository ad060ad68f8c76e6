"""Running a script as `python script.py` would, for a few steps, without harm.

    result = run_script(Script("train.py", ("--batch", "8")), steps=2, mode=mode)
    result.exit_code, result.steps, result.writes

The script runs as `__main__`, in this process, inside of the mode. A step is one `Optimizer.step` that ran; with several
optimizers, the one that steps most seldom counts. After so many steps the script is ended as by `sys.exit`: `finally` and
`atexit` run, what comes after the training does not.
"""

from __future__ import annotations

import inspect
import io
import multiprocessing
import os
import pickle
import runpy
import shlex
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import understudy.simulation.absent_weights  # registers its patches
import understudy.simulation.connections
import understudy.simulation.nvidia_smi  # as above
import understudy.simulation.offline.arrays
import understudy.simulation.offline.data_sets
import understudy.simulation.offline.graphs
import understudy.simulation.offline.labels
import understudy.simulation.offline.metrics
import understudy.simulation.offline.models
import understudy.simulation.offline.nltk_data
import understudy.simulation.offline.pipelines
import understudy.simulation.offline.processors
import understudy.simulation.offline.tokenizers
import understudy.simulation.offline.vision
import understudy.simulation.processes
import understudy.simulation.quantised  # noqa: F401  # registers what bitsandbytes needs
from understudy import _torch
from understudy.fake.mode import FakeTensorMode
from understudy.lines import (
    drop_own_frames,
    find_user_line,
    frames_to_show,
    is_installed,
    is_own_file,
    user_frames,
)
from understudy.patching import FILE_OVERLAY, REHEARSAL, active, patch_call
from understudy.simulation.batches import BatchSizes, take_longest
from understudy.simulation.interrupts import keep_interrupts
from understudy.simulation.libraries import adapt_libraries
from understudy.simulation.library_kernels import STAND_INS
from understudy.simulation.library_kernels.modules import offer_stand_ins
from understudy.simulation.machine import ACTIVE
from understudy.simulation.offline.switch import make_missing_data
from understudy.simulation.overlay import Overlay, active_overlay
from understudy.simulation.parsers import ParserRead, read_parsers
from understudy.simulation.run_notes import RunNotes, widen_margin
from understudy.simulation.sandbox import NAMESPACES, NO_SANDBOX, PYTHON, Sandbox
from understudy.simulation.shard_hints import describe_sharding
from understudy.simulation.started_ranks import RanksWanted, run_waiting_processes
from understudy.simulation.steps import EndOfScript, StepCounter
from understudy.simulation.storages import ObservedMode
from understudy.simulation.write_log import Write, WriteLog, active_log, follow_lines

Function = Callable[..., Any]
INTERRUPTED = 130


@dataclass(frozen=True)
class Script:
    """A file, or a module as of `python -m`, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    entry: bytes = b""
    """A pickled function of it and its arguments, which is called in place of the whole: see `RanksWanted`."""
    rank: int = 0
    """The number with which that function is called."""

    @property
    def name(self) -> str:
        return self.target if self.is_module else os.path.basename(self.target)

    @property
    def command(self) -> str:
        """As it is typed after `python`."""
        return shlex.join([*(["-m"] if self.is_module else []), self.target, *self.arguments])


@dataclass
class ScriptResult:
    """`exit_code` as of `python script.py`; `error` is the script's own traceback, "" if there is none."""

    exit_code: int = 0
    error: str = ""
    exit_line: str = ""
    """Where the script ended itself by `sys.exit` or `os._exit`."""
    is_out_of_memory: bool = False
    """Whether that error is torch's OutOfMemoryError."""
    sharded: str = ""
    """The module in which that error was raised, if its parameters are sharded: see `shard_hints`."""
    steps: int = 0
    was_ended: bool = False
    """Whether it was ended after the steps that were wanted."""
    wanted_ranks: RanksWanted | None = None
    """The ranks that it was about to start, where the runner can start them."""
    writes: list[Write] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    """Lines of the program by the path that they write to, for files that the kernel lists."""
    notes: RunNotes = field(default_factory=RunNotes)
    optimizers: list[str] = field(default_factory=list)
    """The classes of those that the script has made."""
    parsers: list[dict[str, Any]] = field(default_factory=list)
    """Options that its parsers show, if it was to end there."""
    least: dict[torch.device, int] = field(default_factory=dict)
    """Bytes that its training needs at least, by formula."""
    longest_text: int = 0
    """The number of tokens that texts are cut to, where a tokenizer was asked for it."""

    def record_end(self, error: BaseException) -> None:
        """How the script ended, where it did not return."""
        if isinstance(error, (EndOfScript, ParserRead)):
            self.was_ended = True
        elif isinstance(error, RanksWanted):
            self.wanted_ranks = error
        elif isinstance(error, SystemExit):
            self.exit_code = _read_exit_code(error.code)
            self.exit_line = find_user_line(error.__traceback__)
        elif isinstance(error, KeyboardInterrupt):
            self.exit_code = INTERRUPTED
        else:
            self.exit_code = 1
            self.error = format_error(error)
            self.is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
            self.sharded = describe_sharding(error)


NOT_COMPILED = "flex_attention called without torch.compile"
COMPILED_MARGIN = 0.15
COMPILED = (
    "torch.compile: rehearsed as eager; a compiled program usually allocates less (0 to 25%), "
    "convolutions in bfloat16 may reserve up to 15% more"
)


@patch_call("torch.compile", during=REHEARSAL)
def label_compilation(original: Function, *args: object, **kwargs: object) -> Any:
    """Inside a mode a compiled function runs as eager: the report says so. Functions of torch's own that compile
    themselves, as flex attention does where it is called eagerly, are not counted."""
    mode = _torch.active_fake_mode()
    if mode is not None and not sys._getframe(2).f_globals.get("__name__", "").startswith("torch."):
        mode.stands_for_compiled = True
        if not _is_importing_package():
            widen_margin(COMPILED_MARGIN, COMPILED)
    return original(*args, **kwargs)


def _is_importing_package() -> bool:
    """Whether an installed package is being imported: bitsandbytes compiles functions then that a program may never call."""
    for frame in user_frames():
        if not is_installed(frame.f_code.co_filename):
            return False
        if frame.f_code.co_name == "<module>":
            return True
    return False


@patch_call("warnings.showwarning", during=REHEARSAL)
def name_line_of_script(
    original: Function, message: Warning | str, category: type[Warning], filename: str, lineno: int, *args: object,
    **kwargs: object,
) -> None:  # fmt: skip
    """A warning names the caller of a function of torch: where that is a patch of ours, the script's own line instead.
    That a program is not compiled is not so: it runs uncompiled here only."""
    mode = _torch.active_fake_mode()
    if mode is not None and mode.stands_for_compiled and str(message).startswith(NOT_COMPILED):
        return
    if is_own_file(filename):
        frame, _ = frames_to_show()
        filename, lineno = (filename, lineno) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    original(message, category, filename, lineno, *args, **kwargs)


# --- threads and exits -----------------------------------------------------------------------------------------------

_modes: list[FakeTensorMode] = []


@patch_call("threading.Thread.start", during=REHEARSAL)
def start_in_mode(original: Function, self: threading.Thread) -> None:
    """A mode is active in one thread: the threads of a script, such as those that load weights, enter it themselves."""
    mode = _torch.active_fake_mode()
    if _modes and mode is _modes[-1] and (not self.daemon or _runs_code_of_program(self)):
        run = self.run

        def run_in_mode() -> None:
            with mode:
                run()

        vars(self)["run"] = run_in_mode
    original(self)


def _runs_code_of_program(thread: threading.Thread) -> bool:
    """Daemons of libraries, such as those that watch progress bars or write logs, go on without the mode."""
    run: Any = vars(thread).get("_target") or type(thread).run
    code = getattr(inspect.unwrap(run), "__code__", None)
    return (
        code is not None
        and not is_installed(code.co_filename)
        and not code.co_filename.startswith(sys.base_prefix)
    )


_at_exit: list[list[tuple[Function, Any, Any]]] = []


@patch_call("atexit.register", during=REHEARSAL)
def collect_exit_functions(
    original: Function, function: Function, *args: object, **kwargs: object
) -> Function:
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


@contextmanager
def _protect_files(sandbox: Sandbox, log: WriteLog) -> Iterator[None]:
    """Where no namespaces do, the overlay does. Nothing, where the script may write."""
    if sandbox.level == NO_SANDBOX:
        yield
    elif sandbox.level == NAMESPACES:
        follow_lines()
        with log:
            yield
    else:
        # Ranks of one program share the overlay of their parent.
        overlay = nullcontext() if active_overlay() is not None else Overlay(sandbox.folder, log)
        with overlay, active(FILE_OVERLAY):
            yield


@patch_call("torch.save", "torch.jit.save", during=REHEARSAL)
def note_line_of_save(original: Function, what: object, f: object, *args: object, **kwargs: object) -> Any:
    """C++ opens the file: the report names the line of the program."""
    log = active_log()
    if log is not None:
        log.note_line(f)
    return original(what, f, *args, **kwargs)


def run_script(
    script: Script, *, mode: FakeTensorMode, steps: int | None = 2, sandbox: Sandbox | None = None,
    is_online: bool = False, takes_longest: bool = False, makes_data: bool = False, reads_parser: bool = False,
) -> ScriptResult:  # fmt: skip
    """Run it inside of a mode that the caller has entered. `sandbox` is the one that this process is in. `takes_longest`:
    batches of loaders are the longest one. `makes_data`: data sets that are not here are made up. `reads_parser`: the script
    ends where it parses its command line."""
    result = ScriptResult()
    counter = StepCounter(steps)
    process = os.getpid()
    sandbox = sandbox or Sandbox(PYTHON)
    log = WriteLog(is_online)
    with ExitStack() as stack:
        stack.enter_context(keep_interrupts(ObservedMode.forget_storage))
        stack.callback(os.chdir, os.getcwd())  # reports are written where the user is
        stack.enter_context(_protect_files(sandbox, log))
        stack.enter_context(_replace_main(script))
        hold = stack.enter_context(active(REHEARSAL))
        stack.enter_context(counter)
        stack.enter_context(_push(_modes, mode))
        stack.enter_context(result.notes)
        sizes = stack.enter_context(BatchSizes())
        stack.enter_context(take_longest(takes_longest))
        stack.enter_context(make_missing_data(makes_data))
        stack.enter_context(adapt_libraries(hold, sandbox.level, is_online))
        if ACTIVE.machine is not None:
            stack.enter_context(offer_stand_ins(STAND_INS))
        result.parsers = stack.enter_context(read_parsers(reads_parser))
        handle = register_optimizer_step_post_hook(counter.count)
        stack.callback(handle.remove)
        exits = stack.enter_context(_push(_at_exit, []))
        stack.enter_context(_push(_processes, process))
        try:
            _run_as_main(script)
            run_waiting_processes()
        except BaseException as error:
            result.record_end(error)
        finally:
            _run_exit_functions(exits)
            _close_progress_bars()
            if os.getpid() != process:
                _end_forked_process(result)
            sizes.warn()
        result.steps, result.longest_text = counter.steps, sizes.longest_text
        result.least = counter.least
        result.optimizers = sorted(counter.names)
        result.writes, result.lines = log.entries, log.lines
    return result


def _end_forked_process(result: ScriptResult) -> None:
    """A process that the script has forked ends as in Python: the report is its parent's."""
    print(result.error, end="", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(result.exit_code)


_processes: list[int] = []
"""Processes of rehearsals, without those that a script forks."""


@patch_call("os._exit", during=REHEARSAL)
def leave_as_by_exit(original: Callable[[int], Any], status: int) -> Any:
    """Ending the process would lose the report."""
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
    if script.entry:
        _run_entry(script)
        return
    if script.is_module:
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        return
    path = script.target
    if _is_package_of_scripts(path):
        runpy.run_path(path, run_name="__main__")
        return
    with io.open_code(os.path.abspath(path)) as file:
        code = compile(file.read(), path, "exec")
    main = ModuleType("__main__")
    main.__file__ = path
    vars(main).update(__cached__=None, __spec__=None, __annotations__={})
    sys.modules["__main__"] = main
    exec(code, vars(main))


def _is_package_of_scripts(path: str) -> bool:
    """A folder or an archive (zipapp) with a `__main__.py`."""
    return os.path.isdir(path) or zipfile.is_zipfile(path)


def _run_entry(script: Script) -> None:
    """As `multiprocessing` does in a process that it has spawned: the script is imported, then its function is called."""
    if script.is_module:
        names = runpy.run_module(script.target, run_name="__mp_main__", alter_sys=True)
    else:
        names = runpy.run_path(script.target, run_name="__mp_main__")
    main = ModuleType("__mp_main__")
    vars(main).update(names)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    function, arguments = pickle.loads(script.entry)
    function(script.rank, *arguments)


@contextmanager
def _replace_main(script: Script) -> Iterator[None]:
    """`sys.argv`, `sys.path[0]` and `__main__` as the script expects them; no byte code is written beside it. How its
    processes are started is restored as well: a script may choose it once."""
    before = sys.argv, sys.path[:], sys.modules.get("__main__"), sys.dont_write_bytecode
    start_method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    folder = os.getcwd() if script.is_module else _find_folder(script.target)
    sys.argv = [script.target, *script.arguments]
    sys.path[:] = [folder, *sys.path[1:]]
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.argv, sys.path[:], main, sys.dont_write_bytecode = before
        multiprocessing.set_start_method(start_method, force=True)
        if main is not None:
            sys.modules["__main__"] = main


def _find_folder(path: str) -> str:
    """What Python puts first in `sys.path`: the folder of the script, or a folder or archive of scripts itself."""
    whole = os.path.realpath(path)
    return whole if _is_package_of_scripts(whole) else os.path.dirname(whole)


# --- tracebacks ------------------------------------------------------------------------------------------------------


def format_error(error: BaseException) -> str:
    """The traceback that Python would print, without frames of ours."""
    shown = traceback.TracebackException(
        type(error), error, drop_own_frames(error.__traceback__), compact=True
    )
    chain: list[Any] = [shown]
    while chain:
        part = chain.pop()
        kept = [frame for frame in part.stack if not is_own_file(frame.filename)]
        part.stack = traceback.StackSummary.from_list(kept)
        chain += [other for other in (part.__cause__, part.__context__) if other is not None]
    return "".join(shown.format())
