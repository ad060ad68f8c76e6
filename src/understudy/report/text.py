"""A `Rehearsal` as text: the verdict, then tables. Plain and the same everywhere when it is piped.

print(write_text(rehearsal))                    plain, 100 columns
print_text(rehearsal)                           for the terminal: its width, colours unless NO_COLOR is set
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from understudy.report.rehearsal import (
    DOES_NOT_FIT,
    FAILED,
    FITS,
    NO_VERDICT,
    TIGHT,
    ModuleRow,
    Rehearsal,
    Sanity,
)
from understudy.report.times import write_assumptions, write_cost, write_seconds, write_step

WIDTH, LEAST_WIDTH = 100, 40
BAR = 12
DEPTH = 3
ROWS = 12
MOST_LISTED = 8
COLOURS = {FITS: "32", TIGHT: "33", DOES_NOT_FIT: "31", FAILED: "31", NO_VERDICT: "31"}


def print_text(rehearsal: Rehearsal, file: TextIO | None = None) -> None:
    file = file or sys.stdout
    is_terminal = file.isatty()
    has_columns = os.environ.get("COLUMNS", "").isdecimal()
    width = shutil.get_terminal_size((WIDTH, 24)).columns if is_terminal or has_columns else WIDTH
    has_colour = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(write_text(rehearsal, width, has_colour), file=file)


def write_text(rehearsal: Rehearsal, width: int = WIDTH, has_colour: bool = False) -> str:
    width = max(LEAST_WIDTH, width)
    sections = [
        _write_categories(rehearsal, width),
        _write_modules(rehearsal, width),
        _write_lines(rehearsal, width),
        _write_operators(rehearsal, width),
        _write_notes(rehearsal),
        _write_answers(rehearsal),
        _write_writes(rehearsal),
    ]
    headline = clean(rehearsal.headline)
    if has_colour:
        headline = f"\033[1;{COLOURS[rehearsal.verdict]}m{headline}\033[0m"
    lines = "\n\n".join(section for section in sections if section).split("\n")
    basis = [
        part
        for line in (*write_sanity(rehearsal.sanity), *write_times(rehearsal))
        for part in textwrap.wrap(clean(line), width, subsequent_indent="  ")
    ]
    return "\n".join([headline, *basis, "", *(clean(line) for line in lines)])


def write_sanity(sanity: Sanity) -> list[str]:
    """The line under the verdict: its basis; and warnings."""
    many = sanity.steps > 1
    steps = f"{sanity.steps} optimizer step{'s' if many else ''}"
    if not sanity.optimizers:
        steps = f"{sanity.steps} backward pass{'es' if many else ''} without an optimizer of torch.optim"
    if not sanity.steps:
        steps = f"no optimizer step, {'backward passes' if sanity.has_backward else 'forward only'}"
    inputs = f"inputs of the model: {' | '.join(sanity.inputs)}" if sanity.inputs else "no model was called"
    rows = f"rows made up: {', '.join(sanity.made_up)}" if sanity.made_up else "rows from the program"
    size = sanity.optimizer_state_bytes
    state = f"optimizer state {format_size(size)}" if size else "no optimizer state"
    return [
        f"rests on: {steps}; {inputs}; {rows}; {state}",
        *(f"warning: {warning}" for warning in sanity.warnings),
    ]


def write_times(rehearsal: Rehearsal) -> list[str]:
    """The lines below the verdict."""
    if rehearsal.time is None:
        return []
    cost = rehearsal.time.cost
    return [write_step(rehearsal.time), *([write_cost(cost)] if cost is not None else [])]


def clean(text: str) -> str:
    """A text of the user's program that is safe to print: control characters, and those that change the direction of
    writing, are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- sections


def _write_categories(rehearsal: Rehearsal, width: int) -> str:
    peak = rehearsal.peak
    rows = sorted(
        ((size, name.replace("_", " ")) for name, size in rehearsal.categories.items() if size), reverse=True
    )
    total = sum(size for size, _ in rows)
    if rehearsal.device.kind != "cpu":
        rest = peak.reserved_bytes - total
        rows.append((max(0, rest), "cached, rounding and fragmentation"))
        total += max(0, rest)
    table = [
        (name, format_size(size), _format_share(size, total), _draw_bar(size, total)) for size, name in rows
    ]
    table.append(("in all", format_size(total), "", ""))
    step = f"step {peak.step + 1}, " if rehearsal.steps else ""
    where = f"{step}{peak.phase}" if peak.phase else "the run"
    return write_table(f"Where the memory goes ({where})", ("", "bytes", "", ""), table, width)


