"""The page of a rehearsal: one HTML file that needs nothing else.

    page = Page(title="train.py", verdict="fits", headline="fits on h100: …", …)
    Path("report.html").write_text(page.to_html())

    make_page(rehearsal).to_html()

The page is data and one template (`page.html`), whose script only ever writes text: no name of a program becomes markup.
A step of a large model makes some hundred thousand storages; what is on the page is bounded: the samples in which memory
was highest, and the largest blocks, the smaller ones summed up.
"""

from __future__ import annotations

import html
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from understudy.report.rehearsal import DOES_NOT_FIT, FAILED, FITS, NO_VERDICT, TIGHT, ModuleRow, Rehearsal
from understudy.report.text import describe_write, format_size, list_answers, write_sanity
from understudy.report.times import write_assumptions, write_cost, write_interval, write_rate

TEMPLATE = Path(__file__).with_name("page.html")
SHARED_PARTS = Path(__file__).with_name("page_parts.html")
"""Styles and functions of all pages."""

MOST_SAMPLES = 1500
MOST_BLOCKS = 6000
MOST_ROWS = 1000
MOST_SPANS = 4000
"""Rows of one table: the rest is in the JSON."""

Verdict = Literal["fits", "tight", "no", ""]
Kind = Literal["text", "code", "bytes", "count", "percent", "seconds"]
Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory after an event, by category in the order of the page's categories. `label` describes the moment."""

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
class AliveRow:
    """Memory at the peak: names from the outermost to the innermost."""

    path: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class TableRow:
    cells: tuple[Cell, ...]
    depth: int = 0
    is_folded: bool = False


@dataclass(frozen=True, slots=True)
class PageTable:
    """Rows below one that have more depth are its children."""

    title: str
    columns: tuple[tuple[str, Kind], ...]
    rows: Sequence[TableRow]


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
    holders: Mapping[str, Sequence[AliveRow]] = field(default_factory=dict)
    """What holds the memory at the peak, in several orders: each is a flame graph."""
    marks: Sequence[tuple[int, str]] = ()
    peak: int = 0
    capacity: int | None = None
    time: Mapping[str, Any] = field(default_factory=dict)
    """What bounds a step, and its spans: `bounds`, `clocks`, `names`, `spans`."""
    tables: Sequence[PageTable] = ()
    notes: Sequence[tuple[str, Sequence[str]]] = ()

    def to_html(self) -> str:
        return fill_template(TEMPLATE, self.title, self.to_data())

    def to_data(self) -> str:
        """The text that replaces `__DATA__` in the template."""
        return escape_script(json.dumps(self._to_record(), separators=(",", ":"), ensure_ascii=True))

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
            "marks": [[_find_following(kept, mark), name] for mark, name in self.marks] if kept else [],
            "peak": place.get(self.peak, 0),
            "capacity": self.capacity,
            "blocks": _make_block_records(self.blocks, kept, names),
            "holders": [
                [title, _make_holder_records(holders, names)] for title, holders in self.holders.items()
            ],
            "names": names.texts,
            "time": dict(self.time),
            "tables": [_make_table_record(table) for table in self.tables],
            "notes": [[title, list(notes)] for title, notes in self.notes if notes],
        }


def escape_script(data: str) -> str:
    """JSON inside of a script element: only `<` can do harm, the others are for readers that take it for something else."""
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data


@dataclass(slots=True)
class _Names:
    """A table of texts, in which each is stored once."""

    texts: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
        return self.numbers[text]


