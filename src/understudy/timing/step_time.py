"""The time of one step, as plain data: every figure with its interval.

    time.seconds_per_step, time.low_seconds, time.high_seconds
    time.mfu, time.hfu                     parts of the published peak: FLOPs of the model; with those of recomputation
    time.bound_by                          {"products": 0.61, "launches": 0.08, …}, adds up to 1
    time.trace                             one step: what ran on which clock, when

    run_cost(time, steps=100_000, cards=8, price=2.49)      hours, card-hours and money of a whole run

This module imports no torch: saved reports are read without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TimeTrace:
    """Spans of one step, in columns. `clocks` and `names` are numbers of entries in `clock_names` and `span_names`; times
    are microseconds since its beginning."""

    clock_names: list[str] = field(default_factory=list)
    span_names: list[str] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RunCost:
    """The cost of a whole run on `cards` cards; `money` where a price for an hour of a card was given."""

    steps: int
    cards: int
    hours: float
    low_hours: float
    high_hours: float
    card_hours: float
    price: float | None = None
    money: float | None = None
    low_money: float | None = None
    high_money: float | None = None


@dataclass(frozen=True)
class TimeEstimate:
    """The time of a step, or of a pass where no optimizer steps; 90% of comparable steps lie between low and high."""

    seconds_per_step: float
    low_seconds: float
    high_seconds: float
    per: str
    """"step" or "pass"."""
    steps: int
    """How many of the run it is the mean of."""
    mfu: float
    hfu: float
    tokens_per_second: float | None
    samples_per_second: float | None
    bound_by: dict[str, float]
    phases: dict[str, float]
    """Seconds of each."""
    card_seconds: float
    """Time of kernels, without the gaps between them."""
    host_seconds: float
    """Time of the host thread: issuing, and computing on the CPU."""
    evaluation_seconds: float
    """Evaluation in the whole run, outside of steps."""
    host: str
    source: str
    is_measured: bool
    """Whether the curves were fitted on steps of this very card, among others."""
    trace: TimeTrace = field(default_factory=TimeTrace)
    cost: RunCost | None = None


def run_cost(time: TimeEstimate, steps: int, cards: int = 1, price: float | None = None) -> RunCost:
    """`price` is for an hour of one card."""
    hours, low, high = (
        steps * seconds / 3600 for seconds in (time.seconds_per_step, time.low_seconds, time.high_seconds)
    )
    money = [None if price is None else amount * cards * price for amount in (hours, low, high)]
    return RunCost(steps, cards, hours, low, high, hours * cards, price, *money)
