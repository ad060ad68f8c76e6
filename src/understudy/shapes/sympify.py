"""Expressions and conditions as sympy objects, for tools that want them. Imports sympy when called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from understudy import _torch

from .conditions import Condition
from .expr import Expr
from .polynomials import Monomial
from .printing import sides

RELATIONS = {"==": "Eq", "!=": "Ne", ">=": "Ge", ">": "Gt", "<=": "Le", "<": "Lt"}


def to_sympy(value: int | bool | Expr | Condition) -> Any:
    """Symbols become integer symbols of the same name (non-negative ones if they are); // and % are torch's functions."""
    # why: half a second, for those tools only
    import sympy  # type: ignore[import-untyped, unused-ignore]

    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if isinstance(value, Condition):
        if value.parts:
            return (sympy.And if value.kind == "and" else sympy.Or)(*map(to_sympy, value.parts))
        left, relation, right = sides(value.kind, value.expr.terms)
        return getattr(sympy, RELATIONS[relation])(_sum(sympy, left), _sum(sympy, right))
    if value.kind == "sum":
        return _sum(sympy, value.terms)
    return atom_to_sympy(sympy, value)


def _sum(sympy: Any, terms: Iterable[tuple[Monomial, int]]) -> Any:
    products = []
    for monomial, coefficient in terms:
        factors = [to_sympy(atom) ** exponent for atom, exponent in monomial]
        products.append(sympy.Mul(sympy.Integer(coefficient), *factors))
    return sympy.Add(*products)


def atom_to_sympy(sympy: Any, atom: Expr) -> Any:
    if atom.is_symbol:
        # Torch's passes check the range of what only data knows; of a symbol that sympy knows to be one, they can't.
        low = None if atom.is_unbacked else atom.low
        if low is not None and low > 0:
            return sympy.Symbol(atom.name, integer=True, positive=True)
        if low == 0:
            return sympy.Symbol(atom.name, integer=True, nonnegative=True)
        return sympy.Symbol(atom.name, integer=True)
    functions = _torch.sympy_functions()
    args = [to_sympy(arg) for arg in atom.args]
    if atom.kind == "mod":
        are_sizes = all(arg.is_nonnegative for arg in args)
        return (functions.Mod if are_sizes else functions.PythonMod)(*args)
    make = {
        "floordiv": functions.FloorDiv,
        "min": functions.Min,
        "max": functions.Max,
        "abs": sympy.Abs,
        "pow": sympy.Pow,
    }[atom.kind]
    return make(*args)
