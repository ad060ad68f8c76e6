"""Small integer tensors that are computed from sizes: `torch.tensor(x.shape).max().item()` is a symbol, not a number.

The contents of such a tensor are determined (see `determined`). Computing them as usual would specialise every symbol.
Here the expression is evaluated with symbols, for the operators that have an `elements_rule`; with any other operator,
the values are computed as usual.
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
from understudy.ops.registry import Slot, declare, record_of
from understudy.ops.shared.dtypes import MASKS
from understudy.spec import TensorSpec

Function = Callable[..., Any]

elements_rule: Slot[Function] = declare("elements_rule", Slot())
"""Its elements, from the symbolic elements of its inputs."""
MOST_ELEMENTS = 32
"""The largest number of elements of a tensor that is evaluated."""
INTEGERS = (torch.int64, torch.bool)
"""The dtypes for which Python's integers compute the same as the kernels."""


class NotEvaluated(Exception):
    """An operator or a tensor that can't be evaluated with symbols."""


class SymbolicElements:
    """The elements of a small tensor, row by row."""

    def __init__(self, shape: tuple[int, ...], flat: list[object]) -> None:
        self.shape, self.flat = shape, flat

    def as_lists(self) -> Any:
        """As `tolist()` returns them: nested lists, or a single number."""
        items = self.flat
        for size in reversed(self.shape):
            items = [items[i : i + size] for i in range(0, len(items), size)] if size else []
        return items[0] if items else []


def symbolic_values_of(fake: FakeTensor) -> SymbolicElements | None:
    """The elements of a tensor if they are determined and contain symbols; None otherwise."""
    known = fake._determined
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
        spec, content, places = part.spec, part.content, _storage_positions(part.spec)
        if type(part) is not StoragePart or spec.conj or spec.neg:
            raise NotEvaluated
        if isinstance(content, FilledStorage):
            return SymbolicElements(spec.numbers.shape, [content.value] * len(places))
        if isinstance(content, CallResult) and content.event.op is not None:
            if content.event.is_write or content.spec.dtype is not spec.dtype:
                raise NotEvaluated
            stored = dict(
                zip(_storage_positions(content.spec), self._result(content.event).flat, strict=True)
            )
            if not stored.keys() >= set(places):
                raise NotEvaluated
            return SymbolicElements(spec.numbers.shape, [stored[place] for place in places])
        with _torch.PastDispatch():
            return SymbolicElements(
                spec.numbers.shape, on_storage(content.storage(), spec).flatten().tolist()
            )

    def _result(self, event: DeterminedCall) -> SymbolicElements:
        found = self._found.get(id(event))
        if found is None:
            evaluate = record_of(event.op).elements_rule
            if evaluate is None:
                raise NotEvaluated
            found = self._found[id(event)] = evaluate(self, *event.args, **event.kwargs)
        return found


def _storage_positions(spec: TensorSpec) -> list[int]:
    """The positions of the elements in the storage."""
    numbers = (*spec.shape, *spec.stride, spec.offset)
    if (
        spec.dtype not in INTEGERS
        or not all(type(number) is int for number in numbers)
        or spec.numel > MOST_ELEMENTS
    ):
        raise NotEvaluated
    steps = [[i * stride for i in range(size)] for size, stride in zip(spec.shape, spec.stride, strict=True)]
    return [spec.offset + sum(place) for place in itertools.product(*steps)]


# --- operators ---------------------------------------------------------------------------------------------------


def _integers(evaluation: SymbolicEvaluation, operand: object) -> SymbolicElements:
    """The elements of a tensor, or of a number as a 0-dimensional tensor."""
    if isinstance(operand, StoragePart):
        if operand.spec.dtype is torch.bool:
            raise NotEvaluated
        return evaluation.of(operand)
    if type(operand) is int or isinstance(operand, torch.SymInt):
        return SymbolicElements((), [operand])
    raise NotEvaluated


def _elementwise(function: Function) -> Function:
    def evaluate(
        evaluation: SymbolicEvaluation, *operands: object, alpha: object = 1, **other: object
    ) -> SymbolicElements:
        if any(value is not None for value in other.values()) or type(alpha) is not int:
            raise NotEvaluated
        given = [_integers(evaluation, operand) for operand in operands]
        shapes = {values.shape for values in given if values.shape}
        if len(shapes) > 1:
            raise NotEvaluated
        shape = shapes.pop() if shapes else ()
        rows = [values.flat if values.shape else values.flat * _count(shape) for values in given]
        scale = (alpha,) if alpha != 1 else ()
        return SymbolicElements(shape, [function(*row, *scale) for row in zip(*rows, strict=True)])

    return evaluate


def _count(shape: tuple[int, ...]) -> int:
    return functools.reduce(operator.mul, shape, 1)


def _full_reduction(function: Function, empty: int | None) -> Function:
    """A reduction of all elements."""

    def evaluate(evaluation: SymbolicEvaluation, operand: object, dtype: object = None) -> SymbolicElements:
        values = _integers(evaluation, operand)
        if dtype not in (None, torch.int64) or (empty is None and not values.flat):
            raise NotEvaluated
        start = () if empty is None else (empty,)
        return SymbolicElements((), [functools.reduce(function, values.flat, *start)])

    return evaluate


def _copy_elements(
    evaluation: SymbolicEvaluation, operand: object, *, dtype: object = None, **other: object
) -> SymbolicElements:
    return _integers(evaluation, operand)  # the dtype of the result was checked before


def _single_element(evaluation: SymbolicEvaluation, value: object, **options: object) -> SymbolicElements:
    return _integers(evaluation, value)


