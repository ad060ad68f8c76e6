"""Values with floats in them as sympy objects, for tools that want them. Imports sympy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped, unused-ignore]

from understudy import _torch
from understudy.shapes import sympify
from understudy.shapes.floats import FUNCTIONS, SILENT, Combination, FloatCondition, FloatExpr

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


def expanded(value: Any, definitions: Mapping[Any, Any]) -> Any:
    """The value with what numbers that only have a name were computed from, in their place."""
    found = to_sympy(value)
    defined = [symbol for symbol in getattr(value, "symbols", ()) if symbol in definitions]
    if defined and found.free_symbols:
        found = found.xreplace({to_sympy(s): expanded(definitions[s], definitions) for s in defined})
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
        return sympify.to_sympy(value)
    if value.operation in SILENT:
        return to_sympy(value.arguments[0])
    if value.operation in OPERATIONS:
        return OPERATIONS[value.operation](*map(to_sympy, value.arguments))
    return sympy.Symbol(str(value), real=True)
