"""`rehearse_cluster`: a program on several cards, each of its ranks run on stand-ins and measured.

    cluster = understudy.rehearse_cluster("train.py", args=["--batch", "4"], device="h100", nodes=16, per_node=8)
    cluster.verdict, cluster.ranks[7].peak.reserved_bytes, cluster.communication, cluster.faults

`run_cluster` is what this function and `understudy run --nproc-per-node` share.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import itertools
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from understudy.cluster.broker import Broker, RankOutcome
from understudy.cluster.classes import (
    choose_first_ranks,
    choose_representatives,
    draw_checked,
    find_mesh,
    find_message_dimensions,
    infer_mesh,
    list_line,
    list_represented,
    place_ranks,
    split,
)
from understudy.cluster.communication import coordinates_of, find_schedule, make_rows, name_groups
from understudy.cluster.faults import Fault, History, find_faults, find_uncovered, shorten_line, write_ranks
from understudy.cluster.layout import CLASSES, Interconnect, Layout, LayoutError, parse_ranks
from understudy.cluster.nccl import Communicator, NcclSettings, find_communicators
from understudy.cluster.ranks import make_broker, run_ranks
from understudy.report.cluster_rehearsal import CardUse, ClusterMesh, ClusterRehearsal, RankRow
from understudy.report.cluster_times import estimate_time
from understudy.report.measurement import Measurement
from understudy.report.places import write_phase
from understudy.report.rehearsal import DOES_NOT_FIT, FAILED, FITS, NO_VERDICT, TIGHT, Device, Peak, Rehearsal
from understudy.report.runs import MeasuredRun, RehearsalOptions, name_function
from understudy.report.script_facts import take_facts
from understudy.report.summary import write_line
from understudy.report.text import format_range, format_size
from understudy.simulation.catalogue import Card
from understudy.simulation.machine import list_visible
from understudy.simulation.network import Group, MeshRecord
from understudy.simulation.overlay import Overlay
from understudy.simulation.sandbox import LANDLOCK, PYTHON, Sandbox
from understudy.simulation.scripts import Script, ScriptResult, format_error, run_script
from understudy.simulation.simulator import find_device

GiB = 1 << 30


@dataclass(frozen=True)
class ClusterOptions:
    """`ranks`: which are run, as of `--ranks`. `jobs`: how many compute at once; the number of cores if None. `is_quiet`: no
    rank's output is shown, else that of the first. The others as of `understudy run`."""

    rehearsal: RehearsalOptions = field(default_factory=RehearsalOptions)
    ranks: str | None = None
    jobs: int | None = None
    steps: int | None = 2
    is_online: bool = False
    has_margin: bool = False
    """Whether the user has chosen the margin."""
    takes_longest: bool = False
    makes_data: bool = False
    is_quiet: bool = False
    interconnect: Interconnect | None = None
    nccl_memory: int | None = None
    """Bytes of NCCL on each rank, instead of the catalogue's range."""


def rehearse_cluster(
    program: str | Path | Callable[[], object], *, args: Sequence[str] = (), device: str | Card | None = None,
    nodes: int = 1, per_node: int | None = None, options: ClusterOptions | None = None, **settings: Any,
) -> ClusterRehearsal:  # fmt: skip
    """Rehearse a script, or a function that is called once in each rank, on `nodes` machines with `per_node` cards each.

        understudy.rehearse_cluster("train.py", args=["--batch", "4"], device="h100", nodes=16, per_node=8)
        understudy.rehearse_cluster(train, device="8xh100")

    Without a `device`, ranks are processes on the CPU. `settings` are fields of `ClusterOptions`: `ranks="0,8"`, `steps=3`.
    """
    card, count = (None, 1) if device is None else find_device(device)
    if per_node is not None and 1 < count < per_node:
        raise LayoutError(
            f"expected one card per process of a node, got {per_node} processes and {count} cards"
        )
    layout = Layout(nodes, per_node or count)
    options = replace(options or ClusterOptions(), **settings)
    if callable(program):
        return run_cluster(layout, program, card, options)
    return run_cluster(layout, Script(str(program), tuple(args)), card, options)


