"""Decompositions for symbolic sizes: operators that C++ breaks up with plain integers, written out in Python.

C++ would read the sizes of the example, which fixes them for good, or refuse. The functions registered here break an
operator up into the same simpler ones. `fake/kernels` puts them on the dispatch key that stand-ins with symbolic sizes
carry, above autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.ops.registry import Trait
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import TensorSpec, broadcast_shapes

Function = Callable[..., object]
decomposition: Trait[Function] = Trait("decomposition for symbolic sizes")
"""Functions that return `NotImplemented` to leave a call to C++."""

under_transforms: Trait[Function] = Trait("decomposition for symbolic sizes under a transform of torch.func")

_contiguity: list[Callable[[TensorSpec], None]] = []


def decomposed_kernel(op: Any, function: Function | None) -> Function:
    """The operator by its decomposition, where nothing but the simpler operators matters; else by C++."""

    def kernel(*args: object, **kwargs: object) -> object:
        if function is not None and not _torch.composites_are_special():
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with _torch.below(_torch.SCATTERED_KEYS):
            return op(*args, **kwargs)

    return kernel


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def broadcast(*shapes: Sequence[object]) -> list[int | torch.SymInt]:
    """The shape that tensors of these shapes have together."""
    return [to_torch(size) for size in broadcast_shapes(*[tuple(map(from_torch, shape)) for shape in shapes])]


def provides_contiguity(function: Callable[[TensorSpec], None]) -> Callable[[TensorSpec], None]:
    """The room that makes tensors registers here how the contiguity of a spec is decided in one question."""
    _contiguity.append(function)
    return function


def decide_contiguity(spec: TensorSpec) -> None:
    """Assume in one question whether tensors of this spec are contiguous; C++ would ask several."""
    for decide in _contiguity:
        decide(spec)
