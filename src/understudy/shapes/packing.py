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
    condition = _condition(env, sizes, steps, order, empty_is_packed)
    if empty_is_packed:
        condition = conditions.joined("or", [*(conditions.eq(size, 0) for size in sizes), condition])
    return bool(env.decide(condition, fallback=False))


def _condition(
    env: Any, sizes: Sequence[Any], steps: Sequence[Any], order: Sequence[int], at_least_one: bool
) -> Any:
    """That each dimension has size 1, or the stride that follows from the faster ones.

    Of one that can't have this stride, the size has to be 1. For the slower ones it may count as that, or as it is.
    """
    parts: list[Any] = []
    step: Any = 1
    with_ones: Any = 1
    for dim in order:
        counted = _counted(env, sizes[dim], at_least_one)
        is_one, follows = conditions.eq(sizes[dim], 1), conditions.eq(steps[dim], step)
        if not any(_is_surely(env, known) for known in (is_one, follows, conditions.eq(steps[dim], with_ones))):
            if not _may_be(env, steps[dim], step):
                parts.append(is_one)
                with_ones = with_ones * counted
                continue
            parts.append(conditions.either(is_one, follows))
        step, with_ones = step * counted, with_ones * counted
    return conditions.conjunction(parts)


def _suffix_products(env: Any, sizes: Sequence[Any], order: Sequence[int], at_least_one: bool) -> dict[int, Any]:
    """The stride of each dimension if there are no gaps; with 1 in place of 0 where torch makes strides like that."""
    wanted: dict[int, Any] = {}
    step: Any = 1
    for dim in order:
        wanted[dim] = step
        step = step * _counted(env, sizes[dim], at_least_one)
    return wanted


def _counted(env: Any, size: Any, at_least_one: bool) -> Any:
    if not at_least_one or env.is_known(conditions.ge(size, 1)):
        return size
    return env.algebra.maximum(size, 1) if isinstance(size, Expr) else max(size, 1)


def _may_be(env: Any, size: Any, value: Any) -> bool:
    return not _is_surely(env, conditions.ne(size, value))


def _is_surely(env: Any, condition: Any) -> bool:
    """Whether it is proved to hold; what does not hold at hand is not even tried."""
    if isinstance(condition, bool):
        return condition
    return env.hint_of(condition) is not False and bool(env.is_known(condition))
