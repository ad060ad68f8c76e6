"""Sizes that may be numbers or symbols: what specs need to ask of both in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.shapes import conditions
from understudy.shapes.node import SymNode, value_of
from understudy.shapes.packing import is_packed


def surely_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are equal whatever the symbols are; no guard comes of asking."""
    if a is b:
        return True
    if type(a) is int and type(b) is int:
        return a == b
    return not differ_at_hand(a, b) and bool(_env_of(a, b).is_known(conditions.eq(value_of(a), value_of(b))))


def surely_differ(a: Any, b: Any) -> bool:
    """Whether two sizes differ whatever the symbols are; no guard comes of asking."""
    if type(a) is int and type(b) is int:
        return a != b
    first, second = _hint(a), _hint(b)
    if first is not None and first == second:  # a search for a proof would be in vain
        return False
    return bool(_env_of(a, b).is_known(conditions.ne(value_of(a), value_of(b))))


def differ_at_hand(a: Any, b: Any) -> bool:
    """Whether two sizes have different examples. Nothing is assumed: what to ask next may depend on it, no answer."""
    first, second = _hint(a), _hint(b)
    return first is not None and second is not None and bool(first != second)


def surely_less(a: Any, b: Any) -> bool:
    """Whether a < b whatever the symbols are."""
    if type(a) is int and type(b) is int:
        return a < b
    first, second = _hint(a), _hint(b)
    if first is not None and second is not None and first >= second:
        return False
    return bool(_env_of(a, b).is_known(conditions.lt(value_of(a), value_of(b))))


def by_example(stride: Sequence[Any], shape: Sequence[Any]) -> list[int]:
    """The dimensions from the smallest stride to the largest, at the example's sizes; unknown ones last."""

    def at_hand(dim: int) -> tuple[float, float, int]:
        return _example(stride[dim]), _example(shape[dim]), -dim

    return sorted(range(len(stride)), key=at_hand)


def _hint(size: Any) -> Any:
    return size.hint if type(size) is SymNode else size


def _example(size: Any) -> float:
    hint = _hint(size)
    return float("inf") if hint is None else hint


def are_packed(
    shape: Sequence[Any], stride: Sequence[Any], order: Sequence[int], empty_is_packed: bool = False
) -> bool:
    """`is_packed` for sizes of which at least one is a symbol."""
    env = next(size.shape_env for size in (*shape, *stride) if type(size) is SymNode)
    return is_packed(env, [value_of(s) for s in shape], [value_of(s) for s in stride], order, empty_is_packed)


def at_least_one(size: Any) -> Any:
    """max(size, 1)"""
    if type(size) is int:
        return max(size, 1)
    env = size.shape_env
    return size if env.is_known(conditions.ge(size.value, 1)) else env.size("max", size, 1)


def smaller(a: Any, b: Any) -> Any:
    """min(a, b), without asking which one it is."""
    if type(a) is int and type(b) is int:
        return min(a, b)
    return _env_of(a, b).size("min", a, b)


def is_symbolic(sizes: Sequence[Any]) -> bool:
    return any(type(size) is SymNode for size in sizes)


def to_torch(size: Any) -> Any:
    """What torch takes for this size."""
    return size.symbolic if type(size) is SymNode else size


def from_torch(size: Any) -> Any:
    """The size that torch gave: a number or a node."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = size.node
        if type(node) is SymNode:
            return node.value if node.is_plain else node
        constant = node.maybe_as_int()
        return size if constant is None else constant
    return size


def _env_of(a: Any, b: Any) -> Any:
    return a.shape_env if type(a) is SymNode else b.shape_env
