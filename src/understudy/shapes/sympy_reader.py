"""Conversion of sympy objects to expressions and conditions: torch's tools compute with sympy."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Algebra, Expr

RELATIONS: dict[str, Callable[[Any, Any], bool | Condition]] = {
    "Equality": conditions.eq,
    "Unequality": conditions.ne,
    "GreaterThan": conditions.ge,
    "LessThan": conditions.le,
    "StrictGreaterThan": conditions.gt,
    "StrictLessThan": conditions.lt,
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": lambda algebra, *parts: reduce(algebra.add, parts),
    "Mul": lambda algebra, *parts: reduce(algebra.mul, parts),
    "Pow": Algebra.pow,
    "FloorDiv": Algebra.floordiv,
    "CleanDiv": Algebra.floordiv,
    "Mod": Algebra.mod,
    "PythonMod": Algebra.mod,
    "Max": lambda algebra, *parts: reduce(algebra.maximum, parts),
    "Min": lambda algebra, *parts: reduce(algebra.minimum, parts),
    "Abs": Algebra.absolute,
}
COMBINATIONS = {"And": "and", "Or": "or"}


def is_sympy(value: object) -> bool:
    return hasattr(value, "free_symbols") and hasattr(value, "func")


def from_sympy(algebra: Algebra, value: Any) -> int | bool | Expr | Condition:
    """`value` as an expression of this algebra. Raises `ValueError` for unknown symbols and functions."""
    kind = value.func.__name__
    if value.is_Symbol:
        if value.name not in algebra.symbols:
            raise ValueError(f"{value} is no symbol of this ShapeEnv")
        return algebra.symbols[value.name]
    if getattr(value, "is_Integer", False):
        return int(value)
    if kind in ("BooleanTrue", "BooleanFalse"):
        return kind == "BooleanTrue"
    parts: list[Any] = [from_sympy(algebra, part) for part in value.args]
    if kind in OPERATIONS:
        return OPERATIONS[kind](algebra, *parts)
    if kind in RELATIONS:
        return RELATIONS[kind](*parts)
    if kind in COMBINATIONS:
        return conditions.join(COMBINATIONS[kind], parts)
    if kind == "Not":
        return conditions.negate(parts[0])
    raise ValueError(f"{value} has {kind} in it, which sizes are not computed with")
