"""Peaks of Megatron-LM's functional tests, rehearsed, against the memory that the tests recorded.

    python tools/measure_megatron.py --truth megatron.json --megatron Megatron-LM [--case gpt] [--steps 3] [--json out.json]

`--truth`: rows with `case`, `card`, `args`, `env`, `world_size` and `mem_max_allocated_bytes` of the last rank, from the
golden values of NVIDIA/Megatron-LM at one commit; `--megatron`: a checkout of that commit. Its own training scripts are
run, on the last rank alone; data and tokenizer of GPT are Megatron's mock ones with the same padded vocabulary. T5 has none:
it reads documents of random words, with a vocabulary as long as that of the tests; rank 0, which makes the index, and the
rank that reads batches for the last one are run, too. Nothing is loaded or saved. Rows with `--transformer-impl local` are
taken: others need Transformer Engine. Writes a table in Markdown to standard output. The checkout needs its C++ helpers
built (`megatron.core.datasets.helpers_cpp`), triton, and Python 3.12 or a `typing` with `override`.

The tests ran with NVIDIA's Apex and Transformer Engine. Apex's kernels have stand-ins. The optimizer is torch's, which
Megatron takes where both are missing. The products of Transformer Engine, which the router of experts uses where they are
there, have a workspace of their own that is missing here: 4 MiB, on Hopper and Blackwell 32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

LEFT_OUT = (
    "--save", "--load", "--data-path", "--vocab-file", "--merge-file", "--split", "--data-cache-path", "--tensorboard-dir",
    "--async-save", "--use-persistent-ckpt-worker", "--use-checkpoint-opt_param-scheduler", "--tokenizer-type",
    "--ckpt-assume-constant-structure", "--exit-interval",
)  # fmt: skip
"""Options of the tests that read or write files."""
GPT2_VOCABULARY = 50257
BERT_VOCABULARY = 28996
SPECIAL_WORDS = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
DOCUMENTS, SENTENCES, SENTENCE = 2000, 8, 80
"""Documents of made-up text, sentences in each, words in each of these."""
MOCK_OPTIONS = "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(GPT2_VOCABULARY)
TEXT_OPTIONS = (
    "--data-path", "text", "--tokenizer-type", "BertWordPieceCase", "--vocab-file", "vocab.txt",
    "--data-cache-path", "cache",
)  # fmt: skip
DEFAULT_RANKS = 8
MiB = 1 << 20
CARDS = {"a100": "a100-80", "h100": "h100", "gb200": "b200", "gb300": "b200", "b200": "b200", "?": "a100-80"}
"""Golden values that name no card are from the time when the tests ran on A100 alone."""


def make_command(row: Mapping[str, Any], checkout: Path, steps: int, report: str) -> list[str]:
    options: list[str] = []
    for name, value in row["args"].items():
        if name not in LEFT_OUT and value is not False:
            options += [name] if value is True else [name, str(value)]
    ranks = row["world_size"] or DEFAULT_RANKS
    per_node = min(ranks, DEFAULT_RANKS)
    script, run, data = "pretrain_gpt.py", {ranks - 1}, MOCK_OPTIONS
    if is_t5(row):
        readers = {0, ranks - row["args"]["--tensor-model-parallel-size"]}
        script, run, data = "examples/t5/pretrain_t5.py", run | readers, TEXT_OPTIONS
    return [
        sys.executable, "-m", "understudy.cli", "run", "--quiet", "--device", CARDS[row["card"]],
        "--nproc-per-node", str(per_node), "--nnodes", str(ranks // per_node),
        "--ranks", ",".join(map(str, sorted(run))),
        "--steps", str(steps), "--json", report, str(checkout / script), *options, *data, "--num-workers", "0",
    ]  # fmt: skip


def is_t5(row: Mapping[str, Any]) -> bool:
    return "t5" in row["case"]


def write_text(folder: Path) -> None:
    """A vocabulary and documents in the formats of BERT's tokenizer and of Megatron's indexed datasets."""
    words = "\n".join((*SPECIAL_WORDS, *(f"word{i}" for i in range(BERT_VOCABULARY - len(SPECIAL_WORDS)))))
    tokenizer = folder / "bert-large-cased"
    tokenizer.mkdir()
    for file, text in {
        tokenizer / "config.json": '{"model_type": "bert"}',
        tokenizer / "tokenizer_config.json": '{"tokenizer_class": "BertTokenizer", "do_lower_case": false}',
        tokenizer / "vocab.txt": words,
        folder / "vocab.txt": words,
    }.items():
        file.write_text(text)
    count = DOCUMENTS * SENTENCES
    tokens = numpy.random.default_rng(0).integers(
        len(SPECIAL_WORDS), BERT_VOCABULARY, count * SENTENCE, numpy.int32
    )
    (folder / "text.bin").write_bytes(tokens.tobytes())
    (folder / "text.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, count, DOCUMENTS + 1)  # version, int32, counts
        + numpy.full(count, SENTENCE, numpy.int32).tobytes()
        + (numpy.arange(count, dtype=numpy.int64) * SENTENCE * tokens.itemsize).tobytes()
        + (numpy.arange(DOCUMENTS + 1, dtype=numpy.int64) * SENTENCES).tobytes()
    )  # fmt: skip


def rehearse(row: Mapping[str, Any], checkout: Path, steps: int) -> tuple[int, str]:
    """Peak of allocated bytes on the last rank, and what went wrong."""
    settings = {name: str(value) for name, value in (row["env"] or {}).items()}
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "run.json")
        if is_t5(row):
            write_text(Path(folder))
        paths = folder, str(checkout), os.environ.get("PYTHONPATH")
        settings["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = make_command(row, checkout, steps, report)
        found = subprocess.run(
            command, cwd=folder, env={**os.environ, **settings}, capture_output=True, text=True, check=False
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
