"""Rehearse public scripts, and write the table of verdicts (docs/scripts.md).

    python -m tools.rehearse_scripts --repositories FOLDER [--python PYTHON] [--only TEXT] [--earlier]
                                     [--results FILE] [--write docs/scripts.md]

`tools/scripts.toml` is the list: repository, script, arguments, card. FOLDER holds a checkout of each repository, in a
folder named `owner+name`, with its commit in `owner+name.commit`. Nothing of these repositories is part of this project.
`--python` is a Python in which understudy and the packages that the scripts import are installed. `--results` keeps the
results in a file: rows that are in it are not run again, unless `--again` names a part of their names or outcomes. Rows
without a result, and scripts whose repository is not in FOLDER, keep what the page says of them. `--earlier` runs the rows
that the page marks as found by an earlier version, first one of each repository.

Each script is run by `understudy run` in a process of its own, with a limit of processor time. The folder of the
script is compared before and after: a rehearsal changes nothing.
"""

from __future__ import annotations

import argparse
import array
import datetime
import fcntl
import gzip
import importlib
import json
import os
import pty
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomllib

from understudy.report.rehearsal import Sanity
from understudy.report.text import write_sanity

LIST = Path(__file__).with_name("scripts.toml")
SECONDS = 300
"""The longest processor time of one script; and ten times as long on the clock, because machines are shared."""


@dataclass(frozen=True)
class Script:
    """One row of the list."""

    repository: str
    script: str
    args: str = ""
    device: str = "a100-80g"
    folder: str | None = None
    """Where it is started; the script's own folder if None."""
    options: str = ""
    """Options of `understudy run`."""
    installed: bool = False
    """Whether its users install the repository itself (pip install -e .), so that its packages can be imported."""
    packages: tuple[str, ...] = ()
    """Releases that it asks for, where the newest ones do not have what it uses: ("timm==0.4.12",)."""
    files: tuple[tuple[str, str], ...] = ()
    """Small data files that are written by hand for it, beside the script, and what is in them: see `write_file`."""
    needs: str = ""
    """A file that is not public or not here, without which the script cannot start."""
    broken: str = ""
    """Why the script fails in plain Python, too: it is not counted."""

    @property
    def name(self) -> str:
        return f"{self.repository}: {self.script} {self.args}".strip()


@dataclass(frozen=True)
class Result:
    script: Script
    outcome: str
    """fits, tight, does not fit, no verdict, failed, time-out, blocked by data, or fails by itself."""
    text: str
    sanity: str = ""
    seconds: float = 0.0
    changed: tuple[str, ...] = ()
    peak_bytes: int = 0
    least_bytes: int = 0
    """Parameters, gradients and optimizer state, by formula: the second way to know."""
    is_earlier: bool = False
    """Found by an earlier version, and read from the page."""

    @property
    def has_verdict(self) -> bool:
        return self.outcome in ("fits", "tight", "does not fit")


def read_list() -> list[Script]:
    return [make_script(row) for row in tomllib.loads(LIST.read_text())["script"]]


def make_script(row: dict[str, Any]) -> Script:
    files = row.get("files", ())
    pairs = files.items() if isinstance(files, dict) else files
    return Script(
        **{
            **row,
            "packages": tuple(row.get("packages", ())),
            "files": tuple((path, kind) for path, kind in pairs),
        }
    )


WORDS = (
    "A long time ago in a land of rivers and hills there was a small house by the sea.\n"
    + "".join(map(chr, range(32, 127)))
    + "\n"
)


