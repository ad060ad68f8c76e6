"""torch.func and forward-mode differentiation on stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch import nn
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
)

from tests.fake.sides import assert_like_eager, on_each_device
from understudy import DataDependentOutputException, FakeTensorMode, ShapeEnv, is_fake
from understudy.errors import ArgumentError


def cube(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum()


PROGRAMS: dict[str, Any] = {
    "grad": lambda x: grad(cube)(x),
    "grad of grad": lambda x: grad(lambda x: grad(cube)(x).sum())(x),
    "grad by two": lambda x: grad(lambda a, b: (a @ b).sum(), argnums=(0, 1))(x, x.t()),
    "grad and value": lambda x: grad_and_value(cube)(x),
    "grad, aux": lambda x: grad(lambda x: (cube(x), x * 2), has_aux=True)(x),
    "vmap": lambda x: vmap(torch.sin)(x),
    "vmap, in and out": lambda x: vmap(lambda a, b: a * b, in_dims=(0, 1), out_dims=1)(x, x),
    "vmap, not in all": lambda x: vmap(lambda a, b: a @ b, in_dims=(0, None))(x, x),
    "vmap, nested": lambda x: vmap(vmap(lambda a, b: a * b, in_dims=(0, None)), in_dims=(None, 0))(
        x[0], x[1]
    ),
    "vmap, tree": lambda x: vmap(lambda d: {"y": d["x"] * 2, "z": (d["x"].sum(),)})({"x": x}),
    "vmap, chunks": lambda x: vmap(lambda a: a.cos(), chunk_size=2)(x),
    "vmap of grad": lambda x: vmap(grad(cube))(x),
    "vmap, softmax": lambda x: vmap(lambda a: a.softmax(-1).log())(x),
    "vmap, index": lambda x: vmap(lambda a, i: a[i], in_dims=(0, None))(
        x, torch.tensor([0, 2], device=x.device)
    ),
    "vmap, in place": lambda x: vmap(lambda a: a.clone().mul_(2))(x),
    "jvp": lambda x: jvp(torch.sin, (x,), (torch.ones_like(x),)),
    "jvp, linear": lambda x: jvp(lambda a, b: a @ b, (x, x), (x, x)),
    "vjp": lambda x: (lambda out, back: (out, back(torch.ones_like(out))))(*vjp(torch.sin, x)),
    "jacrev": lambda x: jacrev(lambda x: x[0].sin() * x[1].sum())(x),
    "jacrev, chunks": lambda x: jacrev(lambda x: x[0].sin(), chunk_size=1)(x),
    "jacfwd": lambda x: jacfwd(lambda x: x[0].sin() * x[1].sum())(x),
    "hessian": lambda x: hessian(lambda x: x.pow(3).sum())(x[0]),
    "functionalize": lambda x: functionalize(lambda x: x.clone().add_(1).view(-1).mul_(2))(x),
    "functionalize, no views": lambda x: functionalize(lambda x: x.t().clone(), remove="mutations_and_views")(
        x
    ),
    "functionalize of vmap": lambda x: functionalize(vmap(lambda a: a.clone().add_(1)))(x),
}


@on_each_device
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_transform(name: str, device: str) -> None:
    assert_like_eager(lambda device: PROGRAMS[name](torch.randn(4, 4, device=device)), device)


@on_each_device
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_randomness(device: str, randomness: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(3, 4, device=device)
        return vmap(lambda a: (a + torch.randn_like(a), torch.rand(2, device=device)), randomness=randomness)(
            x
        )

    assert_like_eager(program, device)


@on_each_device
def test_vmap_refuses_randomness_by_default(device: str) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="random"):
        vmap(lambda a: a + torch.randn_like(a))(torch.randn(3, 4, device=device))


@on_each_device
def test_vmap_with_dropout(device: str) -> None:
    with FakeTensorMode():
        out = vmap(lambda a: nn.functional.dropout(a, 0.5), randomness="different")(
            torch.randn(3, 4, device=device)
        )
        assert out.shape == (3, 4)


@on_each_device
def test_per_sample_gradients(device: str) -> None:
    def program(device: str) -> Any:
        model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).to(device)
        parameters = {k: v.detach() for k, v in model.named_parameters()}

        def loss(parameters: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = functional_call(model, parameters, (x.unsqueeze(0),))
            return nn.functional.cross_entropy(out, y.unsqueeze(0))

        x = torch.randn(5, 1, 6, 6, device=device)
        y = torch.zeros(5, dtype=torch.int64, device=device)
        return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)

    assert_like_eager(program, device)


@on_each_device
def test_ensembles(device: str) -> None:
    def program(device: str) -> Any:
        models = [nn.Linear(3, 2).to(device) for _ in range(4)]
        parameters, buffers = stack_module_state(models)
        x = torch.randn(5, 3, device=device)
        return vmap(lambda p, b: functional_call(models[0], (p, b), (x,)))(parameters, buffers).detach()

    assert_like_eager(program, device)


@on_each_device
def test_forward_mode(device: str) -> None:
    def program(device: str) -> Any:
        x, tangent = torch.randn(3, 3, device=device), torch.randn(3, 3, device=device)
        with fwAD.dual_level():
            dual = fwAD.make_dual(x, tangent)
            out = fwAD.unpack_dual((dual @ dual).sin().sum(0))
            return out.primal, out.tangent

    assert_like_eager(program, device)


@on_each_device
def test_forward_over_reverse(device: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(3, device=device, requires_grad=True)
        with fwAD.dual_level():
            dual = fwAD.make_dual(x, torch.ones_like(x))
            (gradient,) = torch.autograd.grad((dual**3).sum(), dual, create_graph=True)
            return fwAD.unpack_dual(gradient).tangent.detach()

    assert_like_eager(program, device)


class Triple(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent * 3


@on_each_device
def test_custom_functions_under_transforms(device: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(3, device=device)
        return (
            grad(lambda x: Triple.apply(x).sum())(x),
            vmap(Triple.apply)(x),
            jvp(Triple.apply, (x,), (x,))[1],
            vmap(grad(lambda x: Triple.apply(x).sum()))(x.view(3, 1)),
        )

    assert_like_eager(program, device)


def test_wrappers_around_stand_ins_are_stand_ins() -> None:
    seen = []
    with FakeTensorMode():
        vmap(lambda a: seen.append(is_fake(a)) or a)(torch.randn(3))
        grad(lambda a: seen.append(is_fake(a)) or a.sum())(torch.randn(3))
    assert seen == [True, True]


def test_values_are_refused_inside_of_transforms_too() -> None:
    with FakeTensorMode(), pytest.raises((DataDependentOutputException, RuntimeError)):
        grad(lambda x: x * x.item())(torch.randn(()))


@on_each_device
def test_devices_inside_of_transforms(device: str) -> None:
    seen = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.device)
        assert x.is_cuda is (x.device.type == "cuda")
        return x + torch.zeros(x.shape, device=x.device)

    with FakeTensorMode():
        x = torch.randn(3, 2, device=device)
        assert vmap(f)(x).device == x.device
        assert grad(lambda x: f(x).sum())(x).device == x.device
        assert {str(d) for d in seen} == {str(x.device)}


@pytest.mark.parametrize("out_dim", [-1, 2])
@pytest.mark.parametrize("env", [None, "symbols"])
def test_results_that_are_not_mapped_are_put_where_there_is_a_dimension(
    out_dim: int, env: str | None
) -> None:
    """torch writes past the list of sizes, and a symbol there ends the process."""
    mode = FakeTensorMode(shape_env=None if env is None else ShapeEnv())
    x = mode.from_tensor(torch.ones(3, 4))
    with (
        mode,
        pytest.raises(
            ArgumentError,
            match=rf"expected out_dims from 0 to 1 for a result that is not mapped, got {out_dim}",
        ),
    ):
        vmap(lambda row: x[0] * 2, out_dims=out_dim)(x)
    with mode:
        assert vmap(lambda row: x * 2, out_dims=1)(x).shape == (3, 3, 4)
        assert vmap(lambda row: row * 2, out_dims=-1)(x).shape == (4, 3)
