"""Small helpers under the names that torch's own module of symbolic shapes gives them, for code written for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
METHODS_THAT_READ = ("size", "stride", "storage_offset", "item")
OPERATORS_THAT_READ = (
    aten.sym_size, aten.sym_size.default, aten.sym_size.int, aten.sym_stride, aten.sym_stride.default,
    aten.sym_stride.int, aten.sym_storage_offset, aten.sym_storage_offset.default, aten.sym_numel.default,
)  # fmt: skip


def create_contiguous(shape: Sequence[Any]) -> list[Any]:
    """The strides of a tensor of this shape without gaps."""
    strides: list[Any] = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, size * strides[0])
    return strides


def is_accessor_node(node: Any) -> bool:
    """Whether a node of a graph reads a number off a tensor: a size, a stride, its offset, its value."""
    if node.op == "call_function":
        return node.target in OPERATORS_THAT_READ
    is_method = node.op == "call_method" and node.target in METHODS_THAT_READ
    return is_method and isinstance(getattr(node.args[0], "meta", {}).get("example_value"), torch.Tensor)


def canonicalize_bool_expr(expr: Any) -> Any:
    """A condition in sympy's words, with one form for each: `<` or `<=`, positive terms on both sides, no common factor."""
    # why: sympy is slow, and only tools that have expressions of it want this
    import sympy  # type: ignore[import-untyped]

    if isinstance(expr, (sympy.And, sympy.Or, sympy.Not)):
        expr = sympy.to_cnf(expr)
    if isinstance(expr, (sympy.And, sympy.Or)):
        return type(expr)(*map(canonicalize_bool_expr, expr.args))
    if not isinstance(expr, sympy.Rel):
        return expr
    turned = {sympy.Gt: sympy.Lt, sympy.Ge: sympy.Le}.get(type(expr))
    difference = sympy.expand(expr.lhs - expr.rhs if turned else expr.rhs - expr.lhs)
    terms = sympy.Add.make_args(difference)
    factors = [term.as_coeff_Mul()[0] for term in terms]
    whole = [abs(factor) for factor in factors if factor.is_Integer]
    common = sympy.gcd_list(whole) if whole and len(whole) == len(factors) and any(whole) else 1
    sides = [
        sympy.Add(*[sign * term / common for term, factor in zip(terms, factors, strict=True) if factor * sign > 0])
        for sign in (-1, 1)
    ]
    return (turned or type(expr))(*sides, evaluate=False)


class SymIntEqByExpr:
    """A size that is equal to what is written the same: nothing is decided, and it can be a key."""

    __slots__ = ("val",)

    def __init__(self, val: Any) -> None:
        self.val = val.node.expr if isinstance(val, torch.SymInt) else val

    def __repr__(self) -> str:
        return repr(self.val)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SymIntEqByExpr):
            raise AssertionError(f"expected SymIntEqByExpr, got {type(other).__name__}")
        return bool(self.val == other.val)

    def __hash__(self) -> int:
        return hash(self.val)
