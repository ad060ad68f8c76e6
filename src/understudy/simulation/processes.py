"""Programs that a script starts where no namespaces hold them.

Programs that change nothing are run, all others are listed, and taken for done.

    subprocess.run(["git", "rev-parse", "HEAD"])     is run
    os.system("rm -rf checkpoints")                  is not: 0, as if it had been

Another program bypasses the overlay: its writes would reach the disk.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from understudy.patching import FILE_OVERLAY, patch_call
from understudy.simulation.overlay import active_overlay
from understudy.simulation.write_log import note_refused

Function = Callable[..., Any]

TELLING = frozenset(
    "arch basename cat df dirname du echo false file free getconf grep head id locale ls lscpu lsmod lspci nproc printenv "
    "ps pwd sleep stat sw_vers tail test tr true uname uptime wc which whoami".split()
)
"""Programs that change nothing, whatever their arguments are."""
TELLING_OPTIONS = {
    "hostname": re.compile(r"(-\w+ ?)*"),
    "ldconfig": re.compile("-p"),
    "nvidia-smi": re.compile(r"((--query|--format|-L|-q|-i|--id|\d)\S* ?)*"),
}
"""Programs that change nothing with these arguments."""
TELLING_COMMANDS = {
    "git": frozenset(
        "cat-file describe diff log ls-files ls-tree rev-list rev-parse show show-ref status".split()
    )
}
"""Programs that change nothing with these commands."""
WRITING_OPTIONS = re.compile(r"-[co].*|--output.*|--ext-diff|--exec.*|--config-env.*")
HARMLESS_REDIRECTION = re.compile(r"\d?>\s*/dev/null|\d>&\d")
BETWEEN_COMMANDS = re.compile(r"\|\||&&|[|;]")
WRITING_SHELL = re.compile(r"[<>`&\n]|\$\(")


def is_read_only(command: Any, is_shell: bool) -> bool:
    """Whether a command is known to change nothing. `command` is a line, or a list of words."""
    if is_shell:
        line = command if isinstance(command, (str, bytes)) else command[0]
        return all(map(_is_read_only, _split_line(os.fsdecode(line))))
    return _is_read_only(_list_words(command))


def _list_words(command: Any) -> list[str]:
    words = [command] if isinstance(command, (str, bytes, os.PathLike)) else command
    return [os.fsdecode(word) for word in words]


def _split_line(line: str) -> list[list[str]]:
    """The commands of a line of the shell; one without words where that is not sure."""
    line = HARMLESS_REDIRECTION.sub(" ", line)
    try:
        parts = [shlex.split(part) for part in BETWEEN_COMMANDS.split(line)]
    except ValueError:  # quotation marks around one of the signs
        return [[]]
    return [[]] if WRITING_SHELL.search(BETWEEN_COMMANDS.sub(" ", line)) else parts


def _is_read_only(words: Sequence[str]) -> bool:
    if not words:
        return False
    program, *arguments = os.path.basename(words[0]), *words[1:]
    if program in TELLING_OPTIONS:
        return bool(TELLING_OPTIONS[program].fullmatch(" ".join(arguments)))
    commands = TELLING_COMMANDS.get(program)
    if commands is None:
        return program in TELLING
    while arguments[:1] == ["-C"]:  # in another folder
        arguments = arguments[2:]
    named = [word for word in arguments if not word.startswith("-")]
    return bool(named) and named[0] in commands and not any(map(WRITING_OPTIONS.fullmatch, arguments))


def _is_refused(command: Any, is_shell: bool) -> bool:
    """Whether a rehearsal refuses to run the command; a refused one is listed."""
    overlay = active_overlay()
    if overlay is None or is_read_only(command, is_shell):
        return False
    note_refused("command", command if isinstance(command, str) else shlex.join(_list_words(command)))
    return True


def _make_empty_command() -> list[str]:
    """A command that does nothing, and succeeds."""
    found = shutil.which("true")
    return [found] if found else [sys.executable, "-S", "-c", ""]


class _Starting(threading.local):
    is_checked = False
    """Whether `subprocess.Popen` of this thread is starting a command that was checked: since Python 3.13, it calls
    `os.posix_spawn`, with the shell as the program."""


_starting = _Starting()


@patch_call("subprocess.Popen.__init__", during=FILE_OVERLAY)
def start_read_only_program(original: Function, self: object, args: Any, *rest: Any, **options: Any) -> None:
    """A rehearsal starts no program that may write."""
    if _is_refused(args, bool(options.get("shell"))):
        args = _make_empty_command()
        options = {**options, "shell": False, "executable": None}
    _starting.is_checked = True
    try:
        original(self, args, *rest, **options)
    finally:
        _starting.is_checked = False


@patch_call("os.system", during=FILE_OVERLAY)
def run_read_only_line(original: Function, command: Any) -> int:
    """As `subprocess.Popen`."""
    return 0 if _is_refused(command, True) else original(command)


@patch_call("os.posix_spawn", "os.posix_spawnp", during=FILE_OVERLAY)
def spawn_read_only_program(original: Function, path: Any, argv: Any, *args: Any, **kwargs: Any) -> int:
    """As `subprocess.Popen`."""
    if not _starting.is_checked and _is_refused(argv, False):
        argv = _make_empty_command()
        path = argv[0]
    return original(path, argv, *args, **kwargs)


@patch_call("os.execv", "os.execve", during=FILE_OVERLAY)
def refuse_to_replace_process(original: Function, path: Any, argv: Any, *args: Any) -> Any:
    """`exec` would replace the process of the rehearsal."""
    if _is_refused(argv, False):
        raise OSError(
            errno.EPERM,
            "a rehearsal can't replace its process by another program (--write allows it)",
            os.fsdecode(path),
        )
    return original(path, argv, *args)
