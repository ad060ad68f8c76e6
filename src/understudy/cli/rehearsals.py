"""Many rehearsals of variants of one script, on any executor of `concurrent.futures`.

    variant = Variant("train.py", ("--steps", "2"), {"model.py": "… changed text …"}, {"PYTORCH_CUDA_ALLOC_CONF": "…"})
    for variant, outcome in rehearse_all([variant, …], "h100", make_executor(workers=2)): …

Each rehearsal is a process of its own. The user's files are never changed: a variant runs in a folder of links to them, in
which the changed files are its own. A worker that is killed is replaced, and its rehearsal runs again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from understudy.errors import UnderstudyError
from understudy.report.rehearsal import DOES_NOT_FIT, Rehearsal

MOST_ATTEMPTS = 3
"""How often a rehearsal is begun whose worker was killed."""
SECONDS = 600
"""A rehearsal that takes longer is given up."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A script with some of its files changed. `files` are new texts by path; `environment` adds to the variables."""

    script: str
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, hash=False)
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rehearsal, or what the script said when it failed."""

    rehearsal: Rehearsal | None
    error: str = ""

    @property
    def fits(self) -> bool:
        return self.rehearsal is not None and self.rehearsal.verdict != DOES_NOT_FIT

    @property
    def needed(self) -> int:
        """Reserved bytes at the peak; where it does not fit, those of a card without a limit."""
        assert self.rehearsal is not None
        return self.rehearsal.peak.reserved_bytes


def rehearse_variant(variant: Variant, device: str | None) -> Outcome:
    """Run `understudy run` on it. Called in workers, which may be on other machines."""
    with tempfile.TemporaryDirectory(prefix="understudy-") as folder:
        script = variant.script
        if variant.files:
            script = str(mirror(Path(variant.script), variant.files, Path(folder) / "script"))
        result = Path(folder) / "rehearsal.json"
        command = [sys.executable, "-m", "understudy.cli", "run", "--json", str(result), *variant.options]
        command += [*(["--device", device] if device else []), script, *variant.arguments]
        environment = {**os.environ, **variant.environment}
        try:
            ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"no result after {SECONDS} seconds")
        if ended.returncode in (0, 3) and result.exists():
            return Outcome(Rehearsal.from_json(result.read_text()))
        lines = [line for line in ended.stderr.strip().splitlines() if line.strip()]
        return Outcome(None, "\n".join(lines[-12:]) or f"exit code {ended.returncode}")


def mirror(script: Path, files: Mapping[str, str], folder: Path) -> Path:
    """A folder of links to what is beside the script, with other texts for some files; the path of the script in it."""
    home = script.absolute().parent
    # Python looks for modules beside the file that a link to a script leads to: the script itself is a copy.
    changed: dict[tuple[str, ...], str] = {(script.name,): script.read_text(encoding="utf-8")}
    for name, text in files.items():
        path = Path(name).absolute()
        if not path.is_relative_to(home):
            raise UnderstudyError(f"{name} is not in the folder of {script}: it can't be changed for a rehearsal")
        changed[path.relative_to(home).parts] = text
    _mirror_folder(home, changed, folder)
    return folder / script.name


def _mirror_folder(home: Path, changed: Mapping[tuple[str, ...], str], folder: Path) -> None:
    folder.mkdir(parents=True)
    for entry in home.iterdir():
        inside = {parts[1:]: text for parts, text in changed.items() if parts[0] == entry.name}
        if () in inside:
            (folder / entry.name).write_text(inside[()], encoding="utf-8")
        elif inside:
            _mirror_folder(entry, inside, folder / entry.name)
        elif entry.name != "__pycache__":
            (folder / entry.name).symlink_to(entry)


# executors


def make_executor(workers: int, dask: str | None = None) -> Executor:
    """A pool of processes, or the workers of a Dask cluster."""
    if dask is None:
        return ProcessPoolExecutor(workers)
    try:
        from distributed import Client  # why: an extra that few have
    except ImportError:
        raise UnderstudyError("--dask needs the package distributed: pip install understudy[dask]") from None
    try:
        connect: Callable[..., Any] = Client
        client = connect(dask, timeout=10, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise UnderstudyError(f"--dask {dask}: no cluster answers ({type(error).__name__})") from None
    return _ClusterExecutor(client)


class _ClusterExecutor(Executor):
    """The workers of a Dask cluster, which begins the rehearsals of a lost worker again by itself."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._inner: Executor = client.get_executor(retries=MOST_ATTEMPTS, pure=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._inner.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._inner.shutdown(wait=wait)
        self._client.close()


def rehearse_all(
    variants: Sequence[Variant],
    device: str | None,
    renew: Callable[[], Executor],
    work: Callable[[Variant, str | None], Outcome] = rehearse_variant,
) -> Iterator[tuple[int, Outcome]]:
    """(number of the variant, outcome), as they come. `renew` makes the executor, and another one where a pool breaks."""
    waiting = dict.fromkeys(range(len(variants)), 0)
    while waiting:
        executor = renew()
        try:
            futures: dict[Future[Any], int] = {executor.submit(work, variants[i], device): i for i in waiting}
            for future in as_completed(futures):
                number = futures[future]
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    # All of the pool's rehearsals end with it; those that were not done are begun again.
                    waiting[number] += 1
                    if waiting[number] < MOST_ATTEMPTS:
                        continue
                    outcome = Outcome(None, f"its worker was killed {MOST_ATTEMPTS} times")
                del waiting[number]
                yield number, outcome
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class Progress:
    """A line on a terminal; nothing elsewhere."""

    total: int
    done: int = 0
    stream: Any = field(default_factory=lambda: sys.stderr)

    def show(self, text: str) -> None:
        if self.stream.isatty():
            filled = 24 * self.done // max(self.total, 1)
            line = f"[{'#' * filled}{'.' * (24 - filled)}] {self.done}/{self.total} {text}"
            self.stream.write(f"\r\x1b[K{line[:78]}")
            self.stream.flush()

    def advance(self, text: str) -> None:
        self.done += 1
        self.show(text)

    def clear(self) -> None:
        if self.stream.isatty():
            self.stream.write("\r\x1b[K")
            self.stream.flush()


