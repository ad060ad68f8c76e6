"""Composite operators that C++ computes with plain integers: the same steps, with sizes that may be symbols."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ShapeMismatch
from understudy.fake import composites_grids as _grids  # noqa: F401  (part of the same table)
from understudy.fake import composites_linalg as _linalg  # noqa: F401  (part of the same table)
from understudy.fake import composites_nn as _nn  # noqa: F401  (part of the same table)
from understudy.fake import composites_numeric as _numeric  # noqa: F401  (part of the same table)
from understudy.fake import composites_products as _products  # noqa: F401  (part of the same table)
from understudy.fake import composites_scans as _scans  # noqa: F401  (part of the same table)
from understudy.fake import composites_signal as _signal  # noqa: F401  (part of the same table)
from understudy.fake.composite_table import broadcast, composite
from understudy.rules.dims import wrap_dim

aten = torch.ops.aten
Tensor = torch.Tensor
Maybe = Tensor | None


# --- covariance ---------------------------------------------------------------------------------------------------


@composite("cov")
def cov(x: Tensor, *, correction: int = 1, fweights: Maybe = None, aweights: Maybe = None) -> Tensor:
    if x.dim() > 2:
        raise ShapeMismatch(f"cov: expected at most two dimensions, got {x.dim()}")
    rows = x.view(1, -1) if x.dim() < 2 else x
    count = rows.shape[1]
    for weights in (fweights, aweights):
        if weights is not None:
            _check_weights(weights, count)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        total = torch.scalar_tensor(count, dtype=torch.int64, device=x.device)
        mean = rows.sum(1) / total
        left: Any = count - correction
        is_lost = bool(left <= 0)
        norm = torch.scalar_tensor(left, dtype=torch.int64, device=x.device)
    else:
        total = weights.sum()
        _check_true(total.ne(0), "cov: the weights add up to zero")
        mean = (rows * weights).sum(1) / total
        if aweights is not None and correction != 0:
            norm = total - (weights * aweights).sum() * correction / total
        else:
            norm = total - correction
        is_lost = _is_true(norm.le(0))
    if is_lost:
        warnings.warn("cov(): degrees of freedom is <= 0", stacklevel=2)
        norm.zero_()
    rows = rows - mean.unsqueeze(1)
    product = torch.mm(rows, (rows if weights is None else rows * weights).t().conj())
    return torch.true_divide(product, norm).squeeze()


def _check_weights(weights: Tensor, count: Any) -> None:
    if weights.dim() > 1 or weights.numel() != count:
        raise ShapeMismatch(f"cov: {count} observations need as many weights, got the shape {list(weights.shape)}")
    if count != 0:
        _check_true(weights.min().ge(0), "cov: a weight is negative")


def _check_true(condition: Tensor, otherwise: str) -> None:
    if not _is_true(condition):
        raise ShapeMismatch(otherwise)


def _is_true(condition: Tensor) -> bool:
    return torch.equal(condition, condition.new_ones(()))


@composite("corrcoef")
def corrcoef(x: Tensor) -> Tensor:
    if x.dim() > 2:
        raise ShapeMismatch(f"corrcoef: expected at most two dimensions, got {x.dim()}")
    c = torch.cov(x)
    if c.dim() == 0:
        return c / c
    deviation = torch.sqrt(c.diag())
    if deviation.is_complex():
        deviation = torch.real(deviation)
    c = c / deviation.view(-1, 1)
    c = c / deviation.view(1, -1)
    return torch.complex(torch.real(c).clip(-1, 1), torch.imag(c).clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


# --- pieces -------------------------------------------------------------------------------------------------------


@composite("tensor_split.tensor_indices_or_sections")
def tensor_split(x: Tensor, places: Tensor, dim: int = 0) -> Any:
    """The places, or the number of pieces, are data: each becomes a symbol, unless its value is known."""
    if places.dim() == 0:
        return torch.tensor_split(x, int(places.item()), dim)
    return aten.tensor_split.indices(x, [places[i].item() for i in range(int(places.shape[0]))], dim)


@composite("is_nonzero")
def is_nonzero(x: Tensor) -> bool:
    """`bool(x)`"""
    if x.numel() != 1:
        many = "more than one value" if x.numel() != 0 else "no values"
        raise RuntimeError(f"Boolean value of Tensor with {many} is ambiguous")
    return bool(x.item())


@composite("one_hot")
def one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    """As many classes as there are is data; otherwise C++ knows."""
    if num_classes != -1 or x.dtype is not torch.int64:
        return NotImplemented
    return among_classes(x, x.max().item() + 1)


def among_classes(x: Tensor, count: Any) -> Tensor:
    """1 for the class that each number names, 0 for all others."""
    return torch.eq(x.unsqueeze(-1), torch.arange(count, device=x.device, dtype=x.dtype)).to(torch.int64)


@composite("unsafe_chunk")
def unsafe_chunk(x: Tensor, chunks: int, dim: int = 0) -> Any:
    length = x.shape[wrap_dim(dim, x.dim())]
    size = (length + chunks - 1) // chunks
    if size == 0:
        return torch.unsafe_split_with_sizes(x, [size] * (chunks - 1) + [size - (size * chunks - length)], dim)
    return aten.unsafe_split.Tensor(x, size, dim)


# --- indexing -----------------------------------------------------------------------------------------------------


@composite("take_along_dim")
def take_along_dim(x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if x.dim() != indices.dim() and dim is not None:
        raise ShapeMismatch(f"take_along_dim: {x.dim()} dimensions, but indices have {indices.dim()}")
    if indices.dtype is not torch.int64:
        raise TypeError(f"take_along_dim: indices must be int64, got {indices.dtype}")
    if dim is None:
        return x.view(-1).gather(0, indices.view(-1))
    dim = wrap_dim(dim, x.dim())
    wanted = broadcast(_replaced(x.shape, dim, indices.shape[dim]), indices.shape)
    taken = torch.broadcast_to(indices, wanted)
    source = torch.broadcast_to(x, broadcast(_replaced(indices.shape, dim, x.shape[dim]), x.shape))
    return source.gather(dim, taken.remainder(x.shape[dim]))  # from the end, if negative


def _replaced(shape: Sequence[Any], dim: int, size: Any) -> list[Any]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


# --- pooling ------------------------------------------------------------------------------------------------------


@composite("max_pool1d_with_indices")
def max_pool1d_with_indices(
    x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """As the pooling of an image of one row."""
    size, step, pad, spread = ([start, *numbers] for start, numbers in zip(
        (1, 1, 0, 1), (kernel_size, stride or kernel_size, padding, dilation), strict=True
    ))  # fmt: skip
    output, indices = aten.max_pool2d_with_indices(x.unsqueeze(-2), size, step, pad, spread, ceil_mode)
    return output.squeeze(-2), indices.squeeze(-2)


@composite("max_pool1d")
def max_pool1d(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    output: Tensor = aten.max_pool1d_with_indices(x, *args, **kwargs)[0]
    return output


# --- products -----------------------------------------------------------------------------------------------------


@composite("kron")
def kron(a: Tensor, b: Tensor) -> Tensor:
    rank = max(a.dim(), b.dim())
    sizes, others = ([1] * (rank - t.dim()) + list(t.shape) for t in (a, b))
    left = aten._unsafe_view(a, [each for size in sizes for each in (size, 1)])
    right = aten._unsafe_view(b, [each for size in others for each in (1, size)])
    product: Tensor = aten._unsafe_view(left * right, [p * q for p, q in zip(sizes, others, strict=True)])
    return product
