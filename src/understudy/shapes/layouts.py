"""Whether strides are dense, decided with as few guards as possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import Truth
from understudy.shapes.algebra.polynomials import Integer

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv
    from understudy.shapes.node import SymNode


def is_packed(
    env: ShapeEnv,
    sizes: Sequence[Integer],
    steps: Sequence[Integer],
    order: Sequence[int],
    empty_is_packed: bool,
) -> bool:
    """Whether the dimensions, in order from the fastest to the slowest, are dense in memory.

    Dimensions of size 1 may have any stride. `empty_is_packed`: an empty tensor may have any strides. Adds no guard
    where it can be proved; data-dependent conditions count as no.
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
        condition = conditions.join("or", [*(conditions.eq(size, 0) for size in sizes), condition])
    return bool(env.decisions.decide(condition, fallback=False))


def _condition(
    env: ShapeEnv,
    sizes: Sequence[Integer],
    steps: Sequence[Integer],
    order: Sequence[int],
    at_least_one: bool,
) -> bool | Condition:
    """The condition that each dimension has size 1, or the stride that follows from the faster ones.

    A dimension that can't have this stride must have size 1. For the slower ones it may count as 1 or as its size.
    """
    parts: list[bool | Condition] = []
    step: Integer = 1
    with_ones: Integer = 1
    for dim in order:
        counted = _count(env, sizes[dim], at_least_one)
        is_one, follows = conditions.eq(sizes[dim], 1), conditions.eq(steps[dim], step)
        if not any(
            _is_surely(env, known) for known in (is_one, follows, conditions.eq(steps[dim], with_ones))
        ):
            if not _may_be(env, steps[dim], step):
                parts.append(is_one)
                with_ones = with_ones * counted
                continue
            parts.append(conditions.either(is_one, follows))
        step, with_ones = step * counted, with_ones * counted
    return conditions.conjunction(parts)


def _suffix_products(
    env: ShapeEnv, sizes: Sequence[Integer], order: Sequence[int], at_least_one: bool
) -> dict[int, Integer]:
    """The stride of each dimension if dense; with sizes of 0 counted as 1 where torch does so."""
    wanted: dict[int, Integer] = {}
    step: Integer = 1
    for dim in order:
        wanted[dim] = step
        step = step * _count(env, sizes[dim], at_least_one)
    return wanted


def _count(env: ShapeEnv, size: Integer, at_least_one: bool) -> Integer:
    if not at_least_one or env.decisions.is_known(conditions.ge(size, 1)):
        return size
    return env.algebra.maximum(size, 1) if isinstance(size, Expr) else max(size, 1)


def _may_be(env: ShapeEnv, size: Integer, value: Integer) -> bool:
    return not _is_surely(env, conditions.ne(size, value))


def _is_surely(env: ShapeEnv, condition: Truth) -> bool:
    """Whether it can be proved; not tried if it is false for the hints."""
    if isinstance(condition, bool):
        return condition
    return env.decisions.get_hint(condition) is not False and bool(env.decisions.is_known(condition))


# --- Layout queries of C++, when it makes a tensor with symbolic sizes -----------

CHANNELS_LAST_2D = (1, 3, 2, 0)
CHANNELS_LAST_3D = (1, 4, 3, 2, 0)


def is_dense(
    sizes: Sequence[SymNode], strides: Sequence[SymNode], order: Sequence[int], empty_is_packed: bool = False
) -> bool:
    """Whether the dimensions, in order from the fastest to the slowest, are dense. Unknown counts as no."""
    if not sizes:
        return True
    env = sizes[0].shape_env
    return is_packed(
        env, [size.value for size in sizes], [step.value for step in strides], order, empty_is_packed
    )


def order_by_hints(strides: Sequence[SymNode]) -> list[int]:
    """The dimensions from the smallest stride to the largest, by hints; unbacked ones last."""

    def stride_at_hand(i: int) -> tuple[float, int]:
        hint = strides[i].hint
        return (float("inf") if hint is None else hint), -i

    return sorted(range(len(strides)), key=stride_at_hand)
