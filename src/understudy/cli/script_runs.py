"""One rehearsal of a script in a sandbox, and what comes back from it.

    run = run_in_sandbox(options, card, count, SandboxOptions())
    run.rehearsal, run.exit_code, run.error, run.snapshot

The script and torch are inside. This process stays outside: it prints the report and writes its files. What comes back is
JSON and bytes, nothing that is run.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from understudy.cli.progress import show_progress
from understudy.errors import UnderstudyError
from understudy.report.isolation import add_isolation
from understudy.report.rehearsal import Rehearsal
from understudy.simulation.catalogue import Card
from understudy.simulation.sandbox import NAMESPACES, Sandbox, SandboxOptions, run_sandboxed

if TYPE_CHECKING:
    from understudy.report.runs import MeasuredRun
    from understudy.simulation.run_notes import RunNotes

NUMBER_BYTES = 8
OLDER_TORCH_MARGIN = 0.16
"""Measured on traces of torch 2.6 and before."""


@dataclass
class ScriptRun:
    """The result of a run, outside of its sandbox. `failure`: the reason where `rehearsal` is None."""

    rehearsal: Rehearsal | None = None
    exit_code: int = 0
    """As of `python script.py`; negative for a signal that has ended the sandbox."""
    error: str = ""
    is_out_of_memory: bool = False
    failure: str = ""
    snapshot: bytes = b""
    requests: bytes = b""
    parsers: list[dict[str, Any]] = field(default_factory=list)
    """Options that the parsers of the script show, if it was to end there."""
    wanted_ranks: tuple[int, int, bytes] | None = None
    """Nodes, ranks of each, and what they call, if the script was about to start ranks: see `simulation.started_ranks`."""


def run_in_sandbox(
    options: argparse.Namespace, card: Card | None, count: int, wanted: SandboxOptions
) -> ScriptRun:
    """Raises the errors of ours that were raised inside."""
    result = run_sandboxed(lambda sandbox: _run_inside(options, card, count, sandbox), wanted)
    if result.data is None:
        code = result.exit_code
        how = f"was killed by signal {-code}" if code < 0 else f"ended its process with exit code {code}"
        return ScriptRun(exit_code=code, failure=f"the script {how}: no report")
    head, snapshot, requests = _unpack(result.data)
    found = json.loads(head)
    if "wrong_input" in found:
        raise UnderstudyError(found["wrong_input"])
    if found["wanted_ranks"] is not None:
        nodes, per_node, entry = found["wanted_ranks"]
        return ScriptRun(wanted_ranks=(nodes, per_node, bytes.fromhex(entry)))
    rehearsal = add_isolation(Rehearsal.from_dict(found["rehearsal"]), result, found["lines"])
    return ScriptRun(
        rehearsal,
        found["exit_code"],
        found["error"],
        found["is_out_of_memory"],
        snapshot=snapshot,
        requests=requests,
        parsers=found["parsers"],
    )


# --- inside ----------------------------------------------------------------------------------------------------------


def _run_inside(options: argparse.Namespace, card: Card | None, count: int, sandbox: Sandbox) -> bytes:
    if sandbox.level == NAMESPACES:
        sys.dont_write_bytecode = True  # it would be listed as written by the script
    try:
        return _rehearse(options, card, count, sandbox)
    except UnderstudyError as error:
        return _pack(json.dumps({"wrong_input": str(error)}).encode(), b"", b"")


def _rehearse(options: argparse.Namespace, card: Card | None, count: int, sandbox: Sandbox) -> bytes:
    # why: torch is imported inside, once the input is known to be right
    from understudy.report.runs import MeasuredRun, RehearsalOptions
    from understudy.report.script_facts import take_facts  # why: as above
    from understudy.simulation.scripts import Script, run_script  # why: as above

    given = {"margin": options.margin} if options.margin is not None else {}
    wanted = RehearsalOptions(
        context=options.context, budget=options.budget, oom=options.oom, answers=options.answers, host=options.host,
        per_step=options.per_step, **given,
    )  # fmt: skip
    recorder = MeasuredRun(card, wanted)
    recorder.count = count
    is_module = options.program[0] == "-m"
    name, *arguments = options.program[1:] if is_module else options.program
    script = Script(name, tuple(arguments), is_module)
    progress = nullcontext() if options.quiet else show_progress(_describe_progress(recorder))
    with (
        _starting_ranks(),
        recorder,
        progress,
        _direct_output(options) as said,
        _record_history(options, recorder) as history,
    ):
        result = run_script(
            script, mode=recorder.mode, steps=options.steps, sandbox=sandbox, is_online=options.online,
            takes_longest=options.longest, makes_data=options.offline_data, reads_parser=bool(options.parsers),
        )  # fmt: skip
    if result.exit_code:
        print(said.getvalue(), end="", file=sys.stderr)  # such as the usage of the script
    if options.margin is None:
        # A module is looked for in the current folder first, so its project is taken to be there.
        _note_older_torch(os.path.abspath("module") if is_module else script.target, result.notes)
    take_facts(recorder.facts, script, result, has_margin=options.margin is not None)
    wanted_ranks = result.wanted_ranks
    head = {
        "wanted_ranks": None
        if wanted_ranks is None
        else (wanted_ranks.nodes, wanted_ranks.per_node, wanted_ranks.entry.hex()),
        "parsers": result.parsers,
        "rehearsal": recorder.rehearsal().to_dict(),
        "exit_code": result.exit_code,
        "error": result.error,
        "is_out_of_memory": result.is_out_of_memory,
        "lines": result.lines,
    }
    requests = recorder.measurement.list_requests().tobytes() if options.requests else b""
    return _pack(json.dumps(head).encode(), history.getvalue(), requests)


def _note_older_torch(script: str, notes: RunNotes) -> None:
    # why: torch is imported inside
    from torch import __version__ as installed

    from understudy.simulation.pinned_torch import find_older_release  # why: as above

    pinned = find_older_release(script, str(installed))
    if pinned is not None:
        reason = (
            f"{pinned.file} pins torch{pinned.text}, the rehearsal used torch {installed}: earlier releases "
        )
        notes.margins[f"{reason}reserved 2 to 16% more"] = OLDER_TORCH_MARGIN


@contextmanager
def _record_history(options: argparse.Namespace, recorder: MeasuredRun) -> Iterator[io.BytesIO]:
    """The trace of the first card, with the lines of the program, as torch's memory snapshot."""
    history = io.BytesIO()
    if not options.snapshot:
        yield history
        return
    from understudy.report.exports import describe_frames  # why: torch is imported by now

    memory = recorder.memory.devices[0]
    memory.capped.frames = describe_frames
    memory.capped.record_history()
    try:
        yield history
    finally:
        pickle.dump(memory.allocator.snapshot(), history, protocol=4)


