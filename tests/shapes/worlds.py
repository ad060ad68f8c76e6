"""Random worlds of a few symbols, and what is true in them by brute force.

A world holds a grid of sizes for its symbols. Each random expression is built twice: with the algebra, and
as an array of its values on the grid (with a mask of the sizes at which it can be computed), by numpy alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import HOLDS, Condition
from understudy.shapes.algebra.expr import Algebra, Expr

LIMIT = 2.0**61  # beyond, 64-bit arithmetic could overflow
EXTRA = (9, 12, 16, 17, 24, 31, 48, 100)


class TooLarge(Exception):
    pass


@dataclass
class Value:
    """An expression, its values on the grid, and where it can be computed."""

    expr: int | Expr
    values: np.ndarray
    legal: np.ndarray
    text: str


@dataclass
class Question:
    condition: bool | Condition
    truth: np.ndarray
    legal: np.ndarray
    text: str


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@dataclass
class World:
    rng: random.Random
    algebra: Algebra = field(default_factory=Algebra)
    symbols: list[Value] = field(default_factory=list)

    @classmethod
    def random(cls, rng: random.Random) -> World:
        world = cls(rng)
        ranges = []
        for _ in range(rng.choice((1, 2, 2, 3))):
            low = rng.choice((0, 0, 0, 1, 1, 2, 2, 5, -3, None))
            high = rng.choice((None, None, None, 3, 8, 20))
            if low is not None and high is not None:
                high += low
            ranges.append((low, high))
        few = 6 if len(ranges) == 3 else 10
        points = []
        for low, high in ranges:
            first = -4 if low is None else low
            candidates = [first + i for i in range(few)] + rng.sample(EXTRA, 3)
            points.append(sorted({p for p in candidates if high is None or p <= high}))
        grid = [axis.ravel() for axis in np.meshgrid(*[np.array(p, dtype=np.int64) for p in points])]
        everywhere = np.ones(grid[0].shape, dtype=bool)
        for i, ((low, high), values) in enumerate(zip(ranges, grid, strict=True)):
            symbol = world.algebra.symbol(f"s{i}", low, high)
            world.symbols.append(Value(symbol, values, everywhere, f"s{i}"))
        return world

    def example(self) -> dict[Expr, int]:
        """Sizes out of the grid, of most symbols. Facts may not hold there: then they have to do without."""
        place = self.rng.randrange(self.symbols[0].values.size)
        return {
            s.expr: int(s.values[place])
            for s in self.symbols
            if isinstance(s.expr, Expr) and self.rng.random() < 0.9
        }

    # -- expressions ---------------------------------------------------------------------------------

    def number(self, n: int) -> Value:
        first = self.symbols[0]
        return Value(n, np.full_like(first.values, n), first.legal, str(n))

    def leaf(self) -> Value:
        if self.rng.random() < 0.7:
            return self.rng.choice(self.symbols)
        return self.number(self.rng.choice((0, 1, 1, 2, 2, 3, 4, 5, 7, 8, -1, -2, -8)))

    def expression(self, depth: int) -> Value:
        if depth == 0 or self.rng.random() < 0.15:
            return self.leaf()
        kind = self.rng.choice(
            (
                "add",
                "add",
                "sub",
                "mul",
                "mul",
                "floordiv",
                "floordiv",
                "mod",
                "min",
                "max",
                "abs",
                "pow",
                "round",
            )
        )
        a = self.expression(depth - 1)
        if kind == "abs":
            return self.operation("absolute", a)
        if kind == "pow":
            return self.operation("pow", a, self.number(self.rng.choice((0, 1, 2, 2, 3))))
        if kind == "round":
            c = self.number(self.rng.choice((2, 3, 4, 8)))
            return self.operation("mul", self.operation("floordiv", a, c), c)
        if kind in ("floordiv", "mod") and self.rng.random() < 0.7:
            return self.operation(kind, a, self.number(self.rng.choice((2, 2, 3, 4, 5, 6, 8, -2, -3))))
        b = self.expression(depth - 1)
        return self.operation({"min": "minimum", "max": "maximum"}.get(kind, kind), a, b)

    def operation(self, kind: str, a: Value, b: Value | None = None) -> Value:
        if b is None:
            return Value(self.algebra.absolute(a.expr), np.abs(a.values), a.legal, f"abs({a.text})")
        legal = a.legal & b.legal
        right = b.values
        if kind in ("floordiv", "mod"):
            legal = legal & (right != 0)
            if not legal.any():
                raise TooLarge
            right = np.where(right == 0, 1, right)
        values = guarded(kind, a.values, right)
        return Value(
            getattr(self.algebra, kind)(a.expr, b.expr), values, legal, f"{kind}({a.text}, {b.text})"
        )

    # -- conditions ----------------------------------------------------------------------------------

    def relation(self, kind: str, a: Value, b: Value) -> Question:
        condition = getattr(conditions, kind)(a.expr, b.expr)
        return Question(
            condition, COMPARE[kind](a.values, b.values), a.legal & b.legal, f"{kind}({a.text}, {b.text})"
        )

    def question(self, pool: list[Value]) -> Question:
        rng = self.rng
        if rng.random() < 0.12:
            a, b = self.question(pool), self.question(pool)
            if rng.random() < 0.5:
                return Question(
                    conditions.both(a.condition, b.condition),
                    a.truth & b.truth,
                    a.legal & b.legal,
                    f"both({a.text}, {b.text})",
                )
            return Question(
                conditions.either(a.condition, b.condition),
                a.truth | b.truth,
                a.legal & b.legal,
                f"either({a.text}, {b.text})",
            )
        if rng.random() < 0.06:
            a = self.question(pool)
            return Question(conditions.negate(a.condition), ~a.truth, a.legal, f"negated({a.text})")
        kind = rng.choice(("eq", "eq", "ne", "lt", "le", "gt", "ge"))
        other = rng.choice(pool) if rng.random() < 0.7 else self.number(rng.choice((0, 0, 1, 2, 3, 7, 8, 16)))
        return self.relation(kind, rng.choice(pool), other)

    def fact(self, pool: list[Value]) -> Question:
        """The kinds of facts that programs teach, and now and then any condition."""
        rng = self.rng
        x, y = rng.choice(self.symbols), rng.choice(self.symbols)
        choice = rng.randrange(9)
        if choice <= 1:
            c = rng.choice((2, 3, 4, 8))
            subject = rng.choice((x, x, self.operation("mul", x, y), self.operation("add", x, y)))
            return self.relation(
                "eq", self.operation("mod", subject, self.number(c)), self.number(rng.choice((0, 0, 0, 1, 2)))
            )
        if choice == 2:
            return self.relation("eq", x, y)
        if choice == 3:
            return self.relation(
                rng.choice(("lt", "le", "ge", "ne")), x, self.number(rng.choice((0, 1, 4, 8, 20)))
            )
        if choice == 4:
            return self.relation(
                rng.choice(("lt", "le", "eq")),
                x,
                self.operation(rng.choice(("add", "mul")), y, self.number(rng.choice((1, 2, 3)))),
            )
        if choice == 5:
            k, m = self.number(rng.choice((2, 3, 4))), self.number(rng.choice((3, 4, 5, 8)))
            return self.relation(
                rng.choice(("eq", "le")), self.operation("mul", k, x), self.operation("mul", m, y)
            )
        if choice == 6:
            return self.relation(
                rng.choice(("le", "ge", "eq")),
                self.operation("mul", x, y),
                self.number(rng.choice((4, 12, 16, 24))),
            )
        return self.question(pool)


def guarded(kind: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if kind == "mul" and np.abs(a.astype(float) * b).max() > LIMIT:
        raise TooLarge
    if kind == "pow" and (np.abs(a.astype(float)) ** b).max() > LIMIT:
        raise TooLarge
    result: np.ndarray = NUMPY[kind](a, b)
    if result.size and np.abs(result.astype(float)).max() > LIMIT:
        raise TooLarge
    return result


NUMPY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "floordiv": np.floor_divide, "mod": np.mod,
    "minimum": np.minimum, "maximum": np.maximum, "pow": np.power,
}  # fmt: skip
ATOMS: dict[str, Any] = {
    "floordiv": np.floor_divide, "mod": np.mod, "abs": np.abs, "pow": np.power,
    "min": lambda *args: np.minimum.reduce(np.broadcast_arrays(*args)),
    "max": lambda *args: np.maximum.reduce(np.broadcast_arrays(*args)),
}  # fmt: skip


def on_grid(world: World, size: int | Expr, cache: dict[Expr, np.ndarray]) -> np.ndarray:
    """The values of an expression of the algebra on the world's grid, from its normal form."""
    if isinstance(size, int):
        return np.full_like(world.symbols[0].values, size)
    if size not in cache:
        if size.kind == "sum":
            total = np.zeros_like(world.symbols[0].values)
            for monomial, coefficient in size.terms:
                term = np.full_like(total, coefficient)
                for atom, exponent in monomial:
                    term = term * on_grid(world, atom, cache) ** exponent
                total = total + term
            cache[size] = total
        else:
            with np.errstate(divide="ignore"):
                cache[size] = ATOMS[size.kind](*[on_grid(world, arg, cache) for arg in size.args])
    return cache[size]


def truth_on_grid(world: World, condition: Condition, cache: dict[Expr, np.ndarray]) -> np.ndarray:
    """Where a condition of the algebra holds on the world's grid."""
    if condition.parts:
        combine = np.logical_and if condition.kind == "and" else np.logical_or
        return np.asarray(combine.reduce([truth_on_grid(world, part, cache) for part in condition.parts]))
    return np.asarray(HOLDS[condition.kind](on_grid(world, condition.expr, cache)))
