"""Strides without a question: programs whose layouts can be seen for all sizes assume nothing about the sizes.

Each runs once at an example and is held against the real run at others, of 0 and 1 among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.shapes.test_guards import run
from understudy import dims
from understudy.ops.shared.layouts import looks_channels_last

Program = Callable[..., Tensor]


def gradient_of(program: Program) -> Program:
    def taken(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        y = program(leaf)
        return torch.autograd.grad(y, leaf, torch.ones_like(y))[0]

    return taken


def column_before_rows(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0)


PROGRAMS: dict[str, tuple[Program, list[tuple[int, ...]]]] = {
    "an expanded operand": (lambda x, y: x * y.expand(x.shape), [(3, 1, 2), (1, 2)]),
    "an operand of fewer dimensions": (lambda x, y: torch.where(y > 0, x, 0.0), [(3, 1, 2), (1, 2)]),
    "a slice with a number": (lambda x: x[:, :, :-1] * 2, [(3, 1, 4)]),
    "slices of two operands": (lambda x, y: x[..., :-1] * y[..., :-1], [(3, 1, 4), (1, 4)]),
    "a view in the same shape": (lambda x: column_before_rows(x).view(column_before_rows(x).shape), [(3, 4, 2)]),
    "dimensions of size 1 that go": (
        lambda x: column_before_rows(x).unsqueeze(1).view(column_before_rows(x).shape), [(3, 4, 2)]),
    "a scalar that is expanded": (lambda x: x.new_zeros(()).expand(x.shape), [(3, 1, 2)]),
    "a gradient that is not broadcast": (
        gradient_of(lambda x: torch.nn.functional.normalize(x, dim=2)), [(2, 1, 4)]),
    "a diagonal that may be empty": (lambda x: x.diagonal(2), [(3, 5)]),
    "a diagonal below the main one": (lambda x: x.diagonal(-1), [(1, 4)]),
    "a copy of it": (lambda x: torch.diagonal_copy(x, 2), [(3, 5)]),
    "half of a spectrum": (lambda x: torch.fft.irfft(x), [(3, 2)]),
}  # fmt: skip


NEEDED = {"a gradient that is not broadcast": ["d2 != 0"]}
"""On the way to it there is a tensor of the shape (d3, d2, 1), which is multiplied with a number: without elements, eager
lays that out in another order."""


def named(position: int, shape: tuple[int, ...]) -> Any:
    """Aligned at the right, as broadcasting does: dimensions in the same place have the same name."""
    return dims(*[f"d{len(shape) - dim}" for dim in range(len(shape))])


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_assumed(name: str) -> None:
    program, shapes = PROGRAMS[name]
    env, out = run(program, *shapes, names=[named(i, shape) for i, shape in enumerate(shapes)])
    assert [guard.text for guard in env.guards] == NEEDED.get(name, [])
    tried = 0
    for sizes in itertools.product((0, 1, 2, 3, 5), repeat=len(shapes[0])):
        values = {symbol: dict(zip([f"d{len(sizes) - i}" for i in range(len(sizes))], sizes, strict=True))[symbol.name]
                  for symbol in env.hints}  # fmt: skip
        if any(value < (symbol.low or 0) for symbol, value in values.items()):
            continue
        inputs = [torch.zeros(sizes[len(sizes) - len(shape) :]) for shape in shapes]
        if not all(guard.condition.evaluate(values) for guard in env.guards):
            continue
        tried += 1
        expected = program(*inputs)
        spec = out.spec
        found = [
            s if isinstance(s, int) else s.value.evaluate(values)
            for s in (*spec.shape, *spec.stride, spec.offset)
        ]
        assert found == [*expected.shape, *expected.stride(), expected.storage_offset()], (sizes, spec)
    assert tried >= 8


def test_eager_sorts_the_dimensions_of_what_has_no_elements() -> None:
    assert (torch.zeros(2, 0, 1) * 2).stride() != torch.zeros(2, 0, 1).stride()
    env, out = run(lambda x: x[:, :, None] * 2, (3, 4), names=[dims("a", "b")])
    assert [guard.text for guard in env.guards] == []  # an example of 4 stands for sizes from 2
    env, out = run(lambda x: x[:, :, None] * 2, (3, 1), names=[dims("a", "b")])
    assert [guard.text for guard in env.guards] == ["b != 0"]
    assert str(out.spec) == "f32[a, b, 1]@cpu"


def test_a_copy_keeps_the_strides_of_what_has_no_elements() -> None:
    """Which is all that has to be assumed: any strides are dense then."""
    env, out = run(lambda x: x[:, :, :-1].flip(2), (3, 1, 4), names=[dims("a", "b", "c")])
    assert [guard.text for guard in env.guards] == ["b != 0"]
    assert str(out.spec) == "f32[a, b, c - 1]@cpu"
    assert torch.zeros(3, 0, 4)[:, :, :-1].flip(2).stride() == (4, 4, 1)


@pytest.mark.parametrize("shape", [(2, 1, 1, 4), (2, 3, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1, 4)])
def test_a_fresh_tensor_is_not_taken_for_channels_last_at_any_size(shape: tuple[int, ...]) -> None:
    env, out = run(lambda x: x, shape)
    assert not looks_channels_last(out.spec)
    assert env.guards == []
