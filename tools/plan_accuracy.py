"""Plans against published throughput: nanotron's scaling benchmarks, by `examples/decoder.py`.

    python -m tools.plan_accuracy ULTRASCALE.json [--groups 1B:1,8B:4] [--most 8] [--cache DIR] [--jobs 2]

A group is a model and a number of nodes; its candidates are the layouts that were published. What is reported: the
published throughput of the plan's first choice as a share of the group's best, and whether the best is among the first
three. A row without a throughput, which crashed or ran out of memory, counts as none.

What differs from the original: torch's FSDP2 and pipelines in place of nanotron's own, which reduce gradients layer by layer
and not in buckets; of alike ranks, one of each stage is rehearsed. The latency between nodes is that of the cluster's
network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.fit_kernels.layouts import measure_order
from understudy.cli.fixes import read_sources
from understudy.cli.plans import Rehearser, Wishes, run_search
from understudy.cli.rehearsals import Queue, Variant, Workers
from understudy.cli.search_space import FoundSpace, SearchRequest, find_space
from understudy.plans.axes import Axis
from understudy.plans.candidates import Candidate
from understudy.plans.estimates import Estimates, Speeds
from understudy.plans.search import Limits, PlanSearch
from understudy.plans.store import ResultStore
from understudy.simulation.catalogue import find_card
from understudy.timing.collectives import find_link, find_network, usual_network

CARD = "h100"
HOST = "heavy"
"""nanotron's Python between calls takes some 5 ms for a layer."""
PER_NODE = 8
DECODER = Path(__file__).parents[1] / "examples" / "decoder.py"
ARGUMENTS = ("--context", "4096", "--vocabulary", "131072", "--overlap")
LATENCY = 70
"""Microseconds between two nodes: EFA, which the cluster had."""
PASSES = 4
SIZES = {"1B": "llama-1b", "8B": "llama-8b", "3B": "llama-3b"}
NAMES = {"tp": "tp", "pp": "pp", "zero": "zero", "batch": "mbs", "accumulate": "grad_acc"}

Layout = tuple[int, ...]


@dataclass
class OneColumn(FoundSpace):
    """Rehearses one rank of each stage: the others of a stage do the same."""

    def make_variant(self, candidate: Candidate, options: Sequence[str] = ()) -> Variant:
        variant = super().make_variant(candidate, options)
        shape = candidate.shape
        step = shape.ranks // shape.pp
        ranks = ",".join(str(stage * step) for stage in range(shape.pp))
        kept = tuple(word for word in variant.options if word not in ("--ranks", "classes"))
        return replace(variant, options=(*kept, "--ranks", ranks))


def read_groups(path: Path) -> dict[tuple[str, int], dict[Layout, float]]:
    """Tokens per second of all cards by layout; of a layout that was run twice, the better run."""
    groups: dict[tuple[str, int], dict[Layout, float]] = defaultdict(dict)
    for row in json.loads(path.read_text())["rows"]:
        layout = tuple(row[column] for column in NAMES.values())
        found = groups[row["model"], row["nodes"]]
        found[layout] = max(found.get(layout, 0.0), row["tokens_per_s"] or 0.0)
    return dict(sorted(groups.items()))


def layout_of(candidate: Candidate) -> Layout:
    return tuple(int(candidate.table[name]) for name in NAMES)


def make_space(
    model: str, nodes: int, layouts: dict[Layout, float], parsers: list[dict[str, Any]]
) -> OneColumn:
    axes = tuple(
        Axis(name, tuple(sorted({layout[index] for layout in layouts})), name)
        for index, name in enumerate(NAMES)
    )
    request = SearchRequest(
        str(DECODER), ("--size", SIZES[model], *ARGUMENTS), read_sources(str(DECODER)), parsers=parsers, varied=axes,
        nodes=nodes, per_node=PER_NODE, has_ranks=True, tries_changes=False,
    )  # fmt: skip
    return OneColumn(**vars(find_space(request)))


def read_parsers() -> list[dict[str, Any]]:
    return [
        {"flags": [f"--{name}"], "name": name, "kind": "int", "default": None, "choices": None, "help": ""}
        for name in NAMES
    ]


