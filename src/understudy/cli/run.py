"""understudy run: a script, rehearsed on a card that is not here."""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.cli.clusters import add_cluster_arguments, find_layout, note_unused_options, run_on_ranks
from understudy.cli.commands import INTERRUPTED, Command
from understudy.cli.devices import add_cards_argument, read_own_cards
from understudy.cli.noted_reads import note_reads
from understudy.cli.reports import FORMATS, write_file_for
from understudy.cli.script_runs import ScriptRun, run_in_sandbox
from understudy.cli.tables import parse_size, print_table
from understudy.cli.time_options import add_cost, add_time_arguments, check_time_options, is_too_slow
from understudy.cluster.launchers import add_options_of_torchrun
from understudy.cluster.layout import NO_VARIABLES, TORCHRUN, Layout
from understudy.errors import UnderstudyError
from understudy.simulation.catalogue import Card, list_cards, parse_devices
from understudy.simulation.sandbox import SandboxOptions

if TYPE_CHECKING:
    from understudy.report.rehearsal import Rehearsal

FAILED, DOES_NOT_FIT, NO_VERDICT = 1, 3, 4
ANSWERS = ("plausible", "worst", "error", "symbol")


class UsageError(UnderstudyError, ValueError):
    """Wrong input."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "understudy run [options] script.py [arguments]  |  understudy run [options] -m module [arguments]"
    )
    parser.epilog = """\
Exit code: 0 fits or tight, 3 does not fit or exceeds --max-step-time, 4 no verdict (neither a training step nor a
computation on the card), 1 the script failed, 130 interrupted, 2 wrong input.

