"""Numbers that a dtype can't hold are refused where the kernel refuses them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode
from understudy.errors import ArgumentError

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
NUMBERS = (
    0, 1, -1, True, 127, 128, -128, -129, 255, 256, -255, -256, 65504, 65505.0, 65520.0, 1e5, 2**31, -(2**31) - 1, 2**63 - 1,
    448.0, 449.0, 3.4e38, 3.5e38, 1e300, float("inf"), -float("inf"), float("nan"), 1j, 2 + 0j, 1e39 + 1j, -0.5, 2.0**63,
)  # fmt: skip

STORING: dict[str, Callable[[Any, torch.dtype], torch.Tensor]] = {
    "full": lambda number, dtype: torch.full((2,), number, dtype=dtype),
    "full_like": lambda number, dtype: torch.full_like(torch.empty(2, dtype=dtype), number),
    "new_full": lambda number, dtype: torch.empty(2, dtype=dtype).new_full((2,), number),
    "fill_": lambda number, dtype: torch.empty(2, dtype=dtype).fill_(number),
    "scalar_tensor": lambda number, dtype: torch.scalar_tensor(number, dtype=dtype),
    "pad": lambda number, dtype: torch.constant_pad_nd(torch.empty(2, dtype=dtype), (1, 1), number),
    "no pad": lambda number, dtype: torch.constant_pad_nd(torch.empty(2, dtype=dtype), (0, -1), number),
}
COMPUTING: dict[str, Callable[[Any, torch.dtype], torch.Tensor]] = {
    "masked_fill": lambda number, dtype: torch.empty(2, dtype=dtype).masked_fill(torch.ones(2) > 0, number),
    "index_fill": lambda number, dtype: torch.empty(2, dtype=dtype).index_fill(0, torch.tensor([0]), number),
    "scatter": lambda number, dtype: torch.empty(2, dtype=dtype).scatter(0, torch.tensor([0]), number),
    "linspace": lambda number, dtype: torch.linspace(0, number, 3, dtype=dtype),
}


def outcome(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception:
        return "refused"
    return "taken"


@pytest.mark.parametrize("name", [*STORING, *COMPUTING])
def test_as_the_kernel(name: str) -> None:
    function = {**STORING, **COMPUTING}[name]
    dtypes = [dtype for dtype in DTYPES if name in STORING or "float8" not in str(dtype)]
    for dtype, number in itertools.product(dtypes, NUMBERS):
        expected = outcome(lambda: function(number, dtype))  # noqa: B023
        with FakeTensorMode():
            assert outcome(lambda: function(number, dtype)) == expected, (dtype, number)  # noqa: B023


def test_the_error_names_number_and_dtype() -> None:
    with FakeTensorMode():
        scores = torch.randn(4, 4, dtype=torch.float16, device="cuda")
        with pytest.raises(
            ArgumentError, match=r"masked_fill: -1000000000\.0 can't be stored in torch\.float16"
        ):
            scores.masked_fill(torch.ones(4, 4, dtype=torch.bool, device="cuda"), -1e9)
        with pytest.raises(RuntimeError, match="overflow"):
            scores.clamp(-1e9)


def test_the_meta_device_stores_nothing() -> None:
    with FakeTensorMode():
        assert torch.full((2,), 1e9, dtype=torch.float16, device="meta").shape == (2,)
