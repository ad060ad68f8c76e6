"""Least squares: the results have the sizes and strides of the real ones, where the rank does not decide about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from understudy import FakeTensorMode
from understudy.errors import DynamicOutputShapeException, ShapeMismatch


def facts(of: tuple[int, ...], right: tuple[int, ...], driver: str | None, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(0)
    results = torch.linalg.lstsq(torch.randn(of, dtype=dtype), torch.randn(right, dtype=dtype), driver=driver)
    return [(tuple(result.shape), result.stride(), result.dtype) for result in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("driver", [None, "gels", "gelsy", "gelsd", "gelss"])
@pytest.mark.parametrize(
    ("of", "right"),
    [((4, 3), (4, 2)), ((3, 3), (3, 2)), ((2, 3), (2, 1)), ((2, 4, 3), (2, 4, 2)), ((2, 3, 3), (2, 3)), ((2, 1, 3, 3), (1, 4, 3, 2))],
)  # fmt: skip
def test_as_the_kernel(
    of: tuple[int, ...], right: tuple[int, ...], driver: str | None, dtype: torch.dtype
) -> None:
    expected = facts(of, right, driver, dtype)
    with FakeTensorMode():
        if driver in ("gelsd", "gelss") and of[-2] > of[-1]:
            with pytest.raises(DynamicOutputShapeException):
                facts(of, right, driver, dtype)
        else:
            assert facts(of, right, driver, dtype) == expected


def test_gradients_and_refusals() -> None:
    with FakeTensorMode():
        a = torch.randn(4, 3, requires_grad=True)
        torch.linalg.lstsq(a, torch.randn(4, 2)).solution.sum().backward()
        assert a.grad is not None
        assert a.grad.shape == (4, 3)
        with pytest.raises(ShapeMismatch, match="number of rows"):
            torch.linalg.lstsq(a, torch.randn(5, 2))
