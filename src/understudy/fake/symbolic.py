"""Specs with symbolic sizes for real tensors."""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.fake.handlers import REAL_HANDLERS, handles
from understudy.fake.native import canonical
from understudy.shapes.input_sizes import symbolic_sizes
from understudy.spec import TensorSpec


def symbolic_spec(env: Any, t: torch.Tensor, source: Any, context: Any) -> TensorSpec:
    """The spec of a real tensor in which the sizes that may vary are symbols of this environment."""
    name, shape, stride = symbolic_sizes(env, t, source, context)
    env.add_input(name, shape, stride, t.storage_offset())
    return TensorSpec(
        shape,
        stride,
        t.storage_offset(),
        dtype=t.dtype,
        device=canonical(t.device),
        conj=t.is_conj(),
        neg=t.is_neg(),
    )


NUMBERS = ("aten::size", "aten::stride", "aten::numel", "aten::storage_offset")


@handles(*NUMBERS)
def concrete_numbers(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """C++ reads sizes as plain integers: from here on they are what they are at hand, and the guards say so."""
    spec = args[0]._spec
    match func.name():
        case "aten::size":
            return [int(size) for size in spec.shape]
        case "aten::stride":
            return [int(step) for step in spec.stride]
        case "aten::numel":
            return int(spec.numel)
    return int(spec.offset)


@handles(*NUMBERS, table=REAL_HANDLERS)
def concrete_numbers_of_wrapper(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """As above, of what a transform of torch.func has made of a stand-in."""
    (tensor,) = args
    if not _torch.is_functorch_wrapped(tensor):
        return NotImplemented
    match func.name():
        case "aten::size":
            return [int(size) for size in tensor.shape]
        case "aten::stride":
            return [int(step) for step in tensor.stride()]
        case "aten::numel":
            return int(tensor.numel())
    return int(tensor.storage_offset())
