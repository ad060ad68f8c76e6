"""understudy patches: what is changed of torch, when and why."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import textwrap

from understudy.cli.commands import Command
from understudy.patching import ENGINE, SCOPES, Patch, Scope, find_place


def load_all_patches() -> None:
    """Import every module of the library, because any of them may register patches."""
    package = importlib.import_module("understudy")
    for module in pkgutil.walk_packages(package.__path__, "understudy."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def describe_patches() -> str:
    """The table of all patches: scope, place, reason."""
    lines = []
    for scope in SCOPES:
        lines += [f"While {scope.meaning} ({scope.name}):", ""]
        every = sorted((*ENGINE.registered, *ENGINE.found_places, *ENGINE.switches), key=lambda patch: patch.place)
        for patch in every:
            if patch.mask & scope.bit:
                lines += _describe(patch, scope)
        lines.append("")
    return "\n".join(lines)


def _describe(patch: Patch, scope: Scope) -> list[str]:
    others = [other.name for other in SCOPES if patch.mask & other.bit and other is not scope]
    is_absent = patch in ENGINE.registered and find_place(patch) is None
    notes = [f"also while {', '.join(others)}"] if others else []
    notes += ["not in this release of torch"] if is_absent else []
    note = f"  ({'; '.join(notes)})" if notes else ""
    by = f"{patch.make.__module__}.{patch.make.__qualname__}"
    reason = textwrap.wrap(" ".join(patch.reason.split()), 104, break_on_hyphens=False)
    return [f"  {patch.place}{note}", *(f"      {line}" for line in (*reason, f"by {by}"))]


def _add_patch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
    understudy patches | grep -A 3 torch.nn.functional"""


def _list_patches(options: argparse.Namespace) -> int:
    load_all_patches()
    print(describe_patches())
    return 0


COMMAND = Command("patches", _add_patch_arguments, _list_patches)
