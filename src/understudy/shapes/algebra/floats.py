"""Floating-point expressions over symbolic sizes, `h * 0.5`, `seq / 8`, `sqrt(d)`, and conditions on them.

Sizes meet floats in scale factors and averages. These expressions are trees without a normal form; what matters is
that they can be evaluated, that they have intervals, and that exact quotients of sizes are recognised: rounding or
comparing them is integer arithmetic.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias, Union

from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.intervals import Interval
from understudy.shapes.algebra.polynomials import Integer
from understudy.shapes.algebra.writers import TEXT, T, Writer

FUNCTIONS = tuple("sqrt cos cosh sin sinh tan tanh asin acos atan exp log log2".split())
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
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "ite": lambda condition, then, otherwise: then if condition else otherwise,
    **{name: getattr(math, name) for name in FUNCTIONS},
}  # fmt: skip
FLOAT_NAME = re.compile(r"zu?f\d+")
"""The names of symbols whose values are floats, as torch gives them; other symbols are integers."""
SMALL = 1 << 20
"""Quotients with numerators and denominators up to this are exact: a size times such a number has fewer than 53 bits."""


Number: TypeAlias = Union[int, float, Expr, "FloatExpr"]
AnyCondition: TypeAlias = Union[Condition, "Comparison", "Combination"]
Truth: TypeAlias = Union[bool, AnyCondition]
Operand: TypeAlias = Union[Number, AnyCondition]
"""The operands of an operation, including the condition of `ite`."""


class FloatExpr:
    """An operation on numbers, sizes and other such expressions. Interned by the environment that makes it."""

    __slots__ = ("arguments", "operation", "symbols")

    def __init__(self, operation: str, arguments: tuple[Operand, ...]) -> None:
        self.operation = operation
        self.arguments = arguments
        self.symbols: frozenset[Expr] = symbols_of(arguments)

    @property
    def choice(self) -> tuple[AnyCondition, Integer, Integer]:
        """The condition and the two integers of an `ite` of these."""
        condition, then, otherwise = self.arguments
        assert not isinstance(condition, (int, float, Expr, FloatExpr))
        assert isinstance(then, (int, Expr)) and isinstance(otherwise, (int, Expr))
        return condition, then, otherwise

    @property
    def unbacked_symbol(self) -> Expr | None:
        """The symbol of an unbacked float, None for other expressions."""
        symbol = self.arguments[0] if self.operation == "value" else None
        return symbol if isinstance(symbol, Expr) else None

    def evaluate(self, values: Mapping[Expr, int]) -> float:
        return OPERATIONS[self.operation](*[evaluate(a, values) for a in self.arguments])

    def write(self, writer: Writer[T]) -> T:
        return writer.write_operation(self, self.operation, self.arguments)

    def __str__(self) -> str:
        return TEXT.write(self).text

    __repr__ = __str__


class Comparison:
    """A comparison in which a float takes part. Interned by the environment that makes it."""

    __slots__ = ("left", "relation", "right", "symbols")

    RELATIONS: ClassVar[dict[str, Callable[[Any, Any], bool]]] = {
        "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    }  # fmt: skip
    OPPOSITE: ClassVar[dict[str, str]] = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}

    def __init__(self, relation: str, left: Number, right: Number) -> None:
        self.relation, self.left, self.right = relation, left, right
        self.symbols: frozenset[Expr] = symbols_of((left, right))

    def evaluate(self, values: Mapping[Expr, int]) -> bool:
        return bool(self.RELATIONS[self.relation](evaluate(self.left, values), evaluate(self.right, values)))

    def write(self, writer: Writer[T]) -> T:
        return writer.write_comparison(self.relation, writer.write(self.left), writer.write(self.right))

    def __str__(self) -> str:
        return TEXT.write(self).text

    __repr__ = __str__


class Combination:
    """`and` and `or` of conditions of which at least one is about floats. Interned likewise."""

    __slots__ = ("kind", "parts", "symbols")

    def __init__(self, kind: str, parts: tuple[AnyCondition, ...]) -> None:
        self.kind = kind
        self.parts = parts
        self.symbols: frozenset[Expr] = symbols_of(parts)

    def evaluate(self, values: Mapping[Expr, int]) -> bool:
        combine = all if self.kind == "and" else any
        return combine(part.evaluate(values) for part in self.parts)

    def write(self, writer: Writer[T]) -> T:
        return writer.write_junction(self.kind, self.parts)

    def __str__(self) -> str:
        return TEXT.write(self).text

    __repr__ = __str__


def evaluate(value: Operand, values: Mapping[Expr, int]) -> float:
    return value if isinstance(value, (int, float)) else value.evaluate(values)


def symbols_of(parts: Iterable[Operand]) -> frozenset[Expr]:
    found: frozenset[Expr] = frozenset()
    for part in parts:
        if not isinstance(part, (int, float)):
            found = found | part.symbols if found else part.symbols
    return found


# --- exactly a quotient of sizes ------------------------------------------------------------------------------


def as_fraction(expression: Operand) -> tuple[Integer, int] | None:
    """(size, divisor) if this is the quotient of an integer expression and a positive integer, rounded once at most."""
    if isinstance(expression, Expr):
        return expression, 1
    if isinstance(expression, (int, float)):
        return _number_as_fraction(expression)
    if not isinstance(expression, FloatExpr):
        return None
    if expression.operation == "to_float":
        return as_fraction(expression.arguments[0])
    if expression.operation in ("truediv", "mul"):
        left, right = expression.arguments
        if expression.operation == "mul" and not isinstance(right, (int, float)):
            left, right = right, left
        inner, factor = as_fraction(left), _number_as_fraction(right)
        # 1/49*49 is not 1: only exact quotients can be operands of another one.
        if inner is None or factor is None or inner[1] & (inner[1] - 1):
            return None
        top, bottom = factor if expression.operation == "mul" else factor[::-1]
        if bottom <= 0:
            return None
        return inner[0] * top, inner[1] * bottom
    return None


def _number_as_fraction(number: Operand) -> tuple[int, int] | None:
    if not isinstance(number, (int, float)) or not math.isfinite(number):
        return None
    top, bottom = number.as_integer_ratio()
    return (top, bottom) if abs(top) <= SMALL and bottom <= SMALL else None


INTEGER_RELATIONS: dict[str, Callable[[Integer, Integer], bool | Condition]] = {
    "==": conditions.eq, "!=": conditions.ne, "<": conditions.lt,
    "<=": conditions.le, ">": conditions.gt, ">=": conditions.ge,
}  # fmt: skip


def as_integer_condition(relation: str, left: Number, right: Number) -> bool | Condition | None:
    """Return the equivalent comparison of integers, or None."""
    a, b = as_fraction(left), as_fraction(right)
    if a is None or b is None:
        return None
    return INTEGER_RELATIONS[relation](a[0] * b[1], b[0] * a[1])


# --- intervals --------------------------------------------------------------------------------------------------

Bounds = tuple[float, float]
ANYTHING: Bounds = (-math.inf, math.inf)
MONOTONIC_FUNCTIONS = frozenset({"atan", "tanh", "exp"})
EXACT = frozenset({"to_float", "value", "floor", "ceil", "trunc"})
CORNERS = frozenset({"add", "sub", "mul", "min", "max"})


def bounds_of(value: Operand, interval: Callable[[Integer], Interval]) -> Bounds:
    """The bounds of a value, for all sizes within their intervals."""
    if isinstance(value, (int, float)):
        return (value, value) if value == value else ANYTHING
    if isinstance(value, Expr):
        low, high = interval(value)
        return -math.inf if low is None else _as_float(low), math.inf if high is None else _as_float(high)
    if not isinstance(value, FloatExpr):
        return ANYTHING
    try:
        return _bounds(value.operation, tuple([bounds_of(a, interval) for a in value.arguments]))
    except (ArithmeticError, ValueError):
        return ANYTHING


@functools.lru_cache(maxsize=4096)
def _bounds(operation: str, arguments: tuple[Bounds, ...]) -> Bounds:
    if operation in EXACT or operation in MONOTONIC_FUNCTIONS:  # monotonic
        low, high = (_limit(operation, end) for end in arguments[0])
        return (low, high) if operation in EXACT else _wider(low, high)
    if operation == "sqrt" and arguments[0][0] >= 0:
        return _wider(*(math.sqrt(end) for end in arguments[0]))
    if operation == "neg":
        return -arguments[0][1], -arguments[0][0]
    if operation == "ite":
        return min(arguments[1][0], arguments[2][0]), max(arguments[1][1], arguments[2][1])
    if operation == "abs":
        low, high = arguments[0]
        return max(low, -high, 0.0), max(abs(low), abs(high))
    if operation == "truediv" and not arguments[1][0] <= 0 <= arguments[1][1]:
        low, high = arguments[1]
        return _bounds("mul", (arguments[0], (1 / high, 1 / low)))
    if operation == "pow" and arguments[0][0] == arguments[0][1] > 0:  # monotonic in the exponent
        ends = [math.pow(arguments[0][0], end) for end in arguments[1]]
        return _wider(min(ends), max(ends))
    if operation in CORNERS:
        ends = [OPERATIONS[operation](a, b) for a in arguments[0] for b in arguments[1]]
        if any(end != end for end in ends):  # 0 * inf
            return ANYTHING
        return _wider(min(ends), max(ends))
    return ANYTHING


def _limit(operation: str, end: float) -> float:
    if math.isinf(end) and operation not in MONOTONIC_FUNCTIONS:
        return end
    return float(OPERATIONS[operation](end))


def _wider(low: float, high: float) -> Bounds:
    """Widen by the rounding errors: one step each way, in each of at most two operations."""
    for _ in range(2):
        low, high = math.nextafter(low, -math.inf), math.nextafter(high, math.inf)
    return low, high


def _as_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.copysign(math.inf, number)


def compared_by_bounds(relation: str, left: Bounds, right: Bounds) -> bool | None:
    """True or False if the intervals decide, else None. Intervals never prove that two floats are equal."""
    if left[1] < right[0]:
        return relation in ("<", "<=", "!=")
    if left[0] > right[1]:
        return relation in (">", ">=", "!=")
    if left[1] <= right[0] < math.inf and relation in ("<=", ">"):
        return relation == "<="
    if left[0] >= right[1] > -math.inf and relation in (">=", "<"):
        return relation == ">="
    return None
