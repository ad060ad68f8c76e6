"""Functions on sizes, plain or symbolic, for specs and rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from understudy.errors import ArgumentError
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.layouts import is_packed
from understudy.shapes.node import Size, SymNode, adopt, value_of

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv


def is_provably_equal(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for all values of the symbols. Adds no guard."""
    if a is b:
        return True
    if type(a) is int and type(b) is int:
        return a == b
    return not have_different_hints(a, b) and bool(
        _env_of(a, b).decisions.is_known(conditions.eq(value_of(a), value_of(b)))
    )


def is_provably_different(a: Size, b: Size) -> bool:
    """Whether two sizes differ for all values of the symbols. Adds no guard."""
    if type(a) is int and type(b) is int:
        return a != b
    first, second = _hint(a), _hint(b)
    if first is not None and first == second:  # no proof is possible
        return False
    return bool(_env_of(a, b).decisions.is_known(conditions.ne(value_of(a), value_of(b))))


def have_different_hints(a: Size, b: Size) -> bool:
    """Whether the hints of two sizes differ. Adds no guard: results must not depend on it, only the order of questions."""
    first, second = _hint(a), _hint(b)
    return first is not None and second is not None and bool(first != second)


def is_or_is_one(size: Size, wanted: Size) -> bool:
    """Whether a size is the wanted one, or 1, with one guard for both."""
    if type(size) is int and type(wanted) is int:
        return size in (wanted, 1)
    if _hint(size) is None or _hint(wanted) is None:
        return bool(size == wanted or size == 1)
    is_wanted = conditions.eq(value_of(size), value_of(wanted))
    return _env_of(size, wanted).decisions.decide(
        conditions.either(is_wanted, conditions.eq(value_of(size), 1))
    )


def are_equal_or_one(size: Size, other: Size) -> bool:
    """Whether two sizes are equal, or either is 1, with one guard."""
    if type(size) is int and type(other) is int:
        return size == other or 1 in (size, other)
    first, second = value_of(size), value_of(other)
    ways = [conditions.eq(first, second), conditions.eq(first, 1), conditions.eq(second, 1)]
    return _env_of(size, other).decisions.decide(conditions.join("or", ways))


def is_any_of(size: Size, *others: Size) -> bool:
    """Whether a size is one of these. No guard if that can be proved; else a guard on the one that equals the hint."""
    if any(is_provably_equal(size, other) for other in others):
        return True
    return any(not have_different_hints(size, other) and size == other for other in others)


def is_any_positive(numbers: Sequence[Size]) -> bool:
    """Whether one of these is larger than 0, with one guard."""
    env = next((number.shape_env for number in numbers if type(number) is SymNode), None)
    if env is None or has_unbacked(*numbers):
        return any(number > 0 for number in numbers)
    return bool(
        env.decisions.decide(
            conditions.join("or", [conditions.gt(value_of(number), 0) for number in numbers])
        )
    )


def hint_of(size: Size) -> Any:
    """The hint of a size, None if it is unbacked."""
    return _hint(size)


def is_provably_less(a: Size, b: Size) -> bool:
    """Whether a < b for all values of the symbols."""
    if type(a) is int and type(b) is int:
        return a < b
    first, second = _hint(a), _hint(b)
    if first is not None and second is not None and first >= second:
        return False
    return bool(_env_of(a, b).decisions.is_known(conditions.lt(value_of(a), value_of(b))))


def order_by_hints(stride: Sequence[Size], shape: Sequence[Size]) -> list[int]:
    """The dimensions from the smallest stride to the largest, by hints; unbacked ones last."""

    def hint_of(dim: int) -> tuple[float, float, int]:
        return _example(stride[dim]), _example(shape[dim]), -dim

    return sorted(range(len(stride)), key=hint_of)


def _hint(size: Size) -> int | None:
    return size if isinstance(size, int) else size.hint


def _example(size: Size) -> float:
    hint = _hint(size)
    return float("inf") if hint is None else hint


def are_packed(
    shape: Sequence[Size], stride: Sequence[Size], order: Sequence[int], empty_is_packed: bool = False
) -> bool:
    """`is_packed` for sizes of which at least one is symbolic."""
    env = next(size.shape_env for size in (*shape, *stride) if type(size) is SymNode)
    return is_packed(env, [value_of(s) for s in shape], [value_of(s) for s in stride], order, empty_is_packed)


def at_least_one(size: Size) -> Size:
    """max(size, 1)"""
    if type(size) is int:
        return max(size, 1)
    assert type(size) is SymNode
    env, value = size.shape_env, size.value
    is_declared = type(value) is Expr and value.low is not None and value.low >= 1
    return (
        size
        if is_declared or env.decisions.is_known(conditions.ge(value, 1))
        else env.numbers.compute("max", size, 1)
    )


def add_all(sizes: Sequence[Size]) -> Size:
    """The sum of sizes: for many symbols, faster than adding one by one."""
    env = next((size.shape_env for size in sizes if type(size) is SymNode), None)
    if env is None:
        return sum(cast("Sequence[int]", sizes))
    total: Size = env.numbers.add_all([env.numbers.as_node(size) for size in sizes]).unwrap()
    return total


def smaller(a: Size, b: Size) -> Size:
    """min(a, b), without a guard."""
    if type(a) is int and type(b) is int:
        return min(a, b)
    known = _smaller_if_known(a, b)
    return _env_of(a, b).numbers.compute("min", a, b) if known is None else known


def larger(a: Size, b: Size) -> Size:
    """max(a, b), without a guard."""
    if type(a) is int and type(b) is int:
        return max(a, b)
    known = _smaller_if_known(a, b)
    if known is not None:
        return b if known is a else a
    return _env_of(a, b).numbers.compute("max", a, b)


