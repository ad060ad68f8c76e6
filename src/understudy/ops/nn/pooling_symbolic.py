"""Pooling to symbolic sizes.

The schemas of these operators have plain integers for the output's size: on its way through C++, a symbol becomes the
number that it is at hand. So they are called past C++: below autograd, as the innermost mode would be by the dispatcher.
Autograd hears of them through a function of its own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.ops.shared.decompositions import decomposition
from understudy.spec import spec_of

aten = torch.ops.aten
Tensor = torch.Tensor
TO_INTEGERS = ("adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d")
"""Operators whose schemas take the output's size as plain integers."""
DIMENSIONS = {name: 3 if name.endswith("3d") else 2 for name in TO_INTEGERS}


def pool_to_symbols(name: str, args: Sequence[Any]) -> Any:
    """`adaptive_max_pool2d(x, output_size)` and the like; NotImplemented where C++ should answer."""
    x, *others = args
    others = [[value] * DIMENSIONS[name] if type(value) is int else value for value in others]
    if not _is_unheard(x) or not any(map(_has_symbols, others)):
        return NotImplemented
    if torch.is_grad_enabled() and x.requires_grad:
        return SymbolicPooling.apply(name, x, *others)  # type: ignore[no-untyped-call]
    return _call_past_cpp(getattr(aten, name).default, x, *others)


def average_to_symbols(x: Any, output_size: Any) -> Any:
    """`adaptive_avg_pool1d`, as the pooling of an image of one row: that operator takes symbols."""
    sizes = output_size if isinstance(output_size, (list, tuple)) else (output_size,)
    if not _is_unheard(x) or not _has_symbols(sizes) or len(sizes) != 1 or x.dim() not in (2, 3):
        return NotImplemented
    return aten.adaptive_avg_pool2d.default(x.unsqueeze(-2), [1, *sizes]).squeeze(-2)


def share_of(x: Any, ratio: Any, dims: int) -> list[Any] | None:
    """The last sizes of `x` times a ratio, rounded down; None if none of them is a symbol."""
    if not _is_unheard(x) or not _has_symbols(x.shape[-dims:]):
        return None
    ratios = ratio if isinstance(ratio, (list, tuple)) else (ratio,) * dims
    if len(ratios) != dims or x.dim() < dims:
        return None
    return [torch.sym_int(size * share) for size, share in zip(x.shape[-dims:], ratios, strict=True)]


def _is_unheard(x: Any) -> bool:
    return spec_of(x) is not None and not _torch.composites_are_special()


def _has_symbols(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(number, torch.SymInt) for number in value)


class SymbolicPooling(torch.autograd.Function):
    """One call of such an operator."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, *others: Any) -> Any:
        output, indices = _call_past_cpp(getattr(aten, name).default, x, *others)
        ctx.save_for_backward(x, indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)  # zeros in the place of gradients that indices do not have
        ctx.name = name
        ctx.sizes = [value for value in others if not isinstance(value, Tensor)] if "fractional" in name else []
        ctx.count = len(others)
        return output, indices

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        x, indices = ctx.saved_tensors
        gradient = _call_past_cpp(getattr(aten, f"{ctx.name}_backward").default, grad, x, *ctx.sizes, indices)
        return None, gradient, *[None] * ctx.count


def _call_past_cpp(op: Callable[..., Any], *args: Any) -> Any:
    args = tuple(list(value) if isinstance(value, (list, tuple)) else value for value in args)
    return _torch.call_innermost_mode(op, args)


# --- one dimension ------------------------------------------------------------------------------------------


@decomposition("max_pool1d_with_indices")
def decompose_max_pool1d_with_indices(
    x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """As the pooling of an image of one row."""
    size, step, pad, spread = ([start, *numbers] for start, numbers in zip(
        (1, 1, 0, 1), (kernel_size, stride or kernel_size, padding, dilation), strict=True
    ))  # fmt: skip
    output, indices = aten.max_pool2d_with_indices(x.unsqueeze(-2), size, step, pad, spread, ceil_mode)
    return output.squeeze(-2), indices.squeeze(-2)


@decomposition("max_pool1d")
def decompose_max_pool1d(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    output: Tensor = aten.max_pool1d_with_indices(x, *args, **kwargs)[0]
    return output


# --- sizes that are given -----------------------------------------------------------------------------------


def _register_pooling(dimensions: int) -> None:
    op = getattr(aten, f"_adaptive_avg_pool{dimensions}d").default

    @decomposition(f"adaptive_avg_pool{dimensions}d")
    def adaptive_avg_pool(x: Tensor, output_size: Any) -> Any:
        """C++ asks size by size whether it is 1. That matters only if they all are: of one cell, it is the mean."""
        sizes = list(output_size)
        if len(sizes) != dimensions or not any(isinstance(size, torch.SymInt) for size in sizes):
            return NotImplemented
        if any(size < 0 for size in sizes) or functools.reduce(operator.and_, [size == 1 for size in sizes]):
            return NotImplemented
        return op(x, sizes)


for _dimensions in (2, 3):
    _register_pooling(_dimensions)
