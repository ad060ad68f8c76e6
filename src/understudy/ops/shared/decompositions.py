"""Decompositions for symbolic sizes: operators that C++ decomposes with plain integers, written in Python.

C++ would specialise the sizes, or fail. The functions registered here decompose an operator into the same simpler ones.
`fake/kernels` registers them on the dispatch key that stand-ins with symbolic sizes carry, above autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.ops.registry import OpFacts, record_of
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import TensorSpec, broadcast_shapes
from understudy.spec.call import flat

Function = Callable[..., object]
decomposition = OpFacts.decomposition

_contiguity: list[Callable[[TensorSpec], None]] = []


def decomposed_kernel(op: Any, function: Function | None) -> Function:
    """A kernel that runs the decomposition, or C++ where the decomposition leaves the call to it or composites are
    observed. Of autocast, it is known what it does: it casts the arguments first, and calls again; or it casts inside."""

    def kernel(*args: object, **kwargs: object) -> object:
        if function is not None:
            is_observed = _torch.composites_are_observed()
            if is_observed and _torch.only_autocast_observes_composites():
                casting = _torch.casting_key(
                    op, _torch.inner_device(flat(torch.Tensor, args, kwargs)[0]).type
                )
                if casting is not None:
                    return op.redispatch(casting, *args, **kwargs)
                is_observed = False
            result = NotImplemented if is_observed else function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with _torch.below(_torch.RECIPE_KEYS):
            return op(*args, **kwargs)

    return kernel


def decompose(op: Any, args: Any, kwargs: Any) -> Any:
    """Break up a composite operator: by its decomposition for symbolic sizes where there are such, or as C++ does."""
    function = record_of(op).decomposition
    if function is not None and any(map(has_symbolic_sizes, flat(torch.Tensor, args, kwargs))):
        result = function(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return _torch.decompose(op, *args, **kwargs)


def is_recorded_symbolically() -> bool:
    """Whether a graph for symbolic sizes is recorded below autograd. torch's Python dispatcher is active there, and decides
    which operators a graph has: the decompositions that ask for this are the ones that make graphs equal to torch's."""
    recorder = _torch.active_recorder()
    return (
        recorder is not None
        and recorder.tracing_mode == "symbolic"
        and not _torch.is_recorded_above_autograd()
    )


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in tensor.shape)


def broadcast(*shapes: Sequence[object]) -> list[int | torch.SymInt]:
    """The common shape of tensors of these shapes."""
    return [to_torch(size) for size in broadcast_shapes(*[tuple(map(from_torch, shape)) for shape in shapes])]


def provides_contiguity(function: Callable[[TensorSpec], None]) -> Callable[[TensorSpec], None]:
    """Registers the function that decides the contiguity of a spec with one guard. `fake/templates.py` provides it."""
    _contiguity.append(function)
    return function


def decide_contiguity(spec: TensorSpec) -> None:
    """Decide with one guard whether tensors of this spec are contiguous; C++ would need several."""
    for decide in _contiguity:
        decide(spec)
