from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.grid import DTYPES, MORE_DTYPES, binary_calls, check_all, flat, layouts, overloads, pairs
from tests.oracle.real import check_rule

NUMBERS: tuple[Any, ...] = (None, 2, 2.5, True, 1j)


@pytest.mark.parametrize("name", ["addcmul", "addcdiv", "lerp.Tensor"])
def test_three_tensors(name: str) -> None:
    (op,) = overloads(name)
    for a, b, c in itertools.product(DTYPES, repeat=3):
        x, y = next(pairs(a, b))
        check_rule(op, x, y, flat(c)[:3])
        check_rule(op, x, y, flat(c)[0])
    for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.complex32):
        for x, y in pairs(dtype, dtype):
            check_rule(op, x, y, y)
            check_rule(op, y, y, x)
            check_rule(op, x, y, flat(dtype)[0])


@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_value(name: str) -> None:
    (op,) = overloads(name)
    for dtype in DTYPES:
        x = flat(dtype)[:6].view(3, 2).t()
        for value in (2, 2.5, True, 1j):
            check_rule(op, x, x, x, value=value)


def test_lerp_by_number() -> None:
    (op,) = overloads("lerp.Scalar")
    check_all(op, binary_calls(DTYPES, 0.5))


def test_where() -> None:
    (op,) = overloads("where.self")
    for condition in (torch.bool, torch.uint8, torch.float32):
        for x, y in itertools.chain(pairs(torch.float32, torch.float32), pairs(torch.bfloat16, torch.int64)):
            check_rule(op, flat(condition)[0], x, y)
            for mask in (x, y):
                check_rule(op, torch.ones_like(mask, dtype=condition), x, y)
                check_rule(op, flat(condition)[:12].view(4, 3).t(), x, y)
    for a, b in itertools.product(MORE_DTYPES, repeat=2):
        check_rule(op, flat(torch.bool)[:3], flat(a)[:3], flat(b)[:3])
        check_rule(op, flat(torch.bool)[:3], flat(a)[0], flat(b)[:3])


def test_where_with_numbers() -> None:
    mask = flat(torch.bool)[:12].view(4, 3).t()
    for dtype, number in itertools.product(DTYPES, NUMBERS[1:]):
        x = flat(dtype)[:12].view(3, 4)
        check_rule(torch.ops.aten.where.ScalarOther, mask, x, number)
        check_rule(torch.ops.aten.where.ScalarSelf, mask, number, x)
    for a, b in itertools.product(NUMBERS[1:], repeat=2):
        check_rule(torch.ops.aten.where.Scalar, mask, a, b)


BEYOND = [
    (-1, 1),
    (-300, 300),
    (-3, -1),
    (300, 400),
    (-1e9, 1e9),
    (1e39, None),
    (None, 300),
    (-1, None),
    (2**63 - 1, 2**63 - 1),
]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32]
)
def test_clamp_beyond_the_range_of_a_dtype(dtype: torch.dtype) -> None:
    x = flat(dtype)[:3]
    clamp, clamp_min, clamp_max = overloads("clamp", "clamp_min", "clamp_max")
    for low, high in BEYOND:
        check_rule(clamp, x, low, high)
        if low is not None:
            check_rule(clamp_min, x, low)
        if high is not None:
            check_rule(clamp_max, x, high)


def test_clamp() -> None:
    clamp, clamp_tensor, clamp_min, clamp_max, clamp_min_tensor = overloads(
        "clamp", "clamp.Tensor", "clamp_min", "clamp_max", "clamp_min.Tensor"
    )
    for dtype, low, high in itertools.product(MORE_DTYPES, NUMBERS, NUMBERS):
        check_rule(clamp, flat(dtype)[:3], low, high)
        if low is not None:
            check_rule(clamp_min, flat(dtype)[:3], low)
            check_rule(clamp_max, flat(dtype)[:3], low)
    for dtype in (torch.float32, torch.int64):
        for x in layouts(dtype):
            check_rule(clamp, x, 0, 1.5)
            check_rule(clamp_min, x, 0.5)
    for x, y in itertools.islice(binary_calls(), 0, None):
        check_rule(clamp_tensor, x, y)
        check_rule(clamp_tensor, x, None, y)
        check_rule(clamp_tensor, x, y, x)
        check_rule(clamp_min_tensor, x, y)
    check_rule(clamp_tensor, flat(torch.float32))


def test_masked_fill() -> None:
    fill, fill_tensor, in_place = overloads("masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Scalar")
    for dtype, value in itertools.product(DTYPES, NUMBERS[1:]):
        for x, mask in pairs(dtype, torch.bool):
            check_rule(fill, x, mask, value)
            check_rule(in_place, x.clone(), mask, value)
    for dtype in DTYPES:
        check_rule(fill, flat(dtype)[:3], flat(dtype)[:3], 1)
        check_rule(fill_tensor, flat(torch.float32)[:3], flat(torch.bool)[:3], flat(dtype)[0])
    check_rule(fill_tensor, flat(torch.float32)[:3], flat(torch.bool)[:3], flat(torch.float32)[:1])
    check_rule(in_place, flat(torch.float32)[:1].expand(3), flat(torch.bool)[:3], 1)


def test_threshold_and_isclose() -> None:
    threshold, isclose = overloads("threshold", "isclose")
    check_all(threshold, ((x, 0, 1) for dtype in MORE_DTYPES for x in layouts(dtype)))
    for dtype in DTYPES:
        for x, y in pairs(dtype, dtype):
            check_rule(isclose, x, y)
    check_rule(isclose, flat(torch.float32), flat(torch.float64))
    check_rule(isclose, flat(torch.float32), flat(torch.float32), -1.0)
