"""What a command is, and how wrong input ends one."""

from __future__ import annotations

import argparse
import difflib
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

USAGE, INTERRUPTED = 2, 130
"""Exit codes: wrong input; Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Command:
    """`takes_program`: all words from the first positional argument on belong to another program."""

    name: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    takes_program: bool = False


class HelpFormatter(argparse.HelpFormatter):
    """Prose is wrapped to the width of the terminal; indented lines, which are examples, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_example, part in itertools.groupby(text.splitlines(), lambda line: line[:1] in (" ", "")):
            words = list(part)
            lines += words if is_example else textwrap.wrap(" ".join(words), max(width, 20))
        return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """Print the error in one line, and exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": HelpFormatter, "allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")

    def refuse(self, argument: str) -> NoReturn:
        """An argument that the command does not know."""
        near = difflib.get_close_matches(argument.partition("=")[0], self._option_string_actions, n=1)
        what = (
            f"unknown option {argument}" if argument.startswith("-") else f"unexpected argument {argument!r}"
        )
        self.error(f"{what}: did you mean {near[0]}?" if near else what)

    def takes_value(self, option: str) -> bool:
        """Whether the argument after this option is its value."""
        action = self._option_string_actions.get(option)
        return action is not None and action.nargs is None and not isinstance(action.const, bool)

    def split_program(self, arguments: list[str]) -> tuple[list[str], list[str]]:
        """The command's own options, and the program with its arguments, from its name or from -m on."""
        position = 0
        while position < len(arguments):
            argument = arguments[position]
            if argument == "-m" or argument == "--" or not argument.startswith("-"):
                break
            position += 2 if self.takes_value(argument) else 1
        program = arguments[position:]
        return arguments[:position], program[1:] if program[:1] == ["--"] else program
