"""Floating-point expressions over symbolic sizes: `h * 0.5`, `seq / 8`, `sqrt(d)`.

Sizes meet floats in scale factors and averages. These expressions are trees without a normal form; what matters is that they
can be evaluated, and that rounding one back to an integer gives an exact integer expression where there is one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from understudy.shapes.expr import Expr

OPERATIONS: dict[str, Callable[..., Any]] = {
    "to_float": float,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "neg": operator.neg,
    "abs": abs,
    "min": min,
    "max": max,
    "round": round,
    "value": lambda x: x,
    **{name: getattr(math, name) for name in (
        "sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "exp", "log", "log2",
    )},
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
}  # fmt: skip

INFIX = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}


class FloatExpr:
    """An operation on numbers, sizes and other such expressions. Interned by the environment that makes it."""

    __slots__ = ("arguments", "operation", "symbols")

    def __init__(self, operation: str, arguments: tuple[Any, ...]) -> None:
        self.operation = operation
        self.arguments = arguments
        self.symbols: frozenset[Expr] = frozenset().union(*(getattr(a, "symbols", ()) for a in arguments))

    def evaluate(self, values: Mapping[Expr, int]) -> Any:
        arguments = [a.evaluate(values) if hasattr(a, "evaluate") else a for a in self.arguments]
        return OPERATIONS[self.operation](*arguments)

    def __str__(self) -> str:
        shown = [str(a) for a in self.arguments]
        if self.operation in INFIX:
            return f"({shown[0]} {INFIX[self.operation]} {shown[1]})"
        return shown[0] if self.operation in ("to_float", "value") else f"{self.operation}({', '.join(shown)})"

    __repr__ = __str__


class FloatCondition:
    """A comparison in which a float takes part."""

    __slots__ = ("left", "relation", "right", "symbols")

    RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
        "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    }  # fmt: skip
    OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}

    def __init__(self, relation: str, left: Any, right: Any) -> None:
        self.relation, self.left, self.right = relation, left, right
        self.symbols: frozenset[Expr] = frozenset().union(*(getattr(a, "symbols", ()) for a in (left, right)))

    def evaluate(self, values: Mapping[Expr, int]) -> bool:
        left, right = (a.evaluate(values) if hasattr(a, "evaluate") else a for a in (self.left, self.right))
        return bool(self.RELATIONS[self.relation](left, right))

    def negated(self) -> FloatCondition:
        return FloatCondition(self.OPPOSITE[self.relation], self.left, self.right)

    def __str__(self) -> str:
        return f"{self.left} {self.relation} {self.right}"

    __repr__ = __str__


def as_fraction(expression: Any) -> tuple[Any, int] | None:
    """(size, divisor) if this is exactly `size / divisor` for an integer expression and a positive integer, else None."""
    if not isinstance(expression, FloatExpr):
        return None
    if expression.operation == "to_float":
        return expression.arguments[0], 1
    if expression.operation == "truediv":
        return _fraction_of_quotient(*expression.arguments)
    if expression.operation == "mul":
        for size, factor in (expression.arguments, expression.arguments[::-1]):
            inner = as_fraction(size)
            if inner is not None and isinstance(factor, float) and math.isfinite(factor):
                numerator, denominator = factor.as_integer_ratio()
                if denominator <= 1 << 20 and abs(numerator) <= 1 << 20:
                    return inner[0] * numerator, inner[1] * denominator
    return None


def _fraction_of_quotient(top: Any, bottom: Any) -> tuple[Any, int] | None:
    inner = (top, 1) if isinstance(top, Expr) else as_fraction(top)
    if inner is None or not isinstance(bottom, (int, float)) or bottom <= 0 or bottom != int(bottom):
        return None
    return inner[0], inner[1] * int(bottom)
