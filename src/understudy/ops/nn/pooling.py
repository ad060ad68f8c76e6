"""Pooling over windows. Whether a result keeps a channels-last format differs between the kernels: see the tables.

Pooling to symbolic sizes: the schemas of some operators have plain integers for the output's size, so C++ would
specialise a symbol. They are called without C++: the mode is called directly, below autograd, and an
`autograd.Function` adds the gradient.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy import _torch
from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.batching import BatchLevel, at_one_level, batching_rule
from understudy.ops.shared.decompositions import decomposition, decomposition_at_any_level
from understudy.ops.shared.dims import for_each
from understudy.ops.shared.dtypes import (
    FLOATS,
    INTEGERS,
    check_any_dtype,
    check_cpu_dtype,
    check_one_dtype,
)
from understudy.ops.shared.layouts import looks_channels_last, suggested_strides
from understudy.shapes.node import Shape, Size, Sizes
from understudy.shapes.sizes import smaller
from understudy.spec import TensorSpec, same_shape, spec_of

Function = Callable[..., object]
aten = torch.ops.aten
Tensor = torch.Tensor



def _check_input(what: str, x: TensorSpec, spatial: int) -> None:
    """(channels, …) or (batch, channels, …), where only the batch may be empty."""
    if x.ndim not in (spatial + 1, spatial + 2):
        raise ShapeMismatch(f"{what}: expected {spatial + 1} or {spatial + 2} dimensions, got {x}")
    if any(size == 0 for size in x.shape[x.ndim - spatial - (x.ndim == spatial + 2) :]):
        raise ShapeMismatch(f"{what}: {x} has an empty dimension other than the batch")


def _place_result(x: TensorSpec, shape: Shape, keeps_format: bool, dtype: torch.dtype | None = None) -> TensorSpec:
    stride = suggested_strides(shape, x) if keeps_format else None
    return x.like(shape, stride=stride, dtype=dtype)


def _keeps_format(x: TensorSpec, spatial: int, kernel_keeps: bool) -> bool:
    return kernel_keeps and x.ndim == spatial + 2


# --- sliding windows


def window_count(
    size: Size, kernel: Size, stride: Size, padding: Size,
    dilation: Size, ceil_mode: bool,
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
        raise ArgumentError(f"{what}: padding {padding} is negative or more than half of the kernel {kernel}")
    lead = x.shape[: x.ndim - spatial]
    if lead[-1] == 0:
        raise ShapeMismatch(f"{what}: {x} has no channels")
    counts = [
        window_count(*numbers, ceil_mode)
        for numbers in zip(x.shape[x.ndim - spatial :], kernel, stride, padding, dilation, strict=True)
    ]
    if any(count < 1 for count in counts):
        raise ShapeMismatch(f"{what}: the result of {x} would have sizes {counts}")
    return (*lead, *counts)


SMALL_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16})


def _check_positions(what: str, x: TensorSpec) -> None:
    """Channels last, the kernel counts positions in the dtype of the numbers."""
    if looks_channels_last(x) and math.prod(x.shape[2:]) > torch.iinfo(x.dtype).max:
        raise ArgumentError(f"{what}: channels last, {x} has more positions than its dtype can count")


def _register_max_pool(spatial: int) -> None:
    name = f"max_pool{spatial}d"

    @rule(f"{name}_with_indices")
    def max_pool_with_indices(
        x: TensorSpec, kernel_size: Sizes, stride: Sizes = (), padding: object = 0, dilation: object = 1,
        ceil_mode: bool = False,
    ) -> tuple[TensorSpec, TensorSpec]:  # fmt: skip
        check_cpu_dtype(name, x, FLOATS | INTEGERS)
        shape = _pooled_shape(name, x, spatial, kernel_size, stride, padding, dilation, ceil_mode)
        if spatial == 3 and x.ndim == 4 and looks_channels_last(x) and x.device.type == "cpu":
            raise ArgumentError(f"{name}: {x} is in the channels-last format of 2-D images")
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
        raise ShapeMismatch(f"{what}: {grad} is no gradient for a result of shape {list(shape)}")
    if indices is not None and not same_shape(indices.shape, grad.shape):
        raise ShapeMismatch(f"{what}: {indices} are no indices for {grad}")
    check_one_dtype(what, grad, x)
    check_cpu_dtype(what, x, FLOATS)


AVERAGED = {2: FLOATS | {torch.int64}, 3: {torch.float32, torch.float64, torch.int64}}


def _register_avg_pool(spatial: int) -> None:
    name = f"avg_pool{spatial}d"
    keeps_format = spatial == 2

    def shape_of(
        x: TensorSpec, kernel: object, stride: object, padding: object, ceil_mode: bool, divisor: object
    ) -> Shape:
        check_cpu_dtype(name, x, AVERAGED[spatial])
        if divisor == 0:
            raise ArgumentError(f"{name}: a divisor of 0")
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
            raise ShapeMismatch(f"{name} backward: {grad} is no gradient for a result of shape {list(shape)}")
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
        raise ArgumentError(f"{what}: output_size {list(output_size)} has not {spatial} numbers")
    if any(size < 0 for size in output_size):
        raise ArgumentError(f"{what}: output_size {list(output_size)} has a negative number")
    return (*x.shape[: x.ndim - spatial], *output_size)


def _check_cells(name: str, grad: TensorSpec) -> None:
    """Pooling to an empty result is allowed, but has no gradient."""
    if any(size == 0 for size in grad.shape[1:]):
        raise ShapeMismatch(f"{name} backward: there is nothing in {grad}")


def _register_adaptive(spatial: int) -> None:
    keeps_format = spatial == 2
    name, max_name = f"_adaptive_avg_pool{spatial}d", f"adaptive_max_pool{spatial}d"

    @rule(name)
    def adaptive_avg_pool(x: TensorSpec, output_size: Sizes) -> TensorSpec:
        check_cpu_dtype(name, x, FLOATS)
        shape = _adaptive_shape(name, x, spatial, output_size, channels_may_miss=spatial == 2)
        return _place_result(x, shape, _keeps_format(x, spatial, keeps_format))

    @rule(f"{name}_backward")
    def adaptive_avg_pool_backward(grad: TensorSpec, x: TensorSpec) -> TensorSpec:
        _check_gradient(name, grad, x)
        _check_cells(name, grad)
        if grad.ndim != x.ndim or not same_shape(grad.shape[: x.ndim - spatial], x.shape[: x.ndim - spatial]):
            raise ShapeMismatch(f"{name} backward: {grad} is no gradient for a pooled {x}")
        return _place_result(x, x.shape, _keeps_format(x, spatial, keeps_format))

    @rule(max_name)
    def adaptive_max_pool(x: TensorSpec, output_size: Sizes) -> tuple[TensorSpec, TensorSpec]:
        check_cpu_dtype(max_name, x, FLOATS)
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
        check_cpu_dtype(name, x, FLOATS)
        shape = _adaptive_shape(name, x, spatial, output_size)
        kernel = for_each(kernel_size, spatial, name)
        for size, made, width in zip(x.shape[x.ndim - spatial :], output_size, kernel, strict=True):
            # In three dimensions, eager requires one more.
            if made + width - 1 > (size if spatial == 2 else size - 1):
                raise ShapeMismatch(f"{name}: {made} windows of {width} do not fit into {size} of {x}")
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
        raise ArgumentError(f"max_unpool3d: stride {list(stride)} and padding {list(padding)} of 3 numbers")
    return x.like(_unpooled_shape("max_unpool3d", x, indices, 3, output_size))


def _unpooled_shape(
    what: str, x: TensorSpec, indices: TensorSpec, spatial: int, output_size: Sizes
) -> Shape:
    check_any_dtype(what, indices, {torch.int64})
    if not x.is_empty:
        check_cpu_dtype(what, x, FLOATS)
    if not same_shape(x.shape, indices.shape):
        raise ShapeMismatch(f"{what}: {indices} are no indices for {x}")
    return _adaptive_shape(what, x, spatial, output_size)


for _spatial in (2, 3):
    _register_max_pool(_spatial)
    _register_avg_pool(_spatial)
    _register_adaptive(_spatial)
    _register_fractional(_spatial)


def _make_pooling_rule(op: Any) -> Function:
    """A batching rule for planes: the batch of vmap is folded into the batch dimension, or becomes it."""

    @at_one_level
    def rule(level: BatchLevel, *args: Any) -> Any:
        has_entries = args[0].dim() == PLANES_WITH_ENTRIES
        tensors = [level.inside(arg) if isinstance(arg, torch.Tensor) else None for arg in args]
        outer = level.inside(args[0]).shape[:2]
        if has_entries:
            tensors = [None if tensor is None else tensor.flatten(0, 1) for tensor in tensors]
        given = [arg if tensor is None else tensor for arg, tensor in zip(args, tensors, strict=True)]
        found = op(*given)
        results = found if isinstance(found, tuple) else (found,)
        if has_entries:
            results = tuple([result.reshape(*outer, *result.shape[1:]) for result in results])
        return results if isinstance(found, tuple) else results[0]

    return rule


for _name in ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"):
    batching_rule(_name)(_make_pooling_rule(getattr(aten, _name)))
    batching_rule(f"{_name}_backward")(_make_pooling_rule(getattr(aten, f"{_name}_backward")))


PLANES_WITH_ENTRIES = 4


TO_INTEGERS = ("adaptive_max_pool2d", "adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d")
"""Operators whose schemas take the output's size as plain integers."""
DIMENSIONS = {name: 3 if name.endswith("3d") else 2 for name in TO_INTEGERS}


