"""Gradients of running products, step by step: see `composite_table`."""

from __future__ import annotations

from typing import Any

import torch

from understudy.fake.composite_table import composite
from understudy.rules.dims import wrap_dim

aten = torch.ops.aten
Tensor = torch.Tensor


@composite("cumprod_backward")
def cumprod_backward(grad: Tensor, x: Tensor, dim: int, output: Tensor) -> Any:
    """C++'s own steps, in its order, so that sums come out the same to the bit. It reads the size first, to no use.

    Up to the first zero of a line, the gradient is the sum of all products from there on, divided by the element. For
    the zero itself, it is the sum of those without it; behind it, there is none. (For gradients of gradients C++ goes
    from element to element.)
    """
    if torch.is_grad_enabled() or x.dim() == 0:
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    if (x.shape[dim] == 1) | (x.numel() <= 1):
        return grad
    conjugate, output_conjugate = x.conj(), output.conj()
    products = output_conjugate * grad
    zeros = aten.eq.Scalar(x, 0)
    result = aten.zeros.default(list(x.shape), dtype=grad.dtype, layout=grad.layout, device=grad.device)
    count = zeros.cumsum(dim)
    is_before = aten.eq.Scalar(count, 0)
    sums = aten.masked_fill.Scalar(products, ~is_before, 0.0).flip(dim).cumsum(dim).flip(dim)
    result = torch.where(is_before, sums.div(conjugate), result)
    is_behind = aten.eq.Scalar(count, 1)
    place = aten.max.dim(is_behind, dim, True)[1]
    is_first = torch.zeros_like(is_behind).scatter_(dim, place, 1).logical_and_(is_behind)
    is_behind &= ~is_first
    others = aten.masked_fill.Scalar(conjugate, ~is_behind, 1.0).cumprod(dim)
    from_there = aten.masked_fill.Scalar(grad, aten.ne.Scalar(count, 1), 0.0)
    before = output_conjugate.gather(dim, aten.sub.Scalar(place, 1).relu_())
    before = aten.masked_fill_.Scalar(before, aten.eq.Scalar(place, 0), 1.0)
    return torch.where(is_first, (others * from_there).sum(dim, True) * before, result)
