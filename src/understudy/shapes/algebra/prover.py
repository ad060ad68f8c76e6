"""Proofs that an expression is >= 0, or zero, for all sizes that satisfy the facts of a store.

Each tactic is a function that returns True only with a proof. `TACTICS` is the order in which they are
tried; a budget ends the search, so that a question that can't be decided stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import gcd, lcm

from understudy.shapes.algebra import polynomials
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.intervals import (
    excludes_zero,
    expand,
    expandable,
    is_nonnegative,
    is_nonpositive,
    monomial_interval,
    scale,
)
from understudy.shapes.algebra.knowledge import Store
from understudy.shapes.algebra.polynomials import Integer, Monomial, constant_of

DEPTH = 3  # facts combined in one proof
BUDGET = 25  # inequalities tried for one question
LARGEST_PRODUCT = 256  # number whose divisors are tried
LARGEST_SPLIT = 12  # residues that are tried one by one


class Search:
    """One proof search: the store, and the remaining budget."""

    def __init__(self, store: Store, splits: int = 1) -> None:
        self.store = store
        self.algebra = store.algebra
        self.budget = BUDGET
        self.splits = splits

    def nonnegative(self, p: Integer, depth: int = DEPTH) -> bool:
        if isinstance(p, int):
            return p >= 0
        key = (p, depth, self.splits)
        found = self.store.proved.get(key)
        if found is None:
            low, high = self.store.interval(p)
            if low is not None and low >= 0:
                found = True
            elif (high is not None and high < 0) or self.budget <= 0:
                return False
            else:
                self.budget -= 1
                found = any(tactic(self, p, depth) for tactic in TACTICS)
                if not found and self.budget <= 0:
                    return False  # out of budget, not refuted: a new search may succeed
            self.store.proved[key] = found
        return found

    def zero(self, p: Integer) -> bool:
        if isinstance(p, int):
            return p == 0
        return self.nonnegative(p) and self.nonnegative(self.algebra.neg(p))

    def nonzero(self, p: Integer) -> bool:
        if isinstance(p, int):
            return p != 0
        store, algebra = self.store, self.algebra
        if constant_of(p) % polynomials.variable_content(p.terms):
            return True
        if excludes_zero(store.interval(p)) or p in store.nonzero or algebra.neg(p) in store.nonzero:
            return True
        factor = polynomials.common_monomial(p.terms)
        if factor and p.terms != ((factor, 1),):
            rest = algebra.normal(polynomials.divide_terms(p.terms, factor))
            if self.nonzero(algebra.normal({factor: 1})) and self.nonzero(rest):
                return True
        if len(p.terms) == 1 and len(p.terms[0][0]) > 1:
            return all(self.nonzero(atom) for atom in p.atoms)
        if self.is_no_product(p):
            return True
        if self.nonnegative(algebra.sub(p, 1)) or self.nonnegative(algebra.sub(-1, p)):
            return True
        return self.is_no_multiple(p)

    def is_no_product(self, p: Expr) -> bool:
        """Whether p is k*x*y - n for a small n, and x or y can't be any of the divisors of n."""
        n = constant_of(p)
        if not 0 < abs(n) <= LARGEST_PRODUCT or len(p.terms) != 2 or len(p.terms[0][0]) < 2:
            return False
        divisors = [i for i in range(1, abs(n) + 1) if n % i == 0]
        for atom in p.atoms:
            low, high = self.store.interval(atom)
            possible = (d for i in divisors for d in (i, -i))
            if not any((low is None or d >= low) and (high is None or d <= high) for d in possible):
                return True
        return False

    def is_no_multiple(self, p: Expr) -> bool:
        """Whether p has a non-zero remainder for some number that divides most of its coefficients."""
        numbers = {abs(c) for m, c in p.terms if m and abs(c) > 1}
        return any(excludes_zero(self.store.interval(self.store.apply("mod", p, n))) for n in numbers)


# -- tactics -----------------------------------------------------------------------------------------------


def by_factor(search: Search, p: Expr, depth: int) -> bool:
    """m*q >= n from m >= 0 and q >= 0 (for n <= 0), or from m >= 1 and q >= n."""
    n = -constant_of(p)
    algebra = search.algebra
    product = algebra.add(p, n)
    if isinstance(product, int):
        return False
    m = polynomials.common_monomial(product.terms)
    if not m or len(product.terms) < 2:
        return False
    factor = search.store.interval(algebra.normal({m: 1}))
    rest = algebra.normal(polynomials.divide_terms(product.terms, m))
    if n <= 0:
        if is_nonnegative(factor):
            return search.nonnegative(rest, depth)
        return is_nonpositive(factor) and search.nonnegative(algebra.neg(rest), depth)
    positive = factor[0] is not None and factor[0] > 0
    return positive and search.nonnegative(algebra.sub(rest, n), depth)


def by_facts(search: Search, p: Expr, depth: int) -> bool:
    """a*p == (something >= 0) + b * (a fact that is >= 0)."""
    if depth == 0:
        return False
    return any(search.nonnegative(rest, depth - 1) for rest in remainders(search, p))


