"""Many rehearsals of variants of one script, on any executor of `concurrent.futures`.

    variant = Variant("train.py", ("--steps", "2"), {"model.py": "… changed text …"}, {"PYTORCH_CUDA_ALLOC_CONF": "…"})
    with Workers(count=2) as workers:
        for number, outcome in rehearse_all([variant, …], "h100", workers): …

Each rehearsal is a process of its own; those of a pool are forks of a worker that has imported torch once. The user's files
are never changed: a variant runs in a folder of links to them, in which the changed files are its own. A worker that is
killed is replaced, and its rehearsal runs again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from understudy.cli.commands import INTERRUPTED
from understudy.cli.noted_reads import READS_VARIABLE, read_noted_files
from understudy.errors import UnderstudyError
from understudy.report.cluster_rehearsal import KIND, ClusterRehearsal
from understudy.report.rehearsal import FITS, TIGHT, Rehearsal
from understudy.simulation.sandbox.private_folders import make_private_folder

MOST_ATTEMPTS = 3
"""How often a rehearsal is begun whose worker was killed."""
SECONDS = 600
"""A rehearsal that takes longer is given up."""
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process, or of its sandbox, that something has killed: mostly a machine without memory."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A script with some of its files changed. `files` are new texts by path; `environment` adds to the variables."""

    script: str
    arguments: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict, hash=False)
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    options: tuple[str, ...] = ()
    keeps_requests: bool = False
    """Whether the outcome has every request of memory."""
    launcher: tuple[str, ...] = ()
    """Words before the script: `accelerate launch --use_fsdp`."""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The script and its imports, by path, for machines without these files."""
    keeps_reads: bool = False
    """Whether the outcome names the files that the run has read."""
    seconds: float = SECONDS
    """Time limit."""
    module: str = ""
    """Run with `-m`; `script` is its file."""
    configurations: Mapping[str, str] = field(default_factory=dict, hash=False)
    """New texts of configuration files that the command line names, by path as it is written there."""
    reads_parser: bool = False
    """End the script where it parses its command line: the outcome has the options that its parser shows."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The rehearsal, or the error output of the script."""

    rehearsal: Rehearsal | None
    error: str = ""
    requests: Sequence[int] = ()
    """Memory requests on the first card, in order: allocated bytes, and freed bytes as negative numbers."""
    cluster: ClusterRehearsal | None = None
    """The rehearsal of a script on several ranks; `rehearsal` is that of its worst rank."""
    reads: Sequence[str] = ()
    parsers: Sequence[Mapping[str, Any]] = ()
    """The options of the script's parser, if requested."""
    was_killed: bool = False
    """Whether a signal ended the rehearsal, or its worker."""
    is_accepted: bool = True
    """Whether `understudy run` ended with exit code 0: not if the verdict is `tight` with --strict, or a step too slow."""

    @property
    def fits(self) -> bool:
        is_fitting = self.rehearsal is not None and self.rehearsal.verdict in (FITS, TIGHT)
        return is_fitting and self.is_accepted

    @property
    def reserved_bytes(self) -> int:
        """Reserved bytes at the peak. If the run does not fit: those on a card without a limit."""
        assert self.rehearsal is not None
        return self.rehearsal.peak.reserved_bytes


def rehearse_variant(variant: Variant, device: str | None) -> Outcome:
    """Run `understudy run` on it. Called in workers, which may be on other machines."""
    with make_private_folder() as folder:
        script = variant.script
        if variant.sources and not os.path.exists(script):
            script = str(
                write_sources(Path(script), {**variant.sources, **variant.files}, Path(folder) / "script")
            )
        elif variant.files:
            script = str(mirror(Path(variant.script), variant.files, Path(folder) / "script"))
        moved = os.path.join(os.path.dirname(script), ""), os.path.join(os.path.dirname(variant.script), "")
        result, requests, reads, parsers, output = (
            Path(folder) / name for name in ("rehearsal.json", "requests", "reads", "parsers", "output")
        )
        words = ["run", "--quiet", "--json", str(result), *variant.options]
        words += ["--requests", str(requests)] if variant.keeps_requests else []
        words += ["--parsers", str(parsers)] if variant.reads_parser else []
        words += ["--device", device] if device else []
        program = [
            *variant.launcher,
            *(["-m", variant.module] if variant.module else [script]),
            *variant.arguments,
        ]
        words += place_configurations(program, variant.configurations, Path(folder) / "configurations")
        run = _run_in_fork if _can_fork() else _run_in_new_process
        noting = {READS_VARIABLE: str(reads)} if variant.keeps_reads else {}
        code = run(words, {**variant.environment, **noting}, output, variant.seconds)
        if code is None:
            return Outcome(None, f"no result after {variant.seconds:g} seconds")
        if parsers.exists():
            return Outcome(None, parsers=json.loads(parsers.read_text(encoding="utf-8")))
        if code in (0, 3) and result.exists():
            sizes = array("q", requests.read_bytes()) if requests.exists() else ()
            copied, original = (json.dumps(place)[1:-1] for place in moved)
            text = result.read_text(encoding="utf-8").replace(copied, original)
            outcome = _read_outcome(text, sizes, read_noted_files(reads, moved))
            return replace(outcome, is_accepted=code == 0)
        said = output.read_text(encoding="utf-8", errors="replace").replace(moved[0], moved[1])
        lines = [line for line in said.splitlines() if line.strip()]
        return Outcome(None, "\n".join(lines[-12:]) or f"exit code {code}", was_killed=code in KILLED)


