"""A plan as text: the table of the best, how the others were ruled out, and the command of the first."""

from __future__ import annotations

import textwrap

from understudy.plans.answer import Row, TrainingPlan
from understudy.report.text import clean, write_table
from understudy.report.times import write_interval, write_rate

GiB = 1 << 30
MOST_NAMES = 12
MOST_FAILED = 5


def write_plan(plan: TrainingPlan, width: int = 120) -> str:
    parts = [
        _wrap(_write_head(plan), width),
        _write_choices(plan, width),
        _write_commands(plan),
        _wrap(_write_search(plan), width),
        _write_failed(plan),
    ]
    parts.append(_wrap("\n".join(clean(note) for note in plan.notes), width))
    return "\n\n".join(part for part in parts if part)


def _wrap(text: str, width: int) -> str:
    """Long lines of prose, on a narrow terminal."""
    lines = [
        textwrap.wrap(line, max(width, 30), subsequent_indent="    ") or [""] for line in text.splitlines()
    ]
    return "\n".join(part for parts in lines for part in parts)


def _write_head(plan: TrainingPlan) -> str:
    where = f"{plan.cards} x {plan.device}" if plan.cards > 1 else plan.device
    if not plan.choices:
        if not any(row.reserved_bytes for row in plan.rehearsals):
            return f"No candidate ran on {where}."
        least = min(
            (row for row in plan.rehearsals if row.reserved_bytes), key=lambda row: row.reserved_bytes
        )
        return (
            f"Nothing fits on {where}: the smallest needs {least.reserved_bytes / GiB:.1f} GiB, "
            f"with {_write_values(least)}."
        )
    words = {"speed": "Fastest", "memory": "Least memory", "cost": "Cheapest"}
    state = "" if plan.is_complete else " so far; the search did not end"
    return f"{words[plan.goal]} on {where}{state}: {_write_values(plan.choices[0])}"


def _write_values(row: Row) -> str:
    return clean(", ".join(f"{name}={value}" for name, value in row.values.items()) or "unchanged")


def _write_choices(plan: TrainingPlan, width: int) -> str:
    if not plan.choices:
        return ""
    has_cost = any(row.cost is not None for row in plan.choices)
    limit = max(row.limit_bytes for row in plan.choices) / GiB
    title = f"Best first (reserved memory of {limit:.2f} GiB)"
    heads = ["", "step", "reserved", "risk", "rate", *(["cost of 1M"] if has_cost else []), "change"]
    table = []
    for row in plan.choices:
        cells = [
            str(row.place), write_time(row), f"{row.reserved_bytes / GiB:.2f}",
            "tight" if row.verdict == "tight" else "fits", write_rate(row),
        ]  # fmt: skip
        cost = [f"{row.cost:.3g}" if row.cost is not None else ""] if has_cost else []
        table.append((*cells, *cost, _write_values(row)))
    sizes = [max(len(row[index]) for row in (heads, *table)) for index in range(len(heads))]
    if sum(sizes) + 2 * len(sizes) <= width:
        return write_table(title, tuple(heads), table, width)
    # What to change is the answer: it is not cut.
    short = write_table(title, tuple(heads[:-1]), [row[:-1] for row in table], width)
    return "\n".join([short, *(_wrap(f"  {row[0]}: {row[-1]}", width) for row in table)])


def write_time(row: Row) -> str:
    if row.seconds_per_step is None or row.low_seconds is None or row.high_seconds is None:
        return "-"
    return write_interval(row.seconds_per_step, row.low_seconds, row.high_seconds)


def _write_commands(plan: TrainingPlan) -> str:
    lines: list[str] = []
    for row in plan.choices[:1]:
        lines += ["To run it:", f"    {clean(row.command)}"]
        if row.patch:
            lines += ["with this change:", *(f"    {clean(line)}" for line in row.patch.splitlines())]
    return "\n".join(lines)


def _write_search(plan: TrainingPlan) -> str:
    axes = "; ".join(
        clean(f"{axis.name}: {', '.join(axis.values[:MOST_NAMES])}{', …' * (len(axis.values) > MOST_NAMES)}")
        for axis in plan.searched
    )
    out = sum(plan.ruled_out.values())
    kept = f", {plan.kept} of them in an earlier search" if plan.kept else ""
    count = len(plan.rehearsals)
    lines = [f"Searched {axes or 'nothing: name what to vary with --vary'}"]
    if plan.combinations != plan.candidates:
        lines.append(f"{plan.combinations:,} combinations, of which {plan.candidates:,} are allowed")
    share = f" ({out / plan.candidates:.0%})" if plan.candidates else ""
    lines.append(
        f"{plan.candidates:,} candidates: {count} rehearsed{kept}, {out:,} ruled out without a rehearsal{share}"
    )
    lines += [
        f"    {number:>6,}  {reason}"
        for reason, number in sorted(plan.ruled_out.items(), key=lambda item: -item[1])
    ]
    errors = [
        f"{what} at most {error:.0%}"
        for what, error in (("time", plan.time_error), ("memory", plan.memory_error))
        if error is not None
    ]
    if errors:
        lines.append(f"Errors of predictions, measured by later rehearsals: {', '.join(errors)}")
    if plan.not_searched:
        names = ", ".join(plan.not_searched[:MOST_NAMES])
        more = (
            f" and {len(plan.not_searched) - MOST_NAMES} more" if len(plan.not_searched) > MOST_NAMES else ""
        )
        lines.append(clean(f"Not searched: {names}{more} (name them with --vary)"))
    return "\n".join(lines)


def _write_failed(plan: TrainingPlan) -> str:
    wrong = [row for row in plan.rehearsals if row.error]
    lines = [
        clean(f"failed: {_write_values(row)}: {row.error.strip().splitlines()[-1].strip()}")
        for row in wrong[:MOST_FAILED]
    ]
    if len(wrong) > MOST_FAILED:
        lines.append(f"failed: {len(wrong) - MOST_FAILED} more, in --json")
    return "\n".join(lines)
