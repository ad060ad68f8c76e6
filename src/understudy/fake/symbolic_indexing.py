"""`x[n]` where n is a symbolic number, or a tensor with one number that only data knows: C++ would have Python make a plain
one of it, and so fix it or fail.

Every other index goes to C++ as it is. Set up with the first `ShapeEnv`: programs without one pay nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.sizes_in_tensors import values_of

Index = tuple[Any, ...]
get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__


def get_item(tensor: torch.Tensor, index: Any) -> Any:
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


def _has_symbol(index: Any) -> bool:
    return type(index) is torch.SymInt or (type(index) is tuple and torch.SymInt in map(type, index))


def _select_by_symbols(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, Index]:
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
