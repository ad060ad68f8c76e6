"""Conditions on sizes: interned relations to zero, and their conjunctions and disjunctions.

    eq    p == 0      coefficients without a common factor, the leading one positive
    ne    p != 0      the same
    ge    p >= 0      coefficients without a common factor, the constant rounded down
    and   of conditions, flat, without repetition
    or    the same

Conditions that are decided by the declared ranges of the symbols are plain bools.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd, lcm
from typing import Any

from understudy.shapes.algebra import polynomials
from understudy.shapes.algebra.expr import Algebra, Expr
from understudy.shapes.algebra.intervals import Interval, Knowledge, compact, excludes_zero, is_nonnegative
from understudy.shapes.algebra.polynomials import Integer, Monomial, constant_of
from understudy.shapes.algebra.writers import TEXT, T, Writer

LONGEST_PERIOD = 64
LARGEST_ROOT = 1 << 50  # below, a root by floats is right after rounding


class Condition:
    """An interned condition. Made by the functions of this file; not to be changed."""

    __slots__ = ("_negation", "_text", "algebra", "expr", "kind", "order", "parts", "symbols")

    algebra: Algebra
    kind: str
    expr: Expr  # of a relation
    parts: tuple[Condition, ...]  # of a conjunction or disjunction
    symbols: frozenset[Expr]
    order: int
    _negation: bool | Condition | None
    _text: str

    def __bool__(self) -> bool:
        raise TypeError(f"the truth value of {self} depends on sizes; use Facts.prove")

    def __str__(self) -> str:
        if not self._text:
            self._text = TEXT.write(self).text
        return self._text

    __repr__ = __str__

    def write(self, writer: Writer[T]) -> T:
        if self.parts:
            return writer.write_junction(self.kind, self.parts)
        return writer.write_relation(self.kind, self.expr.terms)

    def evaluate(self, values: Mapping[Expr, int]) -> bool:
        """Whether it holds at the given sizes."""
        if self.parts:
            combine = all if self.kind == "and" else any
            return combine(part.evaluate(values) for part in self.parts)
        return HOLDS[self.kind](self.expr.evaluate(values))

    def substitute(self, values: Mapping[Expr, Integer]) -> bool | Condition:
        """The condition with symbols replaced, all at once."""
        if self.parts:
            return join(self.kind, [part.substitute(values) for part in self.parts])
        return relation(self.kind, self.expr.substitute(values))


HOLDS: dict[str, Callable[[int], bool]] = {
    "eq": lambda value: value == 0,
    "ne": lambda value: value != 0,
    "ge": lambda value: value >= 0,
}


# -- relations -------------------------------------------------------------------------------------------


def eq(a: Integer, b: Integer) -> bool | Condition:
    return _compare("eq", a, b)


def ne(a: Integer, b: Integer) -> bool | Condition:
    return _compare("ne", a, b)


def ge(a: Integer, b: Integer) -> bool | Condition:
    return _compare("ge", a, b)


def le(a: Integer, b: Integer) -> bool | Condition:
    return _compare("ge", b, a)


def gt(a: Integer, b: Integer) -> bool | Condition:
    return _compare("gt", a, b)


def lt(a: Integer, b: Integer) -> bool | Condition:
    return _compare("gt", b, a)


def _compare(kind: str, a: Integer, b: Integer) -> bool | Condition:
    if type(a) is Expr:
        algebra = a.algebra
    elif type(b) is Expr:
        algebra = b.algebra
    else:
        return PLAIN[kind](a, b)
    found = algebra.compared.get((kind, a, b))
    if found is None:
        difference = algebra.sub(a, b)
        if kind == "gt":
            found = relation("ge", algebra.sub(difference, 1))
        else:
            found = relation(kind, difference)
        algebra.compared[kind, a, b] = found
    return found


PLAIN: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: bool(a == b),
    "ne": lambda a, b: bool(a != b),
    "ge": lambda a, b: bool(a >= b),
    "gt": lambda a, b: bool(a > b),
}


def relation(kind: str, p: Integer) -> bool | Condition:
    """The normal form of p == 0, p != 0 or p >= 0."""
    if isinstance(p, int):
        return HOLDS[kind](p)
    algebra = p.algebra
    found = algebra.compared.get((kind, p))
    if found is None:
        if kind == "ne":
            found = negate(relation("eq", p))
        else:
            found = decided_by_interval(kind, algebra.interval(p))
            if found is None:
                found = _normal(kind, compact(algebra, p))
        algebra.compared[kind, p] = found
    return found


def _normal(kind: str, p: Integer) -> bool | Condition:
    if isinstance(p, int):
        return HOLDS[kind](p)
    algebra = p.algebra
    decided = decided_by_interval(kind, algebra.interval(p))
    if decided is not None:
        return decided
    # A factor that is never zero can be dropped; in an inequality it has to be positive.
    factor = polynomials.common_monomial(p.terms)
    if factor:
        factor = tuple(
            (atom, exponent) for atom, exponent in factor if _has_sign(kind, algebra.interval(atom))
        )
        if factor:
            return relation(kind, algebra.normal(polynomials.divide_terms(p.terms, factor)))
    number = polynomials.variable_content(p.terms)
    constant = constant_of(p)
    if kind == "eq":
        if constant % number:
            return False
        if p.terms[0][1] < 0:
            number = -number
    if number != 1:
        # Rounding the constant down is exact for >= and does nothing for ==.
        return relation(kind, algebra.normal({m: c // number for m, c in p.terms}))
    plainer = _of_product(p) if kind == "ge" else None
    if plainer is None:
        plainer = _of_one_term(kind, p)
    return _intern(algebra, kind, p, ()) if plainer is None else plainer


def _has_sign(kind: str, interval: Interval) -> bool:
    low, high = interval
    return (low is not None and low > 0) or (kind == "eq" and high is not None and high < 0)


def _of_product(p: Expr) -> bool | Condition | None:
    """m*q >= n is q >= 1, for m >= n >= 1."""
    cofactor = cofactor_of_product(p.algebra, p)
    return None if cofactor is None else ge(cofactor, 1)


def cofactor_of_product(knowledge: Knowledge, p: Expr) -> Integer | None:
    """The q of m*q - n, if it is that with m >= n >= 1: then m*q >= n exactly where q >= 1."""
    n = -constant_of(p)
    if n < 1 or len(p.terms) < 3:
        return None
    product = p.terms[:-1]
    factor = polynomials.common_monomial(product)
    if not factor:
        return None
    normal = knowledge.algebra.normal
    least = knowledge.interval(normal({factor: 1}))[0]
    return None if least is None or least < n else normal(polynomials.divide_terms(product, factor))


# -- one operation compared with a number: simplified to its operand compared with a number ----------------


def _of_one_term(kind: str, p: Expr) -> bool | Condition | None:
    """The simpler form of ±term + n == 0 or >= 0, if there is one."""
    variable = [term for term in p.terms if term[0]]
    if len(variable) != 1:
        return None
    monomial, sign = variable[0]
    number = -constant_of(p) * sign  # the term is compared with it
    relation_to = kind if kind == "eq" else "ge" if sign > 0 else "le"
    exponent = gcd(*(exponent for _, exponent in monomial))
    if exponent > 1:
        return _of_power(relation_to, monomial, exponent, number)
    atom = monomial[0][0]
    plainer = OF_OPERATION.get(atom.kind) if len(monomial) == 1 else None
    if plainer is None:
        return None
    operand, by = atom.args
    return plainer(relation_to, operand, by, number) if isinstance(by, int) and by > 0 else None


def _of_power(kind: str, monomial: Monomial, exponent: int, number: int) -> bool | Condition | None:
    """x**2 == 49 is x == 7, for x >= 0."""
    algebra = monomial[0][0].algebra
    base = algebra.normal({tuple((atom, e // exponent) for atom, e in monomial): 1})
    if not is_nonnegative(algebra.interval(base)) or number < 0:
        return None
    root = round(number ** (1 / exponent)) if number < LARGEST_ROOT else 0
    if not (root**exponent <= number < (root + 1) ** exponent):
        return None
    if kind == "eq":
        return eq(base, root) if root**exponent == number else False
    return le(base, root) if kind == "le" else ge(base, root if root**exponent == number else root + 1)


def _of_quotient(kind: str, p: Integer, c: int, number: int) -> bool | Condition | None:
    """p // 4 >= 2 is p >= 8, and p // 4 <= 2 is p <= 11."""
    if kind == "eq":
        return None
    return ge(p, c * number) if kind == "ge" else le(p, c * number + c - 1)