def run_cluster(
    layout: Layout, program: Script | Callable[[], object], card: Card | None, options: ClusterOptions,
    entry: bytes = b"", sandbox: Sandbox | None = None,
) -> ClusterRehearsal:  # fmt: skip
    """`entry`: what the ranks call, if the program has started them itself (`started_ranks`). `sandbox`: the one that this
    process is in; all ranks share it."""
    run = parse_ranks(options.ranks, layout.world_size)
    if isinstance(program, Script):
        _import_ahead(program)
    jobs = options.jobs or os.cpu_count() or 1
    sandbox = sandbox or Sandbox(PYTHON)
    is_patched = sandbox.level in (PYTHON, LANDLOCK)

    def body(rank: int) -> dict[str, Any]:
        return _run_rank(rank, layout, program, card, options, entry, rank == 0, sandbox)

    def make_sample(ranks: Sequence[int]) -> Broker:
        return make_broker(layout, ranks, jobs, body, is_sample=True)

    with Overlay(sandbox.folder) if is_patched else contextlib.nullcontext():
        if run == CLASSES and layout.world_size > 3:
            cluster = _run_classes(layout, make_sample, card, options)
        else:
            ranks = run if isinstance(run, tuple) else tuple(range(layout.world_size))
            outcomes, faults = run_ranks(layout, ranks, jobs, body)
            cluster = _summarise(layout, outcomes, faults, card, options)
    cluster.program = program.command if isinstance(program, Script) else name_function(program)
    return cluster


MOST_SPLITS = 3
"""How often classes are split at ranks that differ, before the user is asked to run all."""
MOST_LINES = 5
"""Lines that a note lists."""


def _run_classes(
    layout: Layout, make: Callable[[Sequence[int]], Broker], card: Card | None, options: ClusterOptions
) -> ClusterRehearsal:
    """Run rank 0, those that it depends on, and some others for comparison. If these differ, run the first, the last and one
    between in each dimension."""
    last = layout.world_size - 1
    compared = [last, *draw_checked(range(1, last))]
    broker = make([0, *compared])
    outcomes: dict[int, RankOutcome] = {}

    def run(ranks: Iterable[int]) -> bool:
        """Whether all is well, so that other ranks may be run."""
        broker.add(sorted(ranks))
        outcomes.update(broker.run())
        return not broker.faults and not any(outcome.has_failed for outcome in outcomes.values())

    def summarise(chosen: dict[int, list[int]]) -> ClusterRehearsal:
        cluster = _summarise(layout, dict(sorted(outcomes.items())), broker.faults, card, options, chosen)
        if broker.borrowed:
            cluster.assumptions.append(_describe_borrowed(broker.borrowed))
        return cluster

    if not run([]):
        return summarise({})
    pilot: dict[str, Any] = outcomes[0].result
    mesh = find_mesh(pilot["meshes"], layout.world_size)
    mesh = mesh or infer_mesh(pilot["groups"].values(), layout.world_size)
    places = place_ranks(mesh, layout.world_size)
    dims = find_message_dimensions(pilot["log"], 0, places)
    lines = {dim: list_line(0, [dim], places) for dim in dims}
    if not run(itertools.chain(*lines.values())):
        return summarise({})
    cluster = summarise({})
    stages = [dim for dim in dims if not all(_is_like(cluster, rank, 0) for rank in lines[dim])]
    leaders = list_line(0, stages, places)
    if not run(leaders):
        return summarise({})
    breaks = {leader: outcomes[leader].result["breaks"] for leader in leaders}
    chosen = choose_first_ranks(stages, breaks, places)
    is_well = run(chosen)
    cluster = summarise(chosen)
    differing = _find_differing(cluster, outcomes, chosen)
    if differing and is_well:
        chosen = choose_representatives(places, stages[0] if stages else None, layout.per_node)
        for splits in range(1 + MOST_SPLITS):
            rest = list_represented(chosen)
            is_compared = not splits and any(rank in outcomes for rank in rest)
            drawn = [] if is_compared else draw_checked(rank for rank in rest if rank not in outcomes)
            is_well = run([*chosen, *drawn])
            cluster = summarise(chosen)
            differing = _find_differing(cluster, outcomes, chosen)
            if not differing or not is_well:
                break
            for rank in differing:
                split(chosen, rank)
            cluster = summarise(chosen)
    if is_well:
        cluster.assumptions.append(_describe_check(cluster, chosen, differing))
    return cluster


