"""Forward-mode gradients of stand-ins: dual tensors beside numbers, and the zeros that C++ makes up for these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward

from understudy import FakeTensor, FakeTensorMode

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "number times": lambda x: 3 * x,
    "times number": lambda x: x * 2.5,
    "plus number": lambda x: x + 1,
    "quotient": lambda x: 1 - x / 2,
    "power": lambda x: x**2,
    "matrix": lambda x: x @ torch.ones(3, 2, device=x.device),
    "sum": lambda x: (x * torch.ones(3, device=x.device)).sum(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "joined": lambda x: torch.cat([x, torch.ones(2, 3, device=x.device)]),
}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_tangents_are_as_on_real_tensors(program: Callable[[Any], Any], device: str) -> None:
    def run(device: str) -> Any:
        with forward.dual_level():
            x = torch.ones(2, 3, device=device)
            return forward.unpack_dual(program(forward.make_dual(x, torch.ones_like(x))))

    real = run("cpu")
    with FakeTensorMode():
        fake = run(device)
    for expected, found in zip(real, fake, strict=True):
        assert type(found) is FakeTensor and found.device.type == device
        assert (found.shape, found.stride(), found.dtype) == (
            expected.shape,
            expected.stride(),
            expected.dtype,
        )


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "meta"])
def test_zeros_that_are_known_to_be_zeros(device: str) -> None:
    with FakeTensorMode():
        zero = torch._efficientzerotensor(2, 3, dtype=torch.float64, device=device)
        assert zero._is_zerotensor() and zero.device == torch.device(device) and zero.dtype == torch.float64
        assert (zero * torch.ones(3, dtype=torch.float64, device=device))._is_zerotensor()
        assert not (zero + torch.ones(3, dtype=torch.float64, device=device))._is_zerotensor()
        assert zero.clone().shape == (2, 3)
        views = [zero.detach(), zero.t(), zero[0], zero.expand(4, 2, 3)]
        assert all(view._is_zerotensor() and view.device == zero.device for view in views)
        assert zero[0, 0].item() == 0
