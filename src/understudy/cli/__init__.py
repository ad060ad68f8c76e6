"""cli: the command `understudy`. Questions that need no torch are answered without it.

    commands    what a command is; errors in one line
    run         understudy run [--device D] script.py …: rehearse a script
    clusters    understudy torchrun …, and the options of `run` for several ranks
    devices     understudy devices [--json] [--cards FILE]: the cards that can be simulated
    fixes       understudy fix --device D script.py …: the cheapest changes that make a script fit
    plans       understudy plan --device 8xh100 train.py …: the best way to train this script on these cards
    fits        understudy fit --device D --vary batch=1..512 script.py …: the largest size that fits
    models      understudy model TARGET, check TARGET, graph TARGET: layers, output for every size, operators
    reports     understudy report RUN.json [--html FILE], diff A.json B.json: saved rehearsals
    patches     understudy patches: what is changed of torch, when and why
    snapshots   understudy replay SNAPSHOT, calibrate SNAPSHOT --device D: memory snapshots of real runs

    program_words  the program of a command line, as people type it
    script_runs one rehearsal of a script in a sandbox, and what comes back from it
    changes     changes of a script that save memory, found in its source
    rehearsals  many rehearsals on an executor
    noted_reads the files that a rehearsal reads
    search_space  what `plan` searches, from options and the script
    configurations  JSON, TOML and YAML files that a command line names
    targets     models by name, inputs as specs
    layer_table what each module takes, gives and keeps
    progress    a line on terminals, beside what a script writes
    tables      plain text for terminals and pipes
    time_options  options about time: limits, the host, the cost of a run
    completion  of commands, options and cards, in shells
    __main__    python -m understudy.cli

argparse serves: it answers in 30 ms, and an option parser of another kind would be one more thing to install. A command is
one row of `COMMANDS`, and one `Command`: its arguments, and a function that returns the exit code. What is wrong with the
input is one line on standard error, and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence

from understudy import __version__
from understudy.cli.commands import INTERRUPTED, USAGE, Command, Parser
from understudy.cli.program_words import read_program
from understudy.errors import UnderstudyError

COMMANDS = (
    ("run", "Rehearse a script on a card that is not here.", "run"),
    ("torchrun", "Rehearse a torchrun command on all ranks.", "run"),
    ("fix", "Find the cheapest changes that make a script fit.", "fixes"),
    ("fit", "Find the largest batch size, or length, that fits.", "fits"),
    ("plan", "Find the best way to train a script on these cards.", "plans"),
    ("report", "Show a saved rehearsal, or write it for other tools.", "reports"),
    ("diff", "Compare two rehearsals.", "reports"),
    ("model", "List the layers of a model.", "models"),
    ("check", "Show output shapes of a model for every input size.", "models"),
    ("graph", "List the operators of a model.", "models"),
    ("replay", "Show what held the memory of a real run, from its snapshot.", "snapshots"),
    ("calibrate", "Measure a card by a snapshot of a real run on it.", "snapshots"),
    ("devices", "List the cards that can be simulated.", "devices"),
    ("patches", "List the functions of torch that are patched, when and why.", "patches"),
)
"""Name, summary and module of each command. Modules are imported on demand, so that --help is quick."""


EXAMPLES = """\
examples:
    understudy run --device h100 train.py --batch 8        does it fit, and where does the memory go?
    understudy fix --device 4090 train.py --batch 32       which changes make it fit?
    understudy fit --device h100 --vary batch=1..512 train.py
    understudy plan --device 8xh100 train.py               which options train fastest on these cards?
    understudy model model.py:Net --input "x: f32[8, 3, 224, 224]"
    understudy run --help                                  the options of a command"""


def find_command(name: str, module: str) -> Command:
    found = importlib.import_module(f"understudy.cli.{module}")
    commands: tuple[Command, ...] = getattr(found, "COMMANDS", None) or (found.COMMAND,)
    return next(command for command in commands if command.name == name)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = "understudy"
    _allow_every_character()
    try:
        if words and words[0] in ("--complete", "--show-completion", "--install-completion"):
            code = _answer_completion(words)
        else:
            options = _parse(words)
            name = f"understudy {options.command.name}"
            code = options.command.run(options)
        sys.stdout.flush()
    except UnderstudyError as error:
        from understudy.report.text import clean  # why: only errors need it

        for line in f"{name}: {error}".split("\n"):
            print(clean(line), file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The pipe is closed (`| head`). Output that Python would flush at its end is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _allow_every_character() -> None:
    """Print a question mark for characters that the locale can't encode. In the C locale, Python's handler of errors is
    `surrogateescape`, which raises as well."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _answer_completion(words: list[str]) -> int:
    from understudy.cli.completion import answer_completion  # why: only shells ask

    modules = {name: module for name, _, module in COMMANDS}
    return answer_completion(
        words, lambda name: find_command(name, modules[name]) if name in modules else None, list(modules)
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="understudy", description="Rehearse PyTorch programs on hardware that is not here.")
    parser.epilog = EXAMPLES
    parser.add_argument("--version", action="version", version=f"understudy {__version__}")
    for option, text in (("--show-completion", "print"), ("--install-completion", "install")):
        parser.add_argument(option, metavar="SHELL", help=f"{text} completion for bash, zsh or fish")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    program: list[str] = []
    parsers = [parser]
    for name, summary, module in COMMANDS:
        own = commands.add_parser(name, help=summary, description=summary)
        if arguments[:1] != [name]:
            continue
        command = find_command(name, module)
        command.add_arguments(own)
        own.set_defaults(command=command)
        parsers.append(own)
        if command.takes_program:
            given, program = own.split_program(arguments[1:])
            arguments = [name, *given]
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parsers[-1].refuse(unknown[0])
    options.program = read_program(program)
    return options
