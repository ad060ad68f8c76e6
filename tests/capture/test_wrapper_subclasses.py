"""Wrapper subclasses that a program makes and returns: the graph makes them anew around what it has computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.capture.captured import MODES, captured


def twice(x: Tensor) -> TwoTensor:
    return TwoTensor(x, x * 2)


def values(wrapper: Any) -> Any:
    """What is inside of wrappers."""
    if isinstance(wrapper, TwoTensor):
        return values(wrapper.a), values(wrapper.b)
    return values(wrapper.elem) if isinstance(wrapper, LoggingTensor) else wrapper


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "one": lambda x: twice(x).sin(),
    "one among others": lambda x: {"wrapped": twice(x) + 1, "plain": x.cos()},
    "wrapped twice": lambda x: TwoTensor(twice(x), twice(-x)).exp(),
    "of a class that can't be taken apart": lambda x: LoggingTensor(x).digamma(),
    "around an input": lambda x: LoggingTensor(x),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_made_anew(name: str, mode: str) -> None:
    f = PROGRAMS[name]
    graph = captured(f, torch.rand(3), mode=mode)
    x = torch.rand(5 if mode == "symbolic" else 3)
    for gm in (graph, copy.deepcopy(graph)):
        found, expected = gm(x), f(x)
        if isinstance(expected, dict):
            assert torch.equal(found["plain"], expected["plain"])
            found, expected = found["wrapped"], expected["wrapped"]
        assert type(found) is type(expected) and found.shape == expected.shape
        torch.testing.assert_close(values(found), values(expected), rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_jagged_tensor(mode: str) -> None:
    def f(rows: Tensor, offsets: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(rows, offsets).sin()

    graph = captured(f, torch.rand(5, 2), torch.tensor([0, 2, 5]), mode=mode)
    rows, offsets = torch.rand(5, 2), torch.tensor([0, 1, 5])
    for found, expected in zip(graph(rows, offsets).unbind(), f(rows, offsets).unbind(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_on_a_jagged_tensor(mode: str) -> None:
    """With gradients, C++ asks a jagged tensor for its layout."""
    layer = torch.nn.Linear(2, 3)

    def f(rows: Tensor, offsets: Tensor) -> Tensor:
        return layer(torch.nested.nested_tensor_from_jagged(rows, offsets)).values()

    graph = captured(f, torch.rand(5, 2), torch.tensor([0, 2, 5]), mode=mode)
    rows, offsets = torch.rand(5, 2), torch.tensor([0, 1, 5])
    torch.testing.assert_close(graph(rows, offsets), f(rows, offsets))


def test_a_wrapper_of_constants_stays_one() -> None:
    constant = twice(torch.ones(2))
    graph = captured(lambda x: (x + 1, constant), torch.zeros(2), mode="real")
    assert torch.equal(graph(torch.ones(2))[1].b, constant.b)
