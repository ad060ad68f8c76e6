"""Statistics: cov and corrcoef for symbolic sizes, and histograms of one dimension and of several."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dtypes import check_one_dtype
from understudy.spec import TensorSpec, same_shape

Tensor = torch.Tensor

# --- covariance ---------------------------------------------------------------------------------------------------


@decomposition("cov")
def decompose_cov(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    if x.dim() > 2:
        raise ShapeMismatch(f"cov: expected at most two dimensions, got {x.dim()}")
    rows = x.view(1, -1) if x.dim() < 2 else x
    count = rows.shape[1]
    for weights in (fweights, aweights):
        if weights is not None:
            _check_cov_weights(weights, count)
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


def _check_cov_weights(weights: Tensor, count: object) -> None:
    if weights.dim() > 1 or weights.numel() != count:
        raise ShapeMismatch(f"cov: expected {count} weights, got shape {list(weights.shape)}")
    if count != 0:
        _check_true(weights.min().ge(0), "cov: a weight is negative")


def _check_true(condition: Tensor, otherwise: str) -> None:
    if not _is_true(condition):
        raise ShapeMismatch(otherwise)


def _is_true(condition: Tensor) -> bool:
    return torch.equal(condition, condition.new_ones(()))


@decomposition("corrcoef")
def decompose_corrcoef(x: Tensor) -> Tensor:
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
    return (
        torch.complex(torch.real(c).clip(-1, 1), torch.imag(c).clip(-1, 1))
        if c.is_complex()
        else c.clip(-1, 1)
    )


# --- Histograms: how many values fall into which bin, in one dimension and in several -----------------------

Maybe = TensorSpec | None
Range = Sequence[float] | None


# --- one dimension


@rule("histogram.bins_tensor")
def histogram(
    spec: TensorSpec, bins: TensorSpec, *, weight: Maybe = None, density: bool = False
) -> tuple[TensorSpec, ...]:
    _check_edges(spec, [bins])
    _check_values("histogram", spec, weight)
    if weight is not None and weight.numel != spec.numel:
        raise ShapeMismatch(f"histogram: expected weights of the shape of {spec}, got {weight}")
    return spec.like((bins.shape[0] - 1,)), bins.like()


@rule("histogram.bin_ct")
def histogram_in(
    spec: TensorSpec, bins: Any = 100, *, range: Range = None, weight: Maybe = None, density: bool = False
) -> tuple[TensorSpec, ...]:
    _check_counts([bins])
    _check_range(spec, range, 1)
    _check_values("histogram", spec, weight)
    if weight is not None and weight.numel != spec.numel:
        raise ShapeMismatch(f"histogram: expected weights of the shape of {spec}, got {weight}")
    return spec.like((bins,)), spec.like((bins + 1,))


# --- several: the last dimension holds the coordinates of a point


@rule("_histogramdd_bin_edges")
def histogramdd_edges(
    spec: TensorSpec, bins: Sequence[Any], *, range: Range = None, weight: Maybe = None, density: bool = False
) -> list[TensorSpec]:
    _check_points(spec, len(bins))
    _check_range(spec, range, len(bins))
    return [spec.like((count + 1,)) for count in bins]


@rule("_histogramdd_from_bin_cts")
def histogramdd_in(
    spec: TensorSpec,
    bins: Sequence[object],
    *,
    range: Range = None,
    weight: Maybe = None,
    density: bool = False,
) -> TensorSpec:
    _check_points(spec, len(bins))
    _check_counts(bins)
    _check_range(spec, range, len(bins))
    _check_values("histogramdd", spec, weight)
    _check_weights(spec, weight)
    return spec.like(bins)


@rule("_histogramdd_from_bin_tensors")
def histogramdd(
    spec: TensorSpec, bins: Sequence[TensorSpec], *, weight: Maybe = None, density: bool = False
) -> TensorSpec:
    _check_points(spec, len(bins))
    _check_edges(spec, bins)
    _check_values("histogramdd", spec, weight)
    _check_weights(spec, weight)
    return spec.like([edges.shape[0] - 1 for edges in bins])


# --- checks


def _check_points(spec: TensorSpec, count: int) -> None:
    if spec.ndim < 2:
        raise ShapeMismatch(f"histogramdd: expected at least two dimensions, got {spec}")
    if spec.shape[-1] != count:
        raise ShapeMismatch(f"histogramdd: expected bins for each column of {spec}, got {count}")


def _check_edges(spec: TensorSpec, bins: Sequence[TensorSpec]) -> None:
    for edges in bins:
        check_one_dtype("histogram", spec, edges)
        if edges.ndim != 1 or edges.shape[0] < 2:
            raise ShapeMismatch(f"histogram: expected a vector of at least two edges, got {edges}")


def _check_counts(bins: Sequence[Any]) -> None:
    if any(count <= 0 for count in bins):
        raise ArgumentError(f"histogram: expected at least one bin, got {list(bins)}")


def _check_range(spec: TensorSpec, range: Range, dims: int) -> None:
    if range is None:
        return
    if len(range) != 2 * dims:
        raise ArgumentError(
            f"histogram: expected a range of {2 * dims} numbers for {dims} dimensions, got {len(range)}"
        )
    for low, high in zip(range[::2], range[1::2], strict=True):
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ArgumentError(f"histogram: expected a finite range with min <= max, got [{low}, {high}]")


def _check_values(what: str, spec: TensorSpec, weight: Maybe) -> None:
    check_one_dtype(what, spec, weight)


def _check_weights(spec: TensorSpec, weight: Maybe) -> None:
    if weight is not None and not same_shape(spec.shape[:-1], weight.shape or (1,)):
        raise ShapeMismatch(f"histogramdd: {spec} needs one weight for each point, got {weight}")
