"""Compares the simulated H100 with torch's own host code, request by request.

    python -m tests.oracle.card --real PYTHON [--simulated PYTHON] [--group GROUP] [--memory MIB] [NAME ...]

PYTHON is that of an environment with a build of torch for CUDA. No GPU is needed: torch runs there on a CUDA
runtime that launches nothing (`runtime.c`). The simulation runs in `--simulated`, by default this environment;
the two should have the same release of torch. PYTORCH_CUDA_ALLOC_CONF is for both sides.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.oracle.card.build import NoOracle, build_runtime
from tests.oracle.card.compare import compare_case, write_table
from tests.oracle.card.record import GROUPS

_ROOT = Path(__file__).parents[3]
# The runtime has no plans of cuDNN: attention goes to the kernels that are torch's own.
_SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.oracle.card", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--real", type=Path, required=True, help="python with a build of torch for CUDA")
    parser.add_argument(
        "--simulated", type=Path, default=Path(sys.executable), help="python for the simulation"
    )
    parser.add_argument("--group", choices=tuple(GROUPS), action="append", help="default: all")
    parser.add_argument("--memory", type=int, help="MiB that the allocator has, in the place of an H100's")
    parser.add_argument("--verbose", action="store_true", help="each case, with the first differences")
    parser.add_argument("names", nargs="*", help="only cases whose name has one of these in it")
    return parser.parse_args(arguments)


def _find_site_packages(python: Path) -> Path:
    """Where that python has its torch; torch is not imported, its libraries may be missing."""
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s else '')"
    try:
        origin = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoOracle(f"{python} does not run: {error}") from error
    if not origin:
        raise NoOracle(f"{python} has no torch")
    return Path(origin).parents[1]


def _record(
    python: Path, kind: str, group: str, names: list[str], out: Path, settings: dict[str, str]
) -> Any:
    command = [str(python), "-m", "tests.oracle.card.record", kind, group, str(out), *names]
    subprocess.run(command, check=True, cwd=_ROOT, env={**os.environ, **_SETTINGS, **settings})
    return json.loads(out.read_text())


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            libraries = build_runtime(_find_site_packages(options.real), folder)
        except NoOracle as missing:
            print(f"skipped: {missing}")
            return 0
        preload = {"LD_PRELOAD": ":".join(map(str, libraries))}
        source = {"PYTHONPATH": str(_ROOT / "src")}
        if options.memory is not None:
            limit = {"CARD_BYTES": str(options.memory << 20), "CARD_CONTEXT_BYTES": "0"}
            preload, source = preload | limit, source | limit
        for group in options.group or GROUPS:
            real = _record(options.real, "real", group, options.names, folder / "real.json", preload)
            simulated = _record(
                options.simulated, "simulated", group, options.names, folder / "simulated.json", source
            )
            print(f"{group}: torch {real['torch']} against the simulation with {simulated['torch']}")
            pairs = ((name, real["cases"][name], simulated["cases"][name]) for name in real["cases"])
            print(
                write_table([compare_case(*pair, verbose=options.verbose) for pair in pairs], options.verbose)
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
