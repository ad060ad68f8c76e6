"""Expressions and conditions as sympy objects, for tools that want them. Imports sympy when called."""

from __future__ import annotations

from typing import Any

from .conditions import Condition
from .expr import Expr


def to_sympy(value: int | bool | Expr | Condition) -> Any:
    """Symbols become integer symbols of the same name (non-negative ones if they are), // and % floor."""
    # why: half a second, for those tools only
    import sympy  # type: ignore[import-untyped, unused-ignore]

    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if isinstance(value, Condition):
        if value.parts:
            return (sympy.And if value.kind == "and" else sympy.Or)(*map(to_sympy, value.parts))
        relation = {"eq": sympy.Eq, "ne": sympy.Ne, "ge": sympy.Ge}[value.kind]
        return relation(to_sympy(value.expr), sympy.Integer(0))
    if value.kind == "sum":
        terms = []
        for monomial, coefficient in value.terms:
            factors = [to_sympy(atom) ** exponent for atom, exponent in monomial]
            terms.append(sympy.Mul(sympy.Integer(coefficient), *factors))
        return sympy.Add(*terms)
    return atom_to_sympy(sympy, value)


def atom_to_sympy(sympy: Any, atom: Expr) -> Any:
    if atom.is_symbol:
        low = atom.low
        if low is not None and low > 0:
            return sympy.Symbol(atom.name, integer=True, positive=True)
        if low == 0:
            return sympy.Symbol(atom.name, integer=True, nonnegative=True)
        return sympy.Symbol(atom.name, integer=True)
    args = [to_sympy(arg) for arg in atom.args]
    make = {
        "floordiv": lambda a, b: sympy.floor(a / b),
        "mod": lambda a, b: a - b * sympy.floor(a / b),
        "min": sympy.Min,
        "max": sympy.Max,
        "abs": sympy.Abs,
        "pow": sympy.Pow,
    }[atom.kind]
    return make(*args)
