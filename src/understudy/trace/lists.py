"""Tensors that are made of lists with tensors or symbolic numbers in them: `torch.tensor([x[0], x[1]])`.

C++ reads the values past every dispatch, and a graph would hold what it found fixed. Here they are stacked.
"""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor
from understudy.infer.call import flat
from understudy.trace import reads

SYMBOLIC = (torch.SymInt, torch.SymFloat)
OPTIONS = frozenset({"dtype", "device", "requires_grad"})
MAKERS = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}
"""Function → where its data stands among its arguments."""


def made(tracer: Any, func: Any, args: Any, kwargs: Any) -> Any:
    place = MAKERS[func]
    data = args[place] if len(args) > place else None
    if not isinstance(data, (list, tuple, *SYMBOLIC)) or not _is_to_be_stacked(tracer, data):
        return func(*args, **kwargs)
    shape = _shape(data)
    if shape is None or len(args) != place + 1 or not kwargs.keys() <= OPTIONS:
        reads.check(tracer, func, args, kwargs)
        return func(*args, **kwargs)
    example = _example(func, args, kwargs, data)
    leaves = [_leaf(value, example.dtype) for value in _leaves(data)]
    result = torch.stack(leaves).view(shape) if shape else leaves[0]
    device = kwargs.get("device", args[0].device if place else None)
    result = result if device is None else result.to(device)
    return result.requires_grad_() if example.requires_grad else result


def _is_to_be_stacked(tracer: Any, data: Any) -> bool:
    tensors = flat(torch.Tensor, (data,), {})
    if _torch.active_fake_mode() is not None:
        is_of_stand_ins = any(type(_torch.innermost(tensor)) is FakeTensor for tensor in tensors)
        return is_of_stand_ins or bool(flat(SYMBOLIC, (data,), {}))
    return any(reads.varies(tracer, tensor) for tensor in tensors)


def _shape(data: Any) -> tuple[int, ...] | None:
    """The shape of nested lists of numbers and of tensors that are one; None if they are not that."""
    if not isinstance(data, (list, tuple)):
        is_number = isinstance(data, (bool, int, float, complex, *SYMBOLIC))
        return () if is_number or (isinstance(data, torch.Tensor) and data.dim() == 0) else None
    shapes = {_shape(part) for part in data}
    inner = shapes.pop() if len(shapes) == 1 else None
    return None if inner is None else (len(data), *inner)


def _leaves(data: Any) -> list[Any]:
    if not isinstance(data, (list, tuple)):
        return [data]
    return [leaf for part in data for leaf in _leaves(part)]


def _example(func: Any, args: Any, kwargs: Any, data: Any) -> torch.Tensor:
    """What torch makes of such a list, with other values: it says the dtype, and refuses what it would refuse."""

    def zeros(part: Any) -> Any:
        if isinstance(part, (list, tuple)):
            return [zeros(value) for value in part]
        if isinstance(part, torch.Tensor):
            return torch.zeros((), dtype=part.dtype)
        return (0 if isinstance(part, torch.SymInt) else 0.0) if isinstance(part, SYMBOLIC) else part

    options = {name: value for name, value in kwargs.items() if name != "device"}
    with _torch.no_modes(), _torch.NoFunctionModes():
        of = [torch.zeros((), dtype=value.dtype) for value in args[: MAKERS[func]]]
        example: torch.Tensor = func(*of, zeros(data), **options)
    return example


def _leaf(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device="cpu", dtype=dtype)
    return torch.scalar_tensor(value, dtype=dtype)
