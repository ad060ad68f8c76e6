"""The table of rewrites that keeps expressions canonical.

A rule gets the known facts and the arguments, and returns the simpler expression or None. The first result is used; without
a result, the operation is an atom. `REWRITES` at the end is the whole list.

All rules hold for Python's floor-division and modulo at all sizes at which the divisor is not zero.
Floor-division and modulo reduce their numerator alike, so that `c*(p//c) + p % c == p` can be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import TYPE_CHECKING

from understudy.shapes.algebra import polynomials
from understudy.shapes.algebra.intervals import Knowledge, is_nonnegative, is_nonpositive
from understudy.shapes.algebra.polynomials import ONE, Integer, Monomial, Terms, constant_of, terms_of

if TYPE_CHECKING:
    from understudy.shapes.algebra.expr import Algebra, Expr

Rule = Callable[..., "Integer | None"]
MOST_TERMS_OF_A_POWER = 32
LARGEST_POWER_OF_A_SUM = 8
LARGEST_POWER_OF_A_NUMBER = 1024


def rewrite(kind: str, known: Knowledge, args: tuple[Integer, ...]) -> Integer:
    for rule in REWRITES[kind]:
        result = rule(known, *args)
        if result is not None:
            return result
    return known.atom(kind, args)


# -- floor-division and modulo: helpers ----------------------------------------------------------------


def is_positive(known: Knowledge, divisor: Integer) -> bool:
    """Whether a divisor, which is never zero, is positive."""
    return is_nonnegative(known.interval(divisor))


def multiples_and_rest(known: Knowledge, p: Integer, q: Integer) -> tuple[Integer, Integer]:
    """(a, r) with p == a*q + r, with a simple r."""
    algebra = known.algebra
    divisor = terms_of(q)
    if len(divisor) > 1:
        quotient = polynomials.exact_quotient(terms_of(p), divisor)
        return (0, p) if quotient is None else (algebra.normal(quotient), 0)
    lead, number = divisor[0]
    multiples: dict[Monomial, int] = {}
    for monomial, coefficient in terms_of(p):
        factor = polynomials.over(monomial, lead)
        if factor is not None:
            share = polynomials.truncate(coefficient, number) if monomial else coefficient // number
            if share:
                multiples[factor] = share
    if not multiples:
        return 0, p
    a = algebra.normal(multiples)
    return a, algebra.sub(p, algebra.mul(a, q))


def leads_with_minus(size: Integer) -> bool:
    return not isinstance(size, int) and size.terms[0][1] < 0


def mirror(known: Knowledge, p: Integer, c: int) -> Integer:
    """-p + c - 1: its floor-division by c is minus that of p, its modulo is c - 1 minus that of p."""
    return known.algebra.sub(c - 1, p)


def shared_factor(p: Integer, q: Integer) -> tuple[Monomial, int]:
    if isinstance(q, int):
        return ONE, 1
    both = terms_of(p), terms_of(q)
    return polynomials.common_monomial(*both), gcd(polynomials.content(both[0]), polynomials.content(both[1]))


def without_shared_factor(
    known: Knowledge, p: Integer, q: Integer
) -> tuple[Integer, Integer, Integer] | None:
    """(g, p/g, q/g) if there is a common factor g."""
    monomial, number = shared_factor(p, q)
    if not monomial and number == 1:
        return None
    normal = known.algebra.normal
    return (
        normal({monomial: number}),
        normal(polynomials.divide_terms(terms_of(p), monomial, number)),
        normal(polynomials.divide_terms(terms_of(q), monomial, number)),
    )


def coarser(known: Knowledge, p: Integer, c: int) -> tuple[int, Integer] | None:
    """(g, p // g) if all coefficients but the constant share the factor g with the number c."""
    g = gcd(polynomials.variable_content(terms_of(p)), c)
    if g == 1:
        return None
    return g, known.algebra.normal({m: k // g for m, k in terms_of(p)})


def without_inner_modulos(known: Knowledge, p: Integer, q: Integer) -> tuple[Integer, Integer]:
    """(r, a) with p == r - a*q, where r has x in place of x % d wherever the difference is a multiple of q."""
    algebra = known.algebra
    multiples: Integer = 0
    for monomial, coefficient in terms_of(p):
        for atom, exponent in monomial:
            if atom.kind != "mod" or exponent != 1:
                continue
            x, d = atom.args
            if isinstance(q, int):
                count = coefficient * d // q if isinstance(d, int) and coefficient * d % q == 0 else 0
            else:
                count = coefficient if d is q else 0
            if count:
                rest = tuple(factor for factor in monomial if factor[0] is not atom)
                p = algebra.add(p, algebra.mul(algebra.normal({rest: coefficient}), algebra.sub(x, atom)))
                whole = algebra.mul(algebra.normal({rest: count}), known.apply("floordiv", x, d))
                multiples = algebra.add(multiples, whole)
                break
    return p, multiples


# -- floor-division ------------------------------------------------------------------------------------


def divide_trivially(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    if isinstance(q, int):
        if isinstance(p, int):
            return p // q
        if q == 0:
            raise ZeroDivisionError(f"{p} // 0")
        if q == 1:
            return p
    if p is q:
        return 1
    return 0 if isinstance(p, int) and p == 0 else None


def divide_by_negative(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    if (q < 0) if isinstance(q, int) else leads_with_minus(q):
        return known.apply("floordiv", known.algebra.neg(p), known.algebra.neg(q))
    return None


def divide_out_shared_factor(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    found = without_shared_factor(known, p, q)
    return None if found is None else known.apply("floordiv", found[1], found[2])


def divide_coarsely(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    found = coarser(known, p, q) if isinstance(q, int) else None
    return None if found is None else known.apply("floordiv", found[1], q // found[0])


def divide_multiples(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    a, rest = multiples_and_rest(known, p, q)
    if isinstance(a, int) and a == 0:
        return None
    return known.algebra.add(a, known.apply("floordiv", rest, q))


def divide_mirrored(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    if isinstance(q, int) and leads_with_minus(p):
        return known.algebra.neg(known.apply("floordiv", mirror(known, p, q), q))
    return None


def divide_a_quotient(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    """(a//b + n) // c == (a + n*b) // (b*c) for positive b and c."""
    algebra = known.algebra
    n = constant_of(p)
    atom = algebra.sub(p, n)
    if isinstance(atom, int) or atom.kind != "floordiv":
        return None
    a, b = atom.args
    if not (is_positive(known, b) and is_positive(known, q)):
        return None
    return known.apply("floordiv", algebra.add(a, algebra.mul(n, b)), algebra.mul(b, q))


def divide_rounded(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    """(x - x % c) // c == x // c, and the like: when x in place of x % d cancels something."""
    changed, multiples = without_inner_modulos(known, p, q)
    if changed is p:
        return None
    _, rest = multiples_and_rest(known, changed, q)
    if len(terms_of(rest)) >= len(terms_of(p)):
        return None
    return known.algebra.sub(known.apply("floordiv", changed, q), multiples)


def divide_within_bounds(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    low, high = known.interval(p)
    if isinstance(q, int):
        if low is not None and high is not None and low // q == high // q:
            return low // q
        return None
    algebra = known.algebra
    if low is not None and low >= 0:
        least = known.interval(algebra.sub(q, p))[0]
        return 0 if least is not None and least > 0 else None
    if high is not None and high < 0 and is_positive(known, q):
        return -1 if is_nonnegative(known.interval(algebra.add(q, p))) else None
    return None


# -- modulo --------------------------------------------------------------------------------------------


def remain_trivially(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    if isinstance(q, int):
        if isinstance(p, int):
            return p % q
        if q == 0:
            raise ZeroDivisionError(f"{p} % 0")
        if q == 1:
            return 0
    if p is q:
        return 0
    return 0 if isinstance(p, int) and p == 0 else None


def remain_by_negative(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    algebra = known.algebra
    if (q < 0) if isinstance(q, int) else leads_with_minus(q):
        return algebra.neg(known.apply("mod", algebra.neg(p), algebra.neg(q)))
    return None


def remain_of_shared_factor(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    found = without_shared_factor(known, p, q)
    return None if found is None else known.algebra.mul(found[0], known.apply("mod", found[1], found[2]))


def remain_coarsely(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    found = coarser(known, p, q) if isinstance(q, int) else None
    if found is None or not isinstance(q, int):
        return None
    g, quotient = found
    algebra = known.algebra
    return algebra.add(algebra.mul(g, known.apply("mod", quotient, q // g)), constant_of(p) % g)


def remain_without_multiples(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    a, rest = multiples_and_rest(known, p, q)
    return None if isinstance(a, int) and a == 0 else known.apply("mod", rest, q)


def remain_mirrored(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    if isinstance(q, int) and leads_with_minus(p):
        return known.algebra.sub(q - 1, known.apply("mod", mirror(known, p, q), q))
    return None


def remain_of_modulos(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    changed, _ = without_inner_modulos(known, p, q)
    return None if changed is p else known.apply("mod", changed, q)


def remain_within_bounds(known: Knowledge, p: Integer, q: Integer) -> Integer | None:
    quotient = divide_within_bounds(known, p, q)
    return None if quotient is None else known.algebra.sub(p, known.algebra.mul(q, quotient))


# -- minimum and maximum -------------------------------------------------------------------------------


def extreme_of(kind: str, wins: Callable[[Knowledge, Integer, Integer], bool]) -> Rule:
    """The rule for min or max: keeps only operands that may win, flat and in order of creation, a number last."""

    def extreme(known: Knowledge, *args: Integer) -> Integer | None:
        flat: list[Integer] = []
        for arg in args:
            flat.extend(arg.args if not isinstance(arg, int) and arg.kind == kind else (arg,))
        kept: list[Integer] = []
        for arg in flat:
            if any(wins(known, other, arg) for other in kept):
                continue
            kept = [other for other in kept if not wins(known, arg, other)] + [arg]
        if len(kept) == 1:
            return kept[0]
        ordered = tuple(
            sorted(kept, key=lambda a: (isinstance(a, int), 0 if isinstance(a, int) else a.order))
        )
        return None if ordered == args else known.apply(kind, *ordered)

    return extreme


def is_at_least(known: Knowledge, a: Integer, b: Integer) -> bool:
    return is_nonnegative(known.interval(known.algebra.sub(a, b)))


def is_at_most(known: Knowledge, a: Integer, b: Integer) -> bool:
    return is_at_least(known, b, a)


# -- absolute value and power ----------------------------------------------------------------------------


def absolute_of_known_sign(known: Knowledge, p: Integer) -> Integer | None:
    interval = known.interval(p)
    if is_nonnegative(interval):
        return p
    return known.algebra.neg(p) if is_nonpositive(interval) else None


def absolute_of_factors(known: Knowledge, p: Integer) -> Integer | None:
    algebra = known.algebra
    terms = terms_of(p)
    number = polynomials.content(terms) * (-1 if leads_with_minus(p) else 1)
    if number == 1:
        return None
    return algebra.mul(
        abs(number), known.apply("abs", algebra.normal(polynomials.divide_terms(terms, ONE, number)))
    )


def power_of_numbers(known: Knowledge, base: Integer, exponent: Integer) -> Integer | None:
    if isinstance(exponent, int):
        if exponent < 0:
            raise ArithmeticError(f"{base} ** {exponent} is not an integer")
        if exponent < 2:
            return base if exponent else 1
        if isinstance(base, int):
            return int(base**exponent)
    return 1 if isinstance(base, int) and base == 1 else None


def power_of_a_product(known: Knowledge, base: Integer, exponent: Integer) -> Integer | None:
    terms = terms_of(base)
    if not isinstance(exponent, int) or len(terms) != 1:
        return None
    monomial, coefficient = terms[0]
    if abs(coefficient) > 1 and exponent > LARGEST_POWER_OF_A_NUMBER:
        return None
    return known.algebra.normal({tuple((a, e * exponent) for a, e in monomial): coefficient**exponent})


def power_of_a_sum(known: Knowledge, base: Integer, exponent: Integer) -> Integer | None:
    if not isinstance(exponent, int) or exponent > LARGEST_POWER_OF_A_SUM:
        return None
    if len(terms_of(base)) ** exponent > MOST_TERMS_OF_A_POWER**2:
        return None
    result = base
    for _ in range(exponent - 1):
        result = known.algebra.mul(result, base)
    return result


# -- sums ------------------------------------------------------------------------------------------------


def fold_division(algebra: Algebra, terms: Terms) -> Integer | None:
    """The sum with a quotient and its remainder combined, or None without such a pair.

    c*(p//c) + p % c == p            a quotient and its remainder
    p - p % c        == c*(p//c)     rounded down: padding to multiples and cutting at multiples read like that
    """
    remainders = [(m, c, atom) for m, c in terms for atom, _ in m if atom.kind == "mod"]
    if not remainders:
        return fold_half(algebra, terms)
    table = dict(terms)
    has_quotient = any(atom.kind == "floordiv" for monomial, _ in terms for atom, _ in monomial)
    for monomial, coefficient, atom in remainders:
        rest = polynomials.over(monomial, ((atom, 1),)) or ONE
        numerator = [(polynomials.times(rest, m), coefficient * c) for m, c in terms_of(atom.args[0])]
        variable = [term for term in numerator if term[0] != rest]
        is_rounded = bool(variable) and all(_has(table, m, -c) for m, c in variable)
        if not is_rounded and not has_quotient:
            continue
        pair = _pair_of(algebra, atom)
        if pair is None:
            continue
        partner, number = polynomials.times(rest, pair[0]), coefficient * pair[1]
        if is_rounded or _has(table, partner, number):
            table[monomial] -= coefficient
            polynomials.accumulate(table, ((partner, number),), -1)
            polynomials.accumulate(table, numerator)
            return algebra.normal(table)
    return fold_half(algebra, terms)


def fold_half(algebra: Algebra, terms: Terms) -> Integer | None:
    """p - p//2 == (p + 1)//2 and p - (p + 1)//2 == p//2, where p is an atom."""
    signs = {coefficient > 0 for monomial, coefficient in terms if monomial}
    if len(signs) < 2:
        return None
    table = dict(terms)
    for monomial, coefficient in terms:
        for atom, exponent in monomial:
            if (
                atom.kind != "floordiv"
                or exponent > 1
                or not isinstance(atom.args[1], int)
                or atom.args[1] % 2
            ):
                continue
            p, c = atom.args
            rest = polynomials.over(monomial, ((atom, 1),)) or ONE
            for start, end in ((0, c // 2), (-c // 2, -c // 2)):
                whole = algebra.floordiv(algebra.add(p, start), c // 2)
                if isinstance(whole, int) or not whole.is_atom:
                    continue
                partner = polynomials.times(rest, ((whole, 1),))
                if _has(table, partner, -coefficient):
                    table[monomial] -= coefficient
                    table[partner] += coefficient
                    other = terms_of(algebra.floordiv(algebra.add(p, end), c))
                    polynomials.accumulate(table, polynomials.product(((rest, -coefficient),), other).items())
                    return algebra.normal(table)
    return None


def _has(table: dict[Monomial, int], monomial: Monomial, coefficient: int) -> bool:
    """Whether the table has the term with at least this coefficient, of the same sign."""
    share = table.get(monomial, 0)
    return abs(share) >= abs(coefficient) and (share < 0) == (coefficient < 0)


def _pair_of(algebra: Algebra, atom: Expr) -> tuple[Monomial, int] | None:
    """Monomial and coefficient of q * (p//q) for the atom p % q, if that is a single term."""
    p, q = atom.args
    divisor = terms_of(q)
    quotient = algebra.apply("floordiv", p, q)
    if len(divisor) != 1 or isinstance(quotient, int) or not quotient.is_atom:
        return None
    return polynomials.times(divisor[0][0], ((quotient, 1),)), divisor[0][1]


REWRITES: dict[str, tuple[Rule, ...]] = {
    "floordiv": (
        divide_trivially,           # x // 1 == x, x // x == 1, 0 // x == 0
        divide_by_negative,         # p // -c == -p // c
        divide_out_shared_factor,   # (p*g) // (q*g) == p // q
        divide_coarsely,            # (2*p + 1) // 4 == p // 2
        divide_multiples,           # (c*p + r) // c == p + r // c
        divide_mirrored,            # -p // c == -((p + c - 1) // c)
        divide_a_quotient,          # (a // b) // c == a // (b*c)
        divide_rounded,             # (x - x % c) // c == x // c
        divide_within_bounds,       # p // c == 0 for 0 <= p < c
    ),
    "mod": (
        remain_trivially,           # x % 1 == 0, x % x == 0
        remain_by_negative,         # p % -c == -(-p % c)
        remain_of_shared_factor,    # (p*g) % (q*g) == g * (p % q)
        remain_coarsely,            # (2*p + 1) % 4 == 2*(p % 2) + 1
        remain_without_multiples,   # (c*p + r) % c == r % c
        remain_mirrored,            # -p % c == c - 1 - (p + c - 1) % c
        remain_of_modulos,          # (p % c) % c == p % c
        remain_within_bounds,       # p % c == p for 0 <= p < c
    ),
    "max": (extreme_of("max", is_at_least),),
    "min": (extreme_of("min", is_at_most),),
    "abs": (absolute_of_known_sign, absolute_of_factors),
    "pow": (power_of_numbers, power_of_a_product, power_of_a_sum),
}  # fmt: skip