def choose_samples(totals: Sequence[int], peak: int, most: int = MOST_SAMPLES) -> list[int]:
    """About so many: of each stretch the highest and the lowest one, and always the first, the last and the peak."""
    if len(totals) <= most:
        return list(range(len(totals)))
    stretches = most // 2
    chosen = {0, peak, len(totals) - 1}
    for number in range(stretches):
        stretch = range(len(totals) * number // stretches, len(totals) * (number + 1) // stretches)
        chosen.add(max(stretch, key=totals.__getitem__))
        chosen.add(min(stretch, key=totals.__getitem__))
    return sorted(chosen)


def _find_following(kept: Sequence[int], sample: int) -> int:
    """The position among the kept samples of the first one that is not before this sample."""
    return min(bisect_left(kept, sample), len(kept) - 1)


def _make_block_records(blocks: Iterable[Block], kept: Sequence[int], names: _Names) -> list[list[int]]:
    """[start, end, bytes, category, module, line] in numbers of kept samples; blocks between two of them are left out."""
    merged: dict[tuple[int, int, int, str, str], int] = {}
    for block in blocks:
        start, end = bisect_left(kept, block.start), bisect_left(kept, block.end)
        if start < end:
            key = (start, end, block.category, block.module, block.line)
            merged[key] = merged.get(key, 0) + block.bytes
    largest = sorted(merged.items(), key=lambda item: -item[1])[:MOST_BLOCKS]
    return [
        [start, end, size, cat, names.number(mod), names.number(line)]
        for (start, end, cat, mod, line), size in largest
    ]


def _make_holder_records(holders: Sequence[AliveRow], names: _Names) -> list[list[Any]]:
    """[names, bytes], those of the same path once."""
    sizes: dict[tuple[str, ...], int] = {}
    for holder in holders:
        if holder.bytes:
            sizes[holder.path] = sizes.get(holder.path, 0) + holder.bytes
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:MOST_BLOCKS]
    return [[[names.number(name) for name in path], size] for path, size in largest]


def _make_table_record(table: PageTable) -> dict[str, Any]:
    rows = [
        {"cells": list(row.cells), "depth": row.depth, "is_folded": row.is_folded}
        for row in table.rows[:MOST_ROWS]
    ]
    more = len(table.rows) - len(rows)
    title = f"{table.title} (the first {len(rows):,} of {len(table.rows):,})" if more else table.title
    return {"title": title, "columns": [list(column) for column in table.columns], "rows": rows}


def read_template(file: Path) -> str:
    return file.read_text(encoding="utf-8").replace(
        "__PARTS__", SHARED_PARTS.read_text(encoding="utf-8").rstrip(), 1
    )


def fill_template(file: Path, title: str, data: str) -> str:
    """`data`: as `escape_script` returns it."""
    return read_template(file).replace("__TITLE__", html.escape(title), 1).replace("__DATA__", data, 1)


def make_frame(page: str, height: int = 720) -> str:
    """A page inside of a notebook: a frame of its own, so that styles and names stay apart."""
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" style="{style}"></iframe>'


# the page of a rehearsal


def make_page(rehearsal: Rehearsal, title: str = "") -> Page:
    """`title`: that of the page, if it is not the program."""
    timeline = rehearsal.timeline
    categories = [name for name in timeline.bytes if any(timeline.bytes[name])] or list(timeline.bytes)
    columns = [timeline.bytes[name] for name in categories]
    samples = [
        Sample(f"operator {number:,}, step {step + 1}, {phase}", tuple(column[i] for column in columns))
        for i, (number, step, phase) in enumerate(
            zip(timeline.operators, timeline.steps, timeline.phases, strict=True)
        )
    ]
    peak = timeline.peak_index
    return Page(
        title=title or rehearsal.program or "Rehearsal",
        headline=rehearsal.headline,
        verdict=VERDICTS.get(rehearsal.verdict, ""),
        facts=_list_facts(rehearsal),
        categories=[name.replace("_", " ") for name in categories],
        samples=samples,
        blocks=_find_blocks(rehearsal, categories),
        holders={
            "by module": find_holders_by_module(rehearsal, folds_numbers=True),
            "by line": find_holders_by_line(rehearsal),
        },
        marks=_find_marks(timeline.steps, timeline.phases),
        peak=peak,
        capacity=rehearsal.device.limit_bytes or None,
        time=_describe_time(rehearsal),
        tables=[make(rehearsal) for make in TABLES if make(rehearsal).rows],
        notes=_list_notes(rehearsal),
    )


def _describe_time(rehearsal: Rehearsal) -> dict[str, Any]:
    """The bar of what bounds a step, and the longest spans of one."""
    time = rehearsal.time
    if time is None:
        return {}
    trace = time.trace
    spans = list(zip(trace.clocks, trace.names, trace.starts, trace.durations, strict=True))
    longest = sorted(spans, key=lambda span: -span[3])[:MOST_SPANS]
    return {
        "per": time.per,
        "bounds": [[name, share] for name, share in time.bound_by.items()],
        "phases": [[name, seconds] for name, seconds in time.phases.items() if seconds > 0],
        "clocks": trace.clock_names,
        "names": trace.span_names,
        "spans": [list(span) for span in sorted(longest, key=lambda span: span[2])],
    }


