"""Tensors of a few integers that are made of sizes: `torch.tensor(x.shape).max().item()` is a symbol, not a number.

What such a tensor holds is known as an expression (see `determined`). The usual way to read it is to compute it, which
fixes every symbol in it. Here it is evaluated with the symbols, by the operators in the tables; any other is left to the
usual way.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import (
    SYMBOLIC,
    CallResult,
    DeterminedCall,
    FilledStorage,
    StoragePart,
    on_storage,
)
from understudy.ops.registry import Trait
from understudy.spec import TensorSpec

Function = Callable[..., Any]

elements_rule: Trait[Function] = Trait("its elements, from the symbolic elements of its inputs")
LARGEST = 32
"""Elements of a tensor that is looked into."""
INTEGERS = (torch.int64, torch.bool)
"""What Python's integers and symbols compute with as the kernels do."""


class NotEvaluated(Exception):
    """An operator or a tensor that is not looked into."""


class SymbolicElements:
    """The elements of a small tensor, row by row."""

    def __init__(self, shape: tuple[int, ...], flat: list[object]) -> None:
        self.shape, self.flat = shape, flat

    def as_lists(self) -> Any:
        """As `tolist()` gives them: in lists, or the one number."""
        items = self.flat
        for size in reversed(self.shape):
            items = [items[i : i + size] for i in range(0, len(items), size)] if size else []
        return items[0] if items else []


def values_of(fake: FakeTensor) -> SymbolicElements | None:
    """What a tensor holds, if that is known and made of symbols; None otherwise."""
    known = fake._known
    if known is None or known.content is None or fake.fake_mode.shape_env is None:
        return None
    try:
        values = SymbolicEvaluation().of(StoragePart(known.content, fake._spec))
    except NotEvaluated:
        return None
    return values if any(isinstance(value, SYMBOLIC) for value in values.flat) else None


class SymbolicEvaluation:
    """One evaluation, in which each call is evaluated once."""

    def __init__(self) -> None:
        self._found: dict[int, SymbolicElements] = {}

    def of(self, part: StoragePart) -> SymbolicElements:
        spec, content, places = part.spec, part.content, _places(part.spec)
        if type(part) is not StoragePart or spec.conj or spec.neg:
            raise NotEvaluated
        if isinstance(content, FilledStorage):
            return SymbolicElements(spec.numbers.shape, [content.value] * len(places))
        if isinstance(content, CallResult) and content.event.op is not None:
            if content.event.is_write or content.spec.dtype is not spec.dtype:
                raise NotEvaluated
            stored = dict(zip(_places(content.spec), self._result(content.event).flat, strict=True))
            if not stored.keys() >= set(places):
                raise NotEvaluated
            return SymbolicElements(spec.numbers.shape, [stored[place] for place in places])
        with _torch.PastDispatch():
            return SymbolicElements(spec.numbers.shape, on_storage(content.storage(), spec).flatten().tolist())

    def _result(self, event: DeterminedCall) -> SymbolicElements:
        found = self._found.get(id(event))
        if found is None:
            follow = elements_rule.of(event.op)
            if follow is None:
                raise NotEvaluated
            found = self._found[id(event)] = follow(self, *event.args, **event.kwargs)
        return found


def _places(spec: TensorSpec) -> list[int]:
    """Where the elements are in the storage."""
    numbers = (*spec.shape, *spec.stride, spec.offset)
    if (
        spec.dtype not in INTEGERS
        or not all(type(number) is int for number in numbers)
        or spec.numel > LARGEST
    ):
        raise NotEvaluated
    steps = [[i * stride for i in range(size)] for size, stride in zip(spec.shape, spec.stride, strict=True)]
    return [spec.offset + sum(place) for place in itertools.product(*steps)]


# --- operators ---------------------------------------------------------------------------------------------------