def pool_to_symbols(name: str, args: Sequence[Any]) -> Any:
    """`adaptive_max_pool2d(x, output_size)` and the like; NotImplemented where C++ should answer."""
    x, *others = args
    others = [[value] * DIMENSIONS[name] if type(value) is int else value for value in others]
    if not _is_plain_call(x) or not any(map(_has_symbols, others)):
        return NotImplemented
    if any(isinstance(size, float) for value in others if isinstance(value, (list, tuple)) for size in value):
        raise TypeError(f"{name}: sizes are whole numbers, got {others[0]}")
    if torch.is_grad_enabled() and x.requires_grad:
        return _torch.apply_function(SymbolicPooling, name, x, *others)
    return _call_mode_directly(getattr(aten, name).default, x, *others)


def average_to_symbols(x: Any, output_size: object) -> Any:
    """`adaptive_avg_pool1d`, as the pooling of an image of one row: that operator takes symbols."""
    sizes = output_size if isinstance(output_size, (list, tuple)) else (output_size,)
    if not _is_plain_call(x) or not _has_symbols(sizes) or len(sizes) != 1 or x.dim() not in (2, 3):
        return NotImplemented
    return aten.adaptive_avg_pool2d.default(x.unsqueeze(-2), [1, *sizes]).squeeze(-2)


