"""understudy run: a script, rehearsed on a card that is not here."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from understudy.cli.commands import INTERRUPTED, Command
from understudy.cli.progress import show_progress
from understudy.cli.reports import FORMATS, write_files
from understudy.cli.tables import parse_size, print_table
from understudy.errors import UnderstudyError
from understudy.simulation.catalogue import Card, list_cards, parse_devices, read_cards

if TYPE_CHECKING:
    from understudy.report.rehearsal import Rehearsal
    from understudy.report.runs import Recorder
    from understudy.simulation.scripts import ScriptResult

FAILED, DOES_NOT_FIT = 1, 3
ANSWERS = ("plausible", "worst", "error", "symbol")


class UsageError(UnderstudyError, ValueError):
    """Wrong input."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "understudy run [options] script.py [arguments]  |  understudy run [options] -m module [arguments]"
    parser.epilog = """\
Exit code: 0 fits or tight, 3 does not fit, 1 the script failed, 130 interrupted, 2 wrong input.

examples:
    understudy run --device h100 train.py --batch 8
    understudy run --device h100,4090 -m package.train --config small
    understudy run --device l40s --budget 40GiB --json run.json --html run.html train.py"""
    add = parser.add_argument
    add("--device", metavar="D", help='cards ("h100", "8xa100-80g", "h100,4090"), or all; without it, the CPU')
    add("--cards", metavar="FILE", help="a TOML file with cards of your own")
    add("--steps", metavar="N", type=_parse_count, default=2, help="optimizer steps after which the script is ended (2)")
    add("--budget", metavar="SIZE", type=_parse_size, help="what the run may reserve, as in 40GiB; over it is exit code 3")
    add("--json", metavar="FILE", help="all that was measured, as JSON")
    for name, text in FORMATS.items():
        add(f"--{name}", metavar="FILE", help=text)
    add("--snapshot", metavar="FILE", help="torch's memory snapshot of the card, for its viewer and `understudy replay`")
    add("--requests", metavar="FILE", help=argparse.SUPPRESS)  # for `understudy fit`: signed 64-bit numbers
    add("--answers", metavar="POLICY", default="plausible", help=f"for reads of data: {', '.join(ANSWERS)} (plausible)")
    add("--oom", choices=("record", "raise"), default="record", help="raise: the script gets the card's error")
    add("--strict", action="store_true", help="tight is exit code 3, too")
    add("--margin", metavar="PART", type=_parse_part, help="of reserved memory within which a run is tight (0.02)")
    add("--context", metavar="SIZE", type=_parse_size, help="memory outside of the allocator, instead of the catalogue's")
    add("--longest", action="store_true", help="take the longest batch of each data loader instead of the first ones")
    add("--offline-data", action="store_true", help="make up data sets and tokenizers that are not on this machine")
    add("--write", action="store_true", help="let the script write files and use the network")
    add("--quiet", action="store_true", help="the verdict alone, without the script's output")


# --- input, checked before torch is imported ----------------------------------------------------------------------------

def _parse_size(text: str) -> int:
    try:
        return parse_size(text)
    except UnderstudyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps: 1, 2, …")
    return int(text)


