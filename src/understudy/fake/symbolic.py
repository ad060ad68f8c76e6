"""Specs with symbolic sizes for real tensors."""

from __future__ import annotations

from typing import Any

import torch

from understudy.fake.handlers import handles
from understudy.fake.native import canonical
from understudy.shapes.contexts import DUCK, DYNAMIC, STATIC, policies, size_of
from understudy.spec import TensorSpec
from understudy.spec.tensor_spec import contiguous_strides


def symbolic_spec(env: Any, t: torch.Tensor, source: Any, context: Any) -> TensorSpec:
    """The spec of a real tensor in which the sizes that may vary are symbols of this environment."""
    name = _name_of(source, env)
    default = STATIC if env.settings.assume_static_by_default else (DUCK if env.settings.duck_shape else DYNAMIC)
    shape = tuple(
        size_of(env, policy, example, f"{name}.size({dim})")
        for dim, (policy, example) in enumerate(zip(policies(t, context, default), t.shape, strict=True))
    )
    stride = _strides(t, shape)
    env.add_input(name, shape, stride, t.storage_offset())
    return TensorSpec(
        shape, stride, t.storage_offset(), dtype=t.dtype, device=canonical(t.device), conj=t.is_conj(), neg=t.is_neg()
    )


@handles("aten::size", "aten::stride", "aten::numel", "aten::storage_offset")
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


def _name_of(source: Any, env: Any) -> str:
    if source is None:
        return f"input{len(env.inputs.names)}"
    name = getattr(source, "name", source)
    return str(name() if callable(name) else name)


def _strides(t: torch.Tensor, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Strides in terms of the sizes, wherever the example's strides are products of them; numbers otherwise."""
    if t.stride() == contiguous_strides(t.shape):
        return contiguous_strides(shape)
    candidates: dict[int, Any] = {1: 1}
    strides: list[Any] = list(t.stride())
    for dim in sorted(range(t.ndim), key=lambda i: (t.stride(i), t.size(i), -i)):
        example = t.stride(dim)
        strides[dim] = candidates.get(example, example)
        candidates.setdefault(example * t.size(dim), strides[dim] * shape[dim])
    return tuple(strides)
