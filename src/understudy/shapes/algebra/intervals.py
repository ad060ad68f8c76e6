"""Interval arithmetic, and the interval of an expression. None is unbounded on that side.

Where two terms of a sum depend on each other, term by term is too wide, so three views are intersected:
each term by itself; the polynomial moved so that its atoms start at zero (`x*y - y` with x >= 1 is
`x'*y`); and a multiple in which floor-divisions by numbers have become modulos, which are narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import comb, lcm
from typing import TYPE_CHECKING, Protocol

from understudy.shapes.algebra import polynomials
from understudy.shapes.algebra.polynomials import ONE, Integer, Monomial, Terms

if TYPE_CHECKING:
    from understudy.shapes.algebra.expr import Algebra, Expr

Interval = tuple[int | None, int | None]
EVERYTHING: Interval = (None, None)
LARGEST_EXPONENT = 64
LARGEST_SHIFT = 64  # terms in a moved polynomial
LARGEST_SCALE = 1 << 20
MOST_EXPANSIONS = 8


class Knowledge(Protocol):
    """What rewrites and intervals use: an algebra (declared ranges) or a store of facts."""

    algebra: Algebra

    def apply(self, kind: str, *args: Integer) -> Integer: ...
    def atom(self, kind: str, args: tuple[Integer, ...]) -> Integer: ...
    def interval(self, size: Integer) -> Interval: ...
    def bounds(self, monomial: Expr) -> Interval: ...


# -- arithmetic --------------------------------------------------------------------------------------


def plus(a: Interval, b: Interval) -> Interval:
    (low, high), (low2, high2) = a, b
    return (
        None if low is None or low2 is None else low + low2,
        None if high is None or high2 is None else high + high2,
    )


def scale(a: Interval, factor: int) -> Interval:
    low, high = a
    if factor < 0:
        low, high = high, low
    elif factor == 0:
        return 0, 0
    return None if low is None else low * factor, None if high is None else high * factor


def meet(a: Interval, b: Interval) -> Interval:
    (low, high), (low2, high2) = a, b
    if low is None or (low2 is not None and low2 > low):
        low = low2
    if high is None or (high2 is not None and high2 < high):
        high = high2
    return low, high


def times(a: Interval, b: Interval) -> Interval:
    (low, high), (low2, high2) = a, b
    if low is not None and low2 is not None and low >= 0 and low2 >= 0:  # the common case: sizes
        if high == 0 or high2 == 0:
            return 0, 0
        return low * low2, None if high is None or high2 is None else high * high2
    if None in a or None in b:
        return _times_unbounded(a, b)
    corners = [x * y for x in a for y in b if x is not None and y is not None]
    return min(corners), max(corners)


def _times_unbounded(a: Interval, b: Interval) -> Interval:
    if (0, 0) in (a, b):
        return 0, 0
    if is_nonpositive(a):
        return scale(times(scale(a, -1), b), -1)
    if is_nonpositive(b):
        return scale(times(a, scale(b, -1)), -1)
    for first, second in ((a, b), (b, a)):
        (low, high), (low2, high2) = first, second
        if low is not None and low >= 0:  # and the second has both signs
            return (
                None if low2 is None or high is None else low2 * high,
                None if high2 is None or high is None else high2 * high,
            )
    return EVERYTHING


def to_the(a: Interval, exponent: int) -> Interval:
    if exponent == 1:
        return a
    if exponent > LARGEST_EXPONENT:
        return (0, None) if exponent % 2 == 0 or is_nonnegative(a) else EVERYTHING
    low, high = a
    if exponent % 2:
        return None if low is None else low**exponent, None if high is None else high**exponent
    low, high = magnitude(a)
    return (low or 0) ** exponent, None if high is None else high**exponent


def magnitude(a: Interval) -> Interval:
    low, high = a
    if low is not None and low >= 0:
        return a
    if high is not None and high <= 0:
        return scale(a, -1)
    return 0, None if low is None or high is None else max(-low, high)


def is_nonnegative(a: Interval) -> bool:
    return a[0] is not None and a[0] >= 0


def is_nonpositive(a: Interval) -> bool:
    return a[1] is not None and a[1] <= 0


def excludes_zero(a: Interval) -> bool:
    return (a[0] is not None and a[0] > 0) or (a[1] is not None and a[1] < 0)


# -- of atoms ----------------------------------------------------------------------------------------


def floordiv_interval(p: Interval, q: Interval) -> Interval:
    if is_nonpositive(q):
        p, q = scale(p, -1), scale(q, -1)
    if not is_nonnegative(q):
        high = magnitude(p)[1]
        return (None, None) if high is None else (-high, high)
    smallest, largest = max(q[0] or 0, 1), q[1]
    low, high = p
    if low is not None:
        if low < 0:
            low = low // smallest
        else:
            low = low // largest if largest else 0
    if high is not None:
        if high >= 0:
            high = high // smallest
        else:
            high = high // largest if largest else -1
    return low, high


def mod_interval(p: Interval, q: Interval) -> Interval:
    low, high = q
    if is_nonnegative(q):
        above = None if high is None else max(high - 1, 0)
        if is_nonnegative(p):
            return meet((0, above), (0, p[1]))
        return 0, above
    below = None if low is None else min(low + 1, 0)
    if is_nonpositive(q):
        return below, 0
    return below, None if high is None else high - 1


def min_interval(*parts: Interval) -> Interval:
    lows = [low for low, _ in parts]
    highs = [high for _, high in parts if high is not None]
    return (
        None if None in lows else min(low for low in lows if low is not None),
        min(highs) if highs else None,
    )


def max_interval(*parts: Interval) -> Interval:
    return scale(min_interval(*(scale(part, -1) for part in parts)), -1)


def pow_interval(base: Interval, exponent: Interval) -> Interval:
    if not is_nonnegative(base):
        return EVERYTHING
    low, high = base
    least, most = exponent
    bounded = high is not None and most is not None and 0 <= most <= LARGEST_EXPONENT
    above = max(high, 1) ** most if bounded and high is not None and most is not None else None
    if low and least and 0 <= least <= LARGEST_EXPONENT:
        return low**least, above
    return (1 if low else 0), above


ATOM_INTERVALS: dict[str, Callable[..., Interval]] = {
    "floordiv": floordiv_interval,
    "mod": mod_interval,
    "min": min_interval,
    "max": max_interval,
    "abs": magnitude,
    "pow": pow_interval,
}


# -- of expressions ----------------------------------------------------------------------------------


def interval_of(knowledge: Knowledge, expr: Expr) -> Interval:
    """Not memoised: call `knowledge.interval`, which is."""
    result = without_scaling(knowledge, expr)
    if expr.kind == "sum" and len(expr.terms) > 1 and any(atom.kind == "floordiv" for atom in expr.atoms):
        result = meet(result, by_scaling(knowledge, expr))
    return result


def without_scaling(knowledge: Knowledge, expr: Expr) -> Interval:
    if expr.is_symbol:
        return knowledge.bounds(expr)
    if expr.kind != "sum":
        parts = [knowledge.interval(arg) for arg in expr.args]
        return meet(ATOM_INTERVALS[expr.kind](*parts), knowledge.bounds(expr))
    result = by_terms(knowledge, expr.terms)
    if sum(1 for monomial, _ in expr.terms if monomial) == 1:
        return result
    if None in result or any(len(m) > 1 or m[0][1] > 1 for m, _ in expr.terms if m):
        result = meet(result, by_moving(knowledge, expr.terms))
    return result


def by_terms(knowledge: Knowledge, terms: Terms) -> Interval:
    total: Interval = (0, 0)
    for monomial, coefficient in terms:
        total = plus(total, scale(monomial_interval(knowledge, monomial), coefficient))
    return total


def monomial_interval(knowledge: Knowledge, monomial: Monomial) -> Interval:
    result: Interval = (1, 1)
    for atom, exponent in monomial:
        result = times(result, to_the(knowledge.interval(atom), exponent))
    if len(monomial) > 1 or (monomial and monomial[0][1] > 1):
        whole = knowledge.algebra.monomial(monomial)
        if not isinstance(whole, int):
            result = meet(result, knowledge.bounds(whole))
    return result


def by_moving(knowledge: Knowledge, terms: Terms) -> Interval:
    low = _low_by_moving(knowledge, terms)
    high = _low_by_moving(knowledge, tuple((m, -c) for m, c in terms))
    return low, None if high is None else -high


def _low_by_moving(knowledge: Knowledge, terms: Terms) -> int | None:
    """The least value, from the polynomial in x' >= 0 with x = low + x' or x = high - x' for each atom."""
    if _has_endless_term(knowledge, terms):
        return None
    widths: dict[Expr, int | None] = {}
    table = dict(terms)
    for atom in {atom: None for monomial, _ in terms for atom, _ in monomial}:
        low, high = knowledge.interval(atom)
        only_lowers = all(c < 0 for m, c in table.items() if any(a is atom for a, _ in m))
        if high is not None and (low is None or only_lowers):
            start, direction = high, -1
        elif low is not None:
            start, direction = low, 1
        else:
            return None
        widths[atom] = None if low is None or high is None else high - low
        if start or direction < 0:
            table = _shift_atom(table, atom, start, direction)
        if len(table) > LARGEST_SHIFT:
            return None
    least = table.get(ONE, 0)
    for monomial, coefficient in table.items():
        if monomial and coefficient < 0:
            for atom, exponent in monomial:
                width = widths[atom]
                if width is None:
                    return None
                coefficient *= width**exponent
            least += coefficient
    return least


