"""A kernel that no operator of torch launches: it writes to its arguments, and allocates nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import replace_contents
from understudy.ops.registry import rule
from understudy.ops.traits.flops import moves
from understudy.spec import TensorSpec

KERNEL = "library_kernel(Tensor[] tensors) -> ()"


@functools.cache
def define_kernel() -> torch.library.Library:
    """Once in a process; an operator goes with its library."""
    library = torch.library.Library("understudy", "FRAGMENT")
    library.define(KERNEL)
    return library


@rule("understudy::library_kernel")
def library_kernel(tensors: list[TensorSpec]) -> None:
    """No new tensors."""


moves.mark("understudy::library_kernel")


def launch_kernel(arguments: Iterable[object]) -> None:
    """Which of the tensors are written is not known: afterwards, no values of any are. Version counters stay, as when a
    kernel is launched past torch."""
    tensors: list[Any] = [value for value in arguments if isinstance(value, torch.Tensor)]
    if not tensors:
        return
    define_kernel()
    with torch.no_grad():
        torch.ops.understudy.library_kernel([tensor.detach() for tensor in tensors])
    replace_contents([tensor for tensor in tensors if type(tensor) is FakeTensor], None)
