"""Constraints on a candidate: `tp*pp*dp=8`, `batch*dp <= 512 and ckpt != "none"`.

    require = parse_requirement("tp*pp*dp=8")
    require.names, require.holds({"tp": 2, "pp": 2, "dp": 2})

Arithmetic, comparisons, `and`, `or`, `not`, `in (…)`, names and constants: the text is parsed, and nothing of it is run.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from understudy.errors import UnderstudyError
from understudy.plans.axes import Value

MOST_CHARACTERS = 1000
MOST_POWER = 64
MOST_NUMBER = 1 << 80

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip


class RequirementError(UnderstudyError, ValueError):
    """A constraint that can't be read or evaluated."""


@dataclass(frozen=True, slots=True)
class PlanRequirement:
    text: str
    names: frozenset[str]
    _tree: ast.expr

    def holds(self, values: Mapping[str, Value]) -> bool:
        try:
            return bool(_evaluate(self._tree, values, self.text))
        except ZeroDivisionError:
            return False
        except TypeError:
            raise RequirementError(
                f"--require {self.text}: expected operands of one kind, got numbers and words"
            ) from None


def parse_requirement(text: str) -> PlanRequirement:
    """A single `=` is a comparison. Raises `RequirementError`."""
    if len(text) > MOST_CHARACTERS:
        raise RequirementError(f"--require: expected at most {MOST_CHARACTERS} characters, got {len(text)}")
    try:
        tree = ast.parse(re.sub(r"(?<![<>=!])=(?!=)", "==", text.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise RequirementError(f"--require {text}: expected a comparison such as tp*pp*dp=8") from None
    for node in ast.walk(tree):
        _check(node, text)
    if not isinstance(tree, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        raise RequirementError(f"--require {text}: expected a comparison such as tp*pp*dp=8")
    names = frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    return PlanRequirement(text, names, tree)


_PLAIN = (
    ast.Compare, ast.BoolOp, ast.And, ast.Or, ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.Tuple, ast.List,
    *_BINARY, *_COMPARE, *_UNARY,
)  # fmt: skip


def _check(node: ast.AST, text: str) -> None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, str, bool):
        return
    if not isinstance(node, _PLAIN):
        kind = "a call" if isinstance(node, ast.Call) else type(node).__name__
        raise RequirementError(
            f"--require {text}: expected names, numbers, arithmetic and comparisons, got {kind}"
        )


def _evaluate(node: ast.expr, values: Mapping[str, Value], text: str) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_evaluate(part, values, text) for part in parts]
        case ast.BoolOp(op=op, values=parts):
            test = all if isinstance(op, ast.And) else any
            return test(_evaluate(part, values, text) for part in parts)
        case ast.UnaryOp(op=sign, operand=operand):
            return _UNARY[type(sign)](_evaluate(operand, values, text))
        case ast.BinOp(left=left, op=action, right=right):
            a, b = _evaluate(left, values, text), _evaluate(right, values, text)
            return _compute(action, a, b, text)
        case ast.Compare(left=left, ops=ops, comparators=others):
            a = _evaluate(left, values, text)
            for comparison, other in zip(ops, others, strict=True):
                b = _evaluate(other, values, text)
                if not _COMPARE[type(comparison)](a, b):
                    return False
                a = b
            return True
    raise AssertionError(node)


def _compute(action: ast.operator, a: Any, b: Any, text: str) -> Any:
    """Numbers only, of a size that can be computed with at once."""
    for number in (a, b):
        if not isinstance(number, (int, float)):
            raise TypeError(number)
    if isinstance(action, ast.Pow) and (abs(b) > MOST_POWER or abs(a) > MOST_NUMBER):
        raise RequirementError(f"--require {text}: a power is too large")
    result = _BINARY[type(action)](a, b)
    if isinstance(result, complex) or abs(result) > MOST_NUMBER:
        raise RequirementError(f"--require {text}: a number is too large")
    return result
