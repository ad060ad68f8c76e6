"""Whether symbolic sizes and strides leave no gaps, as C++ asks when it makes a tensor of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from understudy.shapes.packing import is_packed

if TYPE_CHECKING:
    from understudy.shapes.node import SymNode

CHANNELS_LAST_2D = (1, 3, 2, 0)
CHANNELS_LAST_3D = (1, 4, 3, 2, 0)


def is_dense(
    sizes: Sequence[SymNode], strides: Sequence[SymNode], order: Sequence[int], empty_is_packed: bool = False
) -> bool:
    """Whether the dimensions, taken from the fastest to the slowest, leave no gaps. Unknown counts as no."""
    if not sizes:
        return True
    env = sizes[0].shape_env
    return is_packed(env, [size.value for size in sizes], [step.value for step in strides], order, empty_is_packed)


def by_example(strides: Sequence[SymNode]) -> list[int]:
    """The dimensions from the smallest stride to the largest, at the example's sizes; unknown ones last."""

    def stride_at_hand(i: int) -> tuple[float, int]:
        hint = strides[i].hint
        return (float("inf") if hint is None else hint), -i

    return sorted(range(len(strides)), key=stride_at_hand)
