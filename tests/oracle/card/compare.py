"""Compares what two runs of the same cases asked of the allocator."""

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_SHOWN = 6


@dataclass(frozen=True)
class Comparison:
    name: str
    events: str  # "same", "same requests" (in the same order, freed in another), "other order", "different"
    allocated: tuple[int, int]
    reserved: tuple[int, int]
    retries: tuple[int, int]
    error: str | None
    differences: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return all(real == simulated for real, simulated in (self.allocated, self.reserved, self.retries))


def compare_case(
    name: str, real: dict[str, Any], simulated: dict[str, Any], verbose: bool = False
) -> Comparison:
    """Verbose: with the first differences of the events, which take their time to find."""
    sides = (real, simulated)
    errors = [
        f"{side}: {one['error']}"
        for side, one in zip(("real", "simulated"), sides, strict=True)
        if one["error"]
    ]
    return Comparison(
        name,
        _judge_events(real["events"], simulated["events"]),
        (real["allocated"], simulated["allocated"]),
        (real["reserved"], simulated["reserved"]),
        (real["retries"], simulated["retries"]),
        "; ".join(errors) or None,
        tuple(_list_differences(real, simulated)) if verbose else (),
    )


def _judge_events(real: list[str], simulated: list[str]) -> str:
    if real == simulated:
        return "same"
    if [event for event in real if event[0] == "+"] == [event for event in simulated if event[0] == "+"]:
        return "same requests"
    return "other order" if Counter(real) == Counter(simulated) else "different"


def _list_differences(real: dict[str, Any], simulated: dict[str, Any]) -> Iterable[str]:
    matcher = difflib.SequenceMatcher(None, real["events"], simulated["events"], autojunk=False)
    found = (
        [code for code in matcher.get_opcodes() if code[0] != "equal"]
        if real["events"] != simulated["events"]
        else []
    )
    for _, a, b, c, d in found[:_SHOWN]:
        line = (real["lines"][a : a + 1] or [""])[0]
        yield f"{line}  real {' '.join(real['events'][a:b])} | simulated {' '.join(simulated['events'][c:d])}"
    if len(found) > _SHOWN:
        yield f"and {len(found) - _SHOWN} more"


def write_table(comparisons: list[Comparison], verbose: bool = False) -> str:
    """A line for each case that is not the same in all, and the counts."""
    lines = []
    for one in comparisons:
        if one.events == "same" and one.is_equal and not one.error and not verbose:
            continue
        lines.append(
            f"{one.name}: events {one.events}{_show('allocated', one.allocated)}{_show('reserved', one.reserved)}"
        )
        if one.retries[0] != one.retries[1]:
            lines.append(f"    {one.retries[0]} retries, {one.retries[1]} simulated")
        if one.error:
            lines.append(f"    {one.error}")
        if verbose:
            lines.extend(f"    {difference}" for difference in one.differences)
    events = Counter(one.events for one in comparisons)
    equal = [sum(pair[0] == pair[1] for pair in pairs) for pairs in _peaks(comparisons)]
    lines.append(
        f"{len(comparisons)} cases. Events: {', '.join(f'{kind} in {count}' for kind, count in events.most_common())}. "
        f"Peaks equal to the byte: allocated in {equal[0]}, reserved in {equal[1]}."
    )
    return "\n".join(lines)


def _peaks(comparisons: list[Comparison]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return [one.allocated for one in comparisons], [one.reserved for one in comparisons]


def _show(what: str, peaks: tuple[int, int]) -> str:
    real, simulated = peaks
    if real == simulated:
        return f"; {what} equal"
    return f"; {what} {real:,} real, {simulated:,} simulated ({(simulated - real) / max(real, 1):+.2%})"
