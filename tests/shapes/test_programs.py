"""Random small programs, run once with symbolic sizes: at every other size that the guards admit, the real run agrees."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from understudy import FakeTensorMode, ShapeEnv

Step = Callable[[Tensor], Tensor]


def dim_of(x: Tensor, choice: int) -> int:
    return choice % x.dim()


def merge(choice: int) -> Step:
    def step(x: Tensor) -> Tensor:
        if x.dim() < 2:
            return x
        dim = choice % (x.dim() - 1)
        return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])

    return step


def cut(choice: int) -> Step:
    def step(x: Tensor) -> Tensor:
        dim, factor = dim_of(x, choice), 2 + choice % 2
        return x.reshape(*x.shape[:dim], x.shape[dim] // factor, factor, *x.shape[dim + 1 :])

    return step


STEPS: dict[str, Callable[[int], Step]] = {
    "merge": merge,
    "cut": cut,
    "flatten": lambda c: lambda x: x.flatten(c % x.dim()),
    "view in rows": lambda c: lambda x: x.contiguous().view(-1, 2 + c % 3),
    "transpose": lambda c: lambda x: x.transpose(0, c % x.dim()),
    "permute": lambda c: lambda x: x.permute(*range(1, x.dim()), 0),
    "contiguous": lambda c: lambda x: x.contiguous(),
    "cat with itself": lambda c: lambda x: torch.cat([x, x], c % x.dim()),
    "stack": lambda c: lambda x: torch.stack([x, x + 1], c % x.dim()),
    "matmul with itself": lambda c: lambda x: x @ x.transpose(-1, -2) if x.dim() > 1 else x,
    "matmul with a weight": lambda c: lambda x: x @ x.new_zeros(x.shape[-1], 2 + c % 5),
    "slice": lambda c: lambda x: x.narrow(c % x.dim(), 1, x.shape[c % x.dim()] - 1),
    "every other": lambda c: lambda x: x[::2],
    "half": lambda c: lambda x: x[: x.shape[0] // 2 + 1],
    "chunk": lambda c: lambda x: x.chunk(2 + c % 2, c % x.dim())[-1],
    "split": lambda c: lambda x: x.split(x.shape[c % x.dim()] // 2, c % x.dim())[0],
    "add its rows": lambda c: lambda x: x + x[0],
    "sum": lambda c: lambda x: x.sum(c % x.dim(), keepdim=c % 3 == 0) if x.dim() > 1 else x,
    "expand": lambda c: lambda x: x.unsqueeze(0).expand(2 + c % 3, *x.shape),
    "repeat": lambda c: lambda x: x.repeat(*([2] * x.dim())),
    "pad to a multiple": lambda c: lambda x: torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)),
    "roll": lambda c: lambda x: x.roll(1, c % x.dim()),
    "diagonal": lambda c: lambda x: x.diagonal() if x.dim() > 1 else x,
    "unfold": lambda c: lambda x: x.unfold(c % x.dim(), 2, 1),
    "softmax": lambda c: lambda x: x.softmax(c % x.dim()),
    "where": lambda c: lambda x: torch.where(x > 0, x, x.new_zeros(())),
    "a branch": lambda c: lambda x: x * 2 if x.shape[0] > 3 + c % 4 else x.unsqueeze(-1),
    "layer norm": lambda c: lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
}  # fmt: skip

LARGEST = 20_000
SIZES = (2, 3, 4, 5, 6, 8, 9, 12)


def fits(x: Tensor) -> bool:
    return x.numel() <= LARGEST and 1 <= x.dim() <= 5


def program_for(example: Tensor, wanted: list[tuple[str, int]]) -> tuple[list[str], Step]:
    """Of the wanted steps, those that a real tensor of the example's shape can take, one after the other."""
    chosen: list[tuple[str, Step]] = []
    for name, choice in wanted:
        step = STEPS[name](choice)
        try:
            after = step(example)
        except (RuntimeError, IndexError, ValueError):
            continue
        if fits(after) and 0 not in after.shape:
            example = after
            chosen.append((f"{name} {choice}", step))

    def program(x: Tensor) -> Tensor:
        for _, step in chosen:
            x = step(x)
        return x

    return [name for name, _ in chosen], program


def metadata(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.storage_offset()


def at(spec: Any, values: Any) -> tuple[Any, ...]:
    def number(size: Any) -> int:
        return size if isinstance(size, int) else size.value.evaluate(values)

    return tuple(map(number, spec.shape)), tuple(map(number, spec.stride)), number(spec.offset)


def agree(
    shape: tuple[int, ...], wanted: list[tuple[str, int]], others: list[tuple[int, ...]], **options: Any
) -> int:
    """How many of the other shapes were admitted."""
    steps, program = program_for(torch.zeros(shape), wanted)
    env = ShapeEnv(duck_shape=False, **options)
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.zeros(shape), source="x", symbolic_context=("dynamic",) * len(shape))
    with mode:
        out = program(x)
    about = f"{shape} through {steps}: {out.spec}, guards {[g.text for g in env.guards]}"
    assert not env.check(torch.zeros(shape)), f"the example breaks its own guards: {about}"
    admitted = 0
    for other in [shape, *others]:
        real = torch.zeros(other)
        if env.check(real):
            continue
        admitted += 1
        expected = program(real)
        values = {env.from_sympy(symbol): number for symbol, number in env.bind_symbols(None, real).items()}
        for symbol, definition in env.definitions.items():
            values[symbol] = int(definition.evaluate(values))
        assert at(out.spec, values) == metadata(expected), f"at {other}: {about}"
    return admitted - 1


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 7)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_random_programs(shape: list[int], wanted: list[tuple[str, int]], chosen: random.Random) -> None:
    others = [tuple(chosen.choice(range(2, 14)) for _ in shape) for _ in range(8)]
    agree(tuple(shape), wanted, others)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_each_step_admits_other_sizes(name: str) -> None:
    """A run that admits nothing but its example would agree with everything."""
    others = [(a, b) for a in (4, 6, 8, 12, 24) for b in (4, 8, 12, 16, 24)]
    assert agree((8, 12), [(name, 2)], others) >= 5


@pytest.mark.conformance
def test_many_random_programs() -> None:
    chosen = random.Random(1)
    for _ in range(1000):
        shape = tuple(chosen.choice(SIZES) for _ in range(chosen.randrange(1, 4)))
        wanted = [(chosen.choice(sorted(STEPS)), chosen.randrange(8)) for _ in range(chosen.randrange(1, 8))]
        agree(shape, wanted, [tuple(chosen.randrange(2, 20) for _ in shape) for _ in range(10)])
