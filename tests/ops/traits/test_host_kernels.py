"""Memory that CPU kernels take besides their results: as torch's profiler sees it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.report.true_peak import true_peak
from understudy.report.runs import rehearse

Tensor = torch.Tensor
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "a mask in a product": lambda x, mask, count: x * mask,
    "integers in a sum": lambda x, mask, count: x + count,
    "a mask in place": lambda x, mask, count: x.mul_(mask),
    "two dtypes of floats": lambda x, mask, count: x.bfloat16() * x,
    "a result that is cast back": lambda x, mask, count: x.bfloat16().mul_(x),
    "a comparison of dtypes": lambda x, mask, count: x > count,
    "a comparison with a number": lambda x, mask, count: x > 1e-3,
    "integers and a number": lambda x, mask, count: count > 2.5,
    "integers divided": lambda x, mask, count: count / count,
    "integers divided by a number": lambda x, mask, count: count / 2,
    "a root of integers": lambda x, mask, count: count.sqrt(),
    "a choice": lambda x, mask, count: torch.where(mask, x, count),
    "both": lambda x, mask, count: torch.logical_and(mask, x),
    "a mask and a number": lambda x, mask, count: mask * 2,
    "a count": lambda x, mask, count: mask.sum(),
    "any of integers": lambda x, mask, count: count.any(),
    "a norm in another dtype": lambda x, mask, count: torch.linalg.vector_norm(x.bfloat16(), dtype=torch.float32),
    "a running count": lambda x, mask, count: mask.cumsum(0),
    "a remainder": lambda x, mask, count: x % 2,
    "a difference": lambda x, mask, count: 1 - x,
    "bits": lambda x, mask, count: count & 1,
    "an expanded mask": lambda x, mask, count: torch.zeros(3, 100) * mask.expand(3, 100),
    "a number in place": lambda x, mask, count: x.add_(1),
    "a complex number": lambda x, mask, count: x.to(torch.complex128) * 2j,
    "a copy": lambda x, mask, count: x.copy_(count),
    "a filled mask": lambda x, mask, count: x.masked_fill(mask, 0.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_copies_of_operands(name: str) -> None:
    def program() -> None:
        CALLS[name](torch.zeros(100), torch.zeros(100, dtype=torch.bool), torch.ones(100, dtype=torch.long))

    assert rehearse(program).peak.allocated_bytes == true_peak(program)
