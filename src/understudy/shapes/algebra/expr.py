"""Integer expressions over symbolic sizes: interned polynomials over atoms.

An atom is a symbol, a floor-division, a modulo, a minimum, a maximum, an absolute value, or a power
that is not a polynomial. Every other expression is a sum of coefficient × monomial of atoms. Equal
expressions are the same object, so `is` compares them and a repeated operation is one look-up.

Division by zero (and a negative exponent) is assumed not to happen: statements about `a // b` hold at the sizes at which it
can be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from understudy.shapes.algebra import polynomials
from understudy.shapes.algebra.intervals import Interval, interval_of
from understudy.shapes.algebra.polynomials import Integer, Monomial, Terms, terms_of
from understudy.shapes.algebra.rewrites import fold_division, rewrite
from understudy.shapes.algebra.writers import TEXT, T, Writer

if TYPE_CHECKING:
    from understudy.shapes.algebra.conditions import Condition

NO_SYMBOLS: frozenset[Expr] = frozenset()
MANY = 32
"""Sums of more terms are built in one step; shorter ones term by term, which simplifies on the way."""


class Expr:
    """An interned expression. Made by an `Algebra`, never directly; not to be changed."""

    __slots__ = (
        "_interval", "_text", "algebra", "args", "depth", "high", "is_hidden", "is_symbol", "is_unbacked", "kind", "low",
        "name", "order", "symbols", "terms", "weight",
    )  # fmt: skip

    algebra: Algebra
    kind: str  # "sum", "symbol", or a key of REWRITES
    args: tuple[Integer, ...]
    terms: Terms
    symbols: frozenset[Expr]
    is_symbol: bool
    is_hidden: bool  # a symbol of the prover, never visible outside
    is_unbacked: bool  # an unbacked symbol
    name: str
    low: int | None
    high: int | None
    order: int
    weight: int  # the length of the expression
    depth: int  # the nesting depth of operations

    def __init__(self, algebra: Algebra, kind: str, order: int) -> None:
        self.algebra = algebra
        self.kind = kind
        self.order = order
        self.args = ()
        self.name = ""
        self.low = self.high = None
        self.is_symbol = self.is_hidden = self.is_unbacked = False
        self.weight, self.depth = 1, 0
        self._interval: Interval | None = None
        self._text = ""

    def __add__(self, other: object) -> Integer:
        return self.algebra.add(self, other) if isinstance(other, OPERANDS) else NotImplemented

    def __radd__(self, other: object) -> Integer:
        return self.algebra.add(other, self) if isinstance(other, int) else NotImplemented

    def __sub__(self, other: object) -> Integer:
        return self.algebra.sub(self, other) if isinstance(other, OPERANDS) else NotImplemented

    def __rsub__(self, other: object) -> Integer:
        return self.algebra.sub(other, self) if isinstance(other, int) else NotImplemented

    def __mul__(self, other: object) -> Integer:
        return self.algebra.mul(self, other) if isinstance(other, OPERANDS) else NotImplemented

    def __rmul__(self, other: object) -> Integer:
        return self.algebra.mul(other, self) if isinstance(other, int) else NotImplemented

    def __floordiv__(self, other: object) -> Integer:
        return self.algebra.floordiv(self, other) if isinstance(other, OPERANDS) else NotImplemented

    def __rfloordiv__(self, other: object) -> Integer:
        return self.algebra.floordiv(other, self) if isinstance(other, int) else NotImplemented

    def __mod__(self, other: object) -> Integer:
        return self.algebra.mod(self, other) if isinstance(other, OPERANDS) else NotImplemented

    def __rmod__(self, other: object) -> Integer:
        return self.algebra.mod(other, self) if isinstance(other, int) else NotImplemented

    def __pow__(self, other: object) -> Integer:
        return self.algebra.pow(self, other) if isinstance(other, OPERANDS) else NotImplemented

    def __rpow__(self, other: object) -> Integer:
        return self.algebra.pow(other, self) if isinstance(other, int) else NotImplemented

    def __neg__(self) -> Integer:
        return self.algebra.neg(self)

    def __abs__(self) -> Integer:
        return self.algebra.absolute(self)

    def __str__(self) -> str:
        if not self._text:
            self._text = TEXT.write(self).text
        return self._text

    __repr__ = __str__

    def write(self, writer: Writer[T]) -> T:
        if self.is_symbol:
            return writer.write_symbol(self)
        if self.kind == "sum":
            return writer.write_sum(self.terms)
        return writer.write_integer_operation(self, self.kind, self.args)

    @property
    def is_atom(self) -> bool:
        return self.kind != "sum"

    @property
    def atoms(self) -> Iterable[Expr]:
        """The atoms of the outermost sum."""
        return {atom: None for monomial, _ in self.terms for atom, _ in monomial}

    def evaluate(self, values: Mapping[Expr, int]) -> int:
        """The value at the given sizes; ArithmeticError where it can't be computed."""
        if self.kind == "sum":
            total = 0
            for monomial, coefficient in self.terms:
                for atom, exponent in monomial:
                    coefficient *= atom.evaluate(values) ** exponent
                total += coefficient
            return total
        if self.is_symbol:
            return values[self]
        return EVALUATE[self.kind](*[a if isinstance(a, int) else a.evaluate(values) for a in self.args])

    def substitute(self, values: Mapping[Expr, Integer]) -> Integer:
        """The expression with symbols replaced, all at once."""
        if self.symbols.isdisjoint(values):
            return self
        if self.is_symbol:
            return values[self]
        algebra = self.algebra
        if self.kind == "sum":
            return algebra.map_atoms(self, lambda atom: atom.substitute(values))
        return algebra.apply(
            self.kind, *[a if isinstance(a, int) else a.substitute(values) for a in self.args]
        )


