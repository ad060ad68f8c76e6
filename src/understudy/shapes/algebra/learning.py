"""Adds facts to a store: each is brought to its simplest form and put into the table to which it belongs.

x == 4, x == 2*y + 1    a replacement
x % 8 == 3              a replacement by 8*k + 3
x*y % 8 == 0            a congruence
x <= 2048               a limit
x*y <= z                an inequality, and limits that follow from the limits of the others
x != 0                  a limit if zero is at the end of x's interval, else stored
"""

from __future__ import annotations

from collections import deque
from math import gcd

from understudy.shapes.algebra import polynomials
from understudy.shapes.algebra.conditions import HOLDS, cofactor_of_product
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.intervals import Interval, by_terms, compact, excludes_zero, is_nonnegative
from understudy.shapes.algebra.knowledge import Store
from understudy.shapes.algebra.polynomials import Integer, Monomial, constant_of

# Limits of the work for one fact, against bounds that creep (x < y and y < x) and endless chains. What is left out
# beyond them makes answers weaker, never wrong.
MOST_NARROWINGS = 100
MOST_TASKS = 10_000
MOST_BITS = 1024  # of a bound: x*x <= x + 1 and x >= 2, which nothing meets, squares it again and again
LARGEST_DIVISOR = 1 << 20  # 2*x == 3*x*x makes x a multiple of 3, then of 9, …
Task = tuple[str, Integer]


