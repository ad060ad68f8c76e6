"""`understudy report` and `understudy diff`: rehearsals that were saved as JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.cli.commands import Command
from understudy.cli.tables import clean, format_size, parse_size, print_table
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from understudy.report.cluster_rehearsal import ClusterRehearsal
    from understudy.report.comparison import RehearsalComparison
    from understudy.report.rehearsal import Rehearsal

GREW = 3
"""The exit code where memory grew by more than is allowed, or the run no longer fits: that of `run` over its budget."""

# understudy report


FORMATS = {
    "html": "an HTML page with everything",
    "trace": "for Perfetto and chrome://tracing (.json or .json.gz)",
    "speedscope": "the peak, for speedscope",
    "folded": "the peak as folded stacks",
}


def _write_file(rehearsal: Rehearsal, name: str, path: str) -> None:
    from understudy.report import exports  # why: --help and completion are quick
    from understudy.report.page import make_page  # why: as above

    if name == "html":
        Path(path).write_text(make_page(rehearsal).to_html(), encoding="utf-8")
        return
    writers = {
        "trace": exports.write_trace,
        "speedscope": exports.write_speedscope,
        "folded": exports.write_folded,
    }
    writers[name](rehearsal, path)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
examples:
    understudy run --device h100 --json run.json train.py
    understudy report run.json
    understudy report run.json --html run.html --trace run.json.gz"""
    parser.add_argument("rehearsal", metavar="RUN.json", help="a file written by `understudy run --json`")
    for name, text in FORMATS.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=text)


def write_file_for(rehearsal: Rehearsal, options: argparse.Namespace, name: str) -> bool:
    """Write the file of this format; returns False if the options name none."""
    path = getattr(options, name)
    if path:
        _write_file(rehearsal, name, path)
    return bool(path)


def show_report(options: argparse.Namespace) -> int:
    from understudy.report.comparison import read_rehearsal  # why: as above
    from understudy.report.text import print_text  # why: as above

    rehearsal = read_rehearsal(options.rehearsal)
    try:
        has_written = [write_file_for(rehearsal, options, name) for name in FORMATS]
    except OSError as error:
        raise UnderstudyError(f"{error.filename}: {error.strerror or error}") from None
    if not any(has_written):
        print_text(rehearsal)
    return 0


# understudy diff


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
Exit code 0: growth within --allow. 3: more growth, or it no longer fits.

examples:
    understudy diff main.json change.json
    understudy diff main.json change.json --allow 200MiB --markdown >> "$GITHUB_STEP_SUMMARY\""""
    parser.add_argument("before", metavar="A.json", help="a file written by `understudy run --json`")
    parser.add_argument("after", metavar="B.json", help="another one")
    parser.add_argument("--allow", default="1%", metavar="SIZE", help="accepted growth (default: 1%%)")
    parser.add_argument("--markdown", action="store_true", help="a table for a pull request")
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="lines of the program to list (default: 10)"
    )


def diff_rehearsals(options: argparse.Namespace) -> int:
    from understudy.report.comparison import compare, write_markdown  # why: as above
    from understudy.report.rehearsal import DOES_NOT_FIT  # why: as above

    _read_allowance(options.allow, 0)
    if (clusters := _read_clusters(options)) is not None:
        return _diff_clusters(*clusters, options.allow)
    before, after = (_read_finished(path) for path in (options.before, options.after))
    comparison = compare(before, after)
    allowed = _read_allowance(options.allow, comparison.before.peak.reserved_bytes)
    if options.markdown:
        print(write_markdown(comparison, options.top))
    else:
        _print_comparison(comparison, options.top)
    has_grown = comparison.growth > allowed
    stopped_fitting = comparison.after.verdict == DOES_NOT_FIT and comparison.before.verdict != DOES_NOT_FIT
    return GREW if has_grown or stopped_fitting else 0


def _read_clusters(options: argparse.Namespace) -> tuple[ClusterRehearsal, ClusterRehearsal] | None:
    """None if both files are of one card."""
    from understudy.report.cluster_comparison import read_cluster  # why: as above
    from understudy.report.cluster_rehearsal import KIND  # why: as above

    found = []
    for path in (options.before, options.after):
        text = Path(path).read_text(encoding="utf-8") if Path(path).is_file() else ""
        if f'"kind": "{KIND}"' in text:
            found.append(read_cluster(text, path))
    if len(found) == 1:
        raise UnderstudyError(
            f"{options.before} and {options.after}: one is of several ranks, the other of one card"
        )
    return (found[0], found[1]) if found else None


def _diff_clusters(before: ClusterRehearsal, after: ClusterRehearsal, allow: str) -> int:
    from understudy.report.cluster_comparison import most_growth, write_cluster_comparison  # why: as above
    from understudy.report.rehearsal import DOES_NOT_FIT, FAILED  # why: as above

    print(write_cluster_comparison(before, after))
    has_grown = most_growth(before, after) > _read_allowance(allow, before.worst.peak.reserved_bytes)
    bad = (DOES_NOT_FIT, FAILED)
    return GREW if has_grown or (after.verdict in bad and before.verdict not in bad) else 0


def _read_allowance(text: str, whole: int) -> int:
    """A size, or a part of what there was: "2%"."""
    part = text.strip().removesuffix("%")
    if not text.strip().endswith("%"):
        return parse_size(text)
    try:
        return int(float(part) * whole / 100)
    except ValueError:
        raise UnderstudyError(f"expected --allow as in 2% or 200MiB, got {text!r}") from None


def _read_finished(path: str) -> Rehearsal:
    from understudy.report.comparison import read_rehearsal  # why: as above
    from understudy.report.rehearsal import FAILED, NO_VERDICT  # why: as above

    rehearsal = read_rehearsal(path)
    if rehearsal.verdict in (FAILED, NO_VERDICT):
        raise UnderstudyError(f"{path} can't be compared: {rehearsal.headline}")
    return rehearsal


def _print_comparison(comparison: RehearsalComparison, top: int) -> None:
    from understudy.report.comparison import format_growth, write_times  # why: as above

    before, after = comparison.before, comparison.after
    if before.device.key != after.device.key:
        print(clean(f"Two devices: {before.device.name}, then {after.device.name}."))
    print(clean(f"before: {before.headline}"))
    print(clean(f"after:  {after.headline}"), end="\n\n")
    rows = [
        (
            change.name.replace("_", " "),
            format_size(change.before),
            format_size(change.after),
            format_growth(change.growth),
        )
        for change in (*comparison.figures, *comparison.categories)
    ]
    print_table(("at the peak", "before", "after", "change"), rows, (True, False, False, False))
    if before.time is not None and after.time is not None:
        print(f"\ntime of a {after.time.per}: {write_times(before, after, ', then ')}")
    for title, changes in (("line", comparison.lines), ("module", comparison.modules)):
        if changes:
            print()
            cells = [
                (
                    format_growth(change.growth),
                    format_size(change.after),
                    change.name or "(the model itself)",
                    change.source,
                )
                for change in changes[:top]
            ]
            print_table(("change", "after", title, ""), cells, (False, False, True, True))


COMMANDS = (
    Command("report", add_report_arguments, show_report),
    Command("diff", add_diff_arguments, diff_rehearsals),
)