def _has_endless_term(knowledge: Knowledge, terms: Terms) -> bool:
    """Whether some unbounded term contains an atom that no other term has."""
    for monomial, coefficient in terms:
        if len(monomial) == 1 and knowledge.interval(monomial[0][0])[0 if coefficient > 0 else 1] is None:
            atom = monomial[0][0]
            if sum(1 for other, _ in terms for each, _ in other if each is atom) == 1:
                return coefficient < 0 or monomial[0][1] % 2 == 1
    return False


def _shift_atom(table: dict[Monomial, int], atom: Expr, start: int, direction: int) -> dict[Monomial, int]:
    """The polynomial after atom = start + direction * atom'."""
    moved: dict[Monomial, int] = {}
    for monomial, coefficient in table.items():
        exponent = dict(monomial).get(atom, 0)
        if exponent == 0 or exponent > LARGEST_EXPONENT:
            # A power that is too high to expand keeps its atom, which would be wrong after the substitution; so the
            # caller gets a table that is too large, and answers unbounded.
            if exponent:
                return {((atom, i),): -1 for i in range(1, LARGEST_SHIFT + 2)}
            moved[monomial] = moved.get(monomial, 0) + coefficient
            continue
        rest = tuple((a, e) for a, e in monomial if a is not atom)
        for k in range(exponent + 1):
            factor = comb(exponent, k) * start ** (exponent - k) * direction**k
            if factor:
                key = polynomials.times(rest, ((atom, k),)) if k else rest
                moved[key] = moved.get(key, 0) + coefficient * factor
    return {m: c for m, c in moved.items() if c}


