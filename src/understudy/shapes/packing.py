"""Whether strides leave no gaps between the elements, asked so that as little as possible is assumed about symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.shapes import conditions
from understudy.shapes.expr import Expr


def is_packed(
    env: Any, sizes: Sequence[Any], steps: Sequence[Any], order: Sequence[int], empty_is_packed: bool
) -> bool:
    """Whether the dimensions, taken from the fastest to the slowest, follow each other in memory.

    Dimensions of size 1 may have any stride. `empty_is_packed`: any strides will do for a tensor without elements.
    What can be seen for all sizes is answered without a question; what only data could tell counts as no.
    """
    wanted = _suffix_products(env, sizes, order, empty_is_packed)
    open_dims = [
        dim for dim in order
        if not _is_surely(env, conditions.eq(steps[dim], wanted[dim]))
        and not _is_surely(env, conditions.eq(sizes[dim], 1))
    ]  # fmt: skip
    if not open_dims:
        return True
    if not (empty_is_packed and any(_may_be(env, size, 0) for size in sizes)):
        for dim in open_dims:
            if not _may_be(env, sizes[dim], 1) and not _may_be(env, steps[dim], wanted[dim]):
                return False
    return _decided(env, sizes, steps, open_dims, wanted, empty_is_packed)


def _suffix_products(env: Any, sizes: Sequence[Any], order: Sequence[int], at_least_one: bool) -> dict[int, Any]:
    """The stride of each dimension if there are no gaps; with 1 in place of 0 where torch makes strides like that."""
    wanted: dict[int, Any] = {}
    step: Any = 1
    for dim in order:
        wanted[dim] = step
        size = sizes[dim]
        if at_least_one and not env.is_known(conditions.ge(size, 1)):
            size = env.algebra.maximum(size, 1) if isinstance(size, Expr) else max(size, 1)
        step = step * size
    return wanted


def _may_be(env: Any, size: Any, value: Any) -> bool:
    return not _is_surely(env, conditions.ne(size, value))


def _is_surely(env: Any, condition: Any) -> bool:
    """Whether it is proved to hold; what does not hold at hand is not even tried."""
    if isinstance(condition, bool):
        return condition
    return env.hint_of(condition) is not False and bool(env.is_known(condition))


def _decided(
    env: Any, sizes: Sequence[Any], steps: Sequence[Any], dims: Sequence[int], wanted: dict[int, Any],
    empty_is_packed: bool,
) -> bool:
    def is_equal(a: Any, b: Any) -> bool:
        return bool(env.decide(conditions.eq(a, b), fallback=False))

    if empty_is_packed and any(is_equal(size, 0) for size in sizes):
        return True
    return all(is_equal(sizes[dim], 1) or is_equal(steps[dim], wanted[dim]) for dim in dims)
