"""The stack trace of a node has the lines of the user's program that Python's own stack had when it was recorded."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from understudy import make_fx

expected: list[list[int]] = []


def sin(x: torch.Tensor) -> torch.Tensor:
    return (expected.append(lines_of(sys._getframe())), x.sin())[1]  # type: ignore[func-returns-value]


def lines_of(frame: Any) -> list[int]:
    """The lines of this file in the stack, up to the traced function, outermost first."""
    found: list[int] = []
    while frame.f_code.co_name != "trace":
        if frame.f_code.co_filename == __file__:
            found.append(frame.f_lineno)
        frame = frame.f_back
    return found[::-1]


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = sin(sin(x))
    return x


def recursive(x: torch.Tensor, depth: int = 3) -> torch.Tensor:
    x = sin(x)
    return sin(recursive(x, depth - 1)) if depth else sin(x)


def steps(x: torch.Tensor) -> Iterator[torch.Tensor]:
    while True:
        x = sin(x)
        yield x


def resumed_on_other_lines(x: torch.Tensor) -> Any:
    generator = steps(x)
    first = next(generator)
    second = next(generator)
    return first, second, [next(generator) for _ in range(2)]


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sin(x) + sin(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.block = self.blocks[0]

    def forward(self, x: torch.Tensor) -> Any:
        x = self.blocks(x)
        x = self.block(x)
        return self.block(sin(x))


def twice_by_one_function(x: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return sin(x)

    x = inner(x)
    return inner(x)


PROGRAMS: dict[str, Callable[[], Callable[..., Any]]] = {
    "loop": lambda: in_a_loop,
    "recursion": lambda: recursive,
    "generator": lambda: resumed_on_other_lines,
    "modules": Model,
    "one function": lambda: twice_by_one_function,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_lines_are_those_of_the_stack(name: str, mode: str) -> None:
    expected.clear()
    graph = make_fx(PROGRAMS[name](), tracing_mode=mode)(torch.randn(3))
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    pattern = re.compile(rf'File "{re.escape(__file__)}", line (\d+)')
    assert [[int(line) for line in pattern.findall(node.meta["stack_trace"])] for node in nodes] == expected
    assert len(nodes) >= 2


def test_a_backward_pass_has_the_line_that_began_it() -> None:
    def program(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = x.sin().exp()
        return torch.autograd.grad(y.sum(), x), torch.autograd.grad(x.cos().sum(), x)

    graph = make_fx(program, tracing_mode="fake")(torch.randn(3))
    cos, *_ = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
    (negative,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    for node in (cos, negative):
        assert node.meta["stack_trace"].endswith(
            "return torch.autograd.grad(y.sum(), x), torch.autograd.grad(x.cos().sum(), x)"
        )
