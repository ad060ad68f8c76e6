"""Distances, products and shapes, step by step: see `composite_table`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from understudy.fake.composite_table import composite, taught
from understudy.fake.templates import decide_contiguity
from understudy.fake.tensor import FakeTensor
from understudy.rules.dims import complete_shape, wrap_dim
from understudy.rules.view_strides import view_strides
from understudy.rules.views import transposed
from understudy.shapes.sizes import from_torch, lies_in_data, surely_less, to_torch
from understudy.spec import TensorSpec

aten = torch.ops.aten
Tensor = torch.Tensor

MANY_ROWS = 25
"""Of more rows than this, euclidean distances are computed by a product of matrices, unless told otherwise."""
IF_MANY, NEVER = (None, 0), 2
"""When to do so: `compute_mode`."""


@composite("cdist")
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """C++ asks first whether there are elements, also where one kernel takes what there is."""
    if x1.dim() < 2 or x2.dim() < 2:
        return NotImplemented
    if p == 2 and compute_mode != NEVER:
        are_many = x1.shape[-2] > MANY_ROWS or x2.shape[-2] > MANY_ROWS
        if compute_mode not in IF_MANY or are_many:
            return NotImplemented
    result = aten._cdist_forward.default(x1, x2, p, compute_mode)
    if result.grad_fn is not None and _may_be_contiguous_transposed(result.shape):
        result.grad_fn.register_prehook(LayoutsAsked((x1.requires_grad, x2.requires_grad), result._spec))
    return result


def _may_be_contiguous_transposed(shape: Sequence[Any]) -> bool:
    """Whether there are sizes for which a matrix and its transpose are both contiguous."""
    *batch, rows, columns = map(from_torch, shape)
    return not (surely_less(1, rows) and surely_less(1, columns) and all(surely_less(0, size) for size in batch))


class LayoutsAsked:
    """Decides, for autograd, what it asks of the gradient size by size: whether it is contiguous, and for the gradient of
    the second operand whether it and the result are, transposed. The specs are kept, and with them the answers."""

    def __init__(self, are_wanted: tuple[bool, bool], result: TensorSpec) -> None:
        self.are_wanted = are_wanted
        self.result = result
        self.asked: list[TensorSpec] = []

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        (gradient,) = gradients
        if type(gradient) is not FakeTensor:
            return
        self.asked = [gradient._spec] if self.are_wanted[0] else []
        if self.are_wanted[1]:
            self.asked += [transposed(spec, -2, -1) for spec in (gradient._spec, self.result)]
        for spec in self.asked:
            decide_contiguity(spec)


@taught("reshape")
def reshape(x: Tensor, shape: Sequence[Any]) -> Any:
    """C++ asks size by size how the new dimensions fill the old ones, also where their products tell."""
    if type(x) is not FakeTensor or x._spec.layout is not torch.strided:
        return NotImplemented
    spec, given = x._spec, [from_torch(size) for size in shape]
    if lies_in_data(*spec.shape, *spec.stride, *given):
        return NotImplemented
    sizes = complete_shape(spec, given)
    new = [to_torch(size) for size in sizes]
    if view_strides(spec, sizes) is not None:
        return aten.view.default(x, new)
    return aten._unsafe_view.default(x.clone(memory_format=torch.contiguous_format), new)


@composite("flatten.using_ints")
def flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    if x.dim() == 0:
        return NotImplemented
    start, end = wrap_dim(start_dim, x.dim()), wrap_dim(end_dim, x.dim())
    if start >= end:
        return NotImplemented
    shape = x.shape
    return x.reshape([*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]])
