"""Operators that draw random numbers: their results, their argument checks, and the ranges of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.factories import fresh, like
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition, is_recorded_symbolically
from understudy.ops.shared.dtypes import REDUCED, Check, check_dtype, unless_empty
from understudy.ops.traits.caching import whole_result
from understudy.ops.traits.ranges import Operand, ValueRange, of, round_outwards, single_value, value_range
from understudy.ops.variants import check_no_overlap, exact_out
from understudy.shapes.node import Scalar, Size, Sizes
from understudy.spec import (
    Same,
    TensorSpec,
    broadcast_shapes,
    check_expandable,
    contiguous_strides,
    default_dtype,
    elementwise,
    preserved_copy,
    result_type,
    same_shape,
)

Dtype = torch.dtype
aten = torch.ops.aten


@rule("rand", "rand.generator")
def rand(size: Sizes, *, generator: object = None, dtype: Dtype | None = None, **options: Any) -> TensorSpec:
    dtype = dtype or default_dtype()
    check_dtype("rand", dtype, "fc")
    return fresh(size, dtype, **options)


@rule("randn", "randn.generator")
def randn(size: Sizes, *, generator: object = None, dtype: Dtype | None = None, **options: Any) -> TensorSpec:
    dtype = dtype or default_dtype()
    unless_empty(size, check_dtype, "randn", dtype, "fc")
    return fresh(size, dtype, **options)


@rule("normal.float_float")
def normal_of_numbers(mean: float, std: float, size: Sizes, **options: Any) -> TensorSpec:
    _check_std(mean, std)
    return randn(size, **options)


@rule("randint", "randint.generator")
def randint(high: object, size: Sizes, **options: Any) -> Any:
    return randint_low(0, high, size, **options)


@rule("randint.low", "randint.low_generator")
def randint_low(
    low: object, high: object, size: Sizes, *, generator: object = None, dtype: Dtype | None = torch.int64,
    **options: Any,
) -> Any:  # fmt: skip
    dtype = dtype or default_dtype()
    check_dtype("randint", dtype, "bif")
    _check_bounds(dtype, low, high)
    return fresh(size, dtype, **options)


def _check_bounds(dtype: Dtype, low: Any, high: Any) -> None:
    if high is None:
        return
    if low >= high:
        raise ArgumentError(f"expected low < high, got {low} and {high}")
    if dtype.is_floating_point:
        return
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if low < least or high - 1 > most:
        raise ArgumentError(f"random integers from {low} to {high - 1} do not fit into {dtype}")


@rule("randperm", "randperm.generator")
def randperm(
    n: Size, *, generator: object = None, dtype: Dtype | None = torch.int64, **options: Any
) -> TensorSpec:
    dtype = dtype or default_dtype()
    check_dtype("randperm", dtype, "if")
    return fresh((n,), dtype, **options)


@rule("rand_like", "rand_like.generator")
def rand_like(a: TensorSpec, *, generator: object = None, dtype: Dtype | None = None, **options: Any) -> Any:
    check_dtype("rand_like", dtype or a.dtype, "fc")
    return like(a, dtype=dtype, **options)


@rule("randn_like", "randn_like.generator")
def randn_like(a: TensorSpec, *, generator: object = None, dtype: Dtype | None = None, **options: Any) -> Any:
    unless_empty(a.shape, check_dtype, "randn_like", dtype or a.dtype, "fc")
    return like(a, dtype=dtype, **options)


@rule("randint_like", "randint_like.generator")
def randint_like(a: TensorSpec, high: object, **options: Any) -> Any:
    return randint_like_low(a, 0, high, **options)


@rule("randint_like.low_dtype", "randint_like.low_generator_dtype")
def randint_like_low(
    a: TensorSpec,
    low: object,
    high: object,
    *,
    generator: object = None,
    dtype: Dtype | None = None,
    **options: Any,
) -> Any:
    check_dtype("randint_like", dtype or a.dtype, "bif")
    _check_bounds(dtype or a.dtype, low, high)
    return like(a, dtype=dtype, **options)


@rule("randint_like.Tensor", "randint_like.Tensor_generator")
def randint_like_tensor(
    a: TensorSpec, high: TensorSpec, *, generator: object = None, dtype: Dtype | None = None, **options: Any
) -> Any:
    if high.shape:
        raise ShapeMismatch(f"randint_like: expected a 0-dim tensor as high, got {high}")
    check_dtype("randint_like", dtype or a.dtype, "bif")
    return like(a, dtype=dtype, **options)


def _check_std(mean: float = 0.0, std: float = 1.0) -> None:
    if std < 0:
        raise ArgumentError(f"expected a standard deviation of at least 0, got {std}")


def _check_interval(low: float = 0.0, high: float = 1.0) -> None:
    if low > high:
        raise ArgumentError(f"uniform: expected from <= to, got {low} and {high}")


def _check_width(dtype: Dtype, low: Any = 0.0, high: Any = 1.0) -> None:
    most = torch.finfo(dtype).max
    if not (-most <= low <= most and -most <= high <= most and high - low <= most):
        raise ArgumentError(f"uniform: an interval from {low} to {high} does not fit into {dtype}")


def _check_rate(rate: float = 1.0) -> None:
    if rate <= 0:
        raise ArgumentError(f"exponential: the rate must be positive, got {rate}")


def _check_open_probability(p: float) -> None:
    if not 0 < p < 1:
        raise ArgumentError(f"geometric: the probability must lie between 0 and 1, got {p}")


def _check_scale(centre: float = 0.0, scale: float = 1.0) -> None:
    if scale <= 0:
        raise ArgumentError(f"the width of a distribution must be positive, got {scale}")


def _check_nothing(*_: object) -> None:
    pass


def check_probability(p: float = 0.5) -> None:
    if not 0 <= p <= 1:
        raise ArgumentError(f"expected a probability between 0 and 1, got {p}")


# functional name, in-place name, kinds taken, check of the numbers
FILLS: tuple[tuple[str, str, str, Check], ...] = (
    ("uniform", "uniform_", "fc", _check_interval),
    ("normal_functional", "normal_", "fc", _check_std),
    ("random", "random_", "bif", _check_nothing),
    ("random.to", "random_.to", "bif", _check_nothing),
    ("random.from", "random_.from", "bif", _check_nothing),
    ("exponential", "exponential_", "f", _check_rate),
    ("geometric", "geometric_", "if", _check_open_probability),
    ("cauchy", "cauchy_", "f", _check_scale),
    ("log_normal", "log_normal_", "f", _check_scale),
    ("", "bernoulli_.float", "bif", check_probability),
)


# Where bounds are checked in the tensor's dtype, a wrong dtype raises even for empty tensors.
REFUSES_EMPTY = ("uniform_", "random_.to", "random_.from", "cauchy_")


def _register_fill(functional: str, in_place: str, kinds: str, check: Check) -> None:
    def check_call(a: TensorSpec, numbers: Sequence[Scalar]) -> None:
        if in_place in REFUSES_EMPTY:
            check_dtype(in_place, a.dtype, kinds)
        else:
            unless_empty(a.shape, check_dtype, in_place, a.dtype, kinds)
        check(*numbers)
        if in_place == "uniform_":
            _check_width(a.dtype, *numbers)
        elif in_place == "random_.to":
            _check_bounds(a.dtype, 0, *numbers)
        elif in_place == "random_.from":
            _check_bounds(a.dtype, *numbers)

    def fill(a: TensorSpec, *numbers: Any, generator: object = None) -> TensorSpec:
        check_call(a, numbers)
        return preserved_copy(a)

    def filled_in_place(a: TensorSpec, *numbers: Any, generator: torch.Generator | None = None) -> Same:
        check_call(a, numbers)
        check_no_overlap(in_place, a)
        return Same(0)

    if functional:
        rule(functional)(fill)
    rule(in_place)(filled_in_place)


for _row in FILLS:
    _register_fill(*_row)


@rule("bernoulli")
def bernoulli(a: TensorSpec, *, generator: object = None) -> TensorSpec:
    unless_empty(a.shape, check_dtype, "bernoulli", a.dtype, "f")
    return a.like()


@rule("bernoulli.p")
def bernoulli_p(a: TensorSpec, p: float, *, generator: object = None) -> TensorSpec:
    unless_empty(a.shape, check_dtype, "bernoulli", a.dtype, "bif")
    check_probability(p)
    return a.like()


@rule("bernoulli.Tensor")
def bernoulli_tensor(a: TensorSpec, p: TensorSpec, *, generator: object = None) -> TensorSpec:
    _check_probabilities(a, p)
    return preserved_copy(a)


@rule("bernoulli_.Tensor")
def bernoulli_tensor_in_place(a: TensorSpec, p: TensorSpec, *, generator: object = None) -> Same:
    _check_probabilities(a, p)
    check_no_overlap("bernoulli_", a)
    return Same(0)


def _check_probabilities(a: TensorSpec, p: TensorSpec) -> None:
    unless_empty(a.shape, check_dtype, "bernoulli", a.dtype, "bif")
    unless_empty(a.shape, check_dtype, "bernoulli's probabilities", p.dtype, "f")
    if a.is_floating_point and a.dtype in REDUCED and p.dtype is not a.dtype and p.dtype is not torch.float32:
        raise DtypeError(f"bernoulli: expected probabilities of dtype {a.dtype} or float32, got {p}")
    check_expandable(p.shape, a.shape, "bernoulli's probabilities")


@rule("poisson")
def poisson(a: TensorSpec, generator: object = None) -> TensorSpec:
    check_dtype("poisson", a.dtype, "f")
    return a.like()


@rule("_standard_gamma", "_sample_dirichlet")
def standard_gamma(a: TensorSpec, generator: object = None) -> TensorSpec:
    check_dtype("gamma", a.dtype, "f")
    return a.like()


@rule("binomial")
def binomial(count: TensorSpec, prob: TensorSpec, generator: object = None) -> TensorSpec:
    check_dtype("binomial", count.dtype, "f")
    if count.dtype is not prob.dtype:
        raise DtypeError(f"binomial: {count} and {prob} must have the same dtype")
    result = elementwise((count, prob), count.dtype)
    return count.like() if same_shape(result.shape, count.shape) else result


@rule("normal.Tensor_float")
def normal_tensor_number(mean: TensorSpec, std: float = 1.0, *, generator: object = None) -> TensorSpec:
    _check_std(0.0, std)
    unless_empty(mean.shape, check_dtype, "normal", mean.dtype, "fc")
    return mean.like()


@rule("normal.Tensor_float_out")
def normal_into(mean: TensorSpec, std: float = 1.0, *, generator: object = None, out: TensorSpec) -> Same:
    """Fills `out`, resized to the shape of the means, with noise, and adds the means."""
    _check_std(0.0, std)
    shape = broadcast_shapes(mean.shape, out.shape)
    unless_empty(shape, check_dtype, "normal", out.dtype, "fc")
    return Same(1) if same_shape(shape, out.shape) else Same(1, out.as_view(shape, contiguous_strides(shape)))


@rule("normal.float_Tensor")
def normal_number_tensor(mean: float, std: TensorSpec, *, generator: object = None) -> TensorSpec:
    check_dtype("normal's deviations", std.dtype, "bif")
    unless_empty(std.shape, check_dtype, "normal", std.dtype, "f")
    return std.like()


@rule("normal.Tensor_Tensor")
def normal_tensors(mean: TensorSpec, std: TensorSpec, *, generator: object = None) -> TensorSpec:
    check_dtype("normal", mean.dtype, "fc")
    check_dtype("normal's deviations", std.dtype, "bif")
    return mean.like(broadcast_shapes(mean.shape, std.shape))


MOST_CATEGORIES = 1 << 24
"""Whole numbers up to here are exact in float32."""


@rule("multinomial")
def multinomial(
    weights: TensorSpec, num_samples: Any, replacement: bool = False, *, generator: object = None
) -> TensorSpec:
    if weights.ndim not in (1, 2):
        raise ShapeMismatch(f"multinomial: expected weights of 1 or 2 dimensions, got {weights}")
    check_dtype("multinomial", weights.dtype, "f")
    if num_samples <= 0:
        raise ArgumentError(f"multinomial: num_samples must be positive, got {num_samples}")
    if not replacement and num_samples > weights.shape[-1]:
        raise ArgumentError(
            f"multinomial: can't draw {num_samples} of {weights.shape[-1]} categories without replacement"
        )
    if weights.shape[-1] == 0 and (weights.ndim == 1 or weights.shape[0] != 0):
        raise ArgumentError(f"multinomial: expected at least one category, got {weights}")
    if weights.shape[-1] > MOST_CATEGORIES:
        raise ArgumentError(f"multinomial: {weights} has more than 2^24 categories")
    return weights.like((*weights.shape[:-1], num_samples), dtype=torch.int64)


@rule("dropout")
def dropout(a: TensorSpec, p: float, train: bool) -> Same:
    """Arrives whole in inference mode. Where nothing is dropped, it gives its input, of which torch's own decomposition
    makes a copy."""
    check_probability(p)
    return NotImplemented if train and p != 0 and not a.is_empty else Same(0)


@whole_result("dropout")
def whole_dropout(a: TensorSpec, p: float, train: bool) -> Any:
    """Where something is dropped, C++ multiplies by a mask of the same layout."""
    return elementwise((a, preserved_copy(a)), a.dtype) if train and 0 < p < 1 else NotImplemented


@decomposition("dropout")
def decompose_dropout(x: Tensor, p: float, train: bool) -> Any:
    """On CPU, the operator draws the same numbers as the operators of eager, which takes it on CUDA itself. Where nothing
    is dropped, eager returns its input."""
    is_dropping = train and 0 < p <= 1 and is_recorded_symbolically()
    return aten.native_dropout(x, p, train)[0] if is_dropping else NotImplemented


@rule("native_dropout")
def native_dropout(a: TensorSpec, p: float, train: bool | None) -> tuple[object, ...]:
    if a.is_empty:
        return (Same(0), preserved_copy(a)) if a.device.type == "cpu" else NotImplemented
    mask = preserved_copy(a, torch.bool)
    if train is False:
        return preserved_copy(a), mask
    check_probability(p)
    check_dtype("native_dropout", a.dtype, "fc")
    return elementwise((a, mask), a.dtype), mask


@rule("native_dropout_backward")
def native_dropout_backward(grad: TensorSpec, mask: TensorSpec, scale: float) -> TensorSpec:
    common = result_type(grad, mask)
    scaled = elementwise((grad, mask), common, common)
    dtype = result_type(scaled, scale)
    return elementwise((scaled, scale), dtype, dtype)


exact_out.mark("multinomial.out")


# --- between which numbers they lie


@value_range("rand", "rand_like")
def _range_of_rand(*args: object, **kwargs: object) -> ValueRange:
    return ValueRange(0, math.nextafter(1, 0), False, 0.5)  # without 1


@value_range("_sample_dirichlet")
def _range_of_dirichlet(concentration: Operand, generator: object = None) -> ValueRange:
    """Also of a beta distribution, which is one of two values."""
    count = (
        concentration.spec.shape[-1] if concentration.spec.ndim and not concentration.spec.is_symbolic else 2
    )
    return ValueRange(0, 1, True, 1 / max(count, 1))


@value_range("uniform_", "uniform")
def _range_of_uniform(
    x: Operand, low: float = 0.0, high: float = 1.0, *, generator: object = None
) -> ValueRange:
    return round_outwards(low, high, False, (low + high) / 2, low != 0 or high != 1)


@value_range("randint", "randint_like")
def _range_of_randint(*args: object, **kwargs: object) -> ValueRange | None:
    numbers = [value for value in args if isinstance(value, int)]
    low, high = (0, *numbers)[-2:]
    return ValueRange(low, high - 1, False, (low + high) // 2)


@value_range("random_")
def _range_of_random(x: Operand, *bounds: Any, generator: object = None) -> ValueRange | None:
    if not bounds or any(not isinstance(bound, int) for bound in bounds):
        return None
    low, high = (0, *bounds)[-2:]
    return ValueRange(low, high - 1, False, (low + high) // 2)


@value_range("bernoulli", "bernoulli_")
def _range_of_bernoulli(x: Operand, p: object = None, *, generator: object = None) -> ValueRange:
    chance = of(x if p is None else p)
    if chance.value in (0, 1):
        return single_value(chance.value)
    return ValueRange(0, 1, False, chance.likely)


@value_range("multinomial")
def _range_of_multinomial(x: Operand, *args: object, **kwargs: object) -> ValueRange:
    return ValueRange(0, x.spec.shape[-1] - 1, False)
