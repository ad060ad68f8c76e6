"""Optimizer steps and loss scaling that write into whole lists of tensors at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import DtypeError, ShapeMismatch
from understudy.rules.foreach import Specs, check_lists, each
from understudy.rules.registry import rule
from understudy.spec import Same, TensorSpec, preserved_copy, same_shape


def check_step(name: str, parameters: Specs, grads: Specs, *states: Specs) -> None:
    """All lists are as long as the parameters', or empty; gradients and states are as large."""
    check_lists(name, parameters, grads)
    for others in (grads, *states):
        if not others:
            continue
        check_lists(name, parameters, others)
        each(lambda a, b: _check_same_shape(name, a, b), parameters, others)


def _check_same_shape(name: str, a: TensorSpec, b: TensorSpec) -> None:
    if not same_shape(a.shape, b.shape):
        raise ShapeMismatch(f"{name}: {b} does not go with the parameter {a}")


@rule("_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr")
def fused_adam(
    parameters: Specs, grads: Specs, exp_avgs: Specs, exp_avg_sqs: Specs, max_exp_avg_sqs: Specs,
    state_steps: Sequence[Any], **numbers: Any,
) -> None:  # fmt: skip
    check_step("_fused_adam_", parameters, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)
    check_lists("_fused_adam_", parameters, state_steps)


@rule("_fused_adagrad_", "_fused_adagrad_.tensor_lr")
def fused_adagrad(
    parameters: Specs, grads: Specs, state_sums: Specs, state_steps: Sequence[Any], **numbers: Any
) -> None:
    check_step("_fused_adagrad_", parameters, grads, state_sums)
    check_lists("_fused_adagrad_", parameters, state_steps)


@rule("_fused_sgd_", "_fused_sgd_.tensor_lr")
def fused_sgd(parameters: Specs, grads: Specs, momentum_buffer_list: Specs, **numbers: Any) -> None:
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