def _parse_part(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part of memory: 0.02 is two percent")
    return value


def _check_module(name: str) -> None:
    """Whether its package is there: `python -m` looks into the current folder first. Nothing of it is run."""
    package = name.partition(".")[0]
    before = sys.path[:]
    sys.path.insert(0, os.getcwd())
    try:
        is_found = bool(package) and find_spec(package) is not None
    except ValueError:  # a module that was made without a file
        is_found = True
    finally:
        sys.path[:] = before
    if not is_found:
        raise UsageError(f"can't run -m {name}: there is no module named {package!r}")


def _check_options(options: argparse.Namespace) -> list[tuple[Card | None, int]]:
    """Refuse wrong options before torch is imported; returns the devices."""
    if not options.program:
        raise UsageError("no script is named: understudy run [options] script.py [arguments]")
    if options.program[0] == "-m":
        if len(options.program) < 2:
            raise UsageError("-m needs the name of a module")
        _check_module(options.program[1])
    elif not os.path.isfile(options.program[0]):
        path = options.program[0]
        what = "it is a folder" if os.path.isdir(path) else f"there is no such file{_suggest_file(path)}"
        raise UsageError(f"can't run {path!r}: {what}")
    if options.answers not in ANSWERS:
        raise UsageError(f"--answers {options.answers!r}: there are {', '.join(ANSWERS)}")
    for name in ("json", "snapshot", "requests", *FORMATS):
        path = getattr(options, name)
        if path:
            _check_output(f"--{name}", path)
    devices = _find_devices(options)
    if options.snapshot and devices[0][0] is None:
        raise UsageError("--snapshot is of one card: --device says which")
    for name in ("snapshot", *FORMATS):
        if getattr(options, name) and len(devices) > 1:
            raise UsageError(f"--{name} is of one card, and --device names {len(devices)}: rehearse them one by one")
    return devices


def _check_output(option: str, path: str) -> None:
    """A run may take minutes: what can't be written is said before it."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path!r}: there is no such folder")
    if os.path.isdir(path):
        raise UsageError(f"{option} {path!r}: it is a folder")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"{option} {path!r}: it can't be written")


def _find_devices(options: argparse.Namespace) -> list[tuple[Card | None, int]]:
    own = read_cards(options.cards) if options.cards else ()
    if options.device is None:
        return [(None, 1)]
    if options.device == "all":
        return [(card, 1) for card in (*own, *list_cards()) if card.kind != "cpu"]
    return [parse_devices(name, own) for name in options.device.split(",")]


def _suggest_file(path: str) -> str:
    folder = os.path.dirname(path) or "."
    names = [name for name in os.listdir(folder) if name.endswith(".py")] if os.path.isdir(folder) else []
    near = difflib.get_close_matches(os.path.basename(path), names, n=1)
    return f": did you mean {os.path.join(os.path.dirname(path), near[0])}?" if near else ""


# --- the run ---------------------------------------------------------------------------------------------------------


def _run_program(options: argparse.Namespace) -> int:
    devices = _check_options(options)
    if len(devices) > 1:
        return _run_on_all(options, devices)
    rehearsal, result = _rehearse(options, *devices[0])
    _show_error(result)
    _write_json(options, rehearsal.to_json())
    write_files(rehearsal, options)
    _print_report(rehearsal, options.quiet)
    return _choose_exit_code(options, rehearsal.verdict, result)


def _write_json(options: argparse.Namespace, text: str) -> None:
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


def _choose_exit_code(options: argparse.Namespace, verdict: str, result: ScriptResult) -> int:
    if result.exit_code == INTERRUPTED:
        return INTERRUPTED
    if result.exit_code and not (result.is_out_of_memory and verdict == "does not fit"):
        if not result.error:
            print(f"understudy run: the script ended with exit code {result.exit_code}", file=sys.stderr)
        return FAILED
    return DOES_NOT_FIT if verdict == "does not fit" or (verdict == "tight" and options.strict) else 0


def _rehearse(options: argparse.Namespace, card: Card | None, count: int) -> tuple[Rehearsal, ScriptResult]:
    # why: torch is imported only once the input is known to be right
    from understudy.report.runs import Recorder, RehearsalOptions
    from understudy.simulation.scripts import Script, run_script  # why: as above

    given = {"margin": options.margin} if options.margin is not None else {}
    wanted = RehearsalOptions(
        context=options.context, budget=options.budget, oom=options.oom, answers=options.answers, **given
    )
    recorder = Recorder(card, wanted)
    recorder.count = count
    is_module = options.program[0] == "-m"
    name, *arguments = options.program[1:] if is_module else options.program
    script = Script(name, tuple(arguments), is_module)
    progress = nullcontext() if options.quiet else show_progress(_describe_progress(recorder))
    with recorder, progress, _hide_output(options) as said, _record_history(options, recorder):
        result = run_script(
            script, mode=recorder.mode, steps=options.steps, allow_writes=options.write, notes=recorder.facts.assumptions,
            takes_longest=options.longest, makes_data=options.offline_data,
        )  # fmt: skip
    if options.requests:
        with open(options.requests, "wb") as file:
            recorder.measurement.list_requests().tofile(file)
    if result.exit_code:
        print(said.getvalue(), end="", file=sys.stderr)  # such as the usage of the script
    recorder.facts.steps = result.steps
    recorder.facts.failure = _describe_failure(result)
    recorder.facts.is_out_of_memory = result.is_out_of_memory
    recorder.facts.writes = [write.to_record() for write in result.writes]
    return recorder.rehearsal(), result


def _describe_failure(result: ScriptResult) -> str:
    if not result.exit_code:
        return ""
    code = f"left with exit code {result.exit_code}"
    how = "was interrupted" if result.exit_code == INTERRUPTED else "failed" if result.error else code
    return f"the script {how} after {result.steps} of its steps" if result.steps else f"the script {how} in its first step"


@contextmanager
def _record_history(options: argparse.Namespace, recorder: Recorder) -> Iterator[None]:
    """The trace of the first card, with the lines of the program, written as torch's memory snapshot."""
    if not options.snapshot:
        yield
        return
    from understudy.report.exports import describe_frames, write_snapshot  # why: torch is imported by now

    memory = recorder.memory.devices[0]
    memory.capped.frames = describe_frames
    memory.capped.record_history()
    try:
        yield
    finally:
        write_snapshot(memory.allocator, options.snapshot)


@contextmanager
def _hide_output(options: argparse.Namespace) -> Iterator[io.StringIO]:
    """With --quiet. What the script says on standard error is kept: it may say why it failed."""
    said = io.StringIO()
    if not options.quiet:
        yield said
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(said):
        yield said


def _show_error(result: ScriptResult) -> None:
    """Print the traceback of the script, if it has one."""
    if result.error:
        print(result.error, end="", file=sys.stderr)


def _describe_progress(recorder: Recorder) -> Callable[[], str]:
    """How far a run is, and how fast since the last time that was asked."""
    before, since = 0, time.monotonic()

    def describe() -> str:
        nonlocal before, since
        count, now = recorder.measurement.operators, time.monotonic()
        live = max((totals.live for totals in list(recorder.measurement.devices.values())), default=0)
        rate = (count - before) / (now - since)
        before, since = count, now
        return f"step {recorder.measurement.places.step}, {count:,} operators, {rate:,.0f}/s, {live / (1 << 30):.2f} GiB"

    return describe


def _print_report(rehearsal: Rehearsal, is_quiet: bool) -> None:
    """Where the script failed, its traceback is the answer, and no tables hide it."""
    from understudy.report.rehearsal import FAILED  # why: --help is quick
    from understudy.report.text import clean, print_text  # why: as above

    if is_quiet or rehearsal.verdict == FAILED:
        print(clean(rehearsal.headline))
    else:
        print_text(rehearsal)


# --- all cards ---------------------------------------------------------------------------------------------------------


def _run_on_all(options: argparse.Namespace, devices: list[tuple[Card | None, int]]) -> int:
    """One process for each card: what a script leaves behind in its modules belongs to one run."""
    rows: list[dict[str, Any]] = []
    codes: list[int] = []
    import understudy.report.runs  # noqa: F401  # why: once, for all processes

    for position, (card, count) in enumerate(devices):
        row, code = _run_in_fork(options, card, count, is_shown=position == 0)
        if code == INTERRUPTED:
            return code
        if row is None or (code == FAILED and position == 0):  # it would fail on the others, too
            return FAILED
        codes.append(code)
        rows.append(row)
    _write_json(options, json.dumps(rows, indent=2))
    _print_cards(rows)
    return FAILED if FAILED in codes else max(codes)


def _run_in_fork(
    options: argparse.Namespace, card: Card | None, count: int, is_shown: bool
) -> tuple[dict[str, Any] | None, int]:
    with tempfile.TemporaryDirectory(prefix="understudy-") as folder:
        file = os.path.join(folder, "rehearsal.json")
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os._exit(_run_as_child(options, card, count, file, is_shown))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if not os.path.exists(file):
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            print(f"understudy run: the rehearsal on {card.key if card else 'the CPU'} {how}", file=sys.stderr)
            return None, code
        with open(file, encoding="utf-8") as written:
            return json.load(written), code


def _run_as_child(options: argparse.Namespace, card: Card | None, count: int, file: str, is_shown: bool) -> int:
    code = FAILED
    try:
        quiet = argparse.Namespace(**{**vars(options), "quiet": options.quiet or not is_shown})
        rehearsal, result = _rehearse(quiet, card, count)
        _show_error(result)
        code = _choose_exit_code(options, rehearsal.verdict, result)
        with open(file, "w", encoding="utf-8") as written:
            written.write(rehearsal.to_json())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _print_cards(rows: list[dict[str, Any]]) -> None:
    cells = []
    for row in rows:
        device, peak = row["device"], row["peak"]
        limit = device["memory_bytes"] or 1
        where = ", ".join(part for part in (peak["phase"], peak["line"], peak["module"]) if part)
        sizes = (f"{size / (1 << 30):.2f}" for size in (peak["reserved_bytes"], limit))
        cells.append((device["key"], row["verdict"], *sizes, f"{peak['reserved_bytes'] / limit:.0%}", where))
    header = ("device", "verdict", "reserved", "of GiB", "used", "peak")
    print_table(header, cells, (True, True, False, False, False, True))


COMMAND = Command("run", _add_arguments, _run_program, takes_program=True)
