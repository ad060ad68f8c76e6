"""The data of one rehearsal: plain dataclasses of numbers, text, lists and dicts; nothing in it is a tensor.

    rehearsal.verdict                      "fits", "tight", "does not fit"; "failed" where the script ended before its time,
                                           "no verdict" where nothing was computed on the card
    rehearsal.sanity                       steps, what the model was fed, whose data, optimizer state; warnings
    rehearsal.headline                     the verdict in a sentence
    rehearsal.peak.reserved_bytes          also allocated_, active_, requested_bytes; step, phase, module, line, operator
    rehearsal.categories                   {"parameters": bytes, …}, live memory at the peak
    rehearsal.modules, .lines, .operators, .phases      rows, largest first
    rehearsal.macs, .flops, .coverage      of the whole run; `phases` has them by phase
    rehearsal.answers, .writes             what `run` fills in: answered reads, files that were not written
    rehearsal.to_json(), Rehearsal.from_json(text), rehearsal.to_dict()

JSON has the same names. Sizes are integers of bytes. `schema_version` changes when a name goes or changes its meaning.
The shape is that of the dataclasses below; `rehearsal.schema.json` beside this file says the same in JSON Schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.report.documents import Document, make_document_schema
from understudy.timing.step_time import TimeEstimate

SCHEMA_VERSION = 2
SCHEMA_FILE = Path(__file__).with_name("rehearsal.schema.json")

CATEGORIES = (
    "parameters", "gradients", "optimizer_state", "activations", "inputs", "buffers", "temporaries", "scratch",
)  # fmt: skip
FITS, TIGHT, DOES_NOT_FIT, FAILED, NO_VERDICT = "fits", "tight", "does not fit", "failed", "no verdict"

VERDICTS = (FITS, TIGHT, DOES_NOT_FIT, FAILED, NO_VERDICT)
ISOLATION_LEVELS = ("namespaces", "landlock", "python", "off")


@dataclass(frozen=True)
class Device:
    """The card that was simulated, or the CPU. `limit_bytes`: the limit of the allocator."""

    key: str
    name: str
    kind: str
    count: int = 1
    memory_bytes: int = 0
    context_bytes: int = 0
    limit_bytes: int = 0
    note: str = ""


@dataclass(frozen=True)
class Contributor:
    """What was alive at the peak: of one category, made in one module by one line."""

    category: str
    module: str
    line: str
    operator: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Peak:
    """The moment of the most allocated memory. On a CPU, all four sizes are one.

    `fragmentation_bytes`: reserved memory outside of blocks, when the most was allocated.
    """

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    active_bytes: int = 0
    requested_bytes: int = 0
    fragmentation_bytes: int = 0
    step: int = 0
    phase: str = ""
    module: str = ""
    line: str = ""
    operator: str = ""
    contributors: list[Contributor] = field(default_factory=list)


@dataclass(frozen=True)
class OutOfMemoryRecord:
    """Where the card would have had no more memory."""

    line: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    step: int = 0
    phase: str = ""
    module: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """One module: bytes at the peak that belong to it (without its children), and its own work in the whole run. `seconds`,
    here and below, are those of kernels, where time is estimated."""

    path: str
    kind: str
    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    buffers: int = 0
    other: int = 0
    bytes: int = 0
    macs: int = 0
    flops: int = 0
    calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class LineRow:
    """One line of the user's code: the bytes it allocated that are alive at the peak, and all bytes it allocated in
    the run."""

    line: str
    source: str
    bytes: int
    allocations: int
    allocated_in_all: int
    seconds: float = 0.0


@dataclass(frozen=True)
class OperatorRow:
    """One operator. `kind` is products, elementwise, moves, views or unknown (no formula). `seconds` of kernels are those of
    `timed_calls`: all but the setup's."""

    operator: str
    kind: str
    calls: int
    macs: int
    flops: int
    operations: int
    bytes_moved: int
    seconds: float = 0.0
    timed_calls: int = 0


@dataclass(frozen=True)
class PhaseRow:
    """One phase of one step: the most that was allocated in it, and its work."""

    step: int
    phase: str
    peak_bytes: int
    operators: int
    macs: int
    flops: int
    operations: int
    bytes_moved: int


@dataclass(frozen=True)
class Coverage:
    """How much of the run has formulas for its work. The share of the unknown is of the bytes that all operators move."""

    operators: int = 0
    known: int = 0
    unknown: dict[str, int] = field(default_factory=dict)
    unknown_share: float = 0.0
    convention: str = (
        "MACs of products (matrices, convolutions, attention); FLOPs = 2 x MACs (fma=2); "
        "elementwise operations apart"
    )