def _read_outcome(text: str, requests: Sequence[int], reads: Sequence[str]) -> Outcome:
    if json.loads(text).get("kind") != KIND:
        return Outcome(Rehearsal.from_json(text), requests=requests, reads=reads)
    cluster = ClusterRehearsal.from_json(text)
    return Outcome(cluster.worst.rehearsal, requests=requests, cluster=cluster, reads=reads)


def _can_fork() -> bool:
    """In a worker of a pool that does nothing else. A fork of a process with threads may wait forever for one of them."""
    return (
        hasattr(os, "fork") and multiprocessing.parent_process() is not None and threading.active_count() == 1
    )


def _run_in_fork(
    words: list[str], environment: Mapping[str, str], output: Path, seconds: float
) -> int | None:
    """The exit code of `understudy` with these words; None after too long a time."""
    import torch  # why: import the modules of rehearsals once for this worker

    import understudy.report.runs  # why: as above
    import understudy.simulation.scripts  # noqa: F401  # why: as above

    torch.compiler.reset()  # imports the compiler, which optimizers ask for
    process = multiprocessing.get_context("fork").Process(
        target=_run_as_child, args=(words, environment, str(output))
    )
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return None
    return process.exitcode


def _run_as_child(words: list[str], environment: Mapping[str, str], output: str) -> None:
    from understudy.cli import main  # why: it imports this module's users

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.environ.update(environment)
    with (
        os.fdopen(file, "w", encoding="utf-8", errors="replace") as both,
        redirect_stdout(both),
        redirect_stderr(both),
    ):
        code = main(words)
    sys.exit(code)


def _run_in_new_process(
    words: list[str], environment: Mapping[str, str], output: Path, seconds: float
) -> int | None:
    """As `_run_in_fork`, by another interpreter."""
    with output.open("w") as file:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "understudy.cli", *words],
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, env={**os.environ, **environment}, timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
    return ended.returncode


def mirror(script: Path, files: Mapping[str, str], folder: Path) -> Path:
    """Fill a folder with links to the neighbours of the script, and replaced files. Return the path of the script in
    it."""
    home = script.absolute().parent
    # Python looks for modules beside the file that a link to a script leads to: the script itself is a copy.
    changed: dict[tuple[str, ...], str] = {(script.name,): script.read_text(encoding="utf-8")}
    for name, text in files.items():
        path = Path(name).absolute()
        if not path.is_relative_to(home):
            raise UnderstudyError(
                f"{name} is outside of the folder of {script} and can't be changed for a rehearsal"
            )
        changed[path.relative_to(home).parts] = text
    _mirror_folder(home, changed, folder)
    return folder / script.name


def place_configurations(words: Sequence[str], texts: Mapping[str, str], folder: Path) -> list[str]:
    """The words with the paths of files that hold these texts, each beside links to the neighbours of the original."""
    found = list(words)
    for number, (name, text) in enumerate(texts.items()):
        path, place = Path(name).absolute(), folder / str(number)
        if path.parent.is_dir():
            _mirror_folder(path.parent, {(path.name,): text}, place)
        else:  # on another machine
            place.mkdir(parents=True)
        new = place / path.name
        new.write_text(text, encoding="utf-8")
        found = [
            str(new) if w == name else f"{w[: -len(name)]}{new}" if w.endswith(f"={name}") else w
            for w in found
        ]
    return found


def write_sources(script: Path, sources: Mapping[str, str], folder: Path) -> Path:
    """The script and its modules on a machine that does not have them; the path of the script there."""
    home = script.parent
    for name, text in sources.items():
        path = folder / os.path.relpath(name, home)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
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
        return ProcessPoolExecutor(workers, initializer=_end_when_interrupted)
    try:
        from distributed import Client  # why: an extra that few have
    except ImportError:
        raise UnderstudyError(
            "--dask requires the package distributed: pip install understudy[dask]"
        ) from None
    try:
        connect: Callable[..., Any] = Client
        client = connect(dask, timeout=10, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise UnderstudyError(f"--dask {dask}: can't connect to a cluster ({type(error).__name__})") from None
    return _ClusterExecutor(client)


def _end_when_interrupted() -> None:
    """Called in each worker of a pool. An interrupt ends its rehearsal as well, without a traceback."""

    def end(*signal_and_frame: object) -> None:
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)