def remainders(search: Search, p: Expr) -> Iterator[Integer]:
    """a*p - b*m*fact, in which one of the terms that may be negative cancels."""
    store, algebra = search.store, search.algebra
    known = store.by_monomial
    local: dict[Monomial, list[tuple[int, Expr]]] = {}
    rounded = {atom for atom, _, _ in expandable(p.terms)}
    for atom in p.atoms:
        for lemma in lemmas(search, atom, atom in rounded):
            for monomial, coefficient in lemma.terms:
                if monomial:
                    local.setdefault(monomial, []).append((coefficient, lemma))
    if not known and not local:
        return
    for monomial, coefficient in p.terms:
        low = scale(monomial_interval(store, monomial), coefficient)[0]
        if not monomial or (low is not None and low >= 0):
            continue
        for part in parts_of(monomial):
            for number, fact in chain(known.get(part, ()), local.get(part, ())):
                if (number < 0) != (coefficient < 0):
                    continue
                factor = polynomials.over(monomial, part)
                assert factor is not None
                if factor and not is_nonnegative(monomial_interval(store, factor)):
                    continue
                g = gcd(number, coefficient)
                multiple = algebra.mul(algebra.normal({factor: abs(coefficient) // g}), fact)
                yield algebra.sub(algebra.mul(abs(number) // g, p), multiple)


def parts_of(monomial: Monomial) -> Iterator[Monomial]:
    """The monomial itself first, then its divisors."""
    yield monomial
    for i, (atom, exponent) in enumerate(monomial):
        if len(monomial) > 1:
            yield monomial[:i] + monomial[i + 1 :]
        if len(monomial) > 2 or exponent > 1:
            yield ((atom, 1),)


def lemmas(search: Search, atom: Expr, is_rounded: bool) -> Iterator[Expr]:
    """Expressions that are >= 0 by the definition of an atom, beyond its interval. `is_rounded`: p contains a multiple
    of c*(p // c)."""
    store, algebra = search.store, search.algebra
    found: list[Integer] = []
    if atom.kind in ("floordiv", "mod"):
        p, q = atom.args
        is_known_positive = is_nonnegative(store.interval(q))  # zero can't be
        if is_known_positive and atom.kind == "mod":
            if is_nonnegative(store.interval(p)):
                found.append(algebra.sub(p, atom))
            if not isinstance(q, int):
                found.append(algebra.sub(algebra.sub(q, 1), atom))
        elif is_known_positive:
            if is_rounded or not isinstance(q, int):
                rest = algebra.sub(p, algebra.mul(q, atom))
                found += [rest, algebra.sub(algebra.sub(q, 1), rest)]
            if is_nonnegative(store.interval(p)):
                found.append(algebra.sub(p, atom))
    elif atom.kind == "max":
        found += [algebra.sub(atom, arg) for arg in atom.args]
    elif atom.kind == "min":
        found += [algebra.sub(arg, atom) for arg in atom.args]
    elif atom.kind == "abs":
        found += [algebra.sub(atom, atom.args[0]), algebra.add(atom, atom.args[0])]
    yield from (lemma for lemma in found if not isinstance(lemma, int))


def by_cases(search: Search, p: Expr, depth: int) -> bool:
    """A minimum, maximum or absolute value equals one of its operands at each size."""
    if not search.splits:
        return False
    atom = next((atom for atom in p.atoms if atom.kind in ("min", "max", "abs")), None)
    if atom is None:
        return False
    options = atom.args if atom.kind != "abs" else (atom.args[0], search.algebra.neg(atom.args[0]))
    return all_cases(search, depth, [with_atom(p, atom, option) for option in options])


def with_atom(p: Expr, atom: Expr, value: Integer) -> Integer:
    return p.algebra.map_atoms(p, lambda other: value if other is atom else other)


def by_residues(search: Search, p: Expr, depth: int) -> bool:
    """Each symbol under a floor-division or modulo by numbers is c*k + r for one of the r below c."""
    if not search.splits:
        return False
    store, algebra = search.store, search.algebra
    divisor, symbols = 1, set[Expr]()
    for atom in p.atoms:
        if atom.kind in ("floordiv", "mod"):
            if not isinstance(atom.args[1], int):
                return False
            divisor = lcm(divisor, atom.args[1])
            symbols |= atom.symbols
    if len(symbols) != 1 or not 1 < divisor <= LARGEST_SPLIT:
        return False
    (x,) = symbols
    cases = []
    for r in range(divisor):
        k = store.part(x, divisor, r)
        value = algebra.add(algebra.mul(divisor, k), r)
        low, high = store.interval(k)
        if low is not None and high is not None and low > high:
            continue  # no admissible size has this residue
        cases.append(rewrite_with(store, p, x, value))
    return all_cases(search, depth, cases)


def rewrite_with(store: Store, size: Integer, x: Expr, value: Integer) -> Integer:
    """The expression with x replaced, simplified by all facts."""
    if isinstance(size, int) or x not in size.symbols:
        return size
    if size.is_symbol:
        return value
    if size.kind == "sum":
        return store.algebra.map_atoms(size, lambda atom: rewrite_with(store, atom, x, value))
    return store.apply(size.kind, *[rewrite_with(store, arg, x, value) for arg in size.args])


def all_cases(search: Search, depth: int, cases: list[Integer]) -> bool:
    search.splits -= 1
    try:
        return all(search.nonnegative(expand(search.store, case), min(depth, 1)) for case in cases)
    finally:
        search.splits += 1


TACTICS = (by_factor, by_facts, by_cases, by_residues)