def _integers(reading: SymbolicEvaluation, operand: object) -> SymbolicElements:
    """A tensor, or a number that is computed with as a tensor of no dimension."""
    if isinstance(operand, StoragePart):
        if operand.spec.dtype is torch.bool:
            raise NotEvaluated
        return reading.of(operand)
    if type(operand) is int or isinstance(operand, torch.SymInt):
        return SymbolicElements((), [operand])
    raise NotEvaluated


def _elementwise(function: Function) -> Function:
    def follow(reading: SymbolicEvaluation, *operands: object, alpha: object = 1, **other: object) -> SymbolicElements:
        if any(value is not None for value in other.values()) or type(alpha) is not int:
            raise NotEvaluated
        given = [_integers(reading, operand) for operand in operands]
        shapes = {values.shape for values in given if values.shape}
        if len(shapes) > 1:
            raise NotEvaluated
        shape = shapes.pop() if shapes else ()
        rows = [values.flat if values.shape else values.flat * _count(shape) for values in given]
        scale = (alpha,) if alpha != 1 else ()
        return SymbolicElements(shape, [function(*row, *scale) for row in zip(*rows, strict=True)])

    return follow


def _count(shape: tuple[int, ...]) -> int:
    return functools.reduce(operator.mul, shape, 1)


def _whole(function: Function, empty: int | None) -> Function:
    """A reduction of all elements."""

    def follow(reading: SymbolicEvaluation, operand: object, dtype: object = None) -> SymbolicElements:
        values = _integers(reading, operand)
        if dtype not in (None, torch.int64) or (empty is None and not values.flat):
            raise NotEvaluated
        start = () if empty is None else (empty,)
        return SymbolicElements((), [functools.reduce(function, values.flat, *start)])

    return follow


def _copy_elements(
    reading: SymbolicEvaluation, operand: object, *, dtype: object = None, **other: object
) -> SymbolicElements:
    return _integers(reading, operand)  # of what dtype it comes out was looked at


def _one(reading: SymbolicEvaluation, value: object, **options: object) -> SymbolicElements:
    return _integers(reading, value)


def _full(reading: SymbolicEvaluation, shape: Any, value: object, **options: object) -> SymbolicElements:
    return SymbolicElements(tuple(shape), _integers(reading, value).flat * _count(shape))


def _join_elements(reading: SymbolicEvaluation, tensors: Any, dim: int = 0) -> SymbolicElements:
    given = [_integers(reading, tensor) for tensor in tensors]
    if dim != 0:
        raise NotEvaluated
    shape = (sum(values.shape[0] for values in given), *given[0].shape[1:])
    return SymbolicElements(shape, [value for values in given for value in values.flat])


def _stack_elements(reading: SymbolicEvaluation, tensors: Any, dim: int = 0) -> SymbolicElements:
    given = [_integers(reading, tensor) for tensor in tensors]
    if dim != 0:
        raise NotEvaluated
    return SymbolicElements((len(given), *given[0].shape), [value for values in given for value in values.flat])


def _divide_elements(reading: SymbolicEvaluation, a: object, b: object, *, rounding_mode: object = None) -> SymbolicElements:
    if rounding_mode != "floor":
        raise NotEvaluated
    return FLOORED(reading, a, b)


