"""cli: the command `understudy`. Questions that need no torch are answered without it.

    commands    what a command is; errors in one line
    run         understudy run [--device D] script.py …: rehearse a script
    devices     understudy devices [--json] [--cards FILE]: the cards that can be simulated
    fixes       understudy fix --device D script.py …: the cheapest changes that make a script fit
                understudy fit --device D --vary batch=1..512 script.py …: the largest size that fits
    models      understudy model TARGET, check TARGET, graph TARGET: layers, output for every size, operators
    reports     understudy report RUN.json [--html FILE], diff A.json B.json: saved rehearsals
    snapshots   understudy replay SNAPSHOT, calibrate SNAPSHOT --device D: memory snapshots of real runs

    changes     changes of a script that save memory, found in its source
    rehearsals  many rehearsals on an executor
    targets     models by name, inputs as specs
    layer_table what each module takes, gives and keeps
    tables      plain text for terminals and pipes

argparse serves: it answers in 30 ms, and an option parser of another kind would be one more thing to install. A command is
one `Command` in `COMMANDS`: its arguments, and a function that returns the exit code. What is wrong with the input is one
line on standard error, and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from understudy import __version__
from understudy.cli import devices, fixes, models, reports, run, snapshots
from understudy.cli.commands import USAGE, Command, Parser
from understudy.errors import UnderstudyError

COMMANDS = (
    run.COMMAND, *fixes.COMMANDS, *reports.COMMANDS, *models.COMMANDS, *snapshots.COMMANDS, devices.COMMAND,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(list(sys.argv[1:] if arguments is None else arguments))
    command: Command = options.command
    try:
        code = command.run(options)
        sys.stdout.flush()
    except UnderstudyError as error:
        print(f"understudy {command.name}: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # The reader of a pipe has gone (`| head`). What Python would still flush at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="understudy", description="Rehearse PyTorch programs on hardware that is not here.")
    parser.add_argument("--version", action="version", version=f"understudy {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    program: list[str] = []
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(own)
        own.set_defaults(command=command)
        if command.takes_program and arguments[:1] == [command.name]:
            given, program = own.split_program(arguments[1:])
            arguments = [command.name, *given]
    options = parser.parse_args(arguments)
    options.program = program
    return options
