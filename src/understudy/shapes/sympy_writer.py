"""Expressions and conditions as sympy objects, for tools that want them. Imports sympy when called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped, unused-ignore]

from understudy import _torch
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import FUNCTIONS, SILENT, Combination, FloatCondition, FloatExpr
from understudy.shapes.algebra.polynomials import Monomial
from understudy.shapes.algebra.printing import sides

RELATION_NAMES = {"==": "Eq", "!=": "Ne", ">=": "Ge", ">": "Gt", "<=": "Le", "<": "Lt"}


def integers_to_sympy(value: int | bool | Expr | Condition) -> Any:
    """Symbols become integer symbols of the same name (non-negative ones if they are); // and % are torch's functions."""
    # why: half a second, for those tools only
    import sympy  # type: ignore[import-untyped, unused-ignore]

    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if isinstance(value, Condition):
        if value.parts:
            return (sympy.And if value.kind == "and" else sympy.Or)(*map(integers_to_sympy, value.parts))
        left, relation, right = sides(value.kind, value.expr.terms)
        return getattr(sympy, RELATION_NAMES[relation])(_sum(sympy, left), _sum(sympy, right))
    if value.kind == "sum":
        return _sum(sympy, value.terms)
    return atom_to_sympy(sympy, value)


def _sum(sympy: Any, terms: Iterable[tuple[Monomial, int]]) -> Any:
    products = []
    for monomial, coefficient in terms:
        factors = [integers_to_sympy(atom) ** exponent for atom, exponent in monomial]
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
    args = [integers_to_sympy(arg) for arg in atom.args]
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


# --- Values with floats in them as sympy objects, for tools that want them. Imports sympy -------------------

RELATIONS = {"==": sympy.Eq, "!=": sympy.Ne, "<": sympy.Lt, "<=": sympy.Le, ">": sympy.Gt, ">=": sympy.Ge}
_functions = _torch.sympy_functions()
OPERATIONS: dict[str, Any] = {
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


def expand_definitions(value: Any, definitions: Mapping[Any, Any]) -> Any:
    """The value with what numbers that only have a name were computed from, in their place."""
    found = to_sympy(value)
    defined = [symbol for symbol in getattr(value, "symbols", ()) if symbol in definitions]
    if defined and found.free_symbols:
        found = found.xreplace({to_sympy(s): expand_definitions(definitions[s], definitions) for s in defined})
    return found


def to_sympy(value: Any) -> Any:
    """What sympy has no word for becomes a symbol of that text."""
    if isinstance(value, float):
        return sympy.Float(value)
    if isinstance(value, FloatCondition):
        return RELATIONS[value.relation](to_sympy(value.left), to_sympy(value.right))
    if isinstance(value, Combination):
        return (sympy.And if value.kind == "and" else sympy.Or)(*map(to_sympy, value.parts))
    if not isinstance(value, FloatExpr):
        return integers_to_sympy(value)
    if value.operation in SILENT:
        return to_sympy(value.arguments[0])
    if value.operation in OPERATIONS:
        return OPERATIONS[value.operation](*map(to_sympy, value.arguments))
    return sympy.Symbol(str(value), real=True)
