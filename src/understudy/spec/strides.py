"""Strides of new results, as in eager.

An elementwise operator keeps the order of dimensions of its operands in memory. How eager decides:

    all of one shape and contiguous                    → contiguous
    all of one shape and channels-last                 → channels-last
    all of one shape, dense, with one set of strides   → those strides
    otherwise                                          → sort the dimensions by the operands' strides, first
                                                         operand first, and pack them densely in that order
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from understudy.shapes.node import Shape, Sizes
from understudy.shapes.sizes import (
    are_packed,
    at_least_one,
    has_unbacked,
    have_different_hints,
    is_nonempty_or_not_one,
    is_not_one_unless,
    is_provably_different,
    is_provably_equal,
    is_provably_less,
    is_symbolic,
    order_by_hints,
)
from understudy.spec.tensor_spec import TensorSpec, contiguous_strides, is_contiguous, same_shape

T = TypeVar("T")
CHANNELS_LAST_ORDER = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}  # from the fastest dimension to the slowest


def channels_last_strides(shape: Sequence[Any]) -> Shape:
    """Strides of the channels-last format of 4 dimensions, or 5 (which torch calls channels_last_3d)."""
    return packed_strides(shape, CHANNELS_LAST_ORDER[len(shape)])


def is_channels_last_contiguous(shape: Sizes, stride: Sizes) -> bool:
    order = CHANNELS_LAST_ORDER.get(len(shape))
    if order is None:
        return False
    if is_symbolic((*shape, *stride)):
        return are_packed(shape, stride, order)
    expected: Any = 1
    for dim in order:
        size = shape[dim]
        if size != 1:
            if stride[dim] != expected:
                return False
            expected = expected * size
    return True


def is_dense(shape: Sizes, stride: Sizes) -> bool:
    """Whether a tensor covers a block of memory exactly once, in any order of dimensions."""
    if is_symbolic((*shape, *stride)) and _is_provably_packed(shape, stride, order_by_hints(stride, shape)):
        return True
    if is_contiguous(shape, stride) or is_channels_last_contiguous(shape, stride):
        return True
    if is_symbolic((*shape, *stride)):
        return are_packed(shape, stride, order_by_hints(stride, shape))
    wide = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size >= 2)
    expected: Any = 1
    for step, size in wide:
        if step != expected:
            return False
        expected = expected * size
    return True


def _is_provably_packed(shape: Sizes, stride: Sizes, order: Sequence[int]) -> bool:
    """Whether the dimensions are dense in this order for all values of the symbols. Adds no guard.

    An empty tensor is dense with any strides: sizes may count as they are, or as at least 1.
    """
    expected: Any = 1
    of_full: Any = 1
    left = [dim for dim in order if not is_provably_equal(shape[dim], 1)]
    while left:
        found = next(
            (
                d
                for d in left
                if is_provably_equal(stride[d], expected) or is_provably_equal(stride[d], of_full)
            ),
            None,
        )
        if found is None:
            return False
        left.remove(found)
        expected = expected * shape[found]
        of_full = of_full * at_least_one(shape[found])
    return True


def packed_strides(shape: Sizes, order: Sequence[int]) -> Shape:
    """Dense strides for dimensions in this order, the fastest first. A size of 0 makes the rest 0."""
    strides: list[Any] = [0] * len(shape)
    step: Any = 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim]
    return tuple(strides)


def elementwise_strides(shape: Shape, operands: Sequence[TensorSpec], numbers: bool = False) -> Shape:
    """Strides of the result of an elementwise operator on operands that broadcast to `shape`.

    `numbers`: there are Python numbers among the operands, which eager wraps into 0-dim tensors.
    """
    if len(shape) < 2:
        return (1,) if shape else ()
    if not is_symbolic(shape):
        packed = contiguous_strides(shape)
        if 0 not in shape and _are_all_packed(operands, shape, packed):
            return packed
        return _elementwise_strides(shape, operands, numbers)
    if all(is_provably_row_major(operand.shape, operand.stride) for operand in operands):
        is_sorted = numbers or not all(operand.shape is shape for operand in operands)
        if not is_sorted or _keeps_order(shape, operands):
            return contiguous_strides(shape)
    return _elementwise_strides(shape, operands, numbers)


def _are_all_packed(operands: Sequence[TensorSpec], shape: Shape, packed: Shape) -> bool:
    """Whether all operands have row-major strides, also in dimensions of size 1: eager then finds nothing to sort. `packed`
    are those strides for `shape`."""
    for operand in operands:
        if operand.is_symbolic:
            return False
        own = packed if operand.shape == shape else contiguous_strides(operand.shape)
        if operand.stride != own:
            return False
    return True


def _elementwise_strides(shape: Shape, operands: Sequence[TensorSpec], numbers: bool) -> Shape:
    if not numbers and all(
        operand.shape is shape or same_shape(operand.shape, shape) for operand in operands
    ):
        strides = _strides_of_one_shape(shape, operands)
        if strides is not None:
            return strides
    if is_symbolic(shape) and _are_row_major_if_not_empty(operands) and not any(size == 0 for size in shape):
        return contiguous_strides(shape)
    return _sorted_strides(shape, operands)


def _keeps_order(shape: Shape, operands: Sequence[TensorSpec]) -> bool:
    """Whether eager's sort keeps the order of dimensions of row-major operands: of two with the same stride, a size of
    0 is moved inside a size of 1. If there is a gap between strides, no guard is needed. The sort skips dimensions in
    which all operands are expanded."""
    for outer in range(len(shape) - 1):
        if is_provably_different(shape[outer], 0):
            continue
        for inner in range(outer + 1, len(shape)):
            steps = _steps_that_decide(shape, operands, outer, inner)
            if steps is None:
                continue
            if not is_provably_different(shape[inner], 1) and not is_nonempty_or_not_one(
                shape[outer], shape[inner], *steps
            ):
                return False
            if steps is not OPEN_STEPS:
                break
    return True


OPEN_STEPS = (1, 1)


def _steps_that_decide(
    shape: Shape, operands: Sequence[TensorSpec], outer: int, inner: int
) -> tuple[Any, Any] | None:
    """The strides of two dimensions in the first operand that is not expanded in either; None if all are. `OPEN_STEPS`
    if that is undecided."""
    for operand in operands:
        dim = outer - len(shape) + operand.ndim
        if dim < 0:
            continue
        other = dim + inner - outer
        steps = operand.stride[dim], operand.stride[other]
        sizes = operand.shape[dim], operand.shape[other]
        # If the result has sizes 0 and 1, an operand has sizes 1 and 1 (expanded), or 0 and 1.
        if is_provably_equal(sizes[0], 1) or any(is_provably_equal(step, 0) for step in steps):
            continue
        is_whole = is_provably_equal(sizes[0], shape[outer]) and is_provably_equal(sizes[1], shape[inner])
        return steps if is_whole else OPEN_STEPS
    return None


def _are_row_major_if_not_empty(operands: Sequence[TensorSpec]) -> bool:
    return all(
        is_provably_row_major(operand.shape, operand.stride, if_not_empty=True) for operand in operands
    )


def is_provably_row_major(shape: Shape, stride: Shape, if_not_empty: bool = False) -> bool:
    """Whether, for all values of the symbols, strides do not increase from one dimension to the next, except expanded ones.

    Results of such operands are row-major, broadcast or not. Strides may have gaps; without gaps, two of them are equal
    only if the size between them is at most 1, and then eager's sort keeps their order.
    `if_not_empty`: no size is 0, so that a size and `max(size, 1)` are the same.
    """
    if all(map(is_provably_equal, stride, contiguous_strides(shape))):
        return True
    inner: Any = None
    packed: list[Any] = []  # the next packed stride, in all equivalent forms
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if is_provably_equal(step, 0):
            continue
        ways = [step]
        if any(is_provably_equal(step, other) for other in packed):
            ways += packed if if_not_empty else []
        elif inner is not None and not is_provably_less(inner, step):
            return False
        full = at_least_one(size)
        packed = [way * full for way in ways]
        if if_not_empty and full is not size:
            packed += [way * size for way in ways]
        inner = step
    return True


def preserved_strides(shape: Shape, stride: Shape) -> Shape:
    """Strides of a copy with preserve_format: the same if dense, else packed in the same order of dimensions."""
    if is_symbolic((*shape, *stride)):
        if _is_provably_packed(shape, stride, order_by_hints(stride, shape)):
            return stride
        duplicate = None if has_unbacked(*shape, *stride) else _find_duplicate_stride(shape, stride)
        if duplicate is not None:
            packed = _packed_by_order(shape, stride)
            if all(
                is_provably_equal(step, given) or is_not_one_unless(shape[duplicate], step, given)
                for step, given in zip(packed, stride, strict=True)
            ):
                return packed
    if is_dense(shape, stride):
        return stride
    if len(shape) < 2:
        return (1,) if shape else ()
    if is_symbolic((*shape, *stride)) and is_provably_row_major(shape, stride):
        return contiguous_strides(shape)
    return _packed_by_order(shape, stride)


def _find_duplicate_stride(shape: Shape, stride: Shape) -> int | None:
    """A dimension that must have size 1 for the strides to be dense, because another one has the same stride: then one
    guard decides. None if there is none, or for empty tensors."""
    for dim, step in enumerate(stride):
        for other, size in enumerate(shape):
            if other != dim and is_provably_equal(stride[other], step) and is_provably_different(size, 1):
                is_open = have_different_hints(shape[dim], 1) and not is_provably_different(shape[dim], 1)
                return dim if is_open and all(is_provably_less(0, each) for each in (*shape, step)) else None
    return None


def _packed_by_order(shape: Shape, stride: Shape) -> Shape:
    strides: list[Any] = [0] * len(shape)
    step: Any = 1
    for dim in _memory_order(shape, (stride,)):
        strides[dim] = step
        step = step * at_least_one(shape[dim])
    return tuple(strides)


def _strides_of_one_shape(shape: Shape, operands: Sequence[TensorSpec]) -> Shape | None:
    if all(operand.is_contiguous for operand in operands):
        return contiguous_strides(shape)
    if len(shape) == 4 and all(is_channels_last_contiguous(shape, operand.stride) for operand in operands):
        return channels_last_strides(shape)
    stride = operands[0].stride
    if all(same_shape(operand.stride, stride) for operand in operands) and is_dense(shape, stride):
        return stride
    return None


def _sorted_strides(shape: Shape, operands: Sequence[TensorSpec]) -> Shape:
    rows = [_broadcast_row(shape, operand) for operand in operands if operand.shape]
    order = _memory_order(shape, rows)
    if order == list(range(len(shape) - 1, -1, -1)):
        return contiguous_strides(shape)
    return packed_strides(shape, order)


def _broadcast_row(shape: Shape, operand: TensorSpec) -> Shape:
    """The operand's strides, one for each dimension of the result, 0 where it is expanded."""
    own, stride = operand.shape, operand.stride
    if own is shape or (not is_symbolic((*own, *shape)) and own == shape):
        return stride
    lead = len(shape) - len(own)
    expanded = [
        0 if not is_provably_equal(size, wanted) and size == 1 and wanted != 1 else step
        for size, step, wanted in zip(own, stride, shape[lead:], strict=True)
    ]
    return (*(0,) * lead, *expanded)


def _memory_order(shape: Shape, rows: Sequence[Shape]) -> list[int]:
    """Dimensions from the fastest to the slowest."""
    return sort_where_decided(range(len(shape) - 1, -1, -1), functools.partial(_compare, shape, rows))


def sort_where_decided(items: Iterable[T], compare: Callable[[T, T], int]) -> list[T]:
    """Insertion sort with a comparison that may be undecided (0; positive: the second goes first): torch sorts dimensions
    so, and those that nothing is said of stay where they are."""
    order = list(items)
    for start in range(1, len(order)):
        moving = start
        for position in range(start - 1, -1, -1):
            verdict = compare(order[position], order[moving])
            if verdict > 0:
                order[position], order[moving] = order[moving], order[position]
                moving = position
            elif verdict < 0:
                break
    return order


def _compare(shape: Shape, rows: Sequence[Shape], a: int, b: int) -> int:
    """1 if dimension `a` is slower in memory than `b`, -1 if it is faster, 0 if no operand decides."""
    for row in rows:
        step_a, step_b = row[a], row[b]
        if step_a == 0 or step_b == 0:
            continue
        if step_a < step_b:
            return -1
        if step_a > step_b or shape[a] > shape[b]:
            return 1
    return 0
