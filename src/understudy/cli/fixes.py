"""`understudy fix`: the cheapest changes that make a script fit."""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.cli.changes import Change, apply_changes, find_changes, write_patch
from understudy.cli.commands import Command
from understudy.cli.devices import add_cards_argument, read_own_cards
from understudy.cli.rehearsals import Outcome, Progress, Variant, Workers, rehearse_all
from understudy.cli.run import add_rehearsal_arguments
from understudy.cli.tables import clean, format_count, format_size, print_table
from understudy.cli.time_options import check_time_options
from understudy.errors import UnderstudyError
from understudy.report.times import write_step
from understudy.simulation.catalogue import Card, list_cards, parse_devices

FAILED = 1
NOTHING_FITS = 3
ENOUGH = 3
"""Changes that fit: combinations are tried only where there are fewer."""
MOST_FILES = 40
"""Files of the user's own that are looked through for changes."""


def add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", required=True, metavar="CARD", help="the card (see `understudy devices`)")
    add_cards_argument(parser)
    parser.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps of each rehearsal (default: as for `run`)"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="rehearsals at a time"
    )
    parser.add_argument("--dask", metavar="ADDRESS", help="rehearse on the workers of this Dask cluster")
    parser.add_argument("--json", action="store_true", help="as data, sizes in bytes")
    group = parser.add_argument_group("options of each rehearsal, as those of `understudy run`")
    for action in _list_rehearsal_options():
        group._add_action(action)


def _list_rehearsal_options() -> list[argparse.Action]:
    """Those of `understudy run`. Their values are checked here, and handed on as they were written."""
    parser = argparse.ArgumentParser(add_help=False)
    add_rehearsal_arguments(parser)
    for action in parser._actions:
        if action.type is not None:
            action.type = functools.partial(_check_text, action.type)
    return parser._actions


def _check_text(check: Any, text: str) -> str:
    check(text)
    return text


def check_words(options: argparse.Namespace) -> tuple[Card, dict[str, str]]:
    """The card and the files of the script, before anything runs."""
    if not options.program or options.program[0] == "-m":
        raise UnderstudyError("expected a script after the options")
    options.script, *options.arguments = options.program
    card, _ = parse_devices(options.device, read_own_cards(options))
    if options.workers < 1:
        raise UnderstudyError(f"--workers must be a positive integer, got {options.workers}")
    check_time_options(options)
    return card, read_sources(options.script)


def read_sources(script: str, home: Path | None = None) -> dict[str, str]:
    """The script and the files beside it, or in another folder, that it imports, by path."""
    found: dict[str, str] = {}
    waiting = [Path(script)]
    home = Path(script).parent if home is None else home
    while waiting and len(found) < MOST_FILES:
        path = waiting.pop(0)
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text, path.name)
        except OSError as error:
            raise UnderstudyError(f"{path}: {error.strerror or error}") from None
        except (SyntaxError, ValueError) as error:
            raise UnderstudyError(f"{path}: invalid Python: {str(error).splitlines()[0]}") from None
        found[str(path)] = text
        for name in _list_imported_names(tree):
            inner = home.joinpath(*name.split("."))
            for candidate in (inner.with_suffix(".py"), inner / "__init__.py"):
                if candidate.is_file() and str(candidate) not in found and candidate not in waiting:
                    waiting.append(candidate)
    return found


def _list_imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def run_options(options: argparse.Namespace) -> tuple[str, ...]:
    """The options for each rehearsal."""
    given = [("--steps", options.steps), ("--cards", options.cards and os.path.abspath(options.cards))]
    words = [str(part) for pair in given if pair[1] is not None for part in pair]
    for action in _list_rehearsal_options():
        value = getattr(options, action.dest)
        if value != action.default:
            words += [action.option_strings[0], *([] if action.nargs == 0 else [str(value)])]
    return tuple(words)


def report_failure(command: str, outcome: Outcome) -> int:
    for line in outcome.error.splitlines():
        print(clean(line), file=sys.stderr)
    print(f"understudy {command}: the script failed in its rehearsal", file=sys.stderr)
    return FAILED


# understudy fix


