"""Pooling over windows. Whether a result keeps a channels-last format differs between the kernels: see the tables.

Pooling to symbolic sizes: the schemas of some operators have plain integers for the output's size, so C++ would
specialise a symbol. They are called without C++: the mode is called directly, below autograd, and an
`autograd.Function` adds the gradient.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dims import for_each
from understudy.ops.shared.dtypes import (
    check_any_dtype,
    check_one_dtype,
)
from understudy.ops.shared.layouts import looks_channels_last, suggested_strides
from understudy.shapes.node import Shape, Size, Sizes
from understudy.shapes.sizes import smaller
from understudy.spec import TensorSpec, same_shape

Function = Callable[..., object]
aten = torch.ops.aten
Tensor = torch.Tensor


def _check_input(what: str, x: TensorSpec, spatial: int) -> None:
    """(channels, …) or (batch, channels, …), where only the batch may be empty."""
    if x.ndim not in (spatial + 1, spatial + 2):
        raise ShapeMismatch(f"{what}: expected {spatial + 1} or {spatial + 2} dimensions, got {x}")
    if any(size == 0 for size in x.shape[x.ndim - spatial - (x.ndim == spatial + 2) :]):
        raise ShapeMismatch(f"{what}: {x} has an empty dimension other than the batch")


def _place_result(
    x: TensorSpec, shape: Shape, keeps_format: bool, dtype: torch.dtype | None = None
) -> TensorSpec:
    stride = suggested_strides(shape, x) if keeps_format else None
    return x.like(shape, stride=stride, dtype=dtype)


def _keeps_format(x: TensorSpec, spatial: int, kernel_keeps: bool) -> bool:
    return kernel_keeps and x.ndim == spatial + 2


# --- sliding windows


def window_count(
    size: Size,
    kernel: Size,
    stride: Size,
    padding: Size,
    dilation: Size,
    ceil_mode: bool,
) -> Size:
    """The number of windows. With `ceil_mode`, the last may reach beyond the end, but must start before it."""
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    return smaller((room + stride - 1) // stride + 1, (size + padding - 1) // stride + 1)


def _pooled_shape(
    what: str,
    x: TensorSpec,
    spatial: int,
    kernel: object,
    stride: object,
    padding: object,
    dilation: object,
    ceil_mode: bool,
) -> Shape:
    _check_input(what, x, spatial)
    kernel = for_each(kernel, spatial, what)
    stride = for_each(stride, spatial, what) if stride else kernel
    padding, dilation = for_each(padding, spatial, what), for_each(dilation, spatial, what)
    if any(number <= 0 for number in (*kernel, *stride, *dilation)):
        raise ArgumentError(
            f"{what}: kernel {kernel}, stride {stride} and dilation {dilation} must be positive"
        )
    reach = kernel if spatial > 1 else (dilation[0] * (kernel[0] - 1) + 1,)
    if any(pad < 0 or pad > width // 2 for pad, width in zip(padding, reach, strict=True)):
        raise ArgumentError(
            f"{what}: expected padding between 0 and half of the kernel {kernel}, got {padding}"
        )
    lead = x.shape[: x.ndim - spatial]
    if lead[-1] == 0:
        raise ShapeMismatch(f"{what}: {x} has no channels")
    counts = [
        window_count(*numbers, ceil_mode)
        for numbers in zip(x.shape[x.ndim - spatial :], kernel, stride, padding, dilation, strict=True)
    ]
    if any(count < 1 for count in counts):
        raise ShapeMismatch(f"{what}: expected an output size of at least 1, got {counts} for {x}")
    return (*lead, *counts)


SMALL_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16})


def _check_positions(what: str, x: TensorSpec) -> None:
    """Channels last, the kernel counts positions in the dtype of the numbers."""
    if looks_channels_last(x) and math.prod(x.shape[2:]) > torch.iinfo(x.dtype).max:
        raise ArgumentError(
            f"{what}: {x} in channels-last format has more positions than its dtype can represent"
        )


def _register_max_pool(spatial: int) -> None:
    name = f"max_pool{spatial}d"

    @rule(f"{name}_with_indices")
    def max_pool_with_indices(
        x: TensorSpec, kernel_size: Sizes, stride: Sizes = (), padding: object = 0, dilation: object = 1,
        ceil_mode: bool = False,
    ) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
        shape = _pooled_shape(name, x, spatial, kernel_size, stride, padding, dilation, ceil_mode)
        if spatial == 3 and x.ndim == 4 and looks_channels_last(x) and x.device.type == "cpu":
            raise ArgumentError(f"{name}: channels-last format of 2-D images is not supported, got {x}")
        if spatial == 3 and x.ndim == 5 and x.dtype in SMALL_INTEGERS and x.device.type == "cpu":
            _check_positions(name, x)
        keeps = _keeps_format(x, spatial, True)
        return _place_result(x, shape, keeps), _place_result(x, shape, keeps, torch.int64)

    @rule(name)
    def max_pool(
        x: TensorSpec, kernel_size: Sizes, stride: Sizes = (), padding: object = 0, dilation: object = 1,
        ceil_mode: bool = False,
    ) -> TensorSpec:  # fmt: skip
        return max_pool_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode)[0]

    @rule(f"{name}_with_indices_backward")
    def max_pool_backward(
        grad: TensorSpec, x: TensorSpec, kernel_size: Sizes, stride: Sizes, padding: object, dilation: object,
        ceil_mode: bool, indices: TensorSpec,
    ) -> TensorSpec:  # fmt: skip
        shape = _pooled_shape(name, x, spatial, kernel_size, stride, padding, dilation, ceil_mode)
        _check_gradient(name, grad, x, shape, indices)
        return _place_result(x, x.shape, _keeps_format(x, spatial, True))


def _check_gradient(
    name: str, grad: TensorSpec, x: TensorSpec, shape: Shape | None = None, indices: TensorSpec | None = None
) -> None:
    what = f"{name} backward"
    if shape is not None and not same_shape(grad.shape, shape):
        raise ShapeMismatch(f"{what}: gradient shape {grad} does not match output shape {list(shape)}")
    if indices is not None and not same_shape(indices.shape, grad.shape):
        raise ShapeMismatch(f"{what}: shape of indices {indices} does not match {grad}")
    check_one_dtype(what, grad, x)


def _register_avg_pool(spatial: int) -> None:
    name = f"avg_pool{spatial}d"
    keeps_format = spatial == 2

    def shape_of(
        x: TensorSpec, kernel: object, stride: object, padding: object, ceil_mode: bool, divisor: object
    ) -> Shape:
        if divisor == 0:
            raise ArgumentError(f"{name}: divisor_override must not be 0")
        shape = _pooled_shape(name, x, spatial, kernel, stride, padding, 1, ceil_mode)
        if spatial == 3:
            _check_no_smaller(name, x, for_each(kernel, 3, name))
        return shape

    @rule(name)
    def avg_pool(
        x: TensorSpec, kernel_size: Sizes, stride: Sizes = (), padding: object = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> TensorSpec:  # fmt: skip
        shape = shape_of(x, kernel_size, stride, padding, ceil_mode, divisor_override)
        return _place_result(x, shape, _keeps_format(x, spatial, keeps_format))

    @rule(f"{name}_backward")
    def avg_pool_backward(
        grad: TensorSpec, x: TensorSpec, kernel_size: Sizes, stride: Sizes, padding: object, ceil_mode: bool,
        count_include_pad: bool, divisor_override: int | None,
    ) -> TensorSpec:  # fmt: skip
        shape = shape_of(x, kernel_size, stride, padding, ceil_mode, divisor_override)
        if not same_shape(grad.shape, shape):
            raise ShapeMismatch(
                f"{name} backward: gradient shape {grad} does not match output shape {list(shape)}"
            )
        check_one_dtype(f"{name} backward", grad, x)
        return _place_result(x, x.shape, _keeps_format(x, spatial, keeps_format))


def _check_no_smaller(name: str, x: TensorSpec, kernel: Shape) -> None:
    if any(size < width for size, width in zip(x.shape[-3:], kernel, strict=True)):
        raise ShapeMismatch(f"{name}: {x} is smaller than the kernel {kernel}")


# --- adaptive pooling


def _adaptive_shape(
    what: str, x: TensorSpec, spatial: int, output_size: Sizes, channels_may_miss: bool = False
) -> Shape:
    if not (channels_may_miss and x.ndim == spatial + 2 and x.shape[1] == 0):
        _check_input(what, x, spatial)
    if len(output_size) != spatial:
        raise ArgumentError(f"{what}: expected {spatial} numbers as output_size, got {list(output_size)}")
    if any(size < 0 for size in output_size):
        raise ArgumentError(f"{what}: expected an output_size of at least 0, got {list(output_size)}")
    return (*x.shape[: x.ndim - spatial], *output_size)


def _check_cells(name: str, grad: TensorSpec) -> None:
    """Pooling to an empty result is allowed, but has no gradient."""
    if any(size == 0 for size in grad.shape[1:]):
        raise ShapeMismatch(f"{name} backward: expected a gradient with elements, got {grad}")


def _register_adaptive(spatial: int) -> None:
    keeps_format = spatial == 2
    name, max_name = f"_adaptive_avg_pool{spatial}d", f"adaptive_max_pool{spatial}d"

    @rule(name)
    def adaptive_avg_pool(x: TensorSpec, output_size: Sizes) -> TensorSpec:
        shape = _adaptive_shape(name, x, spatial, output_size, channels_may_miss=spatial == 2)
        return _place_result(x, shape, _keeps_format(x, spatial, keeps_format))

    @rule(f"{name}_backward")
    def adaptive_avg_pool_backward(grad: TensorSpec, x: TensorSpec) -> TensorSpec:
        _check_gradient(name, grad, x)
        _check_cells(name, grad)
        if grad.ndim != x.ndim or not same_shape(grad.shape[: x.ndim - spatial], x.shape[: x.ndim - spatial]):
            raise ShapeMismatch(f"{name} backward: gradient shape {grad} does not match the pooled {x}")
        return _place_result(x, x.shape, _keeps_format(x, spatial, keeps_format))

    @rule(max_name)
    def adaptive_max_pool(x: TensorSpec, output_size: Sizes) -> tuple[TensorSpec, TensorSpec]:
        shape = _adaptive_shape(max_name, x, spatial, output_size)
        keeps = _keeps_format(x, spatial, keeps_format)
        return _place_result(x, shape, keeps), _place_result(x, shape, keeps, torch.int64)

    @rule(f"{max_name}_backward")
    def adaptive_max_pool_backward(grad: TensorSpec, x: TensorSpec, indices: TensorSpec) -> TensorSpec:
        _check_gradient(max_name, grad, x, indices=indices)
        _check_cells(max_name, grad)
        return _place_result(x, x.shape, _keeps_format(x, spatial, keeps_format))


# --- fractional pooling and unpooling


def _check_random_samples(name: str, x: TensorSpec, samples: TensorSpec, spatial: int) -> None:
    """Random samples: the positions of the windows for each channel of the batch, which may be smaller."""
    if samples.dtype is not x.dtype:
        raise DtypeError(f"{name}: {x} and the samples {samples} differ in dtype")
    wanted = (x.shape[0] if x.ndim == spatial + 2 else 1, x.shape[-spatial - 1], spatial)
    if samples.ndim != 3 or not same_shape(samples.shape[1:], wanted[1:]) or samples.shape[0] < wanted[0]:
        raise ShapeMismatch(f"{name}: expected samples of shape {list(wanted)} for {x}, got {samples}")


def _register_fractional(spatial: int) -> None:
    name = f"fractional_max_pool{spatial}d"

    @rule(name)
    def fractional_max_pool(
        x: TensorSpec, kernel_size: Sizes, output_size: Sizes, random_samples: TensorSpec
    ) -> tuple[TensorSpec, TensorSpec]:
        shape = _adaptive_shape(name, x, spatial, output_size)
        kernel = for_each(kernel_size, spatial, name)
        for size, made, width in zip(x.shape[x.ndim - spatial :], output_size, kernel, strict=True):
            # In three dimensions, eager requires one more.
            if made + width - 1 > (size if spatial == 2 else size - 1):
                raise ShapeMismatch(
                    f"{name}: output_size {made} and kernel size {width} are too large for size {size} of {x}"
                )
        _check_random_samples(name, x, random_samples, spatial)
        return x.like(shape), x.like(shape, dtype=torch.int64)

    @rule(f"{name}_backward")
    def fractional_max_pool_backward(
        grad: TensorSpec, x: TensorSpec, kernel_size: Sizes, output_size: Sizes, indices: TensorSpec
    ) -> TensorSpec:
        _check_gradient(name, grad, x, _adaptive_shape(name, x, spatial, output_size), indices)
        return x.like()


@rule("max_unpool2d")
def max_unpool2d(x: TensorSpec, indices: TensorSpec, output_size: Sizes) -> TensorSpec:
    shape = _unpooled_shape("max_unpool2d", x, indices, 2, output_size)
    return _place_result(x, shape, x.ndim == 4)


@rule("max_unpool3d")
def max_unpool3d(
    x: TensorSpec, indices: TensorSpec, output_size: Sizes, stride: Sizes, padding: Sizes
) -> TensorSpec:
    if len(stride) != 3 or len(padding) != 3 or any(step <= 0 for step in stride):
        raise ArgumentError(
            f"max_unpool3d: expected 3 numbers each, got stride {list(stride)} and padding {list(padding)}"
        )
    return x.like(_unpooled_shape("max_unpool3d", x, indices, 3, output_size))


def _unpooled_shape(what: str, x: TensorSpec, indices: TensorSpec, spatial: int, output_size: Sizes) -> Shape:
    check_any_dtype(what, indices, {torch.int64})
    if not same_shape(x.shape, indices.shape):
        raise ShapeMismatch(f"{what}: shape of indices {indices} does not match {x}")
    return _adaptive_shape(what, x, spatial, output_size)


for _spatial in (2, 3):
    _register_max_pool(_spatial)
    _register_avg_pool(_spatial)
    _register_adaptive(_spatial)
    _register_fractional(_spatial)


# --- one dimension ------------------------------------------------------------------------------------------


@decomposition("max_pool1d_with_indices")
def decompose_max_pool1d_with_indices(
    x: Tensor,
    kernel_size: object,
    stride: object = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """As the pooling of an image of one row."""
    size, step, pad, spread = ([start, *numbers] for start, numbers in zip(
        (1, 1, 0, 1), (kernel_size, stride or kernel_size, padding, dilation), strict=True
    ))  # fmt: skip
    output, indices = aten.max_pool2d_with_indices(x.unsqueeze(-2), size, step, pad, spread, ceil_mode)
    return output.squeeze(-2), indices.squeeze(-2)


@decomposition("max_pool1d")
def decompose_max_pool1d(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    output: Tensor = aten.max_pool1d_with_indices(x, *args, **kwargs)[0]
    return output


# --- sizes that are given -----------------------------------------------------------------------------------


def _register_pooling(dimensions: int) -> None:
    op = getattr(aten, f"_adaptive_avg_pool{dimensions}d").default

    @decomposition(f"adaptive_avg_pool{dimensions}d")
    def adaptive_avg_pool(x: Tensor, output_size: Any) -> object:
        """C++ adds a guard on each size being 1. Only whether all are matters: pooling to one cell is a mean."""
        sizes = list(output_size)
        if len(sizes) != dimensions or not any(isinstance(size, torch.SymInt) for size in sizes):
            return NotImplemented
        if any(size < 0 for size in sizes) or functools.reduce(operator.and_, [size == 1 for size in sizes]):
            return NotImplemented
        return op(x, sizes)


for _dimensions in (2, 3):
    _register_pooling(_dimensions)
