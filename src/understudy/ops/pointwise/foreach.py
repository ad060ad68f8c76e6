"""Operators on lists of tensors: `_foreach_*`, which do to every tensor what the operator of that name does to one, and
fused optimizer steps.

Lists hold the parameters of a model, which have few different specs: each combination is inferred once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops import factories as _factories  # noqa: F401  (its rules are used by name)
from understudy.ops.pointwise import unary as _unary  # noqa: F401  (its rules are used by name)
from understudy.ops.pointwise.binary_and_ternary import check_number_fits
from understudy.ops.registry import Rule, rule
from understudy.ops.shared.dtypes import check_dtype
from understudy.ops.variants import check_no_overlap, write_in_place
from understudy.shapes.node import Scalar
from understudy.spec import (
    Same,
    TensorSpec,
    check_expandable,
    default_dtype,
    preserved_copy,
    real_type,
    same_shape,
)

Specs = Sequence[TensorSpec]
MakeListRule = Callable[[str, Rule], Rule]
"""From the name of a list operator, and the rule for one entry, to the rule for lists."""
UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal "
    "round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
).split()

# name of the list operator's overload → name of the operator on one tensor
BINARY_LISTS = {
    "add.List": "add.Tensor",
    "sub.List": "sub.Tensor",
    "mul.List": "mul.Tensor",
    "div.List": "div.Tensor",
    "clamp_max.List": "clamp_max.Tensor",
    "clamp_min.List": "clamp_min.Tensor",
    "maximum.List": "maximum",
    "minimum.List": "minimum",
    "pow.List": "pow.Tensor_Tensor",
}
BINARY_NUMBERS = {
    "add": "add.Scalar",
    "sub": "sub.Scalar",
    "mul": "mul.Scalar",
    "div": "div.Scalar",
    "clamp_max": "clamp_max",
    "clamp_min": "clamp_min",
    "maximum": "clamp_min",
    "minimum": "clamp_max",
    "pow": "pow.Tensor_Scalar",
}
BINARY_TENSOR = {"add.Tensor": "add.Tensor", "mul.Tensor": "mul.Tensor", "div.Tensor": "div.Tensor"}


def each(function: Rule, *lists: Iterable[object]) -> list[Any]:
    """`function` of the first elements, of the second ones, and so on."""
    known: dict[Any, Any] = {}
    results = []
    for arguments in zip(*lists, strict=True):
        # 1, 1.0 and True are equal and have the same hash, but are different arguments.
        key = (arguments, *map(type, arguments))
        if key not in known:
            known[key] = function(*arguments)
        results.append(known[key])
    return results


def check_lists(name: str, first: Specs, *others: Sequence[object]) -> None:
    if not first:
        raise ArgumentError(f"{name}: the list of tensors is empty")
    for other in others:
        if len(other) != len(first):
            raise ArgumentError(f"{name}: expected lists of equal length, got {len(first)} and {len(other)}")


def written(name: str, function: Callable[..., TensorSpec]) -> Rule:
    """`function` with a check that its result can be written into the first argument."""

    def check(target: TensorSpec, *rest: object, **kwargs: object) -> None:
        write_in_place(name, target, function(target, *rest, **kwargs))

    return check


def register(name: str, list_rule: MakeListRule, of: str) -> None:
    """The functional and the in-place variant of a list operator."""
    packet, _, overload = name.partition(".")
    suffix = f".{overload}" if overload else ""
    functional = f"_foreach_{packet}{suffix}"
    in_place = f"_foreach_{packet}_{suffix}"
    rule(functional)(list_rule(functional, rule.by_name(of)))
    run = list_rule(in_place, written(in_place, _in_place_variant(of)))

    @rule(in_place)
    def in_place_rule(*args: object, **kwargs: object) -> None:
        run(*args, **kwargs)


def _in_place_variant(of: str) -> Callable[..., TensorSpec]:
    if of != "abs":
        return cast("Callable[..., TensorSpec]", rule.by_name(of))

    def absolute_in_place(a: TensorSpec) -> TensorSpec:
        check_dtype("abs_", a.dtype, "if")
        return a

    return absolute_in_place


def over_lists(count: int) -> MakeListRule:
    """For operators whose first `count` arguments are lists of one length; other arguments go with each entry."""

    def make(name: str, one: Rule) -> Rule:
        def list_rule(*args: Any, **kwargs: object) -> list[Any]:
            lists, others = args[:count], args[count:]
            check_lists(name, *lists)
            return each(lambda *entries: one(*entries, *others, **kwargs), *lists)

        return list_rule

    return make


def with_value(make: MakeListRule) -> MakeListRule:
    """For rules that take the number after three tensors by its name."""
    return lambda name, one: make(name, lambda a, b, c, value=1: one(a, b, c, value=value))


def with_tensor(name: str, one: Rule) -> Rule:
    def list_rule(tensors: Specs, other: TensorSpec, **kwargs: object) -> list[object]:
        check_lists(name, tensors)
        if other.shape:
            raise ShapeMismatch(f"{name}: expected a 0-dim tensor as other, got {other}")
        return each(lambda a: one(a, other, **kwargs), tensors)

    return list_rule


def ternary_with_tensor(name: str, one: Rule) -> Rule:
    def list_rule(tensors: Specs, first: Specs, second: Specs, values: TensorSpec) -> list[Any]:
        check_lists(name, tensors, first, second)
        if values.ndim != 1 or values.shape[0] != len(tensors) or not values.is_contiguous:
            raise ShapeMismatch(f"{name}: expected {len(tensors)} numbers, got {values}")
        return each(one, tensors, first, second)

    return list_rule


for _name in UNARY:
    register(_name, over_lists(1), _name)
for _name, _of in BINARY_LISTS.items():
    register(_name, over_lists(2), _of)
for _name, _of in BINARY_NUMBERS.items():
    register(f"{_name}.Scalar", over_lists(1), _of)
    register(f"{_name}.ScalarList", over_lists(2), _of)
for _name, _of in BINARY_TENSOR.items():
    register(_name, with_tensor, _of)
for _name in ("addcmul", "addcdiv"):
    register(f"{_name}.Scalar", with_value(over_lists(3)), _name)
    register(f"{_name}.ScalarList", with_value(over_lists(4)), _name)
    register(f"{_name}.Tensor", ternary_with_tensor, _name)
register("lerp.Scalar", over_lists(2), "lerp.Scalar")
register("lerp.ScalarList", over_lists(3), "lerp.Scalar")
register("lerp.List", over_lists(3), "lerp.Tensor")


@rule("_foreach_pow.ScalarAndTensor")
def foreach_pow_of_number(base: object, exponents: Specs) -> list[object]:
    check_lists("_foreach_pow", exponents)
    one = rule.by_name("pow.Scalar")
    return each(lambda exponent: one(base, exponent), exponents)


@rule("_foreach_zero_")
def foreach_zero_in_place(tensors: Specs) -> None:
    check_lists("_foreach_zero_", tensors)


@rule("_foreach_zero")
def foreach_zero(tensors: Specs) -> list[Any]:
    check_lists("_foreach_zero", tensors)
    return each(rule.by_name("zero"), tensors)


@rule("_foreach_copy_")
def foreach_copy_in_place(tensors: Specs, sources: Specs, non_blocking: bool = False) -> None:
    check_lists("_foreach_copy_", tensors, sources)

    def check(target: TensorSpec, source: TensorSpec) -> None:
        check_expandable(source.shape, target.shape, "_foreach_copy_")
        check_no_overlap("_foreach_copy_", target)

    each(check, tensors, sources)


@rule("_foreach_copy")
def foreach_copy(tensors: Specs, sources: Specs, non_blocking: bool = False) -> list[Any]:
    check_lists("_foreach_copy", tensors, sources)
    return each(rule.by_name("copy"), tensors, sources)


@rule("_foreach_clone")
def foreach_clone(tensors: Specs, *, memory_format: torch.memory_format | None = None) -> list[Any]:
    check_lists("_foreach_clone", tensors)
    one = rule.by_name("clone")
    return each(lambda a: one(a, memory_format=memory_format), tensors)


@rule("_foreach_norm.Scalar")
def foreach_norm(tensors: Specs, ord: Scalar = 2, dtype: torch.dtype | None = None) -> list[object]:
    check_lists("_foreach_norm", tensors)
    if isinstance(ord, (bool, complex)):
        raise ArgumentError(f"_foreach_norm: expected an int or a float as ord, got {ord!r}")
    check_number_fits("_foreach_norm", ord, default_dtype())
    wants_elements = ord < 0 or ord == math.inf

    def norm(a: TensorSpec) -> TensorSpec:
        if wants_elements and a.is_empty:
            raise ArgumentError(
                f"_foreach_norm: the norm of order {ord} is undefined without elements, got {a}"
            )
        check_dtype("_foreach_norm", a.dtype, "fc")
        if dtype is not None:
            check_dtype("_foreach_norm", dtype, "c" if a.is_complex else "f")
        return a.like((), dtype=real_type(dtype or a.dtype))

    return each(norm, tensors)


@rule("_foreach_mm")
def foreach_mm(tensors: Specs, others: Specs) -> list[Any]:
    check_lists("_foreach_mm", tensors, others)
    return each(rule.by_name("mm"), tensors, others)


@rule("_foreach_max")
def foreach_max(tensors: Specs) -> list[Any]:
    check_lists("_foreach_max", tensors)

    def greatest(a: TensorSpec) -> TensorSpec:
        if a.is_empty:
            raise ShapeMismatch(f"_foreach_max: expected tensors with elements, got {a}")
        check_dtype("_foreach_max", a.dtype, "bif")
        return a.like(())

    return each(greatest, tensors)


# --- Optimizer steps and loss scaling that write into whole lists of tensors at once ------------------------


def check_step(name: str, parameters: Specs, grads: Specs, *states: Specs) -> None:
    """Raise unless all lists have the length of the parameters, or are empty, and the same shapes."""
    check_lists(name, parameters, grads)
    for others in (grads, *states):
        if not others:
            continue
        check_lists(name, parameters, others)
        each(lambda a, b: _check_same_shape(name, a, b), parameters, others)


def _check_same_shape(name: str, a: TensorSpec, b: TensorSpec) -> None:
    if not same_shape(a.shape, b.shape):
        raise ShapeMismatch(f"{name}: {b} does not match the parameter {a}")


@rule("_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr")
def fused_adam(
    parameters: Specs, grads: Specs, exp_avgs: Specs, exp_avg_sqs: Specs, max_exp_avg_sqs: Specs,
    state_steps: Sequence[TensorSpec], **numbers: object,
) -> None:  # fmt: skip
    check_step("_fused_adam_", parameters, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    check_lists("_fused_adam_", parameters, state_steps)


@rule("_fused_adagrad_", "_fused_adagrad_.tensor_lr")
def fused_adagrad(
    parameters: Specs, grads: Specs, state_sums: Specs, state_steps: Sequence[object], **numbers: object
) -> None:
    check_step("_fused_adagrad_", parameters, grads, state_sums)
    check_lists("_fused_adagrad_", parameters, state_steps)


@rule("_fused_sgd_", "_fused_sgd_.tensor_lr")
def fused_sgd(parameters: Specs, grads: Specs, momentum_buffer_list: Specs, **numbers: object) -> None:
    check_step("_fused_sgd_", parameters, grads, momentum_buffer_list)


@rule("_fused_adam", "_fused_adam.tensor_lr", "_fused_adamw", "_fused_adamw.tensor_lr")
def fused_adam_functional(*lists: Specs, **numbers: Any) -> tuple[list[TensorSpec], ...]:
    fused_adam(*lists, **numbers)
    return tuple(each(preserved_copy, tensors) for tensors in lists[:5])


@rule("_fused_adagrad", "_fused_adagrad.tensor_lr")
def fused_adagrad_functional(*lists: Specs, **numbers: Any) -> tuple[list[TensorSpec], ...]:
    fused_adagrad(*lists, **numbers)
    written = lists[:3] if isinstance(numbers.get("lr"), TensorSpec) else lists[:4]
    return tuple(each(preserved_copy, tensors) for tensors in written)


@rule("_fused_sgd", "_fused_sgd.tensor_lr")
def fused_sgd_functional(*lists: Specs, **numbers: Any) -> tuple[list[TensorSpec], ...]:
    fused_sgd(*lists, **numbers)
    return tuple(each(preserved_copy, tensors) for tensors in lists[:3])


@rule("_amp_foreach_non_finite_check_and_unscale_")
def unscale_gradients(grads: Specs, found_inf: TensorSpec, inv_scale: TensorSpec) -> None:
    for one in (found_inf, inv_scale):
        if one.numel != 1:
            raise ShapeMismatch(f"unscaling gradients: {one} must hold one number")
        if not one.is_floating_point:
            raise DtypeError(f"unscaling gradients: {one} must be a float tensor")


@rule("_amp_update_scale_")
def update_scale(
    scale: TensorSpec, growth_tracker: TensorSpec, found_inf: TensorSpec, scale_growth_factor: float,
    scale_backoff_factor: float, growth_interval: int,
) -> Same:  # fmt: skip
    for one in (scale, growth_tracker, found_inf):
        if one.numel != 1:
            raise ShapeMismatch(f"updating the loss scale: {one} must hold one number")
    return Same(0)
