"""Guards say no more than what the recorded answer needs, and say it plainly."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from understudy import FakeTensorMode, ShapeEnv
from understudy.ops.shared.layouts import view_strides
from understudy.shapes.sizes import from_torch


class Program:
    """A program run on symbols: each dimension of each input is one, named after the input and its number."""

    def __init__(self, program: Callable[..., Any], *reals: Tensor, duck_shape: bool = False) -> None:
        self.env = ShapeEnv(duck_shape=duck_shape)
        mode = FakeTensorMode(shape_env=self.env)
        fakes = [
            mode.from_tensor(
                real, source=name, symbolic_context=None if duck_shape else ["dynamic"] * real.ndim
            )
            for name, real in zip("xyzvw", reals, strict=False)
        ]
        with mode:
            self.result = program(*fakes)

    @property
    def guards(self) -> list[str]:
        return [str(guard.condition) for guard in self.env.guards]


def gradients(program: Callable[..., Tensor]) -> Callable[..., Any]:
    def run(*inputs: Tensor) -> Any:
        output = program(*inputs)
        return torch.autograd.grad(output, [x for x in inputs if x.requires_grad], torch.ones_like(output))

    return run


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def with_channels_last(x: Tensor) -> Tensor:
    return x + x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


# --- rules and composites -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "reals", "guards"),
    [
        (lambda x, y: torch.cdist(x, y, 1.0), [leaf(5, 3), leaf(4, 3)], ["x_1 == y_1"]),
        (torch.cdist, [leaf(5, 3), leaf(4, 3)], ["x_0 <= 25", "y_0 <= 25", "x_1 == y_1"]),
        (torch.cdist, [leaf(1, 5, 3), leaf(1, 4, 3)], ["x_1 <= 25", "y_1 <= 25", "x_2 == y_2", "y_0 == 1 or x_0 == y_0"]),
        (torch.pdist, [leaf(1, 3)], []),
        (gradients(torch.pdist), [leaf(1, 3)], []),
        (lambda x, y: torch.linalg.solve(x, y), [leaf(1, 3, 3), leaf(1, 3, 2)],
         ["x_1 == x_2", "x_1 == y_1", "y_0 == 1 or x_0 == y_0"]),
        (lambda x: torch.ones_like(torch.linalg.inv(x)), [leaf(0, 3, 3)], ["x_1 == x_2"]),
        (lambda x: x.flatten(1, 2).mT.reshape(x.shape[0], x.shape[3], *x.shape[1:3]), [torch.zeros(2, 3, 4, 5)], []),
        (lambda x: x.permute(0, 3, 1, 2).flatten(2), [torch.zeros(2, 3, 4, 5)], []),
        # In which order the strides are matters for more than one row and column only, and no more is asked.
        (lambda x: with_channels_last(x[:, :, ::4, ::4].contiguous()), [torch.zeros(2, 3, 9, 11)],
         ["x_2 >= 5", "x_3 >= 5"]),
    ],
)  # fmt: skip
def test_guards(program: Callable[..., Any], reals: list[Tensor], guards: list[str]) -> None:
    assert sorted(Program(program, *reals).guards) == sorted(guards)


def test_printing_assumes_nothing() -> None:
    program = Program(lambda x: repr(x.transpose(0, 1)), torch.zeros(1, 3))
    assert program.guards == []
    assert "stride=" in program.result


# --- layouts ------------------------------------------------------------------------------------------------------


def test_a_pixel_is_the_only_exception() -> None:
    """Of channels-last operands, the result is row-major only if there is no more than one pixel."""
    program = Program(lambda x: x.permute(0, 3, 1, 2) + x.permute(0, 3, 1, 2), torch.zeros(2, 1, 3, 16))
    assert program.guards == ["x_1 != 0"]
    program = Program(lambda x: x.permute(0, 3, 1, 2) + x.permute(0, 3, 1, 2), torch.zeros(2, 1, 1, 16))
    assert program.guards == ["x_1 == 0 or (x_2 == 1 and x_1 == 1) or x_2 == 0"]


def test_gradient_of_padding_to_a_multiple() -> None:
    """Whether anything was padded does not matter to what is cut away again."""

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, -x.shape[1] % 7, 0, -x.shape[0] % 7))

    program = Program(gradients(padded), leaf(14, 16))
    assert program.guards == []


@pytest.mark.parametrize("seed", range(4))
def test_views_at_other_sizes(seed: int) -> None:
    """Strides that are seen without a question are those of a real view, whatever the sizes."""
    choose = random.Random(seed)
    for _ in range(100):
        sizes = [choose.choice([1, 2, 3, 4, 6]) for _ in range(choose.randint(1, 4))]
        order = choose.sample(range(len(sizes)), len(sizes))
        context = tuple(choose.choice(["static", f"d{i}"]) for i in range(len(sizes)))
        env = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=env)
        with mode:
            x = mode.from_tensor(torch.zeros(sizes), symbolic_context=context).permute(order)
        shape = list(x.shape)
        if len(shape) > 1 and choose.random() < 0.7:
            place = choose.randrange(len(shape) - 1)
            shape[place : place + 2] = [shape[place] * shape[place + 1]]
        shape.insert(choose.randint(0, len(shape)), 1)
        wanted = tuple(map(from_torch, shape))
        strides = view_strides(x._spec, wanted)
        if strides is None or env.guards:
            continue
        for _ in range(4):
            values = {symbol: choose.randint(symbol.low or 0, 5) for symbol in env.hints}
            real = torch.empty_strided(
                *[[_at(n, values) for n in numbers] for numbers in (x._spec.shape, x._spec.stride)]
            )
            assert real.view([_at(n, values) for n in wanted]).stride() == tuple(
                _at(n, values) for n in strides
            )


def _at(size: Any, values: Any) -> int:
    value = getattr(size, "value", size)
    return int(value) if isinstance(value, int) else int(value.evaluate(values))


# --- pooling ------------------------------------------------------------------------------------------------------


def test_sizes_that_schemas_take_as_integers_are_specialised() -> None:
    program = Program(lambda x: F.adaptive_max_pool2d(x, (None, 3)), torch.randn(2, 3, 8, 9))
    assert program.guards == ["x_2 == 8"]


def test_chunks_are_filled_up_or_not() -> None:
    program = Program(
        lambda x, y: torch.ops.aten._chunk_cat([x, y], 0, 4), torch.zeros(8, 3), torch.zeros(5, 2, 7)
    )
    assert program.guards == []
    assert str(program.result._spec) == "f32[4, y_1*y_2*((y_0 + 3)//4) + x_1*((x_0 + 3)//4)]@cpu"


def test_more_parameters_than_channels() -> None:
    def normalised(x: Tensor, weight: Tensor) -> Tensor:
        return torch.native_batch_norm(x, weight, None, None, None, True, 0.1, 1e-5)[0]

    assert Program(normalised, torch.randn(2, 3, 4), torch.ones(3)).guards == ["x_1 <= y_0"]


# --- in words ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "shape", "guards"),
    [
        (lambda x: torch.cat(x.chunk(2, 1)), (2, 10), ["x_1 % 2 == 0"]),
        (lambda x: x.chunk(3, 1), (2, 10), ["x_1 > 2*((x_1 + 2)//3)"]),
        (lambda x: x.split(4, 1), (2, 10), ["x_1 <= 12", "x_1 >= 9"]),
        (lambda x: x.split(12, 1), (2, 10), ["x_1 <= 12"]),
        (lambda x: torch.stack((x[:, ::2], x[:, 1::2])), (2, 10), ["x_1 % 2 == 0"]),
        (lambda x: x.view(x.shape[0] // 8, 8, x.shape[1] // 4, 4), (16, 8), ["x_0 % 8 == 0", "x_1 % 4 == 0"]),
        (lambda x: x.view(x.shape[0], 2, -1), (3, 8), ["x_1 % 2 == 0"]),
        (lambda x: x.shape[0] > 2 and bool(torch.sym_not(x.shape[1] == 9)), (3, 8), ["x_0 >= 3", "x_1 != 9"]),
    ],
)
def test_guards_are_readable(program: Callable[..., Any], shape: tuple[int, ...], guards: list[str]) -> None:
    assert Program(program, torch.zeros(shape)).guards == guards
