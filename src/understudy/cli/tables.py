"""Plain text for terminals and pipes: tables that fit the width, sizes, and names of a program that do no harm."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence

from understudy.errors import UnderstudyError
from understudy.report.text import clean, format_size

__all__ = [
    "clean", "format_count", "format_size", "format_table", "get_terminal_width", "parse_seconds", "parse_size",
    "print_table", "shorten",
]  # fmt: skip

LEAST_CELL = 12
"""No column is cut to less."""


UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
         "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes: "1.5GiB", "200 MiB". A number without a unit could be anything, unless it is 0."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if found is not None and found[2] in UNITS:
        return round(float(found[1]) * UNITS[found[2]])
    if found is None or found[2] or float(found[1]):
        raise UnderstudyError(f"expected a size such as 40GiB or 512MiB, got {text!r}")
    return 0


TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float:
    """Seconds: "0.412s", "250 ms"."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([a-zµ]*)\s*", text.lower())
    if found is None or (found[2] or "s") not in TIMES or not float(found[1]) > 0:
        raise UnderstudyError(f"expected a time such as 0.5s or 250ms, got {text!r}")
    return float(found[1]) * TIMES[found[2] or "s"]


def format_count(number: float) -> str:
    """1,234 as it is, larger numbers with a letter: "12.3K", "1.88G"."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "K")):
        if abs(number) >= unit:
            scaled = number / (1e3 if name == "K" else unit)
            return f"{scaled:.{max(0, 3 - len(str(int(abs(scaled)))))}f}{name}"
    return f"{number:,.0f}"


def get_terminal_width() -> int | None:
    """Columns of the terminal; None where the output goes to a file or a pipe, which take lines of any length."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return max(20, int(os.environ["COLUMNS"]))
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def shorten(text: str, width: int, keep_end: bool = False) -> str:
    """Return at most `width` characters: the end of a path, its most specific part."""
    if len(text) <= width:
        return text
    return "…" + text[len(text) - width + 1 :] if keep_end else text[: width - 1] + "…"


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool], width: int | None = None
) -> list[str]:
    """Lines of a table. `left` columns are text, and the widest of them is cut where the table is wider than `width`."""
    cells = [[clean(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max((i for i, is_left in enumerate(left) if is_left), key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= LEAST_CELL:
            break
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        widths[widest] = max(LEAST_CELL, widths[widest] - excess)
    lines = []
    for row in cells:
        shown = [
            shorten(cell, size, keep_end=os.sep in cell).ljust(size) if is_left else cell.rjust(size)
            for cell, size, is_left in zip(row, widths, left, strict=True)
        ]
        lines.append("  ".join(shown).rstrip())
    return lines


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[bool]) -> None:
    for line in format_table(header, rows, left, get_terminal_width()):
        print(line)