def add_fix_arguments(parser: argparse.ArgumentParser) -> None:
    add_script(parser)
    parser.usage = "understudy fix --device D [options] script.py [arguments]"
    parser.add_argument("--most", type=int, default=40, metavar="N", help="rehearsals in all (default: 40)")
    parser.epilog = """\
Each change is rehearsed in a whole run. Your files are not changed: the patch is printed.
Exit code 0: it fits, or a change makes it fit. 3: no change does. 1: the script fails.

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
        work = self.flops if self.seconds is None else float(f"{self.seconds:.2g}")
        return (not self.outcome.fits, rank, work, len(self.changes), self.outcome.reserved_bytes)

    @property
    def seconds(self) -> float | None:
        """Time of a step, scaled to the number of samples of the unchanged script."""
        assert self.outcome.rehearsal is not None
        time = self.outcome.rehearsal.time
        return None if time is None else time.seconds_per_step * math.prod(c.repeats for c in self.changes)

    @property
    def flops(self) -> int:
        """For as many samples as before: a step of half of the batch is done twice."""
        assert self.outcome.rehearsal is not None
        return self.outcome.rehearsal.flops * math.prod(change.repeats for change in self.changes)


def fix_script(options: argparse.Namespace) -> int:
    card, files = check_words(options)
    plain = Variant(options.script, tuple(options.arguments), options=run_options(options))
    with Workers(options.workers, options.dask) as workers:
        ((_, base),) = rehearse_all([plain], options.device, workers)
        if base.rehearsal is None:
            return report_failure("fix", base)
        trials, failed = _try_changes(_Search(plain, files, options.device, workers), base, options.most)
    trials.sort(key=lambda trial: trial.cost)
    best = next((trial for trial in trials if trial.outcome.fits), None)
    if options.json:
        print(json.dumps(_make_fix_record(base, trials, files), indent=2))
    else:
        _print_fixes(base, trials, failed, files, card)
    return 0 if base.fits or best else NOTHING_FITS


@dataclass(slots=True)
class _Search:
    """What the rehearsals of one `fix` share."""

    plain: Variant
    files: dict[str, str]
    device: str
    workers: Workers
    progress: Progress = field(default_factory=lambda: Progress(0))

    def rehearse(self, groups: Sequence[tuple[Change, ...]]) -> Iterator[Trial]:
        plain = self.plain
        variants = []
        for changes in groups:
            environment = {name: value for change in changes for name, value in change.environment.items()}
            texts = apply_changes(changes, self.files)
            added = tuple(part for change in changes for part in change.arguments)
            variants.append(
                Variant(plain.script, (*plain.arguments, *added), texts, environment, plain.options)
            )
        self.progress.total += len(groups)
        self.progress.show("rehearsing")
        for number, outcome in rehearse_all(variants, self.device, self.workers):
            self.progress.advance(" + ".join(change.name for change in groups[number]))
            yield Trial(groups[number], outcome)


def _try_changes(search: _Search, base: Outcome, most: int) -> tuple[list[Trial], list[tuple[Change, str]]]:
    """Each change; then, while too little fits, combinations of two and of three of those that save most.

    What fits by itself is not combined: the other change would be a cost without a gain."""
    singles = find_changes(search.files, search.plain.arguments)[:most]
    trials: list[Trial] = []
    failed: list[tuple[Change, str]] = []
    for trial in search.rehearse([(change,) for change in singles]):
        if trial.outcome.rehearsal is None:
            failed.append((trial.changes[0], trial.outcome.error.rpartition("\n")[2]))
        else:
            trials.append(trial)
    for size in (2, 3):
        if base.fits or sum(trial.outcome.fits for trial in trials) >= ENOUGH:
            break
        saving = sorted(
            (t for t in trials if len(t.changes) == 1), key=lambda trial: trial.outcome.reserved_bytes
        )
        saving = [t for t in saving if t.outcome.reserved_bytes < base.reserved_bytes and not t.outcome.fits][
            :6
        ]
        groups = itertools.combinations((trial.changes[0] for trial in saving), size)
        wanted = [
            group for group in groups if all(a.is_compatible(b) for a, b in itertools.combinations(group, 2))
        ]
        found = search.rehearse(wanted[: max(0, most - search.progress.done)])
        trials += [trial for trial in found if trial.outcome.rehearsal is not None]
    search.progress.clear()
    return trials, failed


def _make_fix_record(base: Outcome, trials: Sequence[Trial], files: dict[str, str]) -> dict[str, Any]:
    assert base.rehearsal is not None
    return {
        "verdict": base.rehearsal.verdict,
        "reserved_bytes": base.reserved_bytes,
        "changes": [
            {
                "names": [change.name for change in trial.changes],
                "lines": [change.line for change in trial.changes],
                "verdict": trial.outcome.rehearsal.verdict if trial.outcome.rehearsal else "",
                "reserved_bytes": trial.outcome.reserved_bytes,
                "saved_bytes": base.reserved_bytes - trial.outcome.reserved_bytes,
                "added_flops": trial.flops - base.rehearsal.flops,
                "time": _make_time_record(trial, base),
                "patch": write_patch(trial.changes, files),
            }
            for trial in trials
        ],
    }


def _make_time_record(trial: Trial, base: Outcome) -> dict[str, float] | None:
    """Time with its interval, for the samples of one unchanged step; `change` is relative to the unchanged time."""
    before = base.rehearsal.time if base.rehearsal else None
    after = trial.outcome.rehearsal.time if trial.outcome.rehearsal else None
    if before is None or after is None or trial.seconds is None:
        return None
    repeats = trial.seconds / after.seconds_per_step
    return {
        "seconds": trial.seconds,
        "low_seconds": repeats * after.low_seconds,
        "high_seconds": repeats * after.high_seconds,
        "change": trial.seconds / before.seconds_per_step - 1,
    }


def _print_fixes(
    base: Outcome,
    trials: Sequence[Trial],
    failed: Sequence[tuple[Change, str]],
    files: dict[str, str],
    card: Card,
) -> None:
    assert base.rehearsal is not None
    print(clean(f"unchanged: {base.rehearsal.headline}"), end="\n\n")
    if base.rehearsal.time is not None:
        print(write_step(base.rehearsal.time), end="\n\n")
    rows = [_make_fix_row(trial, base) for trial in trials]
    print_table(
        ("change", "line", "reserved", "saved", "FLOPs", "time", "verdict"),
        rows,
        (True, True, False, False, False, False, True),
    )
    for change, error in failed:
        print(clean(f"not possible: {change.name} ({change.line}): {error}"))
    best = next((trial for trial in trials if trial.outcome.fits), None)
    if base.fits:
        print("\nIt fits unchanged.")
    elif best is not None:
        print(f"\nThe cheapest that fits: {clean(' + '.join(change.name for change in best.changes))}\n")
        for line in write_patch(best.changes, files).splitlines():
            print(clean(line))
    else:
        print(f"\n{_explain_nothing(base, trials, card)}")


def _make_fix_row(trial: Trial, base: Outcome) -> tuple[str, ...]:
    rehearsal, before = trial.outcome.rehearsal, base.rehearsal
    assert rehearsal is not None and before is not None
    added = trial.flops - before.flops
    part = round(100 * added / before.flops) if before.flops else 0
    work = f"{part:+d}%" if part else "same" if before.flops or not added else format_count(added)
    names, lines = (
        list(dict.fromkeys(part)) for part in zip(*((c.name, c.line) for c in trial.changes), strict=True)
    )
    saved = base.reserved_bytes - trial.outcome.reserved_bytes
    sizes = format_size(trial.outcome.reserved_bytes), format_size(saved)
    time = _make_time_record(trial, base)
    shown = "-" if time is None else f"{time['change']:+.0%}"
    return " + ".join(names), ", ".join(lines), *sizes, work, shown, rehearsal.verdict


def _explain_nothing(base: Outcome, trials: Sequence[Trial], card: Card) -> str:
    best = min([base, *(trial.outcome for trial in trials)], key=lambda outcome: outcome.reserved_bytes)
    over = best.reserved_bytes - card.usable
    larger = [other for other in list_cards() if other.kind != "cpu" and other.usable >= best.reserved_bytes]
    larger.sort(key=lambda other: other.memory)
    needed = format_size(best.reserved_bytes)
    text = f"Nothing fits: the best needs {needed}, {format_size(over)} more than {card} has for torch."
    if not larger:
        return f"{text} No card of the catalogue has that much."
    return f"{text} It would fit on {larger[0]}."


COMMAND = Command("fix", add_fix_arguments, fix_script, takes_program=True)
