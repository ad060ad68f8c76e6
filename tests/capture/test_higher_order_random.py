"""Random compositions of control-flow operators, under gradients and transforms, beside the same in plain Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_rows

from understudy import make_fx

Function = Callable[[torch.Tensor], torch.Tensor]
Pair = tuple[Function, Function]
"""A function of control-flow operators, and the same one in Python."""


def plain_scan(step: Any, carry: torch.Tensor, rows: torch.Tensor, reverse: bool) -> torch.Tensor:
    results: list[torch.Tensor] = []
    for row in reversed(rows) if reverse else rows:
        carry, result = step(carry, row)
        results.append(result)
    return carry + torch.stack(results).sum(0)


def simple(chooses: random.Random) -> Pair:
    factor = chooses.uniform(-1.5, 1.5)
    made: Function = chooses.choice(
        [lambda x: x * factor, torch.sin, lambda x: x + factor, lambda x: x * x.sum().tanh()]
    )
    return made, made


def composed(chooses: random.Random, depth: int) -> Pair:
    if depth == 0:
        return simple(chooses)
    (a, plain_a), (b, plain_b) = composed(chooses, depth - 1), composed(chooses, depth - 1)
    limit, rounds, reverse = chooses.uniform(-1, 1), chooses.randint(0, 3), chooses.random() < 0.5

    def scanned(x: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([x, x * 2, x.cos()])
        carry, results = scan(lambda carry, row: (a(carry) + row, b(carry) * row), x, rows, reverse=reverse)
        return carry + results.sum(0)

    def scanned_plainly(x: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([x, x * 2, x.cos()])
        return plain_scan(lambda carry, row: (plain_a(carry) + row, plain_b(carry) * row), x, rows, reverse)

    def repeated(x: torch.Tensor) -> Any:
        first = torch.zeros((), dtype=torch.long)
        return while_loop(lambda i, y: i < rounds, lambda i, y: (i + 1, a(y)), (first, x))[1]

    def repeated_plainly(x: torch.Tensor) -> torch.Tensor:
        for _ in range(rounds):
            x = plain_a(x)
        return x

    return chooses.choice(
        [
            (
                lambda x: torch.cond(x.sum() > limit, a, b, (x,)),
                lambda x: plain_a(x) if x.sum() > limit else plain_b(x),
            ),
            (scanned, scanned_plainly),
            (repeated, repeated_plainly),
            (
                lambda x: map_rows(lambda row, y: a(row) + y, torch.stack([x, -x]), x).sum(0),
                lambda x: torch.stack([plain_a(x) + x, plain_a(-x) + x]).sum(0),
            ),
            (lambda x: a(b(x)) + x, lambda x: plain_a(plain_b(x)) + x),
        ]
    )


def gradient(f: Function) -> Function:
    return torch.func.grad(lambda x: f(x).square().sum())  # type: ignore[no-any-return]


SURROUNDINGS: dict[str, Callable[[Function], tuple[Any, Any]]] = {
    "none": lambda f: (lambda x: f(x[0]), lambda x: f(x[0])),
    "grad": lambda f: (lambda x: gradient(f)(x[0]), lambda x: gradient(f)(x[0])),
}


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("seed", range(6))
def test_random_compositions(seed: int, mode: Any, around: str) -> None:
    chooses = random.Random(f"{seed} {mode} {around}")
    function, plainly = composed(chooses, chooses.randint(1, 2))
    program, expected = SURROUNDINGS[around](function)[0], SURROUNDINGS[around](plainly)[1]
    torch.manual_seed(seed)
    graph = make_fx(program, tracing_mode=mode)(torch.randn(3, 5))
    for shape, scale in [((3, 5), 1), ((3, 5), 3), ((4, 7) if mode == "symbolic" else (3, 5), 2)]:
        x = torch.randn(shape) * scale
        torch.testing.assert_close(graph(x), expected(x), equal_nan=True, rtol=1e-3, atol=1e-4)