def _find_differing(
    cluster: ClusterRehearsal, outcomes: Iterable[int], chosen: dict[int, list[int]]
) -> list[int]:
    """Ranks that were run, and are unlike those that stand for them."""
    stands_for = {rank: run for run, ranks in chosen.items() for rank in ranks}
    return [rank for rank in outcomes if rank in stands_for and not _is_like(cluster, rank, stands_for[rank])]


def _describe_check(cluster: ClusterRehearsal, chosen: dict[int, list[int]], differing: Sequence[int]) -> str:
    if differing:
        are = (
            "differs from the rank that represents it"
            if len(differing) == 1
            else "differ from those that represent them"
        )
        what = _describe_differences(cluster.rows)
        return f"{write_ranks(differing)} {are}: {what}; rehearse with --ranks all"
    compared = sorted({row.rank for row in cluster.rows} & {*list_represented(chosen)})
    if not compared:
        return "every rank was run"
    if len(compared) == 1:
        return f"{write_ranks(compared)} was run and compared with the rank that represents it: equal"
    return f"{write_ranks(compared)} were run and compared with the ranks that represent them: equal"


def _describe_differences(rows: Sequence[RankRow]) -> str:
    """For ranks that were run: memory, or else communication."""
    sizes = {
        "reserved memory": [row.peak.reserved_bytes for row in rows],
        "allocated memory": [row.peak.allocated_bytes for row in rows],
        "NCCL's memory": [row.nccl_high_bytes for row in rows],
    }
    parts = []
    for name, found in sizes.items():
        least, most = min(found), max(found)
        low, high = format_size(least), format_size(most)
        if low != high:
            parts.append(f"{name} is {low} to {high}")
        elif least != most:
            parts.append(f"{name} differs by {format_size(most - least)}")
    if not parts:
        return "the ranks that were run have equal memory, and other communication"
    return f"of the ranks that were run, {' and '.join(parts)}"


def _describe_borrowed(borrowed: Iterable[tuple[str, str]]) -> str:
    places = [f"{kind} at {line}" if line else kind for kind, line in borrowed]
    more = f" and {len(places) - MOST_LINES} more" if len(places) > MOST_LINES else ""
    return (
        "values from ranks that were not run are assumed equal to those of run ranks: "
        f"{', '.join(places[:MOST_LINES])}{more}"
    )


def _is_like(cluster: ClusterRehearsal, rank: int, other: int) -> bool:
    """Whether two ranks that were run have the same memory and communication."""
    rows = {row.rank: row for row in cluster.rows}

    def describe(number: int) -> list[object]:
        row = rows[number]
        memory = [row.peak.allocated_bytes, row.peak.reserved_bytes, row.nccl_low_bytes, row.nccl_high_bytes]
        calls = [
            (sent.when, sent.collective, sent.dtype, sent.calls, sent.bytes, sent.line)
            for sent in cluster.communication
            if sent.rank == number
        ]
        return [*memory, sorted(calls)]

    return describe(rank) == describe(other)


