"""Facts about sizes, append-only: learning, proving, simplifying."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from understudy.shapes.algebra.conditions import (
    Condition,
    by_remainder,
    decided_by_interval,
    join,
    relation,
)
from understudy.shapes.algebra.expr import Algebra, Expr
from understudy.shapes.algebra.intervals import Interval, expand
from understudy.shapes.algebra.knowledge import Store
from understudy.shapes.algebra.learning import FactPropagation, without_factors
from understudy.shapes.algebra.polynomials import Integer, constant_of, variable_content
from understudy.shapes.algebra.prover import Search


class Proof(Enum):
    """The answer for all sizes that satisfy the facts; UNKNOWN if it differs among them, or no proof was found."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        raise TypeError("a Proof has three values: compare it with Proof.YES, Proof.NO or Proof.UNKNOWN")


YES, NO, UNKNOWN = Proof
MOST_ITERATIONS = 4
OPPOSITE = {YES: NO, NO: YES, UNKNOWN: UNKNOWN}


class Facts:
    """The facts about the symbols of one algebra, beyond their declared ranges.

    The results of `prove`, `simplify` and `interval` hold for all sizes within the declared ranges that satisfy all
    learned facts, where the expression can be computed.

    `example`: values of some or all symbols that satisfy the facts. A condition that holds there can't be refuted, and
    one that fails there can't be proved, which saves half of each search.
    """

    def __init__(self, algebra: Algebra, example: Mapping[Expr, int] | None = None) -> None:
        self.algebra = algebra
        self.example: Mapping[Expr, int] = {} if example is None else example
        self.version = 0
        self._store = Store(algebra)
        self._learned: dict[Condition, None] = {}
        self._alternatives: list[Condition] = []  # disjunctions with more than one possible part
        self._decided: dict[Condition, Proof] = {}  # final: facts are never removed
        self._undecided: dict[Condition, int] = {}  # the version of the facts at the last attempt
        self._simplified: dict[Expr, Integer] = {}
        self._at_example: dict[Condition, bool] = {}
        self._has_example = True  # False once a fact is learned that may not hold there

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The learned facts, in order."""
        return tuple(self._learned)

    @property
    def count(self) -> int:
        """The number of learned facts."""
        return len(self._learned)

    @property
    def is_contradictory(self) -> bool:
        """Whether the facts were found to contradict each other."""
        return self._store.is_contradictory

    # -- learning --------------------------------------------------------------------------------------

    def learn(self, condition: bool | Condition) -> None:
        if isinstance(condition, bool):
            if not condition:
                raise ValueError("expected a condition that can be true, got False")
            return
        if condition in self._learned:
            return
        self._learned[condition] = None
        self._has_example = self._has_example and self._agrees_with_example(condition)
        self.version += 1
        self._simplified.clear()
        self._take(condition)
        self._settle()

    def _take(self, condition: Condition) -> None:
        if condition.kind == "and":
            for part in condition.parts:
                self._take(part)
        elif condition.kind == "or":
            self._alternatives.append(condition)
        else:
            FactPropagation(self._store).take(condition.kind, condition.expr)

    def _settle(self) -> None:
        """Learn the last part of each disjunction whose other parts are refuted."""
        changed = True
        while changed and self._alternatives:
            changed = False
            for alternatives in list(self._alternatives):
                open_parts = self._open_parts(alternatives)
                if len(open_parts) == 1:
                    self._alternatives.remove(alternatives)
                    self.version += 1  # unproved conditions may be provable now
                    self._take(open_parts[0])
                    changed = True

    def _open_parts(self, alternatives: Condition) -> list[Condition]:
        """The parts that are not refuted; at most two of them."""
        found = [part for part in alternatives.parts if self._value_at_example(part)][:2]
        for part in alternatives.parts:
            if len(found) > 1:
                break
            if part not in found and self.prove(part) is not NO:
                found.append(part)
        return found

    # -- the example -----------------------------------------------------------------------------------

    def _agrees_with_example(self, condition: Condition) -> bool:
        """Whether the example satisfies a fact, or has no values for its symbols."""
        if condition.symbols.isdisjoint(self.example):
            return True
        return self._value_at_example(condition) is True

    def _value_at_example(self, condition: Condition) -> bool | None:
        """Whether it holds at the example's sizes; None if that can't be computed."""
        if not self._has_example:
            return None
        found = self._at_example.get(condition)
        if found is None:
            if not self.example.keys() >= condition.symbols:
                return None
            try:
                found = self._at_example[condition] = condition.evaluate(self.example)
            except ArithmeticError:  # it can't be computed there
                return None
        return found

    # -- questions -------------------------------------------------------------------------------------

    def prove(self, condition: bool | Condition) -> Proof:
        if isinstance(condition, bool):
            return YES if condition else NO
        found = self._decided.get(condition)
        if found is not None:
            return found
        if self._undecided.get(condition) == self.version:
            return UNKNOWN
        found = self._answer(condition)
        if found is UNKNOWN:
            self._undecided[condition] = self.version
        else:
            self._decided[condition] = found
        return found

    def recall(self, condition: Condition) -> Proof:
        """As `prove`, but without a search: memoised and learned results only."""
        found = self._decided.get(condition)
        if found is None:
            found = (
                YES if condition in self._learned else NO if condition._negation in self._learned else UNKNOWN
            )
        return found

    def _answer(self, condition: Condition) -> Proof:
        if condition in self._learned:
            return YES
        if condition._negation in self._learned:
            return NO
        if condition.parts:
            return self._decide_combination(condition)
        try:
            return self._relation(condition.kind, condition.expr, self._value_at_example(condition))
        except ArithmeticError:  # it can't be computed for any remaining sizes
            return UNKNOWN

    def _decide_combination(self, condition: Condition) -> Proof:
        """Decide by the parts. By the example only one answer is possible, so that some parts can be skipped."""
        decisive, at_example = (NO, False) if condition.kind == "and" else (YES, True)
        known = self._value_at_example(condition)
        found = OPPOSITE[decisive]
        for part in condition.parts:
            if known is at_example and self._value_at_example(part) is not at_example:
                found = UNKNOWN
                continue
            answer = self._answer(part)
            if answer is decisive:
                return decisive
            if answer is UNKNOWN:
                found = UNKNOWN
                if known is not None and known is not at_example:
                    break
        return found

    def _relation(self, kind: str, expr: Expr, at_example: bool | None) -> Proof:
        """Try both forms: with c*(p // c), in which products have a visible sign, and with p - p % c, in which sums
        cancel."""
        store = self._store
        inside = store.inside(expr)
        found = self._decide_comparison(kind, inside, at_example)
        if found is UNKNOWN:
            longer = expand(store, inside)
            return found if longer is inside else self._decide_comparison(kind, longer, at_example)
        return found

    def _decide_comparison(self, kind: str, p: Integer, at_example: bool | None) -> Proof:
        store = self._store
        if not isinstance(p, int):
            number = variable_content(p.terms)
            if number > 1 and (kind == "ge" or constant_of(p) % number == 0):
                p = self.algebra.normal({m: c // number for m, c in p.terms})
        decided = decided_by_interval(kind, store.interval(p))
        if decided is not None:
            return YES if decided else NO
        may_hold, may_fail = at_example is not False, at_example is not True
        if kind == "ge":
            if may_hold and Search(store).nonnegative(p):
                return YES
            return NO if may_fail and Search(store).nonnegative(self.algebra.sub(-1, p)) else UNKNOWN
        is_equal = YES
        if kind == "ne":
            is_equal, may_hold, may_fail = NO, may_fail, may_hold
        if may_fail and Search(store).nonzero(p):
            return OPPOSITE[is_equal]
        return is_equal if may_hold and Search(store).zero(p) else UNKNOWN

    def simplify(self, expr: Integer) -> Integer:
        """The expression simplified by all facts, in the user's symbols."""
        if isinstance(expr, int):
            return expr
        found = self._simplified.get(expr)
        if found is None:
            found = self._simplified[expr] = self._simplify_fully(expr)
        return found

    def _simplify_fully(self, expr: Expr) -> Integer:
        """Simplify until nothing changes. The result is memoised as its own simplification."""
        found = self._simplify_once(expr)
        for _ in range(MOST_ITERATIONS):  # a shorter form may simplify further
            if isinstance(found, int) or found in self._simplified:
                break
            again = self._simplify_once(found)
            if again is found:
                break
            found = again
        return found if isinstance(found, int) else self._simplified.setdefault(found, found)

    def simplify_condition(self, condition: Condition) -> Condition:
        """The condition simplified by all facts, if the result is shorter."""
        if condition.parts:
            without_effect = YES if condition.kind == "and" else NO
            parts = [part for part in condition.parts if self.prove(part) is not without_effect]
            found = join(condition.kind, [self.simplify_condition(part) for part in parts])
        else:
            store = self._store
            try:
                kind, inside = self._narrow(
                    condition.kind, self._replace_rounding(store.inside(condition.expr))
                )
                inside = without_factors(store, kind, inside)
                found = relation(kind, store.outside(self.algebra.mul(store.whole(inside), inside)))
            except ArithmeticError:
                return condition
        is_shorter = isinstance(found, Condition) and len(str(found)) <= len(str(condition))
        return by_remainder(found if is_shorter and isinstance(found, Condition) else condition)

    def _narrow(self, kind: str, p: Integer) -> tuple[str, Integer]:
        """p != 0 where p >= 0 is p >= 1. (For a symbol or a remainder, `!= 0` is more readable, and kept.)"""
        if kind != "ne" or isinstance(p, int) or p.is_symbol or p.kind == "mod":
            return kind, p
        low, high = self._store.interval(p)
        if low == 0:
            return "ge", self.algebra.sub(p, 1)
        return ("ge", self.algebra.sub(-1, p)) if high == 0 else (kind, p)

    def _simplify_once(self, expr: Expr) -> Integer:
        try:
            return self._store.outside(self._replace_rounding(self._store.inside(expr)))
        except ArithmeticError:  # it can't be computed for any remaining sizes
            return expr

    def _replace_rounding(self, size: Integer) -> Integer:
        """Replace c*(p // c) by p - r where the remainder r is known."""
        store = self._store
        if isinstance(size, int):
            return size
        for atom in size.atoms:
            if atom.kind == "floordiv" and isinstance(store.apply("mod", *atom.args), int):
                shorter = expand(store, size)
                return shorter if shorter is size else self._replace_rounding(shorter)
        return size

    def interval(self, expr: Integer) -> Interval:
        """The least and the largest value, None where unbounded."""
        try:
            return self._store.interval(self._replace_rounding(self._store.inside(expr)))
        except ArithmeticError:
            return None, None

    def replacement(self, symbol: Expr) -> Integer:
        """The expression that the symbol was merged with or specialised to; else the symbol itself."""
        return self.simplify(symbol)
