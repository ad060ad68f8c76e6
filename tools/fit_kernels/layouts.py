"""Layouts over many cards against published figures: vTrain's and nanotron's tables, by `examples/decoder.py`.

    python -m tools.fit_kernels.layouts [TRUTH] [--table vtrain] [--parts FILE] [--rehearse N] [--seed N]

Every row is composed of rehearsed parts (`parts.py`); of `--rehearse` rows, one rank of each stage is rehearsed as well, and
the stages are replayed together. A step of many passes is then extrapolated from two of fewer: once a pipeline is full, each
further pass takes as long as the one before it. What differs from the originals:

vTrain      Megatron-DeepSpeed of 2022 in float16, with its own fused kernels; here bfloat16, attention in plain operators,
            FSDP2 without sharding in the place of its data parallelism
nanotron    its own modules and flash-attention 2; here FSDP2 for ZeRO, and torch's pipelines. The cluster had AWS's EFA
            between nodes, whose latency is stated. What the program does beside the layers is in `nanotron.py`
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

# Not used here: what ranks need is imported once, before they are forked.
import understudy
import understudy.simulation.sharding
from examples.decoder import SIZES, parse_options
from examples.decoder import main as train
from tools.fit_kernels.generations import FLASH_2, attention_of
from tools.fit_kernels.nanotron import CONSTANTS, Constants, describe
from tools.fit_kernels.parts import PER_NODE, Composed, PartStore, Shape, compose
from understudy.cluster.layout import Interconnect
from understudy.report.runs import RehearsalOptions
from understudy.simulation.catalogue import find_card

GIB = 1 << 30
HOST = "heavy"
"""Of both frameworks: some 4 ms of Python for a layer, whatever its size."""
EFA = 70e-6
BATCHES = {1: (1, 4), 2: (1, 8), 32: (1, 32)}
"""Of nanotron's table that are rehearsed, by tensor parallel ranks."""
RESERVED = 1.1
"""Reserved memory over allocated memory, in rehearsals of whole layouts."""
STEPS = (0.7, 0.85, 1.2, 1.4)
"""By which a constant is varied in a fit."""


@dataclass(frozen=True)
class Layout:
    """One row. `seconds` of a step, infinite if it crashed; `gib`: the peak of allocated memory, where the table has it."""

    group: str
    shape: Shape
    seconds: float
    gib: float | None = None

    @property
    def rate(self) -> float:
        """Samples in a second."""
        return self.samples / self.seconds

    @property
    def samples(self) -> int:
        return self.shape.dp * self.shape.batch * self.shape.passes

    def __str__(self) -> str:
        s = self.shape
        return f"{self.group} {s.size} dp {s.dp} tp {s.tp} pp {s.pp} zero {s.zero}, {s.passes} passes of {s.batch}"


