"""Which arguments of an operator are indices, and into what: those whose values are determined can be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from understudy import _torch
from understudy.errors import DimensionError, OperatorError
from understudy.ops.registry import Trait
from understudy.spec import TensorSpec
from understudy.spec.call import Call, flat


@dataclass(frozen=True, slots=True)
class IndexBound:
    """`index` and `target` count the tensor inputs of a call; `dim` is None for all elements of the target."""

    index: int
    target: int
    dim: int | None
    wraps: bool = False
    "Whether negative indices count from the end."
    error: type[OperatorError] = DimensionError
    "What eager raises."
    ignored: int | None = None
    "An index that stands for nothing."

    def size(self, target: TensorSpec) -> Any:
        if self.dim is None:
            return target.numel
        return target.shape[self.dim] if target.shape else 1


@dataclass(frozen=True, slots=True)
class IndexArgument:
    """An argument that indexes a dimension of the first one, which another argument names."""

    name: str = "index"
    wraps: bool = False
    error: type[OperatorError] = DimensionError

    def __call__(self, call: Call) -> Iterator[IndexBound]:
        arguments = named_arguments(call)
        dim = arguments.get("dim", 0)
        index = arguments.get(self.name)
        if isinstance(index, TensorSpec) and isinstance(dim, int):
            yield IndexBound(position_of(call, self.name), 0, dim, self.wraps, self.error)


Bounds = Callable[[Call], Iterator[IndexBound]]
index_bounds: Trait[Bounds] = Trait("arguments that are indices", of_packets=True)

for _name in ("index_select", "index_add", "index_copy", "index_reduce"):
    index_bounds.register(IndexArgument(), _name, f"{_name}_")
index_bounds.register(IndexArgument(wraps=True), "index_fill", "index_fill_")
index_bounds.register(IndexArgument(error=OperatorError), "gather")
for _name in ("scatter", "scatter_add", "scatter_reduce"):
    index_bounds.register(IndexArgument(error=OperatorError), _name, f"{_name}_")


@index_bounds("take", "put", "put_")
def of_elements(call: Call) -> Iterator[IndexBound]:
    yield IndexBound(1, 0, None, wraps=True)


@index_bounds("embedding")
def of_rows(call: Call) -> Iterator[IndexBound]:
    yield IndexBound(1, 0, 0)


@index_bounds("nll_loss_forward", "nll_loss2d_forward")
def of_classes(call: Call) -> Iterator[IndexBound]:
    scores = call.inputs[0]
    yield IndexBound(1, 0, 1 if len(scores.shape) > 1 else 0, ignored=call.args[4])


@index_bounds("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
def of_dimensions(call: Call) -> Iterator[IndexBound]:
    position, dim = 1, 0
    for index in call.args[1]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            position, dim = position + 1, dim + len(index.shape)
        else:
            yield IndexBound(position, 0, dim, wraps=True)
            position, dim = position + 1, dim + 1


def named_arguments(call: Call) -> dict[str, Any]:
    return {**dict(zip(_torch.argument_names(call.op), call.args, strict=False)), **call.kwargs}


def position_of(call: Call, name: str) -> int:
    """The number of this tensor among the tensor inputs."""
    seen = 0
    for other, value in (*zip(_torch.argument_names(call.op), call.args, strict=False), *call.kwargs.items()):
        if other == name:
            return seen
        seen += len(flat(TensorSpec, (value,), {}))
    raise KeyError(name)


def bounds_of(call: Call) -> tuple[IndexBound, ...]:
    bounds = index_bounds.of(call.op)
    return () if bounds is None else tuple(bounds(call))
