"""Sharded training against published figures: llm-foundry's tables, by `examples/decoder.py`.

    python -m tools.fit_kernels.clusters [TRUTH] [--most N]

One rank is rehearsed. What differs from the original: FSDP2 in place of Composer's FSDP1, torch's attention and AdamW
(fused) in place of llm-foundry's, at most three passes of a step; rows with fp8 are left out. Attention is as fast as its
kernels of 2023 were.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import understudy
from examples.decoder import main as train
from examples.decoder import parse_options
from tools.fit_kernels.generations import TRITON, attention_of

CARDS = {"a100_40gb": "a100-40", "a100_80gb": "a100-80", "h100_80gb": "h100"}
MOST_PASSES = 3


def read_rows(truth: Path) -> list[dict[str, Any]]:
    rows = json.loads((truth / "time" / "llm-foundry.json").read_text())["rows"]
    return [row for row in rows if row["Precision"] != "amp_fp8"]


def make_words(row: dict[str, Any], passes: int) -> list[str]:
    """The options of `examples/decoder.py`."""
    words = ["--size", row["Model"], "--context", row["SeqLen (T)"], "--batch", row["MicroBatchSize"]]
    words += ["--accumulate", str(passes)]
    words += ["--checkpoint"] if row["Activation Checkpointing"] == "True" else []
    words += ["--keep-gathered"] if row["Sharding Strategy"] == "SHARD_GRAD_OP" else []
    return words + (["--pure"] if row["Precision"] == "bf16" else [])


def make_facts(truth: Path) -> list[dict[str, Any]]:
    """Rows of one node, as rows of step times: what is exposed of their communication is little."""
    found = []
    for row in read_rows(truth):
        if row["# GPUs"] == "8":
            passes = min(MOST_PASSES, int(row["GradAccum"]))
            tokens = passes * int(row["MicroBatchSize"]) * int(row["SeqLen (T)"])
            card = CARDS[row["GPU"]]
            found.append(
                {
                    "kind": "training", "source": "llm-foundry", "model": f"mpt {row['Model']}",
                    "context": int(row["SeqLen (T)"]), "batch": int(row["MicroBatchSize"]), "card": card,
                    "device": f"8x{card}", "precision": row["Precision"], "words": make_words(row, passes),
                    "phase": "sharded", "seconds": tokens / float(row["Throughput (T/s/GPU)"]),
                }
            )  # fmt: skip
    return found


def predict(row: dict[str, Any]) -> Any:
    """The estimate of a step, scaled to all of its passes."""
    passes = min(MOST_PASSES, int(row["GradAccum"]))
    words = make_words(row, passes)
    world = int(row["# GPUs"])
    os.environ.update(
        RANK="0", WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1"
    )
    card = CARDS[row["GPU"]]
    with attention_of(TRITON):
        return understudy.rehearse(train, parse_options(words), device=f"{min(8, world)}x{card}").time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("truth", nargs="?", default=Path("../shared/truth"), type=Path)
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--skip", type=int, default=1, help="take every so many rows")
    options = parser.parse_args()
    errors = []
    inside = []
    for row in read_rows(options.truth)[:: options.skip][: options.most]:
        time = predict(row)
        measured = float(row["Throughput (T/s/GPU)"])
        error = time.tokens_per_second / measured - 1
        errors.append(error)
        low, high = (time.seconds_per_step / bound for bound in (time.high_seconds, time.low_seconds))
        inside.append(low <= measured / time.tokens_per_second <= high)
        bounds = ", ".join(f"{name} {share:.0%}" for name, share in list(time.bound_by.items())[:5])
        print(
            f"{error:+.0%} {row['Model']} {row['SeqLen (T)']} {row['# GPUs']}x{row['GPU']} "
            f"{'checkpoint ' if row['Activation Checkpointing'] == 'True' else ''}"
            f"MFU {time.mfu:.1%} ({row['MFU']}): {bounds}",
            flush=True,
        )
    print(f"{len(errors)} rows: mean error {np.mean(np.abs(errors)):.1%}, median {np.median(np.abs(errors)):.1%}, "
          f"bias {np.mean(errors):+.1%}, {np.mean(inside):.0%} inside the interval")  # fmt: skip


if __name__ == "__main__":
    main()
