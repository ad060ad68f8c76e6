"""The options that a script offers, read from its parser: the script runs until it parses its command line, and ends there.

    with read_parsers(True) as found: …                 raises ParserRead in the script
    found[0]    {"flags": ["--batch"], "name": "batch", "kind": "int", "default": 8, "choices": None, "help": "…"}

`argparse`, and what is built on it and parses with it: `HfArgumentParser`, `simple_parsing`. A parser that only looks ahead
(`parse_known_args`) is read, and the script goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
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
WHOLE = ("argparse", "transformers.hf_argparser", "simple_parsing")
"""Modules that parse the whole command line where they call `parse_known_args`."""


OF_LIBRARIES = ("fire", "hydra")
"""Modules whose parser is not that of the script."""


class ParserRead(BaseException):
    """Raised in a script whose parser has been read. No `Exception`: a script that handles errors is ended as well."""


_found: list[list[dict[str, Any]]] = []
_left: list[list[str]] = []
"""The words that parsers which only look ahead have left: the script's next parser gets them."""


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
        _left.clear()


@patch_call("argparse.ArgumentParser.parse_known_args", during=REHEARSAL)
def read_parser(
    original: Callable[..., Any], self: argparse.ArgumentParser, args: Any = None, *rest: Any, **kwargs: Any
) -> Any:
    """Parsers of libraries, which are given words of their own, are not the script's."""
    if not _found or (args is not None and list(args) not in (sys.argv[1:], *_left)):
        return original(self, args, *rest, **kwargs)
    callers = _list_callers()
    if next((name for name in callers if name != "argparse"), "").startswith(OF_LIBRARIES):
        return original(self, args, *rest, **kwargs)
    _found[-1].extend(describe_parser(self, sys.argv[1:] if args is None else list(args)))
    if callers[0].startswith(WHOLE):
        raise ParserRead
    result = original(self, args, *rest, **kwargs)
    _left.append(list(result[1]))
    return result


def _list_callers() -> list[str]:
    """Names of the modules that call the parser, the innermost first, without those of this package."""
    names = []
    frame = sys._getframe(2)
    while frame is not None:
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back  # type: ignore[assignment]
    return [name for name in names if name.partition(".")[0] != "understudy"] or [""]


def describe_parser(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Its options, and those of the command that the words name. `before`: the word of that command, which stands after
    the options of the parser itself."""
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    word = next((word for word in words for action in commands if word in action.choices), "")
    for action in parser._actions:
        option = describe_action(action)
        if option is not None:
            yield {**option, "before": word} if word else option
    for action in commands:
        if word in action.choices:
            yield from describe_parser(action.choices[word], words[list(words).index(word) + 1 :])


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
