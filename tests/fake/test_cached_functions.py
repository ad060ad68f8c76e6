"""What a `functools.lru_cache` has kept from outside of a mode, or from another mode, is a constant of the program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import understudy
from understudy import FakeTensor, FakeTensorMode, MixedTensorsError


def make_table(width: int, device: str = "cpu") -> torch.Tensor:
    return torch.arange(width, device=device) * 2.0


def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """A cache that is not used while torch compiles, as libraries have it."""
    kept = functools.lru_cache(maxsize=8)(function)

    @functools.wraps(function)
    def call(*args: object) -> Any:
        return function(*args) if torch.compiler.is_compiling() else kept(*args)

    return call


KINDS: dict[str, Callable[[], Callable[..., Any]]] = {
    "plain": lambda: functools.lru_cache(make_table),
    "behind a wrapper": lambda: wrap(make_table),
    "in a tuple": lambda: _first_of(functools.cache(lambda *args: (make_table(*args), 1))),
    "in a dict": lambda: _first_of(functools.cache(lambda *args: {0: make_table(*args)})),
}


def _first_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_one_from_before_the_mode(kind: str) -> None:
    table = KINDS[kind]()
    real = table(3)
    with FakeTensorMode():
        y = table(3).unsqueeze(0) + torch.ones(2, 3)
    assert type(y) is FakeTensor and y.shape == (2, 3)
    assert table(3) is real


@pytest.mark.parametrize("kind", KINDS)
def test_one_from_another_mode(kind: str) -> None:
    table = KINDS[kind]()
    with understudy.simulate("t4"):
        table(3, "cuda")
    with understudy.simulate("t4"):
        y = torch.ones(2, 3, device="cuda") * table(3, "cuda")
    assert type(y) is FakeTensor and y.shape == (2, 3) and y.device.type == "cuda"


def test_a_real_tensor_that_nobody_keeps_is_refused() -> None:
    real, other = make_table(3), FakeTensorMode()
    with other:
        fake = torch.ones(3)
    with FakeTensorMode():
        with pytest.raises(MixedTensorsError, match="got a real tensor"):
            real + 1
        with pytest.raises(MixedTensorsError, match="expected a stand-in of this FakeTensorMode"):
            fake + 1