VERDICTS: dict[str, Verdict] = {
    FITS: "fits",
    TIGHT: "tight",
    DOES_NOT_FIT: "no",
    FAILED: "no",
    NO_VERDICT: "no",
}


def _list_facts(rehearsal: Rehearsal) -> list[tuple[str, str]]:
    peak, device = rehearsal.peak, rehearsal.device
    count = f"{device.count} x " if device.count > 1 else ""
    moment = f"step {peak.step + 1}, {peak.phase}"
    facts = [
        ("device", f"{count}{device.name}"),
        ("steps", str(rehearsal.steps)),
        ("allocated", format_size(peak.allocated_bytes)),
        ("reserved", format_size(peak.reserved_bytes)),
        ("fragmentation", format_size(peak.fragmentation_bytes)),
        ("peak at", f"{peak.line} ({moment})" if peak.line else moment),
        ("MACs", f"{rehearsal.macs:,}"),
    ]
    if rehearsal.out_of_memory is not None:
        facts.append(("out of memory at", rehearsal.out_of_memory.line))
    time = rehearsal.time
    if time is not None:
        interval = write_interval(time.seconds_per_step, time.low_seconds, time.high_seconds)
        facts += [(f"time of a {time.per}", interval), ("MFU", f"{time.mfu:.1%}"), ("HFU", f"{time.hfu:.1%}")]
        facts += [("throughput", write_rate(time))] if write_rate(time) else []
        facts += [("run", write_cost(time.cost))] if time.cost is not None else []
    return facts


def _find_blocks(rehearsal: Rehearsal, categories: Sequence[str]) -> list[Block]:
    places = {name: number for number, name in enumerate(categories)}
    return [
        Block(span.start, span.end, span.bytes, places[span.category], span.module, span.line)
        for span in rehearsal.timeline.spans
        if span.category in places
    ]


PARTS = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "other")


def find_holders_by_module(rehearsal: Rehearsal, folds_numbers: bool = False) -> list[AliveRow]:
    """`folds_numbers`: the numbered layers of a list are one, as there may be a hundred of them."""
    found = []
    for row in rehearsal.modules:
        path = tuple(row.path.split(".")) if row.path else ("(no module)",)
        if folds_numbers:
            path = tuple("*" if part.isdecimal() else part for part in path)
        found += [AliveRow((*path, part.replace("_", " ")), getattr(row, part)) for part in PARTS]
    return found


def find_holders_by_line(rehearsal: Rehearsal) -> list[AliveRow]:
    found = []
    for row in rehearsal.lines:
        file = row.line.rpartition(":")[0]
        path = (file, row.line, *([row.source] if row.source else [])) if file else ("(no line)",)
        found.append(AliveRow(path, row.bytes))
    return found


def _find_marks(steps: Sequence[int], phases: Sequence[str]) -> list[tuple[int, str]]:
    """The samples at which another step or phase begins, with their labels."""
    found = []
    for i, (step, phase) in enumerate(zip(steps, phases, strict=True)):
        if i == 0 or (step, phase) != (steps[i - 1], phases[i - 1]):
            found.append((i, f"{step + 1} {phase}"))
    return found


def _make_layer_table(rehearsal: Rehearsal) -> PageTable:
    columns: tuple[tuple[str, Kind], ...] = (
        ("module", "text"), ("at the peak", "bytes"), ("parameters", "bytes"), ("gradients", "bytes"),
        ("optimizer state", "bytes"), ("activations", "bytes"), ("MACs", "count"), ("seconds", "seconds"),
        ("calls", "count"),
    )  # fmt: skip
    root = _Branch("", "")
    for row in rehearsal.modules:
        branch = root
        for part in row.path.split(".") if row.path else []:
            branch = branch.children.setdefault(part, _Branch(part, ""))
        branch.own = row
        branch.kind = row.kind
    return PageTable("Layers", columns, list(_make_layer_rows(root, root.kind or "all", 0, 1)))


@dataclass(slots=True)
class _Branch:
    """A module and those in it; its sizes are the sums over both."""

    name: str
    kind: str
    own: ModuleRow | None = None
    children: dict[str, _Branch] = field(default_factory=dict)

    def sums(self) -> tuple[float, ...]:
        own = self.own
        figures: tuple[float, ...] = (
            (
                own.bytes,
                own.parameters,
                own.gradients,
                own.optimizer_state,
                own.activations,
                own.macs,
                own.seconds,
            )
            if own
            else (0,) * 7
        )
        for child in self.children.values():
            figures = tuple(a + b for a, b in zip(figures, child.sums(), strict=True))
        return figures

    def signature(self) -> tuple[Any, ...]:
        return (
            self.kind,
            self.sums()[:-1],
            *((name, child.signature()) for name, child in self.children.items()),
        )


