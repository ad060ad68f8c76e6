"""A function in a child process, in the strongest sandbox that this machine has.

    this process ── fork ──► enters namespaces ── fork ──► first process: mounts ── fork ──► the function
     outside, waits            waits                        waits, lists what was written

A step that fails is found in a child, because it can't be undone; the next weaker sandbox is tried then. What the function
returns comes back as bytes, in memory that both processes have. Nothing that comes back is code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NoReturn

from understudy.simulation.sandbox import system_calls as calls
from understudy.simulation.sandbox.landlock import restrict_writes
from understudy.simulation.sandbox.private_folders import make_private_folder
from understudy.simulation.sandbox.supervision import block_signals, end_orphans, supervise

if sys.platform == "linux":
    from understudy.simulation.sandbox import namespaces
    from understudy.simulation.sandbox.written_files import list_written

NAMESPACES, LANDLOCK, PYTHON, NO_SANDBOX = "namespaces", "landlock", "python", "off"
INTERRUPTED = 130
READY = b"ready"


@dataclass(frozen=True)
class SandboxOptions:
    """`scratch`: a folder for written files, instead of memory; `size`: its limit in bytes, by default half of the
    machine's memory. `forks`: whether this process may be forked, which has to be one of ours."""

    is_online: bool = False
    allows_writes: bool = False
    scratch: str | None = None
    size: int | None = None
    forks: bool = True


@dataclass(frozen=True)
class Sandbox:
    """What is in force. `reason`: why nothing stronger is. `folder`: where files may be written, by Landlock."""

    level: str
    reason: str = ""
    folder: str | None = None


@dataclass
class SandboxResult:
    """`data` is None where the function did not return; `exit_code` is negative for a signal."""

    sandbox: Sandbox
    data: bytes | None = None
    exit_code: int = 0
    writes: list[tuple[str, str]] = field(default_factory=list)
    """What was done and the path, as the kernel has it; only of namespaces."""
    read_only: list[str] = field(default_factory=list)
    """Folders that could not be overlaid."""
    is_full: bool = False
    """Whether no more could be written."""


Function = Callable[[Sandbox], bytes]


class UnavailableError(Exception):
    """A sandbox that this machine does not have."""


def run_sandboxed(function: Function, options: SandboxOptions | None = None) -> SandboxResult:
    """Call it in the strongest sandbox there is; here, with patches of Python alone, where none is possible."""
    options = options or SandboxOptions()
    if options.allows_writes:
        return _call_here(function, Sandbox(NO_SANDBOX, "writing is allowed"))
    if sys.platform != "linux":
        return _call_here(function, Sandbox(PYTHON, f"no sandbox on {sys.platform}"))
    if not options.forks or threading.active_count() > 1:
        return _call_here(function, Sandbox(PYTHON, "the process has other threads, or has loaded torch"))
    try:
        return _run_in_namespaces(function, options)
    except UnavailableError as error:
        reason = str(error)
    try:
        return _run_under_landlock(function, options, reason)
    except UnavailableError as error:
        return _run_in_child(function, Sandbox(PYTHON, f"{reason}; {error}"), lambda: None)


def _call_here(function: Function, sandbox: Sandbox) -> SandboxResult:
    return SandboxResult(sandbox, function(sandbox))


# --- namespaces ------------------------------------------------------------------------------------------------------


def _run_in_namespaces(function: Function, options: SandboxOptions) -> SandboxResult:
    foreign = namespaces.find_foreign_file(os.getcwd())
    if foreign is not None:
        raise UnavailableError(
            f"no namespaces: {foreign} belongs to another user or group and can't be overlaid"
        )
    with ExitStack() as stack:
        data, report = stack.enter_context(_SharedMemory()), stack.enter_context(_SharedMemory())
        scratch = None
        if options.scratch is not None:
            scratch = stack.enter_context(make_private_folder(os.path.realpath(options.scratch)))
        work = _Work(function, options, scratch, data, report)
        with block_signals() as mask, _Pipe() as answers, _Pipe() as permission:
            work.mask, work.answers, work.permission = mask, answers, permission
            child = _fork()
            if child == 0:
                _leave(work.run_outer)
            answers.close_writing()
            try:
                _expect(answers, READY)
                namespaces.write_maps(child)
                permission.write(READY)
                _expect(answers, READY)
            except (OSError, UnavailableError) as error:
                permission.close_writing()
                os.waitpid(child, 0)
                raise UnavailableError(f"no namespaces: {error}") from None
            code = supervise(child)
        found = json.loads(report.read() or b"{}")
    return SandboxResult(
        Sandbox(NAMESPACES),
        data.content or None,
        found.get("exit_code", code),
        [(what, path) for what, path in found.get("writes", [])],
        found.get("read_only", []),
        found.get("is_full", False),
    )


