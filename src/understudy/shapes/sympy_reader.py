"""Conversion of sympy objects to numbers and conditions: torch's tools compute with sympy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

from understudy.shapes.algebra.floats import FLOAT_NAME, FUNCTIONS
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.shapes.algebra.floats import Operand
    from understudy.shapes.arithmetic import Arithmetic

RELATIONS = {
    "Equality": "==",
    "Unequality": "!=",
    "GreaterThan": ">=",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "StrictLessThan": "<",
}
BINARY = {
    "Add": "add",
    "Mul": "mul",
    "Pow": "pow",
    "PowByNatural": "pow",
    "FloatPow": "pow",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "IntTrueDiv": "truediv",
    "FloatTrueDiv": "truediv",
    "Mod": "mod",
    "PythonMod": "mod",
    "Max": "max",
    "Min": "min",
    "BitwiseFn_bitwise_and": "and",
    "BitwiseFn_bitwise_or": "or",
    "BitwiseFn_bitwise_xor": "xor",
}
"""Operations on two numbers, or on more from left to right."""
OTHERS: dict[str, Callable[..., SymNode]] = {
    "Abs": SymNode.abs,
    "Not": SymNode.sym_not,
    "And": lambda *parts: parts[0].shape_env.numbers.join("and", *parts),
    "Or": lambda *parts: parts[0].shape_env.numbers.join("or", *parts),
    "ToFloat": SymNode.sym_float,
    "TruncToInt": SymNode.trunc,
    "FloorToInt": SymNode.floor,
    "floor": SymNode.floor,
    "CeilToInt": SymNode.ceil,
    "ceiling": SymNode.ceil,
    "RoundToInt": SymNode.round,
    "RoundDecimal": lambda number, digits: number.round(digits.value),
}


def is_sympy(value: object) -> bool:
    return hasattr(value, "free_symbols") and hasattr(value, "func")


def from_sympy(numbers: Arithmetic, value: Any) -> Operand:
    """`value` in terms of these numbers. Raises `ValueError` for unknown symbols and functions."""
    result: Operand = _read(numbers, value).value
    return result


def _read(numbers: Arithmetic, value: Any) -> SymNode:
    kind = value.func.__name__
    if value.is_Symbol:
        if value.name not in numbers.algebra.symbols:
            raise ValueError(f"{value} is not a symbol of this ShapeEnv")
        symbol = numbers.algebra.symbols[value.name]
        if FLOAT_NAME.fullmatch(value.name):
            return numbers.node(numbers.make_float("value", symbol), float)
        return numbers.node(symbol, int)
    if getattr(value, "is_Integer", False):
        return numbers.node(int(value), int)
    if getattr(value, "is_Float", False):
        return numbers.node(float(value), float)
    if kind in ("BooleanTrue", "BooleanFalse"):
        return numbers.node(kind == "BooleanTrue", bool)
    if kind == "Piecewise":
        return _read_choices(numbers, value.args)
    parts = [_read(numbers, part) for part in value.args]
    if (function := kind.removeprefix("OpaqueUnaryFn_")) in FUNCTIONS:
        return numbers.apply_function(function, parts[0])
    if kind in BINARY:
        return reduce(lambda left, right: numbers.apply(BINARY[kind], left, right), parts)
    if kind in RELATIONS:
        return numbers.compare(RELATIONS[kind], *parts)
    if kind in OTHERS:
        return OTHERS[kind](*parts)
    raise ValueError(f"{value}: {kind} is not supported in expressions of sizes")


def _read_choices(numbers: Arithmetic, choices: Sequence[Any]) -> SymNode:
    """Pairs of a number and its condition, of which the first that holds decides; the last always holds."""
    result = _read(numbers, choices[-1][0])
    for then, condition in reversed(choices[:-1]):
        result = numbers.choose(_read(numbers, condition), _read(numbers, then), result)
    return result
