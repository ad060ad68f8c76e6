"""The table of composite operators whose steps are written down here, for stand-ins with symbolic sizes.

C++ would read the sizes at hand as numbers, which makes numbers of them for good, or refuse. The functions of this table
break an operator up into the same simpler ones. They are registered on the dispatch key that stand-ins with symbolic
sizes carry, above autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.fake.templates import on_first_symbol
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import broadcast_shapes

KERNELS: dict[str, Callable[..., Any]] = {}
"""By the operator's name."""

TAUGHT: dict[str, Callable[..., Any]] = {}
"""Functions for operators of which recipes are kept: these have a kernel of their own (see `recipes`)."""


def composite(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For functions that return `NotImplemented` to leave a call to C++."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            KERNELS[name] = step_by_step(_torch.operator_named(name), function)
        return function

    return register


def taught(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The same for operators of `recipes.COMPOSITES`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        TAUGHT[name] = function
        return function

    return register


def step_by_step(op: Any, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """The operator by these steps, where they are all that it is; else by C++."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if function is not None and not _torch.composites_are_special():
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        with _torch.below(_torch.SCATTERED_KEYS):
            return op(*args, **kwargs)

    return kernel


def broadcast(*shapes: Sequence[Any]) -> list[Any]:
    """The shape that tensors of these shapes have together."""
    return [to_torch(size) for size in broadcast_shapes(*[tuple(map(from_torch, shape)) for shape in shapes])]


_libraries: list[Any] = []


def register_kernels() -> None:
    """Once, when the first stand-in with symbolic sizes is made."""
    library = torch.library.Library("aten", "IMPL", _torch.SPARE_WRAPPER)
    _libraries.append(library)
    for name, kernel in KERNELS.items():
        library.impl(name, kernel)


on_first_symbol.append(register_kernels)
