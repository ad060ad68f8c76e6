"""Gradients of views, *_scatter operators, and in-place changes of shape and strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, OperatorError, ShapeMismatch
from understudy.ops.factories import clone, strides_in_format
from understudy.ops.registry import Rule, rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.layouts import suggested_format
from understudy.ops.variants import check_no_overlap
from understudy.ops.views.basic import (
    as_strided,
    diagonal_of,
    restride_spec,
    select_spec,
    slice_spec,
    squeeze,
    squeeze_dim,
    squeeze_dims,
    t,
    transpose,
    unsqueeze,
)
from understudy.shapes.node import Size, Sizes
from understudy.shapes.sizes import is_provably_equal
from understudy.spec import (
    Same,
    TensorSpec,
    View,
    check_expandable,
    contiguous_strides,
    is_contiguous,
    preserved_copy,
    same_shape,
)

Function = Callable[..., object]
aten = torch.ops.aten


@rule("slice_backward")
def slice_backward(
    grad_output: TensorSpec,
    input_sizes: Sizes,
    dim: int,
    start: Size,
    end: Size,
    step: Size,
) -> TensorSpec:
    result = grad_output.like(input_sizes)
    check_expandable(grad_output.shape, slice_spec(result, dim, start, end, step).shape, "slice_backward")
    return result


@rule("select_backward")
def select_backward(grad_output: TensorSpec, input_sizes: Sizes, dim: int, index: Size) -> TensorSpec:
    result = grad_output.like(input_sizes)
    check_expandable(grad_output.shape, select_spec(result, dim, index).shape, "select_backward")
    return result


@rule("diagonal_backward")
def diagonal_backward(
    grad_output: TensorSpec, input_sizes: Sequence[object], offset: int, dim1: int, dim2: int
) -> TensorSpec:
    result = grad_output.like(input_sizes)
    check_expandable(grad_output.shape, diagonal_of(result, offset, dim1, dim2).shape, "diagonal_backward")
    return result


@rule("unfold_backward")
def unfold_backward(
    grad_in: TensorSpec, input_sizes: Sequence[object], dim: int, size: object, step: object
) -> TensorSpec:
    return grad_in.like(input_sizes)


def copy_whole_storage(spec: TensorSpec) -> TensorSpec:
    """A copy of the whole storage, with the same strides and offset, unless elements overlap."""
    expanded = any(step == 0 and size > 1 for size, step in zip(spec.shape, spec.stride, strict=True))
    if expanded and not is_contiguous(spec.shape, spec.stride):
        return preserved_copy(spec)
    return spec.as_view(spec.shape, spec.stride, conj=False, neg=False)


def _check_source(what: str, src: TensorSpec, part: TensorSpec) -> None:
    if not same_shape(src.shape, part.shape):
        raise ShapeMismatch(f"{what}: expected a source of shape {list(part.shape)}, got {src}")


@rule("slice_scatter")
def slice_scatter(
    spec: TensorSpec,
    src: TensorSpec,
    dim: int = 0,
    start: object = None,
    end: object = None,
    step: object = 1,
) -> TensorSpec:
    _check_source("slice_scatter", src, slice_spec(spec, dim, start, end, step))
    return copy_whole_storage(spec)


@rule("select_scatter")
def select_scatter(spec: TensorSpec, src: TensorSpec, dim: int, index: Size) -> TensorSpec:
    _check_source("select_scatter", src, select_spec(spec, dim, index))
    return copy_whole_storage(spec)


@rule("diagonal_scatter")
def diagonal_scatter(
    spec: TensorSpec, src: TensorSpec, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TensorSpec:
    _check_source("diagonal_scatter", src, diagonal_of(spec, offset, dim1, dim2))
    return copy_whole_storage(spec)


@rule("as_strided_scatter")
def as_strided_scatter(
    spec: TensorSpec, src: TensorSpec, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> TensorSpec:
    target = restride_spec(spec, size, stride, storage_offset)
    _check_source("as_strided_scatter", src, target)
    if not any(is_provably_equal(length, 0) for length in target.shape):
        check_no_overlap("as_strided_scatter", target)
    return copy_whole_storage(spec)


# --- Operators that change the shape, stride or offset of their first input in place ------------------------

VIEWS_IN_PLACE: dict[str, Callable[..., View]] = {
    "squeeze_": squeeze,
    "squeeze_.dim": squeeze_dim,
    "squeeze_.dims": squeeze_dims,
    "unsqueeze_": unsqueeze,
    "t_": t,
    "transpose_": transpose,
    "swapdims_": transpose,
    "swapaxes_": transpose,
    "as_strided_": as_strided,
}


def change_in_place(before: TensorSpec, after: TensorSpec) -> Same:
    return Same(0) if after is before else Same(0, after)


def _in_place(view_rule: Callable[..., View]) -> Rule:
    def view_in_place(spec: TensorSpec, *args: object, **kwargs: object) -> Same:
        return change_in_place(spec, view_rule(spec, *args, **kwargs).spec)

    return view_in_place


for _name, _view_rule in VIEWS_IN_PLACE.items():
    rule(_name)(_in_place(_view_rule))


@rule("detach_")
def detach_(spec: TensorSpec) -> Same:
    return Same(0)


MOST_ELEMENTS = 2**63 - 1


def resize_spec(spec: TensorSpec, size: Sizes, memory_format: torch.memory_format | None) -> TensorSpec:
    """With the same shape, strides are kept; with another shape, or a memory format, they are recomputed."""
    if any(s < 0 for s in size):
        raise ArgumentError(f"resize_: {list(size)} has a negative size")
    if math.prod(s for s in size if type(s) is int) > MOST_ELEMENTS:
        raise OperatorError(f"resize_: the number of elements of {list(size)} overflows a 64-bit integer")
    if not same_shape(tuple(size), spec.shape):
        spec = spec.as_view(size, contiguous_strides(size))
    if memory_format is None:
        return spec
    return spec.as_view(size, strides_in_format(tuple(size), memory_format))


@rule("resize_")
def resize_(spec: TensorSpec, size: Sizes, *, memory_format: torch.memory_format | None = None) -> Same:
    return change_in_place(spec, resize_spec(spec, size, memory_format))


@rule("resize")
def resize(
    spec: TensorSpec, size: Sequence[Any], *, memory_format: torch.memory_format | None = None
) -> TensorSpec:
    return resize_spec(clone(spec), size, memory_format)


@rule("resize_as_")
def resize_as_(
    spec: TensorSpec, the_template: TensorSpec, *, memory_format: torch.memory_format | None = None
) -> Same:
    if memory_format is torch.preserve_format:
        memory_format = suggested_format(the_template)
    return change_in_place(spec, resize_spec(spec, the_template.shape, memory_format))


@rule("set_.source_Tensor")
def set_source(spec: TensorSpec, source: TensorSpec) -> Same:
    if spec.dtype is not source.dtype:
        raise DtypeError(f"set_: expected a source of dtype {spec.dtype}, got {source}")
    return change_in_place(spec, spec.as_view(source.shape, source.stride, source.offset))


# --- decompositions for symbolic sizes ----------------------------------------------------------------------


@decomposition("fill_diagonal_")
def decompose_fill_diagonal(x: torch.Tensor, fill_value: float, wrap: bool = False) -> Any:
    if x.dim() < 2:
        return NotImplemented  # C++ raises the error
    height, width = x.shape[:2]
    if x.dim() > 2 and any(size != height for size in x.shape):
        raise ShapeMismatch(
            f"fill_diagonal_: expected equal sizes for more than two dimensions, got {list(x.shape)}"
        )
    step, offset, length = sum(x.stride()), x.storage_offset(), torch.sym_min(height, width)
    x.as_strided((length,), (step,), offset).fill_(fill_value)
    if wrap and x.dim() == 2 and height > width + 1:
        below = (x.numel() + width) // (width + 1) - length
        x.as_strided((below,), (step,), offset + x.stride(0) * (width + 1)).fill_(fill_value)
    return x