def _full(evaluation: SymbolicEvaluation, shape: Any, value: object, **options: object) -> SymbolicElements:
    return SymbolicElements(tuple(shape), _integers(evaluation, value).flat * _count(shape))


def _join_elements(evaluation: SymbolicEvaluation, tensors: Any, dim: int = 0) -> SymbolicElements:
    given = [_integers(evaluation, tensor) for tensor in tensors]
    if dim != 0:
        raise NotEvaluated
    shape = (sum(values.shape[0] for values in given), *given[0].shape[1:])
    return SymbolicElements(shape, [value for values in given for value in values.flat])


def _stack_elements(evaluation: SymbolicEvaluation, tensors: Any, dim: int = 0) -> SymbolicElements:
    given = [_integers(evaluation, tensor) for tensor in tensors]
    if dim != 0:
        raise NotEvaluated
    return SymbolicElements(
        (len(given), *given[0].shape), [value for values in given for value in values.flat]
    )


def _divide_elements(
    evaluation: SymbolicEvaluation, a: object, b: object, *, rounding_mode: object = None
) -> SymbolicElements:
    if rounding_mode != "floor":
        raise NotEvaluated
    return FLOORED(evaluation, a, b)


FLOORED = _elementwise(lambda a, b: a // b)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
elements_rule.register_all(
    {
        "aten::scalar_tensor": _single_element,
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
        "aten::max": _full_reduction(torch.sym_max, None),
        "aten::min": _full_reduction(torch.sym_min, None),
        "aten::sum": _full_reduction(operator.add, 0),
        "aten::prod": _full_reduction(operator.mul, 1),
        **{
            f"aten::{name}.{kind}": _elementwise(getattr(operator, name))
            for name in COMPARISONS
            for kind in ("Tensor", "Scalar")
        },
    }
)


# --- `x[n]` where n is a symbolic number, or a 0-dimensional tensor with a data-dependent number ------------------
# C++ would convert it to a plain integer, which specialises a backed symbol and fails for an unbacked one. Every other
# index is left to C++. Installed with the first `ShapeEnv`: programs without one pay nothing.

Index = tuple[Any, ...]
original_getitem, original_setitem = torch.Tensor.__getitem__, torch.Tensor.__setitem__


def get_item(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    index = _replace_single_numbers(index)
    if not _has_symbol(index):
        return original_getitem(tensor, index)
    part, rest = _select_by_symbols(tensor, index)
    return original_getitem(part, rest) if rest else part


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    index = _replace_single_numbers(index)
    if not _has_symbol(index):
        original_setitem(tensor, index, value)
        return
    part, rest = _select_by_symbols(tensor, index)
    original_setitem(part, rest or ..., value)


def _replace_single_numbers(index: Any) -> Any:
    """Replace 0-dimensional integer tensors in an index by their number, also as bounds of slices."""
    kind = type(index)
    if kind is FakeTensor:
        return index.item() if _is_unknown_number(index) else index
    if kind is slice:
        ends = (index.start, index.stop, index.step)
        if FakeTensor in map(type, ends):
            return slice(*map(_replace_single_numbers, ends))
    elif kind is tuple and not INDEX_PARTS.isdisjoint(map(type, index)):
        return tuple([_replace_single_numbers(part) for part in index])
    return index


def _is_unknown_number(index: FakeTensor) -> bool:
    """Whether it is a 0-dimensional integer tensor whose value is not a plain determined number."""
    spec = index._spec
    if spec.shape or spec.dtype not in INTEGER_DTYPES or index.fake_mode.shape_env is None:
        return False
    if (
        index._determined is not None
        and index._determined.content is not None
        and symbolic_values_of(index) is None
    ):
        return False
    # Inside transforms of torch.func the number can't be read; modes may turn such an index into an operator.
    return not _torch.has_transforms() and not _torch.has_function_modes()


INDEX_PARTS = {FakeTensor, slice}
INTEGER_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def _has_symbol(index: object) -> bool:
    return type(index) is torch.SymInt or (type(index) is tuple and torch.SymInt in map(type, index))


def _select_by_symbols(tensor: torch.Tensor, index: object) -> tuple[torch.Tensor, Index]:
    """Apply the symbolic numbers of an index by `select`; returns the selected tensor and the rest of the index."""
    parts: Index = index if type(index) is tuple else (index,)
    taken = list(map(_dims_taken, parts))
    given = sum(count for count in taken if count is not None)
    for position in reversed([i for i, part in enumerate(parts) if type(part) is torch.SymInt]):
        before = taken[:position]
        skipped = tensor.dim() - given if None in before else 0  # dimensions covered by the ellipsis
        tensor = tensor.select(skipped + sum(filter(None, before)), parts[position])
        given -= 1
    return tensor, tuple([part for part in parts if type(part) is not torch.SymInt])


def _dims_taken(part: Any) -> int | None:
    """How many dimensions a part of an index consumes; None for an ellipsis."""
    if part is ...:
        return None
    if part is None or type(part) is bool:
        return 0
    is_mask = isinstance(part, torch.Tensor) and part.dtype in MASKS
    return part.dim() if is_mask else 1


def enable_symbolic_indexing() -> None:
    """Replace `FakeTensor.__getitem__` and `__setitem__`, so that stand-ins can be indexed by symbolic numbers."""
    FakeTensor._has_symbolic_indexing = True
    FakeTensor.__getitem__ = get_item  # type: ignore[assignment]
    FakeTensor.__setitem__ = set_item  # type: ignore[assignment]
