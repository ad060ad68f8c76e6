"""`understudy fix` and `understudy fit`: the cheapest changes that make a script fit, and the largest size that does."""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.cli.changes import Change, apply_changes, find_changes, set_constant, write_patch
from understudy.cli.commands import Command
from understudy.cli.rehearsals import Outcome, Progress, Variant, make_executor, rehearse_all
from understudy.cli.tables import clean, format_count, format_size, print_table
from understudy.errors import UnderstudyError
from understudy.simulation.catalogue import Card, list_cards, parse_devices

FAILED = 1
NOTHING_FITS = 3
MOST_FILES = 40
"""Files of the user's own that are looked through for changes."""


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", required=True, metavar="CARD", help="the card (see `understudy devices`)")
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of each rehearsal (default: that of `run`)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="rehearsals at a time")
    parser.add_argument("--dask", metavar="ADDRESS", help="rehearse on the workers of this Dask cluster")
    parser.add_argument("--json", action="store_true", help="as data, sizes in bytes")


def _check_words(options: argparse.Namespace) -> tuple[Card, dict[str, str]]:
    """The card and the files of the script, before anything runs."""
    if not options.program or options.program[0] == "-m":
        raise UnderstudyError("no script is named: a file has to follow the options")
    options.script, *options.arguments = options.program
    card, _ = parse_devices(options.device)
    if options.workers < 1:
        raise UnderstudyError(f"--workers {options.workers}: at least 1")
    return card, read_sources(options.script)


def read_sources(script: str) -> dict[str, str]:
    """The script and the files beside it that it imports, by path."""
    found: dict[str, str] = {}
    waiting = [Path(script)]
    home = Path(script).parent
    while waiting and len(found) < MOST_FILES:
        path = waiting.pop(0)
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except OSError as error:
            raise UnderstudyError(f"{path}: {error.strerror or error}") from None
        except (SyntaxError, ValueError) as error:
            raise UnderstudyError(f"{path} is no Python: {str(error).splitlines()[0]}") from None
        found[str(path)] = text
        for name in _imported_names(tree):
            inner = home.joinpath(*name.split("."))
            for candidate in (inner.with_suffix(".py"), inner / "__init__.py"):
                if candidate.is_file() and str(candidate) not in found and candidate not in waiting:
                    waiting.append(candidate)
    return found


def _imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _run_options(options: argparse.Namespace) -> tuple[str, ...]:
    return ("--steps", str(options.steps)) if options.steps is not None else ()


def _renew(options: argparse.Namespace) -> Callable[[], Executor]:
    return lambda: make_executor(options.workers, options.dask)


def _rehearse_one(variant: Variant, options: argparse.Namespace) -> Outcome:
    return next(outcome for _, outcome in rehearse_all([variant], options.device, _renew(options)))


def _report_failure(command: str, outcome: Outcome) -> int:
    for line in outcome.error.splitlines():
        print(clean(line), file=sys.stderr)
    print(f"understudy {command}: the script failed in its rehearsal", file=sys.stderr)
    return FAILED


# understudy fix


def add_fix_arguments(parser: argparse.ArgumentParser) -> None:
    _add_script(parser)
    parser.usage = "understudy fix --device D [options] script.py [arguments]"
    parser.add_argument("--most", type=int, default=40, metavar="N", help="rehearsals in all (default: 40)")
    parser.epilog = """\
Each change is rehearsed: its memory is that of a whole run. Your files are not changed: the patch is printed.
Exit code 0: it fits, or something makes it fit. 3: nothing does. 1: the script fails.

example:
    understudy fix --device 4090 train.py --batch-size 32"""


@dataclass(frozen=True, slots=True)
class Trial:
    """Some changes, rehearsed together."""

    changes: tuple[Change, ...]
    outcome: Outcome

    @property
    def cost(self) -> tuple[Any, ...]:
        """Cheapest first: what fits, with the least loss and the least work added, and few changes."""
        assert self.outcome.rehearsal is not None
        rank = max(change.rank for change in self.changes)
        return (not self.outcome.fits, rank, self.outcome.rehearsal.flops, len(self.changes), self.outcome.needed)


def fix_script(options: argparse.Namespace) -> int:
    card, files = _check_words(options)
    plain = Variant(options.script, tuple(options.arguments), options=_run_options(options))
    base = _rehearse_one(plain, options)
    if base.rehearsal is None:
        return _report_failure("fix", base)
    trials, failed = _try_changes(plain, base, files, options)
    trials.sort(key=lambda trial: trial.cost)
    best = next((trial for trial in trials if trial.outcome.fits), None)
    if options.json:
        print(json.dumps(_fix_record(base, trials, files), indent=2))
    else:
        _print_fixes(base, trials, failed, files, card)
    return 0 if base.fits or best else NOTHING_FITS


