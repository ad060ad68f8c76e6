"""The time of a step as text: every figure with its interval.

write_step(time)     "step 0.412 s (0.35–0.47), 38.2% MFU, 51.0% HFU, 39,800 tokens/s; bound by: products 61%, …"
write_cost(cost)     "100,000 steps: 11.4 hours (9.7–13.1), 91.6 card-hours, 228.00 (193.80–262.20)"
"""

from __future__ import annotations

import math
from typing import Protocol

from understudy.timing.step_time import RunCost, TimeEstimate

LEAST_SHARE = 0.015
"""The smallest share of a bound that is named in the line."""


def write_step(time: TimeEstimate) -> str:
    figures = [f"{time.per} {write_interval(time.seconds_per_step, time.low_seconds, time.high_seconds)}"]
    if time.hfu:
        figures.append(f"{time.mfu:.1%} MFU")
        figures.append(f"{time.hfu:.1%} HFU")
    figures += [write_rate(time)] if write_rate(time) else []
    return f"{', '.join(figures)}; bound by: {write_bounds(time)}"


def write_interval(seconds: float, low: float, high: float) -> str:
    """In one unit."""
    for unit, scale in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.1 * scale * (1 if unit == "s" else 10) or unit == "µs":
            low_text, high_text = (_round(amount / scale, 2) for amount in (low, high))
            return f"{_round(seconds / scale)} {unit} ({low_text}–{high_text})"
    raise AssertionError


class Rates(Protocol):
    """A time estimate, or a row of a plan."""

    @property
    def tokens_per_second(self) -> float | None: ...
    @property
    def samples_per_second(self) -> float | None: ...


def write_rate(rates: Rates) -> str:
    """Tokens or samples in a second."""
    if rates.tokens_per_second:
        return f"{_round(rates.tokens_per_second)} tokens/s"
    return f"{_round(rates.samples_per_second)} samples/s" if rates.samples_per_second else ""


def write_seconds(seconds: float) -> str:
    """For tables: "227 ms"."""
    if not seconds:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale or unit == "µs":
            return f"{_round(seconds / scale)} {unit}"
    raise AssertionError


def _round(number: float, digits: int = 3) -> str:
    """To so many significant digits, without an exponent: 0.10 for 0.1 with two."""
    if not number:
        return "0"
    rounded = float(f"{number:.{digits}g}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(decimals, 0)}f}"


def write_bounds(time: TimeEstimate) -> str:
    named = [f"{name} {share:.0%}" for name, share in time.bound_by.items() if share >= LEAST_SHARE]
    return ", ".join(named) or "nothing"


def write_cost(cost: RunCost) -> str:
    text = f"{cost.steps:,} steps: {_round(cost.hours)} hours ({_round(cost.low_hours, 2)}–{_round(cost.high_hours, 2)})"
    text += f", {_round(cost.card_hours)} card-hours"
    if cost.money is not None and cost.low_money is not None and cost.high_money is not None:
        text += f", cost {cost.money:,.2f} ({cost.low_money:,.2f}–{cost.high_money:,.2f})"
    return text


def write_assumptions(time: TimeEstimate) -> list[str]:
    """What an estimate of time stands on."""
    count = (
        f"mean of {time.steps} {'steps' if time.per == 'step' else 'passes'}"
        if time.steps > 1
        else f"one {time.per}"
    )
    notes = [f"time: {count}, host '{time.host}'; curves from {time.source}"]
    if not time.is_measured:
        notes[0] = f"time: {count}, host '{time.host}'; {time.source}"
    if time.evaluation_seconds:
        notes.append(
            f"evaluation takes {write_seconds(time.evaluation_seconds)} of the run, outside of steps"
        )
    return notes
