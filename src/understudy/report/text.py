"""A `Rehearsal` as text: the verdict, then tables."""

from __future__ import annotations

from understudy.report.rehearsal import Rehearsal


def write_text(rehearsal: Rehearsal) -> str:
    lines = [rehearsal.headline, ""]
    lines += [f"{name:<20}{count / (1 << 30):>10.3f} GiB" for name, count in rehearsal.categories.items()]
    return "\n".join([*lines, "", *rehearsal.assumptions])