def choose_first(candidates: Sequence[Candidate]) -> Candidate:
    """A layout with some of everything says most of the others."""
    return min(
        candidates,
        key=lambda c: (abs(c.shape.tp - 2) + abs(c.shape.pp - 2), c.shape.batch or 1, -(c.shape.zero or 0)),
    )


def plan_group(
    model: str, nodes: int, layouts: dict[Layout, float], estimates: Estimates, options: argparse.Namespace
) -> tuple[float, bool]:  # fmt: skip
    card = find_card(CARD)
    found = make_space(model, nodes, layouts, read_parsers())
    candidates = [c for c in found.space.list_candidates() if layout_of(c) in layouts]
    limits = Limits(card.usable, most=options.most)
    wishes = Wishes(
        card, PER_NODE, found.request, limits, f"{PER_NODE}x{CARD}", None, 3, PASSES, 2, options.jobs, None,
        ResultStore(options.cache),
    )  # fmt: skip
    first = None if estimates.results else choose_first(candidates)
    search = PlanSearch(candidates, first, estimates, limits)
    began = time.time()
    with Workers(options.jobs) as workers:
        queue = Queue(workers, f"{PER_NODE}x{CARD}")
        run_search(
            search,
            Rehearser(
                wishes,
                found,
                queue,
                ("--steps", "2", "--jobs", "1", "--host", HOST, "--interconnect", f"latency={LATENCY}"),
                {},
            ),
            options.jobs,
            set(),
        )
    own = set(candidates)
    ranked = [c for c in search.rank() if c in own]
    best = max(layouts.values())
    first_three = [layouts[layout_of(c)] for c in ranked[:3]]
    share = first_three[0] / best if first_three else 0.0
    hit = best in first_three
    guesses = [
        (candidate.shape.samples / seconds, layouts[layout_of(candidate)])
        for candidate in candidates
        if candidate.shape.samples
        and (seconds := estimates.predict_seconds(candidate))
        and layouts[layout_of(candidate)]
    ]
    search.end()
    rehearsed = sum(c in own for c in search.results)
    print(
        f"{model} on {nodes} nodes: {share:.1%} of the best, {'in' if hit else 'not in'} the first three; "
        f"{len(candidates)} candidates, order of predictions {measure_order(guesses):.2f} (tau), "
        f"{rehearsed} rehearsed, {time.time() - began:.0f} s; {search.count_reasons()}",
        flush=True,
    )
    for candidate in ranked[:3]:
        result = search.results[candidate]
        published = layouts[layout_of(candidate)]
        rate = (result.tokens or 0.0) / (result.seconds or 1.0)
        print(
            f"    {candidate}: {rate:,.0f} tokens/s, published {published:,.0f} ({published / best:.0%}), "
            f"{result.reserved_bytes / (1 << 30):.1f} GiB",
            flush=True,
        )
    winner = next(layout for layout, tokens in layouts.items() if tokens == best)
    for candidate in candidates:
        if layout_of(candidate) == winner and not hit:
            why = search.ruled_out.get(candidate, "rehearsed")
            result_of = search.results.get(candidate)
            measured = f", {result_of.seconds:.3f} s" if result_of and result_of.seconds else ""
            print(f"    the best, {best:,.0f} tokens/s: {candidate}: {why}{measured}", flush=True)
    return share, hit


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--groups", help="such as 1B:1,8B:4 (all)")
    parser.add_argument("--most", type=int, default=8, help="rehearsals of a group")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    card = find_card(CARD)
    speeds = Speeds(find_link(card).bandwidth, find_network(usual_network(card)).bandwidth)
    # What was learned of a model on some nodes holds on others.
    estimates: dict[str, Estimates] = defaultdict(lambda: Estimates(speeds))
    shares, hits = [], 0
    for (model, nodes), layouts in read_groups(options.path).items():
        if options.groups and f"{model}:{nodes}" not in options.groups.split(","):
            continue
        share, hit = plan_group(model, nodes, layouts, estimates[model], options)
        shares.append(share)
        hits += hit
    if shares:
        print(
            f"{len(shares)} groups: median {statistics.median(shares):.1%} of the best, first three in {hits}"
        )


if __name__ == "__main__":
    main()
