"""Sizes that may be numbers or symbols: what specs need to ask of both in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from understudy.errors import ArgumentError
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.layouts import is_packed
from understudy.shapes.node import Size, SymNode, value_of

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv


def surely_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal whatever the symbols are; no guard comes of asking."""
    if a is b:
        return True
    if type(a) is int and type(b) is int:
        return a == b
    return not differ_at_hand(a, b) and bool(_env_of(a, b).decisions.is_known(conditions.eq(value_of(a), value_of(b))))


def surely_differ(a: Size, b: Size) -> bool:
    """Whether two sizes differ whatever the symbols are; no guard comes of asking."""
    if type(a) is int and type(b) is int:
        return a != b
    first, second = _hint(a), _hint(b)
    if first is not None and first == second:  # a search for a proof would be in vain
        return False
    return bool(_env_of(a, b).decisions.is_known(conditions.ne(value_of(a), value_of(b))))


def differ_at_hand(a: Size, b: Size) -> bool:
    """Whether two sizes have different examples. Nothing is assumed: what to ask next may depend on it, no answer."""
    first, second = _hint(a), _hint(b)
    return first is not None and second is not None and bool(first != second)


def is_or_is_one(size: Size, wanted: Size) -> bool:
    """Whether a size is the wanted one, or 1, in one question: whichever it is at hand, it may be the other elsewhere."""
    if type(size) is int and type(wanted) is int:
        return size in (wanted, 1)
    if _hint(size) is None or _hint(wanted) is None:
        return bool(size == wanted or size == 1)
    is_wanted = conditions.eq(value_of(size), value_of(wanted))
    return _env_of(size, wanted).decisions.decide(conditions.either(is_wanted, conditions.eq(value_of(size), 1)))


def are_equal_or_one(size: Size, other: Size) -> bool:
    """Whether two sizes are equal, or either is 1, in one question."""
    if type(size) is int and type(other) is int:
        return size == other or 1 in (size, other)
    first, second = value_of(size), value_of(other)
    ways = [conditions.eq(first, second), conditions.eq(first, 1), conditions.eq(second, 1)]
    return _env_of(size, other).decisions.decide(conditions.join("or", ways))


def is_any_of(size: Size, *others: Size) -> bool:
    """Whether a size is one of these. Nothing is asked if one of them is seen to be; else of the one that is at hand."""
    if any(surely_equal(size, other) for other in others):
        return True
    return any(not differ_at_hand(size, other) and size == other for other in others)


def is_any_positive(numbers: Sequence[Size]) -> bool:
    """Whether one of these is larger than 0, in one question."""
    env = next((number.shape_env for number in numbers if type(number) is SymNode), None)
    if env is None or lies_in_data(*numbers):
        return any(number > 0 for number in numbers)
    return bool(env.decisions.decide(conditions.join("or", [conditions.gt(value_of(number), 0) for number in numbers])))


def at_hand(size: Size) -> Any:
    """The number that a size is in the example, None if only data knows."""
    return _hint(size)


def surely_less(a: Size, b: Size) -> bool:
    """Whether a < b whatever the symbols are."""
    if type(a) is int and type(b) is int:
        return a < b
    first, second = _hint(a), _hint(b)
    if first is not None and second is not None and first >= second:
        return False
    return bool(_env_of(a, b).decisions.is_known(conditions.lt(value_of(a), value_of(b))))


def by_example(stride: Sequence[Size], shape: Sequence[Size]) -> list[int]:
    """The dimensions from the smallest stride to the largest, at the example's sizes; unknown ones last."""

    def at_hand(dim: int) -> tuple[float, float, int]:
        return _example(stride[dim]), _example(shape[dim]), -dim

    return sorted(range(len(stride)), key=at_hand)


def _hint(size: Size) -> int | None:
    return size if isinstance(size, int) else size.hint


def _example(size: Size) -> float:
    hint = _hint(size)
    return float("inf") if hint is None else hint


def are_packed(
    shape: Sequence[Size], stride: Sequence[Size], order: Sequence[int], empty_is_packed: bool = False
) -> bool:
    """`is_packed` for sizes of which at least one is a symbol."""
    env = next(size.shape_env for size in (*shape, *stride) if type(size) is SymNode)
    return is_packed(env, [value_of(s) for s in shape], [value_of(s) for s in stride], order, empty_is_packed)


def at_least_one(size: Size) -> Size:
    """max(size, 1)"""
    if type(size) is int:
        return max(size, 1)
    assert type(size) is SymNode
    env, value = size.shape_env, size.value
    is_declared = type(value) is Expr and value.low is not None and value.low >= 1
    return size if is_declared or env.decisions.is_known(conditions.ge(value, 1)) else env.numbers.compute("max", size, 1)


def add_all(sizes: Sequence[Size]) -> Size:
    """The sum of sizes: of many symbols, faster than one after the other."""
    env = next((size.shape_env for size in sizes if type(size) is SymNode), None)
    if env is None:
        return sum(cast("Sequence[int]", sizes))
    total: Size = env.numbers.add_all([env.numbers.as_node(size) for size in sizes]).unwrap()
    return total


def smaller(a: Size, b: Size) -> Size:
    """min(a, b), without asking which one it is."""
    if type(a) is int and type(b) is int:
        return min(a, b)
    known = _smaller_if_known(a, b)
    return _env_of(a, b).numbers.compute("min", a, b) if known is None else known


