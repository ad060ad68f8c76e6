"""Layouts over many cards against published figures: vTrain's and nanotron's tables, by `examples/decoder.py`.

    python -m tools.fit_kernels.layouts [TRUTH] [--table vtrain] [--most N] [--seed N]

One rank of each stage is rehearsed, and the stages are replayed together. A step of many passes is extrapolated from two of
fewer: once a pipeline is full, each further pass takes as long as the one before it. What differs from the originals:

vTrain      Megatron-DeepSpeed of 2022 in float16, with its own fused kernels; here bfloat16, attention in plain operators,
            FSDP2 without sharding in the place of its data parallelism, sequence parallelism beside tensor parallelism. Its
            Python between calls is in the host: "heavy"; torch's tensor parallelism has as much of its own, in more calls
nanotron    its own modules; here FSDP2 for ZeRO, torch's tensor parallelism and pipelines
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Not used here: what ranks need is imported once, before they are forked.
import understudy
import understudy.simulation.sharding
from examples.decoder import SIZES, parse_options
from examples.decoder import main as train
from understudy.report.runs import RehearsalOptions

PER_NODE = 8
HOST = "heavy"
"""Of both frameworks: some 4 ms of Python for a layer, whatever its size."""


@dataclass(frozen=True)
class Layout:
    """One row. `words`: options of the example beside those of passes; `passes`: of a step."""

    group: str
    device: str
    words: tuple[str, ...]
    dp: int
    tp: int
    pp: int
    passes: int
    seconds: float
    host: str | None = None

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


def read_vtrain(truth: Path) -> list[Layout]:
    found = []
    for row in json.loads((truth / "time" / "vtrain-single.json").read_text())["rows"]:
        width, layers, heads = (int(row[name]) for name in ("hidden size", "# layers", "attention heads"))
        name = f"{width}x{layers}"
        SIZES[name] = (layers, width, heads)
        dp, tp, pp = (int(row[f"{kind} parallelism"]) for kind in ("data", "tensor", "pipeline"))
        batch = int(row["micro batch"])
        vocabulary = -(-50257 // (128 * tp)) * 128 * tp
        words = ("--size", name, "--context", row["sequence length"], "--batch", str(batch), "--zero", "0",
                 "--vocabulary", str(vocabulary), "--dp", str(dp), "--tp", str(tp), "--pp", str(pp),
                 "--plain-attention", "--dropout", "0.1", "--bias", "--even-stages",
                 "--no-sequence-parallel")  # fmt: skip
        passes = int(row["global batch"]) // (dp * batch)
        found.append(
            Layout(
                "vtrain",
                "a100-40",
                words,
                dp,
                tp,
                pp,
                passes,
                float(row["iteration time (ms)"]) * 1e-3,
                HOST,
            )
        )
    return found


def read_nanotron(truth: Path) -> list[Layout]:
    found = []
    for row in json.loads((truth / "memory" / "ultrascale.json").read_text())["rows"]:
        if not row["tokens_per_s"]:
            continue
        words = ("--size", f"llama-{row['model'].lower()}", "--context", "4096", "--batch", str(row["mbs"]),
                 "--zero", str(row["zero"]), "--vocabulary", "131072",
                 "--dp", str(row["dp"]), "--tp", str(row["tp"]), "--pp", str(row["pp"]))  # fmt: skip
        # Some rows have fewer samples in a step than the 256 that the table states: their throughput is that of theirs.
        seconds = row["dp"] * row["mbs"] * row["grad_acc"] * 4096 / row["tokens_per_s"]
        group = f"{row['model']} on {row['gpus']}"
        found.append(
            Layout(group, "h100", words, row["dp"], row["tp"], row["pp"], row["grad_acc"], seconds, "heavy")
        )
    return found


TABLES = {"vtrain": read_vtrain, "nanotron": read_nanotron}


def predict(layout: Layout, **settings: Any) -> dict[str, Any] | None:
    """Seconds of a step, and what bounds it. None where the rehearsal failed, or has no time."""
    fewer = sorted({min(layout.passes, layout.pp + 1), min(layout.passes, layout.pp + 3)})
    times = [rehearse(layout, passes, **settings) for passes in fewer]
    if any(time is None for time in times):
        return None
    seconds, error = times[-1].seconds_per_step, np.log(times[-1].high_seconds / times[-1].seconds_per_step)
    if layout.passes > fewer[-1]:
        each = (seconds - times[0].seconds_per_step) / (fewer[-1] - fewer[0])
        seconds += each * (layout.passes - fewer[-1])
    return {"seconds": seconds, "error": float(error), "bound_by": times[-1].bound_by}


def rehearse(layout: Layout, passes: int, **settings: Any) -> Any:
    options = parse_options([*layout.words, "--accumulate", str(passes)])
    stages = [stage * layout.dp * layout.tp for stage in range(layout.pp)]
    nodes = -(-layout.world_size // PER_NODE)
    cluster = understudy.rehearse_cluster(
        lambda: train(options), device=f"{min(PER_NODE, layout.world_size)}x{layout.device}", nodes=nodes,
        ranks=",".join(map(str, stages)), jobs=1, is_quiet=True, rehearsal=RehearsalOptions(host=layout.host), **settings,
    )  # fmt: skip
    if cluster.time is None:
        print(cluster.headline, layout)
    return cluster.time


def measure_order(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau-b of predictions and measurements."""
    score = ties = count = 0
    for i, (guess, truth) in enumerate(pairs):
        for other_guess, other_truth in pairs[:i]:
            product = (guess - other_guess) * (truth - other_truth)
            count += 1
            score += (product > 0) - (product < 0)
            ties += product == 0
    return score / max(1, count - ties)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("truth", nargs="?", default=Path("../shared/truth"), type=Path)
    parser.add_argument("--table", choices=TABLES, default="vtrain")
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--group", default="", help="only rows of groups whose name begins so")
    options = parser.parse_args()
    rows = [row for row in TABLES[options.table](options.truth) if row.group.startswith(options.group)]
    random.Random(options.seed).shuffle(rows)
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    errors, inside = [], []
    for row in rows[: options.most]:
        found = predict(row)
        if found is None:
            continue
        seconds = found["seconds"]
        groups[row.group].append((seconds, row.seconds))
        errors.append(seconds / row.seconds - 1)
        inside.append(abs(np.log(seconds / row.seconds)) <= found["error"])
        bounds = ", ".join(f"{name} {share:.0%}" for name, share in list(found["bound_by"].items())[:5])
        shape = f"dp {row.dp} tp {row.tp} pp {row.pp}, {row.passes} passes of {row.words[5]}"
        times = f"{seconds:.3f} s, measured {row.seconds:.3f} s"
        print(f"{errors[-1]:+.0%} {row.group} {row.words[1]} {shape}: {times}; {bounds}", flush=True)
    print(f"{len(errors)} rows: mean error {np.mean(np.abs(errors)):.1%}, median {np.median(np.abs(errors)):.1%}, "
          f"bias {np.mean(errors):+.1%}, {np.mean(inside):.0%} inside the interval")  # fmt: skip
    for name, pairs in sorted(groups.items()):
        if len(pairs) > 2:
            print(f"{name}: {len(pairs)} rows, tau {measure_order(pairs):.2f}")


if __name__ == "__main__":
    main()