HEAVY = ("torch", "transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "datasets", "numpy")
"""Packages that are imported once in the parent of all ranks, if the script imports them."""


def _import_ahead(script: Script) -> None:
    if script.is_module or not os.path.isfile(script.target):
        return
    try:
        tree = ast.parse(Path(script.target).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return  # the ranks say so
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if name.partition(".")[0] in HEAVY:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)


# --- in a rank -------------------------------------------------------------------------------------------------------


def _run_rank(
    rank: int, layout: Layout, program: Script | Callable[[], object], card: Card | None, options: ClusterOptions,
    entry: bytes, is_shown: bool, sandbox: Sandbox,
) -> dict[str, Any]:  # fmt: skip
    recorder = MeasuredRun(card, options.rehearsal)
    recorder.count = layout.per_node
    if options.interconnect is not None:
        given = options.interconnect
        recorder.interconnect = given.within_node, given.between_nodes, given.latency
    with _hide_output(options.is_quiet or not is_shown) as said, recorder:
        if isinstance(program, Script):
            program = replace(program, arguments=(*layout.arguments_of(rank), *program.arguments))
            if entry:
                program = replace(program, entry=entry, rank=layout.local_rank_of(rank))
            result = run_script(
                program, mode=recorder.mode, steps=options.steps, sandbox=sandbox, is_online=options.is_online,
                takes_longest=options.takes_longest, makes_data=options.makes_data,
            )  # fmt: skip
            take_facts(recorder.facts, program, result, has_margin=options.has_margin)
        else:
            result = _call(program)
            recorder.facts.program = name_function(program)
            recorder.facts.failure = "the function failed" if result.exit_code else ""
    rehearsal = recorder.rehearsal()
    visible = list_visible(recorder.count)
    network = recorder.mode.network
    return {
        "has_failed": bool(result.exit_code)
        and not (result.is_out_of_memory and rehearsal.verdict == DOES_NOT_FIT),
        "was_ended": result.was_ended,
        "exit_code": result.exit_code,
        "error": result.error or (said.getvalue() if result.exit_code else ""),
        "exit_line": result.exit_line,
        "rehearsal": rehearsal,
        "time_log": recorder.measurement.clock.log if recorder.measurement.clock is not None else None,
        "log": network.log if network is not None else [],
        "groups": network.groups if network is not None else {},
        "meshes": network.meshes if network is not None else [],
        "breaks": network.breaks if network is not None else {},
        "created": network.created if network is not None else [],
        "loaders": network.loaders if network is not None else [],
        "outsiders": network.outsiders if network is not None else [],
        "sharded": result.sharded,
        "has_bound_device": network is not None and network.has_bound_device,
        "nccl_settings": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "cards": [
            CardUse(
                index if index >= len(visible) else visible[index],
                peaks["reserved_bytes"],
                peaks["allocated_bytes"],
                _find_largest(recorder.measurement, index),
            )
            for index, memory in enumerate(recorder.memory.devices)
            if (peaks := memory.allocator.peaks())["reserved_bytes"]
        ],
    }


def _find_largest(measurement: Measurement, card: int) -> str:
    """The line that made the largest storage on a card."""
    records = [record for record in measurement.events if record.device == torch.device("cuda", card)]
    return write_line(max(records, key=lambda record: record.nbytes).line) if records else ""


def _call(function: Callable[[], object]) -> ScriptResult:
    result = ScriptResult()
    try:
        function()
    except Exception as error:
        result.exit_code, result.error = 1, format_error(error)
    return result


@contextlib.contextmanager
def _hide_output(is_hidden: bool) -> Iterator[io.StringIO]:
    """What a rank writes to standard error is kept: it may say why it failed."""
    said = io.StringIO()
    if not is_hidden:
        yield said
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(said),
    ):
        # What C++ writes goes nowhere, too.
        before = [os.dup(stream) for stream in (1, 2)]
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
        try:
            yield said
        finally:
            for stream, kept in zip((1, 2), before, strict=True):
                os.dup2(kept, stream)
                os.close(kept)


# --- the whole -------------------------------------------------------------------------------------------------------


