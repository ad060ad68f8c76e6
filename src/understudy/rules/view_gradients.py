"""Writing through a view without a view: gradients of views, and *_scatter operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import ShapeMismatch
from understudy.rules.in_place import check_no_overlap
from understudy.rules.registry import rule
from understudy.rules.views import diagonal_of, restrided, selected, sliced
from understudy.shapes.sizes import surely_equal
from understudy.spec import TensorSpec, check_expandable, is_contiguous, preserved_copy, same_shape


@rule("slice_backward")
def slice_backward(
    grad_output: TensorSpec, input_sizes: Sequence[Any], dim: int, start: Any, end: Any, step: Any
) -> TensorSpec:
    result = grad_output.like(input_sizes)
    check_expandable(grad_output.shape, sliced(result, dim, start, end, step).shape, "slice_backward")
    return result


@rule("select_backward")
def select_backward(grad_output: TensorSpec, input_sizes: Sequence[Any], dim: int, index: Any) -> TensorSpec:
    result = grad_output.like(input_sizes)
    check_expandable(grad_output.shape, selected(result, dim, index).shape, "select_backward")
    return result


@rule("diagonal_backward")
def diagonal_backward(
    grad_output: TensorSpec, input_sizes: Sequence[Any], offset: int, dim1: int, dim2: int
) -> TensorSpec:
    result = grad_output.like(input_sizes)
    check_expandable(grad_output.shape, diagonal_of(result, offset, dim1, dim2).shape, "diagonal_backward")
    return result


@rule("unfold_backward")
def unfold_backward(grad_in: TensorSpec, input_sizes: Sequence[Any], dim: int, size: Any, step: Any) -> TensorSpec:
    return grad_in.like(input_sizes)


def copied_in_place(spec: TensorSpec) -> TensorSpec:
    """A copy of the whole storage, seen with the same strides and offset, unless elements overlap."""
    expanded = any(step == 0 and size > 1 for size, step in zip(spec.shape, spec.stride, strict=True))
    if expanded and not is_contiguous(spec.shape, spec.stride):
        return preserved_copy(spec)
    return spec.viewed(spec.shape, spec.stride, conj=False, neg=False)


def _check_source(what: str, src: TensorSpec, part: TensorSpec) -> None:
    if not same_shape(src.shape, part.shape):
        raise ShapeMismatch(f"{what}: the source {src} does not have the shape {list(part.shape)} of what it fills")


@rule("slice_scatter")
def slice_scatter(
    spec: TensorSpec, src: TensorSpec, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> TensorSpec:
    _check_source("slice_scatter", src, sliced(spec, dim, start, end, step))
    return copied_in_place(spec)


@rule("select_scatter")
def select_scatter(spec: TensorSpec, src: TensorSpec, dim: int, index: Any) -> TensorSpec:
    _check_source("select_scatter", src, selected(spec, dim, index))
    return copied_in_place(spec)


@rule("diagonal_scatter")
def diagonal_scatter(
    spec: TensorSpec, src: TensorSpec, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TensorSpec:
    _check_source("diagonal_scatter", src, diagonal_of(spec, offset, dim1, dim2))
    return copied_in_place(spec)


@rule("as_strided_scatter")
def as_strided_scatter(
    spec: TensorSpec, src: TensorSpec, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> TensorSpec:
    target = restrided(spec, size, stride, storage_offset)
    _check_source("as_strided_scatter", src, target)
    if not any(surely_equal(length, 0) for length in target.shape):
        check_no_overlap("as_strided_scatter", target)
    return copied_in_place(spec)
