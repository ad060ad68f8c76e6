"""Random programs of operators, for real and with stand-ins: what differs, most frequent first, and what was covered.

    python -m tests.oracle.random_sweep --count 20000 --seed 1
    python -m tests.oracle.random_sweep --kind symbolic --count 5000 --seed 1
    python -m tests.oracle.random_sweep --kind captured --count 1000 --seed 1
    python -m tests.oracle.random_sweep --program 1/12/34                     one program again, step by step

Programs run in a process of their own: a real kernel that reads beyond its memory ends that process, and the sweep goes on
with the next program.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

SECONDS_PER_PROGRAM = 300
REAL_RUNS = 50
PROGRAMS_IN_A_MESSAGE = 50
MEMORY = 12 << 30


@dataclass(frozen=True)
class Plan:
    kind: str
    seed: int
    first_block: int = 0
    programs_in_a_block: int = 150
    operators: tuple[str, ...] | None = None


def _work(pipe: Connection, place: Any, plan: Plan, block: int, first: int) -> None:
    """A worker: sends a tally now and then, and writes down where it is."""
    import logging
    import resource

    import torch

    from tests.oracle.random_calls import Vocabulary
    from tests.oracle.random_run import run_programs

    torch.set_num_threads(1)
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def announce(number: int, on_stand_ins: bool) -> None:
        place[0], place[1], place[2] = block, number, int(on_stand_ins)

    while True:
        vocabulary = Vocabulary(plan.seed, block, plan.operators)
        while first < plan.programs_in_a_block:
            numbers = range(first, min(first + PROGRAMS_IN_A_MESSAGE, plan.programs_in_a_block))
            pipe.send(run_programs(plan.kind, vocabulary, numbers, announce))
            first = numbers.stop
        block, first = block + 1, 0


def sweep(plan: Plan, count: int) -> Iterator[Any]:
    """Tallies until there were `count` operators."""
    context = multiprocessing.get_context("spawn")
    block, first, done = plan.first_block, 0, 0
    while done < count:
        place = context.Array("q", 3)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, place, plan, block, first), daemon=True)
        process.start()
        theirs.close()
        try:
            while done < count and ours.poll(SECONDS_PER_PROGRAM):
                tally = ours.recv()
                done += tally.steps
                yield tally
        except EOFError:
            pass
        process.kill()
        process.join()
        ours.close()
        if done < count:
            block, first = place[0], place[1] + 1
            yield _crashed(plan, tuple(place))


def _run_alone(pipe: Connection, plan: Plan, block: int, number: int) -> None:
    from tests.oracle.random_calls import Vocabulary
    from tests.oracle.random_run import run_programs

    vocabulary = Vocabulary(plan.seed, block, plan.operators)
    pipe.send(run_programs(plan.kind, vocabulary, [number], lambda number, on_stand_ins: None))


def _run_real(pipe: Connection, plan: Plan, block: int, number: int) -> None:
    """On real tensors only, so often that memory which a kernel has overwritten ends the process."""
    from tests.oracle.random_calls import Vocabulary
    from tests.oracle.random_run import real_steps

    vocabulary = Vocabulary(plan.seed, block, plan.operators)
    for _ in range(REAL_RUNS):
        list(real_steps(vocabulary.new_program(number)))
    pipe.send(True)


def _try_alone(run: Any, plan: Plan, block: int, number: int) -> Any:
    """What a process of its own sends of a program; None if that one ends, too."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(theirs, plan, block, number), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS_PER_PROGRAM) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()
        ours.close()


def _crashed(plan: Plan, place: tuple[int, ...]) -> Any:
    from tests.oracle.random_run import Finding, Tally

    tally = Tally()
    where = f"{plan.seed}/{place[0]}/{place[1]}"
    if place[2] and (alone := _try_alone(_run_alone, plan, place[0], place[1])) is not None:
        alone.coverage[
            f"ended at {where}, which ends no process by itself: memory was overwritten before it"
        ] += 1
        return alone
    if place[2] and _try_alone(_run_real, plan, place[0], place[1]):
        tally.add(Finding("crash", "?", "", (), "the process died, or did not come back", where), 1, where)
    else:
        tally.coverage[f"ended in a real kernel: {where}"] += 1
    return tally


def print_report(tally: Any, seconds: float, groups: int) -> None:
    from tests.oracle.cases import OPS
    from tests.oracle.everyday_calls import EVERYDAY
    from tests.oracle.random_run import OUTCOMES

    print(f"{tally.steps} operators in {seconds:.0f} s")
    for outcome, meaning in OUTCOMES.items():
        if tally.counts[outcome]:
            print(f"  {tally.counts[outcome]:8d}  {outcome:18s} {meaning}")
    for name, rate in tally.rates().items():
        print(f"  {100 * rate:8.3f} %  {name}")
    ran = {key.removeprefix("ran ") for key in tally.coverage if key.startswith("ran ")}
    names = {key.rpartition(" ")[0] for key in ran}
    everyday = len(names & EVERYDAY.keys())
    print(
        f"covered: {len(names & OPS.keys())} of {len(OPS)} operators ran; with their variants {len(ran) - everyday}"
    )
    print(f"         {everyday} of {len(EVERYDAY)} everyday calls")
    print(
        "  edits: "
        + ", ".join(f"{k[5:]} {n}" for k, n in tally.coverage.most_common() if k.startswith("edit "))[:1500]
    )
    for key, number in tally.coverage.items():
        if key.startswith("ended "):
            print(f"  {number} process {key}")
    for group, number in tally.groups.most_common(groups):
        print(f"{number} × {' | '.join(group)}\n      {tally.examples[group]}")


def show_program(name: str, kind: str) -> None:
    """One program again, with its findings."""
    from tests.oracle.random_calls import Vocabulary
    from tests.oracle.random_run import run_programs

    seed, block, number = map(int, name.split("/"))
    tally = run_programs(kind, Vocabulary(seed, block), [number], lambda number, on_stand_ins: None)
    print_report(tally, 0, 10)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.random_sweep")
    parser.add_argument("--kind", choices=("static", "symbolic", "captured"), default="static")
    parser.add_argument("--count", type=int, default=10_000, help="operators, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--block", type=int, default=0, help="the first block: a long sweep can be made in pieces"
    )
    parser.add_argument(
        "--programs", type=int, default=150, help="programs in a block: few go through more operators"
    )
    parser.add_argument("--groups", type=int, default=60, help="how many kinds of findings are printed")
    parser.add_argument("--ops", nargs="+", help="names of operators; all, if not given")
    parser.add_argument("--program", help="seed/block/number")
    options = parser.parse_args(arguments)
    if options.program:
        show_program(options.program, options.kind)
        return 0
    from tests.oracle.random_run import SILENT, Tally

    started = time.monotonic()
    total = Tally()
    operators = tuple(options.ops) if options.ops else None
    plan = Plan(options.kind, options.seed, options.block, options.programs, operators)
    for tally in sweep(plan, options.count):
        total.merge(tally)
    print_report(total, time.monotonic() - started, options.groups)
    return int(any(total.counts[outcome] for outcome in SILENT))


if __name__ == "__main__":
    sys.exit(main())
