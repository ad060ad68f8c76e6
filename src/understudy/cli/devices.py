"""understudy devices: the cards that can be simulated."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from understudy.cli.commands import Command
from understudy.cli.tables import get_terminal_width
from understudy.simulation.catalogue import GB, TERA, Card, GiB, list_cards, read_cards, read_software


def add_cards_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cards", metavar="FILE", help="a TOML file with cards of your own")


def read_own_cards(options: argparse.Namespace) -> tuple[Card, ...]:
    return read_cards(options.cards) if options.cards else ()


def _add_device_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
    understudy devices
    understudy devices --cards mine.toml --json"""
    parser.add_argument("--json", action="store_true", help="all figures with their sources, sizes in bytes")
    add_cards_argument(parser)


def _list_devices(options: argparse.Namespace) -> int:
    cards = (*read_own_cards(options), *list_cards())
    if options.json:
        record = {"software": asdict(read_software()), "devices": [card.to_record() for card in cards]}
        print(json.dumps(record, indent=2))
        return 0
    rows = [DEVICE_COLUMNS, *(_make_device_row(card) for card in cards)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(DEVICE_COLUMNS))]
    limit = get_terminal_width()
    while limit is not None and len(widths) > 3 and sum(widths) + 2 * (len(widths) - 1) > limit:
        widths.pop()  # a narrow terminal: the last column goes
    for row in rows:
        columns = zip(row, widths, _LEFT, strict=False)
        cells = [cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in columns]
        print("  ".join(cells).rstrip())
    print(DEVICE_NOTES.format(software=read_software()))
    return 0


DEVICE_COLUMNS = (
    "device",
    "name",
    "GiB",
    "outside",
    "capability",
    "SMs",
    "GB/s",
    "fp32 TF",
    "bf16 TF",
    "link GB/s",
)
_LEFT = (True, True, *(False,) * 8)
DEVICE_NOTES = """
Memory as the driver reports it. Outside: memory of a process outside of torch's allocator (~ not published: typical).
Dense throughput. A dash: unknown or not supported. All figures with their sources: --json.
Simulated software: {software}."""


def _make_device_row(card: Card) -> tuple[str, ...]:
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


COMMAND = Command("devices", _add_device_arguments, _list_devices)
