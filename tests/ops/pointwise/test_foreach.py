from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)  # noqa: F401  (registers)
import understudy.ops.pointwise.foreach as foreach
from tests.ops.grid import DTYPES, layouts, overloads
from tests.oracle.real import check_rule

aten = torch.ops.aten
NUMBERS = (2, 2.5, True)


def lists(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [x for dtype in dtypes for x in layouts(dtype)]


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unary(dtype: torch.dtype) -> None:
    for name in foreach.UNARY:
        functional, in_place = overloads(f"_foreach_{name}", f"_foreach_{name}_")
        check_rule(functional, lists(dtype))
        check_rule(in_place, clones(lists(dtype)))
        check_rule(functional, [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_binary(dtype: torch.dtype) -> None:
    tensors = lists(dtype)
    for name in foreach.BINARY_LISTS:
        functional, in_place = overloads(f"_foreach_{name}", "_foreach_" + name.replace(".", "_."))
        for others in (tensors, lists(torch.float32), tensors[1:]):
            check_rule(functional, tensors, others)
            check_rule(in_place, clones(tensors), others)
    for name, number in itertools.product(foreach.BINARY_NUMBERS, NUMBERS):
        functional, in_place = overloads(f"_foreach_{name}.Scalar", f"_foreach_{name}_.Scalar")
        check_rule(functional, tensors, number)
        check_rule(in_place, clones(tensors), number)
        functional, in_place = overloads(f"_foreach_{name}.ScalarList", f"_foreach_{name}_.ScalarList")
        check_rule(functional, tensors, [number] * len(tensors))
        check_rule(in_place, clones(tensors), [number] * len(tensors))
    for name in foreach.BINARY_TENSOR:
        functional, in_place = overloads(f"_foreach_{name}", "_foreach_" + name.replace(".", "_."))
        for other in (torch.tensor(2.0), torch.tensor(2), torch.tensor([2.0])):
            check_rule(functional, tensors, other)
            check_rule(in_place, clones(tensors), other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ternary(dtype: torch.dtype) -> None:
    tensors = lists(dtype)
    count = len(tensors)
    for name in ("addcmul", "addcdiv"):
        for suffix, value in (("Scalar", 2), ("ScalarList", [2.0] * count), ("Tensor", torch.ones(count))):
            functional, in_place = overloads(f"_foreach_{name}.{suffix}", f"_foreach_{name}_.{suffix}")
            check_rule(functional, tensors, tensors, tensors, value)
            check_rule(in_place, clones(tensors), tensors, tensors, value)
    for suffix, weight in (("Scalar", 0.5), ("List", tensors), ("ScalarList", [0.5] * count)):
        functional, in_place = overloads(f"_foreach_lerp.{suffix}", f"_foreach_lerp_.{suffix}")
        check_rule(functional, tensors, tensors, weight)
        check_rule(in_place, clones(tensors), tensors, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_others(dtype: torch.dtype) -> None:
    tensors = lists(dtype)
    for op in overloads("_foreach_zero", "_foreach_clone", "_foreach_norm.Scalar", "_foreach_max"):
        check_rule(op, tensors)
        check_rule(op, tensors[:3])
    check_rule(aten._foreach_zero_.default, clones(tensors))
    check_rule(aten._foreach_norm.Scalar, tensors, 1, torch.float64)
    check_rule(aten._foreach_copy_.default, clones(tensors), tensors)
    check_rule(aten._foreach_copy.default, tensors, tensors)
    check_rule(aten._foreach_copy_.default, clones(tensors), lists(torch.float32))
    check_rule(aten._foreach_copy_.default, clones(tensors), tensors[::-1])
    check_rule(aten._foreach_pow.ScalarAndTensor, 2.0, tensors)


def test_numbers_that_are_equal_but_not_the_same() -> None:
    tensors = [torch.ones(2, dtype=torch.int64) for _ in range(3)]
    scalars: list[Any] = [1, 1.0, True]
    check_rule(aten._foreach_mul.ScalarList, tensors, scalars)


def test_optimizer_steps() -> None:
    parameters = [torch.ones(2, 3), torch.ones(4)]

    def state() -> list[torch.Tensor]:
        return [torch.zeros_like(p) for p in parameters]

    steps = [torch.tensor(1.0) for _ in parameters]
    adam: dict[str, Any] = {
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    for name in ("_fused_adam_", "_fused_adamw_"):
        op, with_tensor = overloads(name, f"{name}.tensor_lr")
        check_rule(op, parameters, state(), state(), state(), [], steps, lr=0.1, **adam)
        (functional,) = overloads(name.removesuffix("_"))
        check_rule(functional, parameters, state(), state(), state(), [], steps, lr=0.1, **adam)
        check_rule(
            with_tensor, parameters, state(), state(), state(), [], steps, lr=torch.tensor(0.1), **adam
        )
    sgd: dict[str, Any] = {
        "weight_decay": 0.0,
        "momentum": 0.9,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
        "is_first_step": False,
    }
    check_rule(aten._fused_sgd_.default, parameters, state(), state(), lr=0.1, **sgd)
    check_rule(aten._fused_sgd_.tensor_lr, parameters, state(), state(), lr=torch.tensor(0.1), **sgd)
    check_rule(aten._fused_adagrad_.default, parameters, state(), state(), steps, lr=0.1, lr_decay=0.0,
               weight_decay=0.0, eps=1e-8, maximize=False)  # fmt: skip


def test_loss_scaling() -> None:
    unscale, update = overloads("_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_")
    check_rule(unscale, [torch.ones(2), torch.ones(3)], torch.zeros(1), torch.ones(1))
    check_rule(unscale, [torch.ones(2)], torch.zeros(2), torch.ones(1))
    check_rule(update, torch.ones(1), torch.ones(1, dtype=torch.int32), torch.zeros(1), 2.0, 0.5, 10)
