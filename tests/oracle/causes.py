"""Failures of a sweep grouped by what seems to cause them, most frequent first, as Markdown.

python -m tests.oracle.sweep --json out.json;  python -m tests.oracle.causes out.json > report.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

WIDTH = 400

OUTCOMES = ("crash", "error", "mismatch", "refusal-missed")


@dataclass
class Group:
    """Failures with one outcome, in one operator below the public function, that look alike."""

    outcome: str
    culprit: str
    cause: str
    samples: int = 0
    ops: dict[str, None] = field(default_factory=dict)
    example: dict[str, Any] = field(default_factory=dict)

    def lines(self, engine: str) -> Iterator[str]:
        shown = self.example
        yield f"### {self.outcome}: `{self.culprit or shown['op']}`: {self.cause}"
        names = list(self.ops)
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        yield f"{self.samples} samples of {len(names)} operators: {', '.join(names[:8])}{more}"
        yield "```"
        for name in ("inputs", "detail", "culprit"):
            if shown.get(name):
                yield from (line[:WIDTH] for line in f"{name}: {shown[name]}".splitlines())
        yield (
            f"python -m tests.oracle.sweep --engine {engine} --ops '^{shown['op']}$' --dtypes {shown['dtype']} "
            f"--variant {shown['variant']} --show  # sample {shown.get('sample')}"
        )
        yield "```"


def groups(report: dict[str, Any], engine: str) -> list[Group]:
    found: dict[tuple[str, str, str], Group] = {}
    for result in report["results"]:
        for key, cell in result["engines"].get(engine, {}).items():
            dtype, _, variant = key.partition("/")
            for failure in cell["failures"]:
                if failure["outcome"] not in OUTCOMES:
                    continue
                culprit = str(failure.get("culprit") or "").partition(" ")[0]
                group = found.setdefault(
                    (failure["outcome"], culprit, failure["cause"]),
                    Group(failure["outcome"], culprit, failure["cause"]),
                )
                group.samples += failure["count"]
                group.ops[f"{result['op']} ({key})"] = None
                if not group.example:
                    group.example = {**failure, "op": result["op"], "dtype": dtype, "variant": variant}
    return sorted(found.values(), key=lambda group: (-_weight(group), -group.samples))


def _weight(group: Group) -> int:
    return len({name.partition(" ")[0] for name in group.ops})


def main(path: str) -> None:
    with open(path) as file:
        report = json.load(file)
    for engine, sums in report["engines"].items():
        print(f"# {engine}\n")
        print(f"Samples: {sums['samples']}. Operators: {sums['operators']}.\n")
        print(f"{sums['samples that fail']} samples of {sums['operators with a failure']} operators fail.\n")
        for outcome in OUTCOMES:
            mine = [group for group in groups(report, engine) if group.outcome == outcome]
            print(f"## {outcome}: {len(mine)} groups\n")
            for group in mine:
                print("\n".join(group.lines(engine)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