def _summarise(
    layout: Layout, outcomes: dict[int, RankOutcome], faults: list[Fault], card: Card | None, options: ClusterOptions,
    classes: dict[int, list[int]] | None = None,
) -> ClusterRehearsal:  # fmt: skip
    meshes = _merge_meshes(outcomes, layout.world_size)
    results = {rank: outcome.result for rank, outcome in outcomes.items() if outcome.result is not None}
    histories = [_make_history(rank, result) for rank, result in results.items()]
    groups = (group for result in results.values() for group in result["groups"].values())
    name_group = name_groups(groups, meshes).__getitem__
    if len(results) == len(outcomes) and not any(outcome.has_failed for outcome in outcomes.values()):
        faults = [*faults, *find_faults(histories, name_group)]
    else:
        faults = [*faults, *_find_layout_faults(histories, results)]
    stands_for = {
        run: [rank for rank in ranks if rank not in outcomes] for run, ranks in (classes or {}).items()
    }
    communicators = [] if card is None else _find_communicators(layout, results, name_group, card)
    rows = [
        add_nccl(
            replace(_make_row(layout, outcome, meshes), stands_for=stands_for.get(rank, [])),
            communicators,
            options.nccl_memory if card is not None and layout.world_size > 1 else None,
        )
        for rank, outcome in outcomes.items()
    ]
    communication = [
        row
        for outcome in outcomes.values()
        if outcome.result is not None
        for row in make_rows(
            outcome.rank,
            outcome.result["log"],
            outcome.result["groups"],
            name_group,
            layout,
            options.interconnect,
        )
    ]
    known = [row.rehearsal for row in rows if row.rehearsal is not None]
    device = known[0].device if known else Device("", "", "")
    cluster = ClusterRehearsal(
        verdict=_decide(rows, faults), headline="", device=device, nodes=layout.nodes, per_node=layout.per_node,
        rows=rows, mesh=_describe_mesh(meshes, layout.world_size), communication=communication,
        schedule=find_schedule({rank: result["log"] for rank, result in results.items()}),
        communicators=communicators, faults=faults, assumptions=_merge_notes(known),
    )  # fmt: skip
    _add_cards(cluster)
    if not faults and cluster.verdict not in (FAILED, NO_VERDICT):
        logs = {rank: result["time_log"] for rank, result in results.items()}
        cluster.time = estimate_time(cluster, logs, card, options.interconnect)
    cluster.headline = _write_headline(cluster)
    return cluster


def _find_layout_faults(histories: Sequence[History], results: dict[int, dict[str, Any]]) -> list[Fault]:
    """What may have made ranks fail: sizes that can't be divided, ranks outside of the mesh."""
    sharded: dict[str, list[int]] = {}
    for rank, result in results.items():
        if result["sharded"]:
            sharded.setdefault(result["sharded"], []).append(rank)
    found = [Fault("layout", f"{write_ranks(ranks)}: {text}", ranks) for text, ranks in sharded.items()]
    return found or find_uncovered(histories)


def _find_communicators(
    layout: Layout, results: dict[int, dict[str, Any]], name_group: Callable[[Group], str], card: Card
) -> list[Communicator]:
    found = []
    for rank, result in results.items():
        settings = NcclSettings.read(result["nccl_settings"])
        for made in find_communicators(
            rank, result["log"], result["groups"], layout, card, settings, result["has_bound_device"]
        ):
            name, _, pair = made.group.partition(" ")
            shown = name_group(result["groups"][name])
            found.append(replace(made, group=f"{shown}, ranks {pair}" if pair else shown))
    return found


def add_nccl(row: RankRow, communicators: Sequence[Communicator], given: int | None) -> RankRow:
    """The row of a rank with the memory of its communicators, which may decide whether it fits. `given`: bytes, instead."""
    own = [made for made in communicators if made.rank == row.rank]
    low, high = (
        (sum(made.low_bytes for made in own), sum(made.high_bytes for made in own))
        if given is None
        else (given, given)
    )
    verdict = row.verdict
    if row.rehearsal is not None and verdict in (FITS, TIGHT):
        limit, reserved = row.rehearsal.device.limit_bytes, row.peak.reserved_bytes
        if reserved + low > limit:
            verdict = DOES_NOT_FIT
        elif reserved + row.rehearsal.error_bytes + high > limit:
            verdict = TIGHT
    return replace(row, verdict=verdict, nccl_low_bytes=low, nccl_high_bytes=high)