def _of_remainder(kind: str, p: Integer, c: int, number: int) -> bool | Condition | None:
    """(p + 6) % 7 == 6 is p % 7 == 0, and (p + 6) % 7 <= 5 is p % 7 != 0."""
    if isinstance(p, int):
        return None
    algebra = p.algebra
    if kind == "eq":
        start = constant_of(p)
        return eq(algebra.mod(algebra.sub(p, start), c), (number - start) % c) if start else None
    if number in (1, c - 1) and kind == "ge":
        return ne(algebra.mod(p, c), 0) if number == 1 else eq(algebra.mod(p, c), c - 1)
    if number in (0, c - 2) and kind == "le":
        return eq(algebra.mod(p, c), 0) if number == 0 else ne(algebra.mod(p, c), c - 1)
    return None


OF_OPERATION = {"floordiv": _of_quotient, "mod": _of_remainder}


def separate(condition: Condition) -> tuple[bool | Condition, ...]:
    """The conditions of a conjunction. A sum of non-negative terms is 0 if each of them is."""
    if condition.kind == "and":
        return condition.parts
    terms = condition.expr.terms if condition.kind == "eq" else ()
    if len(terms) < 2 or any(not monomial or count < 0 for monomial, count in terms):
        return (condition,)
    algebra = condition.algebra
    parts = [algebra.normal({monomial: 1}) for monomial, _ in terms]
    if not all(is_nonnegative(algebra.interval(part)) for part in parts):
        return (condition,)
    return tuple(relation("eq", part) for part in parts)