def scale_sizes(x: Any, ratio: object, dims: int) -> list[object] | None:
    """The last sizes of `x` times a ratio, rounded down; None if none of them is symbolic."""
    if not _is_plain_call(x) or not _has_symbols(x.shape[-dims:]):
        return None
    ratios = ratio if isinstance(ratio, (list, tuple)) else (ratio,) * dims
    if len(ratios) != dims or x.dim() < dims:
        return None
    return [torch.sym_int(size * share) for size, share in zip(x.shape[-dims:], ratios, strict=True)]


def _is_plain_call(x: object) -> bool:
    return spec_of(x) is not None and not _torch.composites_are_observed()


def _has_symbols(value: object) -> bool:
    return isinstance(value, (list, tuple)) and any(isinstance(number, torch.SymInt) for number in value)


class SymbolicPooling(torch.autograd.Function):
    """One call of such an operator."""

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, *others: object) -> Any:
        output, indices = _call_mode_directly(getattr(aten, name).default, x, *others)
        ctx.save_for_backward(x, indices)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)  # indices have no gradient: no zeros for them
        ctx.name = name
        ctx.sizes = [value for value in others if not isinstance(value, Tensor)] if "fractional" in name else []
        ctx.count = len(others)
        return output, indices

    @staticmethod
    def backward(ctx: Any, grad: object, _: object) -> Any:
        x, indices = ctx.saved_tensors
        gradient = _call_mode_directly(getattr(aten, f"{ctx.name}_backward").default, grad, x, *ctx.sizes, indices)
        return None, gradient, *[None] * ctx.count


def _call_mode_directly(op: Callable[..., object], *args: object) -> Any:
    args = tuple(list(value) if isinstance(value, (list, tuple)) else value for value in args)
    return _torch.call_innermost_mode(op, args)


# --- one dimension ------------------------------------------------------------------------------------------


@decomposition("max_pool1d_with_indices")
def decompose_max_pool1d_with_indices(
    x: Tensor, kernel_size: object, stride: object = (), padding: Any = (0,), dilation: Any = (1,), ceil_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """As the pooling of an image of one row."""
    size, step, pad, spread = ([start, *numbers] for start, numbers in zip(
        (1, 1, 0, 1), (kernel_size, stride or kernel_size, padding, dilation), strict=True
    ))  # fmt: skip
    output, indices = aten.max_pool2d_with_indices(x.unsqueeze(-2), size, step, pad, spread, ceil_mode)
    return output.squeeze(-2), indices.squeeze(-2)


def check_pooled_dtype(x: Tensor) -> None:
    spec = spec_of(x)
    if spec is not None:
        check_cpu_dtype("max_pool1d", spec, FLOATS)


@decomposition_at_any_level("max_pool1d")
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
