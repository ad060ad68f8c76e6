"""The data of one rehearsal: plain dataclasses of numbers, text, lists and dicts; nothing in it is a tensor.

    rehearsal.verdict                      "fits", "tight", "does not fit"; "failed" where the script ended before its time
    rehearsal.headline                     the verdict in a sentence
    rehearsal.peak.reserved_bytes          also allocated_, active_, requested_bytes; step, phase, module, line, operator
    rehearsal.categories                   {"parameters": bytes, …} of what was alive at the peak
    rehearsal.modules, .lines, .operators, .phases      rows, largest first
    rehearsal.macs, .flops, .coverage      of the whole run; `phases` has them by phase
    rehearsal.answers, .writes             what `run` fills in: answered reads, files that were not written
    rehearsal.to_json(), Rehearsal.from_json(text), rehearsal.to_dict()

JSON has the same names. Sizes are integers of bytes. `schema_version` changes when a name goes or changes its meaning.
The shape is that of the dataclasses below; `rehearsal.schema.json` beside this file says the same in JSON Schema.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("rehearsal.schema.json")

CATEGORIES = (
    "parameters", "gradients", "optimizer_state", "activations", "inputs", "buffers", "temporaries", "scratch",
)  # fmt: skip
FITS, TIGHT, DOES_NOT_FIT, FAILED = "fits", "tight", "does not fit", "failed"

Record = TypeVar("Record")


@dataclass(frozen=True)
class Device:
    """The card that was simulated, or the CPU. `limit_bytes` is what the allocator may reserve."""

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

    `fragmentation_bytes` is what was reserved and in no block, even when most was allocated.
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
    """One module: bytes at the peak that belong to it (without its children), and its own work in the whole run."""

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


@dataclass(frozen=True)
class LineRow:
    """One line of the user's code: bytes at the peak that it made, and what it made in the whole run."""

    line: str
    source: str
    bytes: int
    allocations: int
    allocated_in_all: int


@dataclass(frozen=True)
class OperatorRow:
    """One operator. `kind` is products, elementwise, moves, views or unknown (no formula)."""

    operator: str
    kind: str
    calls: int
    macs: int
    flops: int
    operations: int
    bytes_moved: int


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
        "MACs of products (matrices, convolutions, attention); FLOPs = 2 x MACs (fma=2); elementwise operations apart"
    )


@dataclass(frozen=True)
class TimeEstimate:
    """A roofline estimate of one step, with the efficiencies that it assumes. No measurement."""

    seconds_per_step: float
    compute_seconds: float
    memory_seconds: float
    launch_seconds: float
    arithmetic_intensity: float
    assumes: str


@dataclass(frozen=True)
class Span:
    """Storages that were alive from one point of the timeline to another (excluded): made in one module by one line."""

    start: int
    end: int
    bytes: int
    count: int
    category: str
    module: str
    line: str


@dataclass(frozen=True)
class Timeline:
    """Memory over the run, at most some thousand points: `operators` counts calls, `bytes[category]` what was alive.

    `spans` are the largest of what makes it up."""

    operators: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    bytes: dict[str, list[int]] = field(default_factory=dict)
    peak_index: int = 0
    spans: list[Span] = field(default_factory=list)


@dataclass
class Rehearsal:
    """All that was measured in one run."""

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
    timeline: Timeline = field(default_factory=Timeline)
    answers: list[dict[str, Any]] = field(default_factory=list)
    writes: list[dict[str, Any]] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    software: dict[str, str] = field(default_factory=dict)
    host_peak_bytes: int = 0
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Rehearsal:
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Rehearsal:
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"a rehearsal of schema_version {version!r}; this version of understudy reads {SCHEMA_VERSION}"
            )
        return _read(cls, data)

    def to_html(self, title: str = "Rehearsal") -> str:
        """One page that needs nothing else."""
        from understudy.report.page import make_page  # why: the page is made when it is wanted

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


# --- dataclasses from JSON, and their schema


def _read(kind: type[Record], data: dict[str, Any]) -> Record:
    hints = get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"{kind.__name__} has no {unknown[0]!r}")
    return kind(**{name: _read_value(hints[name], value) for name, value in data.items()})


def _read_value(hint: object, value: Any) -> Any:
    if value is not None:
        for part in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(part) and isinstance(part, type):
                return [_read(part, row) for row in value] if get_origin(hint) is list else _read(part, value)
    return value


_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean"}


def make_schema(kind: type = Rehearsal) -> dict[str, Any]:
    """The JSON Schema of a dataclass: `python -m understudy.report.rehearsal` writes it to the file that is shipped."""
    hints = get_type_hints(kind)
    return {
        "type": "object",
        "description": (kind.__doc__ or "").split("\n")[0],
        "properties": {name: _make_schema_of_type(hint) for name, hint in hints.items()},
        "required": sorted(hints),
        "additionalProperties": False,
    }


def _make_schema_of_type(hint: object) -> dict[str, Any]:
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return make_schema(hint)
    arguments = get_args(hint)
    if get_origin(hint) is list:
        return {"type": "array", "items": _make_schema_of_type(arguments[0])}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": _make_schema_of_type(arguments[1])}
    if type(None) in arguments:
        return {"anyOf": [_make_schema_of_type(arguments[0]), {"type": "null"}]}
    return {}


def _make_whole_schema() -> dict[str, Any]:
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Rehearsal of understudy"}
    schema = head | make_schema()
    schema["properties"]["verdict"] = {"enum": [FITS, TIGHT, DOES_NOT_FIT, FAILED]}
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return schema


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(_make_whole_schema(), indent=1) + "\n")