@contextmanager
def _starting_ranks() -> Iterator[None]:
    """Inside, a program that starts ranks itself ends there, and its ranks are run."""
    from understudy.simulation.network import CLUSTER  # why: it imports torch

    CLUSTER.can_start = True
    try:
        yield
    finally:
        CLUSTER.can_start = False


@contextmanager
def _direct_output(options: argparse.Namespace) -> Iterator[io.StringIO]:
    """With --quiet, what the script prints goes nowhere, and its standard error is kept: it may say why it failed. Where
    standard output is for JSON, what the script prints goes to standard error."""
    said = io.StringIO()
    if options.quiet:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(said):
            yield said
    elif options.json == "-":
        with redirect_stdout(sys.stderr):
            yield said
    else:
        yield said


def _describe_progress(recorder: MeasuredRun) -> Callable[[], str]:
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


# --- outside ---------------------------------------------------------------------------------------------------------


def _pack(*parts: bytes) -> bytes:
    sizes = b"".join(len(part).to_bytes(NUMBER_BYTES, "little") for part in parts)
    return sizes + b"".join(parts)


def _unpack(data: bytes, count: int = 3) -> list[bytes]:
    place = NUMBER_BYTES * count
    parts = []
    for start in range(0, place, NUMBER_BYTES):
        size = int.from_bytes(data[start : start + NUMBER_BYTES], "little")
        parts.append(data[place : place + size])
        place += size
    return parts
