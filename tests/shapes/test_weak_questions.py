"""Questions about sizes that are as weak as the answer allows, where sizes may be 0 and 1 like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from understudy import FakeTensorMode, ShapeEnv, make_fx
from understudy.shapes.input_dims import DYNAMIC


def guards_of(program: Callable[..., Any], *reals: Tensor) -> list[str]:
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    fakes = [
        mode.from_tensor(real, source="xyz"[i], symbolic_context=[DYNAMIC] * real.ndim)
        for i, real in enumerate(reals)
    ]
    with mode:
        program(*fakes)
    return sorted(str(guard.condition) for guard in env.guards)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def gradients(program: Callable[..., Tensor]) -> Callable[..., Any]:
    def run(*inputs: Tensor) -> Any:
        output = program(*inputs)
        return torch.autograd.grad(output, inputs, torch.ones_like(output))

    return run


def in_windows(x: Tensor) -> Tensor:
    return torch.ones_like(x.unfold(0, 4, 1))


def put(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    return torch.index_put(x, (index,), values)


def no_indices() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


SAME = ["x_1 == y_1", "y_2 % 2 == 0 or y_3 % 2 == 0"]
ONE_CELL = "trunc(x_2 * 0.6) >= 2 or trunc(x_3 * 0.6) >= 2"


@pytest.mark.parametrize(
    ("program", "reals", "guards"),
    [
        (lambda x: F.interpolate(x, scale_factor=0.6, mode="area"), [torch.zeros(2, 3, 4, 4)], [ONE_CELL]),
        (
            lambda x: F.interpolate(x, scale_factor=0.6, mode="area"),
            [torch.zeros(2, 3, 4, 4, 4)],
            [f"{ONE_CELL} or trunc(x_4 * 0.6) >= 2"],
        ),
        (lambda x, y: F.conv2d(x, y, padding="same"), [torch.zeros(2, 3, 5, 5), torch.zeros(2, 3, 2, 3)], SAME),
        (F.conv1d, [torch.ones(1, 3, 5).long(), torch.ones(2, 3, 2).long()], ["x_1 == y_1", "x_2 >= y_2"]),
        (gradients(F.conv1d), [leaf(1, 3, 5), leaf(2, 3, 2)], ["x_1 == y_1", "x_2 >= y_2"]),
        (in_windows, [torch.zeros(5, 3)], ["x_0 <= 6", "x_0 >= 4"]),
        (lambda x: in_windows(x.T), [torch.zeros(3, 5)], ["x_1 <= 6", "x_1 >= 4"]),
        (torch.dist, [torch.zeros(5, 1), torch.zeros(5, 1)], ["x_0 == y_0", "y_1 == 1 or x_1 == 1 or x_1 == y_1"]),
        (torch.dist, [torch.zeros(5, 1), torch.zeros(5, 3)], ["x_0 == y_0", "x_1 == 1 or x_1 == y_1"]),
        (torch.add, [torch.zeros(0), torch.zeros(0)], ["x_0 == y_0 or y_0 == 1"]),
        (torch.add, [torch.zeros(1, 3), torch.zeros(1, 3)], ["x_0 == y_0 or y_0 == 1", "x_1 == y_1"]),
        (torch.add, [torch.zeros(3), torch.zeros(3)], ["x_0 == y_0"]),
        (gradients(torch.add), [leaf(0), leaf(1)], ["x_0 != 1", "y_0 == 1"]),
        (lambda x, y: y.expand(x.shape), [torch.zeros(5, 0, 0), torch.zeros(0)], ["x_2 == 0 or x_1 != 1", "x_2 == y_0"]),
        (put, [torch.zeros(3), no_indices(), torch.zeros(0)], ["y_0 == z_0 or z_0 == 1"]),
        (lambda x: F.pixel_unshuffle(x, 1), [torch.zeros(1, 3, 4, 4)], []),
    ],
)  # fmt: skip
def test_guards(program: Callable[..., Any], reals: list[Tensor], guards: list[str]) -> None:
    assert in_any_order(guards_of(program, *reals)) == in_any_order(guards)


def in_any_order(guards: list[str]) -> set[frozenset[str]]:
    return {frozenset(guard.split(" or ")) for guard in guards}


def test_padding_to_the_same_size_is_right_for_other_kernels() -> None:
    def same(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, padding="same", dilation=(1, 3))

    gm = make_fx(same, tracing_mode="symbolic")(torch.randn(5, 6, 8, 9), torch.randn(7, 6, 2, 3))
    for kernel in ((2, 3), (2, 4), (3, 2), (4, 5)):
        x, weight = torch.randn(2, 4, 7, 5), torch.randn(3, 4, *kernel)
        assert torch.equal(gm(x, weight), same(x, weight))


# --- running products ---------------------------------------------------------------------------------------------


class Listener(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_gradient_of_a_running_product_has_the_steps_of_cpp(dtype: torch.dtype, dim: int) -> None:
    real = torch.ones(3, 5, 4, dtype=dtype, requires_grad=True)
    heard = []
    for env in (None, ShapeEnv(duck_shape=False)):
        mode = FakeTensorMode(shape_env=env)
        with mode, Listener() as listener:
            gradients(lambda x: x.cumprod(dim))(mode.from_tensor(real))
        heard.append(listener.heard)
    assert heard[0] == heard[1]


def test_gradients_where_a_third_operand_expands_the_others() -> None:
    """Two sizes of 1 meet first, and then a larger one: autograd has to know that they are expanded."""
    inputs = leaf(1), leaf(5, 4, 1), leaf(1, 3)
    for program in (torch.addcmul, torch.addcdiv):
        assert "x_0 == 1" in guards_of(gradients(program), *inputs)
