"""Random proofs against brute force: no answer may be wrong.

python -m tests.shapes.proofs --count 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.facts import Facts, Proof

from .worlds import Question, TooLarge, Value, World, on_grid, truth_on_grid


@dataclass
class Tally:
    answers: Counter[Proof] = field(default_factory=Counter)
    constants: int = 0  # questions decided by the normal form alone
    decidable: int = 0  # questions with one answer on the whole grid
    unsound: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.answers.values())

    def __str__(self) -> str:
        decided = self.count - self.answers[Proof.UNKNOWN]
        return (
            f"{self.count:,} proofs, {len(self.unsound)} unsound; "
            f"{decided / max(self.count, 1):.1%} decided ({self.constants / max(self.count, 1):.1%} by normal form), "
            f"{decided / max(self.decidable, 1):.1%} of those with one answer on the grid"
        )


def run(count: int, seed: int, progress: int | None = None) -> Tally:
    """`progress`: print after this many proofs, each time."""
    rng = random.Random(seed)
    tally = Tally()
    due = progress
    while tally.count < count:
        explore(World.random(rng), tally)
        if progress and due and tally.count >= due:
            print(tally, flush=True)
            due += progress
    return tally


def explore(world: World, tally: Tally) -> None:
    """One world: some expressions, some facts, questions before and after each fact."""
    rng = world.rng
    pool = [*world.symbols, *expressions(world, 8)]
    facts = Facts(world.algebra, world.example() if rng.random() < 0.5 else None)
    learned: list[str] = []
    admitted = np.ones_like(world.symbols[0].legal)
    cache = {s.expr: s.values for s in world.symbols if isinstance(s.expr, Expr)}
    for _ in range(rng.choice((1, 2, 3, 4))):
        for _ in range(12):
            ask(world, facts, world.question(pool), admitted, learned, tally)
        for value in rng.sample(pool, 2):
            check_simplified(world, facts, value, admitted, learned, tally, cache)
        fact = random_fact(world, pool)
        check_shorter(world, facts, fact, admitted, learned, tally, cache)
        holds = admitted & fact.truth & fact.legal
        if fact.condition is False or not holds.any():
            continue  # no size of the grid would be left to check with
        facts.learn(fact.condition)
        learned.append(fact.text)
        admitted = holds


def expressions(world: World, count: int) -> list[Value]:
    found = []
    for _ in range(count):
        try:
            found.append(world.expression(world.rng.choice((1, 2, 2, 3))))
        except TooLarge:
            continue
    return found


def random_fact(world: World, pool: list[Value]) -> Question:
    while True:
        try:
            return world.fact(pool)
        except TooLarge:
            continue


def ask(
    world: World, facts: Facts, question: Question, admitted: np.ndarray, learned: list[str], tally: Tally
) -> None:
    where = admitted & question.legal
    truths = question.truth[where]
    answer = facts.prove(question.condition)
    tally.answers[answer] += 1
    tally.constants += isinstance(question.condition, bool)
    tally.decidable += bool(truths.size) and bool(truths.all() or not truths.any())
    wrong = (answer is Proof.YES and not truths.all()) or (answer is Proof.NO and truths.any())
    if wrong:
        tally.unsound.append(report(world, learned, question.text, f"{question.condition} is {answer.name}"))


def check_simplified(
    world: World,
    facts: Facts,
    value: Value,
    admitted: np.ndarray,
    learned: list[str],
    tally: Tally,
    cache: dict[Expr, np.ndarray],
) -> None:
    where = admitted & value.legal
    simple = facts.simplify(value.expr)
    low, high = facts.interval(value.expr)
    expected = value.values[where]
    try:
        actual = on_grid(world, simple, cache)
    except OverflowError:
        return  # coefficients beyond what the checker can compute with
    if not (actual[where] == expected).all():
        tally.unsound.append(report(world, learned, value.text, f"{value.expr} simplified to {simple}"))
    if facts.simplify(simple) is not simple and facts.simplify(simple) != simple:
        tally.unsound.append(
            report(
                world,
                learned,
                value.text,
                f"{value.expr} simplified to {simple}, then to {facts.simplify(simple)}",
            )
        )
    if expected.size and (
        (low is not None and expected.min() < low) or (high is not None and expected.max() > high)
    ):
        tally.unsound.append(report(world, learned, value.text, f"{value.expr} in [{low}, {high}]"))


def check_shorter(
    world: World,
    facts: Facts,
    fact: Question,
    admitted: np.ndarray,
    learned: list[str],
    tally: Tally,
    cache: dict[Expr, np.ndarray],
) -> None:
    """What a guard says must be true of the same sizes as what was asked."""
    if isinstance(fact.condition, bool):
        return
    where = admitted & fact.legal
    shorter = facts.simplify_condition(fact.condition)
    try:
        actual = truth_on_grid(world, shorter, cache)
    except OverflowError:
        return
    if not (actual[where] == fact.truth[where]).all():
        tally.unsound.append(report(world, learned, fact.text, f"{fact.condition} shortened to {shorter}"))


def report(world: World, learned: list[str], text: str, claim: str) -> str:
    ranges = ", ".join(
        f"{s.text} in [{s.expr.low}, {s.expr.high}]" for s in world.symbols if isinstance(s.expr, Expr)
    )
    return f"{claim}\n    asked: {text}\n    facts: {learned}\n    with {ranges}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    tally = run(options.count, options.seed, progress=50_000)
    for line in tally.unsound[:20]:
        print(line)
    print(f"{tally} in {time.perf_counter() - started:.0f} s")
    raise SystemExit(1 if tally.unsound else 0)


if __name__ == "__main__":
    main()
