"""`understudy replay` and `understudy calibrate`: memory snapshots of real runs."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import Any

from understudy.cli.commands import Command
from understudy.cli.tables import clean, format_size, parse_seconds, print_table
from understudy.errors import UnderstudyError
from understudy.simulation.allocator import AllocatorSettings
from understudy.simulation.catalogue import Card, GiB, find_card, read_calibration, save_calibration
from understudy.simulation.snapshots import (
    BEFORE,
    DeviceTrace,
    Moment,
    Replay,
    calibrate,
    find_missing_memory,
    read_snapshot,
    replay,
)
from understudy.timing.curves import EVERY_FAMILY

OTHER_SETTINGS = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:8",
)
"""What is tried beside the settings of the run."""


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
When a run ends out of memory, torch can write the file:
    torch.cuda.memory._record_memory_history()
    ... the program ...
    torch.cuda.memory._dump_snapshot("oom.pickle")

examples:
    understudy replay oom.pickle
    understudy replay oom.pickle --settings expandable_segments:True,max_split_size_mb:256
    understudy replay oom.pickle --device h100        would it have fitted on that card?"""
    parser.add_argument(
        "snapshot", help="a file of torch.cuda.memory._dump_snapshot; it is read as data, never executed"
    )
    parser.add_argument(
        "--gpu", type=int, metavar="N", help="the device (default: the one that ran out of memory)"
    )
    parser.add_argument(
        "--device", metavar="CARD", help="replay with the memory of this card (see `understudy devices`)"
    )
    parser.add_argument(
        "--settings",
        action="append",
        default=[],
        metavar="CONF",
        help="try this PYTORCH_CUDA_ALLOC_CONF as well",
    )
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="lines of the program to list (default: 10)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, sizes in bytes")


def replay_snapshot(options: argparse.Namespace) -> int:
    for text in options.settings:
        AllocatorSettings.parse(text)
    card = find_card(options.device) if options.device else None
    trace = read_snapshot(options.snapshot).choose_device(options.gpu)
    capacity = card.usable if card else trace.capacity
    replays = [
        replay(trace, text, capacity)
        for text in dict.fromkeys([trace.settings, *OTHER_SETTINGS, *options.settings])
    ]
    missing = find_missing_memory(trace, capacity, replays[0]) if capacity is not None else 0
    if options.json:
        print(json.dumps(_make_replay_record(trace, replays, capacity, missing), indent=2))
        return 0
    _print_origin(options.snapshot, trace)
    for title, moment in _list_moments(trace).items():
        _print_moment(title, moment, trace, options.top)
    if trace.events:
        _print_replays(trace, replays, capacity, missing, str(card) if card else "the card of the run")
    return 0


def _list_moments(trace: DeviceTrace) -> dict[str, Moment]:
    """List the moments to print. The end of the snapshot is included only without a trace."""
    if not trace.events:
        return {"in the snapshot": trace.moment(-1)}
    moments = {}
    if trace.oom is not None:
        moments["out of memory"] = trace.moment(trace.oom)
    peak = trace.moment(trace.peak)
    if all(peak.requested > moment.requested for moment in moments.values()):
        moments["peak"] = peak
    return moments


def _make_replay_record(
    trace: DeviceTrace, replays: list[Replay], capacity: int | None, missing: int
) -> dict[str, Any]:
    return {
        "device": trace.device,
        "events": len(trace.events),
        "settings": trace.settings,
        "capacity": capacity,
        "missing_bytes": missing,
        "moments": {title: asdict(moment) for title, moment in _list_moments(trace).items()},
        "replays": [asdict(result) | {"fits": result.fits} for result in replays],
    }


def _print_origin(path: str, trace: DeviceTrace) -> None:
    settings = trace.settings or "none"
    print(
        clean(
            f"{os.path.basename(path)}: GPU {trace.device}, {len(trace.events):,} events, settings: {settings}"
        )
    )
    if trace.oom is not None:
        failed = trace.events[trace.oom]
        print(
            clean(
                f"out of memory at event {trace.oom:,}: {format_size(failed.size)} for {shorten_line(failed.line)}"
            )
        )
    if trace.before:
        begin = sum(block.size for block in trace.before.values())
        print(
            f"The trace begins with {format_size(begin)} in use: replays guess the addresses of these blocks."
        )