def by_scaling(knowledge: Knowledge, expr: Expr) -> Interval:
    scale, polynomial = without_floors(knowledge, expr)
    if polynomial is expr:
        return EVERYTHING
    # Without scaling again: a numerator may contain floor-divisions, without end.
    known: Interval = (
        (polynomial, polynomial) if isinstance(polynomial, int) else without_scaling(knowledge, polynomial)
    )
    low, high = known
    return None if low is None else -(-low // scale), None if high is None else high // scale


def without_floors(knowledge: Knowledge, expr: Integer) -> tuple[int, Integer]:
    """A multiple of the expression in which p // c has become (p - p % c) / c, and its factor."""
    total = 1
    for _ in range(3):  # a numerator may contain further floor-divisions
        if isinstance(expr, int):
            break
        scale = 1
        for monomial, _ in expr.terms:
            needed = 1
            for atom, exponent in monomial:
                divisor = atom.args[1] if atom.kind == "floordiv" else 1
                if isinstance(divisor, int):
                    needed *= divisor**exponent
            scale = lcm(scale, needed)
        if abs(scale * total) > LARGEST_SCALE:
            break
        larger = _expand(knowledge, {m: c * scale for m, c in expr.terms})
        if larger is None:
            break
        total, expr = total * abs(scale), larger
    return total, expr


def expand(knowledge: Knowledge, size: Integer) -> Integer:
    """With c*(p // c) written as p - p % c, wherever the coefficients allow it and some of p cancels."""
    if isinstance(size, int):
        return size
    longer = _expand(knowledge, dict(size.terms))
    return size if longer is None else longer


def _expand(knowledge: Knowledge, table: dict[Monomial, int]) -> Integer | None:
    """None if nothing cancels. Modifies the table."""
    # All floor-divisions are expanded before the sum is built: those that do not cancel are folded back.
    cancels = False
    for _ in range(MOST_EXPANSIONS):
        found = next(expandable(table.items()), None)
        if found is None:
            break
        cancels |= _expand_one(knowledge, table, *found)
    return knowledge.algebra.normal(table) if cancels else None


def _expand_one(
    knowledge: Knowledge, table: dict[Monomial, int], atom: Expr, rest: Monomial, count: int
) -> bool:
    """One floor-division within a table of terms; whether something cancels."""
    p, q = atom.args
    remainder = knowledge.apply("mod", p, q)
    share = ((rest, count),)
    whole = polynomials.product(share, polynomials.terms_of(q))
    numerator = polynomials.product(share, polynomials.terms_of(p))
    cancels = isinstance(remainder, int) or remainder.kind != "mod"
    cancels |= any(monomial and table.get(monomial, 0) * c < 0 for monomial, c in numerator.items())
    polynomials.accumulate(table, polynomials.product(tuple(whole.items()), ((((atom, 1),), 1),)).items(), -1)
    polynomials.accumulate(table, numerator.items())
    polynomials.accumulate(table, polynomials.product(share, polynomials.terms_of(remainder)).items(), -1)
    return cancels


def compact(knowledge: Knowledge, size: Integer) -> Integer:
    """`expand`, unless that makes the expression longer."""
    longer = expand(knowledge, size)
    return size if len(polynomials.terms_of(longer)) > len(polynomials.terms_of(size)) else longer


def expandable(terms: Iterable[tuple[Monomial, int]]) -> Iterator[tuple[Expr, Monomial, int]]:
    """(floor-division p // q, rest, n) for each term that contains n * rest * q * (p // q)."""
    for monomial, coefficient in terms:
        for place, (atom, exponent) in enumerate(monomial):
            if atom.kind != "floordiv":
                continue
            divisor = polynomials.terms_of(atom.args[1])
            count = polynomials.truncate(coefficient, divisor[0][1])
            if not count or len(divisor) != 1:
                continue
            left = ((atom, exponent - 1),) if exponent > 1 else ()
            rest = polynomials.over((*monomial[:place], *left, *monomial[place + 1 :]), divisor[0][0])
            if rest is not None:
                yield atom, rest, count
