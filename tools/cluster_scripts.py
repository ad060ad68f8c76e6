"""Rehearse one folder of distributed scripts through each launcher, and write the table of docs/clusters.md.

    python -m tools.cluster_scripts --folder FOLDER [--python PYTHON] [--results FILE] [--only TEXT]
                                    [--write docs/clusters.md]

FOLDER has the scripts of `PROGRAMS`, which are run unmodified. `--python` is a Python in which understudy, DeepSpeed and
Megatron-core are installed. `--results` keeps the results in a file: runs that are in it are not repeated.

A run counts if the verdict is "fits", all 8 ranks were run, and there is no fault. Seconds are of the processor: all ranks
and the import of torch. A cell is empty if the results have no such run, and "–" if the launcher does not fit the program.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANKS = 8
SECONDS = 1800
TORCHRUN, MODULE, ACCELERATE, DEEPSPEED, PLAIN, ITSELF = (
    "torchrun", "-m torch.distributed.run", "accelerate launch", "deepspeed", "--nproc-per-node 8", "the script itself"
)  # fmt: skip
LAUNCHERS: dict[str, list[str]] = {
    TORCHRUN: ["torchrun", "--nproc-per-node", str(RANKS)],
    ACCELERATE: ["accelerate", "launch", "--multi_gpu", "--num_processes", str(RANKS)],
    DEEPSPEED: ["deepspeed", "--num_gpus", str(RANKS)],
    MODULE: ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)],
    PLAIN: ["--nproc-per-node", str(RANKS)],
    ITSELF: [],
}
"""What stands in front of the script."""
ANY = (TORCHRUN, ACCELERATE, DEEPSPEED, MODULE, PLAIN)
WITHOUT_ARGUMENTS = (TORCHRUN, MODULE, PLAIN)
"""The launcher of DeepSpeed adds an argument, and a script that reads its first one takes it for its own."""
PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "s01_ddp.py": ("DistributedDataParallel, autocast, a `DistributedSampler`", ANY),
    "s02_fsdp1.py": ("FSDP1 (`FullyShardedDataParallel`, mixed precision)", ANY),
    "s03_fsdp2.py": ("FSDP2 on the meta device, mixed precision", ANY),
    "s04_hsdp.py": ("HSDP", ANY),
    "s05_tp.py": ("tensor parallelism (`parallelize_module`)", ANY),
    "s06_tp_fsdp2.py": ("tensor parallelism and FSDP2", ANY),
    "s07_sp.py": ("sequence parallelism, `loss_parallel`", ANY),
    "s08_cp.py": ("context parallelism (`context_parallel`, ring attention)", ANY),
    "s09_pp.py": ("a pipeline (`PipelineStage`, 1F1B), messages of objects included", ANY),
    "s10_ep.py": ("expert parallelism: routing, uneven all-to-all, experts", ANY),
    "s11_collectives.py": ("collectives, objects, messages, groups, with their values asserted", ANY),
    "s12_ac_fsdp2.py": ("FSDP2 with checkpoints and unsynchronised gradients", ANY),
    "s13_zero1.py": ("ZeRO-1 (`ZeroRedundancyOptimizer`)", ANY),
    "s14_dcp.py": ("distributed checkpoints, saved and loaded", ANY),
    "s15_hf_fsdp.py": ("Hugging Face Trainer with FSDP2", ANY),
    "s15b_hf_ddp.py": ("Hugging Face Trainer with DistributedDataParallel", ANY),
    "s16_accelerate.py": ("accelerate", ANY),
    "--config_file acc_fsdp.yaml s16_accelerate.py": ("accelerate, its configuration of FSDP2", (ACCELERATE,)),
    "--config_file acc_ds.yaml s16_accelerate.py": ("accelerate, its configuration of DeepSpeed (ZeRO-3)", (ACCELERATE,)),
    "s17_lightning.py": ("Lightning with FSDP", (ITSELF, *WITHOUT_ARGUMENTS)),
    "s17_lightning.py ddp": ("Lightning with DistributedDataParallel", (ITSELF, *WITHOUT_ARGUMENTS)),
    "s18_deepspeed.py": ("DeepSpeed, ZeRO-3 with `zero.Init`", ANY),
    "s18b_deepspeed2.py": ("DeepSpeed, ZeRO-2", ANY),
    "s19_megatron.py": ("Megatron-core, tensor parallel", ANY),
}  # fmt: skip
BEGIN, END = "<!-- launchers: begin -->", "<!-- launchers: end -->"


def run(python: str, folder: Path, launcher: str, program: str) -> dict[str, Any]:
    """The verdict of one run, its faults, and seconds of the processor."""
    front = LAUNCHERS[launcher]
    if program.startswith("--config_file"):
        front = front[:2]
    with tempfile.TemporaryDirectory() as scratch:
        file = os.path.join(scratch, "cluster.json")
        options = ["--quiet", "--device", f"{RANKS}xh100", "--json", file]
        command = [python, "-m", "understudy", "run", *options, *front, *program.split()]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = json.loads(Path(file).read_text()) if os.path.isfile(file) else {}
    return {
        "verdict": found.get("verdict", f"exit code {ended.returncode}"),
        "ranks": len(found.get("rows", [])),
        "faults": [f"{fault['kind']}: {fault['text']}" for fault in found.get("faults", [])],
        "seconds": round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 1),
        "last_words": "" if found.get("verdict") == "fits" else (ended.stdout + ended.stderr)[-2000:],
    }


def write_cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return ""
    if found["faults"] or found["ranks"] != RANKS:
        return f"{found['verdict']}, {found['ranks']} ranks, {len(found['faults'])} faults"
    return f"{found['seconds']:.0f}" if found["verdict"] == "fits" else str(found["verdict"])


def write_table(results: dict[str, dict[str, Any]]) -> str:
    lines = [f"| program | {' | '.join(f'`{name}`' if name != ITSELF else name for name in LAUNCHERS)} |"]
    lines.append("|---|" + "--:|" * len(LAUNCHERS))
    for program, (title, launchers) in PROGRAMS.items():
        cells = [
            write_cell(results.get(f"{launcher} {program}")) if launcher in launchers else "–"
            for launcher in LAUNCHERS
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(path: Path, table: str) -> None:
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--only", default="", help="runs whose launcher and script contain this")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    kept: Path | None = options.results
    results = json.loads(kept.read_text()) if kept is not None and kept.is_file() else {}
    for launcher in LAUNCHERS:
        for program, (_, launchers) in PROGRAMS.items():
            name = f"{launcher} {program}"
            if launcher in launchers and name not in results and options.only in name:
                results[name] = run(options.python, options.folder, launcher, program)
                print(name, write_cell(results[name]), flush=True)
                if kept is not None:
                    kept.write_text(json.dumps(results, indent=1))
    if options.write is not None:
        write_page(options.write, write_table(results))


if __name__ == "__main__":
    main()
