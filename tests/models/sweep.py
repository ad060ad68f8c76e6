"""The sweep over model classes: `python -m tests.models.sweep [--out FILE] [--library L] [names]`.

Each class runs in a process of its own, forked from one that has imported the libraries; one that takes longer than a
minute and a half is ended. A class that takes eager longer than 15 seconds is not counted. A line of JSON is written for each class, and what stands in the file already is not run again,
so that a sweep can be stopped and resumed. `--table` prints the table of a file.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.forks import prepare_forks, run_in_fork
from tests.models.classes import list_names
from tests.models.columns import COLUMNS, Eager
from tests.models.variants import VARIANTS, find_case

SECONDS = 90
SECONDS_OF_EAGER = 15
"""A class that eager takes longer for is not small in any of the configurations, and is not counted."""
Result = dict[str, Any]
"""`name`, and either `not counted` with the reason, or `columns`: "ok", "ok (…)" or what went wrong."""


def try_class(name: str, columns: Iterable[str] = COLUMNS) -> Result:
    """All columns of a class, in this process."""
    return _gather(name, columns, _try_columns(name, columns), "")


def run_class(name: str, columns: Iterable[str] = COLUMNS, seconds: float = SECONDS) -> Result:
    """All columns of a class, in a process of its own."""
    pieces, ending = run_in_fork(partial(_try_columns, name, columns), seconds)
    return _gather(name, columns, pieces, ending)


class TooSlow(BaseException):
    """Not an error that the search for inputs would go on after."""


@contextmanager
def limit_eager(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` inside after so many seconds of the program's own processor time."""

    def stop(*_: object) -> None:
        raise TooSlow(f"eager takes longer than {seconds} seconds")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _try_columns(name: str, columns: Iterable[str]) -> Iterator[Result]:
    """`not counted`, or a piece for eager, and for each column what it said."""
    warnings.simplefilter("ignore")
    start = time.monotonic()
    try:
        with limit_eager(SECONDS_OF_EAGER):
            eager = Eager(find_case(name))
    except (Exception, TooSlow) as error:
        yield {"not counted": f"{type(error).__name__}: {str(error)[:800]}"}
        return
    yield {"column": "eager", "seconds": round(time.monotonic() - start, 2)}
    for column in columns:
        start = time.monotonic()
        where = ""
        try:
            note = COLUMNS[column](eager)
            said = f"ok ({note})" if note else "ok"
        except Exception as error:
            said = f"{type(error).__name__}: {str(error)[:600]}"
            where = "".join(traceback.format_exception(error, limit=-6))[-3000:]
        yield {"column": column, "said": said, "where": where, "seconds": round(time.monotonic() - start, 2)}


def _gather(name: str, columns: Iterable[str], pieces: Iterable[Result], ending: str) -> Result:
    """One result of all pieces. Columns that a process did not come to have its ending in their place."""
    pieces = list(pieces)
    if not pieces or "not counted" in pieces[0]:
        return {"name": name, "not counted": f"eager: {ending}" if not pieces else pieces[0]["not counted"]}
    found = {piece["column"]: piece for piece in pieces}
    return {
        "name": name,
        "columns": {column: found[column]["said"] if column in found else ending for column in columns},
        "seconds": {column: piece["seconds"] for column, piece in found.items()},
        "where": {column: piece["where"] for column, piece in found.items() if piece.get("where")},
    }


def preload() -> None:
    """What every class needs, imported before the first fork."""
    for name in ("transformers/LlamaModel", "transformers/ViTModel"):
        try_class(name)
    prepare_forks()


def with_variants(names: Iterable[str]) -> list[str]:
    return [f"{name}+{variant}" for name in names for variant in VARIANTS]


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
    said = Counter(
        (column, said)
        for result in counted
        for column, said in result["columns"].items()
        if said.startswith("ok (")
    )
    return "\n".join([*lines, "", *(f"{column}: {count} {text}" for (column, text), count in said.items())])


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
    parser.add_argument(
        "--variants", action="store_true", help="of the named classes, run the ways that are not the default"
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument(
        "--here", action="store_true", help="run the named classes in this process, and show errors whole"
    )
    options = parser.parse_args()
    results = read_results(options.out)
    columns = options.column or list(COLUMNS)
    if options.here:
        for name in options.names:
            print(json.dumps(try_class(name, columns), indent=1).replace("\\n", "\n"))
        return
    if not options.table:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        preload()
        libraries = tuple(options.library or ("timm", "diffusers", "transformers"))
        names = options.names or [name for name in list_names(libraries) if name not in results]
        for name in with_variants(names) if options.variants else names:
            results[name] = run_class(name, columns)
            with options.out.open("a") as file:
                file.write(json.dumps(results[name]) + "\n")
            said = results[name]
            wrong = [column for column, text in said.get("columns", {}).items() if not is_right(text)]
            print(name, "not counted" if "not counted" in said else wrong or "ok", flush=True)
    print(list_failures(results.values()))
    print(write_table(results.values()))


if __name__ == "__main__":
    sys.exit(main())
