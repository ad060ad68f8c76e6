from __future__ import annotations

import pytest
import torch

import understudy.ops.pointwise.unary as unary
from tests.ops.grid import check_all, layouts, overloads, unary_calls
from tests.oracle.real import check_rule

TABLES = (unary.SAME_DTYPE, unary.FLOAT_RESULT, unary.BOOL_RESULT)
NAMES = [name for table in TABLES for _, names in table for name in names.split()]
OTHERS = ["abs", "angle", "isinf", "deg2rad", "rad2deg", "nan_to_num", "_conj_physical", "gelu", "frexp.Tensor",
          "hardtanh", "relu6"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES + OTHERS)
def test_against_reality(name: str) -> None:
    (op,) = overloads(name)
    check_all(op, unary_calls())


@pytest.mark.parametrize(
    "name", ["abs_", "exp_", "neg_", "relu_", "sigmoid_", "gelu_", "silu_", "bitwise_not_"]
)
def test_in_place(name: str) -> None:
    (op,) = overloads(name)
    check_all(op, ((x.clone(),) for (x,) in unary_calls()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_arguments(dtype: torch.dtype) -> None:
    aten = torch.ops.aten
    for x in layouts(dtype):
        check_rule(aten.polygamma.default, 2, x)
        check_rule(aten.polygamma.default, -1, x)
        check_rule(aten.polygamma_.default, x.clone(), 2)
        check_rule(aten.mvlgamma.default, x + 3, 2)
        check_rule(aten.mvlgamma.default, x + 3, 0)
        check_rule(aten.round.decimals, x, decimals=2)
        check_rule(aten.round.decimals, x, decimals=0)
        check_rule(aten.gelu.default, x, approximate="tanh")
        check_rule(aten.gelu.default, x, approximate="wrong")
        check_rule(aten.hardtanh.default, x, -2.5, 3)
        check_rule(aten.elu.default, x, 2, 3, 4)
        check_rule(aten.softshrink.default, x)
        check_rule(aten.softshrink.default, x, -1)
        check_rule(aten.logit.default, x, 0.1)
    for bounds in ((-1, 3), (-3, -1), (-1.5, 200.5)):
        check_rule(aten.hardtanh.default, torch.ones(2, dtype=torch.uint8), *bounds)
        check_rule(aten.hardtanh.default, torch.ones(2, dtype=torch.int8), *bounds)


def test_conjugated() -> None:
    x = torch.ones(3, 4, dtype=torch.complex64)[:, ::2].conj()
    for op in overloads("exp", "abs", "sgn"):
        check_rule(op, x)
