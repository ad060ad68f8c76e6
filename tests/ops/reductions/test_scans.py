"""Scans along a dimension, against the real operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.inputs import all_layouts, filled
from tests.oracle.real import check_rule

aten = torch.ops.aten

SCANS = [aten.cumsum, aten.cumprod, aten.cummax, aten.cummin, aten.logcumsumexp, aten._logcumsumexp]
DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16,
    torch.bool, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("op", SCANS, ids=str)
def test_layouts(op: Any) -> None:
    for tensor in all_layouts():
        for dim in (0, 1, -1, 9):
            check_rule(op.default, tensor, dim)
        if op in (aten.cummax, aten.cummin) and tensor.numel():
            indices = torch.zeros(tensor.shape, dtype=torch.int64)
            check_rule(aten.cummaxmin_backward.default, tensor, tensor, indices, 0)


@pytest.mark.parametrize("op", SCANS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(op: Any, dtype: torch.dtype) -> None:
    check_rule(op.default, filled((3, 4), dtype), 0)
    if op in (aten.cumsum, aten.cumprod):
        check_rule(op.default, filled((3, 4), dtype), 0, dtype=torch.float64)
        check_rule(op.default, filled((3, 4)), 0, dtype=dtype)
        if dtype is not torch.uint16:
            check_rule(getattr(aten, f"{op.__name__}_").default, filled((3, 4), dtype), 0)


def test_out() -> None:
    check_rule(aten.cumsum.out, filled((3, 4)), 0, out=torch.empty(3, 4).t().contiguous().t())
    check_rule(
        aten.cummax.out,
        filled((3, 4)),
        0,
        values=torch.empty(3, 4),
        indices=torch.empty(0, dtype=torch.int64),
    )


def test_helpers() -> None:
    tensor = filled((3, 4))
    indices = torch.zeros(3, 4, dtype=torch.int64)
    check_rule(aten._cummax_helper.default, tensor, torch.empty(3, 4), indices, 0)
