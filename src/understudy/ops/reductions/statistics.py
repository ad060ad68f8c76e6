"""Histograms of one dimension and of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.dtypes import check_one_dtype
from understudy.spec import TensorSpec, same_shape

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
