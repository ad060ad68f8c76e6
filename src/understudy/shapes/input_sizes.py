"""The sizes and strides of an input, in which those that may vary are symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.shapes.contexts import DUCK, DYNAMIC, STATIC, Policy, from_torch, name_of, policies, size_of
from understudy.shapes.sizes import at_least_one

Sizes = tuple[Any, ...]


def symbolic_sizes(env: Any, t: torch.Tensor, source: Any, context: Any) -> tuple[str, Sizes, Sizes]:
    """The name of the input, its sizes and its strides: numbers, and nodes of this environment."""
    name = _name(env, source, context)
    default = STATIC if env.settings.assume_static_by_default else DUCK
    shape = tuple(
        _once(env, context, policy, example, f"{name}.size({dim})")
        for dim, (policy, example) in enumerate(zip(policies(t, context, default), t.shape, strict=True))
    )
    return name, shape, _strides(env, t, shape, name, context)


def packed_strides(shape: Sequence[Any]) -> Sizes:
    """Row-major strides, as eager makes them (a size of 0 counts as 1)."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * at_least_one(size)
    strides.reverse()
    return tuple(strides)


def _name(env: Any, source: Any, context: Any) -> str:
    if source is None:
        source = getattr(context, "tensor_source", None)
    return f"input{len(env.inputs.names)}" if source is None else name_of(source)


def _once(env: Any, context: Any, policy: Policy, example: int, source: str) -> Any:
    """A `StatefulSymbolicContext` remembers: the tensor that is converted again has the same symbols again."""
    remembered = getattr(context, "shape_env_to_source_to_symbol_cache", None)
    if remembered is None:
        return size_of(env, policy, example, source)
    sizes = remembered.setdefault(id(env), {})
    if source not in sizes:
        sizes[source] = size_of(env, policy, example, source)
    return sizes[source]


def _strides(env: Any, t: torch.Tensor, shape: Sizes, name: str, context: Any) -> Sizes:
    strides = list(_inferred_strides(t, shape))
    for dim, kind in enumerate(getattr(context, "dynamic_strides", None) or ()):
        policy = from_torch(kind)
        if policy.kind in (DYNAMIC, DUCK) and not str(getattr(kind, "name", "")).startswith("INFER"):
            policy = Policy(policy.kind, low=None)
            strides[dim] = t.stride(dim) if t.stride(dim) < 2 else _once(
                env, context, policy, t.stride(dim), f"{name}.stride({dim})"
            )  # fmt: skip
    return tuple(strides)


def _inferred_strides(t: torch.Tensor, shape: Sizes) -> Sizes:
    """Strides in terms of the sizes, wherever the example's strides are products of them; numbers otherwise."""
    if t.stride() == packed_strides(t.shape):
        return packed_strides(shape)
    candidates: dict[int, Any] = {1: 1}
    strides: list[Any] = list(t.stride())
    for dim in sorted(range(t.ndim), key=lambda i: (t.stride(i), t.size(i), -i)):
        example = t.stride(dim)
        strides[dim] = candidates.get(example, example)
        candidates.setdefault(example * t.size(dim), strides[dim] * shape[dim])
    return tuple(strides)