class FactPropagation:
    """Propagates one new fact and its consequences, with a queue of tasks."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.algebra = store.algebra
        self.tasks: deque[Task] = deque()
        self.to_propagate: deque[Expr] = deque()
        self.narrowings = 0

    def take(self, kind: str, p: Integer) -> None:
        self.tasks.append((kind, p))
        self.finish()

    def finish(self) -> None:
        for _ in range(MOST_TASKS):
            if self.tasks:
                try:
                    self.run_task(*self.tasks.popleft())
                except ArithmeticError:  # a fact divides by an expression that is zero now: a contradiction
                    self.store.is_contradictory = True
            elif self.to_propagate:
                self.propagate(self.to_propagate.popleft())
            else:
                break
        self.store.clear_derived()
        self.refresh()

    def refresh(self) -> None:
        """Simplify the existing replacements again with the new facts."""
        store = self.store
        changed = False
        for atom, old in store.replacements.items():
            try:
                new = store.inside(old)
            except ArithmeticError:
                continue
            if new is not old:
                store.replacements[atom] = new
                changed = True
        if changed:
            store.clear_derived()

    def run_task(self, kind: str, p: Integer) -> None:
        p = self.simplest(kind, p)
        if isinstance(p, int):
            self.store.is_contradictory |= not HOLDS[kind](p)
        else:
            RELATION_HANDLERS[kind](self, p)

    def simplest(self, kind: str, p: Integer) -> Integer:
        """The simplified relation, without common factors and (unless it is >=) without a leading minus."""
        return without_factors(self.store, kind, compact(self.store, self.store.inside(p)))

    # -- p >= 0 ----------------------------------------------------------------------------------------

    def nonnegative(self, p: Expr) -> None:
        store = self.store
        variable = [term for term in p.terms if term[0]]
        if len(variable) == 1:
            monomial, coefficient = variable[0]
            self.narrow(monomial, bound(coefficient, -constant_of(p)))
            if len(monomial) == 1 and monomial[0][1] == 1:
                return
        if p in store.inequalities:
            return
        store.add_inequality(p)
        self.to_propagate.append(p)
        if self.algebra.neg(p) in store.inequalities:
            self.tasks.append(("eq", p))

    def narrow(self, monomial: Monomial, interval: Interval) -> None:
        whole = self.algebra.normal({monomial: 1})
        if any(end is not None and end.bit_length() > MOST_BITS for end in interval):
            return
        if isinstance(whole, int) or not self.store.narrow(whole, interval):
            return
        self.narrowings += 1
        if self.narrowings > MOST_NARROWINGS:
            return
        self.consequences(monomial, whole)
        for p in list(self.store.inequalities):
            if not whole.symbols.isdisjoint(p.symbols) and p not in self.to_propagate:
                self.to_propagate.append(p)
        for p in self.store.nonzero:
            if not whole.symbols.isdisjoint(p.symbols):
                self.tasks.append(("ne", p))

    def consequences(self, monomial: Monomial, whole: Expr) -> None:
        """Derive limits of the parts of a product or atom from its own limits."""
        low, high = self.store.interval(whole)
        if low is not None and low == high and whole.is_atom:
            self.tasks.append(("eq", self.algebra.sub(whole, low)))
        if len(monomial) > 1 or monomial[0][1] > 1:
            self.factors(monomial, low, high)
        elif whole.kind == "floordiv" and isinstance(whole.args[1], int):
            p, c = whole.args[0], whole.args[1]
            if low is not None:
                self.tasks.append(("ge", self.algebra.sub(p, c * low)))
            if high is not None:
                self.tasks.append(("ge", self.algebra.sub(c * high + c - 1, p)))
        elif whole.kind == "mod" and isinstance(whole.args[1], int):
            self.neighbours(whole.args[0], whole.args[1], low, high)
        elif whole.kind == "min" and low is not None:
            self.tasks.extend(("ge", self.algebra.sub(arg, low)) for arg in whole.args)
        elif whole.kind == "max" and high is not None:
            self.tasks.extend(("ge", self.algebra.sub(high, arg)) for arg in whole.args)

    def neighbours(self, p: Integer, c: int, low: int | None, high: int | None) -> None:
        """p % c >= 1 exactly where (p - 1) % c <= c - 2: rounding up uses one form, rounding down the other."""
        if low is not None and low >= 1:
            self.tasks.append(("ge", self.algebra.sub(c - 2, self.algebra.mod(self.algebra.sub(p, 1), c))))
        if high is not None and high <= c - 2:
            self.tasks.append(("ge", self.algebra.sub(self.algebra.mod(self.algebra.add(p, 1), c), 1)))

    def factors(self, monomial: Monomial, low: int | None, high: int | None) -> None:
        intervals = [self.store.interval(atom) for atom, _ in monomial]
        if not all(is_nonnegative(interval) for interval in intervals):
            return
        for i, (atom, exponent) in enumerate(monomial):
            if low is not None and low > 0:
                self.narrow(((atom, 1),), (1, None))
            if exponent > 1:
                continue
            least, most = by_terms(self.store, ((monomial[:i] + monomial[i + 1 :], 1),))
            if high is not None and least:
                self.narrow(((atom, 1),), (None, high // least))
            if low is not None and low > 0 and most:
                self.narrow(((atom, 1),), (-(-low // most), None))

    def propagate(self, p: Expr) -> None:
        """Each term of p >= 0 is limited by the others."""
        if p not in self.store.inequalities:
            return
        for monomial, coefficient in p.terms:
            if monomial:
                rest = tuple(term for term in p.terms if term[0] is not monomial)
                most = by_terms(self.store, rest)[1]
                if most is not None:
                    self.narrow(monomial, bound(coefficient, -most))

    # -- p == 0 ----------------------------------------------------------------------------------------

    def zero(self, p: Expr) -> None:
        solved = self.solve(p)
        if solved is not None:
            self.replace(*solved)
            return
        if self.is_congruence(p):
            return
        for half in (p, self.algebra.neg(p)):
            assert not isinstance(half, int)
            if half not in self.store.inequalities:
                self.nonnegative(half)
        for monomial, coefficient in p.terms:
            others = gcd(*(c for m, c in p.terms if m is not monomial))
            if monomial and others > 1 and gcd(others, coefficient) == 1:
                self.multiple(self.algebra.normal({monomial: 1}), others)

    def solve(self, p: Expr) -> tuple[Expr, Integer] | None:
        """(atom, value) with p == 0 exactly where atom == value; a hidden symbol or a sum rather than a summand."""
        candidates = []
        for monomial, coefficient in p.terms:
            if abs(coefficient) == 1 and len(monomial) == 1 and monomial[0][1] == 1:
                atom = monomial[0][0]
                value = self.algebra.sub(atom, self.algebra.mul(coefficient, p))
                if self.may_replace(atom, value):
                    adds_up = all(c >= 0 for _, c in polynomials.terms_of(value))
                    candidates.append(((atom.is_hidden, atom.is_symbol, adds_up, atom.order), atom, value))
        if not candidates:
            return None
        _, atom, value = max(candidates, key=lambda candidate: candidate[0])
        return atom, value

    def may_replace(self, atom: Expr, value: Integer) -> bool:
        if isinstance(value, int):
            return atom.kind != "mod"
        if atom.is_symbol:
            return atom not in value.symbols
        # An operation is replaced only by a polynomial in other symbols, or in parts of its own, so that replacing
        # terminates.
        if atom.kind == "mod":
            return False
        return all(a.is_symbol and a not in atom.symbols for a in value.atoms) or parts_of(atom).issuperset(
            value.atoms
        )

    def replace(self, atom: Expr, value: Integer) -> None:
        store = self.store
        limits = store.interval(atom)
        store.replacements[atom] = value
        store.clear_derived()
        for other, old in list(store.replacements.items()):
            if not other.is_symbol and atom in other.symbols:  # to be simplified again
                del store.replacements[other]
                self.tasks.append(("eq", self.algebra.sub(other, old)))
            else:
                store.replacements[other] = store.inside(old)
        self.tasks.extend(("ge", p) for p in store.inequalities)
        self.tasks.extend(("ne", p) for p in store.nonzero)
        for multiple, c in store.congruences:
            self.tasks.append(("eq", self.algebra.atom("mod", (multiple, c))))
        store.inequalities.clear()
        store.by_monomial.clear()
        store.nonzero.clear()
        store.congruences.clear()
        for monomial in [m for m in store.limits if atom in m.symbols or m is atom]:
            self.within(monomial, store.limits.pop(monomial))
        self.within(value, limits)
        self.tasks.extend(("ge", p) for p in meaning(atom, value))

    def within(self, size: Integer, interval: Interval) -> None:
        low, high = interval
        if low is not None:
            self.tasks.append(("ge", self.algebra.sub(size, low)))
        if high is not None:
            self.tasks.append(("ge", self.algebra.sub(high, size)))

    # -- congruences -----------------------------------------------------------------------------------

    def is_congruence(self, p: Expr) -> bool:
        """Add p == 0 as a congruence if it is q % c == r for numbers c and r. Returns whether it is."""
        r = -constant_of(p)
        atom = self.algebra.add(p, r)
        if isinstance(atom, int) or atom.kind != "mod":
            return False
        numerator, c = atom.args
        if not isinstance(c, int):
            return False
        if not 0 <= r < c:
            self.store.is_contradictory = True
            return True
        self.multiple(self.algebra.sub(numerator, r), c)
        return True

    def multiple(self, p: Integer, c: int) -> None:
        """p is a multiple of c."""
        if isinstance(p, int):
            self.store.is_contradictory |= p % c != 0
            return
        variable = [term for term in p.terms if term[0]]
        monomial, coefficient = variable[0]
        x = monomial[0][0]
        lone = len(variable) == 1 and len(monomial) == 1 and monomial[0][1] == 1 and x.is_symbol
        if lone and gcd(coefficient, c) == 1 and c * self.store.scale(x) <= LARGEST_DIVISOR:
            r = -constant_of(p) * pow(coefficient, -1, c) % c
            k = self.store.part(x, c, r)
            self.replace(x, self.algebra.add(self.algebra.mul(c, k), r))
        else:
            self.store.congruences[p, c] = None

    # -- p != 0 ----------------------------------------------------------------------------------------

    def nonzero(self, p: Expr) -> None:
        low, high = self.store.interval(p)
        if low == 0:
            self.tasks.append(("ge", self.algebra.sub(p, 1)))
        elif high == 0:
            self.tasks.append(("ge", self.algebra.sub(-1, p)))
        elif not excludes_zero((low, high)):
            self.store.nonzero[p] = None


def without_factors(store: Store, kind: str, p: Integer) -> Integer:
    """The relation p == 0, p != 0 or p >= 0 divided by factors that are known to be positive (or non-zero, for == and !=).

    A non-zero number is returned if p == 0 is impossible.
    """
    normal = store.algebra.normal
    while not isinstance(p, int):
        factor = polynomials.common_monomial(p.terms)
        interval = store.interval(normal({factor: 1})) if factor else (None, None)
        positive = interval[0] is not None and interval[0] > 0
        number = polynomials.variable_content(p.terms)
        if positive or (factor and kind != "ge" and excludes_zero(interval)):
            p = normal(polynomials.divide_terms(p.terms, factor))
        elif kind != "ge" and constant_of(p) % number:
            return 1
        elif number > 1:
            p = normal({m: c // number for m, c in p.terms})
        elif kind != "ge" and p.terms[0][1] < 0:
            p = store.algebra.neg(p)
        elif kind == "ge" and (cofactor := cofactor_of_product(store, p)) is not None:
            p = store.algebra.sub(cofactor, 1)
        else:
            break
    return p


def parts_of(atom: Expr) -> frozenset[Expr]:
    """The operations inside an operation, at any depth."""
    direct = [part for arg in atom.args if isinstance(arg, Expr) for part in arg.atoms if not part.is_symbol]
    return frozenset(direct).union(*map(parts_of, direct))


RELATION_HANDLERS = {
    "ge": FactPropagation.nonnegative,
    "eq": FactPropagation.zero,
    "ne": FactPropagation.nonzero,
}


def meaning(atom: Expr, value: Integer) -> list[Integer]:
    """Expressions that are >= 0 because the operation has this value."""
    algebra = atom.algebra
    if atom.kind == "floordiv" and isinstance(atom.args[1], int):
        p, c = atom.args
        rest = algebra.sub(p, algebra.mul(c, value))
        return [rest, algebra.sub(c - 1, rest)]
    if atom.kind == "max":
        return [algebra.sub(value, arg) for arg in atom.args]
    if atom.kind == "min":
        return [algebra.sub(arg, value) for arg in atom.args]
    return []


def bound(coefficient: int, least: int) -> Interval:
    """The interval of x with coefficient * x >= least."""
    if coefficient > 0:
        return -(-least // coefficient), None
    return None, (-least) // (-coefficient)