def write_file(path: Path, kind: str) -> None:
    """`text N`: N lines of words. `tokens N`: N numbers of 16 bits below 60. `shard N`: the same below a header of llm.c.
    `gzip N`: N characters of words, compressed. `pictures N W H`: a folder of N JPEG files of that size. `lines N LINE`:
    the same line N times. `series N A,B`: a CSV file of N hours, with a column `date` and columns of numbers. Anything
    else is the text of the file."""
    name, *numbers = kind.split(" ")
    if name == "pictures":
        count, width, height = (int(number) for number in numbers)
        path.mkdir(parents=True, exist_ok=True)
        image = importlib.import_module("PIL.Image").new("RGB", (width, height))
        for number in range(count):
            image.save(path / f"{number:05}.jpg")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "text":
        path.write_text(WORDS * int(numbers[0]))
    elif name == "gzip":
        path.write_bytes(gzip.compress((WORDS * (int(numbers[0]) // len(WORDS) + 1)).encode(), 1))
    elif name == "lines":
        count, _, line = kind.removeprefix("lines ").partition(" ")
        path.write_text(f"{line}\n" * int(count))
    elif name == "series":
        path.write_text("".join(f"{line}\n" for line in write_series(int(numbers[0]), numbers[1].split(","))))
    elif name in ("tokens", "shard"):
        count = int(numbers[0])
        header = array.array("i", [20240520, 1, count, *[0] * 253]).tobytes() if name == "shard" else b""
        path.write_bytes(header + array.array("H", [i % 60 for i in range(count)]).tobytes())
    else:
        path.write_text(kind)


def write_series(count: int, columns: list[str]) -> Iterator[str]:
    yield ",".join(("date", *columns))
    first = datetime.datetime(2016, 7, 1)
    for hour in range(count):
        numbers = (f"{(hour * (k + 3)) % 97 / 10}" for k in range(len(columns)))
        yield ",".join((str(first + datetime.timedelta(hours=hour)), *numbers))


@contextmanager
def write_files(script: Script, root: Path) -> Iterator[None]:
    """Inside, the hand-written files of a script are beside it."""
    paths = [root / path for path, _ in script.files]
    for path, (_, kind) in zip(paths, script.files, strict=True):
        write_file(path, kind)
    try:
        yield
    finally:
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def install(packages: tuple[str, ...], repositories: Path, python: str) -> str:
    """The folder of these releases, which goes before those of the environment. Their own needs are not installed."""
    folder = repositories / "packages" / "+".join(packages).replace("/", "-")
    if not folder.exists():
        pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
        subprocess.run(pip, check=True)
    return str(folder)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of each file below a folder."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            state = path.lstat()
            found[str(path)] = (state.st_size, state.st_mtime_ns)
    return found


def rehearse(script: Script, repositories: Path, python: str) -> Result:
    root = repositories / script.repository.replace("/", "+")
    path = root / script.script
    if script.needs:
        return Result(script, "blocked by data", f"needs {script.needs}")
    if script.broken:
        return Result(script, "fails by itself", script.broken)
    start = root / script.folder if script.folder is not None else path.parent
    packages = (install(script.packages, repositories, python),) if script.packages else ()
    with write_files(script, root):
        return run(script, path, start, python, packages)


@contextmanager
def open_terminal() -> Iterator[int]:
    """A terminal of 24 lines as standard input: some scripts ask for its size (`stty size`)."""
    other, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    try:
        yield terminal
    finally:
        os.close(other)
        os.close(terminal)


def run(script: Script, path: Path, start: Path, python: str, packages: tuple[str, ...] = ()) -> Result:
    before = snapshot(start)
    with open_terminal() as terminal, tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [python, "-m", "understudy", "run", "--device", script.device, "--json", str(report)]
        command += [*script.options.split(), os.path.relpath(path, start), *script.args.split()]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        root = path.parents[len(Path(script.script).parts) - 1]
        own = (str(root), str(root / "src")) if script.installed else ()
        paths = os.pathsep.join(filter(None, (*packages, os.environ.get("PYTHONPATH"), *own)))
        try:
            done = subprocess.run(
                command, cwd=start, capture_output=True, text=True, errors="replace", timeout=10 * SECONDS,
                stdin=terminal, env={**os.environ, "PYTHONPATH": paths}, preexec_fn=limit_processor_time,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Result(script, "time-out", f"no verdict after {SECONDS} s", seconds=SECONDS)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        data = json.loads(report.read_text()) if report.exists() else {}
    after = snapshot(start)
    changed = tuple(sorted(name for name in {*before, *after} if before.get(name) != after.get(name)))
    outcome = data.get("verdict", "failed") if done.returncode in (0, 3, 4) else "failed"
    measured = data.get("peak", {}).get("allocated_bytes", 0), data.get("sanity", {}).get("least_bytes", 0)
    return Result(script, outcome, headline(done), sanity_of(data), seconds, changed, *measured)


def limit_processor_time() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))


def headline(done: subprocess.CompletedProcess[str]) -> str:
    """The verdict; for a script that failed, the last line of its traceback that names an exception."""
    verdicts = [line for line in done.stdout.splitlines() if line.startswith(VERDICTS)]
    raised = [
        line
        for line in done.stderr.splitlines()
        if re.match(r"[A-Za-z_.]+(Error|Exception|Exit|Interrupt)\b", line)
    ]
    found = raised[-1:] if done.returncode not in (0, 3, 4) else verdicts
    return next(iter(found or verdicts), f"exit code {done.returncode}: {done.stderr.strip()[-200:]}").strip()


VERDICTS = ("fits", "tight", "does not fit", "no verdict")


def sanity_of(data: dict[str, Any]) -> str:
    """What the verdict rests on, as it stands below it."""
    return "; ".join(write_sanity(Sanity(**data["sanity"]))) if "sanity" in data else ""


def table(results: list[Result], repositories: Path, commits: dict[str, str]) -> Iterator[str]:
    blocked = [result for result in results if result.outcome == "blocked by data"]
    broken = [result for result in results if result.outcome == "fails by itself"]
    judged = [result for result in results if result not in blocked and result not in broken]
    good = [result for result in judged if result.has_verdict]
    times = sorted(result.seconds for result in good if result.seconds)
    yield "# Public scripts, rehearsed"
    yield ""
    yield (
        "Written by `python -m tools.rehearse_scripts`; the list is `tools/scripts.toml`. The scripts are unmodified, run "
        "without a network, in one environment with current releases of their libraries, or with the releases that are "
        "named. Data sets and models that are not here are made up (`--offline-data`); small data files that were written "
        "by hand are named. Blocked by data are scripts that need files which are neither public nor small. Scripts that "
        "fail in plain Python with a current torch, too, are listed with the reason and not counted."
    )
    yield ""
    yield (
        "The last column is a second way to know: the peak of allocated memory that was measured, and what parameters, "
        "gradients and optimizer state need by formula. No true peak is below it; a run that contradicts it has no verdict."
    )
    yield ""
    yield (
        f"{len(results)} scripts of {len({result.script.repository for result in results})} repositories; "
        f"{len(blocked)} blocked by data, {len(broken)} fail by themselves; a verdict for {len(good)} of {len(judged)} "
        f"({len(good) / max(len(judged), 1):.0%}); median {times[len(times) // 2] if times else 0:.1f} s of processor time; "
        f"{sum(result.peak_bytes < result.least_bytes for result in good)} verdicts contradict the second way to know; "
        f"{sum(bool(result.changed) for result in results)} changed a file."
    )
    earlier = sum(result.is_earlier for result in results)
    if earlier:
        yield ""
        yield (
            f"{earlier} rows, marked with *, were found by an earlier version and not run again. Those without seconds were "
            'run in one process, under the Python overlay. A row "not rehearsed yet" counts as no verdict. Seconds were '
            "measured on a machine that was busy."
        )
    for repository in sorted({result.script.repository for result in results}):
        commit = repositories / f"{repository.replace('/', '+')}.commit"
        known = commit.read_text()[:10] if commit.exists() else commits.get(repository, "")
        yield ""
        yield f"## {repository} {known}".rstrip()
        yield ""
        yield "| script | card | outcome | s | what was run | peak ≥ least |"
        yield "|---|---|---|---|---|---|"
        for result in results:
            if result.script.repository == repository:
                folder = f"{repositories.resolve()}/"
                yield row(result).replace(f"{folder}{repository.replace('/', '+')}/", "").replace(folder, "")


def row(result: Result) -> str:
    script = result.script
    cells = [
        write_name(script),
        script.device,
        "".join((result.text, *name_help(script), " *" if result.is_earlier else "")),
        f"{result.seconds:.1f}" if result.seconds else "",
        result.sanity,
        compare(result),
    ]
    return "| " + " | ".join(map(escape, cells)) + " |"


def escape(cell: str) -> str:
    return cell.replace("|", "\\|")[:400]


def name_help(script: Script) -> Iterator[str]:
    """What a script was given beyond the repository and the environment."""
    if script.packages:
        yield f"; with {', '.join(script.packages)}"
    if script.files:
        yield f"; with {', '.join(path for path, _ in script.files)} written by hand"


def compare(result: Result) -> str:
    """The measured peak beside what parameters, gradients and optimizer state need by formula."""
    if not result.has_verdict or not result.least_bytes:
        return ""
    sign = "≥" if result.peak_bytes >= result.least_bytes else "CONTRADICTS"
    return f"{result.peak_bytes / MIB:,.1f} {sign} {result.least_bytes / MIB:,.1f} MiB"


MIB = 1 << 20


def read_page(path: Path | None) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The cells of the rows of a page, by repository and first cell, and the commits of the repositories."""
    rows: dict[str, list[str]] = {}
    commits: dict[str, str] = {}
    repository = ""
    for line in path.read_text().splitlines() if path is not None and path.is_file() else ():
        if line.startswith("## "):
            repository, _, commits[repository] = line.removeprefix("## ").partition(" ")
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            rows[f"{repository} {cells[0]}"] = cells
    return rows, commits


def write_name(script: Script) -> str:
    return f"`{script.script} {script.args}`".replace(" `", "`")


def find_row(script: Script, rows: dict[str, list[str]]) -> list[str] | None:
    return rows.get(f"{script.repository} {escape(write_name(script))}")


def read_row(script: Script, rows: dict[str, list[str]]) -> Result:
    """The result that a page has of a script, without what is added to the text."""
    if script.needs or script.broken:
        return rehearse(script, Path(), "")
    cells = find_row(script, rows)
    if cells is None:
        return Result(script, "failed", "not rehearsed yet", is_earlier=True)
    _, _, text, seconds, sanity, compared = (cell.replace("\\|", "|") for cell in cells)
    text = text.removesuffix(" *").removesuffix("".join(name_help(script)))
    outcome = next((verdict for verdict in VERDICTS if text.startswith(verdict)), "failed")
    sizes = [int(float(size.replace(",", "")) * MIB) for size in re.findall(r"[\d,]+\.\d", compared)]
    return Result(script, outcome, text, sanity, float(seconds or 0), (), *sizes, is_earlier=True)


def list_earlier(scripts: list[Script], rows: dict[str, list[str]]) -> list[Script]:
    """The scripts that can run, and whose rows the page marks with a star."""
    found = [(script, find_row(script, rows)) for script in scripts if not (script.needs or script.broken)]
    return [script for script, cells in found if cells is not None and cells[2].endswith(" *")]


def order_by_repository(scripts: list[Script]) -> list[Script]:
    """The first script of each repository, then the second of each."""
    seen: dict[str, int] = {}
    order = []
    for script in scripts:
        seen[script.repository] = place = seen.get(script.repository, 0) + 1
        order.append((place, script))
    return [script for _, script in sorted(order, key=lambda pair: pair[0])]


def read_results(path: Path | None) -> dict[str, Result]:
    """The results of earlier runs, by the whole row of the list: a row that was changed is run again."""
    if path is None or not path.exists():
        return {}
    found = [Result(**{**row, "script": make_script(row["script"])}) for row in json.loads(path.read_text())]
    return {repr(result.script): result for result in found}


def write_results(path: Path | None, results: dict[str, Result]) -> None:
    if path is None:
        return
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = {**read_results(path), **results}
        path.write_text(json.dumps([asdict(result) for result in merged.values()], indent=1))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.rehearse_scripts", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="", help="only scripts whose repository or path contains this text")
    parser.add_argument("--part", default="1/1", help="1/2: every second script, from the first")
    parser.add_argument(
        "--earlier", action="store_true", help="only rows of the page that an earlier version found"
    )
    parser.add_argument("--write", type=Path, help="the page to write (else: print)")
    parser.add_argument("--results", type=Path, help="a JSON file that keeps the results")
    parser.add_argument(
        "--again", help="of the kept results: run those again whose name or outcome contains it"
    )
    options = parser.parse_args(argv)
    known = read_results(options.results)
    first, parts = (int(number) for number in options.part.split("/"))
    rows, commits = read_page(options.write)
    scripts = read_list()[first - 1 :: parts]
    for script in order_by_repository(list_earlier(scripts, rows) if options.earlier else scripts):
        kept = known.get(repr(script))
        is_again = (
            options.again is not None
            and kept is not None
            and options.again in f"{script.name} {kept.outcome}"
        )
        is_here = (options.repositories / script.repository.replace("/", "+")).is_dir()
        if options.only not in script.name or not is_here or (kept is not None and not is_again):
            continue
        started = time.monotonic()
        result = rehearse(script, options.repositories, options.python)
        known[repr(script)] = result
        write_results(options.results, {repr(script): result})
        print(
            f"{result.outcome:16} {time.monotonic() - started:6.1f} s  {script.name}\n    {result.text}",
            flush=True,
            file=sys.stderr,
        )
        for name in result.changed:
            print(f"    changed: {name}", file=sys.stderr)
    known |= read_results(options.results)
    results = [known.get(repr(script)) or read_row(script, rows) for script in read_list()]
    page = "\n".join(table(results, options.repositories, commits)) + "\n"
    if options.write is None:
        print(page, end="")
    else:
        options.write.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
