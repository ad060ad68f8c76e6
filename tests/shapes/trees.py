"""Hypothesis strategies for expressions and conditions, with their meaning in plain Python."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Algebra, Expr

Tree = Any  # an int, ("symbol", index), or (operation, tree, …)

OPERATIONS = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": operator.floordiv,
    "mod": operator.mod, "minimum": min, "maximum": max,
}  # fmt: skip
RELATIONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def trees(symbols: int) -> st.SearchStrategy[Tree]:
    leaves = st.one_of(
        st.tuples(st.just("symbol"), st.integers(0, symbols - 1)),
        st.integers(-4, 9),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(list(OPERATIONS)), inner, inner),
            st.tuples(st.sampled_from(["floordiv", "mod"]), inner, st.sampled_from([2, 3, 4, 8, -2])),
            st.tuples(st.just("absolute"), inner),
            st.tuples(st.just("pow"), inner, st.integers(0, 3)),
        ),
        max_leaves=6,
    )


def relations(symbols: int) -> st.SearchStrategy[Tree]:
    return st.tuples(st.sampled_from(list(RELATIONS)), trees(symbols), trees(symbols))


def questions(symbols: int) -> st.SearchStrategy[Tree]:
    return st.recursive(
        relations(symbols),
        lambda inner: st.one_of(
            st.tuples(st.sampled_from(["both", "either"]), inner, inner), st.tuples(st.just("negate"), inner)
        ),
        max_leaves=3,
    )


def build(tree: Tree, algebra: Algebra, symbols: Sequence[Expr]) -> int | Expr:
    """The tree as an expression; an operation that can't be computed anywhere counts as 0."""
    if isinstance(tree, int):
        return tree
    if tree[0] == "symbol":
        return symbols[tree[1]]
    args = [build(branch, algebra, symbols) for branch in tree[1:]]
    try:
        return getattr(algebra, tree[0])(*args)  # type: ignore[no-any-return]
    except ArithmeticError:
        return 0


def compute(tree: Tree, values: Sequence[int]) -> int | None:
    """The number, or None where it can't be computed."""
    if isinstance(tree, int):
        return tree
    if tree[0] == "symbol":
        return values[tree[1]]
    args = [compute(branch, values) for branch in tree[1:]]
    if None in args:
        return None
    if tree[0] == "absolute":
        return abs(args[0])
    if tree[0] == "pow":
        return args[0] ** args[1]
    if tree[0] in ("floordiv", "mod") and args[1] == 0:
        return None
    return OPERATIONS[tree[0]](*args)  # type: ignore[no-any-return]


def build_question(tree: Tree, algebra: Algebra, symbols: Sequence[Expr]) -> bool | Condition:
    if tree[0] in RELATIONS:
        a, b = (build(branch, algebra, symbols) for branch in tree[1:])
        return getattr(conditions, tree[0])(a, b)  # type: ignore[no-any-return]
    parts = [build_question(branch, algebra, symbols) for branch in tree[1:]]
    return getattr(conditions, tree[0])(*parts)  # type: ignore[no-any-return]


def holds(tree: Tree, values: Sequence[int]) -> bool | None:
    if tree[0] in RELATIONS:
        a, b = (compute(branch, values) for branch in tree[1:])
        return None if a is None or b is None else bool(RELATIONS[tree[0]](a, b))
    parts = [holds(branch, values) for branch in tree[1:]]
    if None in parts:
        return None
    if tree[0] == "negate":
        return not parts[0]
    return all(parts) if tree[0] == "both" else any(parts)
