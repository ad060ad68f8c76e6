"""Norms, ranks and chains of matrices, step by step: see `composite_table`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch

from understudy.errors import ShapeMismatch
from understudy.fake.composite_table import broadcast, composite, taught
from understudy.fake.tensor import FakeTensor
from understudy.rules.dims import wrap_dim
from understudy.rules.view_strides import view_strides
from understudy.shapes.bindings import guard_or_false
from understudy.shapes.sizes import at_hand, from_torch
from understudy.spec import product, real_type

aten = torch.ops.aten
Tensor = torch.Tensor
Maybe = Tensor | None


# --- norms --------------------------------------------------------------------------------------------------------


@composite("linalg_matrix_norm")
def matrix_norm(
    x: Tensor,
    ord: Any,
    dim: Sequence[int] = (-2, -1),
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    if abs(ord) not in (1, 2, math.inf) or x.dim() < 2 or len(dim) != 2:
        return NotImplemented
    rows, columns = (wrap_dim(each, x.dim()) for each in dim)
    if rows == columns:
        return NotImplemented
    if abs(ord) == 2:
        order = [i for i in range(x.dim()) if i not in (rows, columns)] + [rows, columns]
        values = torch.linalg.svdvals((x if dtype is None else x.to(dtype)).permute(order))
        found = _extreme(values, ord, -1, keepdim)
        return found.unsqueeze(-1).permute([order.index(i) for i in range(x.dim())]) if keepdim else found
    first, second = (columns, rows) if abs(ord) == math.inf else (rows, columns)
    sums = torch.linalg.vector_norm(x, 1.0, [first], keepdim, dtype=dtype)
    return _extreme(sums, ord, second - (not keepdim and first < second), keepdim)


def _extreme(x: Tensor, ord: Any, dim: int, keepdim: bool) -> Tensor:
    """The largest or the smallest; the largest of none is 0."""
    if ord < 0:
        return torch.amin(x, dim, keepdim)
    if x.shape[dim] != 0:
        return torch.amax(x, dim, keepdim)
    place = wrap_dim(dim, x.dim())
    shape = [1 if i == place else size for i, size in enumerate(x.shape) if keepdim or i != place]
    return torch.zeros(shape, dtype=x.dtype, device=x.device)


# --- ranks --------------------------------------------------------------------------------------------------------


Tolerances = Callable[[], tuple[Tensor, Tensor]]
"""Makes the absolute tolerance and the relative one, when their turn comes."""


def rank(x: Tensor, tolerances: Tolerances, hermitian: bool) -> Tensor:
    """How many values there are above the tolerance."""
    count = torch.empty(x.shape[:-2], dtype=torch.int64, device=x.device)
    least, relative = tolerances()
    if x.numel() == 0:
        return count.fill_(0)
    if hermitian:
        values = torch.linalg.eigvalsh(x).abs()
        largest = values.amax(-1, keepdim=True)
    else:
        values = torch.linalg.svdvals(x)
        largest = values.narrow(-1, 0, 1)
    largest = relative.unsqueeze(-1) * largest
    return (values > torch.maximum(least.unsqueeze(-1), largest)).sum(-1)


def pseudo_inverse(x: Tensor, tolerances: Tolerances, hermitian: bool) -> Any:
    least, relative = tolerances()
    return aten.linalg_pinv.atol_rtol_tensor(x, atol=least, rtol=relative, hermitian=hermitian)


def _beside_tensor(x: Tensor, atol: Maybe) -> tuple[Tensor, Tensor]:
    """Nothing is relative to the values if there is an absolute tolerance."""
    wide: Any = {"dtype": torch.float64, "device": x.device}
    least = torch.zeros((), **wide) if atol is None else atol
    relative = torch.full((), _default_tolerance(x), **wide)
    if atol is not None:
        nothing = torch.zeros((), **wide)
        relative = torch.where(aten.gt.Scalar(atol, 0), nothing, relative)
    return least, relative


def _beside_number(x: Tensor, atol: float | None) -> tuple[Tensor, Tensor]:
    wide: Any = {"dtype": torch.float64, "device": x.device}
    least = torch.full((), atol or 0.0, **wide)
    return least, torch.full((), 0.0 if atol is not None and atol > 0 else _default_tolerance(x), **wide)


def _default_tolerance(x: Tensor) -> Any:
    return torch.finfo(real_type(x.dtype)).eps * torch.sym_max(x.shape[-1], x.shape[-2])


def _by_default_tolerance(
    steps: Callable[[Tensor, Tolerances, bool], Any], beside: Callable[[Tensor, Any], tuple[Tensor, Tensor]]
) -> Callable[..., Any]:
    """Those steps, unless a relative tolerance is given: how large it is by default depends on the sizes."""

    def kernel(x: Tensor, *, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
        if rtol is not None or x.dim() < 2 or not (x.is_floating_point() or x.is_complex()):
            return NotImplemented
        return steps(x, partial(beside, x, atol), hermitian)

    return kernel


composite("linalg_matrix_rank.atol_rtol_tensor")(_by_default_tolerance(rank, _beside_tensor))
composite("linalg_matrix_rank.atol_rtol_float")(_by_default_tolerance(rank, _beside_number))
composite("linalg_pinv.atol_rtol_float")(_by_default_tolerance(pseudo_inverse, _beside_number))


# --- batches ------------------------------------------------------------------------------------------------------


@taught("matmul")
def matmul(a: Tensor, b: Tensor) -> Any:
    """Of two batches, or of a matrix and a batch. C++ asks whether there are elements at all before it sees that a batch
    is one already. (To get the gradient of a matrix, it makes one matrix of the batch.)"""
    if a.dim() < 2 or b.dim() < 3 or not type(a) is type(b) is FakeTensor:
        return NotImplemented
    if a.dim() == 2:
        if a.requires_grad:
            return NotImplemented
        aten.transpose.int(b, -2, -1)  # C++ makes it before it looks what it needs
    if a.dim() == b.dim() == 3 and guard_or_false(a.shape[0] != b.shape[0]):
        return NotImplemented
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    count = product(batch)
    left = _reshaped(a.expand([*batch, *a.shape[-2:]]), [count, *a.shape[-2:]])
    right = _reshaped(b.expand([*batch, *b.shape[-2:]]), [count, *b.shape[-2:]])
    return aten._unsafe_view(left.bmm(right), [*batch, a.shape[-2], b.shape[-1]])


def _reshaped(x: Any, shape: Sequence[Any]) -> Tensor:
    """A view where one can be had, else a copy."""
    if view_strides(x._spec, tuple(map(from_torch, shape))) is not None:
        return x.view(shape)
    return aten._unsafe_view(x.clone(memory_format=torch.contiguous_format), shape)


# --- chains -------------------------------------------------------------------------------------------------------


@composite("linalg_multi_dot")
def multi_dot(tensors: Sequence[Tensor]) -> Any:
    """Where to begin depends on the sizes: what is asked is which way is the cheaper one."""
    first, last = tensors[0], tensors[-1]
    if len(tensors) < 2 or not (1 <= first.dim() <= 2 and 1 <= last.dim() <= 2):
        return NotImplemented
    if any(t.dtype is not first.dtype or t.device != first.device for t in tensors):
        return NotImplemented
    if any(t.dim() != 2 for t in tensors[1:-1]):
        return NotImplemented
    chain = list(tensors)
    if first.dim() == 1:
        chain[0] = first.unsqueeze(0)
    if last.dim() == 1:
        chain[-1] = last.unsqueeze(-1)
    shape = [
        *(chain[0].shape[:1] if first.dim() == 2 else ()),
        *(chain[-1].shape[1:] if last.dim() == 2 else ()),
    ]
    sizes = [t.shape[0] for t in chain] + [chain[-1].shape[1]]
    for t, size in zip(chain, sizes[1:], strict=True):
        if t.shape[1] != size:
            raise ShapeMismatch(
                f"multi_dot: matrices of {[list(t.shape) for t in tensors]} can't be multiplied"
            )
    return _multiplied(chain, Cheapest(sizes), 0, len(chain) - 1).view(shape)


class Cheapest:
    """After which matrix each part of a chain is to be split. Asked is only of the parts that are."""

    def __init__(self, sizes: Sequence[Any]) -> None:
        self.sizes = sizes
        count = len(sizes) - 1
        self._costs: dict[tuple[int, int], Any] = {(i, i): 0 for i in range(count)}
        if count > 3:
            for length in range(1, count):
                for i in range(count - length):
                    self._costs[i, i + length] = reduce(torch.sym_min, self._ways(i, i + length))

    def _ways(self, i: int, j: int) -> list[Any]:
        """What it costs to multiply matrices i to j, for each place to split them at."""
        costs, sizes = self._costs, self.sizes
        return [costs[i, k] + costs[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1] for k in range(i, j)]

    def split(self, i: int, j: int) -> int:
        """The place; of several that are as good, the first."""
        if j - i == 1:
            return i
        if len(self.sizes) == 4:
            a, b, c, d = self.sizes
            return 0 if (a * c) * (b + d) > (b * d) * (a + c) else 1
        costs = self._ways(i, j)
        at_example = [at_hand(from_torch(cost)) for cost in costs]
        if None in at_example:  # known to data alone: as they come
            return i + reduce(lambda best, k: k if costs[k] < costs[best] else best, range(len(costs)))
        best = i + at_example.index(min(at_example))
        for part in ((i, best), (best + 1, j)):  # what is known of these says more plainly what they cost
            if part[0] < part[1]:
                self.split(*part)
        costs = self._ways(i, j)
        for k, cost in enumerate(costs, i):
            is_as_at_hand = costs[best - i] < cost if k < best else costs[best - i] <= cost
            assert is_as_at_hand
        self._costs[i, j] = costs[best - i]
        return best


def _multiplied(chain: Sequence[Tensor], cheapest: Cheapest, i: int, j: int) -> Tensor:
    if i == j:
        return chain[i]
    k = cheapest.split(i, j)
    right = _multiplied(chain, cheapest, k + 1, j)
    return torch.mm(_multiplied(chain, cheapest, i, k), right)
