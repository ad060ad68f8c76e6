from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import understudy.ops.random as random_rules
from tests.ops.grid import MORE_DTYPES, check_all, flat, layouts, overloads, pairs
from tests.oracle.real import check_rule

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMBERS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "uniform_": ((), (0.0, 2.0), (2.0, 0.0)),
    "normal_": ((), (0.0, 2.0), (0.0, -1.0)),
    "random_": ((),),
    "random_.to": ((2,), (0,), (300,)),
    "random_.from": ((0, 2), (0, None), (3, 2), (-1, 2)),
    "exponential_": ((), (2.0,), (-1.0,)),
    "geometric_": ((0.5,), (1.5,)),
    "cauchy_": ((), (0.0, -1.0)),
    "log_normal_": ((), (0.0, -1.0)),
    "bernoulli_.float": ((0.5,), (1.5,)),
}


@pytest.mark.parametrize("functional, in_place", [row[:2] for row in random_rules.FILLS])
def test_fills(functional: str, in_place: str) -> None:
    (fill_,) = overloads(in_place)
    for dtype, numbers in itertools.product(MORE_DTYPES, NUMBERS[in_place]):
        for x in layouts(dtype):
            if x.numel() == 0 and dtype.is_complex:
                continue  # eager is not of one mind whether wrong bounds matter here
            check_rule(fill_, x.clone(), *numbers)
            if functional:
                check_rule(overloads(functional)[0], x, *numbers)
    check_rule(fill_, flat(torch.float32)[:1].expand(3), *NUMBERS[in_place][0])


def test_factories() -> None:
    for dtype in (None, *MORE_DTYPES):
        options = {} if dtype is None else {"dtype": dtype}
        for op in overloads("rand", "randn"):
            check_all(op, [([2, 3],), ([],), ([0],), ([-1],)], **options)
        check_all(aten.randint.default, [(2, [2]), (0, [2]), (300, [2])], **options)
        check_all(aten.randint.low, [(0, 2, [2]), (3, 2, [2]), (-1, 1, [2])], **options)
        check_all(aten.randperm.default, [(1,), (0,), (-1,)], **options)
        check_all(aten.normal.float_float, [(0.0, 1.0, [2]), (0.0, -1.0, [2])], **options)


def test_like() -> None:
    for dtype in MORE_DTYPES:
        for x in layouts(dtype):
            for op in overloads("rand_like", "randn_like"):
                check_rule(op, x)
                check_rule(op, x, dtype=torch.bfloat16)
                check_rule(op, x, memory_format=torch.contiguous_format)
            check_rule(aten.randint_like.default, x, 2)
            check_rule(aten.randint_like.low_dtype, x, 0, 2)
            check_rule(aten.randint_like.Tensor, x, torch.tensor(2))


def test_from_parameters() -> None:
    for dtype in MORE_DTYPES:
        for x in layouts(dtype):
            check_all(aten.bernoulli.default, [(x,)])
            check_all(aten.bernoulli.p, [(x, 0.5), (x, 1.5)])
            check_all(aten.poisson.default, [(x,)])
            check_all(aten._standard_gamma.default, [(x,)])
            check_all(aten.normal.Tensor_float, [(x, 1.0), (x, -1.0)])
            check_all(aten.normal.float_Tensor, [(1.0, x)])
    for a, b in itertools.product((torch.float32, torch.float64, torch.int64), repeat=2):
        check_all(aten.binomial.default, pairs(a, b))
        check_all(aten.bernoulli.Tensor, pairs(a, b))
    for a, b in itertools.product(FLOATS, repeat=2):
        check_all(aten.normal.Tensor_Tensor, pairs(a, b))


def test_multinomial() -> None:
    for dtype in MORE_DTYPES:
        for x in layouts(dtype):
            check_all(aten.multinomial.default, [(x, 2), (x, 0), (x, 50), (x, 50, True)])


def test_dropout() -> None:
    for dtype in MORE_DTYPES:
        for x in layouts(dtype):
            for train in (True, False, None):
                check_all(aten.native_dropout.default, [(x, 0.5, train), (x, 1.5, train), (x, 0.0, train)])
            mask = torch.ones_like(x, dtype=torch.bool)
            check_all(aten.native_dropout_backward.default, [(x, mask, 2.0)])
