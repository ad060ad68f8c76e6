"""Peaks of Megatron-LM's functional tests, rehearsed, against the memory that the tests recorded.

    python tools/measure_megatron.py --truth megatron.json --megatron Megatron-LM [--case gpt] [--steps 3] [--json out.json]

`--truth`: rows with `case`, `card`, `args`, `env`, `world_size` and `mem_max_allocated_bytes` of the last rank, from the
golden values of NVIDIA/Megatron-LM at one commit; `--megatron`: a checkout of that commit. Its own `pretrain_gpt.py` is
run, on the last rank alone; data and tokenizer are Megatron's mock ones with the same padded vocabulary, and nothing is
loaded or saved. Rows with `--transformer-impl local` are taken: others need Transformer Engine. Writes a table in Markdown
to standard output. The checkout needs its C++ helpers built (`megatron.core.datasets.helpers_cpp`), and triton.

The tests ran with the kernels of NVIDIA's Apex. Its softmax kernels are modules in C++ that Megatron imports; modules with
the same names stand in for them here, with one result forward and none backward, as those kernels have. Norms and the
optimizer are torch's, which Megatron takes where Apex is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LEFT_OUT = (
    "--save", "--load", "--data-path", "--vocab-file", "--merge-file", "--split", "--data-cache-path", "--tensorboard-dir",
    "--async-save", "--use-persistent-ckpt-worker", "--use-checkpoint-opt_param-scheduler", "--tokenizer-type",
    "--ckpt-assume-constant-structure", "--exit-interval",
)  # fmt: skip
"""Options of the tests that read or write files."""
GPT2_VOCABULARY = 50257
SOFTMAX = """
import torch
def get_batch_per_block(queries, keys, batch, heads): return 4
def forward(scores, *others): return torch.softmax(scores, -1)
def backward(gradient, result, scale): return gradient.mul_(1.0)
"""
KERNELS = ("scaled_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda")
DEFAULT_RANKS = 8
MiB = 1 << 20
CARDS = {"a100": "a100-80", "h100": "h100", "gb200": "b200", "gb300": "b200", "b200": "b200"}


def make_command(args: Mapping[str, Any], card: str, ranks: int, steps: int, report: str) -> list[str]:
    options: list[str] = []
    for name, value in args.items():
        if name not in LEFT_OUT and value is not False:
            options += [name] if value is True else [name, str(value)]
    per_node = min(ranks, DEFAULT_RANKS)
    return [
        sys.executable, "-m", "understudy.cli", "run", "--quiet", "--device", CARDS[card],
        "--nproc-per-node", str(per_node), "--nnodes", str(ranks // per_node), "--ranks", str(ranks - 1),
        "--steps", str(steps), "--json", report, "pretrain_gpt.py", *options,
        "--no-persist-layer-norm",
        "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(GPT2_VOCABULARY), "--num-workers", "0",
    ]  # fmt: skip


def rehearse(row: Mapping[str, Any], checkout: Path, steps: int) -> tuple[int, str]:
    """Peak of allocated bytes on the last rank, and what went wrong."""
    ranks = row["world_size"] or DEFAULT_RANKS
    settings = {name: str(value) for name, value in (row["env"] or {}).items()}
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "run.json")
        for name in KERNELS:
            Path(folder, f"{name}.py").write_text(SOFTMAX)
        settings["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        command = make_command(row["args"], row["card"], ranks, steps, report)
        found = subprocess.run(
            command, cwd=checkout, env={**os.environ, **settings}, capture_output=True, text=True, check=False
        )
        if not os.path.exists(report):
            return 0, found.stderr.strip().rpartition("\n")[2]
        cluster = json.loads(Path(report).read_text())
    if cluster["verdict"] in ("failed", "no verdict"):
        return 0, cluster["headline"]
    return cluster["rows"][-1]["peak"]["allocated_bytes"], ""


def choose_rows(path: Path, case: str) -> list[dict[str, Any]]:
    return [
        row
        for row in json.loads(path.read_text())["rows"]
        if row["args"]
        and row["args"].get("--transformer-impl") == "local"
        and row["mem_max_allocated_bytes"]
        and row["card"] in CARDS
        and "t5" not in row["case"]
        and case in row["case"]
    ]


def measure(rows: Sequence[dict[str, Any]], checkout: Path, steps: int) -> list[dict[str, Any]]:
    """Rows of one case and card have the same arguments, and are rehearsed once."""
    known: dict[str, tuple[int, str]] = {}
    for row in rows:
        key = json.dumps([row["args"], row["env"], row["card"], row["world_size"]])
        if key not in known:
            known[key] = rehearse(row, checkout, steps)
            print(f"{row['case']} on {row['card']}: {known[key]}", file=sys.stderr, flush=True)
        row["rehearsed"], row["failure"] = known[key]
    return list(rows)


def write_table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| case | card | runs | published MiB | rehearsed MiB | error |",
        "|---|---|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["card"], row["rehearsed"]), []).append(row)
    for (case, card, rehearsed), alike in groups.items():
        published = sorted(row["mem_max_allocated_bytes"] for row in alike)
        shown = f"{published[0] / MiB:,.0f}"
        if len(published) > 1:
            shown += f" to {published[-1] / MiB:,.0f}"
        error = (
            f"{rehearsed / statistics.median(published) - 1:+.2%}" if rehearsed else alike[0]["failure"][:60]
        )
        lines.append(f"| {case} | {card} | {len(alike)} | {shown} | {rehearsed / MiB:,.0f} | {error} |")
    errors = [abs(row["rehearsed"] / row["mem_max_allocated_bytes"] - 1) for row in rows if row["rehearsed"]]
    if errors:
        shares = [sum(error <= limit for error in errors) / len(rows) for limit in (0.01, 0.02)]
        lines.append(
            f"\n{len(errors)} of {len(rows)} rows ran: within 1% in {shares[0]:.0%}, within 2% in {shares[1]:.0%} of all; "
            f"median error {statistics.median(errors):.2%}, largest {max(errors):.2%}."
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--truth", type=Path, required=True, help="the published rows, as JSON")
    parser.add_argument("--megatron", type=Path, required=True, help="a checkout of Megatron-LM")
    parser.add_argument("--case", default="", help="a part of the names of cases to take")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path, help="the rows with what was rehearsed")
    options = parser.parse_args()
    rows = measure(choose_rows(options.truth, options.case), options.megatron.resolve(), options.steps)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(write_table(rows))


if __name__ == "__main__":
    main()
