"""Looking values up and choosing elements: bucketize, searchsorted, isin, one_hot, histc, nonzero_static."""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, DynamicOutputShapeException, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.layouts import view_strides
from understudy.ops.traits.ranges import Operand, ValueRange, counts_of, followed_at_any_size, value_range
from understudy.shapes.node import Scalar
from understudy.spec import TensorSpec, common_device, contiguous_strides, same_shape
from understudy.spec.elementwise import result_type
from understudy.spec.strides import preserved_strides

Tensor = torch.Tensor


def _positions_spec(spec: TensorSpec, out_int32: bool) -> TensorSpec:
    return spec.like(dtype=torch.int32 if out_int32 else torch.int64)


@rule("bucketize.Tensor")
def bucketize(
    spec: TensorSpec, boundaries: TensorSpec, *, out_int32: bool = False, right: bool = False
) -> TensorSpec:
    if boundaries.ndim != 1:
        raise ShapeMismatch(f"bucketize: the boundaries must be a vector, got {boundaries}")
    return _positions_spec(spec.like(device=common_device((spec, boundaries))), out_int32)


@rule("bucketize.Scalar")
def bucketize_scalar(
    number: object, boundaries: TensorSpec, *, out_int32: bool = False, right: bool = False
) -> TensorSpec:
    if boundaries.ndim != 1:
        raise ShapeMismatch(f"bucketize: the boundaries must be a vector, got {boundaries}")
    return _positions_spec(boundaries.like(()), out_int32)


@rule("searchsorted.Tensor", "searchsorted.Scalar")
def search_sorted(
    sorted_sequence: TensorSpec,
    values: TensorSpec | Scalar,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: TensorSpec | None = None,
) -> TensorSpec:
    _check_search(sorted_sequence, right, side, sorter)
    spec = values if isinstance(values, TensorSpec) else sorted_sequence.like(())
    if not spec.shape and sorted_sequence.ndim != 1:
        raise ShapeMismatch(
            f"searchsorted: expected a vector as sequence for the 0-dim {spec}, got {sorted_sequence}"
        )
    if sorted_sequence.ndim != 1 and not same_shape(sorted_sequence.shape[:-1], spec.shape[:-1]):
        raise ShapeMismatch(
            f"searchsorted: the sequence {sorted_sequence} must be a vector, or have the sizes of {spec} "
            f"in all dimensions but the last"
        )
    return _positions_spec(spec.like(device=sorted_sequence.device), out_int32)


def _check_search(sequence: TensorSpec, right: bool, side: str | None, sorter: TensorSpec | None) -> None:
    if not sequence.shape:
        raise ShapeMismatch(f"searchsorted: the sequence must have at least one dimension, got {sequence}")
    if side is not None:
        if side not in ("left", "right"):
            raise ArgumentError(f"searchsorted: expected side 'left' or 'right', got {side!r}")
        if side == "left" and right:
            raise ArgumentError("searchsorted: side='left' contradicts right=True")
    if sorter is not None:
        if not same_shape(sorter.shape, sequence.shape):
            raise ShapeMismatch(
                f"searchsorted: the sorter {sorter} must have the shape of the sequence {sequence}"
            )
        if sorter.dtype is not torch.int64:
            raise DtypeError(f"searchsorted: the sorter must be i64, got {sorter}")


@rule("isin.Tensor_Tensor")
def isin(
    elements: TensorSpec, test_elements: TensorSpec, *, assume_unique: bool = False, invert: bool = False
) -> TensorSpec:
    _check_one_row(elements, elements.numel, test_elements)
    return elements.like(dtype=torch.bool, device=common_device((elements, test_elements)))


def _check_one_row(elements: object, count: Any, test_elements: TensorSpec) -> None:
    """The CPU compares each element with each test element if these are few, and views them as one row then."""
    dtype, stride = result_type(elements, test_elements), test_elements.stride
    if dtype is not test_elements.dtype:
        stride = preserved_strides(test_elements.shape, stride)
    looked_up = test_elements.like(stride=stride, dtype=dtype)
    if test_elements.device.type != "cpu" or view_strides(looked_up, (looked_up.numel,)) is not None:
        return
    if count > 0 and looked_up.numel < int(10.0 * int(count) ** 0.145):
        raise ShapeMismatch(f"isin: {test_elements} can't be viewed as one row; call .contiguous() first")


@rule("isin.Tensor_Scalar")
def isin_scalar(
    elements: TensorSpec, test_element: object, *, assume_unique: bool = False, invert: bool = False
) -> TensorSpec:
    return elements.like(dtype=torch.bool)


@rule("isin.Scalar_Tensor")
def scalar_isin(
    element: object, test_elements: TensorSpec, *, assume_unique: bool = False, invert: bool = False
) -> TensorSpec:
    _check_one_row(element, 1, test_elements)
    return test_elements.like((), dtype=torch.bool)


@rule("one_hot")
def one_hot(spec: TensorSpec, num_classes: int = -1) -> TensorSpec:
    if spec.dtype is not torch.int64:
        raise DtypeError(f"one_hot: expected i64, got {spec}")
    if num_classes == -1:
        raise DynamicOutputShapeException(
            f"one_hot of {spec}: the number of classes depends on data; give num_classes="
        )
    if num_classes <= 0:
        raise ArgumentError(f"one_hot: num_classes must be positive, got {num_classes}")
    return TensorSpec((*spec.shape, num_classes), dtype=spec.dtype, device=spec.device)


@rule("histc")
def histc(spec: TensorSpec, bins: Any = 100, min: float = 0, max: float = 0) -> TensorSpec:
    if bins <= 0:
        raise ArgumentError(f"histc: the number of bins must be positive, got {bins}")
    if max < min:
        raise ArgumentError(f"histc: max must be larger than min, got {max} and {min}")
    return spec.like((bins,))


followed_at_any_size.mark("histc")


@value_range("histc")
def _histc(x: Operand, bins: int = 100, *args: object) -> ValueRange | None:
    return None if x.spec.is_symbolic else counts_of(x.spec, bins)


@rule("nonzero_static")
def nonzero_static(spec: TensorSpec, *, size: Any, fill_value: int = -1) -> TensorSpec:
    if size < 0:
        raise ArgumentError(f"nonzero_static: size must not be negative, got {size}")
    shape = (size, spec.ndim)
    return spec.like(shape, stride=contiguous_strides(shape), dtype=torch.int64)


# --- choices of elements ------------------------------------------------------------------------------------------
