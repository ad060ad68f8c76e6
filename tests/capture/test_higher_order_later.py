"""Gradients of higher-order operators call their functions again, when variables and modules may have changed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import map as torch_map
from torch._higher_order_ops import scan
from torch.func import functional_call, vjp

from understudy import make_fx
from understudy.errors import UnsupportedMutationAliasingException

Program = Callable[[Tensor], Any]


def choose(x: Tensor, function: Callable[..., Tensor], *operands: Tensor) -> Any:
    return torch.cond(x.sum() > 0, function, lambda *given: function(*given).sin(), operands)


def loop_variable(x: Tensor) -> Tensor:
    y = x
    for i in range(3):
        y = choose(x, lambda t: t * (i + 1), y)  # noqa: B023
    return y


def helper_of_loop_variable(x: Tensor) -> Tensor:
    y = x
    for i in range(3):

        def scale(t: Tensor) -> Tensor:
            return t * (i + 1)  # noqa: B023

        y = choose(x, functools.partial(lambda f, t: f(t), scale), y)
    return y


def assigned_again(x: Tensor) -> Tensor:
    factor = x * 2
    y: Tensor = choose(x, lambda t: t * factor, x)
    factor = x * 3
    return y + 0 * factor


def scan_in_a_loop(x: Tensor) -> Tensor:
    total = x.sum()
    for i in range(2):
        rows = scan(lambda carry, row: (carry * row * (i + 2), carry + row), x[0].clone(), x)[1]  # noqa: B023
        total = total + rows.sum()
    return total


def map_in_a_loop(x: Tensor) -> Tensor:
    total = x.sum()
    for i in range(2):
        total = total + torch_map(lambda row: row * row * (i + 2), x).sum()  # noqa: B023
    return total


def function_that_calls_itself(x: Tensor) -> Tensor:
    y = x
    for i in range(2):

        def power(t: Tensor, n: int) -> Tensor:
            return t * (i + 2) if n == 0 else t * power(t, n - 1)  # noqa: B023

        y = choose(x, lambda t: power(t, 2), y)
    return y


LATER: dict[str, Program] = {
    function.__name__: function
    for function in (
        loop_variable, helper_of_loop_variable, assigned_again, scan_in_a_loop, map_in_a_loop, function_that_calls_itself
    )
}  # fmt: skip


def with_autograd(program: Program, x: Tensor) -> Any:
    y = program(x)
    return y, *torch.autograd.grad(y.sum(), [x])


def with_vjp(program: Program, x: Tensor) -> Any:
    y, pull = vjp(lambda x: program(x).sum(), x)
    return y, *pull(torch.ones(()))


@pytest.mark.parametrize("gradient", [with_autograd, with_vjp], ids=["autograd", "vjp"])
@pytest.mark.parametrize("mode", ["fake", "symbolic", "real"])
@pytest.mark.parametrize("name", LATER)
def test_variables_have_the_values_of_the_call(name: str, mode: str, gradient: Any) -> None:
    program = functools.partial(gradient, LATER[name])
    x = torch.rand(3, 4)
    graph = make_fx(program, tracing_mode=mode)(x.clone().requires_grad_(gradient is with_autograd))
    with torch.no_grad():
        got = graph(x)
    for part, expected in zip(got, plain(name, x), strict=True):
        torch.testing.assert_close(part, expected if part.dim() else expected.sum())


def plain(name: str, x: Tensor) -> Any:
    """The same without higher-order operators, which eager would compile. The sum of x is positive."""
    leaf = x.clone().requires_grad_()
    y = {
        "loop_variable": lambda x: x * 6,
        "helper_of_loop_variable": lambda x: x * 6,
        "assigned_again": lambda x: x * x * 2,
        "scan_in_a_loop": lambda x: x.sum() + _scanned(x, 2) + _scanned(x, 3),
        "map_in_a_loop": lambda x: x.sum() + (x * x * 5).sum(),
        "function_that_calls_itself": lambda x: (x**3 * 2) ** 3 * 3,
    }[name](leaf)
    return y.detach(), *torch.autograd.grad(y.sum(), [leaf])


def _scanned(x: Tensor, factor: int) -> Tensor:
    carry, total = x[0].clone(), torch.zeros(())
    for row in x:
        carry, total = carry * row * factor, total + (carry + row).sum()
    return total


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return choose(x, lambda t: self.linear(t), x)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_modules_have_the_tensors_of_the_call(mode: str) -> None:
    module = Chooses()

    def program(weight: Tensor, bias: Tensor, x: Tensor) -> Any:
        y = functional_call(module, {"linear.weight": weight, "linear.bias": bias}, (x,))
        return y, *torch.autograd.grad(y.pow(2).sum(), [weight, bias, x])

    own = dict(module.named_parameters())
    values = [torch.randn(4, 4), torch.randn(4), torch.rand(3, 4)]
    graph = make_fx(program, tracing_mode=mode)(*[value.clone().requires_grad_() for value in values])
    assert all(parameter is own[name] for name, parameter in module.named_parameters())
    with torch.no_grad():
        got = graph(*values)
    leaves = [value.clone().requires_grad_() for value in values]
    y = nn.functional.linear(leaves[2], leaves[0], leaves[1])
    for part, expected in zip(got, (y.detach(), *torch.autograd.grad(y.pow(2).sum(), leaves)), strict=True):
        torch.testing.assert_close(part, expected)


def test_an_attribute_that_has_changed_is_an_error() -> None:
    class Scale:
        factor = 1

    def program(x: Tensor) -> Any:
        scale, y = Scale(), x
        for factor in (2, 3):
            scale.factor = factor
            y = choose(x, lambda t: t * scale.factor, y)
        return torch.autograd.grad(y.sum(), [x])

    with pytest.raises(
        UnsupportedMutationAliasingException, match=r"is called again for its gradient.*2 became 3"
    ):
        make_fx(program, tracing_mode="fake")(torch.rand(3, 4).requires_grad_())
