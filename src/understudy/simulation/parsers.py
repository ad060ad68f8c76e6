"""The options that a script offers, read from its parser: the script runs until it parses its command line, and ends there.

    with read_parsers(True) as found: …                 raises ParserRead in the script
    found[0]    {"flags": ["--batch"], "name": "batch", "kind": "int", "default": 8, "choices": None, "help": "…"}

`argparse`, and what is built on it and parses with it: `HfArgumentParser`, `jsonargparse`. A parser that only looks ahead
(`parse_known_args`) is read, and the script goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from understudy.patching import REHEARSAL, patch_call

FLAG, SWITCH, TRUTH, INTEGER, NUMBER, CHOICE, TEXT = (
    "flag",
    "switch",
    "truth",
    "int",
    "float",
    "choice",
    "text",
)
"""How a value is given: `--x`; `--x` and `--no-x`; `--x True`; a number; one of some words; any text."""
WHOLE = ("argparse", "transformers.hf_argparser", "jsonargparse")
"""Modules that parse the whole command line where they call `parse_known_args`."""


class ParserRead(BaseException):
    """Raised in a script whose parser has been read. No `Exception`: a script that handles errors is ended as well."""


_found: list[list[dict[str, Any]]] = []


@contextmanager
def read_parsers(is_wanted: bool) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    if not is_wanted:
        yield found
        return
    _found.append(found)
    try:
        yield found
    finally:
        _found.pop()


@patch_call("argparse.ArgumentParser.parse_known_args", during=REHEARSAL)
def read_parser(
    original: Callable[..., Any], self: argparse.ArgumentParser, args: Any = None, *rest: Any, **kwargs: Any
) -> Any:
    """Parsers of libraries, which are given words of their own, are not the script's."""
    if not _found or (args is not None and list(args) != sys.argv[1:]):
        return original(self, args, *rest, **kwargs)
    _found[-1].extend(option for action in self._actions if (option := describe_action(action)) is not None)
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller == __name__ or caller.partition(".")[0] == "understudy":
        caller = sys._getframe(3).f_globals.get("__name__", "")
    if caller.startswith(WHOLE):
        raise ParserRead
    return original(self, args, *rest, **kwargs)


def describe_action(action: argparse.Action) -> dict[str, Any] | None:
    """The option as plain data; None for `--help`, and for arguments without an option string, such as names of files."""
    flags = [flag for flag in action.option_strings if flag.startswith("--")] or list(action.option_strings)
    if (
        not flags
        or action.dest in ("help", argparse.SUPPRESS)
        or action.nargs in ("*", "+", argparse.REMAINDER)
    ):
        return None
    kind, choices = _find_kind(action)
    default = action.default if isinstance(action.default, (bool, int, float, str)) else None
    return {
        "flags": flags, "name": flags[0].lstrip("-").replace("-", "_"), "kind": kind, "default": default,
        "choices": choices, "help": action.help if isinstance(action.help, str) else "",
    }  # fmt: skip


def _find_kind(action: argparse.Action) -> tuple[str, list[Any] | None]:
    if isinstance(action, argparse.BooleanOptionalAction):
        return SWITCH, None
    if action.nargs == 0:
        return FLAG, None
    if action.nargs == "?" and action.const is True:
        return TRUTH, None
    if action.choices is not None:
        words = [
            choice if isinstance(choice, (int, float, str)) else str(choice) for choice in action.choices
        ]
        return CHOICE, words
    kind = action.type
    if kind in (int, float):
        return (INTEGER if kind is int else NUMBER), None
    if isinstance(action.default, bool):
        return TRUTH, None
    if kind is None or kind is str:
        return TEXT, None
    # A function that reads a number, such as one that checks its range.
    default = action.default
    return (INTEGER if isinstance(default, int) else NUMBER if isinstance(default, float) else TEXT), None
