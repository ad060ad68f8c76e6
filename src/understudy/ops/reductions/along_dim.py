"""Along one dimension: running sums, products and extremes, softmax, sorting, and numerical gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.kernel_tables.table import holds
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dims import replace_size, size_at, wrap_dim, wrap_dims
from understudy.spec import TensorSpec, Value, is_integral, preserved_copy, same_shape


@rule("cumsum", "cumprod")
def running_total(spec: TensorSpec, dim: int, *, dtype: torch.dtype | None = None) -> TensorSpec:
    """Always contiguous. Integers accumulate in int64."""
    wrap_dim(dim, spec.ndim)
    if dtype is None:
        dtype = torch.int64 if is_integral(spec.dtype, include_bool=True) else spec.dtype
    return spec.like(dtype=dtype)


@rule("cummax", "cummin")
def running_extreme(spec: TensorSpec, dim: int) -> tuple[TensorSpec, TensorSpec]:
    if not (spec.is_empty and holds("cummax_takes_any_dim_of_empty")):
        wrap_dim(dim, spec.ndim)
    return spec.like(), spec.like(dtype=torch.int64)


@rule("_cummax_helper", "_cummin_helper")
def running_extreme_into(spec: TensorSpec, values: TensorSpec, indices: TensorSpec, dim: int) -> Value:
    wrap_dim(dim, spec.ndim)
    return Value(None)


@rule("logcumsumexp", "_logcumsumexp")
def logcumsumexp(spec: TensorSpec, dim: int) -> TensorSpec:
    wrap_dim(dim, spec.ndim)
    return spec.like()


# --- Softmax and its relatives ------------------------------------------------------------------------------

Dtype = torch.dtype | None


@rule("_softmax", "_log_softmax")
def softmax(x: TensorSpec, dim: int, half_to_float: bool) -> TensorSpec:
    wrap_dim(dim, x.ndim)
    if half_to_float:
        if x.device.type == "cpu":
            raise ArgumentError(f"softmax: half_to_float is not supported on CPU, got {x.dtype}")
        return x.like(dtype=torch.float32)
    return x.like()


@rule("softmax.int", "log_softmax.int")
def softmax_in_dtype(x: TensorSpec, dim: int, dtype: Dtype = None) -> TensorSpec:
    wrap_dim(dim, x.ndim)
    return x.like(dtype=dtype)


@rule("_safe_softmax")
def safe_softmax(x: TensorSpec, dim: int, dtype: Dtype = None) -> TensorSpec:
    return softmax_in_dtype(x, dim, dtype)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def softmax_backward(grad: TensorSpec, output: TensorSpec, dim: int, input_dtype: torch.dtype) -> TensorSpec:
    wrap_dim(dim, grad.ndim)
    if not same_shape(grad.shape, output.shape):
        raise ShapeMismatch(f"softmax backward: {grad} and {output} differ in shape")
    narrowed = grad.dtype is torch.float32 and input_dtype is torch.float16
    if grad.device.type == "cpu" and (narrowed or grad.dtype is not output.dtype):
        raise DtypeError(f"softmax backward: not implemented on CPU for {grad} and {output} to {input_dtype}")
    return grad.like(dtype=torch.float16 if narrowed else grad.dtype)


# --- Sorting: values and indices ----------------------------------------------------------


@rule("sort", "sort.stable")
def sort(
    spec: TensorSpec, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[TensorSpec, TensorSpec]:
    """Both results keep the order of dimensions in memory."""
    wrap_dim(dim, spec.ndim)
    values = preserved_copy(spec)
    return values, values.like(stride=values.stride, dtype=torch.int64)


@rule("topk")
def topk(
    spec: TensorSpec, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[TensorSpec, TensorSpec]:
    dim = wrap_dim(dim, spec.ndim)
    size = size_at(spec, dim)
    if k < 0 or k > size:
        raise ArgumentError(
            f"topk: expected k between 0 and {size}, the size of dimension {dim} of {spec}, got {k}"
        )
    values = spec.like(replace_size(spec.shape, dim, k) if spec.shape else ())
    return values, values.like(dtype=torch.int64)


# --- Gradients of running products: decompositions for symbolic sizes ---------------------------------------

aten = torch.ops.aten
Tensor = torch.Tensor


@decomposition("cumprod_backward")
def decompose_cumprod_backward(grad: Tensor, x: Tensor, dim: int, output: Tensor) -> Any:
    """The operators of C++ in the same order, so that sums are equal bit by bit. C++ reads the size first, without need.

    Before the first zero of a line, the gradient is the sum of all products from there on, divided by the element. For
    the zero itself, it is the sum of the products without it; after it, the gradient is 0. (For second derivatives C++
    loops over the elements.)
    """
    if torch.is_grad_enabled() or x.dim() == 0:
        return NotImplemented
    dim = wrap_dim(dim, x.dim())
    if (x.shape[dim] == 1) | (x.numel() <= 1):
        return grad
    conjugate, output_conjugate = x.conj(), output.conj()
    products = output_conjugate * grad
    zeros = aten.eq.Scalar(x, 0)
    scatters = holds("cumprod_backward_scatters")
    if scatters:
        result = aten.zeros.default(list(x.shape), dtype=grad.dtype, layout=grad.layout, device=grad.device)
    else:
        result = grad.new_zeros(x.shape)
    count = zeros.cumsum(dim)
    is_before = aten.eq.Scalar(count, 0)
    sums = aten.masked_fill.Scalar(products, ~is_before, 0.0).flip(dim).cumsum(dim).flip(dim)
    result = torch.where(is_before, sums.div(conjugate), result)
    is_behind = aten.eq.Scalar(count, 1)
    place = aten.max.dim(is_behind, dim, True)[1]
    if scatters:
        is_first = torch.zeros_like(is_behind).scatter_(dim, place, 1).logical_and_(is_behind)
    else:
        is_first = zeros.logical_and(is_behind)
    is_behind &= ~is_first
    others = aten.masked_fill.Scalar(conjugate, ~is_behind, 1.0).cumprod(dim)
    from_there = aten.masked_fill.Scalar(grad, aten.ne.Scalar(count, 1), 0.0)
    before = output_conjugate.gather(dim, aten.sub.Scalar(place, 1).relu_())
    before = aten.masked_fill_.Scalar(before, aten.eq.Scalar(place, 0), 1.0)
    return torch.where(is_first, (others * from_there).sum(dim, True) * before, result)


# --- numerical gradients (torch.gradient) -------------------------------------------------------------------


@decomposition("vander")
def decompose_vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Tensor:
    """Powers of each element, side by side."""
    if x.dim() != 1 or (N is not None and N < 0):
        return NotImplemented
    count = x.shape[0] if N is None else N
    dtype = torch.promote_types(x.dtype, torch.int64)
    powers = torch.empty((x.shape[0], count), dtype=dtype, layout=x.layout, device=x.device)
    if count > 0:
        powers.select(1, 0).fill_(1)
    if count > 1:
        aten.slice.Tensor(powers, 1, 1).copy_(x.unsqueeze(1))
        aten.slice.Tensor(powers, 1, 1).copy_(aten.slice.Tensor(powers, 1, 1).cumprod(1))
    return powers if increasing else powers.flip((1,))


@decomposition(
    "gradient.scalarint", "gradient.scalararray", "gradient.array", "gradient.scalarrayint", "gradient.scalarrayarray",
    "gradient.tensorarrayint", "gradient.tensorarray",
)  # fmt: skip
def decompose_gradient(
    x: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1
) -> list[Tensor]:
    """`spacing` is one number for all dimensions, or a list of numbers or of tensors of places."""
    dims = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else dim
    if not isinstance(spacing, (list, tuple)):
        spacing = [1.0 if spacing is None else spacing] * len(dims)
    return _gradients(x, spacing, dims, edge_order)


def _gradients(x: Tensor, spacing: Sequence[object], dims: Sequence[int], edge_order: int) -> list[Tensor]:
    if x.dtype is torch.uint8:
        raise DtypeError("gradient: uint8 is not supported")
    if len(spacing) != len(dims):
        raise ArgumentError(f"gradient: {len(dims)} dimensions need as many spacings, got {len(spacing)}")
    if edge_order not in (1, 2):
        raise ArgumentError(f"gradient: expected edge_order 1 or 2, got {edge_order}")
    wrapped = wrap_dims(dims, x.dim())
    for spaces in spacing:
        if isinstance(spaces, Tensor) and spaces.dim() != 1:
            raise ShapeMismatch(f"gradient: expected a vector as spacing, got shape {list(spaces.shape)}")
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


def _even(x: Tensor, dim: int, space: object, edge_order: int) -> Tensor:
    def part(start: int, end: int | None = None) -> Any:
        return aten.slice.Tensor(x, dim, start, end)

    def difference(before: object, after: object) -> Any:
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


def _difference(before: object, after: Any) -> Any:
    return after - before


def _weight_of_nearest(steps: Tensor, at: int, beside: int) -> Any:
    """The weight of the element at an end, from the last step and the one before it. At the front the signs are reversed."""
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