def _try_changes(
    plain: Variant, base: Outcome, files: dict[str, str], options: argparse.Namespace
) -> tuple[list[Trial], list[tuple[Change, str]]]:
    """Each change; then, while too little fits, combinations of two and of three of those that save most."""
    singles = find_changes(files, tuple(options.arguments))[: options.most]
    progress = Progress(len(singles))
    trials: list[Trial] = []
    failed: list[tuple[Change, str]] = []
    for trial in _rehearse_changes([(change,) for change in singles], plain, files, options, progress):
        if trial.outcome.rehearsal is None:
            failed.append((trial.changes[0], trial.outcome.error.rpartition("\n")[2]))
        else:
            trials.append(trial)
    for size in (2, 3):
        if base.fits or sum(trial.outcome.fits for trial in trials) >= 3:
            break
        saving = sorted((t for t in trials if len(t.changes) == 1), key=lambda trial: trial.outcome.needed)
        saving = [trial for trial in saving if trial.outcome.needed < base.needed][:6]
        groups = itertools.combinations((trial.changes[0] for trial in saving), size)
        wanted = [group for group in groups if all(a.is_compatible(b) for a, b in itertools.combinations(group, 2))]
        wanted = wanted[: max(0, options.most - progress.done)]
        progress.total += len(wanted)
        found = _rehearse_changes(wanted, plain, files, options, progress)
        trials += [trial for trial in found if trial.outcome.rehearsal is not None]
    progress.clear()
    return trials, failed


def _rehearse_changes(
    groups: Sequence[tuple[Change, ...]],
    plain: Variant,
    files: dict[str, str],
    options: argparse.Namespace,
    progress: Progress,
) -> Iterator[Trial]:
    variants = []
    for changes in groups:
        environment = {name: value for change in changes for name, value in change.environment.items()}
        texts = apply_changes(changes, files)
        added = tuple(part for change in changes for part in change.arguments)
        variants.append(Variant(plain.script, (*plain.arguments, *added), texts, environment, plain.options))
    progress.show("rehearsing")
    for number, outcome in rehearse_all(variants, options.device, _renew(options)):
        progress.advance(" + ".join(change.name for change in groups[number]))
        yield Trial(groups[number], outcome)


def _fix_record(base: Outcome, trials: Sequence[Trial], files: dict[str, str]) -> dict[str, Any]:
    assert base.rehearsal is not None
    return {
        "verdict": base.rehearsal.verdict,
        "reserved_bytes": base.needed,
        "changes": [
            {
                "names": [change.name for change in trial.changes],
                "lines": [change.line for change in trial.changes],
                "verdict": trial.outcome.rehearsal.verdict if trial.outcome.rehearsal else "",
                "reserved_bytes": trial.outcome.needed,
                "saved_bytes": base.needed - trial.outcome.needed,
                "added_flops": trial.outcome.rehearsal.flops - base.rehearsal.flops if trial.outcome.rehearsal else 0,
                "patch": write_patch(trial.changes, files),
            }
            for trial in trials
        ],
    }


def _print_fixes(
    base: Outcome, trials: Sequence[Trial], failed: Sequence[tuple[Change, str]], files: dict[str, str], card: Card
) -> None:
    assert base.rehearsal is not None
    print(clean(f"as it is: {base.rehearsal.headline}"), end="\n\n")
    rows = [_fix_row(trial, base) for trial in trials]
    print_table(("change", "line", "reserved", "saved", "FLOPs", "verdict"), rows, (True, True, False, False, False, True))
    for change, error in failed:
        print(clean(f"not possible: {change.name} ({change.line}): {error}"))
    best = next((trial for trial in trials if trial.outcome.fits), None)
    if base.fits:
        print("\nIt fits as it is.")
    elif best is not None:
        print(f"\nThe cheapest that fits: {clean(' + '.join(change.name for change in best.changes))}\n")
        for line in write_patch(best.changes, files).splitlines():
            print(clean(line))
    else:
        print(f"\n{_explain_nothing(base, trials, card)}")


def _fix_row(trial: Trial, base: Outcome) -> tuple[str, ...]:
    rehearsal, before = trial.outcome.rehearsal, base.rehearsal
    assert rehearsal is not None and before is not None
    added = rehearsal.flops - before.flops
    work = f"{added / before.flops:+.0%}" if before.flops and added else format_count(added) if added else "same"
    names, lines = (list(dict.fromkeys(part)) for part in zip(*((c.name, c.line) for c in trial.changes), strict=True))
    saved = base.needed - trial.outcome.needed
    sizes = format_size(trial.outcome.needed), format_size(saved)
    return " + ".join(names), ", ".join(lines), *sizes, work, rehearsal.verdict


def _explain_nothing(base: Outcome, trials: Sequence[Trial], card: Card) -> str:
    best = min([base, *(trial.outcome for trial in trials)], key=lambda outcome: outcome.needed)
    over = best.needed - card.usable
    larger = [other for other in list_cards() if other.kind != "cpu" and other.usable >= best.needed]
    larger.sort(key=lambda other: other.memory)
    text = f"Nothing fits: the best needs {format_size(best.needed)}, {format_size(over)} more than {card} has for torch."
    if not larger:
        return f"{text} No card of the catalogue has that much."
    return f"{text} It would fit on {larger[0]}."


