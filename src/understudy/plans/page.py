"""A plan as one HTML page that needs nothing else: memory against time, a point for each rehearsal, the front drawn."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from understudy.plans.answer import Row, TrainingPlan, find_front, time_of
from understudy.plans.text import write_plan, write_time
from understudy.report.text import clean
from understudy.report.times import write_rate

PAGE_FILE = Path(__file__).with_name("page.html")


def make_page(plan: TrainingPlan) -> str:
    front = {id(row) for row in find_front(plan.rehearsals)}
    rows = [_make_point(row, id(row) in front) for row in plan.rehearsals]
    data = {"unit": find_unit(plan), "rows": rows}
    # Names of a script may hold anything: nothing of them ends the element, or is markup.
    text = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    where = f"{plan.cards} x {plan.device}" if plan.cards > 1 else plan.device
    filled = {
        "TITLE": html.escape(f"Plan: {plan.script} on {where}"), "TEXT": html.escape(write_plan(plan, 110)), "DATA": text,
    }  # fmt: skip
    page = PAGE_FILE.read_text(encoding="utf-8")
    for name, value in filled.items():
        page = page.replace(f"@{name}@", value)
    return page


def find_unit(plan: TrainingPlan) -> str:
    if any(row.tokens_per_second for row in plan.rehearsals):
        return "seconds per 1,000 tokens"
    return (
        "seconds per sample" if any(row.samples_per_second for row in plan.rehearsals) else "seconds per step"
    )


def _make_point(row: Row, is_on_front: bool) -> dict[str, Any]:
    return {
        "place": row.place, "verdict": row.verdict, "values": {clean(k): clean(v) for k, v in row.values.items()},
        "memory": row.reserved_bytes / (1 << 30), "limit": row.limit_bytes / (1 << 30), "time": time_of(row),
        "step": write_time(row), "rate": write_rate(row), "command": row.command, "patch": row.patch,
        "report": row.report or row.error, "front": is_on_front,
    }  # fmt: skip
