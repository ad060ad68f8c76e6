"""cli: the command `understudy`. Questions that need no torch are answered without it.

    understudy devices [--json] [--cards FILE]    the cards that can be simulated
    understudy replay SNAPSHOT                    who held the memory of a real run, and what other settings would give
    understudy calibrate SNAPSHOT --device CARD   measure a card by a real run on it

    snapshots    replay, calibrate
    tables       plain text for terminals and pipes

A command is one `Command` in `COMMANDS`: its arguments, and a function that returns the exit code. What is wrong with the
input is one line on standard error, and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NoReturn

from understudy import __version__
from understudy.cli.snapshots import (
    add_calibrate_arguments,
    add_replay_arguments,
    calibrate_card,
    replay_snapshot,
)
from understudy.errors import UnderstudyError
from understudy.simulation.catalogue import GB, TERA, Card, GiB, list_cards, read_cards, read_software

USAGE = 2
"""The exit code for wrong input."""


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _make_parser().parse_args(arguments)
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


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="understudy", description="Rehearse PyTorch programs on hardware that is not here.")
    parser.add_argument("--version", action="version", version=f"understudy {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.summary, description=command.summary)
        command.add_arguments(own)
        own.set_defaults(command=command)
    return parser


# understudy devices


def _add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="all figures with their sources, sizes in bytes")
    parser.add_argument("--cards", metavar="FILE", help="a TOML file with cards of your own, listed first")


def _list_devices(options: argparse.Namespace) -> int:
    cards = (*(read_cards(options.cards) if options.cards else ()), *list_cards())
    if options.json:
        record = {"software": asdict(read_software()), "devices": [card.to_record() for card in cards]}
        print(json.dumps(record, indent=2))
        return 0
    rows = [DEVICE_COLUMNS, *(_device_row(card) for card in cards)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(DEVICE_COLUMNS))]
    for row in rows:
        columns = zip(row, widths, _LEFT, strict=True)
        cells = [cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in columns]
        print("  ".join(cells).rstrip())
    print(DEVICE_NOTES.format(software=read_software()))
    return 0


DEVICE_COLUMNS = ("device", "name", "GiB", "outside", "capability", "SMs", "GB/s", "fp32 TF", "bf16 TF", "link GB/s")
_LEFT = (True, True, *(False,) * 8)
DEVICE_NOTES = """
Memory as the driver reports it. Outside: what a process holds outside of torch's allocator (~ not published: typical).
Dense throughput. A dash is unknown, or not there. All figures with their sources: --json.
Simulated software: {software}."""


def _device_row(card: Card) -> tuple[str, ...]:
    return (
        card.key,
        card.name,
        f"{card.memory / GiB:.2f}",
        f"{'~' if card.context is None and card.outside else ''}{card.outside / GiB:.2f}",
        f"{card.capability[0]}.{card.capability[1]}" if card.capability else "-",
        str(card.multiprocessors or "-"),
        _format_scaled(card.bandwidth, GB),
        _format_scaled(card.throughput.get("float32"), TERA),
        _format_scaled(card.throughput.get("bfloat16"), TERA),
        _format_scaled(card.interconnect_bandwidth, GB),
    )


def _format_scaled(figure: float | None, unit: int) -> str:
    if figure is None:
        return "-"
    return f"{figure / unit:,.0f}" if figure >= 100 * unit else f"{figure / unit:.1f}"


COMMANDS = (
    Command("devices", "List the cards that can be simulated.", _add_device_arguments, _list_devices),
    Command("replay", "Who held the memory of a real run, from its snapshot.", add_replay_arguments, replay_snapshot),
    Command("calibrate", "Measure a card by a snapshot of a real run on it.", add_calibrate_arguments, calibrate_card),
)
