"""Arithmetic on polynomials as plain tables {monomial: coefficient}.

A monomial is a tuple of (atom, exponent) in the order of creation of the atoms; the empty one stands for 1.
Nothing here interns or rewrites: `Algebra.normal` turns a table into an expression.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from understudy.shapes.algebra.expr import Expr

Monomial = tuple[tuple["Expr", int], ...]
Terms = tuple[tuple[Monomial, int], ...]
Integer = Union[int, "Expr"]
ONE: Monomial = ()


def terms_of(size: Integer) -> Terms:
    """The terms of an expression or of a number, highest degree first, the constant last."""
    if isinstance(size, int):
        return ((ONE, int(size)),) if size else ()
    return size.terms


def constant_of(size: Integer) -> int:
    if isinstance(size, int):
        return size
    monomial, coefficient = size.terms[-1]
    return 0 if monomial else coefficient


def term_order(term: tuple[Monomial, int]) -> tuple[int, ...]:
    """Graded lexicographic: an admissible order, so that division by the leading term ends."""
    monomial = term[0]
    if not monomial:
        return (0,)
    degree = 0
    key = [0]
    for atom, exponent in monomial:
        degree -= exponent
        key.append(atom.order)
        key.append(-exponent)
    key[0] = degree
    return tuple(key)


def times(a: Monomial, b: Monomial) -> Monomial:
    if not a:
        return b
    if not b:
        return a
    exponents = dict(a)
    for atom, exponent in b:
        exponents[atom] = exponents.get(atom, 0) + exponent
    return tuple(sorted(exponents.items(), key=lambda item: item[0].order))


def over(a: Monomial, b: Monomial) -> Monomial | None:
    """a / b, or None if b does not divide a."""
    if not b:
        return a
    exponents = dict(a)
    for atom, exponent in b:
        left = exponents.get(atom, 0) - exponent
        if left < 0:
            return None
        exponents[atom] = left
    return tuple((atom, e) for atom, e in exponents.items() if e)


def accumulate(table: dict[Monomial, int], terms: Iterable[tuple[Monomial, int]], factor: int = 1) -> None:
    for monomial, coefficient in terms:
        table[monomial] = table.get(monomial, 0) + factor * coefficient


def product(a: Terms, b: Terms) -> dict[Monomial, int]:
    table: dict[Monomial, int] = {}
    for left, j in a:
        for right, k in b:
            monomial = times(left, right)
            table[monomial] = table.get(monomial, 0) + j * k
    return table


def content(terms: Terms) -> int:
    """The greatest common divisor of the coefficients."""
    return gcd(*(coefficient for _, coefficient in terms))


def variable_content(terms: Terms) -> int:
    """The same without the constant."""
    return gcd(*(coefficient for monomial, coefficient in terms if monomial))


def common_monomial(*polynomials: Terms) -> Monomial:
    """The greatest monomial that divides each term of each polynomial."""
    common: dict[Expr, int] | None = None
    for terms in polynomials:
        for monomial, _ in terms:
            if common is None:
                common = dict(monomial)
            else:
                exponents = dict(monomial)
                common = {a: min(e, exponents[a]) for a, e in common.items() if a in exponents}
            if not common:
                return ONE
    return tuple(common.items()) if common else ONE


def divide_terms(terms: Terms, monomial: Monomial, number: int = 1) -> dict[Monomial, int]:
    """Divide each term by a monomial and a number that are known to divide it."""
    table = {}
    for each, coefficient in terms:
        quotient = over(each, monomial)
        assert quotient is not None
        table[quotient] = coefficient // number
    return table


def truncate(a: int, b: int) -> int:
    """a / b towards zero."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def exact_quotient(terms: Terms, divisor: Terms) -> dict[Monomial, int] | None:
    """Return the polynomial q with terms == q * divisor, or None."""
    lead, lead_coefficient = divisor[0]
    rest = dict(terms)
    quotient: dict[Monomial, int] = {}
    while rest:
        monomial, coefficient = min(rest.items(), key=term_order)
        factor = over(monomial, lead)
        if factor is None or coefficient % lead_coefficient:
            return None
        share = coefficient // lead_coefficient
        quotient[factor] = share
        for each, k in divisor:
            target = times(each, factor)
            left = rest.get(target, 0) - share * k
            if left:
                rest[target] = left
            else:
                rest.pop(target, None)
    return quotient
