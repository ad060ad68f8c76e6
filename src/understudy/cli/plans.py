"""`understudy plan`: the best way to train a script on these cards."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from understudy.cli.commands import INTERRUPTED, Command
from understudy.cli.devices import add_cards_argument, read_own_cards
from understudy.cli.fixes import read_sources
from understudy.cli.rehearsals import Outcome, Progress, Queue, Variant, Workers, rehearse_variant
from understudy.cli.search_space import FoundSpace, SearchRequest, find_space, uses_ranks
from understudy.cli.tables import clean, get_terminal_width, parse_seconds, parse_size
from understudy.cluster.launchers import parse_launch
from understudy.errors import UnderstudyError
from understudy.plans.answer import Row, SearchedAxis, TrainingPlan, write_values
from understudy.plans.axes import parse_vary, write_value
from understudy.plans.candidates import Candidate
from understudy.plans.constraints import parse_requirement
from understudy.plans.estimates import Estimates, Speeds
from understudy.plans.page import make_page
from understudy.plans.results import Result, extend, make_failure, measure
from understudy.plans.search import GOALS, Limits, PlanSearch
from understudy.plans.store import ResultStore, find_folder, make_key
from understudy.plans.text import write_plan
from understudy.report.documents import read_record
from understudy.simulation.catalogue import Card, parse_devices
from understudy.timing.collectives import find_link, find_network, usual_network

FAILED, NOTHING_FITS = 1, 3
ATTEMPTS = 2
"""A candidate that kills its worker this often has failed."""
PASSES = 6
"""The most passes per step that are rehearsed; for more, two smaller numbers are rehearsed instead."""
VARIABLES = (
    "PYTORCH_",
    "TORCH",
    "CUDA_",
    "NCCL_",
    "HF_",
    "TRANSFORMERS_",
    "ACCELERATE_",
    "FSDP_",
    "DS_",
    "OMP_",
    "PYTHON",
)
"""How the names of environment variables begin on which a result may depend."""
SECONDS = 3600
"""A rehearsal of many ranks may take long on few cores."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "understudy plan --device D [options] [launcher] script.py [arguments]"
    add = parser.add_argument
    add("--device", required=True, metavar="CARD", help='the cards of a node: "4090", "8xh100"')
    add("--nodes", metavar="N", help="number of nodes (1)")
    add_cards_argument(parser)
    add(
        "--vary", action="append", default=[], metavar="NAME[=VALUES]",
        help="an option and its values: tp=1,2,4 or batch=1..64 (1, 2, 4, …, 64); repeat for more",
    )  # fmt: skip
    add(
        "--require",
        action="append",
        default=[],
        metavar="TEST",
        help='a condition on the values: "tp*pp*dp=8"',
    )
    add("--for", dest="goal", choices=GOALS, default="speed", help="the goal (speed)")
    add("--budget", metavar="SIZE", help="limit of reserved memory for each card, as in 40GiB")
    add("--max-step-time", metavar="TIME", help="limit for the time of a step, as in 0.5s")
    add("--global-batch", metavar="N", help="samples of a step on all cards; accumulation follows from it")
    add("--cost", metavar="PRICE", help="price of a card-hour, as in 2.49/h")
    add("--top", metavar="N", default="3", help="number of plans in the answer (3)")
    add("--most", metavar="N", default="40", help="rehearsals in all (40)")
    add(
        "--passes",
        metavar="N",
        default=str(PASSES),
        help="most accumulation passes in a rehearsed step; more are extrapolated from two smaller numbers (6)",
    )
    add("--steps", metavar="N", default="2", help="optimizer steps of each rehearsal (2)")
    add("--no-changes", action="store_true", help="vary options only, not the text of the script")
    add(
        "--jobs",
        metavar="N",
        help="rehearsals at a time (the number of cores, or of the cluster's threads)",
    )
    add("--scheduler", metavar="ADDRESS", help="rehearse on the workers of a Dask cluster: tcp://…")
    add("--cache", metavar="DIR", help="folder for results (~/.cache/understudy/plans); - for none")
    add(
        "--offline-data",
        action="store_true",
        help="make up data sets and tokenizers that are not on this machine",
    )
    add("--json", metavar="FILE", help="the plan as JSON; - for standard output")
    add("--html", metavar="FILE", help="the plan as a page: memory against time")
    parser.epilog = """\
Without --vary, the options that the script's parser shows are searched: batch, checkpointing, layouts, switches. Each
candidate in the answer was rehearsed; the others are ruled out by bounds and by predictions from the rehearsals. The
rehearsals are kept: an interrupted search continues where it stopped.
Exit code 0: something fits. 3: nothing does. 1: the script fails. 130: interrupted.

examples:
    understudy plan --device 4090 train.py
    understudy plan --device 8xh100 --nodes 2 --vary tp=1,2,4,8 --vary batch=1..64 --global-batch 512 train.py
    understudy plan --device 8xh100 --require "tp*pp <= 8" --for cost --cost 2.49/h --html plan.html train.py"""


