"""Expressions and conditions in other languages: one fold, and a writer for each language.

    Writer         the fold: a method for each kind of part
    TextWriter     text for users: the notation of Python, with the names of the symbols
    PythonWriter   Python code for plain numbers, in which symbols may have other names
    TorchWriter    Python code for symbolic sizes, which decides nothing

There are three more: `SympyWriter` in shapes/sympy_writer.py, the writer of graph nodes in graph/symbol_nodes.py, and the
writer of torch's numbers in exporting/interop.py. No code parses the text of a writer: guards are data, and their printed
form is free to change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from understudy.shapes.algebra.polynomials import Monomial, Terms

if TYPE_CHECKING:
    from understudy.shapes.algebra.expr import Expr
    from understudy.shapes.algebra.floats import Operand

Term = tuple[Monomial, int]

T = TypeVar("T")


class Writable(Protocol):
    """An expression or a condition, which calls the writer's method for its kind."""

    def write(self, writer: Writer[T]) -> T: ...


class Writer(Generic[T]):
    """The fold. `T` is the result for a part: text, a sympy object, a graph node."""

    def write(self, value: Operand | Writable) -> T:
        return self.write_number(value) if isinstance(value, (int, float)) else value.write(self)

    def write_number(self, number: float) -> T:
        raise NotImplementedError

    def write_symbol(self, symbol: Expr) -> T:
        raise NotImplementedError

    def write_sum(self, terms: Sequence[Term]) -> T:
        """A sum of coefficient × monomial."""
        raise NotImplementedError

    def write_integer_operation(self, value: Writable, operation: str, operands: Sequence[Operand]) -> T:
        """floordiv, mod, pow, min, max or abs of integers."""
        return self.write_operation(value, operation, operands)

    def write_operation(self, value: Writable, operation: str, operands: Sequence[Operand]) -> T:
        """An operation of `floats.OPERATIONS`: on floats, or on integers without normal form."""
        raise NotImplementedError

    def write_comparison(self, relation: str, left: T, right: T) -> T:
        """`relation` is an operator of Python."""
        raise NotImplementedError

    def write_junction(self, kind: str, parts: Sequence[Writable]) -> T:
        """`kind` is "and" or "or"."""
        raise NotImplementedError

    def write_relation(self, kind: str, terms: Terms) -> T:
        """A relation of a sum to zero: eq, ne or ge."""
        left, relation, right = sides(kind, terms)
        return self.write_comparison(relation, self.write_sum(left), self.write_sum(right))


def sides(kind: str, terms: Terms) -> tuple[list[Term], str, list[Term]]:
    """A relation of a sum to zero as a comparison, with positive terms on both sides where possible."""
    left = [(m, c) for m, c in terms if c > 0]
    right = [(m, -c) for m, c in terms if c < 0]
    relation = {"eq": "==", "ne": "!=", "ge": ">="}[kind]
    has_strict_form = kind == "ge" and (((), 1) in right) and len(right) > 1 and bool(left)
    if has_strict_form:  # a >= b + 1
        right.remove(((), 1))
        relation = ">"
    if not right and len(left) > 1 and not left[-1][0]:  # n == -1, rather than n + 1 == 0
        right = [((), -left.pop()[1])]
    first_is_right = any(m for m, _ in right) and not any(m for m, _ in left)
    leading = terms[0]
    if first_is_right or (leading[1] < 0 and leading[0]):
        left, right = right, left
        relation = {">=": "<=", ">": "<"}.get(relation, relation)
    return left, relation, right


# --- text ----------------------------------------------------------------------------------------------------------

JUNCTION, COMPARISON, SUM, QUOTIENT, PRODUCT, ATOM = range(6)
"""The precedence of a piece of text. A quotient, a remainder or a power is in parentheses inside any other operation."""
INFIX = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
         "and": "&", "or": "|", "xor": "^"}  # fmt: skip
INTEGER_INFIX = {"floordiv": "//", "mod": " % ", "pow": "**"}
CONVERSIONS = frozenset({"to_float", "value"})
"""Operations that change only the type of a number: not written in text and sympy."""


class Text(NamedTuple):
    text: str
    binding: int

    def within(self, binding: int) -> str:
        """With parentheses unless it binds at least that tightly."""
        return self.text if self.binding >= binding else f"({self.text})"


