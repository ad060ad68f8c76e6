"""Guards admit only sizes for which the recorded answer is right, by the same steps: tried at all small sizes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from understudy import FakeTensorMode, ShapeEnv
from understudy.shapes.input_dims import DYNAMIC
from understudy.shapes.sizes import from_torch

Program = Callable[..., Any]
Step = tuple[str, list[Any]]
SMALL = range(4)
"""Sizes that are tried for each symbol."""


class Steps(TorchDispatchMode):
    """The operators that it hears, with the shapes and strides of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Step] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        results = made if isinstance(made, (tuple, list)) else (made,)
        numbers = [from_torch(n) for r in results if isinstance(r, Tensor) for n in (*r.shape, *r.stride())]
        self.heard.append((func.name(), numbers))
        return made


class Recorded:
    """A program run on symbols, one for each size of its inputs."""

    def __init__(self, program: Program, reals: list[Tensor]) -> None:
        self.program, self.reals = program, reals
        self.env = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=self.env)
        fakes = [
            mode.from_tensor(real, source="xyz"[i], symbolic_context=[DYNAMIC] * real.ndim)
            for i, real in enumerate(reals)
        ]
        self.sizes = [[from_torch(size).value for size in fake.shape] for fake in fakes]
        with mode, Steps() as steps, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program(*fakes)
        self.steps = steps.heard

    @property
    def guards(self) -> list[str]:
        return sorted(str(guard.condition) for guard in self.env.guards)

    def all_sizes(self) -> Iterator[Mapping[Any, int]]:
        symbols = list(self.env.hints)
        for numbers in itertools.product(SMALL, repeat=len(symbols)):
            sizes = dict(zip(symbols, numbers, strict=True))
            if all(symbol.low <= number for symbol, number in sizes.items()):
                yield sizes

    def is_admitted(self, sizes: Mapping[Any, int]) -> bool:
        return all(guard.holds(sizes) for guard in self.env.guards)

    def is_right(self, sizes: Mapping[Any, int]) -> bool:
        """Whether the real program is the recorded one at these sizes."""
        inputs = [
            torch.ones([sizes[size] for size in shape], dtype=real.dtype, requires_grad=real.requires_grad)
            for shape, real in zip(self.sizes, self.reals, strict=True)
        ]
        with Steps() as steps, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self.program(*inputs)
            except (RuntimeError, IndexError, AssertionError):
                return False
        return steps.heard == [
            (name, [n if type(n) is int else n.value.evaluate(sizes) for n in numbers])
            for name, numbers in self.steps
        ]


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def gradients(program: Callable[..., Tensor]) -> Program:
    def run(*inputs: Tensor) -> Any:
        output = program(*inputs)
        wanted = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(output, wanted, torch.ones_like(output))

    return run


def of_transposed(x: Tensor, y: Tensor) -> Tensor:
    return x.t() @ y


def summed(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def of_squares(x: Tensor, y: Tensor) -> Tensor:
    assert x.shape[0] == x.shape[1] == y.shape[0] == y.shape[1]
    return x + y.mT


def in_part(x: Tensor) -> Tensor:
    assert x.shape[0] < x.shape[1]
    part = x[:, : x.shape[0]]
    return part + part.mT


def of_vectors(*wanted: int) -> Program:
    def run(x: Tensor) -> Any:
        found = torch.linalg.svd(x, full_matrices=False)
        outputs = [found[place].exp() for place in wanted]
        return torch.autograd.grad(outputs, x, [torch.ones_like(output) for output in outputs])

    return run


PROGRAMS: dict[str, tuple[Program, list[Tensor]]] = {
    "mm, no columns": (gradients(torch.mm), [leaf(4, 0), leaf(0, 3)]),
    "mm, a row": (gradients(torch.mm), [leaf(1, 2), leaf(2, 1)]),
    "mm of columns": (gradients(of_transposed), [leaf(0, 4), leaf(0, 3)]),
    "addmm, no columns": (gradients(torch.addmm), [leaf(3), leaf(4, 0), leaf(0, 3)]),
    "cumsum of nothing": (gradients(summed), [leaf(3, 0, 0)]),
    "matmul of nothing": (torch.matmul, [torch.ones(0, 0), torch.ones(4, 0, 0)]),
    "cdist of nothing": (gradients(lambda x, y: torch.cdist(x, y, 1.0)), [leaf(0, 2), leaf(4, 2)]),
    "cholesky of nothing": (torch.cholesky, [torch.ones(2, 0, 0)]),
    "rows and columns, none": (of_squares, [torch.ones(0, 0), torch.ones(0, 0)]),
    "rows and columns of a part": (in_part, [torch.ones(0, 2)]),
    "halves of whole numbers": (lambda x: x[:, :-2] / 2, [torch.ones(3, 3, dtype=torch.int64)]),
    "trace, tall": (gradients(torch.trace), [leaf(3, 2)]),
    "trace, square": (gradients(torch.trace), [leaf(3, 3)]),
    "trace, wide": (gradients(torch.trace), [leaf(2, 3)]),
    "left singular vectors, tall": (of_vectors(0), [leaf(3, 2)]),
    "left singular vectors, square": (of_vectors(0), [leaf(2, 2)]),
    "right singular vectors, wide": (of_vectors(1, 2), [leaf(2, 3)]),
    "singular vectors, tall": (of_vectors(0, 2), [leaf(3, 2)]),
}
if not hasattr(
    torch.ops.aten, "cholesky"
):  # since torch 2.14, `torch.cholesky` is an error that names its successor
    del PROGRAMS["cholesky of nothing"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_guards_are_sufficient(name: str) -> None:
    """Guards may exclude sizes for which the recorded program is right, but admit none for which it is wrong."""
    program, reals = PROGRAMS[name]
    recorded = Recorded(program, reals)
    assert recorded.is_admitted(recorded.env.hints)
    for sizes in recorded.all_sizes():
        assert recorded.is_right(sizes) or not recorded.is_admitted(sizes), (sizes, recorded.guards)


def filtered(x: Tensor, y: Tensor) -> Tensor:
    return F.conv2d(x, y, padding="same")


def test_padding_of_a_kernel_of_even_size() -> None:
    """One side is padded by more than the other if one of the sizes is even, no matter which."""
    even = "y_2 % 2 == 0 or y_3 % 2 == 0"
    recorded = Recorded(filtered, [torch.ones(1, 5, 6), torch.ones(1, 1, 2, 3)])
    assert recorded.guards == ["x_0 != 0", "x_0 == y_1", "y_0 >= 1", even]
    recorded = Recorded(gradients(filtered), [leaf(2, 3, 5, 6), leaf(4, 3, 2, 3)])
    assert recorded.guards == ["x_1 == y_1", even]


def test_cutting_off_what_was_padded() -> None:
    """The gradient is cut off again: then its strides depend on how many images and channels there are."""
    recorded = Recorded(gradients(filtered), [leaf(1, 1, 5, 6), leaf(1, 1, 2, 2)])
    for images, channels, rows, columns in itertools.product((1, 2), (1, 2), (2, 3), (2, 3)):
        numbers = (images, channels, 5, 6, 1, channels, rows, columns)
        sizes = dict(zip(recorded.env.hints, numbers, strict=True))
        assert recorded.is_admitted(sizes) == recorded.is_right(sizes), sizes
