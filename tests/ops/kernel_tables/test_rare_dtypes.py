"""8-bit floats and large unsigned integers: what the CPU does not compute, stand-ins do not, either."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode
from understudy.errors import DtypeError

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32)

PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x + x,
    "add a float": lambda x: x + 1.5,
    "mul": lambda x: x * x,
    "mul by a number": lambda x: x * 2.0,
    "div": lambda x: x / x,
    "eq": lambda x: x == x,
    "less": lambda x: operator.lt(x, x),
    "neg": lambda x: -x,
    "relu": lambda x: x.relu(),
    "exp": lambda x: x.exp(),
    "abs": lambda x: x.abs(),
    "square": lambda x: x.square(),
    "clamp": lambda x: x.clamp(0, 1),
    "maximum": lambda x: torch.maximum(x, x),
    "where": lambda x: torch.where(torch.ones(2) > 0, x, x),
    "masked_fill": lambda x: x.masked_fill(torch.ones(2) > 0, 1),
    "isnan": lambda x: x.isnan(),
    "isinf": lambda x: x.isinf(),
    "copy": lambda x: x.clone().copy_(torch.ones(2)),
    "to": lambda x: x.to(torch.float32) + 1,
    "mixed": lambda x: x + torch.ones(2),
    "uniform": lambda x: x.clone().uniform_(),
    "randn": lambda x: torch.randn(2, dtype=x.dtype),
    "arange": lambda x: torch.arange(3, dtype=x.dtype),
    "zeros": lambda x: torch.zeros_like(x),
    "full": lambda x: torch.full((2,), 1, dtype=x.dtype),
}


def outcome(program: Callable[[torch.Tensor], Any], dtype: torch.dtype) -> Any:
    try:
        return program(torch.ones(2).to(dtype)).dtype
    except RuntimeError:
        return "refused"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_the_cpu(name: str, dtype: torch.dtype) -> None:
    expected = outcome(PROGRAMS[name], dtype)
    with FakeTensorMode():
        assert outcome(PROGRAMS[name], dtype) == expected


def test_the_error_says_so_and_other_devices_decide_for_themselves() -> None:
    with FakeTensorMode():
        x = torch.zeros(2, dtype=torch.float8_e4m3fn)
        with pytest.raises(
            DtypeError,
            match=r"add\.Tensor: the CPU kernel does not support \(float8_e4m3fn, float8_e4m3fn\)",
        ):
            x + x
        assert (x.cuda() + x.cuda()).dtype is torch.float8_e4m3fn