def _print_moment(title: str, moment: Moment, trace: DeviceTrace, top: int) -> None:
    unused = moment.reserved - moment.requested
    print(
        f"\n{title}: {format_size(moment.requested)} requested, {format_size(moment.reserved)} reserved by torch",
        end="",
    )
    if title == "out of memory":
        assert trace.oom is not None
        print(f", {format_size(trace.events[trace.oom].address)} free on the card", end="")
    print(f"; {format_size(unused)} of the reserved ({unused / max(moment.reserved, 1):.0%}) not in use")
    rows = [
        (
            format_size(h.bytes),
            f"{h.bytes / max(moment.requested, 1):.1%}",
            f"{h.blocks:,}",
            shorten_line(h.line),
        )
        for h in moment.holders[:top]
    ]
    rest = moment.holders[top:]
    if rest:
        size, blocks = sum(h.bytes for h in rest), sum(h.blocks for h in rest)
        share = f"{size / max(moment.requested, 1):.1%}"
        rows.append((format_size(size), share, f"{blocks:,}", f"({len(rest)} more lines)"))
    print_table(("held", "share", "blocks", "allocated at"), rows, (False, False, False, True))


def _print_replays(
    trace: DeviceTrace, replays: list[Replay], capacity: int | None, missing: int, card: str
) -> None:
    limit = (
        f" with the {format_size(capacity)} that torch could have on {card}" if capacity is not None else ""
    )
    print(f"\nthe same requests, replayed{limit}:")
    rows = [
        (
            ("as recorded" if index == 0 else result.settings),
            format_size(result.peak_reserved),
            format_size(result.peak_allocated),
            str(result.retries),
            ("fits" if result.fits else f"out of memory at event {result.died_at:,}")
            if capacity is not None
            else "-",
        )
        for index, result in enumerate(replays)
    ]
    print_table(
        ("settings", "reserved", "allocated", "retries", "result"), rows, (True, False, False, False, True)
    )
    print(_write_advice(trace, replays, capacity, missing))


def _write_advice(trace: DeviceTrace, replays: list[Replay], capacity: int | None, missing: int) -> str:
    if capacity is None:
        best = min(replays, key=lambda result: result.peak_reserved)
        saved = replays[0].peak_reserved - best.peak_reserved
        if not saved:
            return "No setting reserves less."
        return f"Best: {best.settings or 'as recorded'}, {format_size(saved)} less reserved."
    if replays[0].fits:
        if trace.oom is not None and trace.capacity == capacity:
            return "The replay succeeds where the run failed: private pools, or memory outside of torch, took the rest."
        return "It succeeds with the recorded settings."
    died = replays[0].died_at
    wanted = trace.events[died].size if died is not None and died >= 0 else 0
    short = f"{format_size(missing)} more free memory would have been enough."
    fitting = [result.settings for result in replays if result.fits]
    if fitting:
        return (
            f"Fragmentation: PYTORCH_CUDA_ALLOC_CONF={fitting[0]} would have succeeded. Without it, {short}"
        )
    if replays[0].allocated + wanted > capacity:
        return f"No setting helps: memory in use and the request exceed the card. {short}"
    return (
        f"Fragmentation, which none of these settings removes: the largest free block has "
        f"{format_size(replays[0].largest_free)}, and {format_size(wanted)} were requested. {short}"
    )


def shorten_line(line: str) -> str:
    """The line with a path relative to the current folder, where that is shorter."""
    if line.startswith("("):
        return line
    path, _, rest = line.rpartition(":")
    here = os.getcwd() + os.sep
    return f"{path.removeprefix(here)}:{rest}"