class PlanOptionError(UnderstudyError, ValueError):
    """Wrong input."""


@dataclass
class Wishes:
    """The command line, checked."""

    card: Card
    count: int
    """Cards of a node."""
    request: SearchRequest
    limits: Limits
    device: str
    cards: Path | None
    top: int
    passes: int
    steps: int
    jobs: int | None
    price: float | None
    store: ResultStore
    notes: list[str] = field(default_factory=list)


def check_words(options: argparse.Namespace) -> Wishes:
    """Before torch is imported."""
    if not options.program:
        raise PlanOptionError("expected a script: understudy plan --device D [options] script.py [arguments]")
    card, count = parse_devices(options.device, read_own_cards(options))
    nodes = _read_count("--nodes", options.nodes) or 1
    names = ("top", "most", "passes", "steps")
    numbers = {name: _read_count(f"--{name}", getattr(options, name)) or 1 for name in names}
    jobs = _read_count("--jobs", options.jobs)
    varied = [parse_vary(text) for text in options.vary]
    twice = next((axis.name for axis in varied if sum(axis.name == other.name for other in varied) > 1), None)
    if twice is not None:
        raise PlanOptionError(f"--vary {twice}: given more than once; give all its values in one --vary")
    requirements = tuple(parse_requirement(text) for text in options.require)
    budget = card.usable if options.budget is None else min(parse_size(options.budget), card.usable)
    limit = None if options.max_step_time is None else parse_seconds(options.max_step_time)
    for name in ("json", "html"):
        _check_output(name, getattr(options, name))
    if (
        options.cache not in (None, "-")
        and os.path.exists(options.cache)
        and not os.path.isdir(options.cache)
    ):
        raise PlanOptionError(f"--cache {options.cache}: expected a folder")
    launch = None if os.path.isfile(options.program[0]) else parse_launch(options.program, count)
    program = tuple(launch.program) if launch is not None else tuple(options.program)
    module = program[1] if program[:1] == ("-m",) and len(program) > 1 else ""
    script, home = _find_module(module) if module else (program[0], None)
    arguments = program[2:] if module else program[1:]
    launcher = tuple(options.program[: len(options.program) - len(arguments) - 1])
    files = read_sources(script, home)
    notes = []
    if launch is not None:
        per_node, has_ranks = launch.layout.per_node, True
        nodes = nodes if options.nodes is not None else launch.layout.nodes
    else:
        has_ranks = count * nodes > 1 and uses_ranks(files)
        per_node = count if has_ranks else 1
        if count * nodes > 1 and not has_ranks:
            notes.append(
                f"note: {module or script} uses one of the {count * nodes} cards: nothing in it starts or joins other "
                "ranks; use DistributedDataParallel, accelerate or a Trainer for the others"
            )
            nodes = 1
    if per_node > count:
        raise PlanOptionError(
            f"expected one card per process of a node, got {per_node} processes and --device {options.device}"
        )
    if launcher and os.path.basename(launcher[0]) != "accelerate":
        launcher = ()  # ranks are options of ours
    launcher = tuple(word for word in launcher if not module or word not in ("-m", "--module"))
    request = SearchRequest(
        script, arguments, files, launcher, (), tuple(varied), requirements, nodes, per_node, has_ranks,
        _read_count("--global-batch", options.global_batch), not options.no_changes and not module, module,
    )  # fmt: skip
    store = ResultStore(None if options.cache == "-" else find_folder(options.cache))
    return Wishes(
        card, count, request, Limits(budget, limit, numbers["most"]), options.device, options.cards and Path(options.cards),
        numbers["top"], numbers["passes"], numbers["steps"], jobs, _read_price(options.cost), store, notes,
    )  # fmt: skip


def _find_module(name: str) -> tuple[str, Path]:
    """The file of a module that `python -m` runs from this folder, and the folder of its package. Nothing of it is run."""
    inner = Path(*name.split("."))
    for folder in (Path(), *map(Path, sys.path)):
        for file in (folder / inner / "__main__.py", folder / inner.with_suffix(".py")):
            if file.is_file():
                return str(file), folder
    raise PlanOptionError(f"can't run -m {name}: no module of this name")