def _expect(answers: _Pipe, wanted: bytes) -> None:
    answer = answers.read()
    if answer != wanted:
        raise UnavailableError(answer.decode(errors="replace") or "the process ended")


@dataclass
class _Work:
    """What the processes of one sandbox share."""

    function: Function
    options: SandboxOptions
    scratch: str | None
    data: _SharedMemory
    report: _SharedMemory
    mask: set[signal.Signals] = field(default_factory=set)
    answers: Any = None
    permission: Any = None

    def run_outer(self) -> int:
        """Outside of the PID namespace that it makes; privileges come with the maps that its parent writes."""
        self.permission.close_writing()
        try:
            namespaces.enter_namespaces(self.options.is_online)
        except OSError as error:
            self.answers.write(str(error.strerror).encode())
            return 1
        _end_with_parent()
        self.answers.write(READY)
        if self.permission.read() != READY:
            return 1
        child = _fork()
        if child == 0:
            _leave(self.run_first)
        self.answers.close_writing()
        code = supervise(child)
        return code if code >= 0 else 128 - code

    def run_first(self) -> int:
        """The first process of the PID namespace: all others end with it."""
        _end_with_parent()
        try:
            tree = namespaces.build_tree(self.options.size or _find_default_size(), self.scratch)
            if not self.options.is_online:
                namespaces.start_loopback()
        except OSError as error:
            self.answers.write((error.strerror or str(error)).encode())
            return 1
        child = _fork()
        if child == 0:
            for layer in tree.layers:
                layer.close()
            _leave(self.run_function)
        self.answers.write(READY)
        self.answers.close_writing()
        code = supervise(child)
        space = os.fstatvfs(tree.layers[0].upper)
        found = {
            "exit_code": code,
            "writes": list_written(tree.layers),
            "read_only": tree.read_only,
            "is_full": space.f_bavail < space.f_blocks // 100,
        }
        self.report.write(json.dumps(found).encode())
        return code if code >= 0 else 128 - code

    def run_function(self) -> int:
        self.answers.close_writing()
        namespaces.give_up_privileges()
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        return _call_function(self.function, Sandbox(NAMESPACES), self.data)


def _find_default_size() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


# --- weaker ones -----------------------------------------------------------------------------------------------------


def _run_under_landlock(function: Function, options: SandboxOptions, reason: str) -> SandboxResult:
    with make_private_folder(options.scratch) as folder:
        sandbox = Sandbox(LANDLOCK, reason, os.path.realpath(folder))
        return _run_in_child(function, sandbox, lambda: restrict_writes(folder, options.is_online))


def _run_in_child(function: Function, sandbox: Sandbox, prepare: Callable[[], None]) -> SandboxResult:
    with _SharedMemory() as data, block_signals() as mask, end_orphans(), _Pipe() as answers:
        child = _fork()
        if child == 0:

            def run() -> int:
                _end_with_parent()
                try:
                    prepare()
                except OSError as error:
                    answers.write((error.strerror or str(error)).encode())
                    return 1
                answers.write(READY)
                answers.close_writing()
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                return _call_function(function, sandbox, data)

            _leave(run)
        answers.close_writing()
        try:
            _expect(answers, READY)
        except UnavailableError as error:
            os.waitpid(child, 0)
            raise UnavailableError(f"no Landlock: {error}") from None
        code = supervise(child)
        data.read()
    return SandboxResult(sandbox, data.content or None, code)


# --- processes -------------------------------------------------------------------------------------------------------


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns where libraries have threads of their own: NumPy's end in the child, as NumPy means them to.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _leave(function: Callable[[], int]) -> NoReturn:
    """Run the rest of a forked process: nothing of its parent's frames runs in it, whatever happens."""
    code = 1
    try:
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_with_parent() -> None:
    calls.set_process_attribute(calls.PR_SET_PDEATHSIG, signal.SIGKILL)


def _call_function(function: Function, sandbox: Sandbox, data: _SharedMemory) -> int:
    code = 1
    try:
        data.write(function(sandbox))
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        calls.libc().fflush(None)
    return code


class _SharedMemory:
    """Bytes that one process writes and another one reads."""

    def __init__(self) -> None:
        self.content = b""

    def __enter__(self) -> _SharedMemory:
        if hasattr(os, "memfd_create"):
            self._file: Any = open(os.memfd_create("understudy"), "r+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.content:
            self.read()
        self._file.close()

    def write(self, content: bytes) -> None:
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]

    def read(self) -> bytes:
        self._file.seek(0)
        self.content = self._file.read()
        return self.content


class _Pipe:
    """One way between two processes."""

    def __enter__(self) -> _Pipe:
        self._reading, self._writing = os.pipe()
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._reading)
        self.close_writing()

    def close_writing(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def write(self, content: bytes) -> None:
        os.write(self._writing, content)

    def read(self) -> bytes:
        """The next message; nothing after the end of the other process."""
        return os.read(self._reading, 65536)