examples:
    understudy run --device h100 train.py --batch 8
    understudy run --device h100,4090 -m package.train --config small
    understudy run --device l40s --budget 40GiB --json run.json --html run.html train.py
    understudy run --device h100 --cost 2.49/h --total-steps 100000 train.py"""
    add = parser.add_argument
    add("--device", metavar="D", help='cards ("h100", "8xa100-80g", "h100,4090"), or all (default: the CPU)')
    add_cards_argument(parser)
    add(
        "--steps",
        metavar="N",
        type=_parse_count,
        default=2,
        help="optimizer steps to run before the script is stopped (2)",
    )
    add_rehearsal_arguments(parser)
    add("--json", metavar="FILE", help="write all measurements as JSON; - for standard output")
    for name, text in FORMATS.items():
        add(f"--{name}", metavar="FILE", help=text)
    add(
        "--snapshot",
        metavar="FILE",
        help="torch's memory snapshot of the card, for its viewer and `understudy replay`",
    )
    add("--requests", metavar="FILE", help=argparse.SUPPRESS)  # for `understudy fit`: signed 64-bit numbers
    add(
        "--parsers", metavar="FILE", help=argparse.SUPPRESS
    )  # for `understudy plan`: ends where options are parsed
    add("--quiet", action="store_true", help="print the verdict only, without the script's output")


def add_rehearsal_arguments(parser: argparse.ArgumentParser) -> None:
    """What decides about a rehearsal: every option but those that say what is run, where, and which files are written."""
    add = parser.add_argument
    add(
        "--budget",
        metavar="SIZE",
        type=_parse_size,
        help="limit of reserved memory, as in 40GiB; exit code 3 above it",
    )
    add_time_arguments(parser)
    add(
        "--answers",
        metavar="POLICY",
        default="plausible",
        help=f"answers to reads of data: {', '.join(ANSWERS)} (plausible)",
    )
    add(
        "--oom",
        choices=("record", "raise"),
        default="record",
        help="raise: the script gets the out-of-memory error of the card",
    )
    add("--strict", action="store_true", help="exit code 3 also for a tight fit")
    add(
        "--margin",
        metavar="PART",
        type=_parse_part,
        help="fraction of reserved memory within which a run is tight (0.02)",
    )
    add(
        "--context",
        metavar="SIZE",
        type=_parse_size,
        help="memory outside of the allocator (default: from the catalogue)",
    )
    add(
        "--longest",
        action="store_true",
        help="use the longest batch of each data loader, not the first ones",
    )
    add(
        "--offline-data",
        action="store_true",
        help="make up data sets and tokenizers that are not on this machine",
    )
    add("--online", action="store_true", help="let the script use the network; uploads to hubs are refused")
    add(
        "--scratch",
        metavar="DIR",
        help="folder for files that the script writes during the run (default: memory, at most half of it)",
    )
    add_cluster_arguments(add)
    add("--nccl-memory", metavar="SIZE", type=_parse_size, dest="nccl_memory",
        help="memory of NCCL on each rank, in place of the catalogue's range")  # fmt: skip
    add("--write", action="store_true", help="let the script write files and use the network: no sandbox")


# --- input, checked before torch is imported ----------------------------------------------------------------------------


def _parse_size(text: str) -> int:
    try:
        return parse_size(text)
    except UnderstudyError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _parse_part(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
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
        raise UsageError(f"can't run -m {name}: no module named {package!r}")


def _check_options(options: argparse.Namespace, devices: list[tuple[Card | None, int]]) -> None:
    """Refuse wrong options before torch is imported."""
    if not options.program:
        raise UsageError("expected a script: understudy run [options] script.py [arguments]")
    if options.program[0] == "-m":
        if len(options.program) < 2:
            raise UsageError("-m requires the name of a module")
        _check_module(options.program[1])
    elif not os.path.isfile(options.program[0]) and not os.path.isfile(
        os.path.join(options.program[0], "__main__.py")
    ):
        path = options.program[0]
        what = (
            "expected a file, got a folder without __main__.py"
            if os.path.isdir(path)
            else f"file not found{_suggest_file(path)}"
        )
        raise UsageError(f"can't run {path!r}: {what}")
    check_time_options(options)
    if options.answers not in ANSWERS:
        raise UsageError(f"--answers: invalid choice {options.answers!r} (choose from {', '.join(ANSWERS)})")
    for name in ("json", "snapshot", "requests", *FORMATS):
        path = getattr(options, name)
        if path and not (name == "json" and path == "-"):
            _check_output(f"--{name}", path)
    if options.scratch and not (os.path.isdir(options.scratch) and os.access(options.scratch, os.W_OK)):
        raise UsageError(f"--scratch: expected a writable folder, got {options.scratch!r}")
    if options.snapshot and devices[0][0] is None:
        raise UsageError("--snapshot requires one card: name it with --device")
    for name in ("snapshot", *FORMATS):
        if getattr(options, name) and len(devices) > 1:
            raise UsageError(
                f"--{name} requires one card, got {len(devices)} in --device: rehearse them one by one"
            )


def _check_output(option: str, path: str) -> None:
    """Check outputs before a run of minutes: fail early if a file can't be written."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise UsageError(f"{option} {path!r}: the folder does not exist")
    if os.path.isdir(path):
        raise UsageError(f"{option}: expected a file, got the folder {path!r}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise UsageError(f"{option} {path!r}: the file is not writable")


def _find_devices(options: argparse.Namespace) -> list[tuple[Card | None, int]]:
    own = read_own_cards(options)
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
    note_reads()
    devices = _find_devices(options)
    layout = find_layout(options, devices[0][1])
    _check_options(options, devices)
    # A process with threads of torch's can't be forked in general; one of `fix` and `fit` is forked for each rehearsal.
    is_own = "torch" not in sys.modules or multiprocessing.parent_process() is not None
    scratch = options.scratch and os.path.abspath(options.scratch)
    sandbox = SandboxOptions(options.online, options.write, scratch, forks=is_own)
    if layout is not None and layout.world_size > 1:
        if len(devices) > 1:
            raise UsageError(
                f"several ranks are rehearsed on one kind of card, got --device {options.device}"
            )
        return run_on_ranks(options, layout, devices[0][0], sandbox)
    if len(devices) > 1:
        return _run_on_all(options, devices, sandbox)
    with _setting_variables(layout):
        run = run_in_sandbox(options, *devices[0], sandbox)
    if options.parsers and run.parsers:
        Path(options.parsers).write_text(json.dumps(run.parsers), encoding="utf-8")
        return 0
    if run.wanted_ranks is not None:
        nodes, per_node, entry = run.wanted_ranks
        layout = Layout(nodes, per_node, variables=NO_VARIABLES if entry else TORCHRUN)
        return run_on_ranks(options, layout, devices[0][0], sandbox, entry)
    note_unused_options(options)
    if run.rehearsal is None:
        return _report_lost_run(run)
    _show_error(run)
    add_cost(options, run.rehearsal, devices[0][1])
    code = _choose_exit_code(options, run.rehearsal, run)
    with redirect_stdout(sys.stderr if options.json == "-" else sys.stdout):
        _print_report(run.rehearsal, options.quiet)
    _write_outputs(options, run)
    return code


@contextmanager
def _setting_variables(layout: Layout | None) -> Iterator[None]:
    """A launcher sets its variables (RANK, LOCAL_RANK, …) for a single process, too."""
    before = dict(os.environ)
    os.environ.update({} if layout is None else layout.environment_of(0))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _report_lost_run(run: ScriptRun) -> int:
    if run.exit_code in (INTERRUPTED, -signal.SIGINT):
        raise KeyboardInterrupt
    print(f"understudy run: {run.failure}", file=sys.stderr)
    return FAILED if run.exit_code >= 0 else 128 - run.exit_code


def _write_outputs(options: argparse.Namespace, run: ScriptRun) -> None:
    assert run.rehearsal is not None
    text = run.rehearsal.to_json() if options.json else ""
    _try_to_write(options, "json", lambda: _write_json(options, text))
    for name in FORMATS:
        _try_to_write(options, name, functools.partial(write_file_for, run.rehearsal, options, name))
    for name, content in (("snapshot", run.snapshot), ("requests", run.requests)):
        if getattr(options, name):
            _try_to_write(options, name, functools.partial(Path(getattr(options, name)).write_bytes, content))


def _try_to_write(options: argparse.Namespace, name: str, write: Callable[[], object]) -> None:
    """The verdict is printed by now: a file that can't be written costs one line."""
    try:
        write()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(
            f"understudy run: --{name} {getattr(options, name)!r} was not written: {error.strerror}",
            file=sys.stderr,
        )


def _write_json(options: argparse.Namespace, text: str) -> None:
    if options.json == "-":
        print(text)
    elif options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(text + "\n")


def _choose_exit_code(options: argparse.Namespace, rehearsal: Rehearsal, run: ScriptRun) -> int:
    verdict = rehearsal.verdict
    if run.exit_code == INTERRUPTED:
        return INTERRUPTED
    if run.exit_code and not (run.is_out_of_memory and verdict == "does not fit"):
        if not run.error:
            print(f"understudy run: the script ended with exit code {run.exit_code}", file=sys.stderr)
        return FAILED
    if verdict == "no verdict":
        return NO_VERDICT
    is_over = verdict == "does not fit" or (verdict == "tight" and options.strict)
    return DOES_NOT_FIT if is_too_slow(options, rehearsal) or is_over else 0


def _show_error(run: ScriptRun) -> None:
    """Print the traceback of the script, if it has one."""
    if run.error:
        print(run.error, end="", file=sys.stderr)


def _print_report(rehearsal: Rehearsal, is_quiet: bool) -> None:
    """Where the script failed, its traceback is the answer, and no tables hide it."""
    from understudy.report.text import clean, print_text, write_times  # why: --help is quick

    if is_quiet or rehearsal.verdict in ("failed", "no verdict"):
        has_time = rehearsal.verdict not in ("failed", "no verdict")
        print("\n".join([clean(rehearsal.headline), *(write_times(rehearsal) if has_time else ())]))
    else:
        print_text(rehearsal)


# --- all cards ---------------------------------------------------------------------------------------------------------


def _run_on_all(
    options: argparse.Namespace, devices: list[tuple[Card | None, int]], sandbox: SandboxOptions
) -> int:
    """Use one process for each card, so that state in modules of the script is separate."""
    rows: list[dict[str, Any]] = []
    codes: list[int] = []
    import understudy.report.runs  # noqa: F401  # why: once, for all processes

    for position, (card, count) in enumerate(devices):
        shown = argparse.Namespace(**{**vars(options), "quiet": options.quiet or position > 0})
        run = run_in_sandbox(shown, card, count, sandbox)
        if run.rehearsal is None:
            return _report_lost_run(run)
        _show_error(run)
        add_cost(options, run.rehearsal, count)
        code = _choose_exit_code(options, run.rehearsal, run)
        if code == INTERRUPTED:
            return code
        if code == FAILED and position == 0:  # it would fail on the others, too
            return FAILED
        codes.append(code)
        rows.append(run.rehearsal.to_dict())
    with redirect_stdout(sys.stderr if options.json == "-" else sys.stdout):
        _print_cards(rows)
    _try_to_write(options, "json", lambda: _write_json(options, json.dumps(rows, indent=2)))
    return FAILED if FAILED in codes else max(codes)


def _print_cards(rows: list[dict[str, Any]]) -> None:
    from understudy.report.times import write_interval  # why: --help is quick

    cells = []
    for row in rows:
        device, peak = row["device"], row["peak"]
        limit = device["memory_bytes"] or 1
        where = ", ".join(part for part in (peak["phase"], peak["line"], peak["module"]) if part)
        sizes = (f"{size / (1 << 30):.2f}" for size in (peak["reserved_bytes"], limit))
        time = row["time"]
        shown = time and write_interval(time["seconds_per_step"], time["low_seconds"], time["high_seconds"])
        cells.append(
            (
                device["key"],
                row["verdict"],
                *sizes,
                f"{peak['reserved_bytes'] / limit:.0%}",
                shown or "",
                where,
            )
        )
    header = ("device", "verdict", "reserved", "of GiB", "used", "time of a step", "peak")
    print_table(header, cells, (True, True, False, False, False, False, True))


def _add_arguments_of_torchrun(parser: argparse.ArgumentParser) -> None:
    _add_arguments(parser)
    parser.usage = "understudy torchrun [options of torchrun and of understudy run] script.py [arguments]"
    parser.epilog = """\
Exit code: as for understudy run; also 1 for deadlocks and other faults.

example:
    understudy torchrun --nnodes 16 --nproc-per-node 8 --device h100 train.py"""
    add_options_of_torchrun(parser)


COMMANDS = (
    Command("run", _add_arguments, _run_program, takes_program=True),
    Command("torchrun", _add_arguments_of_torchrun, _run_program, takes_program=True),
)
