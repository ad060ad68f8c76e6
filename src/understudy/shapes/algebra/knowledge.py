"""The store of facts about the symbols of an algebra, as rewrites and proofs read it.

Inside, expressions have all replacements applied: a symbol that was merged or specialised does not occur, and one with
a known residue, `x % 8 == 3`, is `8*k + 3` with a hidden symbol k, so that divisibility is plain arithmetic on
polynomials. `outside` converts an expression back to the user's symbols.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from understudy.shapes.algebra import polynomials
from understudy.shapes.algebra.expr import Algebra, Expr
from understudy.shapes.algebra.intervals import EVERYTHING, Interval, interval_of, meet
from understudy.shapes.algebra.polynomials import Integer, Monomial, terms_of
from understudy.shapes.algebra.rewrites import rewrite

LARGEST_WHOLE = 1 << 16


class Store:
    """The tables of one set of facts; `learning` fills them, `prover` reads them."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self.replacements: dict[Expr, Integer] = {}
        self.hidden: dict[Expr, tuple[Expr, int, int]] = {}  # k: (x, c, r) with x == c*k + r
        self.limits: dict[Expr, Interval] = {}  # of atoms and monomials
        self.inequalities: dict[Expr, None] = {}  # each is >= 0
        self.nonzero: dict[Expr, None] = {}
        self.congruences: dict[tuple[Expr, int], None] = {}  # (p, c): p is a multiple of c
        self.by_monomial: dict[Monomial, list[tuple[int, Expr]]] = {}
        self.is_contradictory = False
        self._inside: dict[Expr, Integer] = {}
        self._intervals: dict[Expr, Interval] = {}
        self._applied: dict[tuple[object, ...], Integer] = {}
        self.proved: dict[object, bool] = {}

    def apply(self, kind: str, *args: Integer) -> Integer:
        key = (kind, *args)
        found = self._applied.get(key)
        if found is None:
            if kind == "mod" and self.congruences:
                args = (self.without_known_multiples(*args), args[1])
            found = self._applied[key] = rewrite(kind, self, args)
        return found

    def atom(self, kind: str, args: tuple[Integer, ...]) -> Integer:
        atom = self.algebra.atom(kind, args)
        return atom if isinstance(atom, int) else self.replacements.get(atom, atom)

    def interval(self, size: Integer) -> Interval:
        if isinstance(size, int):
            return size, size
        found = self._intervals.get(size)
        if found is None:
            # Recursive calls get the safe answer until the result is known.
            self._intervals[size] = EVERYTHING
            found = interval_of(self, size)
            if size.kind == "sum" and size in self.limits:
                found = meet(found, self.limits[size])
            self._intervals[size] = found
        return found

    def bounds(self, monomial: Expr) -> Interval:
        limits = self.limits.get(monomial, EVERYTHING)
        return meet((monomial.low, monomial.high), limits) if monomial.is_symbol else limits

    def without_known_multiples(self, p: Integer, q: Integer) -> Integer:
        """p reduced by multiples of q that are known from congruences."""
        if not isinstance(q, int):
            return p
        for _ in range(8):
            found = next(self._find_multiples(p, q), None)
            if found is None:
                break
            p = self.algebra.sub(p, found)
        return p

    def _find_multiples(self, p: Integer, q: int) -> Iterator[Integer]:
        for multiple, c in self.congruences:
            lead, number = multiple.terms[0]
            for monomial, coefficient in terms_of(p):
                factor = polynomials.over(monomial, lead)
                if factor is not None and coefficient % number == 0 and coefficient // number * c % q == 0:
                    share = self.algebra.normal({factor: coefficient // number})
                    yield self.algebra.mul(share, multiple)

    # -- inside and outside ----------------------------------------------------------------------------

    def inside(self, size: Integer) -> Integer:
        """The expression with all replacements applied, simplified by all facts."""
        if isinstance(size, int):
            return size
        found = self._inside.get(size)
        if found is None:
            if size.kind == "sum":
                found = self.algebra.map_atoms(size, self.inside)
            elif size.is_symbol:
                found = self.replacements.get(size, size)
            else:
                found = self.apply(size.kind, *[self.inside(arg) for arg in size.args])
            self._inside[size] = found
        return found

    def outside(self, size: Integer) -> Integer:
        """The expression in the user's symbols."""
        if isinstance(size, int) or not any(symbol.is_hidden for symbol in size.symbols):
            return size
        if size.kind not in ("sum", "symbol", "mod"):
            return self.algebra.apply(size.kind, *[self.outside(arg) for arg in size.args])
        shown: Integer = self._with_wide_remainders(size)
        while not isinstance(shown, int):
            hidden = [atom for atom in shown.atoms if atom.is_hidden]
            if not hidden:
                return self.algebra.map_atoms(
                    shown, lambda atom: atom if atom.is_symbol else self.outside(atom)
                )
            shown = self._without(shown, max(hidden, key=lambda atom: atom.order))
        return shown

    def _with_wide_remainders(self, size: Expr) -> Integer:
        """Replace c*(p % n) by (c*p) % (c*n), if c*p can be written without hidden symbols."""
        algebra = self.algebra
        total: Integer = 0
        for monomial, coefficient in size.terms:
            term: Integer = 1
            for atom, exponent in monomial:
                factor: Integer = atom
                if atom.kind == "mod" and exponent == 1:
                    p, n = atom.args
                    c = self.whole(p) if isinstance(n, int) else 1
                    if coefficient % c == 0:
                        coefficient //= c
                        factor = algebra.mod(self.outside(algebra.mul(c, p)), algebra.mul(c, self.outside(n)))
                    else:
                        factor = algebra.mod(self.outside(p), self.outside(n))
                term = algebra.mul(term, algebra.pow(factor, exponent))
            total = algebra.add(total, algebra.mul(coefficient, term))
        return total

    def whole(self, size: Integer) -> int:
        """The least multiple of the expression that can be written without hidden symbols."""
        total = 1
        for monomial, coefficient in terms_of(size):
            needed = 1
            for atom, exponent in monomial:
                if atom.is_hidden:
                    needed *= self.scale(atom) ** exponent
                elif atom.kind == "mod":
                    needed *= self.whole(atom.args[0])
            total = lcm(total, needed // gcd(needed, coefficient))
        return total if total <= LARGEST_WHOLE else 1

    def _without(self, size: Expr, k: Expr) -> Integer:
        """Replace c*k by x - r where the coefficients allow it, else k by x // c."""
        algebra = self.algebra
        x, c, r = self.hidden[k]
        total: Integer = 0
        for monomial, coefficient in size.terms:
            term: Integer = 1
            for atom, exponent in monomial:
                if atom is not k:
                    term = algebra.mul(term, algebra.pow(atom, exponent))
                    continue
                for _ in range(exponent):
                    if coefficient % c == 0:
                        coefficient //= c
                        term = algebra.mul(term, algebra.sub(x, r))
                    else:
                        term = algebra.mul(term, algebra.floordiv(x, c))
            total = algebra.add(total, algebra.mul(coefficient, term))
        return total

    def scale(self, x: Expr) -> int:
        """The factor of a hidden symbol in the user's symbol that it is a part of."""
        total = 1
        while x in self.hidden:
            x, c, _ = self.hidden[x]
            total *= c
        return total

    def part(self, x: Expr, c: int, r: int) -> Expr:
        """The hidden symbol k with x == c*k + r."""
        k = self.algebra.part_symbol(x, c, r)
        self.hidden[k] = (x, c, r)
        low, high = self.interval(x)
        limits = (None if low is None else -((r - low) // c), None if high is None else (high - r) // c)
        self.limits[k] = meet(self.limits.get(k, EVERYTHING), limits)
        self._intervals.pop(k, None)
        return k

    # -- changes ---------------------------------------------------------------------------------------

    def clear_derived(self) -> None:
        """Clear memoised results after a new fact: they stay true, but may be too weak."""
        self._inside.clear()
        self._applied.clear()
        self._intervals.clear()
        self.proved.clear()

    def narrow(self, monomial: Expr, interval: Interval) -> bool:
        """Intersect the limits with an interval. Returns whether they changed."""
        before = self.interval(monomial)
        after = meet(before, interval)
        if after == before:
            return False
        self.limits[monomial] = meet(self.limits.get(monomial, EVERYTHING), after)
        self._intervals.clear()
        if after[0] is not None and after[1] is not None and after[0] > after[1]:
            self.is_contradictory = True
        return True

    def add_inequality(self, p: Expr) -> None:
        self.inequalities[p] = None
        for monomial, coefficient in p.terms:
            if monomial:
                self.by_monomial.setdefault(monomial, []).append((coefficient, p))
