"""Whether symbolic sizes and strides leave no gaps, as C++ asks when it makes a tensor of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from understudy.shapes import conditions

if TYPE_CHECKING:
    from understudy.shapes.node import SymNode

CHANNELS_LAST_2D = (1, 3, 2, 0)
CHANNELS_LAST_3D = (1, 4, 3, 2, 0)


def is_dense(sizes: Sequence[SymNode], strides: Sequence[SymNode], order: Iterable[int]) -> bool:
    """Whether the dimensions, taken from the fastest to the slowest, leave no gaps. Unknown counts as no."""
    expected: Any = 1
    for i in order:
        env = sizes[i].shape_env
        if env.decide(conditions.eq(sizes[i].value, 1), fallback=False):
            continue
        if not env.decide(conditions.eq(strides[i].value, expected), fallback=False):
            return False
        expected = env.algebra.mul(sizes[i].value, expected)
    return True


def by_example(strides: Sequence[SymNode]) -> list[int]:
    """The dimensions from the smallest stride to the largest, at the example's sizes; unknown ones last."""

    def stride_at_hand(i: int) -> tuple[float, int]:
        hint = strides[i].hint
        return (float("inf") if hint is None else hint), -i

    return sorted(range(len(strides)), key=stride_at_hand)