def larger(a: Size, b: Size) -> Size:
    """max(a, b), without asking which one it is."""
    if type(a) is int and type(b) is int:
        return max(a, b)
    known = _smaller_if_known(a, b)
    if known is not None:
        return b if known is a else a
    return _env_of(a, b).numbers.compute("max", a, b)


def _smaller_if_known(a: Size, b: Size) -> Size | None:
    """The one that is at most the other, None if that is open. Of what only data knows, `torch._check` has told."""
    if lies_in_data(a, b):
        env = _env_of(a, b)
        for one, other in ((a, b), (b, a)):
            if env.decisions.is_known(conditions.le(value_of(one), value_of(other))):
                return one
    return None


def lies_in_data(*sizes: Size) -> bool:
    """Whether one of these has no example, because only data knows it."""
    return any(type(size) is SymNode and size.hint is None for size in sizes)


def has_to_be(size: Size, wanted: Size, is_refused_else: bool = False) -> bool:
    """Of a size that fits nowhere otherwise: whether it can be the wanted one. If only data knows, it is expected to be.

    `is_refused_else`: the operator itself refuses any other when the program runs."""
    if not lies_in_data(size, wanted):
        return bool(size == wanted)
    equal = conditions.eq(value_of(size), value_of(wanted))
    return bool(_env_of(size, wanted).expect(equal, is_refused_else=is_refused_else))


def has_place(size: Size, index: Size) -> bool:
    """Whether an index is in -size … size - 1. If only data knows, then it is expected to be."""
    if not lies_in_data(size, index):
        return bool(-size <= index < size)
    env = next(number.shape_env for number in (size, index) if type(number) is SymNode)
    wanted = (("<", index, size), ("<=", -size, index))
    numbers = env.numbers
    return all(env.expect(numbers.build_condition(relation, *map(numbers.as_node, sides))) for relation, *sides in wanted)


def expect_sizes(shape: Sequence[Size]) -> None:
    """A number that only data knows, and that an operator took for a size, is at least 0: it refuses any other."""
    for size in shape:
        if type(size) is not SymNode or size.hint is not None:
            continue
        if not size.shape_env.expect(conditions.ge(size.value, 0), is_refused_else=True):
            raise ArgumentError(f"a tensor can't have the size {size}, which is negative")


def from_start(index: Size, size: Size) -> Size:
    """An index counted from the start: a negative one is counted from the end. Of what only data knows, either may be."""
    if type(index) is not SymNode or index.hint is not None:
        return index + size if index < 0 else index
    env = index.shape_env
    numbers = env.numbers
    is_counted_so = numbers.compare(">=", index, numbers.node(0, int))
    return numbers.choose(is_counted_so, index, numbers.as_node(index + size))


def is_not_one_unless(size: Size, a: Size, b: Size) -> bool:
    """Whether size != 1, or a == b, as one question. At least one of these is a symbol."""
    env = next(number.shape_env for number in (size, a, b) if type(number) is SymNode)
    condition = conditions.either(conditions.ne(value_of(size), 1), conditions.eq(value_of(a), value_of(b)))
    return bool(env.decisions.decide(condition, fallback=False))


def is_filled_or_not_one(size: Size, inner: Size, step: Size, inner_step: Size) -> bool:
    """Whether size != 0, or inner != 1, or inner_step < step, as one question."""
    if not is_symbolic((size, inner, step, inner_step)):
        return size != 0 or inner != 1 or inner_step < step
    env = next(number.shape_env for number in (size, inner, step, inner_step) if type(number) is SymNode)
    values = [value_of(number) for number in (size, inner, step, inner_step)]
    ways = [conditions.ne(values[0], 0), conditions.ne(values[1], 1), conditions.lt(values[3], values[2])]
    return bool(env.decisions.decide(conditions.join("or", ways), fallback=True))


def has_room_for(needed: Size, shape: Sequence[Size], held: Size, held_shape: Sequence[Size]) -> bool:
    """Whether a view that needs so many bytes lies within what a tensor holds, or has no elements, as one question."""
    if not is_symbolic((needed, held, *shape, *held_shape)):
        return 0 in shape or (needed <= held and 0 not in held_shape)
    env = next(size.shape_env for size in (needed, held, *shape, *held_shape) if type(size) is SymNode)
    is_filled = [conditions.ne(value_of(size), 0) for size in held_shape]
    is_within = conditions.join("and", [conditions.le(value_of(needed), value_of(held)), *is_filled])
    is_empty = [conditions.eq(value_of(size), 0) for size in shape]
    return bool(env.decisions.decide(conditions.join("or", [is_within, *is_empty]), fallback=True))


def is_symbolic(sizes: Sequence[Size]) -> bool:
    return any(type(size) is SymNode for size in sizes)


def to_torch(size: Size) -> Any:
    """What torch takes for this size."""
    return size.symbolic if type(size) is SymNode else size


def from_torch(size: object) -> Any:
    """The size that torch gave: a number or a node."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = size.node
        if type(node) is SymNode:
            return node.value if node.is_plain else node
        constant = node.maybe_as_int()
        return size if constant is None else constant
    return size


def _env_of(a: Size, b: Size) -> ShapeEnv:
    if type(a) is SymNode:
        return a.shape_env
    assert type(b) is SymNode
    return b.shape_env
