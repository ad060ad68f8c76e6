"""The sweep over model classes: `python -m tests.models.sweep [--out FILE] [--library L] [names]`.

Each class runs in a process of its own, forked from one that has imported the libraries; one that takes longer than a
minute is ended. A line of JSON is written for each class, and what stands in the file already is not run again, so that a
sweep can be stopped and resumed. `--table` prints the table of a file.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests.models.classes import find_case, list_names
from tests.models.columns import COLUMNS, Eager

SECONDS = 90
Result = dict[str, Any]
"""`name`, and either `not counted` with the reason, or `columns`: "ok", "ok (…)" or what went wrong."""


def try_class(name: str, columns: Iterable[str] = COLUMNS) -> Result:
    """All columns of a class, in this process."""
    warnings.simplefilter("ignore")
    start = time.monotonic()
    try:
        eager = Eager(find_case(name))
    except Exception as error:
        return {"name": name, "not counted": f"{type(error).__name__}: {str(error)[:800]}"}
    found: dict[str, str] = {}
    where: dict[str, str] = {}
    seconds = {"eager": round(time.monotonic() - start, 2)}
    for column in columns:
        start = time.monotonic()
        try:
            note = COLUMNS[column](eager)
            found[column] = f"ok ({note})" if note else "ok"
        except Exception as error:
            found[column] = f"{type(error).__name__}: {str(error)[:600]}"
            where[column] = "".join(traceback.format_exception(error, limit=-6))[-3000:]
        seconds[column] = round(time.monotonic() - start, 2)
    return {"name": name, "columns": found, "seconds": seconds, "where": where}


def run_in_fork(name: str, columns: Iterable[str] = COLUMNS, seconds: float = SECONDS) -> Result:
    """A class in a process of its own: what it leaves behind is gone, and it can't stop the others."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _report(name, columns, write, seconds)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    lines = [json.loads(line) for line in text.splitlines()]
    if lines and "name" in lines[-1]:
        return dict(lines[-1])
    ending = "timeout" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM else f"status {status}"
    done = {column: said for line in lines for column, said in line.items()}
    if not done:
        return {"name": name, "not counted": f"eager: {ending}"}
    return {"name": name, "columns": {**done, **{column: ending for column in columns if column not in done}}}


def _report(name: str, columns: Iterable[str], write: int, seconds: float) -> None:
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        gc.set_threshold(50_000, 20, 100)  # most objects there are belong to the libraries, and stay
        result = try_class(name, columns)
        with os.fdopen(write, "w") as stream:
            stream.write(json.dumps(result) + "\n")
        code = 0
    finally:
        os._exit(code)


def preload() -> None:
    """What every class needs, imported before the first fork."""
    try_class("transformers/LlamaModel", ())
    try_class("transformers/ViTModel", ())


def read_results(path: Path) -> dict[str, Result]:
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines())
    return {line["name"]: line for line in lines}


def is_right(said: str) -> bool:
    return said.startswith("ok")


def write_table(results: Iterable[Result]) -> str:
    """Counts for each column and library."""
    counted = [result for result in results if "columns" in result]
    libraries = sorted({result["name"].partition("/")[0] for result in counted}, reverse=True)
    lines = ["| | " + " | ".join(libraries) + " | all | right |", "|---" * (len(libraries) + 3) + "|"]
    groups = [[r for r in counted if r["name"].startswith(library)] for library in libraries] + [counted]
    lines.append("| classes | " + " | ".join(str(len(group)) for group in groups) + " | |")
    for column in COLUMNS:
        cells = [sum(is_right(r["columns"].get(column, "")) for r in group) for group in groups]
        share = 100 * cells[-1] / max(1, len(counted))
        lines.append(f"| {column} | " + " | ".join(map(str, cells)) + f" | {share:.1f}% |")
    return "\n".join(lines)


def list_failures(results: Iterable[Result]) -> str:
    rows = [
        f"{column:18} {result['name']}: {said.splitlines()[0][:200] if said else ''}"
        for result in results
        for column, said in result.get("columns", {}).items()
        if not is_right(said)
    ]
    return "\n".join(sorted(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("build/models.jsonl"))
    parser.add_argument("--library", action="append")
    parser.add_argument("--column", action="append")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--here", action="store_true", help="run the named classes in this process, and show errors whole")
    options = parser.parse_args()
    results = read_results(options.out)
    columns = options.column or list(COLUMNS)
    if options.here:
        for name in options.names:
            print(json.dumps(try_class(name, columns), indent=1).replace("\\n", "\n"))
        return
    if not options.table:
        torch.set_num_threads(1)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        preload()
        libraries = tuple(options.library or ("timm", "diffusers", "transformers"))
        names = options.names or [name for name in list_names(libraries) if name not in results]
        for name in names:
            results[name] = run_in_fork(name, columns)
            with options.out.open("a") as file:
                file.write(json.dumps(results[name]) + "\n")
            said = results[name]
            wrong = [column for column, text in said.get("columns", {}).items() if not is_right(text)]
            print(name, "not counted" if "not counted" in said else wrong or "ok", flush=True)
    print(list_failures(results.values()))
    print(write_table(results.values()))


if __name__ == "__main__":
    sys.exit(main())
