"""A plan as data: the best candidates, all that were rehearsed, and what was ruled out.

    plan.choices[0].values, .seconds_per_step, .command
    plan.rehearsals                every candidate that was rehearsed, the choices among them
    plan.ruled_out                 {"a smaller one does not fit": 41, …}
    plan.to_json(), TrainingPlan.from_json(text)

JSON has the same names; `plan.schema.json` beside this file is its schema.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.plans.axes import Value, write_value
from understudy.report.documents import Document, make_document_schema

SCHEMA_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("plan.schema.json")
KIND = "plan"


@dataclass(frozen=True)
class Row:
    """One candidate that was rehearsed. `place`: 1 for the best; 0 for those that are not in the answer. Rates are those of
    all cards. `passes`: of each step in the rehearsal, where they were fewer than the candidate's. `cost`: of a million
    tokens, or samples, by the price of an hour of a card."""

    values: dict[str, str]
    verdict: str
    place: int = 0
    reserved_bytes: int = 0
    limit_bytes: int = 0
    seconds_per_step: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None
    mfu: float = 0.0
    bound_by: dict[str, float] = field(default_factory=dict)
    cards: int = 1
    card_hours: float | None = None
    """Card-hours for a million tokens, or samples."""
    cost: float | None = None
    passes: int | None = None
    is_kept: bool = False
    """Whether its result is that of an earlier search."""
    command: str = ""
    patch: str = ""
    error: str = ""
    report: str = ""


@dataclass(frozen=True)
class SearchedAxis:
    name: str
    values: list[str]
    origin: str


@dataclass
class TrainingPlan(Document):
    """`is_complete`: whether the best ones are decided: all others are ruled out. `time_error` and `memory_error`: the
    largest factor by which a prediction was wrong, less one, of candidates that were rehearsed after it."""

    TITLE = "plan"

    device: str
    cards: int
    goal: str
    is_complete: bool
    choices: list[Row]
    rehearsals: list[Row]
    searched: list[SearchedAxis]
    combinations: int
    candidates: int
    ruled_out: dict[str, int]
    rehearsed: int
    kept: int
    not_searched: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    time_error: float | None = None
    memory_error: float | None = None
    script: str = ""
    kind: str = KIND
    schema_version: int = SCHEMA_VERSION


def write_values(values: dict[str, Value]) -> dict[str, str]:
    return {name: write_value(value) for name, value in values.items()}


def find_front(rows: list[Row]) -> list[Row]:
    """The Pareto front of memory against time for a sample, by memory: those that nothing beats in both."""
    known = [row for row in rows if row.seconds_per_step and row.verdict in ("fits", "tight")]
    front: list[Row] = []
    for row in sorted(known, key=lambda row: (row.reserved_bytes, time_of(row) or 0.0)):
        if not front or (time_of(row) or 0.0) < (time_of(front[-1]) or 0.0):
            front.append(row)
    return front


def time_of(row: Row) -> float | None:
    """Seconds for a thousand tokens, or for a sample, or for a step."""
    if row.tokens_per_second:
        return 1000 / row.tokens_per_second
    return 1 / row.samples_per_second if row.samples_per_second else row.seconds_per_step


def _make_whole_schema() -> dict[str, Any]:
    """`python -m understudy.plans.answer` writes it to the file that is shipped."""
    return make_document_schema(TrainingPlan, {})


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(_make_whole_schema(), indent=1) + "\n")