def _smaller_if_known(a: Size, b: Size) -> Size | None:
    """Return the provably smaller one, or None. For unbacked sizes, facts come from `torch._check`."""
    if has_unbacked(a, b):
        env = _env_of(a, b)
        for one, other in ((a, b), (b, a)):
            if env.decisions.is_known(conditions.le(value_of(one), value_of(other))):
                return one
    return None


def has_unbacked(*sizes: Size) -> bool:
    """Whether one of these is unbacked."""
    return any(type(size) is SymNode and size.hint is None for size in sizes)


def expect_equal(size: Size, wanted: Size, is_checked_by_operator: bool = False) -> bool:
    """Whether a size equals the wanted one. For an unbacked size that becomes a runtime assert, and True is returned.

    `is_checked_by_operator`: the operator checks it itself when the program runs."""
    if not has_unbacked(size, wanted):
        return bool(size == wanted)
    equal = conditions.eq(value_of(size), value_of(wanted))
    return bool(_env_of(size, wanted).expect(equal, is_checked_by_operator=is_checked_by_operator))


def expect_in_bounds(size: Size, index: Size) -> bool:
    """Whether an index is in -size … size - 1. For unbacked numbers that becomes a runtime assert, and True is returned."""
    if not has_unbacked(size, index):
        return bool(-size <= index < size)
    env = next(number.shape_env for number in (size, index) if type(number) is SymNode)
    wanted = (("<", index, size), ("<=", -size, index))
    numbers = env.numbers
    return all(
        env.expect(numbers.build_condition(relation, *map(numbers.as_node, sides)))
        for relation, *sides in wanted
    )


def expect_sizes(shape: Sequence[Size]) -> None:
    """Record that unbacked numbers that are sizes are at least 0, which the operator checks. Raises for negative sizes."""
    for size in shape:
        if type(size) is not SymNode or size.hint is not None:
            continue
        if not size.shape_env.expect(conditions.ge(size.value, 0), is_checked_by_operator=True):
            raise ArgumentError(f"sizes must not be negative, got {size}")


def wrap_index(index: Size, size: Size) -> Size:
    """An index counted from the start; a negative one is counted from the end. For unbacked numbers, a choice between
    both."""
    if type(index) is not SymNode or index.hint is not None:
        return index + size if index < 0 else index
    env = index.shape_env
    numbers = env.numbers
    is_counted_so = numbers.compare(">=", index, numbers.node(0, int))
    return numbers.choose(is_counted_so, index, numbers.as_node(index + size))


def is_not_one_unless(size: Size, a: Size, b: Size) -> bool:
    """Whether size != 1, or a == b, with one guard. At least one of these is symbolic."""
    env = next(number.shape_env for number in (size, a, b) if type(number) is SymNode)
    condition = conditions.either(conditions.ne(value_of(size), 1), conditions.eq(value_of(a), value_of(b)))
    return bool(env.decisions.decide(condition, fallback=False))


def is_nonempty_or_not_one(size: Size, inner: Size, step: Size, inner_step: Size) -> bool:
    """Whether size != 0, or inner != 1, or inner_step < step, with one guard."""
    if not is_symbolic((size, inner, step, inner_step)):
        return size != 0 or inner != 1 or inner_step < step
    env = next(number.shape_env for number in (size, inner, step, inner_step) if type(number) is SymNode)
    values = [value_of(number) for number in (size, inner, step, inner_step)]
    ways = [conditions.ne(values[0], 0), conditions.ne(values[1], 1), conditions.lt(values[3], values[2])]
    return bool(env.decisions.decide(conditions.join("or", ways), fallback=True))


def assume_nonempty_if_indexed(size: Size, index_shape: Sequence[Size]) -> None:
    """Add a guard that the index is empty or the size is not 0, if that holds for the hints."""
    numbers = (size, *index_shape)
    if (
        not is_symbolic(numbers)
        or has_unbacked(*numbers)
        or (_hint(size) == 0 and 0 not in map(_hint, index_shape))
    ):
        return
    env = next(number.shape_env for number in numbers if type(number) is SymNode)
    ways = [conditions.ne(value_of(size), 0), *[conditions.eq(value_of(each), 0) for each in index_shape]]
    env.decisions.decide(conditions.join("or", ways), fallback=True)


def fits_in_storage(needed: Size, shape: Sequence[Size], held: Size, held_shape: Sequence[Size]) -> bool:
    """Whether a view fits into the storage of a tensor, or is empty, with one guard."""
    if not is_symbolic((needed, held, *shape, *held_shape)):
        return 0 in shape or (needed <= held and 0 not in held_shape)
    env = next(size.shape_env for size in (needed, held, *shape, *held_shape) if type(size) is SymNode)
    is_filled = [conditions.ne(value_of(size), 0) for size in held_shape]
    is_within = conditions.join("and", [conditions.le(value_of(needed), value_of(held)), *is_filled])
    is_empty = [conditions.eq(value_of(size), 0) for size in shape]
    return bool(env.decisions.decide(conditions.join("or", [is_within, *is_empty]), fallback=True))


def fix_sizes(sizes: Sequence[Size]) -> None:
    """Assume, with guards, that sizes equal their hints."""
    for size in sizes:
        int(size)


def is_symbolic(sizes: Sequence[Size]) -> bool:
    return SymNode in map(type, sizes)


def to_torch(size: Size) -> Any:
    """A size as torch expects it: an int or a `SymInt`."""
    return size.symbolic if type(size) is SymNode else size


def from_torch(size: object) -> Any:
    """A size of torch as a number or a node."""
    if isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = adopt(size.node)
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
