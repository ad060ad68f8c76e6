"""A script on several ranks: options of `understudy run`, the command `understudy torchrun`, and their output."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from understudy.cli.commands import INTERRUPTED
from understudy.cli.time_options import add_cost, is_too_slow
from understudy.cluster.launchers import parse_launch
from understudy.cluster.layout import (
    ALL,
    CLASSES,
    Interconnect,
    Layout,
    LayoutError,
    parse_count,
    parse_rank,
    parse_ranks,
)
from understudy.errors import UnderstudyError
from understudy.simulation.catalogue import Card
from understudy.simulation.sandbox import Sandbox, SandboxOptions, run_sandboxed

if TYPE_CHECKING:
    from understudy.report.cluster_rehearsal import ClusterRehearsal

FAILED, DOES_NOT_FIT, NO_VERDICT = 1, 3, 4
OF_ONE_RANK = ("snapshot", "speedscope", "folded", "requests")
"""Options of `understudy run` that write a file about one process."""
OF_SEVERAL_RANKS = ("ranks", "rank", "jobs", "interconnect")


def add_cluster_arguments(add: Any) -> None:
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        metavar="N",
        dest="per_node",
        help="processes per node, as for torchrun",
    )
    add("--nnodes", metavar="N", help="nodes, as for torchrun (1)")
    add(
        "--ranks",
        metavar="R",
        help="ranks to run: all, classes, or a list such as 0,8,16-19 (default: all of up to 16)",
    )
    add("--rank", metavar="N", help="rank to report (default: the one with the highest peak)")
    add("--jobs", metavar="N", help="ranks that run in parallel (default: the number of cores)")
    add(
        "--interconnect",
        metavar="B",
        help="bandwidth in GB/s and latency of the network in µs, as in nvlink=450,network=50,latency=70 "
        "(default: from the catalogue)",
    )


def find_layout(options: argparse.Namespace, count: int) -> Layout | None:
    """The ranks that the command line asks for; None for one process. Takes a launcher's words off the program."""
    given = None if options.per_node is None else parse_count("--nproc-per-node", options.per_node)
    launch = parse_launch(options.program, given or count)
    if launch is not None:
        if given is not None and launch.count and given != launch.layout.per_node:
            raise LayoutError(
                f"expected one number of processes, got --nproc-per-node {given} and {launch.count} {launch.layout.per_node}"
            )
        options.program = list(launch.program)
    elif options.per_node is None and options.nnodes is None:
        return None
    layout = launch.layout if launch is not None else Layout()
    if given is not None:
        layout = replace(layout, per_node=given)
    elif launch is None:
        layout = replace(layout, per_node=count)
    if options.nnodes is not None:
        nodes = parse_count("--nnodes", options.nnodes)
        if launch is not None and launch.count and 1 < launch.layout.nodes != nodes:
            raise LayoutError(
                f"expected one number of nodes, got --nnodes {nodes} and {launch.layout.nodes} of the launcher"
            )
        layout = replace(layout, nodes=nodes)
        if ":" in options.nnodes:
            print(f"understudy: --nnodes {options.nnodes}: rehearsed with {layout.nodes}", file=sys.stderr)
    for note in launch.notes if launch is not None else ():
        print(f"understudy: {note}", file=sys.stderr)
    _check_layout(options, layout, count)
    if layout.world_size == 1:
        start = 2 if options.program[:1] == ["-m"] else 1
        options.program[start:start] = layout.arguments_of(0)
    return layout


def note_unused_options(options: argparse.Namespace) -> None:
    """After a run of one process, which started no others."""
    for name in OF_SEVERAL_RANKS:
        if getattr(options, name) is not None:
            print(
                f"understudy: --{name} has no effect on one process: give the number of ranks with --nproc-per-node",
                file=sys.stderr,
            )


def _check_layout(options: argparse.Namespace, layout: Layout, count: int) -> None:
    if count > 1 and layout.per_node > count:
        raise LayoutError(
            f"expected one card per process of a node, got {layout.per_node} processes and --device {options.device}"
        )
    given = os.environ.get("WORLD_SIZE")
    if given and given != str(layout.world_size):
        raise LayoutError(
            f"WORLD_SIZE={given} in the environment, but the command line asks for {layout.world_size} ranks; unset it"
        )
    for name in OF_ONE_RANK:
        if getattr(options, name, None):
            raise LayoutError(
                f"--{name} is not supported for several ranks; use --json, which contains every rank"
            )
    if options.jobs is not None:
        parse_count("--jobs", options.jobs)
    run = parse_ranks(options.ranks, layout.world_size)
    if options.rank is not None:
        shown = parse_rank(options.rank, layout.world_size)
        if run not in (ALL, CLASSES) and shown not in run:
            raise LayoutError(f"--rank {options.rank} is not among --ranks {options.ranks}")
    parse_interconnect(options.interconnect, None)


