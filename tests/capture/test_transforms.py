"""The transforms of torch.func inside of a traced program, and around each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)  # fmt: skip
from torch.nn import functional as F

from tests.capture.captured import captured, check, targets
from understudy import make_fx


def wave(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


def writes(x: Tensor) -> Tensor:
    y = x.clone()
    y.add_(1)
    y.view(-1).mul_(2)
    y[0] = 5.0
    return y


class Cubed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * x * 3.5


ONE = {
    "grad": grad(wave),
    "grad of grad": grad(lambda x: grad(wave)(x).sum()),
    "grad_and_value": grad_and_value(wave),
    "jacrev": jacrev(torch.sin),
    "jacfwd": jacfwd(torch.sin),
    "hessian": hessian(wave),
    "jvp": lambda x: jvp(wave, (x,), (torch.ones_like(x),)),
    "vjp": lambda x: vjp(torch.sin, x)[1](torch.ones_like(x)),
    "jvp of grad": lambda x: jvp(grad(wave), (x,), (x,)),
    "autograd function": grad(lambda x: Cubed.apply(x).sum()),
    "functionalize": functionalize(lambda x: writes(x)),
    "functionalize, views as well": functionalize(writes, remove="mutations_and_views"),
    "functionalize of grad": functionalize(grad(lambda x: writes(x).sum())),
}


def pushed(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: jvp(f, (x,), (torch.ones_like(x),))[1]


ONE |= {
    f"jvp of {name}": pushed(f)
    for name, f in {
        "a product with a number": lambda x: x * 2,
        "jvp of zero": pushed(lambda x: x * 0),
        "jvp of a product with a number": pushed(lambda x: 2 * x),
        "jvp of a sum": pushed(lambda x: (x / 2).sum()),
        "jvp of jvp": pushed(pushed(lambda x: x**3)),
        "grad": grad(lambda x: (x.relu() * 3).sum()),
    }.items()
}

MANY = {
    "vmap": vmap(wave),
    "vmap of grad": vmap(grad(wave)),
    "vmap of vmap": vmap(vmap(torch.sin)),
    "vmap over the second": vmap(wave, in_dims=1),
    "vmap of matmul": vmap(lambda x: torch.outer(x, x) @ x),
    "vmap of writes": vmap(writes),
    "vmap of hessian": vmap(hessian(wave)),
    "functionalize of vmap": functionalize(vmap(writes)),
    "vmap of an autograd function": vmap(grad(lambda x: Cubed.apply(x).sum())),
    "vmap in parts": vmap(wave, chunk_size=2),
}
AT_ONE_SIZE = {"vmap in parts", "vmap over the second"}


@pytest.mark.parametrize("name", ONE)
def test_of_a_vector(name: str) -> None:
    check(ONE[name], torch.randn(3), others=((torch.randn(5),),))


def test_where_cpp_asks_for_plain_sizes() -> None:
    """The derivative of `sgn` is zeros of sizes that C++ reads as integers: that is a guard, and no more."""
    f = pushed(pushed(lambda x: x.abs().sum()))
    graph = check(f, torch.randn(4))["symbolic"]
    assert [str(guard.condition) for guard in graph.shape_env.guards] == ["x_0 == 4"]


@pytest.mark.parametrize("name", MANY)
def test_of_a_batch(name: str) -> None:
    check(MANY[name], torch.randn(4, 3), others=() if name in AT_ONE_SIZE else ((torch.randn(5, 2),),))


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout(randomness: str) -> None:
    f = vmap(lambda x: F.dropout(x, 0.5), randomness=randomness)
    x = torch.randn(4, 3)
    graph = make_fx(f, tracing_mode="fake")(x)
    torch.manual_seed(0)
    expected = f(x)
    torch.manual_seed(0)
    torch.testing.assert_close(graph(x), expected)
    with pytest.raises(RuntimeError, match="on tensor with symbolic sizes"):  # as with torch's own make_fx
        make_fx(f, tracing_mode="symbolic")(x)


def test_functional_call() -> None:
    model = nn.Linear(3, 2)

    def f(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return functional_call(model, {"weight": weight, "bias": bias}, (x,))

    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    graphs = check(f, torch.randn(4, 3), weight, bias)
    assert not list(graphs["symbolic"].named_parameters())


def test_gradients_for_each_sample() -> None:
    model = nn.Linear(3, 1)
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).sum()

    check(lambda p, x: vmap(grad(loss), (None, 0))(p, x), parameters, torch.randn(4, 3))


def test_ensembles() -> None:
    models = [nn.Linear(3, 2) for _ in range(3)]
    parameters, buffers = stack_module_state(models)  # type: ignore[arg-type]
    parameters = {name: value.detach() for name, value in parameters.items()}

    def f(parameters: Any, x: Tensor) -> Any:
        return vmap(lambda p: functional_call(models[0], (p, buffers), (x,)))(parameters)

    check(f, parameters, torch.randn(4, 3))


def test_functionalize_leaves_no_writes() -> None:
    graph = captured(functionalize(writes), torch.randn(3, 2))
    assert not any(target.partition(".")[0].endswith("_") for target in targets(graph))


def test_functionalize_writes_inputs_at_the_end() -> None:
    def f(x: Tensor) -> Any:
        x.view(-1).add_(1)
        return x * 2

    graphs = check(functionalize(f), torch.randn(3, 2))
    assert targets(graphs["fake"])[-1] == "copy_.default"


def test_a_second_derivative_that_is_written_to_in_place() -> None:
    def second(f: Any) -> Any:
        def once(z: Tensor) -> Any:
            return torch.func.jvp(f, (z,), (torch.ones_like(z),))

        return lambda x: torch.func.jvp(once, (x,), (torch.ones_like(x),))

    others = ((torch.randn(5),),)
    check(second(lambda y: (y * 2).mul_(3)), torch.randn(3), others=others)
    check(second(lambda y: (y * 2).mul_(3).add_(y).view(-1).mul_(y)), torch.randn(3), others=others)


WRITES_TRIED_ON_META_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum_(0),
    "renorm": lambda x: x.renorm_(2, 0, 1.0),
    "tril": lambda x: x.tril_(),
    "clamp": lambda x: x.clamp_(0, 0.5),
    "index_fill": lambda x: x.index_fill_(0, torch.tensor([1]), 2.0),
    "hardtanh": lambda x: F.hardtanh(x, inplace=True),
    "sinc": lambda x: x.sinc_(),
    "xlogy": lambda x: x.xlogy_(x[:1].expand(x.shape)),
    "nan_to_num": lambda x: x.nan_to_num_(),
    "copysign": lambda x: x.copysign_(-x),
    "floor_divide": lambda x: x.floor_divide_(0.25),
    "heaviside": lambda x: x.heaviside_(x),
}


@pytest.mark.parametrize("name", WRITES_TRIED_ON_META_TENSORS)
def test_writes_under_functionalize_keep_symbols(name: str) -> None:
    """C++ tries them on meta tensors, where torch's own functions expand with plain sizes."""
    write = WRITES_TRIED_ON_META_TENSORS[name]
    f = functionalize(lambda x: write(x.clone()))
    gm = make_fx(f, tracing_mode="symbolic")(torch.rand(4, 6))
    assert not gm.shape_env.specialisations
    other = torch.rand(5, 3)
    torch.testing.assert_close(gm(other), f(other))


def test_random_writes_under_functionalize_keep_symbols() -> None:
    gm = make_fx(functionalize(lambda x: F.gumbel_softmax(x)), tracing_mode="symbolic")(torch.rand(4, 6))
    assert gm(torch.rand(5, 3)).shape == (5, 3) and not gm.shape_env.specialisations