def _add_cards(cluster: ClusterRehearsal) -> None:
    """A card's memory is the sum over the processes that use it, each with a context of its own. A process that
    communicates by NCCL has to have a card to itself."""
    used: dict[tuple[int, int], list[tuple[RankRow, CardUse]]] = {}
    for row in cluster.rows:
        for use in row.cards:
            used.setdefault((row.node, use.card), []).append((row, use))
    for (node, card), users in sorted(used.items()):
        is_shared = len(users) > 1
        strays = [
            (row, use) for row, use in users if row.local_rank != card and (is_shared or len(row.cards) > 1)
        ]
        if not strays:
            continue
        row, use = max(strays, key=lambda stray: stray[1].reserved_bytes)
        each = " each" if len(strays) > 1 else ""
        whole = sum(use.reserved_bytes + cluster.device.context_bytes for _, use in users)
        whole += sum(row.nccl_low_bytes for row, _ in users if row.local_rank == card)
        limit = cluster.device.memory_bytes
        holds = "hold" if len(strays) > 1 else "holds"
        where = f"cuda:{card}{f' of node {node}' if cluster.nodes > 1 else ''}"
        # It has no card of its own, and NCCL is asked to connect two processes on this one.
        is_refused = is_shared and any(row.nccl_high_bytes and len(row.cards) == 1 for row, _ in strays)
        reason = "NCCL refuses two ranks on one card; " if is_refused else ""
        text = (
            f"{write_ranks([row.rank for row, _ in strays])} {holds} {use.reserved_bytes / GiB:.1f} GiB{each} on {where}, "
            f"{use.line}, and a context of {cluster.device.context_bytes / GiB:.1f} GiB{each}; in all {whole / GiB:.1f} of "
            f"{limit / GiB:.1f} GiB: {reason}call torch.cuda.set_device(local_rank) first, and load with map_location"
        )
        is_over = bool(limit) and whole > limit
        cluster.faults.append(Fault("memory", text, [row.rank for row, _ in strays], is_error=is_refused))
        if is_refused:
            cluster.verdict = FAILED
        elif is_over and cluster.verdict != FAILED:
            cluster.verdict = DOES_NOT_FIT


def _make_history(rank: int, result: dict[str, Any]) -> History:
    is_whole = not (result["has_failed"] or result["was_cut_off"])
    return History(
        rank, result["log"], result["groups"], result["created"], result["loaders"], result["outsiders"],
        result["meshes"], is_whole,
    )  # fmt: skip


def _make_row(layout: Layout, outcome: RankOutcome, meshes: Sequence[MeshRecord]) -> RankRow:
    rank = outcome.rank
    place: dict[str, Any] = {
        "rank": rank,
        "node": layout.node_of(rank),
        "local_rank": layout.local_rank_of(rank),
    }
    coordinates: dict[str, int] = {}
    for mesh in meshes:
        coordinates |= {
            key: value for key, value in coordinates_of(rank, mesh).items() if key not in coordinates
        }
    if outcome.result is None:
        if not outcome.is_whole:
            return RankRow(**place, verdict=NO_VERDICT, steps=0, peak=Peak())
        why = f"was killed by signal {outcome.signal}" if outcome.signal else "ended without a result"
        if outcome.signal in signal.valid_signals():
            why += f" ({signal.Signals(outcome.signal).name})"
        why += f" {outcome.place}" if outcome.place else ""
        return RankRow(**place, verdict=FAILED, steps=0, peak=Peak(), failure=f"rank {rank} {why}")
    result: dict[str, Any] = outcome.result
    rehearsal: Rehearsal = result["rehearsal"]
    failure = ""
    if result["has_failed"]:
        where = f" at {shorten_line(result['exit_line'])}" if result["exit_line"] else ""
        failure = result["error"] or f"rank {rank} ended with exit code {result['exit_code']}{where}"
    is_partial = result["was_cut_off"] and not rehearsal.steps and rehearsal.verdict in (FITS, TIGHT)
    verdict = NO_VERDICT if is_partial else rehearsal.verdict
    return RankRow(
        **place, verdict=verdict, steps=rehearsal.steps, peak=rehearsal.peak, coordinates=coordinates,
        cards=result["cards"], host_peak_bytes=rehearsal.host_peak_bytes, failure=failure, rehearsal=rehearsal,
    )  # fmt: skip