def _read_count(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise PlanOptionError(f"{name} must be a positive integer, got {text!r}")
    return int(text)


def _read_price(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        price = float(text.strip().removesuffix("/h"))
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise PlanOptionError(f"--cost must be a price such as 2.49/h, got {text!r}")
    return price


def _check_output(name: str, path: str | None) -> None:
    if path is None or (path == "-" and name == "json"):
        return
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or os.path.isdir(path):
        raise PlanOptionError(f"--{name} {path!r}: expected a file in a folder that exists")


# --- rehearsals, from the store or from workers


@dataclass
class Rehearser:
    """Results of candidates: kept ones at once, the others by workers. A step with many passes is rehearsed with two smaller
    numbers of them, and the result is the line through both."""

    wishes: Wishes
    found: FoundSpace
    queue: Queue
    options: tuple[str, ...]
    sources: Mapping[str, str]
    _parts: dict[int, tuple[Candidate, int | None, str]] = field(default_factory=dict)
    """By number in the queue: the candidate, its passes, and the key of its rehearsal."""
    _known: dict[Candidate, dict[int | None, tuple[Result, bool]]] = field(default_factory=dict)
    _kept: set[Candidate] = field(default_factory=set)

    def begin(self, candidate: Candidate) -> tuple[Result, bool] | None:
        """The result, if everything of it is kept, and whether it is; None if it is rehearsed now."""
        self._known[candidate] = {}
        for passes in self._choose_passes(candidate):
            part = candidate if passes is None else self.found.with_passes(candidate, passes)
            variant = self.found.make_variant(part, self.options)
            key = self._make_key(variant, passes)
            kept = _read_result(self.wishes.store, key)
            if kept is not None:
                self._known[candidate][passes] = kept, True
                continue
            number = len(self._parts)
            self._parts[number] = candidate, passes, key
            self.queue.add(number, replace(variant, keeps_reads=True, seconds=SECONDS, sources=self.sources))
        return self._join(candidate)

    def take(self, number: int, outcome: Outcome) -> tuple[Candidate, Result] | None:
        """What a worker has given; None if more of this candidate is to come."""
        candidate, passes, key = self._parts[number]
        shape = candidate.shape if passes is None else replace(candidate.shape, accumulate=passes)
        if outcome.rehearsal is None and outcome.cluster is None:
            result = make_failure(outcome.error)
        else:
            report = str(outcome.cluster or outcome.rehearsal)
            result = measure(outcome.rehearsal, outcome.cluster, shape, report)
        if not outcome.was_killed:
            self.wishes.store.write(key, asdict(result), outcome.reads)
        self._known[candidate][passes] = result, False
        joined = self._join(candidate)
        return None if joined is None else (candidate, joined[0])

    def _join(self, candidate: Candidate) -> tuple[Result, bool] | None:
        wanted, known = self._choose_passes(candidate), self._known[candidate]
        if set(known) != set(wanted):
            return None
        is_kept = all(kept for _, kept in known.values())
        results = [known[passes][0] for passes in wanted]
        broken = next((result for result in results if not result.is_measured), None)
        if broken is not None or len(results) == 1:
            return broken or results[0], is_kept
        few, more = wanted
        assert few is not None and more is not None
        return extend(results[0], results[1], few, more, candidate.shape), is_kept

    def _choose_passes(self, candidate: Candidate) -> tuple[int | None, ...]:
        shape = candidate.shape
        more = max(self.wishes.passes, shape.pp + 2)
        if self.found.accumulation is None or shape.accumulate <= more + 2:
            return (None,)
        return max(2, more - 2), more

    def _make_key(self, variant: Variant, passes: int | None) -> str:
        card = asdict(self.wishes.card)
        given = {part: _hash_folder(part) for part in variant.arguments if os.path.isdir(part)}
        return make_key(
            {
                "card": card, "device": self.wishes.device, "script": os.path.basename(variant.script),
                "sources": self.sources, "files": variant.files, "arguments": variant.arguments, "options": variant.options,
                "launcher": variant.launcher, "environment": {**find_variables(), **variant.environment}, "passes": passes,
                "folders": given, "module": variant.module, "configurations": variant.configurations,
                "home": os.getcwd(), "versions": find_versions(), "roles": [str(axis) for axis in self.found.request.varied],
            }
        )  # fmt: skip


def _read_result(store: ResultStore, key: str) -> Result | None:
    """A record of another version is none."""
    record = store.read(key)
    try:
        return None if record is None else read_record(Result, record)
    except ValueError:
        return None


def _hash_folder(path: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times: what a script reads of it is compared by content."""
    found = []
    for root, _, names in os.walk(path):
        for name in names[:1000]:
            state = os.stat(os.path.join(root, name), follow_symlinks=False)
            found.append((os.path.join(root, name), state.st_size, state.st_mtime_ns))
    return sorted(found)


@functools.cache
def find_versions() -> dict[str, str]:
    """Versions of all packages, on which a result may depend; for this package, a hash of its files, which developers
    change."""
    versions = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    home = Path(__file__).parents[1]
    states = (
        (path, path.stat()) for path in sorted(home.rglob("*")) if path.suffix in (".py", ".toml", ".txt")
    )
    texts = [f"{path.relative_to(home)} {state.st_size} {state.st_mtime_ns}" for path, state in states]
    return {**versions, "understudy": make_key({"files": texts}), "python": sys.version.split()[0]}


def find_variables() -> dict[str, str]:
    """Environment variables that libraries read."""
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


def read_parsers(wishes: Wishes, queue: Queue) -> list[dict[str, Any]]:
    """The options that the script's parser shows; none, where it has none that is known."""
    request = wishes.request
    variant = Variant(
        request.script, request.arguments, options=_find_run_options(wishes), reads_parser=True, keeps_reads=True,
        sources=dict(request.files), module=request.module,
    )  # fmt: skip
    place = {"home": os.getcwd(), "environment": find_variables(), "versions": find_versions()}
    key = make_key({"parser": asdict(variant), **place})
    record = wishes.store.read(key)
    if record is None:
        queue.add(-1, variant)
        outcomes = queue.wait()
        outcome = outcomes[0][1]
        record = {"parsers": list(outcome.parsers), "error": outcome.error}
        if not outcome.was_killed:
            wishes.store.write(key, record, outcome.reads)
    parsers: list[dict[str, Any]] = record["parsers"]
    return parsers


def _find_run_options(wishes: Wishes) -> tuple[str, ...]:
    found = ["--steps", str(wishes.steps)]
    if wishes.cards is not None:
        found += ["--cards", str(wishes.cards.absolute())]
    if wishes.limits.reserved_bytes < wishes.card.usable:
        found += ["--budget", f"{wishes.limits.reserved_bytes}b"]
    return tuple(found)


# --- the search


def plan_script(options: argparse.Namespace) -> int:
    wishes = check_words(options)
    request = wishes.request
    is_single = not request.has_ranks
    device = wishes.card.key if is_single else f"{wishes.count}x{wishes.card.key}"
    workers = Workers(wishes.jobs or os.cpu_count() or 1, options.scheduler)
    was_interrupted = False
    search: PlanSearch | None = None
    with workers:
        queue = Queue(workers, device, rehearse_variant, attempts=ATTEMPTS)
        found = find_space(replace(request, parsers=read_parsers(wishes, queue)))
        candidates = found.space.list_candidates()
        if not candidates:
            raise PlanOptionError(
                f"--vary: the ranks, --global-batch and --require exclude all {found.space.excluded:,} combinations"
            )
        if not request.varied and not found.has_options:
            wishes.notes.append(
                f"note: no option to vary was found in {request.module or request.script} (parsers of argparse are read): "
                "name it with --vary, and write {NAME} where its value stands in the command line"
            )
        more = ("--offline-data",) if options.offline_data else ()
        at_a_time = wishes.jobs or workers.count_slots()
        jobs = () if is_single else ("--jobs", str(max(1, (os.cpu_count() or 1) // at_a_time)))
        rehearser = Rehearser(wishes, found, queue, (*_find_run_options(wishes), *more, *jobs), request.files)
        estimates = Estimates(_find_speeds(wishes.card))
        search = PlanSearch(
            candidates,
            found.find_first(candidates),
            estimates,
            wishes.limits,
            options.goal,
            wanted=wishes.top,
        )
        kept: set[Candidate] = set()
        try:
            run_search(search, rehearser, at_a_time, kept)
        except KeyboardInterrupt:
            was_interrupted = True
            workers.interrupt()
    search.running.clear()
    plan = make_plan(wishes, found, search, kept)
    _write(plan, options)
    return INTERRUPTED if was_interrupted else choose_exit_code(plan)


def run_search(search: PlanSearch, rehearser: Rehearser, jobs: int, kept: set[Candidate]) -> None:
    progress = Progress(len(search.candidates))
    _show(progress, search)
    try:
        while True:
            while len(rehearser.queue) < jobs and (candidate := search.take()) is not None:
                known = rehearser.begin(candidate)
                if known is not None:
                    search.record(candidate, known[0], is_kept=known[1])
                    kept.add(candidate)
                _show(progress, search)
            if not len(rehearser.queue):
                break
            for number, outcome in rehearser.queue.wait():
                done = rehearser.take(number, outcome)
                if done is not None:
                    search.record(*done)
            _show(progress, search)
    finally:
        progress.clear()


def _show(progress: Progress, search: PlanSearch) -> None:
    best = search.best()
    progress.done = len(search.results) + len(search.ruled_out)
    out = f"{len(search.results)} rehearsed, {len(search.ruled_out)} ruled out"
    progress.show(f"{out}{f'; best: {best[0]}' if best else ''}")


def _find_speeds(card: Card) -> Speeds:
    """As published: no message is faster."""
    if card.kind == "cpu":
        return Speeds()
    return Speeds(find_link(card).bandwidth, find_network(usual_network(card)).bandwidth)


def choose_exit_code(plan: TrainingPlan) -> int:
    if plan.choices:
        return 0
    return NOTHING_FITS if any(row.reserved_bytes for row in plan.rehearsals) else FAILED


def make_plan(
    wishes: Wishes, found: FoundSpace, search: PlanSearch, kept: Iterable[Candidate] = ()
) -> TrainingPlan:
    open_ones = search.rule_out()
    search.end()
    kept = set(kept)
    best = search.best()
    places = {candidate: number for number, candidate in enumerate(best, start=1)}
    rows = {
        candidate: _make_row(wishes, found, candidate, result, places.get(candidate, 0), candidate in kept)
        for candidate, result in search.results.items()
    }
    estimates, request = search.estimates, wishes.request
    axes = [
        SearchedAxis(axis.name, [write_value(value) for value in axis.values], axis.origin)
        for axis in found.space.axes
    ]
    if found.space.derived is not None:
        axes.append(SearchedAxis(found.space.derived, ["follows from --global-batch"], "asked"))
    return TrainingPlan(
        device=wishes.card.name, cards=request.nodes * request.per_node, goal=search.goal, is_complete=not open_ones,
        choices=[rows[candidate] for candidate in best], rehearsals=list(rows.values()), searched=axes,
        combinations=len(search.candidates) + found.space.excluded, candidates=len(search.candidates),
        ruled_out=search.count_reasons(), rehearsed=len(rows) - len(kept), kept=len(kept), not_searched=found.not_searched,
        notes=[*wishes.notes, *_note_passes(rows.values())], time_error=_find_error(estimates.time_errors),
        memory_error=_find_error(estimates.memory_errors), script=request.script,
    )  # fmt: skip


def _note_passes(rows: Iterable[Row]) -> list[str]:
    if not any(row.passes for row in rows):
        return []
    return [
        "note: steps with many accumulation passes were extrapolated from rehearsals with two smaller numbers of passes"
    ]


def _find_error(errors: list[float]) -> float | None:
    return math.exp(max(abs(error) for error in errors)) - 1 if errors else None


def _make_row(
    wishes: Wishes, found: FoundSpace, candidate: Candidate, result: Result, place: int, is_kept: bool
) -> Row:
    tokens = result.tokens / result.seconds if result.tokens and result.seconds else None
    samples = result.samples / result.seconds if result.samples and result.seconds else None
    rate = tokens or samples
    hours = 1e6 / rate / 3600 * candidate.shape.ranks if rate else None
    return Row(
        write_values(candidate.table), result.verdict, place, result.reserved_bytes, result.limit_bytes, result.seconds,
        result.low_seconds, result.high_seconds, tokens, samples, result.mfu, result.bound_by, candidate.shape.ranks, hours,
        None if hours is None or wishes.price is None else hours * wishes.price, result.passes, is_kept,
        found.write_command(candidate), found.write_patch(candidate), result.error, result.report,
    )  # fmt: skip


def _write(plan: TrainingPlan, options: argparse.Namespace) -> None:
    text = write_plan(plan, get_terminal_width() or 400)
    print(text, file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        print(plan.to_json())
    _try_to_write("json", options.json, plan.to_json)
    _try_to_write("html", options.html, lambda: make_page(plan))


def _try_to_write(name: str, path: str | None, write: Callable[[], str]) -> None:
    """The answer is printed by now: a file that can't be written costs one line."""
    if path is None or path == "-":
        return
    try:
        Path(path).write_text(write() + "\n", encoding="utf-8")
    except OSError as error:
        print(clean(f"understudy plan: --{name} {path!r} was not written: {error.strerror}"), file=sys.stderr)


COMMAND = Command("plan", add_plan_arguments, plan_script, takes_program=True)
