"""Conversion of expressions and conditions to sympy objects, for torch's tools. Imports sympy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy

from understudy import _torch
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import FLOAT_NAME, FUNCTIONS
from understudy.shapes.algebra.writers import CONVERSIONS, Term, Writable, Writer

if TYPE_CHECKING:
    from understudy.shapes.algebra.floats import Operand


RELATIONS = {"==": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge}
_functions = _torch.sympy_functions()
INTEGER_OPERATIONS: dict[str, Callable[..., Any]] = {
    "floordiv": _functions.FloorDiv,
    "mod": lambda a, b: (_functions.Mod if a.is_nonnegative and b.is_nonnegative else _functions.PythonMod)(
        a, b
    ),
    "min": _functions.Min,
    "max": _functions.Max,
    "abs": sympy.Abs,
    "pow": sympy.Pow,
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b,
    "floordiv": lambda a, b: sympy.floor(a / b),
    "pow": lambda a, b: a**b,
    "neg": lambda a: -a,
    "abs": sympy.Abs,
    "min": sympy.Min,
    "max": sympy.Max,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "trunc": _functions.TruncToInt,
    "and": _functions.BitwiseFn_bitwise_and,
    "or": _functions.BitwiseFn_bitwise_or,
    "xor": _functions.BitwiseFn_bitwise_xor,
    "round": lambda a, *digits: (_functions.RoundDecimal if digits else _functions.RoundToInt)(a, *digits),
    "ite": lambda condition, then, otherwise: sympy.Piecewise((then, condition), (otherwise, True)),
    **{name: getattr(sympy, name) for name in FUNCTIONS if hasattr(sympy, name)},
}


class SympyWriter(Writer[Any]):
    """Symbols become integer symbols of the same name; those with a definition become that expression."""

    def __init__(self, definitions: Mapping[Expr, Writable]) -> None:
        self._definitions = definitions
        self._written: dict[Expr, Any] = {}

    def write_number(self, number: float) -> Any:
        if isinstance(number, bool):
            return sympy.true if number else sympy.false
        return sympy.Integer(number) if isinstance(number, int) else sympy.Float(number)

    def write_symbol(self, symbol: Expr) -> Any:
        found = self._written.get(symbol)
        if found is None:
            definition = self._definitions.get(symbol)
            found = _symbol(symbol) if definition is None else self.write(definition)
            self._written[symbol] = found
        return found

    def write_sum(self, terms: Sequence[Term]) -> Any:
        products = [
            sympy.Mul(
                sympy.Integer(coefficient), *(self.write(atom) ** exponent for atom, exponent in monomial)
            )
            for monomial, coefficient in terms
        ]
        return sympy.Add(*products)

    def write_integer_operation(self, value: Writable, operation: str, operands: Sequence[Operand]) -> Any:
        return INTEGER_OPERATIONS[operation](*map(self.write, operands))

    def write_operation(self, value: Writable, operation: str, operands: Sequence[Operand]) -> Any:
        """An operation that sympy lacks becomes a symbol with its text as name."""
        if operation in CONVERSIONS:
            return self.write(operands[0])
        if operation not in OPERATIONS:
            return sympy.Symbol(str(value), real=True)
        return OPERATIONS[operation](*map(self.write, operands))

    def write_comparison(self, relation: str, left: object, right: object) -> Any:
        return RELATIONS[relation](left, right)

    def write_junction(self, kind: str, parts: Sequence[Writable]) -> Any:
        return (sympy.And if kind == "and" else sympy.Or)(*map(self.write, parts))


def _symbol(symbol: Expr) -> Any:
    if FLOAT_NAME.fullmatch(symbol.name):
        return sympy.Symbol(symbol.name, real=True)
    # Not declared positive: sympy would simplify away the range checks that torch's passes make for unbacked symbols.
    low = None if symbol.is_unbacked else symbol.low
    if low is not None and low > 0:
        return sympy.Symbol(symbol.name, integer=True, positive=True)
    if low == 0:
        return sympy.Symbol(symbol.name, integer=True, nonnegative=True)
    return sympy.Symbol(symbol.name, integer=True)
