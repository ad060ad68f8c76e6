"""Knowledge about the sizes, append-only, and the questions that it answers."""

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
from understudy.shapes.algebra.learning import Lesson, without_factors
from understudy.shapes.algebra.polynomials import Integer, constant_of, variable_content
from understudy.shapes.algebra.prover import Search


class Proof(Enum):
    """An answer for all admitted sizes at once; UNKNOWN if it differs among them, or was not found."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"

    def __bool__(self) -> bool:
        raise TypeError("a Proof has three values: compare it with Proof.YES, Proof.NO or Proof.UNKNOWN")


YES, NO, UNKNOWN = Proof
MOST_ROUNDS = 4
OPPOSITE = {YES: NO, NO: YES, UNKNOWN: UNKNOWN}


class Facts:
    """What is known about the symbols of one algebra, beyond their declared ranges.

    Whatever `prove`, `simplify` and `interval` say is true for all sizes that are within the declared
    ranges and meet all learned facts, as far as the expression can be computed at them.

    `example`: sizes that meet the facts, for some of the symbols or all. What holds there can't be refuted, and what does
    not can't be proved, so that half of a search is left out.
    """

    def __init__(self, algebra: Algebra, example: Mapping[Expr, int] | None = None) -> None:
        self.algebra = algebra
        self.example: Mapping[Expr, int] = {} if example is None else example
        self.version = 0
        self._store = Store(algebra)
        self._learned: dict[Condition, None] = {}
        self._alternatives: list[Condition] = []  # disjunctions of which it is open what holds
        self._decided: dict[Condition, Proof] = {}  # for good: facts are never taken back
        self._undecided: dict[Condition, int] = {}  # the version that did not know
        self._simplified: dict[Expr, Integer] = {}
        self._at_example: dict[Condition, bool] = {}
        self._has_example = True  # until a fact is learned that may not hold there

    def copy(self, example: Mapping[Expr, int]) -> Facts:
        """The same knowledge beside another example, to learn more from: neither hears of what the other learns."""
        other = Facts(self.algebra, example)
        other._store = self._store.copy()
        other._learned, other._alternatives = dict(self._learned), list(self._alternatives)
        other._decided = dict(self._decided)  # proofs hold for all sizes, whatever the example
        other._has_example = all(map(other._agrees_with_example, self._learned))
        return other

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """All that was learned, in order."""
        return tuple(self._learned)

    @property
    def count(self) -> int:
        """Of what was learned."""
        return len(self._learned)

    @property
    def is_contradictory(self) -> bool:
        """Whether no sizes are left that meet all facts, as far as that was noticed."""
        return self._store.is_contradictory

    # -- learning --------------------------------------------------------------------------------------

    def learn(self, condition: bool | Condition) -> None:
        if isinstance(condition, bool):
            if not condition:
                raise ValueError("False can't be learned")
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
            Lesson(self._store).take(condition.kind, condition.expr)

    def _settle(self) -> None:
        """A disjunction of which all but one part are refuted is that part."""
        changed = True
        while changed and self._alternatives:
            changed = False
            for alternatives in list(self._alternatives):
                open_parts = self._open_parts(alternatives)
                if len(open_parts) == 1:
                    self._alternatives.remove(alternatives)
                    self.version += 1  # what was not known before may be now
                    self._take(open_parts[0])
                    changed = True

    def _open_parts(self, alternatives: Condition) -> list[Condition]:
        """The parts that are not refuted; of many, two."""
        found = [part for part in alternatives.parts if self._at_hand(part)][:2]
        for part in alternatives.parts:
            if len(found) > 1:
                break
            if part not in found and self.prove(part) is not NO:
                found.append(part)
        return found

    # -- the example -----------------------------------------------------------------------------------

    def _agrees_with_example(self, condition: Condition) -> bool:
        """Whether a fact leaves the example as it is: it holds there, or is only about symbols that are not in it."""
        if condition.symbols.isdisjoint(self.example):
            return True
        return self._at_hand(condition) is True

    def _at_hand(self, condition: Condition) -> bool | None:
        """Whether it holds at the example's sizes; None if they don't tell."""
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
        """As `prove`, but without a search: what was found, or learned, before."""
        found = self._decided.get(condition)
        if found is None:
            found = YES if condition in self._learned else NO if condition._negation in self._learned else UNKNOWN
        return found

    def _answer(self, condition: Condition) -> Proof:
        if condition in self._learned:
            return YES
        if condition._negation in self._learned:
            return NO
        if condition.parts:
            return self._decide_combination(condition)
        try:
            return self._relation(condition.kind, condition.expr, self._at_hand(condition))
        except ArithmeticError:  # it can't be computed at any of the sizes that are left
            return UNKNOWN

    def _decide_combination(self, condition: Condition) -> Proof:
        """By its parts; without those that can't decide, where the example tells which answer there can be."""
        decisive, at_hand = (NO, False) if condition.kind == "and" else (YES, True)
        known = self._at_hand(condition)
        found = OPPOSITE[decisive]
        for part in condition.parts:
            if known is at_hand and self._at_hand(part) is not at_hand:
                found = UNKNOWN
                continue
            answer = self._answer(part)
            if answer is decisive:
                return decisive
            if answer is UNKNOWN:
                found = UNKNOWN
                if known is not None and known is not at_hand:
                    break
        return found

    def _relation(self, kind: str, expr: Expr, at_hand: bool | None) -> Proof:
        """In both forms: with c*(p // c), where a product shows its sign, and with p - p % c, where sums cancel."""
        store = self._store
        inside = store.inside(expr)
        found = self._decide_comparison(kind, inside, at_hand)
        if found is UNKNOWN:
            longer = expand(store, inside)
            return found if longer is inside else self._decide_comparison(kind, longer, at_hand)
        return found

    def _decide_comparison(self, kind: str, p: Integer, at_hand: bool | None) -> Proof:
        store = self._store
        if not isinstance(p, int):
            number = variable_content(p.terms)
            if number > 1 and (kind == "ge" or constant_of(p) % number == 0):
                p = self.algebra.normal({m: c // number for m, c in p.terms})
        decided = decided_by_interval(kind, store.interval(p))
        if decided is not None:
            return YES if decided else NO
        may_hold, may_fail = at_hand is not False, at_hand is not True
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
        """The expression with all that is known, in the user's symbols."""
        if isinstance(expr, int):
            return expr
        found = self._simplified.get(expr)
        if found is None:
            found = self._simplified[expr] = self._simplified_fully(expr)
        return found

    def _simplified_fully(self, expr: Expr) -> Integer:
        """What is simple stays as it is: the result is remembered for itself, too."""
        found = self._simplified_once(expr)
        for _ in range(MOST_ROUNDS):  # a shorter form may show more
            if isinstance(found, int) or found in self._simplified:
                break
            again = self._simplified_once(found)
            if again is found:
                break
            found = again
        return found if isinstance(found, int) else self._simplified.setdefault(found, found)

    def simplify_condition(self, condition: Condition) -> Condition:
        """What the condition adds to all that is known, if that is shorter to say."""
        if condition.parts:
            without_effect = YES if condition.kind == "and" else NO
            parts = [part for part in condition.parts if self.prove(part) is not without_effect]
            found = join(condition.kind, [self.simplify_condition(part) for part in parts])
        else:
            store = self._store
            try:
                kind, inside = self._narrow(condition.kind, self._replace_rounding(store.inside(condition.expr)))
                inside = without_factors(store, kind, inside)
                found = relation(kind, store.outside(self.algebra.mul(store.whole(inside), inside)))
            except ArithmeticError:
                return condition
        is_shorter = isinstance(found, Condition) and len(str(found)) <= len(str(condition))
        return by_remainder(found if is_shorter and isinstance(found, Condition) else condition)

    def _narrow(self, kind: str, p: Integer) -> tuple[str, Integer]:
        """p != 0 where p has no value below 0 is p >= 1. (Of a symbol or remainder, `!= 0` says more to a reader.)"""
        if kind != "ne" or isinstance(p, int) or p.is_symbol or p.kind == "mod":
            return kind, p
        low, high = self._store.interval(p)
        if low == 0:
            return "ge", self.algebra.sub(p, 1)
        return ("ge", self.algebra.sub(-1, p)) if high == 0 else (kind, p)

    def _simplified_once(self, expr: Expr) -> Integer:
        try:
            return self._store.outside(self._replace_rounding(self._store.inside(expr)))
        except ArithmeticError:  # it can't be computed at any of the sizes that are left
            return expr

    def _replace_rounding(self, size: Integer) -> Integer:
        """With p - r in place of c*(p // c) where the remainder r is known."""
        store = self._store
        if isinstance(size, int):
            return size
        for atom in size.atoms:
            if atom.kind == "floordiv" and isinstance(store.apply("mod", *atom.args), int):
                shorter = expand(store, size)
                return shorter if shorter is size else self._replace_rounding(shorter)
        return size

    def interval(self, expr: Integer) -> Interval:
        """The least and the largest value, None where there is none."""
        try:
            return self._store.interval(self._replace_rounding(self._store.inside(expr)))
        except ArithmeticError:
            return None, None

    def replacement(self, symbol: Expr) -> Integer:
        """What the symbol was merged into or specialised to; else itself."""
        return self.simplify(symbol)
