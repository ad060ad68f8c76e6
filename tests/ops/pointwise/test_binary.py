from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import understudy.ops.pointwise.binary_and_ternary as binary
from tests.ops.grid import DTYPES, binary_calls, check_all, flat, layouts, overloads
from tests.oracle.real import check_rule

TABLES = (binary.COMMON_DTYPE, binary.FLOAT_RESULT, binary.BOOL_RESULT)
ENTRIES = [
    binary.overload(name, overload)
    for table in TABLES
    for _, overload_names, names in table
    for name in names.split()
    for overload in overload_names
] + [
    "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Tensor", "rsub.Scalar", "pow.Tensor_Tensor",
    "pow.Tensor_Scalar", "pow.Scalar", "heaviside", "complex", "polar",
]  # fmt: skip
NUMBERS = (2, 2.0, True, 1j)
EXTRA = (torch.float16, torch.float64, torch.uint8, torch.complex32)


def calls(op: Any) -> Any:
    """Operands for an overload: two tensors, or a tensor and a number in the order of its schema."""
    first, second = (str(a.type) for a in op._schema.arguments[:2])
    if first == second == "Tensor":
        yield from binary_calls()
        for dtype in EXTRA:
            yield flat(dtype)[:3], flat(dtype)[0]
            yield flat(dtype)[:3], flat(torch.float32)[:3]
            yield flat(torch.int64)[:3], flat(dtype)[:3]
        return
    for dtype, number in itertools.product((*DTYPES, *EXTRA), NUMBERS):
        for x in layouts(dtype):
            yield (x, number) if first == "Tensor" else (number, x)


@pytest.mark.parametrize("name", ENTRIES)
def test_against_reality(name: str) -> None:
    (op,) = overloads(name)
    check_all(op, calls(op))


@pytest.mark.parametrize("mode", [None, "floor", "trunc", "wrong"])
def test_division_with_rounding(mode: str | None) -> None:
    for op in overloads("div.Tensor_mode", "div.Scalar_mode"):
        check_all(op, calls(op), rounding_mode=mode)


@pytest.mark.parametrize("alpha", [1, 2, 1.0, 2.5, True, 1j])
def test_alpha(alpha: Any) -> None:
    for op in overloads("add.Tensor", "sub.Tensor", "rsub.Tensor"):
        for dtype in DTYPES:
            x = flat(dtype)[:4]
            check_rule(op, x, x, alpha=alpha)
    for op in overloads("add.Scalar", "sub.Scalar", "rsub.Scalar"):
        for dtype in DTYPES:
            check_rule(op, flat(dtype)[:4], 3, alpha)


@pytest.mark.parametrize(
    "name",
    [
        "add_.Tensor",
        "mul_.Tensor",
        "div_.Tensor",
        "eq_.Tensor",
        "logical_and_",
        "pow_.Tensor",
        "floor_divide_.Tensor",
        "__ilshift__.Tensor",
    ],
)
def test_in_place(name: str) -> None:
    (op,) = overloads(name)
    check_all(op, ((x.clone(), y.clone()) for x, y in binary_calls()))


def test_numbers_for_tensors() -> None:
    for op in overloads("add.Tensor", "mul.Tensor", "div.Tensor", "maximum"):
        for x in layouts(torch.float32):
            if op._overloadname == "Tensor":
                check_rule(op, x, 2.5)
                check_rule(op, x, 2)


def test_negative_powers() -> None:
    (op,) = overloads("pow.Tensor_Scalar")
    for dtype in DTYPES:
        for exponent in (-1, -1.0, 0, 1j, 0.5, 1):
            check_all(op, ((x, exponent) for x in layouts(dtype)))
    (op,) = overloads("pow.Scalar")
    for base in (1, 0, -2.0):
        check_all(op, ((base, x) for dtype in DTYPES for x in layouts(dtype)))