# understudy fit


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    _add_script(parser)
    parser.usage = "understudy fit --device D --vary NAME=LOW..HIGH [options] script.py [arguments]"
    parser.add_argument("--vary", required=True, metavar="NAME=LOW..HIGH", help="the number to vary: batch=1..512")
    parser.epilog = """\
The number is an argument of the script, written as {batch}, or a number that the script calls by that name (BATCH = 8,
batch_size=8, an option's default). The answer is found by rehearsals, and so is that the next one does not fit.

examples:
    understudy fit --device h100 --vary batch=1..512 train.py
    understudy fit --device h100 --vary length=128..8192 train.py --length {length}"""


def parse_range(text: str) -> tuple[str, int, int]:
    found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        raise UnderstudyError(f"--vary is written as batch=1..512, not {text!r}")
    return found[1], int(found[2]), int(found[3])


def fit_script(options: argparse.Namespace) -> int:
    name, low, high = parse_range(options.vary)
    _, files = _check_words(options)
    make = _make_varied(options, files, name)
    outcomes: dict[int, Outcome] = {}
    progress = Progress((high - low).bit_length() + 2)

    def rehearse(sizes: Sequence[int]) -> None:
        new = [size for size in dict.fromkeys(sizes) if size not in outcomes]
        for number, outcome in rehearse_all([make(size) for size in new], options.device, _renew(options)):
            outcomes[new[number]] = outcome
            progress.advance(f"{name}={new[number]}")

    largest = _find_largest(low, high, outcomes, rehearse)
    progress.clear()
    first = outcomes[low]
    if first.rehearsal is None:
        return _report_failure("fit", first)
    _print_fit(name, low, high, largest, outcomes, as_json=options.json)
    return 0 if largest is not None else NOTHING_FITS


def _make_varied(options: argparse.Namespace, files: dict[str, str], name: str) -> Callable[[int], Variant]:
    mark = "{" + name + "}"
    more = _run_options(options)
    if any(mark in argument for argument in options.arguments):
        return lambda size: Variant(
            options.script, tuple(part.replace(mark, str(size)) for part in options.arguments), options=more
        )
    if set_constant(files, name, 1) is None:
        raise UnderstudyError(
            f"{options.script} has no number named {name!r}: write {mark} in the place of an argument, as in --{name} {mark}"
        )
    arguments = tuple(options.arguments)
    return lambda size: Variant(options.script, arguments, set_constant(files, name, size) or {}, options=more)


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


def _print_fit(name: str, low: int, high: int, largest: int | None, outcomes: dict[int, Outcome], as_json: bool) -> None:
    formula = fit_line({size: o.rehearsal.peak.allocated_bytes for size, o in outcomes.items() if o.rehearsal is not None})
    if as_json:
        sizes = {
            size: {"verdict": o.rehearsal.verdict, "reserved_bytes": o.needed} if o.rehearsal else {"error": o.error}
            for size, o in sorted(outcomes.items())
        }
        record: dict[str, Any] = {"name": name, "largest": largest, "sizes": sizes}
        record |= {"fixed_bytes": formula[0], "bytes_each": formula[1], "deviation": formula[2]} if formula else {}
        print(json.dumps(record, indent=2))
        return
    if largest is None:
        print(f"No {name} from {low} to {high} fits: {clean(_headline(outcomes[low]))}")
    elif largest == high:
        print(f"{name} = {high} fits, the largest that was asked about: {clean(_headline(outcomes[high]))}")
    else:
        print(f"{name} = {largest} fits, {largest + 1} does not: {clean(_headline(outcomes[largest]))}")
    print()
    rows = [
        (str(size), format_size(o.needed) if o.rehearsal else "-", o.rehearsal.verdict if o.rehearsal else _headline(o))
        for size, o in sorted(outcomes.items())
    ]
    print_table((name, "reserved", "verdict"), rows, (False, False, True))
    if formula:
        fixed, each, deviation = formula
        print(
            f"\nallocated at the peak: about {format_size(fixed)} + {format_size(each)} x {name}, a line through "
            f"{len(rows)} rehearsals; the largest deviation is {deviation:.1%}"
        )


def _headline(outcome: Outcome) -> str:
    return outcome.rehearsal.headline if outcome.rehearsal else outcome.error.rpartition("\n")[2]


MOST_DEVIATION = 0.05
"""A line that misses a rehearsal by more says nothing."""


def fit_line(sizes: dict[int, int]) -> tuple[float, float, float] | None:
    """(fixed, for each, largest deviation) of the best line through at least three points; None if there is no good one."""
    if len(sizes) < 3:
        return None
    count = len(sizes)
    mean_x, mean_y = sum(sizes) / count, sum(sizes.values()) / count
    spread = sum((x - mean_x) ** 2 for x in sizes)
    each = sum((x - mean_x) * (y - mean_y) for x, y in sizes.items()) / spread
    fixed = mean_y - each * mean_x
    deviation = max(abs(fixed + each * x - y) / y for x, y in sizes.items() if y)
    return (fixed, each, deviation) if deviation <= MOST_DEVIATION else None


COMMANDS = (
    Command("fix", "The cheapest changes that make a script fit.", add_fix_arguments, fix_script, takes_program=True),
    Command("fit", "The largest batch, or length, that fits.", add_fit_arguments, fit_script, takes_program=True),
)
