"""Composite operators in Python, where autocast or inference mode would have C++ compute them with plain integers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from understudy import FakeTensorMode, ShapeEnv, make_fx


@contextlib.contextmanager
def autocast_in_inference_mode() -> Any:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        yield


REGIONS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "both": autocast_in_inference_mode,
}
PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "max_pool1d": lambda x: torch.nn.functional.max_pool1d(x, 2),
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(1), 1),
    "stft": lambda x: torch.stft(x, 4, 2, window=torch.ones(4), return_complex=True, center=False),
    "istft": lambda x: torch.istft(torch.complex(x, x)[:3], 4, window=torch.ones(4)),
    "istft in float32": lambda x: torch.istft(
        torch.complex(x, x)[:3], 4, window=torch.ones(4, dtype=torch.bfloat16)
    ),
}


def leaves(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sizes_stay_symbols(name: str, region: str) -> None:
    real = torch.randn(5, 7)
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fake = mode.from_tensor(real, source="x")
    with mode, REGIONS[region]():
        result = PROGRAMS[name](fake)
    with REGIONS[region]():
        expected = PROGRAMS[name](real)
    assert [(part.dtype, tuple(map(int, part.shape))) for part in leaves(result)] == [
        (part.dtype, tuple(part.shape)) for part in leaves(expected)
    ]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_captured_numbers_at_other_sizes(name: str, region: str) -> None:
    def program(x: Tensor) -> Any:
        with REGIONS[region]():
            return PROGRAMS[name](x)

    graph = make_fx(program, tracing_mode="symbolic")(torch.randn(5, 7))
    assert graph.shape_env.specialisations == []  # type: ignore[union-attr,operator]
    x = torch.randn(6, 9)
    for got, want in zip(leaves(graph(x)), leaves(program(x)), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_autocast_of_devices_that_are_not_here() -> None:
    """There the kernels that cast are ours; the operator comes back once it is cast, and is decomposed then."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    base = mode.from_tensor(torch.randn(5, 7), source="x")
    with mode:
        x = base.to("cuda")
        with torch.autocast("cuda", torch.float16):
            signal = torch.istft(torch.complex(x, x)[:3], 4, window=torch.ones(4, device="cuda"))
    assert signal.dtype == torch.float32 and not isinstance(signal.shape[0], int)
