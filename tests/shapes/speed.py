"""What repeated operations cost: `python -m tests.shapes.speed`. Prints, asserts nothing."""

from __future__ import annotations

import timeit

from understudy.shapes.algebra.conditions import eq, lt
from understudy.shapes.algebra.expr import Algebra
from understudy.shapes.algebra.facts import Facts

REPEATED = (
    "algebra.add(s, b)", "algebra.add(s, 1)", "algebra.mul(s, b)", "algebra.floordiv(s, 8)", "algebra.mod(s, 8)",
    "s + b", "s * b", "s // 8", "algebra.maximum(s, b)", "eq(s, b)", "lt(s, 2048)",
    "facts.prove(question)", "facts.prove(open_question)", "facts.simplify(rounded)",
)  # fmt: skip


def main(number: int = 100_000) -> None:
    algebra = Algebra()
    b, s = algebra.symbol("b", 1), algebra.symbol("s", 1)
    facts = Facts(algebra)
    facts.learn(eq(s % 8, 0))
    names = {
        "algebra": algebra, "b": b, "s": s, "facts": facts, "eq": eq, "lt": lt,
        "question": eq(b * s // 8 * 8, b * s), "open_question": eq(b, s), "rounded": s // 8 * 8,
    }  # fmt: skip
    for statement in REPEATED:
        seconds = min(timeit.repeat(statement, globals=names, number=number, repeat=5))
        print(f"{statement:28} {seconds / number * 1e6:6.3f} µs")


if __name__ == "__main__":
    main()