def _merge_meshes(outcomes: dict[int, RankOutcome], world_size: int) -> list[MeshRecord]:
    """Largest first, so that dimensions of a part are named as in the whole."""
    found: dict[MeshRecord, None] = {}
    for outcome in outcomes.values():
        if outcome.result is not None:
            found |= dict.fromkeys(outcome.result["meshes"])
    first = outcomes.get(0)
    if find_mesh(list(found), world_size) is None and first is not None and first.result is not None:
        inferred = infer_mesh(first.result["groups"].values(), world_size)
        found |= {} if inferred is None else {inferred: None}
    return sorted(found, key=lambda mesh: (-len(mesh.ranks), -len(mesh.shape)))


def _describe_mesh(meshes: Sequence[MeshRecord], world_size: int) -> ClusterMesh | None:
    """Dimensions that have more than one position."""
    whole = find_mesh(meshes, world_size)
    sizes = {} if whole is None else dict(zip(whole.names, whole.shape, strict=True))
    kept = {name: size for name, size in sizes.items() if size > 1}
    return (
        None if whole is None or not kept else ClusterMesh(list(kept), list(kept.values()), list(whole.ranks))
    )


def _merge_notes(rehearsals: Sequence[Rehearsal]) -> list[str]:
    return list(dict.fromkeys(note for rehearsal in rehearsals for note in rehearsal.assumptions))


def _decide(rows: Sequence[RankRow], faults: Sequence[Fault]) -> str:
    verdicts = {row.verdict for row in rows}
    if any(fault.is_error for fault in faults):
        return FAILED
    return next(verdict for verdict in (FAILED, DOES_NOT_FIT, NO_VERDICT, TIGHT, FITS) if verdict in verdicts)


def _find_message(failure: str) -> str:
    """The first line of the message of an exception, or the last one that a rank wrote."""
    lines = failure.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if re.match(r"  File ", line)]
    following = lines[frames[-1] :] if frames else []
    return next((line for line in following if re.match(r"[A-Za-z_][\w.]*(:|$)", line)), lines[-1])


def _write_headline(cluster: ClusterRehearsal) -> str:
    count, worst, device = cluster.world_size, cluster.worst, cluster.device
    failed = [row for row in cluster.rows if row.failure]
    if any(fault.is_error for fault in cluster.faults):
        return str(next(fault for fault in cluster.faults if fault.is_error))
    if failed:
        return f"failed: rank {failed[0].rank} of {count}: {_find_message(failed[0].failure)}"
    absent = next((fault for fault in cluster.faults if fault.kind == "missing"), None)
    if cluster.verdict == NO_VERDICT and absent is not None:
        return f"no verdict: {absent.text}"
    if cluster.verdict == NO_VERDICT and worst.rehearsal is not None:
        return f"{worst.rehearsal.headline} (rank {worst.rank} of {count})"
    peak = worst.peak
    where = ", ".join(part for part in (peak.phase, peak.line) if part)
    if device.kind == "cpu" or not device.memory_bytes:
        most = f"at most {format_size(peak.allocated_bytes)} on rank {worst.rank}"
        return f"{cluster.verdict}: {count} ranks on the CPU, {most}, {where}"
    sizes = f"{peak.reserved_bytes / GiB:.1f} of {device.memory_bytes / GiB:.1f} GiB"
    nccl = (
        f" and {format_range(worst.nccl_low_bytes, worst.nccl_high_bytes)} of NCCL"
        if worst.nccl_high_bytes
        else ""
    )
    bad = [rank for rank, row in cluster.ranks.items() if row.verdict == DOES_NOT_FIT]
    if bad:
        return f"does not fit: {len(bad)} of {count} ranks; {sizes}{nccl} on rank {worst.rank}, {where}"
    share = f"{(peak.reserved_bytes + worst.nccl_high_bytes) / device.memory_bytes:.0%}"
    if cluster.verdict == DOES_NOT_FIT:
        return f"does not fit: {next(fault for fault in cluster.faults if fault.kind == 'memory')}"
    on = f"{cluster.verdict} on {cluster.cards} x {device.name}"
    when = ", ".join(part for part in (peak.phase and write_phase(peak.phase), peak.line) if part)
    return f"{on}: {sizes} reserved{nccl} on rank {worst.rank} ({share}), peak {when}"