class Workers:
    """An executor for all rehearsals of a command, made when it is first needed, and anew where it breaks."""

    def __init__(self, count: int, dask: str | None = None) -> None:
        self.count = count
        self._dask = dask
        self._executor: Executor | None = None

    def executor(self) -> Executor:
        if self._executor is None:
            self._executor = make_executor(self.count, self._dask)
        return self._executor

    def count_slots(self) -> int:
        """How many rehearsals can run at a time."""
        executor = self.executor()
        return executor.count_threads() if isinstance(executor, _ClusterExecutor) else self.count

    def end(self) -> None:
        """Waits for the threads of the pool: one that still closes its pipes while Python ends prints a traceback."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is not None:
            self.interrupt()
        self.end()

    def interrupt(self) -> None:
        """A terminal interrupts the workers of a pool as well, `kill -INT` does not."""
        if self._dask is not None:
            return
        for worker in multiprocessing.active_children():
            if worker.pid is not None:
                os.kill(worker.pid, signal.SIGINT)


class _ClusterExecutor(Executor):
    """The workers of a Dask cluster, which begins the rehearsals of a lost worker again by itself."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._inner: Executor = client.get_executor(retries=MOST_ATTEMPTS, pure=False)

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[Any]:
        return self._inner.submit(fn, *args, **kwargs)

    def count_threads(self) -> int:
        """The threads of the present workers."""
        return max(1, sum(self._client.nthreads().values()))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._inner.shutdown(wait=wait and not cancel_futures)
        self._client.close()


class Queue:
    """Rehearsals on workers, given one by one; what has finished comes back in the order in which it does.

    queue.add(0, variant)
    for number, outcome in queue.wait(): …

    A killed worker ends the pool, and the rehearsal that caused it is unknown: those that were running are started again,
    one at a time, until each has ended or has killed its worker `attempts` times.
    """

    def __init__(
        self,
        workers: Workers,
        device: str | None,
        work: Callable[[Variant, str | None], Outcome] = rehearse_variant,
        attempts: int = MOST_ATTEMPTS,
    ) -> None:
        self._workers, self._device, self._work, self._most = workers, device, work, attempts
        self._variants: dict[int, Variant] = {}
        self._attempts: dict[int, int] = {}
        self._running: dict[Future[Any], int] = {}
        self._suspects: list[int] = []

    def __len__(self) -> int:
        return len(self._running) + len(self._suspects)

    def add(self, number: int, variant: Variant) -> None:
        self._variants[number] = variant
        if self._suspects:
            self._suspects.append(number)
        else:
            self._start(number)

    def wait(self) -> list[tuple[int, Outcome]]:
        """Until something has finished; nothing only where nothing is left."""
        finished: list[tuple[int, Outcome]] = []
        while not finished and len(self):
            if self._suspects and not self._running:
                self._start(self._suspects.pop(0))
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for future in sorted(done, key=lambda future: self._running[future]):
                finished += self._take(future)
        return finished

    def _start(self, number: int) -> None:
        try:
            future = self._submit(number)
        except BrokenProcessPool:
            if self._running:  # they report it as well
                self._suspects.append(number)
                return
            self._workers.end()
            future = self._submit(number)
        self._running[future] = number

    def _submit(self, number: int) -> Future[Any]:
        return self._workers.executor().submit(self._work, self._variants[number], self._device)

    def _take(self, future: Future[Any]) -> list[tuple[int, Outcome]]:
        number = self._running.pop(future, None)
        if number is None:  # of a pool that broke
            return []
        try:
            outcome: Outcome = future.result()
        except BrokenProcessPool:
            suspects = [number, *self._running.values()]
            self._running.clear()
            self._workers.end()
            self._suspects += suspects
            if len(suspects) > 1:
                return []
            outcome = Outcome(None, was_killed=True)
            self._suspects.remove(number)
        except Exception as error:  # a scheduler gives up on a task whose workers die
            if type(error).__name__ != "KilledWorker":
                raise
            return [(number, Outcome(None, f"its worker was killed: {error}", was_killed=True))]
        if not outcome.was_killed:
            return [(number, outcome)]
        self._attempts[number] = self._attempts.get(number, 0) + 1
        if self._attempts[number] < self._most:
            self._suspects.insert(0, number)
            return []
        return [(number, replace(outcome, error=f"its worker was killed {self._most} times"))]


def rehearse_all(
    variants: Sequence[Variant],
    device: str | None,
    workers: Workers,
    work: Callable[[Variant, str | None], Outcome] = rehearse_variant,
) -> Iterator[tuple[int, Outcome]]:
    """Pairs of the number of a variant and its outcome, in the order in which they finish."""
    queue = Queue(workers, device, work)
    for number, variant in enumerate(variants):
        queue.add(number, variant)
    while len(queue):
        yield from queue.wait()


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
