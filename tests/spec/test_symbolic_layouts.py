"""The guards of a layout admit only sizes that have the recorded layout."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from understudy import FakeTensorMode, ShapeEnv
from understudy.shapes.sizes import from_torch


class Layout:
    """The layout of the result of a program on one input, of which each size is a symbol."""

    def __init__(self, program: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        self.env = ShapeEnv(duck_shape=False)
        self.program = program
        mode = FakeTensorMode(shape_env=self.env)
        x = mode.from_tensor(torch.zeros(shape), source="x", symbolic_context=["dynamic"] * len(shape))
        with mode:
            result = program(x)
        self.symbols = [from_torch(size).value for size in x.shape]
        self.numbers = [from_torch(number) for number in (*result.shape, *result.stride())]

    @property
    def guards(self) -> list[str]:
        return [str(guard.condition) for guard in self.env.guards]

    def at(self, sizes: Mapping[Any, int]) -> list[int]:
        return [number if type(number) is int else number.value.evaluate(sizes) for number in self.numbers]

    def real(self, sizes: Mapping[Any, int]) -> list[int]:
        result = self.program(torch.zeros([sizes[symbol] for symbol in self.symbols]))
        return [*result.shape, *result.stride()]


def in_rows(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: torch.empty_like(x.mT),
    "sum": lambda x: x.mT + in_rows(x.mT),
    "product": lambda x: in_rows(x.mT) * x.mT,
    "number": lambda x: x.mT * 2,
    "view": lambda x: x.mT.view(x.mT.shape),
    "differences": lambda x: x.unsqueeze(1) - x.unsqueeze(2),
}
OF_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: torch.empty_like(x[:, :1]),
    "copy of columns": lambda x: torch.empty_like(x.mT[:1]),
    "sum with a row": lambda x: x.mT + x.mT[:1],
    "sum with a column": lambda x: x.mT[:, :1] * x.mT,
    "number": lambda x: x.mT[:1] * 2,
    "sign": lambda x: x[:, :1].abs(),
    "view": lambda x: x[:, :1].view(x.shape[0], 1),
}
CASES = [(name, least) for least, programs in enumerate((PROGRAMS, OF_PARTS)) for name in programs]


@pytest.mark.parametrize(("name", "least"), CASES)
def test_guards_admit_only_sizes_with_this_layout(name: str, least: int) -> None:
    """At all small sizes. Parts of one row or column need sizes of at least 1."""
    program = (PROGRAMS, OF_PARTS)[least][name]
    for shape in itertools.product((least, 1, 3), repeat=2):
        layout = Layout(program, shape)
        assert all(guard.holds(layout.env.hints) for guard in layout.env.guards)
        for numbers in itertools.product((0, 1, 2, 3, 5), repeat=2):
            sizes = dict(zip(layout.symbols, numbers, strict=True))
            if any(number < max(symbol.low, least) for symbol, number in sizes.items()):
                continue
            is_admitted = all(guard.holds(sizes) for guard in layout.env.guards)
            is_recorded = layout.at(sizes) == layout.real(sizes)
            assert is_recorded or not is_admitted, f"{shape}: wrong at {numbers}; {layout.guards}"


@pytest.mark.parametrize("seed", range(3))
def test_admitted_sizes_have_the_recorded_layout(seed: int) -> None:
    """With three dimensions, in any order."""
    choose = random.Random(seed)
    for _ in range(20):
        order, other = (choose.sample(range(3), 3) for _ in range(2))
        cut = choose.randrange(3)

        def program(x: Tensor, order: list[int] = order, other: list[int] = other, cut: int = cut) -> Tensor:
            y = x.permute(order)
            return y.narrow(cut, 0, 1) * y + x.permute(other).contiguous().permute(
                [other.index(dim) for dim in order]
            )

        layout = Layout(program, tuple(choose.choice((1, 1, 2, 3)) for _ in range(3)))
        for numbers in itertools.product((1, 2, 4), repeat=3):
            sizes = dict(zip(layout.symbols, numbers, strict=True))
            if all(symbol.low <= sizes[symbol] for symbol in layout.symbols) and all(
                guard.holds(sizes) for guard in layout.env.guards
            ):
                assert layout.at(sizes) == layout.real(sizes), (order, other, cut, numbers, layout.guards)
