"""Differences and choices of elements, step by step: see `composite_table`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.fake.composite_table import composite
from understudy.fake.tensor import FakeTensor
from understudy.rules.dims import wrap_dims

aten = torch.ops.aten
Tensor = torch.Tensor


# --- choices of elements ------------------------------------------------------------------------------------------


@composite("combinations")
def combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """A mask chooses them from a grid. How many it lets through is no secret."""
    if x.dim() != 1 or r < 1:
        return NotImplemented
    grids = torch.meshgrid([x] * r, indexing="ij")
    count = x.shape[0]
    mask = _is_ascending(count, r, with_replacement, x.device)
    if type(mask) is not FakeTensor:
        return NotImplemented
    mask.remember_size(("nonzero",), _choices(count, r, with_replacement))
    return torch.stack([grid.masked_select(mask) for grid in grids], 1)


def _is_ascending(count: Any, r: int, with_replacement: bool, device: torch.device) -> Tensor:
    """Where the indices of a grid are in order."""
    places = torch.meshgrid([torch.arange(count, dtype=torch.int64, device=device)] * r, indexing="ij")
    mask = torch.full(places[0].shape, True, dtype=torch.bool, device=device)
    for before, after in pairwise(places):
        mask *= before <= after if with_replacement else before < after
    return mask


def _choices(count: Any, r: int, with_replacement: bool) -> Any:
    numbers: Any = 1
    for i in range(r):
        numbers = numbers * (count + i if with_replacement else count - i)
    return numbers // math.factorial(r)


# --- differences --------------------------------------------------------------------------------------------------


@composite("gradient.scalarint")
def gradient(x: Tensor, *, spacing: Any = None, dim: int | None = None, edge_order: int = 1) -> Any:
    dims = range(x.dim()) if dim is None else (dim,)
    return _gradients(x, [1.0 if spacing is None else spacing] * len(dims), dims, edge_order)


@composite("gradient.scalararray")
def gradient_along(x: Tensor, *, spacing: Any, dim: Sequence[int], edge_order: int = 1) -> Any:
    return _gradients(x, [spacing] * len(dim), dim, edge_order)


@composite("gradient.array")
def gradient_of_one(x: Tensor, *, dim: Sequence[int], edge_order: int = 1) -> Any:
    return _gradients(x, [1.0] * len(dim), dim, edge_order)


@composite("gradient.scalarrayint", "gradient.tensorarrayint")
def gradient_spaced(x: Tensor, *, spacing: Sequence[Any], dim: int | None = None, edge_order: int = 1) -> Any:
    return _gradients(x, spacing, range(x.dim()) if dim is None else (dim,), edge_order)


@composite("gradient.scalarrayarray", "gradient.tensorarray")
def gradient_spaced_along(
    x: Tensor, *, spacing: Sequence[Any], dim: Sequence[int], edge_order: int = 1
) -> Any:
    return _gradients(x, spacing, dim, edge_order)


def _gradients(x: Tensor, spacing: Sequence[Any], dims: Sequence[int], edge_order: int) -> list[Tensor]:
    if x.dtype is torch.uint8:
        raise DtypeError("gradient: uint8 has no differences")
    if len(spacing) != len(dims):
        raise ArgumentError(f"gradient: {len(dims)} dimensions need as many spacings, got {len(spacing)}")
    if edge_order not in (1, 2):
        raise ArgumentError(f"gradient: edge_order is 1 or 2, not {edge_order}")
    wrapped = wrap_dims(dims, x.dim())
    for dim in wrapped:
        if x.shape[dim] < edge_order + 1:
            raise ShapeMismatch(
                f"gradient: dimension {dim} of {list(x.shape)} must have at least {edge_order + 1} elements"
            )
    return [
        _uneven(x, dim, spaces, edge_order)
        if isinstance(spaces, Tensor)
        else _even(x, dim, spaces, edge_order)
        for dim, spaces in zip(wrapped, spacing, strict=True)
    ]


def _even(x: Tensor, dim: int, space: Any, edge_order: int) -> Tensor:
    def part(start: int, end: int | None = None) -> Any:
        return aten.slice.Tensor(x, dim, start, end)

    def difference(before: Any, after: Any) -> Any:
        return aten.div.Scalar(_difference(before, after), space)

    middle = difference(part(0, -2), part(2))
    if edge_order == 1:
        first, last = difference(part(0, 1), part(1, 2)), difference(part(-2, -1), part(-1))
    else:
        third, second = aten.mul.Scalar(part(2, 3), 0.5), aten.mul.Scalar(part(1, 2), 2)
        first = difference(third, aten.mul.Scalar(part(0, 1), -1.5) + second)
        ultimate, penultimate = aten.mul.Scalar(part(-1), 1.5), aten.mul.Scalar(part(-2, -1), 2)
        before = aten.mul.Scalar(part(-3, -2), 0.5) - penultimate
        last = aten.div.Scalar(before + ultimate, space)
    return torch.cat([first, aten.div.Scalar(middle, 2), last], dim)


def _uneven(x: Tensor, dim: int, places: Tensor, edge_order: int) -> Tensor:
    """With the coordinates of the elements along a dimension."""

    def part(start: int, end: int | None = None) -> Any:
        return aten.slice.Tensor(x, dim, start, end)

    steps = torch.diff(places, 1, 0)
    left, right = aten.slice.Tensor(steps, 0, 0, -1), aten.slice.Tensor(steps, 0, 1)
    shape = [-1 if i == dim else 1 for i in range(x.dim())]
    divisor = left * (left + right)
    a = (-right / divisor).view(shape)
    divisor = left * right
    b = ((right - left) / divisor).view(shape)
    divisor = right * (left + right)
    c = (left / divisor).view(shape)
    third = c * part(2)
    second = b * part(1, -1)
    middle = a * part(0, -2) + second + third
    if edge_order == 1:
        step = aten.select.int(steps, 0, 0)
        first = _difference(part(0, 1), part(1, 2)) / step
        step = aten.select.int(steps, 0, -1)
        last = _difference(part(-2, -1), part(-1)) / step
    else:
        a, b, c = (
            _weight_of_nearest(steps, 0, 1),
            _weight_of_second(steps, 0, 1),
            _weight_of_third(steps, 0, 1),
        )
        third, second = c * part(2, 3), b * part(1, 2)
        first = a * part(0, 1) + second + third
        a, b, c = (
            _weight_of_third(steps, -1, -2),
            _weight_of_second(steps, -1, -2),
            _weight_of_nearest(steps, -1, -2),
        )
        third, second = c * part(-1), b * part(-2, -1)
        last = a * part(-3, -2) + second + third
    return torch.cat([first, middle, last], dim)


def _difference(before: Any, after: Any) -> Any:
    return after - before


def _weight_of_nearest(steps: Tensor, at: int, beside: int) -> Any:
    """Of the element at an end, with the last step and the one beside it. At the front signs are the other way round."""
    divisor = _sum_of(steps, at, beside)
    divisor = aten.select.int(steps, 0, at) * divisor
    other = aten.select.int(steps, 0, beside)
    total = aten.mul.Scalar(aten.select.int(steps, 0, at), 2.0 if at == 0 else 2) + other
    return (-total if at == 0 else total) / divisor


def _weight_of_second(steps: Tensor, at: int, beside: int) -> Any:
    other = aten.select.int(steps, 0, beside)
    divisor = aten.select.int(steps, 0, at) * other
    total = _sum_of(steps, at, beside)
    return (total if at == 0 else -total) / divisor


def _weight_of_third(steps: Tensor, at: int, beside: int) -> Any:
    divisor = _sum_of(steps, at, beside)
    divisor = aten.select.int(steps, 0, beside) * divisor
    step = aten.select.int(steps, 0, at)
    return (-step if at == 0 else step) / divisor


def _sum_of(steps: Tensor, at: int, beside: int) -> Any:
    other = aten.select.int(steps, 0, beside)
    return aten.select.int(steps, 0, at) + other