class TextWriter(Writer[Text]):
    def write_number(self, number: float) -> Text:
        return Text(str(number), ATOM if number >= 0 else SUM)

    def write_symbol(self, symbol: Expr) -> Text:
        return Text(symbol.name, ATOM)

    def write_sum(self, terms: Sequence[Term]) -> Text:
        """A positive term comes first: `seq - 1`, never `-1 + seq`."""
        if not terms:
            return Text("0", ATOM)
        first = next((i for i, (_, coefficient) in enumerate(terms) if coefficient > 0), 0)
        leading = self._write_term(*terms[first])
        if len(terms) == 1 and terms[0][1] > 0:
            return leading
        # In Python -a//b is (-a)//b.
        pieces = [leading.text if terms[first][1] > 0 else f"-{leading.within(PRODUCT)}"]
        for position, (monomial, coefficient) in enumerate(terms):
            if position != first:
                pieces += ["-" if coefficient < 0 else "+", self._write_term(monomial, coefficient).text]
        return Text(" ".join(pieces), SUM)

    def _write_term(self, monomial: Monomial, coefficient: int) -> Text:
        """Without the sign."""
        size = abs(coefficient)
        if size == 1 and len(monomial) == 1 and monomial[0][1] == 1:
            return self.write(monomial[0][0])
        factors = [str(size)] if size != 1 or not monomial else []
        for atom, exponent in monomial:
            factor = self.write(atom).within(ATOM)
            factors.append(factor if exponent == 1 else f"{factor}**{exponent}")
        return Text("*".join(factors), PRODUCT if monomial else ATOM)

    def write_integer_operation(self, value: Writable, operation: str, operands: Sequence[Operand]) -> Text:
        if operation not in INTEGER_INFIX:
            return self.write_operation(value, operation, operands)
        left, right = map(self.write, operands)
        before = left.within(ATOM if operation == "pow" else PRODUCT)
        return Text(f"{before}{INTEGER_INFIX[operation]}{right.within(ATOM)}", QUOTIENT)

    def write_operation(self, value: Writable, operation: str, operands: Sequence[Operand]) -> Text:
        written = [self.write(operand) for operand in operands]
        if operation in INFIX:
            left, right = (part.within(ATOM) for part in written)
            return Text(f"{left} {INFIX[operation]} {right}", SUM)
        if operation in CONVERSIONS:
            return written[0]
        if operation == "neg":
            return Text(f"-{written[0].within(ATOM)}", SUM)
        if operation == "ite":
            return self.write_choice(*(part.text for part in written))
        return self.write_call(operation, [part.text for part in written])

    def write_choice(self, condition: str, then: str, otherwise: str) -> Text:
        return Text(f"({then} if {condition} else {otherwise})", ATOM)

    def write_call(self, function: str, operands: Sequence[str]) -> Text:
        return Text(f"{function}({', '.join(operands)})", ATOM)

    def write_comparison(self, relation: str, left: Text, right: Text) -> Text:
        return Text(f"{left.text} {relation} {right.text}", COMPARISON)

    def write_junction(self, kind: str, parts: Sequence[Writable]) -> Text:
        return Text(f" {kind} ".join(self.write(part).within(COMPARISON) for part in parts), JUNCTION)


TEXT = TextWriter()


# --- code ----------------------------------------------------------------------------------------------------------

LONGEST = 10_000
"""The largest number of characters of the code for one number."""


class TooLong(ValueError):
    """The code that computes a number is too long."""


class PythonWriter(TextWriter):
    """`names`: the names of symbols; a symbol without a name is written as its definition."""

    def __init__(self, names: Mapping[Expr, str], definitions: Mapping[Expr, Writable]) -> None:
        self._names, self._definitions = names, definitions
        self._written: dict[Expr, Text] = {}

    def write_number(self, number: float) -> Text:
        return super().write_number(number) if math.isfinite(number) else Text(f"float('{number}')", ATOM)

    def write_symbol(self, symbol: Expr) -> Text:
        if symbol in self._names or symbol not in self._definitions:
            return Text(self._names.get(symbol, symbol.name), ATOM)
        found = self._written.get(symbol)
        if found is None:
            found = self._written[symbol] = self.write(self._definitions[symbol])
            if len(found.text) > LONGEST:
                raise TooLong("the guard is too long for code; use ShapeEnv.check")
        return found


TORCH_FUNCTIONS = {
    "min": "torch.sym_min", "max": "torch.sym_max", "abs": "abs", "round": "round", "sqrt": "torch.sym_sqrt",
    "floor": "math.floor", "ceil": "math.ceil", "trunc": "math.trunc",
}  # fmt: skip


class TorchWriter(PythonWriter):
    """`(n == 3) | (n == 5)`, `torch.sym_min(n, m)`: Python's `or` and `min` would force a decision."""

    def write_junction(self, kind: str, parts: Sequence[Writable]) -> Text:
        joint = " | " if kind == "or" else " & "
        return Text(joint.join(self.write(part).within(ATOM) for part in parts), SUM)

    def write_choice(self, condition: str, then: str, otherwise: str) -> Text:
        return Text(f"torch.sym_ite({condition}, {then}, {otherwise})", ATOM)

    def write_call(self, function: str, operands: Sequence[str]) -> Text:
        name = TORCH_FUNCTIONS.get(function, f"torch._sym_{function}")
        if function in ("min", "max"):  # binary functions
            return Text(functools.reduce(lambda left, right: f"{name}({left}, {right})", operands), ATOM)
        return super().write_call(name, operands)
