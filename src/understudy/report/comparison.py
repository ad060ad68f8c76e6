"""Two rehearsals side by side: what grew, and by which line.

comparison = compare(read_rehearsal("main.json"), read_rehearsal("change.json"))
comparison.growth                    bytes of the peak
write_markdown(comparison)           a table for a pull request
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.errors import UnderstudyError
from understudy.report.rehearsal import SCHEMA_VERSION, LineRow, Rehearsal
from understudy.report.text import format_size
from understudy.report.times import write_interval

LEAST_CHANGE = 1 << 16
"""Lines that change by less are not listed."""


class RehearsalFileError(UnderstudyError, ValueError):
    """A file that does not hold a rehearsal of this version."""


def read_rehearsal(path: str | Path) -> Rehearsal:
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise RehearsalFileError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise RehearsalFileError(f"{path}: expected a rehearsal, got invalid JSON") from None
    if not isinstance(data, dict) or "schema_version" not in data:
        raise RehearsalFileError(
            f"{path}: expected a rehearsal (a file of `understudy run --json`), got JSON without schema_version"
        )
    if data["schema_version"] != SCHEMA_VERSION:
        raise RehearsalFileError(
            f"{path}: expected schema_version {SCHEMA_VERSION}, got {data['schema_version']!r}: rehearse again"
        )
    try:
        return Rehearsal.from_dict(data)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RehearsalFileError(f"{path}: invalid rehearsal: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    before: int
    after: int
    source: str = ""

    @property
    def growth(self) -> int:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class RehearsalComparison:
    """`lines` are those that changed, the largest growth first."""

    before: Rehearsal
    after: Rehearsal
    figures: tuple[Difference, ...]
    categories: tuple[Difference, ...]
    lines: tuple[Difference, ...]
    modules: tuple[Difference, ...]

    @property
    def growth(self) -> int:
        """Growth of the reserved memory, which decides whether a run fits."""
        return self.after.peak.reserved_bytes - self.before.peak.reserved_bytes


def compare(before: Rehearsal, after: Rehearsal) -> RehearsalComparison:
    a, b = before.peak, after.peak
    figures = (
        Difference("reserved", a.reserved_bytes, b.reserved_bytes),
        Difference("allocated", a.allocated_bytes, b.allocated_bytes),
        Difference("fragmentation", a.fragmentation_bytes, b.fragmentation_bytes),
    )
    return RehearsalComparison(
        before,
        after,
        figures,
        _find_changes(before.categories, after.categories, least=1),
        _find_line_changes(before, after),
        _find_changes(
            {row.path: row.bytes for row in before.modules}, {row.path: row.bytes for row in after.modules}
        ),
    )


def _find_changes(
    before: Mapping[str, int], after: Mapping[str, int], least: int = LEAST_CHANGE
) -> tuple[Difference, ...]:
    found = [Difference(name, before.get(name, 0), after.get(name, 0)) for name in {**before, **after}]
    return tuple(sorted((c for c in found if abs(c.growth) >= least), key=lambda c: -c.growth))


def _find_line_changes(before: Rehearsal, after: Rehearsal) -> tuple[Difference, ...]:
    """Lines are matched by file and text, and equal ones by their order: an edit above them moves their numbers."""
    old, new = _index_lines(before.lines), _index_lines(after.lines)
    found = []
    for key in {**old, **new}:
        row = new.get(key) or old[key]
        before_bytes, after_bytes = (rows[key].bytes if key in rows else 0 for rows in (old, new))
        found.append(Difference(row.line, before_bytes, after_bytes, row.source))
    return tuple(sorted((c for c in found if abs(c.growth) >= LEAST_CHANGE), key=lambda c: -c.growth))


def _index_lines(rows: Sequence[LineRow]) -> dict[tuple[str, str, int], LineRow]:
    """The rows by file, text, and the number of lines with the same text above."""
    places = []
    for row in rows:
        file, _, number = row.line.rpartition(":")
        places.append((file, int(number) if number.isdecimal() else 0, row))
    counts: Counter[tuple[str, str]] = Counter()
    found = {}
    for file, _, row in sorted(places, key=lambda place: place[:2]):
        text = row.source or row.line
        found[file, text, counts[file, text]] = row
        counts[file, text] += 1
    return found


def write_markdown(comparison: RehearsalComparison, most: int = 10) -> str:
    before, after = comparison.before, comparison.after
    lines = [
        f"**{escape_markdown(after.headline)}**",
        "",
        "| memory at the peak | before | after | change |",
        "|---|---:|---:|---:|",
    ]
    lines += [_write_markdown_row(change) for change in (*comparison.figures, *comparison.categories)]
    if before.macs != after.macs:
        lines.append(f"| MACs | {before.macs:,} | {after.macs:,} | {after.macs - before.macs:+,} |")
    if before.time is not None and after.time is not None:
        lines.append(f"| time of a {after.time.per} | {write_times(before, after)} |")
    if comparison.lines:
        lines += ["", "| line | source | before | after | change |", "|---|---|---:|---:|---:|"]
        for change in comparison.lines[:most]:
            cells = (change.before, change.after)
            shown = " | ".join(format_size(cell) for cell in cells)
            source = _write_markdown_code(change.source)
            lines.append(
                f"| {escape_markdown(change.name)} | {source} | {shown} | {format_growth(change.growth)} |"
            )
    return "\n".join(lines)


def write_times(before: Rehearsal, after: Rehearsal, separator: str = " | ") -> str:
    """Both times with their intervals, and the change in percent."""
    assert before.time is not None and after.time is not None
    times = [
        write_interval(time.seconds_per_step, time.low_seconds, time.high_seconds)
        for time in (before.time, after.time)
    ]
    change = after.time.seconds_per_step / before.time.seconds_per_step - 1
    return separator.join([*times, f"{change:+.1%}"])


def _write_markdown_row(change: Difference) -> str:
    sizes = f"{format_size(change.before)} | {format_size(change.after)}"
    return f"| {escape_markdown(change.name.replace('_', ' '))} | {sizes} | {format_growth(change.growth)} |"


def escape_markdown(text: str) -> str:
    """A text without markup, links, mentions and new lines."""
    plain = " ".join(text.split())
    return "".join(
        f"\\{c}" if c in "\\`*_[]<>|#~!&" else "@\u200b" if c == "@" else c for c in plain if c.isprintable()
    )


def _write_markdown_code(text: str) -> str:
    plain = (
        "".join(c for c in " ".join(text.split()) if c.isprintable()).replace("`", "'").replace("|", "\\|")
    )
    return f"`{plain}`" if plain else ""


def format_growth(size: int) -> str:
    return f"{'+' if size >= 0 else '-'}{format_size(abs(size))}"