def parse_interconnect(text: str | None, card: Card | None) -> Interconnect | None:
    """Return bandwidths in bytes per second and seconds; the catalogue provides those that are missing."""
    units = {"nvlink": 1e9, "network": 1e9, "latency": 1e-6}
    found = dict.fromkeys(units, 0.0)
    if card is not None and card.interconnect_bandwidth is not None:
        found["nvlink"] = card.interconnect_bandwidth / 2  # data sheets count both directions
    for part in () if text is None else text.split(","):
        name, equals, number = part.partition("=")
        is_number = re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", number)
        if name not in units or not equals or not is_number or (name != "latency" and not float(number)):
            raise LayoutError(
                f"--interconnect: expected values as in nvlink=450,network=50,latency=70 (GB/s, µs), got {text!r}"
            )
        found[name] = float(number) * units[name]
    return Interconnect(found["nvlink"], found["network"], found["latency"])


def run_on_ranks(
    options: argparse.Namespace, layout: Layout, card: Card | None, wanted: SandboxOptions, entry: bytes = b""
) -> int:
    """Rehearse the program on all ranks, print and write the results. Return the exit code."""
    result = run_sandboxed(lambda sandbox: _run_inside(options, layout, card, entry, sandbox), wanted)
    if result.data is None:
        if result.exit_code in (INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        print(
            f"understudy run: the rehearsal ended with exit code {result.exit_code}: no report",
            file=sys.stderr,
        )
        return FAILED
    found = json.loads(result.data)
    if "wrong_input" in found:
        raise LayoutError(found["wrong_input"])
    # why: it needs no torch, and not even itself for --help
    from understudy.report.cluster_rehearsal import ClusterRehearsal

    cluster = ClusterRehearsal.from_json(result.data)
    add_cost(options, cluster, layout.world_size)
    with redirect_stdout(sys.stderr if options.json == "-" else sys.stdout):
        _print(cluster, options)
    _write(cluster, options)
    is_slow = is_too_slow(options, cluster)
    return choose_exit_code(cluster, options.strict) or (DOES_NOT_FIT if is_slow else 0)


def _write(cluster: ClusterRehearsal, options: argparse.Namespace) -> None:
    if options.json == "-":
        print(cluster.to_json())
    elif options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.write(cluster.to_json() + "\n")
    if options.html:
        from understudy.report.cluster_page import make_cluster_page  # why: --help is quick

        with open(options.html, "w", encoding="utf-8") as file:
            file.write(make_cluster_page(cluster))
    if options.trace:
        from understudy.report.cluster_trace import write_cluster_trace  # why: as above

        write_cluster_trace(cluster, options.trace)


def _run_inside(
    options: argparse.Namespace, layout: Layout, card: Card | None, entry: bytes, sandbox: Sandbox
) -> bytes:
    try:
        return _rehearse(options, layout, card, entry, sandbox).to_json(None).encode()
    except UnderstudyError as error:
        return json.dumps({"wrong_input": str(error)}).encode()


def _rehearse(
    options: argparse.Namespace, layout: Layout, card: Card | None, entry: bytes, sandbox: Sandbox
) -> ClusterRehearsal:
    # why: torch is imported only once the input is known to be right
    from understudy.report.cluster_runs import ClusterOptions, run_cluster
    from understudy.report.runs import RehearsalOptions  # why: as above
    from understudy.simulation.scripts import Script  # why: as above

    given = {"margin": options.margin} if options.margin is not None else {}
    rehearsal = RehearsalOptions(
        context=options.context, budget=options.budget, oom=options.oom, answers=options.answers, host=options.host,
        per_step=options.per_step, **given,
    )  # fmt: skip
    wishes = ClusterOptions(
        rehearsal, ranks=options.ranks, jobs=None if options.jobs is None else int(options.jobs), steps=options.steps,
        is_online=options.online, has_margin=options.margin is not None,
        takes_longest=options.longest, makes_data=options.offline_data,
        is_quiet=options.quiet, interconnect=parse_interconnect(options.interconnect, card),
        nccl_memory=options.nccl_memory,
    )  # fmt: skip
    is_module = options.program[0] == "-m"
    name, *arguments = options.program[1:] if is_module else options.program
    return run_cluster(layout, Script(name, tuple(arguments), is_module), card, wishes, entry, sandbox)


def choose_exit_code(cluster: ClusterRehearsal, is_strict: bool) -> int:
    if cluster.verdict in ("failed", "no verdict"):
        return FAILED if cluster.verdict == "failed" else NO_VERDICT
    return (
        DOES_NOT_FIT if cluster.verdict == "does not fit" or (cluster.verdict == "tight" and is_strict) else 0
    )


def _print(cluster: ClusterRehearsal, options: argparse.Namespace) -> None:
    from understudy.report.cluster_text import write_cluster  # why: --help is quick
    from understudy.report.text import clean, print_text  # why: as above

    failed = next((row for row in cluster.rows if row.failure), None)
    if failed is not None:
        print(failed.failure.rstrip(), file=sys.stderr)
    if options.quiet:
        print(clean(cluster.headline))
        return
    print(write_cluster(cluster))
    shown = cluster.ranks.get(int(options.rank)) if options.rank is not None else cluster.worst
    if shown is not None and shown.rehearsal is not None and not failed:
        print(f"\nRank {shown.rank}")
        print_text(shown.rehearsal)
