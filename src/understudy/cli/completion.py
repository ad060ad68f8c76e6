"""Completion in shells: `understudy --show-completion bash`, `--install-completion`, and the answers that shells ask for.

A shell calls `understudy --complete POSITION WORD…` and gets one candidate in a line; where there is none, it offers files.
torch is not imported.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from understudy.cli.commands import Command, Parser
from understudy.errors import UnderstudyError
from understudy.simulation.catalogue import list_cards

SCRIPTS = {
    "bash": """\
_understudy_complete() {
    local IFS=$'\\n'
    COMPREPLY=( $(compgen -W "$(understudy --complete "$COMP_CWORD" "${COMP_WORDS[@]}" 2>/dev/null)" \\
        -- "${COMP_WORDS[COMP_CWORD]}") )
}
complete -o default -F _understudy_complete understudy
""",
    "zsh": """\
_understudy_complete() {
    local -a found
    found=(${(f)"$(understudy --complete $((CURRENT - 1)) "${words[@]}" 2>/dev/null)"})
    if (( $#found )); then compadd -- $found; else _files; fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _understudy_complete understudy
""",
    "fish": """\
function __understudy_complete
    set -l words (commandline -opc)
    understudy --complete (count $words) $words (commandline -ct) 2>/dev/null
end
complete -c understudy -a '(__understudy_complete)'
""",
}
RC_FILES = {"bash": ".bashrc", "zsh": ".zshrc"}

OPTIONS = ("--show-completion", "--install-completion")


def find_shell(words: Sequence[str]) -> str:
    """The shell that is named, or that of the user."""
    shell = words[0] if words else os.path.basename(os.environ.get("SHELL", ""))
    if shell not in SCRIPTS:
        raise UnderstudyError(f"expected a shell of {', '.join(SCRIPTS)}, got {shell or 'none'!r}")
    return shell


def answer_completion(
    words: Sequence[str], find: Callable[[str], Command | None], commands: Sequence[str]
) -> int:
    """The three options of `understudy` itself."""
    if words[0] == "--complete":
        try:
            position = int(words[1])
        except (IndexError, ValueError):
            raise UnderstudyError(
                "--complete is for shells: expected a position and the words of the line"
            ) from None
        found = find_candidates(list(words[2:]), position, find, commands)
        print("\n".join(found), end="\n" if found else "")
    elif words[0] == "--show-completion":
        print(SCRIPTS[find_shell(words[1:])], end="")
    else:
        print(install_completion(find_shell(words[1:]), Path.home()))
    return 0


def install_completion(shell: str, home: Path) -> str:
    """Install the completion, and return a message."""
    if shell == "fish":
        path = home / ".config" / "fish" / "completions" / "understudy.fish"
        text, is_there = SCRIPTS["fish"], False
    else:
        path = home / RC_FILES[shell]
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        line = f'eval "$(understudy --show-completion {shell})"'
        is_there = line in before.splitlines()
        text = f"{before}{'' if before.endswith(chr(10)) or not before else chr(10)}{line}\n"
    if is_there:
        return f"{path}: completion is already installed"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UnderstudyError(f"{path}: {error.strerror or error}") from None
    return f"written to {path}: open a new shell"


def find_candidates(
    words: list[str], position: int, find: Callable[[str], Command | None], commands: Sequence[str]
) -> list[str]:
    """What may stand at a position of the line, whose first word is `understudy` itself."""
    current = words[position] if position < len(words) else ""
    if position <= 1:
        offered: Sequence[str] = (*commands, "--help", "--version", *OPTIONS)
    else:
        command = find(words[1])
        offered = list(_offer_arguments(command, words[2:position], current)) if command is not None else ()
    return [word for word in offered if word.startswith(current)]


def _offer_arguments(command: Command, before: list[str], current: str) -> Iterator[str]:
    parser = Parser(prog=command.name)
    command.add_arguments(parser)
    if command.takes_program and parser.split_program(before)[1]:
        return
    actions = {option: action for action in parser._actions for option in action.option_strings}
    last = actions.get(before[-1]) if before else None
    if last is not None and parser.takes_value(before[-1]):
        yield from _offer_values(last)
    elif current.startswith("-"):
        yield from (option for option, action in actions.items() if action.help != argparse.SUPPRESS)


def _offer_values(action: argparse.Action) -> Iterator[str]:
    if action.dest == "device":
        yield from (card.key for card in list_cards() if card.kind != "cpu")
    elif action.choices is not None:
        yield from (str(choice) for choice in action.choices)