def by_remainder(condition: Condition) -> Condition:
    """(n + 1) // 2 == n // 2 is n % 2 == 0: a condition that holds for exactly one remainder, or all but one, in that
    form."""
    if condition.parts or len(condition.symbols) != 1:
        return condition
    divisors = {atom.args[1] for atom in condition.expr.atoms if atom.kind in ("floordiv", "mod")}
    numbers = [divisor for divisor in divisors if isinstance(divisor, int)]
    (symbol,), algebra, period = condition.symbols, condition.algebra, lcm(*numbers)
    if len(numbers) < len(divisors) or not 1 < period <= LONGEST_PERIOD:
        return condition
    if condition.substitute({symbol: algebra.add(symbol, period)}) is not condition:
        return condition
    holds = [condition.evaluate({symbol: period + remainder}) for remainder in range(period)]
    if sum(holds) not in (1, period - 1):
        return condition
    is_one = sum(holds) == 1
    found = (eq if is_one else ne)(algebra.mod(symbol, period), holds.index(is_one))
    return found if isinstance(found, Condition) and found.expr.weight < condition.expr.weight else condition


def decided_by_interval(kind: str, interval: tuple[int | None, int | None]) -> bool | None:
    if kind == "ge":
        if is_nonnegative(interval):
            return True
        return False if interval[1] is not None and interval[1] < 0 else None
    if excludes_zero(interval):
        return kind == "ne"
    return kind == "eq" if interval == (0, 0) else None


def _intern(algebra: Algebra, kind: str, p: Integer, parts: tuple[Condition, ...]) -> Condition:
    key = (kind, p, *parts)
    found = algebra.conditions.get(key)
    if found is None:
        found = algebra.conditions[key] = Condition()
        found.algebra, found.kind, found.parts = algebra, kind, parts
        found.order = len(algebra.conditions)
        found._text, found._negation = "", None
        if isinstance(p, Expr):
            found.expr = p
            found.symbols = p.symbols
        else:
            found.symbols = frozenset().union(*(part.symbols for part in parts))
    return found


