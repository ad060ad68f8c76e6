"""Broadcasting of shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from understudy.errors import ShapeMismatch
from understudy.shapes.sizes import (
    are_equal_or_one,
    at_hand,
    differ_at_hand,
    has_to_be,
    is_or_is_one,
    lies_in_data,
    surely_equal,
)
from understudy.spec.tensor_spec import Size

Meeting = Callable[[Any, Any], Any]
"""The size where two meet of which neither is surely 1; None if they don't fit."""


def broadcast_shapes(*shapes: Sequence[Any], meet: Meeting | None = None) -> Size:
    """The shape that all of these can be expanded to. `meet`: as it is in `meet_as_at_hand`, if not given."""
    if not shapes:
        return ()
    result = tuple(shapes[0])
    for shape in shapes[1:]:
        if shape is not result:
            result = _broadcast_pair(result, tuple(shape), meet or meet_as_at_hand)
    return result


def _broadcast_pair(a: Sequence[Any], b: Sequence[Any], meet: Meeting) -> Size:
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    sizes = list(a)
    for position, size in enumerate(b, lead):
        other = sizes[position]
        # What can be seen comes first: beside a plain 1 it does not matter what a symbol is.
        if other is size or surely_equal(size, 1):
            continue
        met = size if surely_equal(other, 1) else meet(other, size)
        if met is None:
            raise ShapeMismatch(
                f"shapes {list(a)} and {list(b)} can't be broadcast together: {other} and {size} meet in dimension "
                f"{position}"
            )
        sizes[position] = met
    return tuple(sizes)


def meet_as_at_hand(other: Any, size: Any) -> Any:
    """What is expanded at hand is taken to be expanded, and what is not, not."""
    if _is_one_beside_data(other, size):
        return size
    if _is_one_beside_data(size, other) or (not differ_at_hand(other, size) and other == size) or size == 1:
        return other
    if lies_in_data(size, other) and (has_to_be(other, size) or has_to_be(size, 1)):
        return other
    return size if has_to_be(other, 1) else None


def broadcast_anyhow(a: Sequence[Any], b: Sequence[Any]) -> Size:
    """As `broadcast_shapes`, for operators of whose result the shape is all that depends on which size is expanded."""
    return _broadcast_pair(a, b, meet_anyhow)


def meet_anyhow(other: Any, size: Any) -> Any:
    """Only that they fit is assumed: a size that is equal to the other may be 1 elsewhere."""
    if is_or_is_one(size, other):
        return other
    return size if is_or_is_one(other, size) else None


def check_broadcastable(a: Sequence[Any], b: Sequence[Any]) -> None:
    """Refuse shapes that can't be broadcast together, for operators whose result has none of their sizes.

    Which of two sizes is expanded is not assumed. Those that are equal, and larger than 1, are taken to be: that says more.
    """
    _broadcast_pair(a, b, _meet_unseen)


def _meet_unseen(other: Any, size: Any) -> Any:
    if lies_in_data(other, size) or (not differ_at_hand(other, size) and at_hand(size) > 1):
        return meet_as_at_hand(other, size)
    return other if are_equal_or_one(other, size) else None


def check_expandable(shape: Sequence[Any], target: Sequence[Any], what: str) -> None:
    """Refuse a shape that can't be expanded to `target`."""
    lead = len(target) - len(shape)
    fits = lead >= 0
    if fits:
        for size, wanted in zip(shape, target[lead:], strict=True):
            if surely_equal(size, wanted):  # then it does not matter whether it is 1
                continue
            if lies_in_data(size, wanted):
                fits = _is_fitted(size, wanted)
            elif differ_at_hand(size, wanted):
                fits = bool(size == 1)  # autograd wants to know which sizes are expanded
            else:
                fits = is_or_is_one(size, wanted)
            if not fits:
                break
    if not fits:
        raise ShapeMismatch(f"{what}: shape {list(shape)} can't be expanded to {list(target)}")


def _is_fitted(size: Any, wanted: Any) -> bool:
    return not (size != wanted and size != 1) or has_to_be(size, wanted) or has_to_be(size, 1)


def _is_one_beside_data(size: Any, other: Any) -> bool:
    """Whether a size is 1 at hand, where the other one lies in data: then the two need not be equal."""
    if type(size) is int or type(other) is int:
        return False
    return lies_in_data(other) and not lies_in_data(size) and not differ_at_hand(size, 1) and bool(size == 1)