# understudy calibrate


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = """\
The memory of a process outside of torch (CUDA context, kernels, library handles) is computed from a run that ended out
of memory: the card's memory, minus the memory that was free, minus the memory reserved by torch. Later runs with
--device use it.

examples:
    understudy calibrate oom.pickle --device 4090
    understudy calibrate --device 4090 --context 0.52     as read from nvidia-smi, in GiB

Times are corrected by a real run of a program that was rehearsed with `understudy run --json run.json`: by the time of a
step, or by a trace of torch.profiler (activities CPU and CUDA, export_chrome_trace).

examples:
    understudy calibrate run.json --device h100 --step-time 0.412s
    understudy calibrate run.json --device h100 --profile trace.json"""
    parser.add_argument(
        "snapshot",
        nargs="?",
        metavar="SNAPSHOT or RUN.json",
        help="a file of torch.cuda.memory._dump_snapshot, read as data only; for times, of `run --json`",
    )
    parser.add_argument("--step-time", metavar="TIME", help="measured time of a step, as in 0.412s")
    parser.add_argument("--profile", metavar="FILE", help="a Chrome trace of torch.profiler, of a real step")
    parser.add_argument(
        "--device", required=True, metavar="CARD", help="the card of the run (see `understudy devices`)"
    )
    parser.add_argument("--gpu", type=int, metavar="N", help="the device in the snapshot")
    parser.add_argument("--context", type=float, metavar="GIB", help="memory outside of torch, if known")
    parser.add_argument("--dry-run", action="store_true", help="print the result without storing it")


def calibrate_card(options: argparse.Namespace) -> int:
    card = find_card(options.device)
    if options.step_time is not None or options.profile is not None:
        return calibrate_times(options, card)
    if options.snapshot is None and options.context is None:
        raise UnderstudyError("expected a snapshot or --context")
    if options.context is not None and not 0 <= options.context * GiB < card.memory:
        raise UnderstudyError(
            f"--context must be between 0 and the {card.memory / GiB:.2f} GiB of {card}, got {options.context}"
        )
    context = None if options.context is None else round(options.context * GiB)
    error = None
    if options.snapshot is not None:
        trace = read_snapshot(options.snapshot).choose_device(options.gpu)
        found = calibrate(trace, card.memory)
        context = context if context is not None else found.context
        error = found.error
        print(
            f"reserved at the peak: {format_size(found.reserved)} in the run, {format_size(found.replayed)} replayed"
        )
        if error is None:
            print(f"No error is stored: the trace begins with memory in use {BEFORE}, or is empty.")
        if context is None:
            print("No context is stored: the run did not end out of memory.")
    if context is not None:
        print(f"outside of torch: {format_size(context)} (the catalogue has {format_size(card.outside)})")
    if error is not None:
        print(f"error of reserved memory: {error:.2%}")
    if options.dry_run or (context is None and error is None):
        return 0
    print(f"stored for {card.key} in {clean(str(save_calibration(card.key, context=context, error=error)))}")
    return 0


def calibrate_times(options: argparse.Namespace, card: Card) -> int:
    """Speeds of the card's kernels, from a real run of a program that was rehearsed."""
    # why: --help is quick
    from understudy.report.comparison import read_rehearsal
    from understudy.report.times import write_seconds  # why: as above
    from understudy.timing import calibration  # why: as above

    if options.snapshot is None:
        raise UnderstudyError("expected the rehearsal of the program: a file of `understudy run --json`")
    rehearsal = read_rehearsal(options.snapshot)
    if rehearsal.device.key != card.key or rehearsal.time is None:
        raise UnderstudyError(
            f"expected a rehearsal on {card.key} with an estimate of time, got one on {rehearsal.device.key}"
        )
    stored = read_calibration().get(card.key, {}).get("speed", {})
    before = stored.get(EVERY_FAMILY, 1.0)
    if options.profile is not None:
        profile = calibration.read_profile(options.profile)
        speeds = calibration.speeds_from_profile(profile, rehearsal.operators)
        speeds = stored | {name: speed * stored.get(name, before) for name, speed in speeds.items()}
    else:
        seconds = parse_seconds(options.step_time)
        factor = calibration.speed_from_step(rehearsal.time, seconds)
        print(
            f"estimated {write_seconds(rehearsal.time.seconds_per_step)}, measured {write_seconds(seconds)}"
        )
        speeds = {name: speed * factor for name, speed in ({EVERY_FAMILY: 1.0} | stored).items()}
    for name, speed in speeds.items():
        print(f"{name}: {speed:.2f} times as fast as the curves")
    if not options.dry_run:
        print(f"stored for {card.key} in {clean(str(save_calibration(card.key, speed=speeds)))}")
    return 0


COMMANDS = (
    Command("replay", add_replay_arguments, replay_snapshot),
    Command("calibrate", add_calibrate_arguments, calibrate_card),
)
