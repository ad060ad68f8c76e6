"""What a verdict rests on: steps, inputs, data, optimizer state; and whether anything was computed at all.

find_missing_work(measurement, totals, facts)      the reason for "no verdict", or ""
make_sanity(measurement, totals, facts)            the facts for the line under the verdict
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from understudy.ops.traits.flops import ELEMENTWISE, PRODUCTS
from understudy.report.measurement import DeviceTotals, Measurement
from understudy.report.places import FORWARD
from understudy.report.rehearsal import Sanity
from understudy.spec import TensorSpec

MOST_INPUTS = 3
"""Different calls of models that are named."""
TOKEN_DTYPES = ("i64", "i32")


@dataclass
class RunFacts:
    """Facts from the runner of the program that the measurement can't see."""

    program: str = ""
    """The script and its arguments, or the name of the function."""
    steps: int | None = None
    failure: str = ""
    """How the program ended before its time: "the script failed", …"""
    is_out_of_memory: bool = False
    """Whether the error of the card ended it."""
    answers: list[dict[str, object]] = field(default_factory=list)
    writes: list[dict[str, object]] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    margins: dict[str, float] = field(default_factory=dict)
    """Parts of reserved memory that the figures may be off by, beyond the stated error, by their reasons."""
    warnings: list[str] = field(default_factory=list)
    made_up: list[str] = field(default_factory=list)
    programs: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    longest_text: int = 0
    least: dict[torch.device, int] = field(default_factory=dict)
    """Bytes that the training needs at least, by formula."""


def find_missing_work(measurement: Measurement, totals: DeviceTotals, facts: RunFacts) -> str:
    """Training, or else a computation on the card; filling memory is none. `totals`: of the device that most was put on."""
    if not totals.is_card:
        where = f"; the first steps were on the CPU, and the run ended after {facts.steps} (--steps)"
        return f"nothing ran on it{where if facts.steps else ''}{_name_programs(facts)}"
    least = facts.least.get(totals.device, 0)
    if totals.peak < least:
        return (
            f"parameters, gradients and optimizer state alone are {least:,} bytes, the measured peak is {totals.peak:,}: "
            "these figures contradict each other; please report this script"
        )
    if facts.steps or measurement.places.step or measurement.has_backward:
        return ""
    if facts.optimizers:
        has_computed = any(row.macs for row in measurement.phases.values() if row.phase == FORWARD)
    else:
        has_computed = any(
            call.count and call.device == totals.device and call.work.kind in (PRODUCTS, ELEMENTWISE)
            for call in measurement.calls.values()
        )
    if has_computed:
        return ""
    who = f"; {' and '.join(facts.optimizers)} took no step" if facts.optimizers else ""
    return f"no computation on it, only initialised memory{who}{_name_programs(facts)}"


def _name_programs(facts: RunFacts) -> str:
    """A launcher leaves all work to others."""
    if not facts.programs:
        return ""
    more = f" and {len(facts.programs) - 1} more" if len(facts.programs) > 1 else ""
    return f"; the script started other programs, which are not measured: {facts.programs[0]}{more}"


def make_sanity(measurement: Measurement, totals: DeviceTotals, facts: RunFacts) -> Sanity:
    state = {id(record): record for record in measurement.events if record.category == "optimizer_state"}
    warnings = list(facts.warnings)
    length = max((_find_length(specs) for specs in measurement.fed), default=0)
    if length < facts.longest_text and length:
        warnings.append(
            f"texts are cut at {facts.longest_text} tokens, but the longest batch had {length}; use --longest"
        )
    return Sanity(
        steps=measurement.places.step if facts.steps is None else facts.steps,
        inputs=[_write_inputs(specs) for specs, _ in measurement.fed.most_common(MOST_INPUTS)],
        made_up=facts.made_up,
        optimizers=facts.optimizers,
        optimizer_state_bytes=sum(record.nbytes for record in state.values() if record.totals is totals),
        has_backward=measurement.has_backward,
        least_bytes=facts.least.get(totals.device, 0),
        warnings=warnings,
    )


def _find_length(specs: tuple[TensorSpec, ...]) -> int:
    """Return the length of texts: the columns of a matrix of tokens."""
    return max(
        (int(spec.shape[1]) for spec in specs if spec.ndim == 2 and str(spec).startswith(TOKEN_DTYPES)),
        default=0,
    )


def _write_inputs(specs: tuple[TensorSpec, ...]) -> str:
    """f32[8, 3, 224, 224], 2 x i64[8]"""
    counts: dict[str, int] = {}
    for spec in specs:
        text = str(spec).partition("@")[0]
        counts[text] = counts.get(text, 0) + 1
    return (
        ", ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items())
        or "no tensors"
    )