@dataclass(frozen=True)
class MemorySpan:
    """Storages that were alive from one point of the timeline to another (excluded): made in one module by one line."""

    start: int
    end: int
    bytes: int
    count: int
    category: str
    module: str
    line: str


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory over the run, at most some thousand points: `operators` counts calls, `bytes[category]` what was alive.

    `spans` are the largest of what makes it up."""

    operators: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    bytes: dict[str, list[int]] = field(default_factory=dict)
    peak_index: int = 0
    spans: list[MemorySpan] = field(default_factory=list)


@dataclass(frozen=True)
class Sanity:
    """What the verdict rests on. `inputs`: what models were fed, most frequent first; `made_up`: data that was not here.
    `least_bytes`: parameters, gradients and optimizer state by formula; no peak is below it."""

    steps: int = 0
    inputs: list[str] = field(default_factory=list)
    made_up: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    optimizer_state_bytes: int = 0
    has_backward: bool = False
    least_bytes: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Isolation:
    """What kept the program from changing files: "namespaces", "landlock", "python" (patches alone) or "off"; and the
    reason why nothing stronger did."""

    level: str = "off"
    reason: str = ""


@dataclass
class Rehearsal(Document):
    """All that was measured in one run."""

    TITLE = "rehearsal"

    verdict: str
    headline: str
    device: Device
    steps: int
    peak: Peak
    categories: dict[str, int]
    modules: list[ModuleRow]
    lines: list[LineRow]
    macs: int
    flops: int
    coverage: Coverage
    error_bytes: int = 0
    margin: float = 0.0
    out_of_memory: OutOfMemoryRecord | None = None
    operators: list[OperatorRow] = field(default_factory=list)
    phases: list[PhaseRow] = field(default_factory=list)
    operations: int = 0
    bytes_moved: int = 0
    time: TimeEstimate | None = None
    timeline: MemoryTimeline = field(default_factory=MemoryTimeline)
    answers: list[dict[str, Any]] = field(default_factory=list)
    writes: list[dict[str, Any]] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    software: dict[str, str] = field(default_factory=dict)
    host_peak_bytes: int = 0
    sanity: Sanity = field(default_factory=Sanity)
    isolation: Isolation = field(default_factory=Isolation)
    program: str = ""
    """The script and its arguments, or the name of the function."""
    schema_version: int = SCHEMA_VERSION

    def _check(self) -> None:
        _check_rehearsal(self)

    def to_html(self, title: str = "") -> str:
        """One page that needs nothing else."""
        from understudy.report.page import make_page  # why: import it only when a page is requested

        return make_page(self, title).to_html()

    def _repr_html_(self) -> str:
        from understudy.report.page import make_frame  # why: only for notebooks

        return make_frame(self.to_html())

    def __str__(self) -> str:
        from understudy.report.text import write_text  # why: the tables are loaded when they are printed

        return write_text(self)


def read_schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(SCHEMA_FILE.read_text())
    return schema


# --- values that contradict each other

ROW_KEYS = {
    "answers": {"line": str, "read": str, "tensor": str, "count": int, "answer": object},
    "writes": {"what": str, "target": str, "line": str, "count": int},
}


def _check_rehearsal(rehearsal: Rehearsal) -> None:
    if rehearsal.verdict not in VERDICTS:
        raise ValueError(f"verdict: expected one of {', '.join(VERDICTS)}, got {rehearsal.verdict!r}")
    for name, keys in ROW_KEYS.items():
        for i, row in enumerate(getattr(rehearsal, name)):
            wrong = next(
                (k for k, kind in keys.items() if k not in row or not isinstance(row[k], kind)), None
            )
            if wrong is not None:
                raise ValueError(
                    f"{name}[{i}].{wrong}: expected {keys[wrong].__name__}, got {row.get(wrong)!r}"
                )
    timeline = rehearsal.timeline
    _check_columns("timeline", timeline.operators, timeline.steps, timeline.phases, *timeline.bytes.values())
    _check_numbers(
        "timeline.peak_index", [timeline.peak_index] if timeline.operators else [], timeline.operators
    )
    if rehearsal.time is not None:
        trace = rehearsal.time.trace
        _check_columns("time.trace", trace.clocks, trace.names, trace.starts, trace.durations)
        _check_numbers("time.trace.names", trace.names, trace.span_names)
        _check_numbers("time.trace.clocks", trace.clocks, trace.clock_names)


def _check_columns(name: str, *columns: list[Any]) -> None:
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"{name}: its columns differ in length")


def _check_numbers(name: str, numbers: list[int], entries: list[Any]) -> None:
    """Whether these are numbers of entries."""
    wrong = next((number for number in numbers if not 0 <= number < len(entries)), None)
    if wrong is not None:
        raise ValueError(f"{name}: expected a number below {len(entries)}, got {wrong}")


def _make_whole_schema() -> dict[str, Any]:
    """`python -m understudy.report.rehearsal` writes it to the file that is shipped."""
    return make_document_schema(Rehearsal, {"verdict": VERDICTS, "isolation.level": ISOLATION_LEVELS})


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(_make_whole_schema(), indent=1) + "\n")
