"""understudy patches: the functions of torch that are replaced, when and why."""

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
    """Every place once, under the innermost scope in which it is patched: its patches with their reasons."""
    places: dict[str, list[Patch]] = {}
    for patch in (*ENGINE.registered, *ENGINE.found_places, *ENGINE.switches):
        places.setdefault(patch.place, []).append(patch)
    lines = []
    for scope in SCOPES:
        lines += [f"While {scope.meaning} ({scope.name}):", ""]
        for place, patches in sorted(places.items()):
            patches.sort(key=lambda patch: patch.rank)
            if patches[0].rank == scope.bit:
                lines += [f"  {place}", *(line for patch in patches for line in _describe(patch, scope))]
        lines.append("")
    return "\n".join(lines)


def _describe(patch: Patch, scope: Scope) -> list[str]:
    scopes = [other.name for other in SCOPES if patch.mask & other.bit]
    when = f"(while {', '.join(scopes)}) " if scopes != [scope.name] else ""
    is_absent = patch in ENGINE.registered and find_place(patch) is None
    note = "(not in this release of torch) " if is_absent else ""
    reason = textwrap.wrap(f"{when}{note}{' '.join(patch.reason.split())}", 104, break_on_hyphens=False)
    return [f"      {line}" for line in (*reason, f"by {patch.make.__module__}.{patch.make.__qualname__}")]


def _add_patch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
    understudy patches | grep -A 3 torch.nn.functional"""


def _list_patches(options: argparse.Namespace) -> int:
    load_all_patches()
    print(describe_patches())
    return 0


COMMAND = Command("patches", _add_patch_arguments, _list_patches)
