"""Facts about a rehearsal from outside of its sandbox: written files, and the level of isolation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from understudy.report.rehearsal import Isolation, Rehearsal
from understudy.simulation.sandbox import LANDLOCK, PYTHON, SandboxResult

WEAKER = {
    LANDLOCK: "files: Landlock refuses writes outside of a temporary folder, but not chmod, utime and extended attributes",
    PYTHON: "files: protected by Python patches only; writes of C++ code and other programs reach the disk",
}


def add_isolation(rehearsal: Rehearsal, result: SandboxResult, lines: Mapping[str, str]) -> Rehearsal:
    """`lines`: of the program, by the path that they write to."""
    sandbox = result.sandbox
    written: list[dict[str, Any]] = [
        {"what": what, "target": path, "line": lines.get(path, ""), "count": 1}
        for what, path in result.writes
        if "/__pycache__" not in path
    ]
    notes = []
    if sandbox.level in WEAKER:
        reason = sandbox.reason or "no namespaces"
        notes.append(f"{WEAKER[sandbox.level]} ({reason}; see docs/running-scripts.md)")
    if result.is_full:
        notes.append("files: no space left for files of the script; choose a folder with --scratch")
    return dataclasses.replace(
        rehearsal,
        writes=[*written, *rehearsal.writes],
        assumptions=[*rehearsal.assumptions, *notes],
        isolation=Isolation(sandbox.level, sandbox.reason),
    )