def is_about_one(condition: object) -> bool:
    """Whether it is the condition that a size is 1."""
    return isinstance(condition, Condition) and condition.kind == "eq" and constant_of(condition.expr) == -1


# -- combinations ----------------------------------------------------------------------------------------


def both(a: bool | Condition, b: bool | Condition) -> bool | Condition:
    return join("and", [a, b])


def either(a: bool | Condition, b: bool | Condition) -> bool | Condition:
    return join("or", [a, b])


def join(kind: str, conditions: list[bool | Condition]) -> bool | Condition:
    absorbing = kind == "or"
    parts: dict[Condition, None] = {}
    for condition in conditions:
        if isinstance(condition, bool):
            if condition is absorbing:
                return absorbing
        elif condition.kind == kind:
            parts.update(dict.fromkeys(condition.parts))
        else:
            parts[condition] = None
    if not parts:
        return not absorbing
    if any(negate(part) in parts for part in parts):
        return absorbing
    if len(parts) == 1:
        return next(iter(parts))
    ordered = tuple(sorted(parts, key=lambda part: part.order))
    return _intern(ordered[0].algebra, kind, 0, ordered)


def conjunction(conditions: list[bool | Condition]) -> bool | Condition:
    """The conjunction. Equalities are substituted into the others: `x == 1 and x*y == 1` becomes `x == 1 and y == 1`."""
    left, values = conditions, dict[Expr, int]()
    said: list[bool | Condition] = []
    while found := [(condition, *value) for condition in left if (value := _as_value(condition))]:
        said += [condition for condition, _, _ in found]
        values |= {atom: number for _, atom, number in found}
        known = {condition for condition, _, _ in found}
        left = [_with_atoms(condition, values) for condition in left if condition not in known]
    return join("and", [*said, *left])


def _as_value(condition: bool | Condition) -> tuple[Expr, int] | None:
    """(atom, number) if the condition is atom == number."""
    if isinstance(condition, bool) or condition.kind != "eq":
        return None
    atom = condition.algebra.sub(condition.expr, constant_of(condition.expr))
    return (atom, -constant_of(condition.expr)) if isinstance(atom, Expr) and atom.is_atom else None


def _with_atoms(condition: bool | Condition, values: Mapping[Expr, int]) -> bool | Condition:
    """The condition with numbers substituted for atoms of the outermost sums."""
    if isinstance(condition, bool):
        return condition
    if condition.parts:
        return join(condition.kind, [_with_atoms(part, values) for part in condition.parts])
    if all(atom not in values for atom in condition.expr.atoms):
        return condition
    return relation(
        condition.kind, condition.algebra.map_atoms(condition.expr, lambda atom: values.get(atom, atom))
    )


def negate(a: bool | Condition) -> bool | Condition:
    if isinstance(a, bool):
        return not a
    found: bool | Condition | None = a._negation
    if found is None:
        algebra = a.algebra
        if a.kind == "ge":
            found = relation("ge", algebra.sub(-1, a.expr))
        elif a.parts:
            found = join("or" if a.kind == "and" else "and", [negate(part) for part in a.parts])
        else:
            found = _negate_two_valued(a)
            if found is None:
                found = _intern(algebra, "ne" if a.kind == "eq" else "eq", a.expr, ())
        a._negation = found
        if isinstance(found, Condition) and found._negation is None:
            found._negation = a
    return found


def _negate_two_valued(a: Condition) -> Condition | None:
    """For an expression with only two values: not being one of them is being the other."""
    others: dict[Interval, int] = {(0, 1): 1, (-1, 0): -1}
    other = others.get(a.algebra.interval(a.expr)) if a.kind == "eq" else None
    found = relation("eq", a.algebra.sub(a.expr, other)) if other is not None else None
    return found if isinstance(found, Condition) else None


__all__ = ["Condition", "both", "either", "eq", "ge", "gt", "le", "lt", "ne", "negate"]