def _write_modules(rehearsal: Rehearsal, width: int) -> str:
    nodes = fold_modules(rehearsal.modules)
    total = sum(row.bytes for row in rehearsal.modules)
    if not total or not any(row.kind for row in rehearsal.modules):
        return ""
    table = [
        (
            node.label,
            format_size(node.bytes),
            _format_share(node.bytes, total),
            format_size(node.parameters),
            format_size(node.activations),
            _format_count(node.macs),
            write_seconds(node.seconds),
        )
        for node in nodes
        if node.bytes or node.macs
    ][: 2 * ROWS]
    heads = ("", "bytes", "", "parameters", "activations", "MACs", "time")
    return write_table("By module (at the peak; MACs and time of the run)", heads, table, width)


def _write_lines(rehearsal: Rehearsal, width: int) -> str:
    total = sum(row.bytes for row in rehearsal.lines)
    shown = [row for row in rehearsal.lines if row.bytes][:ROWS]
    if not shown:
        return ""
    table = [
        (
            shorten_place(row.line) or "(no line)",
            format_size(row.bytes),
            _format_share(row.bytes, total),
            write_seconds(row.seconds),
            row.source,
        )
        for row in shown
    ]
    heads = ("", "bytes", "", "time", "")
    return write_table("By line of the program (at the peak; time of the run)", heads, table, width)


def _write_operators(rehearsal: Rehearsal, width: int) -> str:
    table = [
        (
            row.operator.removeprefix("aten."),
            f"{row.calls:,}",
            _format_count(row.macs),
            format_size(row.bytes_moved),
            write_seconds(row.seconds),
            row.kind,
        )
        for row in rehearsal.operators[:ROWS]
    ]
    coverage = rehearsal.coverage
    title = (
        f"Operators: {_format_count(rehearsal.macs)} MACs, {_format_count(rehearsal.flops)} FLOPs (fma=2), "
        f"{coverage.known:,}/{coverage.operators:,} calls known"
    )
    return write_table(title, ("", "calls", "MACs", "moved", "time", "kind"), table, width) if table else ""


def _write_notes(rehearsal: Rehearsal) -> str:
    notes = list(rehearsal.assumptions)
    unknown = rehearsal.coverage.unknown
    if unknown:
        names = ", ".join(sorted(unknown)[:6])
        notes.append(
            f"no formula for the FLOPs of {names}: {rehearsal.coverage.unknown_share:.1%} of the moved bytes"
        )
    if rehearsal.time is not None:
        notes += write_assumptions(rehearsal.time)
    return "Notes\n" + "\n".join(f"  - {clean(note)}" for note in notes) if notes else ""


def _write_answers(rehearsal: Rehearsal) -> str:
    return _write_list("Reads of missing data, and the answers:", list_answers(rehearsal))


def _write_writes(rehearsal: Rehearsal) -> str:
    return _write_list(
        "Kept from the disk and the network (--write allows it):",
        [describe_write(entry) for entry in rehearsal.writes],
    )


def _write_list(title: str, rows: Sequence[str]) -> str:
    more = [f"… {len(rows) - MOST_LISTED} more, in --json"] if len(rows) > MOST_LISTED else []
    return "\n".join([title, *(f"  {clean(row)}" for row in (*rows[:MOST_LISTED], *more))]) if rows else ""


def list_answers(rehearsal: Rehearsal) -> list[str]:
    """The answered reads as text. Equal texts are one row: a package may read in several places below one line."""
    counts: dict[str, int] = defaultdict(int)
    for entry in rehearsal.answers:
        place = str(entry["line"]).split(": ")[0]
        counts[f"{place}: {entry['read']} of {entry['tensor']} → {entry['answer']!r}"] += entry["count"]
    return [f"{answer}, {count:,} times" if count > 1 else answer for answer, count in counts.items()]


def describe_write(entry: dict[str, Any]) -> str:
    return f"{entry['what']} {entry['target']}"


# --- modules, repeated ones folded


@dataclass
class ModuleNode:
    """A row of the module table, with the sums of all modules below it: one module, or the same module of
    repeated layers."""

    path: str
    kinds: set[str] = field(default_factory=set)
    count: int = 0
    numbers: list[set[int]] = field(default_factory=list)
    bytes: int = 0
    parameters: int = 0
    activations: int = 0
    macs: int = 0
    seconds: float = 0.0
    label: str = ""

    def add(self, row: ModuleRow) -> None:
        self.bytes += row.bytes
        self.parameters += row.parameters
        self.activations += row.activations
        self.macs += row.macs
        self.seconds += row.seconds


def fold_modules(rows: Sequence[ModuleRow], depth: int = DEPTH) -> list[ModuleNode]:
    """The rows of the module table, repeated layers folded: `blocks.0..31 (Block x32)`. Modules below `depth` have no rows
    of their own; they are in the sums of the rows above them."""
    nodes: dict[str, ModuleNode] = {}
    children: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        parts = row.path.split(".") if row.path else []
        for length in range(len(parts) + 1):
            prefix = ".".join("*" if part.isdecimal() else part for part in parts[:length])
            node = nodes.setdefault(prefix, ModuleNode(prefix))
            node.add(row)
            numbers = [int(part) for part in parts[:length] if part.isdecimal()]
            while len(node.numbers) < len(numbers):
                node.numbers.append(set())
            for seen, number in zip(node.numbers, numbers, strict=True):
                seen.add(number)
            if length == len(parts):
                node.kinds.add(row.kind)
                node.count += 1
            if length:
                children[".".join(prefix.split(".")[:-1])].add(prefix)
    return _list_nodes(nodes, children, "", None, 0, depth)


