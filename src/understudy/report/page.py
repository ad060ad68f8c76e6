"""The page of a rehearsal: one HTML file that needs nothing else.

    page = Page(title="train.py", verdict="fits", headline="fits on h100: …", …)
    Path("report.html").write_text(page.to_html())

The page is data and one template (`page.html`), whose script only ever writes text: no name of a program becomes markup.
A step of a large model makes some hundred thousand storages; what is on the page is bounded: the samples in which memory
was highest, and the largest blocks, the smaller ones summed up.
"""

from __future__ import annotations

import html
import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

TEMPLATE = Path(__file__).with_name("page.html")

MOST_SAMPLES = 1500
MOST_BLOCKS = 6000
MOST_ROWS = 1000
"""Rows of one table: the rest is in the JSON."""

Verdict = Literal["fits", "tight", "no", ""]
Kind = Literal["text", "code", "bytes", "count", "percent"]
Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory after an event, by category in the order of the page's categories. `label` says when that is."""

    label: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Memory from one sample to another (excluded): numbers of samples."""

    start: int
    end: int
    bytes: int
    category: int
    module: str
    line: str


@dataclass(frozen=True, slots=True)
class Row:
    cells: tuple[Cell, ...]
    depth: int = 0
    is_folded: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below one that have more depth are its children."""

    title: str
    columns: tuple[tuple[str, Kind], ...]
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Page:
    """What is shown. `marks` name samples on the axis of time; `peak` is the number of a sample."""

    title: str
    headline: str
    verdict: Verdict = ""
    facts: Sequence[tuple[str, str]] = ()
    categories: Sequence[str] = ()
    samples: Sequence[Sample] = ()
    blocks: Iterable[Block] = ()
    marks: Sequence[tuple[int, str]] = ()
    peak: int = 0
    capacity: int | None = None
    tables: Sequence[Table] = ()
    notes: Sequence[tuple[str, Sequence[str]]] = ()

    def to_html(self) -> str:
        data = json.dumps(self._to_record(), separators=(",", ":"), ensure_ascii=True)
        # Inside of a script element only `<` can do harm; the others are for readers that take it for something else.
        for character in "<>&":
            data = data.replace(character, f"\\u{ord(character):04x}")
        template = TEMPLATE.read_text(encoding="utf-8")
        return template.replace("__TITLE__", html.escape(self.title), 1).replace("__DATA__", data, 1)

    def _to_record(self) -> dict[str, Any]:
        kept = choose_samples([sum(sample.sizes) for sample in self.samples], self.peak)
        place = {old: new for new, old in enumerate(kept)}
        names = _Names()
        return {
            "title": self.title,
            "headline": self.headline,
            "verdict": self.verdict or "unknown",
            "facts": [list(fact) for fact in self.facts],
            "categories": list(self.categories),
            "samples": [[self.samples[i].label, list(self.samples[i].sizes)] for i in kept],
            "marks": [[_following(kept, mark), name] for mark, name in self.marks] if kept else [],
            "peak": place.get(self.peak, 0),
            "capacity": self.capacity,
            "blocks": _block_records(self.blocks, kept, names),
            "holders": _holder_records(self.blocks, self.peak, names),
            "names": names.texts,
            "tables": [_table_record(table) for table in self.tables],
            "notes": [[title, list(notes)] for title, notes in self.notes if notes],
        }


@dataclass(slots=True)
class _Names:
    """Texts, each once."""

    texts: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return self.numbers[text]


def choose_samples(totals: Sequence[int], peak: int, most: int = MOST_SAMPLES) -> list[int]:
    """At most about so many: of each stretch the highest and the lowest sample, and always the first, the last and the peak."""
    if len(totals) <= most:
        return list(range(len(totals)))
    stretches = most // 2
    chosen = {0, peak, len(totals) - 1}
    for number in range(stretches):
        stretch = range(len(totals) * number // stretches, len(totals) * (number + 1) // stretches)
        chosen.add(max(stretch, key=totals.__getitem__))
        chosen.add(min(stretch, key=totals.__getitem__))
    return sorted(chosen)


def _following(kept: Sequence[int], sample: int) -> int:
    """The place of the first sample on the page that is not before this one."""
    return min(bisect_left(kept, sample), len(kept) - 1)


def _block_records(blocks: Iterable[Block], kept: Sequence[int], names: _Names) -> list[list[int]]:
    """[start, end, bytes, category, module, line] in numbers of kept samples; blocks between two of them are left out."""
    merged: dict[tuple[int, int, int, str, str], int] = {}
    for block in blocks:
        start, end = bisect_left(kept, block.start), bisect_left(kept, block.end)
        if start < end:
            key = (start, end, block.category, block.module, block.line)
            merged[key] = merged.get(key, 0) + block.bytes
    largest = sorted(merged.items(), key=lambda item: -item[1])[:MOST_BLOCKS]
    return [[start, end, size, cat, names.number(mod), names.number(line)] for (start, end, cat, mod, line), size in largest]


def _holder_records(blocks: Iterable[Block], peak: int, names: _Names) -> list[list[int]]:
    """[module, line, category, bytes] of what is alive at the peak."""
    sizes: dict[tuple[str, str, int], int] = {}
    for block in blocks:
        if block.start <= peak < block.end:
            key = (block.module, block.line, block.category)
            sizes[key] = sizes.get(key, 0) + block.bytes
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:MOST_BLOCKS]
    return [[names.number(module), names.number(line), category, size] for (module, line, category), size in largest]


def _table_record(table: Table) -> dict[str, Any]:
    rows = [
        {"cells": list(row.cells)} | ({"depth": row.depth} if row.depth else {}) | ({"is_folded": True} if row.is_folded else {})
        for row in table.rows[:MOST_ROWS]
    ]
    more = len(table.rows) - len(rows)
    title = f"{table.title} (the first {len(rows):,} of {len(table.rows):,})" if more else table.title
    return {"title": title, "columns": [list(column) for column in table.columns], "rows": rows}


def as_frame(page: str, height: int = 720) -> str:
    """A page inside of a notebook: a frame of its own, so that styles and names stay apart."""
    return f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" style="width:100%;height:{height}px;border:0"></iframe>'
