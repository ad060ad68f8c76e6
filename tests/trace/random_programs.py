"""Random programs on tensors: views, writes in place, arithmetic on sizes, and now and then a number out of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Step = Callable[[Tensor, Tensor, int], Any]

STEPS: dict[str, Step] = {
    # new tensors
    "sin": lambda a, b, n: a.sin(),
    "sum": lambda a, b, n: a + b,
    "product": lambda a, b, n: a * b,
    "times": lambda a, b, n: a * n,
    "where": lambda a, b, n: torch.where(a > 0, a, b),
    "matmul": lambda a, b, n: a @ b,
    "mean": lambda a, b, n: a.mean(0, keepdim=True),
    "cat": lambda a, b, n: torch.cat([a, b], 0),
    "clone": lambda a, b, n: a.clone(),
    "cumsum": lambda a, b, n: a.cumsum(0),
    "literal": lambda a, b, n: a + torch.tensor(float(n)),
    # views
    "view": lambda a, b, n: a.view(-1, a.shape[-1]),
    "flat": lambda a, b, n: a.reshape(a.numel()),
    "transposed": lambda a, b, n: a.transpose(0, -1),
    "first": lambda a, b, n: a[:1],
    "rest": lambda a, b, n: a[1:],
    "every other": lambda a, b, n: a[..., ::2],
    "select": lambda a, b, n: a.select(0, -1),
    "unsqueezed": lambda a, b, n: a.unsqueeze(n % 2),
    "expanded": lambda a, b, n: a.unsqueeze(0).expand(2, *a.shape),
    "detached": lambda a, b, n: a.detach(),
    "narrow": lambda a, b, n: a.narrow(0, 0, a.shape[0] - 1),
    "half": lambda a, b, n: a[: a.shape[0] // 2],
    "diagonal": lambda a, b, n: a.diagonal(),
    "flipped": lambda a, b, n: a.flip(0),
    # writes
    "add_": lambda a, b, n: a.add_(b),
    "mul_": lambda a, b, n: a.mul_(n),
    "copy_": lambda a, b, n: a.copy_(b),
    "zero the first": lambda a, b, n: a[:1].zero_(),
    "fill the last": lambda a, b, n: a.select(-1, -1).fill_(n),
    "set an item": lambda a, b, n: a.__setitem__((0,), float(n)),
    "mask": lambda a, b, n: a.masked_fill_(a > n, 0.0),
    "relu_": lambda a, b, n: a.relu_(),
    "out": lambda a, b, n: torch.neg(b, out=a),
    # metadata
    "t_": lambda a, b, n: a.transpose_(0, -1),
    "unsqueeze_": lambda a, b, n: a.unsqueeze_(0),
    "squeeze_": lambda a, b, n: a.squeeze_(0),
    # sizes
    "ones of a size": lambda a, b, n: a.new_ones(a.shape[0], b.shape[-1] + n),
    "ones of a product": lambda a, b, n: a.new_ones(a.shape[0] * n),
    "arange": lambda a, b, n: torch.arange(a.shape[0] + n) * 1.0,
    "by a size": lambda a, b, n: a * a.shape[0],
    "by a quotient": lambda a, b, n: a * (a.shape[0] / (b.shape[0] + 1)),
    "remainder": lambda a, b, n: a.new_zeros(a.shape[0] % 3 + 1),
    # random
    "dropout": lambda a, b, n: torch.dropout(a, 0.5, True),
    "rand": lambda a, b, n: a + torch.rand(a.shape[-1]),
}


@dataclass(frozen=True)
class Program:
    """Steps, each with the positions of its two operands and a number."""

    steps: tuple[tuple[str, int, int, int], ...]
    results: int

    def __call__(self, *inputs: Tensor) -> Any:
        values = list(inputs)
        for name, a, b, n in self.steps:
            value = STEPS[name](values[a % len(values)], values[b % len(values)], n)
            if isinstance(value, Tensor):
                values.append(value)
        return values[-self.results :], values[0].numel()


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, list[Tensor]]:
    """A program that runs, and inputs for it: what can't run is left out."""
    size = st.integers(1, 4)
    shapes = draw(st.lists(st.lists(size, min_size=1, max_size=3), min_size=1, max_size=3))
    torch.manual_seed(draw(st.integers(0, 99)))
    inputs = [torch.randn(shape) for shape in shapes]
    values = [value.clone() for value in inputs]
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        step = (
            draw(st.sampled_from(sorted(STEPS))),
            draw(st.integers(0, 9)),
            draw(st.integers(0, 9)),
            draw(st.integers(1, 3)),
        )
        name, a, b, n = step
        before = [value.clone() for value in values]
        try:
            value = STEPS[name](values[a % len(values)], values[b % len(values)], n)
        except (RuntimeError, IndexError, TypeError):
            if not all(map(torch.equal, before, values)):  # it had written before it failed
                break
            continue
        steps.append(step)
        if isinstance(value, Tensor):
            if value.numel() > 4000:
                steps.pop()
                break
            values.append(value)
    return Program(tuple(steps), draw(st.integers(1, 3))), inputs
