"""Padding (constant, reflection and replication, with their gradients), im2col and col2im."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.ops.kernel_tables.table import holds
from understudy.ops.registry import Rule, rule
from understudy.ops.shared.dims import replace_size
from understudy.ops.shared.dtypes import (
    can_store,
    check_can_store,
)
from understudy.ops.shared.layouts import is_provably_row_major, suggested_strides
from understudy.ops.views.basic import narrow_spec
from understudy.shapes.node import Scalar, Shape, Size, Sizes
from understudy.shapes.sizes import is_any_positive, is_provably_less, larger
from understudy.spec import TensorSpec, preserved_copy, product, same_shape


@rule("constant_pad_nd")
def constant_pad_nd(spec: TensorSpec, pad: Sizes, value: Scalar | complex = 0) -> TensorSpec:
    if not can_store(value, spec.dtype, spec.device) and is_any_positive(pad):
        check_can_store("pad", value, spec.dtype, spec.device)
    return pad_spec(spec, pad)


def pad_spec(spec: TensorSpec, pad: Sequence[Any]) -> TensorSpec:
    if len(pad) % 2 != 0:
        raise ArgumentError(f"pad: {list(pad)} must have two entries for each dimension")
    if len(pad) > 2 * spec.ndim:
        raise ArgumentError(f"pad: {list(pad)} pads {len(pad) // 2} dimensions, {spec} has {spec.ndim}")
    if any(type(number) is not int for number in (*spec.shape, *pad)) and is_provably_row_major(spec):
        shape = _padded_row_major(spec, pad)
        if shape is not None:
            return spec.like(shape)
    cut = spec
    shape = list(spec.shape)
    for position in range(0, len(pad), 2):
        dim = spec.ndim - 1 - position // 2
        before, after = pad[position], pad[position + 1]
        shape[dim] = shape[dim] + before + after
        if shape[dim] < 0:
            raise ShapeMismatch(f"pad: {list(pad)} leaves a negative size in dimension {dim} of {spec}")
        cut = _cut(cut, dim, before, after)
    if cut is spec and is_provably_row_major(spec):  # the result is row-major whether it is padded or copied
        return spec.like(shape)
    if is_any_positive(pad):
        return spec.like(shape, stride=suggested_strides(shape, spec))
    return preserved_copy(cut)


def _padded_row_major(spec: TensorSpec, pad: Sequence[Any]) -> list[Any] | None:
    """The shape, if the result is row-major whether it is padded, cut or copied; None otherwise.

    It may not be if the result may be empty, or if only dimensions of size 1 are outside of the one that is cut: then
    strides are kept. Otherwise no guard on the sign of the padding is needed.
    """
    shape, left = list(spec.shape), list(spec.shape)
    innermost_cut = -1
    for position in range(len(pad) - 2, -1, -2):
        dim = spec.ndim - 1 - position // 2
        before, after = pad[position], pad[position + 1]
        shape[dim] = shape[dim] + before + after
        if not all(is_provably_less(-1, extra) for extra in (before, after)):
            innermost_cut = dim
            left[dim] = left[dim] - larger(-before, 0) - larger(-after, 0)
    if innermost_cut < 0:
        return shape
    is_left = all(is_provably_less(0, size) for size in left)
    return shape if is_left and all(is_provably_less(1, size) for size in left[:innermost_cut]) else None


def _cut(spec: TensorSpec, dim: int, before: Any, after: Any) -> TensorSpec:
    """Negative padding takes elements away."""
    length = spec.shape[dim]
    start: Any = 0
    if _is_crop(before):
        start, length = -before, length + before
    if _is_crop(after):
        length = length + after
    if length < 0:
        raise ShapeMismatch(f"pad: ({before}, {after}) leaves a negative size in dimension {dim} of {spec}")
    if length is spec.shape[dim]:
        return spec
    return narrow_spec(spec, dim, start, length)


def _is_crop(extra: Size) -> bool:
    """Whether padding is negative. For a symbol that is at most 0, no guard on 0 itself is needed."""
    return (type(extra) is not int and is_provably_less(extra, 1)) or bool(extra < 0)


def padded_shape(kind: str, dims: int, spec: TensorSpec, padding: Sizes) -> Shape:
    """The shape with the last `dims` dimensions padded; before them come channels, and perhaps a batch."""
    if len(padding) != 2 * dims:
        raise ArgumentError(f"{kind}_pad{dims}d: expected {2 * dims} paddings, got {list(padding)}")
    batched = spec.ndim == dims + 2
    if not batched and spec.ndim != dims + 1:
        raise ShapeMismatch(f"{kind}_pad{dims}d: expected {dims + 1} or {dims + 2} dimensions, got {spec}")
    if any(size == 0 for size in spec.shape[1 if batched else 0 :]):
        raise ShapeMismatch(f"{kind}_pad{dims}d: only the batch of {spec} may have size 0")
    shape = spec.shape
    for position in range(dims):
        dim = spec.ndim - 1 - position
        before, after = padding[2 * position], padding[2 * position + 1]
        size = shape[dim]
        if kind == "reflection" and (before >= size or after >= size):
            raise ShapeMismatch(
                f"reflection_pad{dims}d: padding ({before}, {after}) must be less than the size {size} "
                f"of dimension {dim} of {spec}"
            )
        shape = replace_size(shape, dim, size + before + after)
    least = 0 if holds(f"{kind}_pad{dims}d_may_leave_nothing") else 1
    if any(size < least for size in shape[-dims:]) or all(size < 1 for size in shape[-dims:]):
        raise ShapeMismatch(f"{kind}_pad{dims}d: padding {list(padding)} leaves no elements of {spec}")
    return shape


def _pad_rules(kind: str, dims: int) -> tuple[Rule, Rule]:
    def pad(spec: TensorSpec, padding: Sizes) -> TensorSpec:
        shape = padded_shape(kind, dims, spec, padding)
        return spec.like(shape, stride=suggested_strides(shape, spec))

    def pad_backward(grad_output: TensorSpec, spec: TensorSpec, padding: Sizes) -> TensorSpec:
        shape = padded_shape(kind, dims, spec, padding)
        if not same_shape(grad_output.shape, shape):
            raise ShapeMismatch(
                f"{kind}_pad{dims}d_backward: expected a gradient of shape {list(shape)}, got {grad_output}"
            )
        return spec.like(stride=suggested_strides(spec.shape, spec))

    return pad, pad_backward


PADS: dict[tuple[str, int], Rule] = {}
for _kind in ("reflection", "replication"):
    for _dims in (1, 2, 3):
        _forward, _backward = _pad_rules(_kind, _dims)
        PADS[_kind, _dims] = rule(f"{_kind}_pad{_dims}d")(_forward)
        rule(f"{_kind}_pad{_dims}d_backward")(_backward)


def _pair(name: str, values: Sequence[Any], least: int) -> tuple[Any, Any]:
    if len(values) != 2 or any(v < least for v in values):
        raise ArgumentError(f"{name} must be two numbers ≥ {least}, got {list(values)}")
    return values[0], values[1]


def _blocks(
    size: Sequence[object],
    kernel: Sequence[Any],
    dilation: Sequence[object],
    padding: Sequence[Any],
    stride: Sequence[Any],
) -> tuple[Any, Any, Any]:
    """Elements of one block, and how many blocks there are along each of the two dimensions."""
    kernel, dilation = _pair("kernel_size", kernel, 1), _pair("dilation", dilation, 1)
    padding, stride = _pair("padding", padding, 0), _pair("stride", stride, 1)
    counts = []
    for length, k, d, p, s in zip(size, kernel, dilation, padding, stride, strict=True):
        count = (length + 2 * p - (d * (k - 1) + 1)) // s + 1
        if count < 1:
            raise ShapeMismatch(
                f"kernel {list(kernel)} with dilation {list(dilation)} is larger than the padded input {list(size)}"
            )
        counts.append(count)
    return kernel[0] * kernel[1], counts[0], counts[1]


@rule("im2col")
def im2col(
    spec: TensorSpec,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> TensorSpec:
    if spec.ndim not in (3, 4) or any(size == 0 for size in spec.shape[-3:]):
        raise ShapeMismatch(
            f"im2col: expected images of 3 or 4 dimensions, only the batch may be empty, got {spec}"
        )
    block, rows, columns = _blocks(spec.shape[-2:], kernel_size, dilation, padding, stride)
    return spec.like((*spec.shape[:-3], spec.shape[-3] * block, rows * columns))


@rule("col2im")
def col2im(
    spec: TensorSpec,
    output_size: Sequence[object],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> TensorSpec:
    if spec.ndim not in (2, 3) or any(size == 0 for size in spec.shape[-2:]):
        raise ShapeMismatch(
            f"col2im: expected columns of 2 or 3 dimensions, only the batch may be empty, got {spec}"
        )
    height, width = _pair("output_size", output_size, 1)
    block, rows, columns = _blocks((height, width), kernel_size, dilation, padding, stride)
    if spec.shape[-2] % block != 0:
        raise ShapeMismatch(
            f"col2im: size {spec.shape[-2]} of {spec} must be divisible by the number of elements of the kernel, {block}"
        )
    if spec.shape[-1] != product((rows, columns)):
        raise ShapeMismatch(
            f"col2im: expected {rows} × {columns} blocks for {list(output_size)}, got {spec.shape[-1]} in {spec}"
        )
    return spec.like((*spec.shape[:-2], spec.shape[-2] // block, height, width))
