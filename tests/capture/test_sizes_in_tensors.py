"""Numbers that a program reads off a tensor made of sizes are symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from understudy import FakeTensorMode, ShapeEnv, make_fx

Program = Callable[[Any], Tensor]


def sizes(x: Any) -> Any:
    return torch.tensor(x.shape)


def rows(x: Any) -> Any:
    return torch.tensor(x.shape[0])


OPEN: dict[str, Program] = {
    "max": lambda x: x.new_zeros(sizes(x).max().item()),
    "min": lambda x: x.new_zeros(sizes(x).min().item()),
    "prod": lambda x: x.new_zeros(sizes(x).prod().item()),
    "sum": lambda x: x.new_zeros(sizes(x).sum().item()),
    "an element": lambda x: x.new_zeros(sizes(x)[1].item()),
    "a list": lambda x: x.new_zeros(sizes(x).tolist()),
    "arithmetic": lambda x: x.new_zeros((2 * rows(x) + 1 - rows(x) // 2).item()),
    "rest": lambda x: x.new_zeros((7 - rows(x) % 4).item()),
    "alpha": lambda x: x.new_zeros(torch.add(rows(x), sizes(x)[1], alpha=2).item()),
    "floor": lambda x: x.new_zeros(torch.div(rows(x), 2, rounding_mode="floor").item()),
    "two": lambda x: x.new_zeros(torch.maximum(rows(x), sizes(x)[1]).item()),
    "stacked": lambda x: x.new_zeros(torch.stack([rows(x), rows(x) * 2]).sum().item()),
    "joined": lambda x: x.new_zeros(torch.cat([sizes(x), sizes(x) - 1]).min().item()),
    "elementwise": lambda x: x.new_zeros((sizes(x) * sizes(x)).max().item()),
    "full": lambda x: x.new_zeros(torch.full((2,), x.shape[0]).sum().item()),
    "copied": lambda x: x.new_zeros(sizes(x).clone().to(torch.int64).max().item()),
    "a slice": lambda x: x[: rows(x) // 2, 1 : sizes(x)[1]],
    "an index": lambda x: x[rows(x) - 2],
}


@pytest.mark.parametrize("name", OPEN)
def test_stays_a_symbol(name: str) -> None:
    program = OPEN[name]
    graph = make_fx(program, tracing_mode="symbolic")(torch.randn(6, 5))
    for size in ((6, 5), (9, 4), (4, 8)):
        x = torch.randn(size)
        assert torch.equal(graph(x), program(x))


def test_a_comparison_is_a_guard_on_the_comparison() -> None:
    graph: Any = make_fx(lambda x: x + 1 if rows(x) < sizes(x)[1] else x - 1, tracing_mode="symbolic")(
        torch.randn(3, 5)
    )
    assert [str(guard.condition) for guard in graph.shape_env.guards] == ["x_0 < x_1"]


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x * rows(x).float().sqrt().item(),
        lambda x: x.new_zeros(int(sizes(x).max())),
        lambda x: x.new_zeros(torch.zeros(2, dtype=torch.int64).index_fill_(0, torch.tensor(0), x.shape[0]).sum().item()),
    ],
)  # fmt: skip
def test_what_can_not_be_followed_is_fixed(program: Program) -> None:
    x = torch.randn(3, 5)
    graph: Any = make_fx(program, tracing_mode="symbolic")(x)
    assert graph.shape_env.guards
    assert torch.equal(graph(x), program(x))


def test_many_steps_on_the_same_tensor_are_looked_at_once() -> None:
    def program(x: Tensor) -> Any:
        count = rows(x)
        for _ in range(20):
            count = count + count - count
        return x.new_zeros(count.item())

    graph = make_fx(program, tracing_mode="symbolic")(torch.randn(3))
    assert graph(torch.randn(5)).shape == (5,)


def test_without_a_recorder() -> None:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        x = mode.from_tensor(torch.randn(3, 5))
        found = torch.stack([torch.scalar_tensor(size, dtype=torch.int64) for size in x.shape]).prod().item()
    assert found == x.shape[0] * x.shape[1]
    assert not env.guards
