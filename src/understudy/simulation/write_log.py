"""What a rehearsed script did not do to the real disk, or to other machines: the list of the report.

with WriteLog() as log:
    note_refused("push", "user/model")      # from anywhere inside
log.entries
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from understudy.lines import user_line
from understudy.simulation.run_notes import active_notes


@dataclass
class Write:
    """Something that was not done to the real disk, or to a service."""

    what: str
    target: str
    line: str
    count: int = 1

    def to_record(self) -> dict[str, Any]:
        return {"what": self.what, "target": self.target, "line": self.line, "count": self.count}


@dataclass
class WriteLog:
    """The entries, and the line of the program that last wrote to a path. `is_online`: other machines may be reached."""

    is_online: bool = False
    entries: list[Write] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    _index: dict[tuple[str, str], Write] = field(default_factory=dict)

    def __enter__(self) -> WriteLog:
        _active.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _active.remove(self)

    def note(self, what: str, target: str) -> None:
        key = (what, target)
        if key in self._index:
            self._index[key].count += 1
            return
        self._index[key] = Write(what, target, user_line())
        self.entries.append(self._index[key])

    def note_line(self, path: object) -> None:
        """The program writes to this path now."""
        if isinstance(path, (str, bytes, os.PathLike)):
            self.lines[os.path.realpath(os.fsdecode(path))] = user_line()


_active: list[WriteLog] = []


def active_log() -> WriteLog | None:
    return _active[-1] if _active else None


def note_refused(what: str, target: str) -> None:
    """List something that a rehearsal does not do."""
    if _active:
        _active[-1].note(what, target)


# --- lines, where the kernel keeps the files ----------------------------------------------------------------------------

PATH_EVENTS = {
    "os.remove": 0, "os.rmdir": 0, "os.mkdir": 0, "os.truncate": 0, "os.chmod": 0, "os.rename": 1, "os.link": 1,
    "os.symlink": 1,
}  # fmt: skip
"""Audit events of Python, and which of their arguments is the path that changes."""
FOLLOWED = frozenset({"open", "subprocess.Popen", *PATH_EVENTS})
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_asking = threading.local()


def follow_lines() -> None:
    """Note the line of each write that goes through Python, from here to the end of this process: an audit hook can't be
    removed."""
    sys.addaudithook(_on_audit_event)


def _note_program(words: Any) -> None:
    notes = active_notes()
    if notes is not None:
        notes.programs.append(words if isinstance(words, str) else " ".join(map(os.fsdecode, words)))


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in FOLLOWED:  # such as sys._getframe, which comes with each operator
        return
    if not _active or getattr(_asking, "is_busy", False):
        return
    if event == "subprocess.Popen":
        _note_program(arguments[1])
        return
    if event == "open":
        path = arguments[0] if isinstance(arguments[2], int) and arguments[2] & WRITING else None
    else:
        path = arguments[PATH_EVENTS[event]]
    if path is not None:
        _asking.is_busy = True  # finding the line opens files itself
        try:
            _active[-1].note_line(path)
        finally:
            _asking.is_busy = False
