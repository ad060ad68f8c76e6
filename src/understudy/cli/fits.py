"""`understudy fit`: the largest size that fits, by rehearsals, and the peak as a formula of it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

from understudy.cli.changes import set_constant
from understudy.cli.commands import Command
from understudy.cli.fixes import NOTHING_FITS, add_script, check_words, report_failure, run_options
from understudy.cli.rehearsals import Outcome, Progress, Variant, Workers, rehearse_all
from understudy.cli.tables import clean, format_size, print_table
from understudy.errors import UnderstudyError
from understudy.report.times import write_interval, write_rate, write_step


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    add_script(parser)
    parser.usage = "understudy fit --device D --vary NAME=LOW..HIGH [options] script.py [arguments]"
    parser.add_argument(
        "--vary", required=True, metavar="NAME=LOW..HIGH", help="the number to vary: batch=1..512"
    )
    parser.add_argument(
        "--for",
        dest="goal",
        choices=("size", "speed"),
        default="size",
        help="size: the largest that fits; speed: of these, the one with the most samples per second (default: size)",
    )
    parser.epilog = """\
The number is an argument of the script, written as {batch}, or a number of that name in the script (BATCH = 8,
batch_size=8, an option's default). Rehearsals confirm that the answer fits, and that the next number does not.
Exit code 0: something fits. 3: nothing does. 1: the script fails.

examples:
    understudy fit --device h100 --vary batch=1..512 train.py
    understudy fit --device h100 --vary batch=1..512 --for speed train.py
    understudy fit --device h100 --vary length=128..8192 train.py --length {length}"""


def parse_range(text: str) -> tuple[str, int, int]:
    found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        raise UnderstudyError(f"expected --vary as in batch=1..512, got {text!r}")
    return found[1], int(found[2]), int(found[3])


def fit_script(options: argparse.Namespace) -> int:
    name, low, high = parse_range(options.vary)
    _, files = check_words(options)
    make = _make_varied(options, files, name)
    outcomes: dict[int, Outcome] = {}
    progress = Progress((high - low).bit_length() + 2)
    with Workers(options.workers, options.dask) as workers:

        def rehearse(sizes: Sequence[int]) -> None:
            new = [size for size in dict.fromkeys(sizes) if size not in outcomes]
            for number, outcome in rehearse_all([make(size) for size in new], options.device, workers):
                outcomes[new[number]] = outcome
                progress.advance(f"{name}={new[number]}")

        largest = _find_largest(low, high, outcomes, rehearse)
        if outcomes[low].rehearsal is not None:
            rehearse(_choose_sizes_to_check(outcomes))
        if options.goal == "speed" and largest is not None:
            rehearse(_double(low, largest))
    progress.clear()
    if outcomes[low].rehearsal is None:
        return report_failure("fit", outcomes[low])
    fastest = find_fastest(outcomes) if options.goal == "speed" else None
    answer = FitAnswer(name, low, high, largest, outcomes, find_formula(outcomes), fastest)
    if options.json:
        print(json.dumps(answer.to_record(), indent=2))
    else:
        answer.print()
    return 0 if largest is not None else NOTHING_FITS


def _make_varied(options: argparse.Namespace, files: dict[str, str], name: str) -> Callable[[int], Variant]:
    mark = "{" + name + "}"
    more = run_options(options)
    if any(mark in argument for argument in options.arguments):
        return lambda size: Variant(
            options.script,
            tuple(part.replace(mark, str(size)) for part in options.arguments),
            options=more,
            keeps_requests=True,
        )
    if set_constant(files, name, 1) is None:
        raise UnderstudyError(
            f"{options.script} has no number named {name!r}: replace an argument by {mark}, as in --{name} {mark}"
        )
    arguments = tuple(options.arguments)
    return lambda size: Variant(
        options.script, arguments, set_constant(files, name, size) or {}, options=more, keeps_requests=True
    )


def _find_largest(
    low: int, high: int, outcomes: dict[int, Outcome], rehearse: Callable[[Sequence[int]], None]
) -> int | None:
    """Bisecting, two sizes at a time; what fails without a rehearsal counts as too large."""
    rehearse([low, high])
    if not outcomes[low].fits:
        return None
    if outcomes[high].fits:
        return high
    fits, fails = low, high
    while fails - fits > 1:
        third = (fails - fits) // 3
        rehearse(sorted({fits + max(1, third), min(fails - 1, fits + max(1, 2 * third))}))
        known = sorted(size for size in outcomes if fits <= size <= fails)
        fits = max(size for size in known if outcomes[size].fits and size < fails)
        fails = min(size for size in known if not outcomes[size].fits and size > fits)
    return fits


# speed


def _double(low: int, high: int) -> list[int]:
    """Sizes from the smallest to the largest, each twice the one before."""
    sizes = [low]
    while 2 * sizes[-1] < high:
        sizes.append(2 * sizes[-1])
    return sizes


def find_rate(size: int, outcome: Outcome) -> float | None:
    """Return tokens or samples per second; if the inputs show neither, `size` per second."""
    time = outcome.rehearsal.time if outcome.rehearsal else None
    if time is None:
        return None
    return time.tokens_per_second or time.samples_per_second or size / time.seconds_per_step


def find_fastest(outcomes: dict[int, Outcome]) -> int | None:
    """The size that fits with the highest rate; of those within a hundredth of it, the smallest."""
    rates = {size: find_rate(size, outcome) or 0.0 for size, outcome in outcomes.items() if outcome.fits}
    most = max(rates.values(), default=0.0)
    return min((size for size, rate in rates.items() if rate >= 0.99 * most), default=None) if most else None


# the peak as a formula

POINTS = 3
"""Rehearsals that determine polynomials of degree two."""
CHECKS = 3
"""Others that a formula is compared with at least."""


def _choose_sizes_to_check(outcomes: dict[int, Outcome]) -> list[int]:
    """Sizes between those that were rehearsed, as many as a formula and its check still need."""
    known = sorted(size for size, outcome in outcomes.items() if outcome.rehearsal is not None)
    missing = POINTS + CHECKS - len(known)
    if missing <= 0 or known[-1] - known[0] < missing + 1:
        return []
    spaced = (
        known[0] + (known[-1] - known[0]) * part // (2 * missing + 1) for part in range(1, 2 * missing + 1)
    )
    return [size for size in dict.fromkeys(spaced) if size not in outcomes][:missing]


@dataclass(frozen=True, slots=True)
class Polynomial:
    """constant + linear * n + square * n**2, in bytes."""

    constant: Fraction
    linear: Fraction
    square: Fraction

    @classmethod
    def through(cls, sizes: Sequence[int], values: Sequence[int]) -> Polynomial:
        """The polynomial through three points, by divided differences."""
        (a, b, c), (at_a, at_b, at_c) = sizes, values
        slope = Fraction(at_b - at_a, b - a)
        square = (Fraction(at_c - at_b, c - b) - slope) / (c - a)
        return cls(at_a - slope * a + square * a * b, slope - square * (a + b), square)

    def at(self, size: int) -> Fraction:
        return self.constant + size * (self.linear + size * self.square)

    def format(self, name: str, high: int) -> str:
        """The formula as text, without terms that are too small to show in three digits."""
        terms = (
            (self.constant, 1, ""),
            (self.linear, high, f" x {name}"),
            (self.square, high**2, f" x {name}^2"),
        )
        text = ""
        for value, most, unit in terms:
            if abs(value * most) >= self.at(high) / 1000:
                sign = " - " if value < 0 else " + "
                text += f"{sign if text or value < 0 else ''}{format_size(float(abs(value)))}{unit}"
        return text.strip() or "0 B"


@dataclass(frozen=True, slots=True)
class PeakFormula:
    """The most that is requested at once: the largest of some polynomials, each that of one moment of the run.

    `sizes` are the rehearsals that gave it, `deviations` how far it is off in the others.
    """

    pieces: tuple[Polynomial, ...]
    sizes: tuple[int, ...]
    deviations: dict[int, float]

    def at(self, size: int) -> int:
        return int(max(piece.at(size) for piece in self.pieces))

    def format(self, name: str) -> str:
        parts = [piece.format(name, self.sizes[-1]) for piece in self.pieces]
        return parts[0] if len(parts) == 1 else f"the larger of {' and '.join(parts)}"


def find_formula(outcomes: dict[int, Outcome]) -> PeakFormula | None:
    """Where each size makes the same requests in the same order, each request is a polynomial of the size, and so is what
    is alive at each moment: three rehearsals determine it. None where runs differ in more than sizes, or too few are left
    to compare it with."""
    for sizes in _alike(outcomes):
        if len(sizes) < POINTS + CHECKS:
            continue
        given = (sizes[0], sizes[len(sizes) // 2], sizes[-1])
        moments = set(zip(*(accumulate(outcomes[size].requests) for size in given), strict=True))
        pieces = _highest([Polynomial.through(given, values) for values in moments], sizes)
        formula = PeakFormula(pieces, given, {})
        for size in sizes:
            if size not in given:
                real = max(accumulate(outcomes[size].requests))
                formula.deviations[size] = abs(formula.at(size) - real) / max(real, 1)
        return formula
    return None


def _alike(outcomes: dict[int, Outcome]) -> Iterator[list[int]]:
    """Groups of sizes whose runs allocate and free in the same order, the largest group first."""
    groups: dict[bytes, list[int]] = {}
    for size, outcome in sorted(outcomes.items()):
        if len(outcome.requests):
            groups.setdefault(bytes(part > 0 for part in outcome.requests), []).append(size)
    yield from sorted(groups.values(), key=len, reverse=True)


def _highest(moments: Sequence[Polynomial], sizes: Sequence[int]) -> tuple[Polynomial, ...]:
    """The polynomials that are the largest of all for some size between the smallest and the largest."""
    low, high = sizes[0], sizes[-1]
    samples = sorted({*sizes, *(low + (high - low) * part // 64 for part in range(65))})
    plain = [(float(m.constant), float(m.linear), float(m.square)) for m in moments]
    found: dict[int, None] = {}
    for n in samples:
        values = [constant + n * (linear + n * square) for constant, linear, square in plain]
        top = max(values)
        if not any(values[i] >= top * (1 - 1e-12) for i in found):
            found[values.index(top)] = None
    return tuple(moments[i] for i in found)


# the answer


@dataclass(frozen=True, slots=True)
class FitAnswer:
    name: str
    low: int
    high: int
    largest: int | None
    outcomes: dict[int, Outcome]
    formula: PeakFormula | None
    fastest: int | None = None
    """With --for speed: the size with the most samples in a second."""

    def to_record(self) -> dict[str, Any]:
        sizes = {
            size: {
                "verdict": o.rehearsal.verdict,
                "reserved_bytes": o.reserved_bytes,
                "seconds_per_step": o.rehearsal.time and o.rehearsal.time.seconds_per_step,
                "per_second": find_rate(size, o),
            }
            if o.rehearsal
            else {"error": o.error}
            for size, o in sorted(self.outcomes.items())
        }
        record: dict[str, Any] = {
            "name": self.name, "largest": self.largest, "fastest": self.fastest, "sizes": sizes, "formula": None,
        }  # fmt: skip
        if self.formula is not None:
            record["formula"] = {
                "requested_bytes": [
                    [float(p.constant), float(p.linear), float(p.square)] for p in self.formula.pieces
                ],
                "from_sizes": list(self.formula.sizes),
                "deviations": {str(size): part for size, part in self.formula.deviations.items()},
            }
        return record

    def print(self) -> None:
        name, largest, outcomes = self.name, self.largest, self.outcomes
        if largest is None:
            print(
                f"No {name} from {self.low} to {self.high} fits: {clean(_write_verdict(outcomes[self.low]))}"
            )
        elif largest == self.high:
            print(
                f"{name} = {largest} fits, the largest of the range: {clean(_write_verdict(outcomes[largest]))}"
            )
        else:
            print(
                f"{name} = {largest} fits, {largest + 1} does not: {clean(_write_verdict(outcomes[largest]))}"
            )
        if self.fastest is not None:
            time = outcomes[self.fastest].rehearsal.time  # type: ignore[union-attr]
            assert time is not None
            print(f"Fastest: {name} = {self.fastest}: {write_step(time)}")
        print()
        rows = [
            (str(size), format_size(o.reserved_bytes), _write_time(o), o.rehearsal.verdict)
            if o.rehearsal
            else (str(size), "-", "-", _write_verdict(o))
            for size, o in sorted(outcomes.items())
        ]
        print_table((name, "reserved", "time of a step", "verdict"), rows, (False, False, False, True))
        print(f"\n{self._explain_formula()}")

    def _explain_formula(self) -> str:
        if self.formula is None:
            return "No formula for the peak: the runs differ in more than the sizes of their allocations, or are too few."
        worst = max(self.formula.deviations.values())
        others = len(self.formula.deviations)
        checked = f"exact in {others} more" if worst == 0 else f"off by at most {worst:.2%} in {others} more"
        first = ", ".join(str(size) for size in self.formula.sizes)
        return (
            f"Requested at the peak: {self.formula.format(self.name)}\n"
            f"(from the rehearsals of {self.name} = {first}; {checked}; blocks and fragmentation come on top)"
        )


def _write_time(outcome: Outcome) -> str:
    time = outcome.rehearsal.time if outcome.rehearsal else None
    if time is None:
        return "-"
    interval = write_interval(time.seconds_per_step, time.low_seconds, time.high_seconds)
    return ", ".join(filter(None, (interval, write_rate(time))))


def _write_verdict(outcome: Outcome) -> str:
    return outcome.rehearsal.headline if outcome.rehearsal else outcome.error.rpartition("\n")[2]


COMMAND = Command("fit", add_fit_arguments, fit_script, takes_program=True)
