"""The files that a rehearsal reads: what its result depends on beside the command line.

A line of text for each, written by an audit hook of Python in the process of the rehearsal and in those that it forks. Files
of the system and of installed packages are left out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

READS_VARIABLE = "UNDERSTUDY_NOTE_READS"
"""Names the file into which they are written."""
NOT_OF_THE_USER = (
    "/proc",
    "/sys",
    "/dev",
    "/etc",
    "/usr",
    sys.prefix,
    sys.base_prefix,
    str(Path(__file__).parents[1]),
)


def note_reads() -> None:
    """From now on, if the environment asks for it. A hook stays until its process ends."""
    target = os.environ.pop(READS_VARIABLE, None)
    if target is None:
        return
    stream = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    folder = os.path.dirname(target)
    noted: set[object] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], (str, bytes)) or arguments[0] in noted:
            return
        noted.add(arguments[0])
        path = os.path.abspath(os.fsdecode(arguments[0]))
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR) or "site-packages" in path or path.startswith(NOT_OF_THE_USER):
            return
        if not path.startswith(folder) or path.startswith(os.path.join(folder, "script", "")):
            os.write(stream, os.fsencode(path) + b"\n")

    sys.addaudithook(note)


def read_noted_files(reads: Path, moved: tuple[str, str]) -> tuple[str, ...]:
    """The files that are still there. `moved`: the folder of a copy of the script, and that of the script itself."""
    if not reads.exists():
        return ()
    copied, original = moved
    lines = reads.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    paths = (
        os.path.abspath(line.replace(copied, original)) if copied and copied in line else line
        for line in lines
    )
    return tuple(sorted({path for path in paths if os.path.isfile(path)}))