OPERANDS = (int, Expr)


def power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise ArithmeticError(f"{base} ** {exponent} is not an integer")
    return int(base**exponent)


EVALUATE: dict[str, Any] = {
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "min": min,
    "max": max,
    "abs": abs,
    "pow": power,
}


class Algebra:
    """The tables of one environment: interned expressions, and memoised operations."""

    def __init__(self) -> None:
        self.algebra = self  # with `apply`, `atom`, `interval`, `bounds`: the protocol `Knowledge`
        self.symbols: dict[str, Expr] = {}
        self.conditions: dict[tuple[Any, ...], Condition] = {}
        self.compared: dict[tuple[Any, ...], bool | Condition] = {}
        self._parts: dict[tuple[Expr, int, int], Expr] = {}
        self._atoms: dict[tuple[Any, ...], Expr] = {}
        self._interned: dict[Terms, Expr] = {}
        self._sums: dict[tuple[Integer, Integer], Integer] = {}
        self._differences: dict[tuple[Integer, Integer], Integer] = {}
        self._products: dict[tuple[Integer, Integer], Integer] = {}
        self._quotients: dict[tuple[Integer, Integer], Integer] = {}
        self._remainders: dict[tuple[Integer, Integer], Integer] = {}
        self._applied: dict[tuple[Any, ...], Integer] = {}
        self._count = 0

    # -- making ------------------------------------------------------------------------------------

    def symbol(self, name: str, low: int | None = 0, high: int | None = None) -> Expr:
        """A new symbol for the sizes low..high; None is unbounded."""
        if name in self.symbols:
            raise ValueError(f"symbol {name} exists already")
        symbol = self.symbols[name] = self.free_symbol(name)
        symbol.low, symbol.high = low, high
        return symbol

    def free_symbol(self, name: str) -> Expr:
        """A symbol without bounds that is not registered by its name."""
        symbol = self._create("symbol")
        symbol.name, symbol.is_symbol = name, True
        symbol.symbols = frozenset((symbol,))
        return symbol

    def part_symbol(self, whole: Expr, divisor: int, remainder: int) -> Expr:
        """The hidden symbol for (whole - remainder) / divisor, used by provers only."""
        key = (whole, divisor, remainder)
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = self._create("symbol")
            part.name = f"({whole.name} - {remainder})/{divisor}"
            part.is_symbol = part.is_hidden = True
            part.symbols = frozenset((part,))
        return part

    def _create(self, kind: str) -> Expr:
        self._count += 1
        atom = Expr(self, kind, self._count)
        if kind != "sum":
            atom.terms = ((((atom, 1),), 1),)
            self._interned[atom.terms] = atom
        return atom

    def atom(self, kind: str, args: tuple[Integer, ...]) -> Integer:
        """The atom, without rewriting it."""
        key = (kind, *args)
        found = self._atoms.get(key)
        if found is None:
            found = self._atoms[key] = self._create(kind)
            found.args = args
            inner = [a for a in args if isinstance(a, Expr)]
            found.symbols = NO_SYMBOLS.union(*[a.symbols for a in inner])
            found.weight = 1 + sum([a.weight for a in inner])
            found.depth = 1 + max([a.depth for a in inner], default=0)
        return found

    def count_atoms(self) -> int:
        return len(self._atoms)

    def atoms_since(self, count: int) -> list[Expr]:
        """The atoms made since there were `count` of them, in order."""
        return [] if count == len(self._atoms) else list(self._atoms.values())[count:]

    def normal(self, table: dict[Monomial, int]) -> Integer:
        """The expression of a table of terms."""
        present = [term for term in table.items() if term[1]]
        if len(present) > 1:
            present.sort(key=polynomials.term_order)
        elif not present:
            return 0
        elif not present[0][0]:
            return present[0][1]
        terms = tuple(present)
        found = self._interned.get(terms)
        if found is not None:
            return found
        shorter = fold_division(self, terms)
        if shorter is not None:
            return shorter
        found = self._interned[terms] = self._create("sum")
        found.terms = terms
        atoms = [atom for monomial, _ in terms for atom, _ in monomial]
        found.symbols = NO_SYMBOLS.union(*[atom.symbols for atom in atoms])
        found.weight = len(terms) + sum([atom.weight for atom in atoms])
        found.depth = max([atom.depth for atom in atoms])
        return found

    def monomial(self, monomial: Monomial, coefficient: int = 1) -> Integer:
        return self.normal({monomial: coefficient})

    def map_atoms(self, expr: Expr, change: Callable[[Expr], Integer]) -> Integer:
        """The sum with each atom changed."""
        parts: list[Integer] = []
        for monomial, coefficient in expr.terms:
            term: Integer = coefficient
            for atom, exponent in monomial:
                term = self.mul(term, self.pow(change(atom), exponent))
            parts.append(term)
        return self.add_all(parts)

    # -- operations --------------------------------------------------------------------------------

    def add(self, a: Integer, b: Integer) -> Integer:
        found = self._sums.get((a, b))
        if found is not None:
            return found
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        table = dict(terms_of(a))
        polynomials.accumulate(table, terms_of(b))
        result = self._sums[a, b] = self.normal(table)
        return result

    def add_all(self, parts: Sequence[Integer]) -> Integer:
        """The sum, in linear time."""
        if len(parts) <= MANY:
            total: Integer = 0
            for part in parts:
                total = self.add(total, part)
            return total
        table: dict[Monomial, int] = {}
        for part in parts:
            polynomials.accumulate(table, terms_of(part))
        return self.normal(table)

    def sub(self, a: Integer, b: Integer) -> Integer:
        found = self._differences.get((a, b))
        if found is not None:
            return found
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        table = dict(terms_of(a))
        polynomials.accumulate(table, terms_of(b), -1)
        result = self._differences[a, b] = self.normal(table)
        return result

    def mul(self, a: Integer, b: Integer) -> Integer:
        found = self._products.get((a, b))
        if found is not None:
            return found
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        result = self._products[a, b] = self.normal(polynomials.product(terms_of(a), terms_of(b)))
        return result

    def neg(self, a: Integer) -> Integer:
        return self.sub(0, a)

    def floordiv(self, a: Integer, b: Integer) -> Integer:
        found = self._quotients.get((a, b))
        if found is None:
            found = self._quotients[a, b] = self.apply("floordiv", a, b)
        return found

    def mod(self, a: Integer, b: Integer) -> Integer:
        found = self._remainders.get((a, b))
        if found is None:
            found = self._remainders[a, b] = self.apply("mod", a, b)
        return found

    def pow(self, a: Integer, b: Integer) -> Integer:
        return a if isinstance(b, int) and b == 1 else self.apply("pow", a, b)

    def minimum(self, a: Integer, b: Integer) -> Integer:
        return self.apply("min", a, b)

    def maximum(self, a: Integer, b: Integer) -> Integer:
        return self.apply("max", a, b)

    def absolute(self, a: Integer) -> Integer:
        return self.apply("abs", a)

    def apply(self, kind: str, *args: Integer) -> Integer:
        """Apply an operation that is not polynomial, by name."""
        key = (kind, *args)
        found = self._applied.get(key)
        if found is None:
            found = self._applied[key] = rewrite(kind, self, args)
        return found

    # -- queries of rewrites ----------------------------------------------------------------------

    def interval(self, size: Integer) -> Interval:
        """The interval from the declared ranges of the symbols."""
        if isinstance(size, int):
            return size, size
        if size._interval is None:
            size._interval = interval_of(self, size)
        return size._interval

    def bounds(self, monomial: Expr) -> Interval:
        """The declared range of a symbol; other expressions have none."""
        return monomial.low, monomial.high


__all__ = ["Algebra", "Expr", "Integer"]
