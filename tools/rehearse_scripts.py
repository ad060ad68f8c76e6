"""Rehearse public scripts, and write the table of verdicts (docs/scripts.md).

    python -m tools.rehearse_scripts --repositories FOLDER [--python PYTHON] [--only TEXT] [--write docs/scripts.md]

`tools/scripts.toml` is the list: repository, script, arguments, card. FOLDER holds a checkout of each repository, in a
folder named `owner+name`, with its commit in `owner+name.commit`. Nothing of these repositories is part of this project.
`--python` is a Python in which understudy and the packages that the scripts import are installed.

Each script is run by `understudy run` in a process of its own, with a limit of time. The folder of the script is compared
before and after: a rehearsal changes nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import resource
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomllib

LIST = Path(__file__).with_name("scripts.toml")
SECONDS = 300
"""The longest time for one script."""


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
    needs: str = ""
    """A file that is not public or not here, without which the script cannot start."""

    @property
    def name(self) -> str:
        return f"{self.repository}: {self.script} {self.args}".strip()


@dataclass(frozen=True)
class Result:
    script: Script
    outcome: str
    """fits, tight, does not fit, no verdict, failed, time-out, or blocked by data."""
    text: str
    sanity: str
    seconds: float
    changed: tuple[str, ...] = ()

    @property
    def has_verdict(self) -> bool:
        return self.outcome in ("fits", "tight", "does not fit")


def read_list() -> list[Script]:
    return [Script(**row) for row in tomllib.loads(LIST.read_text())["script"]]


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
        return Result(script, "blocked by data", f"needs {script.needs}", "", 0.0)
    start = root / script.folder if script.folder is not None else path.parent
    return run(script, path, start, python)


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


def run(script: Script, path: Path, start: Path, python: str) -> Result:
    before = snapshot(start)
    with open_terminal() as terminal, tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [python, "-m", "understudy", "run", "--device", script.device, "--json", str(report)]
        command += [*script.options.split(), os.path.relpath(path, start), *script.args.split()]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        root = path.parents[len(Path(script.script).parts) - 1]
        own = (str(root), str(root / "src")) if script.installed else ()
        paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *own)))
        try:
            done = subprocess.run(
                command, cwd=start, capture_output=True, text=True, errors="replace", timeout=SECONDS,
                stdin=terminal, env={**os.environ, "PYTHONPATH": paths},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Result(script, "time-out", f"no verdict after {SECONDS} s", "", SECONDS)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        data = json.loads(report.read_text()) if report.exists() else {}
    after = snapshot(start)
    changed = tuple(sorted(name for name in {*before, *after} if before.get(name) != after.get(name)))
    outcome = data.get("verdict", "failed") if done.returncode in (0, 3, 4) else "failed"
    return Result(script, outcome, headline(done), sanity_of(done.stdout), seconds, changed)


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


def sanity_of(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip().startswith("rests on")), "")


def table(results: list[Result], repositories: Path) -> Iterator[str]:
    judged = [result for result in results if result.outcome != "blocked by data"]
    good = [result for result in judged if result.has_verdict]
    times = sorted(result.seconds for result in good)
    yield "# Public scripts, rehearsed"
    yield ""
    yield "Written by `python -m tools.rehearse_scripts`; the list is `tools/scripts.toml`. The scripts are unmodified."
    yield ""
    yield (
        f"{len(results)} scripts of {len({result.script.repository for result in results})} repositories; "
        f"{len(results) - len(judged)} blocked by data; a verdict for {len(good)} of {len(judged)} "
        f"({len(good) / max(len(judged), 1):.0%}); median {times[len(times) // 2] if times else 0:.1f} s of processor time; "
        f"{sum(bool(result.changed) for result in results)} changed a file."
    )
    for repository in sorted({result.script.repository for result in results}):
        commit = repositories / f"{repository.replace('/', '+')}.commit"
        yield ""
        yield f"## {repository} {commit.read_text()[:10] if commit.exists() else ''}".rstrip()
        yield ""
        yield "| script | card | outcome | s | what was run |"
        yield "|---|---|---|---|---|"
        for result in results:
            if result.script.repository == repository:
                yield row(result)


def row(result: Result) -> str:
    script = result.script
    cells = [
        f"`{script.script} {script.args}`".replace(" `", "`"),
        script.device,
        result.text,
        f"{result.seconds:.1f}",
        result.sanity,
    ]
    return "| " + " | ".join(cell.replace("|", "\\|")[:240] for cell in cells) + " |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.rehearse_scripts", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--repositories", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="", help="only scripts whose repository or path contains this text")
    parser.add_argument("--part", default="1/1", help="1/2: every second script, from the first")
    parser.add_argument("--write", type=Path, help="the page to write (else: print)")
    options = parser.parse_args(argv)
    results: list[Result] = []
    first, parts = (int(number) for number in options.part.split("/"))
    for script in read_list()[first - 1 :: parts]:
        if options.only not in script.name:
            continue
        started = time.monotonic()
        result = rehearse(script, options.repositories, options.python)
        results.append(result)
        print(
            f"{result.outcome:16} {time.monotonic() - started:6.1f} s  {script.name}\n    {result.text}",
            flush=True,
            file=sys.stderr,
        )
        for name in result.changed:
            print(f"    changed: {name}", file=sys.stderr)
    page = "\n".join(table(results, options.repositories)) + "\n"
    if options.write is None:
        print(page, end="")
    else:
        options.write.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
