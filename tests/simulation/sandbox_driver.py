"""Runs each hostile script in a sandbox of its own: `python sandbox_driver.py LEVEL FOLDER`, without torch.

FOLDER has a folder for each script. Prints, as JSON, what was in force and how each script ended.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from hostile_scripts import NEEDS_NAMESPACES, PRELUDE, SCRIPTS

from understudy.simulation.sandbox import NAMESPACES, Sandbox, SandboxOptions, namespaces, run_sandboxed


def make_function(text: str) -> Callable[[Sandbox], bytes]:
    def run(sandbox: Sandbox) -> bytes:
        exec(compile(PRELUDE + text, "<script>", "exec"), {"__name__": "script"})
        return b"done"

    return run


def refuse_namespaces(is_online: bool) -> None:
    raise OSError(1, "refused")


def main() -> None:
    level, folder = sys.argv[1:]
    os.environ["HOME"] = folder
    if level != NAMESPACES:
        namespaces.enter_namespaces = refuse_namespaces
    results = {}
    for name, text in SCRIPTS.items():
        if level != NAMESPACES and name in NEEDS_NAMESPACES:
            continue
        os.chdir(os.path.join(folder, name))
        result = run_sandboxed(make_function(text), SandboxOptions())
        results[name] = {
            "level": result.sandbox.level,
            "exit_code": result.exit_code,
            "is_done": result.data == b"done",
            "writes": result.writes,
        }
    assert "torch" not in sys.modules
    print(json.dumps(results))


if __name__ == "__main__":
    main()