def _make_layer_rows(branch: _Branch, label: str, depth: int, repeats: int) -> Iterator[TableRow]:
    """Neighbours that differ in their number only are one row, with the sizes of all of them."""
    times = f" x{repeats}" if repeats > 1 else ""
    kind = f" ({branch.kind}{times})" if branch.kind and branch.kind != label else times
    size, *others = (figure * repeats for figure in branch.sums())
    calls = branch.own.calls * repeats if branch.own else None
    yield TableRow(
        (f"{label}{kind}", size, *others, calls), depth, is_folded=depth >= 2 and bool(branch.children)
    )
    children = list(branch.children.values())
    index = 0
    while index < len(children):
        first, end = children[index], index + 1
        if first.name.isdecimal():
            signature = first.signature()
            while (
                end < len(children)
                and children[end].name.isdecimal()
                and children[end].signature() == signature
            ):
                end += 1
        folded = f"{first.name}..{children[end - 1].name}" if end - index > 1 else first.name
        yield from _make_layer_rows(first, folded, depth + 1, repeats * (end - index))
        index = end


def _make_line_table(rehearsal: Rehearsal) -> PageTable:
    columns: tuple[tuple[str, Kind], ...] = (
        ("line", "code"), ("source", "code"), ("at the peak", "bytes"), ("share", "percent"), ("allocations", "count"),
        ("in all", "bytes"), ("seconds", "seconds"),
    )  # fmt: skip
    total = rehearsal.peak.allocated_bytes or 1
    rows = [
        TableRow(
            (
                row.line,
                row.source,
                row.bytes,
                row.bytes / total,
                row.allocations,
                row.allocated_in_all,
                row.seconds,
            )
        )
        for row in rehearsal.lines
    ]
    return PageTable("Source lines", columns, rows)


def _make_operator_table(rehearsal: Rehearsal) -> PageTable:
    columns: tuple[tuple[str, Kind], ...] = (
        ("operator", "code"), ("kind", "text"), ("calls", "count"), ("MACs", "count"), ("FLOPs", "count"),
        ("bytes moved", "bytes"), ("seconds", "seconds"),
    )  # fmt: skip
    rows = [
        TableRow((row.operator, row.kind, row.calls, row.macs, row.flops, row.bytes_moved, row.seconds))
        for row in rehearsal.operators
    ]
    return PageTable("Operators", columns, rows)


def _make_phase_table(rehearsal: Rehearsal) -> PageTable:
    columns: tuple[tuple[str, Kind], ...] = (
        ("step", "count"), ("phase", "text"), ("most allocated", "bytes"), ("operators", "count"), ("MACs", "count"),
    )  # fmt: skip
    rows = [
        TableRow((row.step + 1, row.phase, row.peak_bytes, row.operators, row.macs))
        for row in rehearsal.phases
    ]
    return PageTable("Phases", columns, rows)


TABLES = (_make_layer_table, _make_line_table, _make_operator_table, _make_phase_table)
"""One function for each table of the page."""


def _list_assumptions_of_time(rehearsal: Rehearsal) -> list[str]:
    return write_assumptions(rehearsal.time) if rehearsal.time is not None else []


def _list_notes(rehearsal: Rehearsal) -> list[tuple[str, list[str]]]:
    coverage = rehearsal.coverage
    known = f"{coverage.known:,} of {coverage.operators:,} calls of operators have a formula. {coverage.convention}."
    unknown = [f"without formula: {name}, {calls:,} calls" for name, calls in coverage.unknown.items()]
    return [
        ("Answered reads", list_answers(rehearsal)),
        (
            "The verdict rests on",
            [line.removeprefix("rests on: ") for line in write_sanity(rehearsal.sanity)],
        ),
        ("Kept from the disk and the network", [describe_write(entry) for entry in rehearsal.writes]),
        (
            "Assumptions, and what is not modelled",
            [*rehearsal.assumptions, *_list_assumptions_of_time(rehearsal)],
        ),
        ("Coverage", [known, *unknown]),
        ("Software", [f"{name}: {version}" for name, version in rehearsal.software.items()]),
    ]