def read_vtrain(truth: Path) -> list[Layout]:
    found = []
    for row in json.loads((truth / "time" / "vtrain-single.json").read_text())["rows"]:
        width, layers, heads = (int(row[name]) for name in ("hidden size", "# layers", "attention heads"))
        name = f"{width}x{layers}"
        SIZES[name] = (layers, width, heads)
        dp, tp, pp = (int(row[f"{kind} parallelism"]) for kind in ("data", "tensor", "pipeline"))
        batch = int(row["micro batch"])
        vocabulary = -(-50257 // (128 * tp)) * 128 * tp
        words = ("--context", row["sequence length"], "--vocabulary", str(vocabulary), "--plain-attention",
                 "--dropout", "0.1", "--bias", "--even-stages", "--no-sequence-parallel", "--overlap")  # fmt: skip
        passes = int(row["global batch"]) // (dp * batch)
        shape = Shape("a100-40", name, words, batch, dp, tp, pp, passes, 0, HOST)
        found.append(Layout("vtrain", shape, float(row["iteration time (ms)"]) * 1e-3))
    return found


def read_nanotron(truth: Path, constants: Constants = CONSTANTS) -> list[Layout]:
    found = []
    for row in json.loads((truth / "memory" / "ultrascale.json").read_text())["rows"]:
        words = ("--context", "4096", "--vocabulary", "131072", "--overlap")
        dp, tp, pp = row["dp"], row["tp"], row["pp"]
        shape = Shape(
            "h100", f"llama-{row['model'].lower()}", words, row["mbs"], dp, tp, pp, row["grad_acc"], row["zero"], HOST,
            EFA, BATCHES.get(tp, (1, 16)), describe(row, constants), FLASH_2,
        )  # fmt: skip
        # Some rows have fewer samples in a step than the 256 that the table states: their throughput is that of theirs.
        samples = dp * row["mbs"] * row["grad_acc"]
        seconds = samples * 4096 / row["tokens_per_s"] if row["tokens_per_s"] else math.inf
        found.append(Layout(f"{row['model']} on {row['gpus']:3}", shape, seconds, row["gpu_memory_gb"]))
    return found


TABLES = {"vtrain": read_vtrain, "nanotron": read_nanotron}


def find_sleeping(rows: Sequence[Layout], composed: Sequence[Composed]) -> set[int]:
    """Pipelines whose step is nearer to that of a program that sleeps between messages."""
    found = set()
    for number, (row, guess) in enumerate(zip(rows, composed, strict=True)):
        if row.rate and guess.sleep:
            awake = guess.awake_seconds
            if row.seconds > math.sqrt(awake * (awake + guess.sleep)):
                found.add(number)
    return found


def is_as_described(number: int, composed: Sequence[Composed], sleeping: set[int]) -> bool:
    return (number in sleeping) == composed[number].does_sleep


def split_groups(rows: Sequence[Layout]) -> tuple[set[str], set[str]]:
    """The groups that constants are fitted on, and the others."""
    names = sorted({row.group for row in rows})
    return set(names[::2]), set(names[1::2])


def fit_constants(truth: Path, store: PartStore) -> Constants:
    """Each constant is varied by itself, where it lowers the mean error of every other group."""
    best, least = CONSTANTS, math.inf
    for step in (1.0, *STEPS):
        for name in vars(CONSTANTS):
            trial = replace(best, **{name: getattr(best, name) * step})
            rows = read_nanotron(truth, trial)
            fitted, _ = split_groups(rows)
            rows = [row for row in rows if row.rate and row.group in fitted]
            composed = [compose(row.shape, store) for row in rows]
            sleeping = find_sleeping(rows, composed)
            errors = [
                min(1.0, abs(math.log(composed[n].seconds / row.seconds)))
                for n, row in enumerate(rows)
                if is_as_described(n, composed, sleeping)
            ]
            if np.mean(errors) < least:
                best, least = trial, float(np.mean(errors))
    return best


def predict(row: Layout) -> dict[str, Any] | None:
    """Seconds of a step by rehearsals of the whole layout, and what bounds it. None where one failed, or has no time."""
    shape = row.shape
    fewer = sorted({min(shape.passes, shape.pp + 1), min(shape.passes, shape.pp + 3)})
    times = [rehearse(shape, passes) for passes in fewer]
    if any(time is None for time in times):
        return None
    seconds, error = times[-1].seconds_per_step, np.log(times[-1].high_seconds / times[-1].seconds_per_step)
    if shape.passes > fewer[-1]:
        each = (seconds - times[0].seconds_per_step) / (fewer[-1] - fewer[0])
        seconds += each * (shape.passes - fewer[-1])
    return {"seconds": seconds, "error": float(error), "bound_by": times[-1].bound_by}


def rehearse(shape: Shape, passes: int) -> Any:
    options = parse_options(
        ["--size", shape.size, *shape.words, "--batch", str(shape.batch), "--zero", str(shape.zero),
         "--dp", str(shape.dp), "--tp", str(shape.tp), "--pp", str(shape.pp), "--accumulate", str(passes)]
    )  # fmt: skip
    stages = [stage * shape.dp * shape.tp for stage in range(shape.pp)]
    world = shape.dp * shape.tp * shape.pp
    with attention_of(shape.attention):
        cluster = understudy.rehearse_cluster(
            lambda: train(options), device=f"{min(PER_NODE, world)}x{shape.device}", nodes=-(-world // PER_NODE),
            ranks=",".join(map(str, stages)), jobs=1, is_quiet=True, rehearsal=RehearsalOptions(host=shape.host),
            interconnect=Interconnect(latency=shape.latency),
        )  # fmt: skip
    if cluster.time is None:
        print(cluster.headline, shape)
    return cluster.time


def measure_order(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of predictions and measurements."""
    score = ties = count = 0
    for i, (guess, truth) in enumerate(pairs):
        for other_guess, other_truth in pairs[:i]:
            product = (guess - other_guess) * (truth - other_truth)
            count += 1
            score += (product > 0) - (product < 0)
            ties += product == 0
    return score / max(1, count - ties)


def write_errors(name: str, errors: Sequence[float]) -> str:
    found = np.array(errors)
    return (
        f"{name}: {len(found)} rows, mean error {np.mean(np.abs(found)):.1%}, median {np.median(np.abs(found)):.1%}, "
        f"bias {np.mean(found):+.1%}"
    )


def report(rows: Sequence[Layout], composed: Sequence[Composed]) -> None:
    """A table of groups, and errors over all rows. Choices are those of a plan that has rehearsed each row, among those that
    fit: rows that crashed are candidates too, and have no rate."""
    sleeping = find_sleeping(rows, composed)
    errors = [found.seconds / row.seconds - 1 for row, found in zip(rows, composed, strict=True)]
    guesses = [row.samples / found.seconds for row, found in zip(rows, composed, strict=True)]
    groups: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        groups[row.group].append(number)
    print(
        "| group | ran | other version | tau | tau without these | median error without | first choice "
        "| best in first three | ran, and fit or tight |\n|---|---|---|---|---|---|---|---|---|"
    )
    orders, shares, hits = {}, [], 0
    for name, members in sorted(groups.items()):
        ran = [n for n in members if rows[n].rate]
        plain = [n for n in ran if is_as_described(n, composed, sleeping)]
        orders[name] = [
            measure_order([(guesses[n], rows[n].rate) for n in chosen])
            for chosen in (ran, plain, [n for n in plain if n not in sleeping])
        ]
        limit = find_card(rows[members[0]].shape.device).usable
        fitting = [n for n in members if max(composed[n].stage_bytes) * RESERVED <= limit]
        first = sorted(fitting, key=lambda n: -guesses[n])[:3]
        best = max(rows[n].rate for n in members)
        is_in = any(rows[n].rate == best for n in first)
        shares.append(rows[first[0]].rate / best)
        hits += is_in
        error = np.median([abs(errors[n]) for n in plain])
        count = sum(max(composed[n].stage_bytes) <= limit for n in ran)
        print(
            f"| {name} | {len(ran)} | {len(ran) - len(plain)} | {orders[name][0]:.2f} | {orders[name][1]:.2f} "
            f"| {error:.0%} | {shares[-1]:.0%} | {'yes' if is_in else 'no'} | {count} |"
        )
    for names, title in zip((set(orders), *split_groups(rows)), ("all", "fitted", "not fitted"), strict=True):
        mean = np.mean([order for name, order in orders.items() if name in names], axis=0)
        print(
            f"tau, mean of {len(names)} groups, {title}: {mean[0]:.2f}, without rows of the other version {mean[1]:.2f}, "
            f"of rows without sleeps {mean[2]:.2f}"
        )
    print(f"first choice: median {np.median(shares):.0%} of the best; the best in the first three in {hits}")
    ran = [n for n, row in enumerate(rows) if row.rate]
    print(write_errors("seconds, all", [errors[n] for n in ran]))
    if sleeping:
        plain = [n for n in ran if is_as_described(n, composed, sleeping)]
        print(write_errors("seconds, without rows of the other version", [errors[n] for n in plain]))
        print(f"{len(sleeping)} rows sleep, {sum(composed[n].does_sleep for n in ran)} are said to")
    for has_stages, name in ((False, "allocated memory, no pipeline"), (True, "allocated memory, pipelines")):
        chosen = [
            max(composed[n].stage_bytes) / GIB / gib - 1
            for n in ran
            if (gib := rows[n].gib) and has_stages == (rows[n].shape.pp > 1)
        ]
        if chosen:
            print(write_errors(name, chosen))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("truth", nargs="?", default=Path("../shared/truth"), type=Path)
    parser.add_argument("--table", choices=TABLES, default="vtrain")
    parser.add_argument("--parts", type=Path, help="where rehearsals of parts are kept")
    parser.add_argument("--rehearse", type=int, default=0, help="so many rows are rehearsed as a whole, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fit", action="store_true", help="fit nanotron's constants and print them")
    parser.add_argument("--group", default="", help="only rows of groups whose name begins so")
    options = parser.parse_args()
    store = PartStore(options.parts)
    if options.fit:
        print(fit_constants(options.truth, store))
        return
    rows = [row for row in TABLES[options.table](options.truth) if row.group.startswith(options.group)]
    composed = [compose(row.shape, store) for row in rows]
    report(rows, composed)
    ran = [number for number, row in enumerate(rows) if row.rate]
    chosen = random.Random(options.seed).sample(ran, min(options.rehearse, len(ran)))
    errors, differences, inside = [], [], []
    for number in chosen:
        row = rows[number]
        found = predict(row)
        if found is None:
            continue
        seconds = found["seconds"]
        errors.append(seconds / row.seconds - 1)
        differences.append(composed[number].seconds / seconds - 1)
        inside.append(abs(np.log(seconds / row.seconds)) <= found["error"])
        bounds = ", ".join(f"{name} {share:.0%}" for name, share in list(found["bound_by"].items())[:5])
        print(
            f"{errors[-1]:+.0%} {row}: {seconds:.3f} s, measured {row.seconds:.3f} s, "
            f"by parts {composed[number].seconds:.3f} s; {bounds}",
            flush=True,
        )
    if errors:
        print(f"{write_errors('rehearsed', errors)}, {np.mean(inside):.0%} inside the interval")
        print(write_errors("parts against rehearsals", differences))


if __name__ == "__main__":
    main()
