"""Composite operators that C++ computes with plain integers: the same steps, with sizes that may be symbols.

C++ would read the sizes at hand as numbers, which makes numbers of them for good, or refuse. These functions break an
operator up into the same simpler ones. They are registered on the dispatch key that stand-ins with symbolic sizes
carry, above autograd.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.errors import ShapeMismatch
from understudy.fake.templates import on_first_symbol
from understudy.rules.dims import wrap_dim
from understudy.shapes.sizes import from_torch, to_torch
from understudy.spec import broadcast_shapes

aten = torch.ops.aten
Tensor = torch.Tensor
Maybe = Tensor | None

KERNELS: dict[str, Callable[..., Any]] = {}
"""By the operator's name."""


def composite(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For functions that return `NotImplemented` to leave a call to C++."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        op = _torch.operator_named(name)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            result = NotImplemented if _torch.composites_are_special() else function(*args, **kwargs)
            if result is not NotImplemented:
                return result
            with _torch.below_symbolic():
                return op(*args, **kwargs)

        KERNELS[name] = kernel
        return function

    return register


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
    wanted = _broadcast(_replaced(x.shape, dim, indices.shape[dim]), indices.shape)
    taken = torch.broadcast_to(indices, wanted)
    source = torch.broadcast_to(x, _broadcast(_replaced(indices.shape, dim, x.shape[dim]), x.shape))
    return source.gather(dim, taken.remainder(x.shape[dim]))  # from the end, if negative


def _replaced(shape: Sequence[Any], dim: int, size: Any) -> list[Any]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def _broadcast(*shapes: Sequence[Any]) -> list[Any]:
    return [to_torch(size) for size in broadcast_shapes(*[tuple(map(from_torch, shape)) for shape in shapes])]


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


# --- norms of matrices, products ----------------------------------------------------------------------------------


@composite("linalg_matrix_norm")
def matrix_norm(
    x: Tensor, ord: Any, dim: Sequence[int] = (-2, -1), keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if abs(ord) not in (1, 2, math.inf) or x.dim() < 2 or len(dim) != 2:
        return NotImplemented
    rows, columns = (wrap_dim(each, x.dim()) for each in dim)
    if rows == columns or x.shape[rows] == 0 or x.shape[columns] == 0:
        return NotImplemented
    extreme = torch.amax if ord > 0 else torch.amin
    if abs(ord) == 2:
        order = [i for i in range(x.dim()) if i not in (rows, columns)] + [rows, columns]
        values = torch.linalg.svdvals((x if dtype is None else x.to(dtype)).permute(order))
        found = extreme(values, -1, keepdim)
        return found.unsqueeze(-1).permute([order.index(i) for i in range(x.dim())]) if keepdim else found
    first, second = (columns, rows) if abs(ord) == math.inf else (rows, columns)
    sums = torch.linalg.vector_norm(x, 1, [first], keepdim, dtype=dtype)
    return extreme(sums, second - (not keepdim and first < second), keepdim)


@composite("kron")
def kron(a: Tensor, b: Tensor) -> Tensor:
    rank = max(a.dim(), b.dim())
    sizes, others = ([1] * (rank - t.dim()) + list(t.shape) for t in (a, b))
    left = aten._unsafe_view(a, [each for size in sizes for each in (size, 1)])
    right = aten._unsafe_view(b, [each for size in others for each in (1, size)])
    product: Tensor = aten._unsafe_view(left * right, [p * q for p, q in zip(sizes, others, strict=True)])
    return product


# --- registration -------------------------------------------------------------------------------------------------

_libraries: list[Any] = []


def register_kernels() -> None:
    """Once, when the first stand-in with symbolic sizes is made."""
    library = torch.library.Library("aten", "IMPL", _torch.SPARE_WRAPPER)
    _libraries.append(library)
    for name, kernel in KERNELS.items():
        library.impl(name, kernel)


on_first_symbol.append(register_kernels)
