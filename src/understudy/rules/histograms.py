"""Histograms: how many values fall into which bin, in one dimension and in several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.rules.dtype_sets import FLOATS, NUMBERS, check_cpu_dtype, check_one_dtype
from understudy.rules.registry import rule
from understudy.spec import TensorSpec, same_shape

Maybe = TensorSpec | None
Range = Sequence[float] | None

SEARCHED = frozenset({torch.float32, torch.float64})
"""Dtypes in which the least and the largest of the values are looked for, where no range is given."""


# --- one dimension


@rule("histogram.bins_tensor")
def histogram(
    spec: TensorSpec, bins: TensorSpec, *, weight: Maybe = None, density: bool = False
) -> tuple[TensorSpec, ...]:
    _check_edges(spec, [bins])
    _check_values("histogram", spec, weight)
    if weight is not None and weight.numel != spec.numel:
        raise ShapeMismatch(f"histogram: {spec} needs as many weights, got {weight}")
    return spec.like((bins.shape[0] - 1,)), bins.like()


@rule("histogram.bin_ct")
def histogram_in(
    spec: TensorSpec, bins: Any = 100, *, range: Range = None, weight: Maybe = None, density: bool = False
) -> tuple[TensorSpec, ...]:
    _check_counts([bins])
    _check_range(spec, range, 1)
    _check_values("histogram", spec, weight)
    if weight is not None and weight.numel != spec.numel:
        raise ShapeMismatch(f"histogram: {spec} needs as many weights, got {weight}")
    return spec.like((bins,)), spec.like((bins + 1,))


# --- several: the last dimension holds the coordinates of a point


@rule("_histogramdd_bin_edges")
def histogramdd_edges(
    spec: TensorSpec, bins: Sequence[Any], *, range: Range = None, weight: Maybe = None, density: bool = False
) -> list[TensorSpec]:
    _check_points(spec, len(bins))
    _check_range(spec, range, len(bins))
    check_cpu_dtype("histogramdd", spec, NUMBERS)
    return [spec.like((count + 1,)) for count in bins]


@rule("_histogramdd_from_bin_cts")
def histogramdd_in(
    spec: TensorSpec, bins: Sequence[Any], *, range: Range = None, weight: Maybe = None, density: bool = False
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
        raise ShapeMismatch(
            f"histogramdd: the last dimension of {spec} needs as many bins, got {count} of them"
        )


def _check_edges(spec: TensorSpec, bins: Sequence[TensorSpec]) -> None:
    for edges in bins:
        check_one_dtype("histogram", spec, edges)
        if edges.ndim != 1 or edges.shape[0] < 2:
            raise ShapeMismatch(f"histogram: the edges must be a vector of two or more, got {edges}")


def _check_counts(bins: Sequence[Any]) -> None:
    if any(count <= 0 for count in bins):
        raise ArgumentError(f"histogram: there must be at least one bin, got {list(bins)}")


def _check_range(spec: TensorSpec, range: Range, dims: int) -> None:
    if range is None:
        if spec.dtype not in SEARCHED and not spec.is_empty:
            check_cpu_dtype("histogram without a range", spec, SEARCHED)
        return
    if len(range) != 2 * dims:
        raise ArgumentError(
            f"histogram: the range of {dims} dimensions has {2 * dims} numbers, got {len(range)}"
        )
    for low, high in zip(range[::2], range[1::2], strict=True):
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ArgumentError(f"histogram: [{low}, {high}] is no range")


def _check_values(what: str, spec: TensorSpec, weight: Maybe) -> None:
    check_cpu_dtype(what, spec, FLOATS)
    check_one_dtype(what, spec, weight)


def _check_weights(spec: TensorSpec, weight: Maybe) -> None:
    if weight is not None and not same_shape(spec.shape[:-1], weight.shape or (1,)):
        raise ShapeMismatch(f"histogramdd: {spec} needs one weight for each point, got {weight}")