def _list_nodes(
    nodes: dict[str, ModuleNode],
    children: dict[str, set[str]],
    path: str,
    above: str | None,
    level: int,
    depth: int,
) -> list[ModuleNode]:
    """A row for each node from this one on. `above`: the path of the row that it stands below. What only wraps another
    module, as those of PEFT do, is a row and no level of the depth."""
    node = nodes.get(path)
    if node is None:
        return []
    below = sorted(children[path], key=lambda child: -nodes[child].bytes)
    is_container = len(below) == 1 and below[0].endswith("*")
    is_wrapper = len([child for child in below if nodes[child].kinds]) == 1
    found: list[ModuleNode] = []
    if not is_container:
        node.label = "  " * level + _describe_node(node, above)
        found.append(node)
    if level < depth or is_container or is_wrapper:
        shown, lower = (above, level) if is_container else (path, level + 1)
        for child in below:
            found += _list_nodes(
                nodes, children, child, shown, lower, depth + (is_wrapper and not is_container)
            )
    return found


def _describe_node(node: ModuleNode, above: str | None) -> str:
    kind = "/".join(sorted(filter(None, node.kinds)))
    ranges = iter(node.numbers)
    parts = [_write_range(next(ranges)) if part == "*" else part for part in node.path.split(".")]
    name = ".".join(parts[len(above.split(".")) if above else 0 :]) or (
        "(whole model)" if kind else "(whole program)"
    )
    times = f" x{node.count}" if node.count > 1 else ""
    return f"{name} ({kind}{times})" if kind else name


def _write_range(numbers: set[int]) -> str:
    first, last = min(numbers), max(numbers)
    return f"{first}" if first == last else f"{first}..{last}"


# --- figures and tables


def format_size(size: float) -> str:
    """Bytes in binary units: "1.50 GiB", "512 B"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:.0f} B"


def format_range(low: int, high: int, unit: str = " GiB") -> str:
    """ "0.53-0.67 GiB": an estimate from `low` to `high` bytes."""
    first, last = (f"{size / (1 << 30):.2f}" for size in (low, high))
    return f"{first}{unit}" if first == last else f"{first}-{last}{unit}"


def _format_count(number: int) -> str:
    if number == 0:
        return "-"
    for unit, scale in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)


def _format_share(size: int, total: int) -> str:
    return f"{100 * size / total:.1f}%" if total else ""


def _draw_bar(size: int, total: int) -> str:
    return "#" * round(BAR * size / total) if total else ""


def write_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """A table whose columns of figures are aligned to the right, and those of words to the left; words are cut to the
    width."""
    rows = [[clean(cell) for cell in row] for row in ([heads, *rows] if any(heads) else rows)]
    columns = len(heads)
    is_words = [index == 0 or all(not row[index][:1].isdecimal() for row in rows) for index in range(columns)]
    widths = [max(len(row[index]) for row in rows) for index in range(columns)]
    if is_words[-1]:
        widths[-1] = min(widths[-1], max(12, width - 2 * columns - sum(widths[:-1])))
    while (
        len(widths) > 2
        and 2 + sum(widths) + 2 * (len(widths) - 1) > width
        and _measure_first_column(widths, width) < 12
    ):
        columns -= 1  # a narrow terminal: the last column goes
        widths = widths[:columns]
    widths[0] = min(widths[0], max(12, _measure_first_column(widths, width)))
    over = 2 + sum(widths) + 2 * (columns - 1) - width
    if over > 0 and is_words[columns - 1]:
        widths[columns - 1] = max(4, widths[columns - 1] - over)
    lines = [title]
    for row in rows:
        cells = [
            _shorten(cell, size).ljust(size) if words else _shorten(cell, size).rjust(size)
            for cell, size, words in zip(row, widths, is_words, strict=False)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def _measure_first_column(widths: Sequence[int], width: int) -> int:
    """The width that is left for the first column."""
    return width - 2 - sum(widths[1:]) - 2 * (len(widths) - 1)


def _shorten(text: str, size: int) -> str:
    """Keep the end of a path, its most specific part."""
    if len(text) <= size:
        return text
    kept = max(1, size - 1)
    return "…" + text[len(text) - kept :] if os.sep in text and " " not in text else text[:kept] + "…"


def shorten_place(line: str) -> str:
    """Lines of installed packages without the place where they are installed."""
    return line.rpartition(f"site-packages{os.sep}")[2]