FLOORED = _elementwise(lambda a, b: a // b)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
elements_rule.register_all(
    {
        "aten::scalar_tensor": _one,
        "aten::full": _full,
        "aten::stack": _stack_elements,
        "aten::cat": _join_elements,
        "aten::clone": _copy_elements,
        "aten::_to_copy": _copy_elements,
        "aten::add.Tensor": _elementwise(lambda a, b, scale=1: a + scale * b),
        "aten::sub.Tensor": _elementwise(lambda a, b, scale=1: a - scale * b),
        "aten::rsub.Scalar": _elementwise(lambda a, b, scale=1: b - scale * a),
        "aten::mul.Tensor": _elementwise(operator.mul),
        "aten::neg": _elementwise(operator.neg),
        "aten::floor_divide": FLOORED,
        "aten::div.Tensor_mode": _divide_elements,
        "aten::remainder.Tensor": _elementwise(operator.mod),
        "aten::remainder.Scalar": _elementwise(operator.mod),
        "aten::maximum": _elementwise(torch.sym_max),
        "aten::minimum": _elementwise(torch.sym_min),
        "aten::max": _whole(torch.sym_max, None),
        "aten::min": _whole(torch.sym_min, None),
        "aten::sum": _whole(operator.add, 0),
        "aten::prod": _whole(operator.mul, 1),
        **{
            f"aten::{name}.{kind}": _elementwise(getattr(operator, name))
            for name in COMPARISONS
            for kind in ("Tensor", "Scalar")
        },
    }
)


# --- `x[n]` where n is a symbolic number, or a tensor with one number that only data knows ------------------------------
# C++ would have Python make a plain number of it, and so fix it or fail. Every other index goes to C++ as it is. Set up with
# the first `ShapeEnv`: programs without one pay nothing.

Index = tuple[Any, ...]
get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__


def get_item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    index = _without_tensors_of_one(index)
    if not _has_symbol(index):
        return get(tensor, index)
    part, rest = _select_by_symbols(tensor, index)
    return get(part, rest) if rest else part


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    index = _without_tensors_of_one(index)
    if not _has_symbol(index):
        put(tensor, index, value)
        return
    part, rest = _select_by_symbols(tensor, index)
    put(part, rest or ..., value)


def _without_tensors_of_one(index: Any) -> Any:
    """A whole number in a tensor without dimensions is the same index as the number itself, and so is the end of a slice."""
    kind = type(index)
    if kind is FakeTensor:
        return index.item() if _is_one_symbol(index) else index
    if kind is slice:
        ends = (index.start, index.stop, index.step)
        if FakeTensor in map(type, ends):
            return slice(*map(_without_tensors_of_one, ends))
    elif kind is tuple and not PARTS.isdisjoint(map(type, index)):
        return tuple([_without_tensors_of_one(part) for part in index])
    return index


def _is_one_symbol(index: FakeTensor) -> bool:
    """Whether it is one number that nobody knows, or that sizes are in."""
    spec = index._spec
    if spec.shape or spec.dtype not in WHOLE or index.fake_mode.shape_env is None:
        return False
    if index._known is not None and values_of(index) is None:
        return False
    # Transforms have no numbers; and there are modes that make an operator of such an index, for them.
    return not _torch.is_transformed() and not _torch.is_function_heard()


PARTS = {FakeTensor, slice}
WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def _has_symbol(index: object) -> bool:
    return type(index) is torch.SymInt or (type(index) is tuple and torch.SymInt in map(type, index))


def _select_by_symbols(tensor: torch.Tensor, index: object) -> tuple[torch.Tensor, Index]:
    """The part of a tensor that the symbolic numbers in an index tell, and the index into that part."""
    parts: Index = index if type(index) is tuple else (index,)
    taken = list(map(_dims_taken, parts))
    given = sum(count for count in taken if count is not None)
    for position in reversed([i for i, part in enumerate(parts) if type(part) is torch.SymInt]):
        before = taken[:position]
        skipped = tensor.dim() - given if None in before else 0  # by the ellipsis
        tensor = tensor.select(skipped + sum(filter(None, before)), parts[position])
        given -= 1
    return tensor, tuple([part for part in parts if type(part) is not torch.SymInt])


def _dims_taken(part: Any) -> int | None:
    """How many dimensions a part of an index is about; None for an ellipsis."""
    if part is ...:
        return None
    if part is None or type(part) is bool:
        return 0
    is_mask = isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if is_mask else 1


def take_symbols() -> None:
    """From now on, stand-ins can be indexed by symbolic numbers."""
    FakeTensor.__getitem__ = get_item  # type: ignore[assignment]
    FakeTensor.__setitem__ = set_item  # type: ignore[assignment]
