"""Autograd on stand-ins: the graph, the gradients and the hooks are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.fake.sides import assert_like_eager, on_each_device, with_index
from understudy import FakeTensor, FakeTensorMode, ShapeEnv
from understudy.errors import UnsupportedMutationAliasingException


@on_each_device
def test_backward_fills_grad(device: str) -> None:
    def program(device: str) -> Any:
        w = torch.randn(5, 3, device=device, requires_grad=True)
        b = torch.randn(3, device=device, requires_grad=True)
        x = torch.randn(4, 5, device=device)
        loss = torch.nn.functional.gelu(x @ w + b).pow(2).mean()
        loss.backward()
        return loss, w.grad, b.grad, w, b

    assert_like_eager(program, device)


@on_each_device
def test_autograd_grad(device: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(4, 3, device=device, requires_grad=True)
        unused = torch.randn(2, device=device, requires_grad=True)
        y = x.t().exp()
        given = torch.ones(3, 4, device=device)
        first = torch.autograd.grad(y, (x, unused), given, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(y.sum(), (x, unused), allow_unused=True, materialize_grads=True)
        return [g for g in first if g is not None], second

    assert_like_eager(program, device)


@on_each_device
def test_batched_grad(device: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(3, device=device, requires_grad=True)
        y = x.sin() * x.sum()
        return torch.autograd.grad(y, x, torch.eye(3, device=device), is_grads_batched=True)

    assert_like_eager(program, device)


@on_each_device
def test_double_backward(device: str) -> None:
    def program(device: str) -> Any:
        layer = nn.Conv2d(3, 4, 3, device=device)
        x = torch.randn(2, 3, 8, 8, device=device, requires_grad=True)
        y = torch.tanh(layer(x)).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        penalty = (gradient.norm() - 1) ** 2
        penalty.backward()
        return gradient, penalty, layer.weight.grad, x.grad

    assert_like_eager(program, device)


@on_each_device
def test_functional_derivatives(device: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(3, device=device)

        def f(x: torch.Tensor) -> torch.Tensor:
            return x.pow(3).sum() * x

        v = torch.randn(3, device=device)
        functional = torch.autograd.functional
        return (
            functional.jacobian(f, x),
            functional.vjp(f, x, v),
            functional.jvp(f, x, v),
            functional.hessian(lambda x: f(x).sum(), x),
        )

    assert_like_eager(program, device)


@on_each_device
def test_gradients_accumulate(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, 2, device=device, requires_grad=True)
        x.t().contiguous().sum().backward()
        first = x.grad
        version = first._version
        (x * 2).sum().backward()
        assert x.grad is first
        assert first._version == version + 1
        assert first.device == torch.device(with_index(device))


def test_the_graph_is_freed_unless_retained() -> None:
    with FakeTensorMode():
        x = torch.randn(3, requires_grad=True)
        y = (x * x).sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()


def test_gradient_of_another_dtype_is_cast() -> None:
    def program(device: str) -> Any:
        x = torch.randn(3, 2, device=device, dtype=torch.float64, requires_grad=True)
        y = x.half().float().bfloat16() * 2
        y.sum().backward()
        return y, x.grad

    assert_like_eager(program, "cuda:1")


@on_each_device
def test_tensor_hooks(device: str) -> None:
    def program(device: str) -> Any:
        seen: list[torch.Tensor] = []
        x = torch.randn(3, device=device, requires_grad=True)
        y = x * 2
        y.retain_grad()
        y.register_hook(lambda grad: seen.append(grad) or grad * 3)
        removed = x.register_hook(lambda grad: seen.append(grad))
        removed.remove()
        x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach()))
        y.sum().backward()
        assert len(seen) == 2
        return seen, y.grad, x.grad

    assert_like_eager(program, device)


@on_each_device
def test_module_hooks(device: str) -> None:
    def program(device: str) -> Any:
        seen: list[Any] = []
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).to(device)
        model.register_full_backward_hook(lambda module, grads, outs: seen.append((grads, outs)))
        model.register_full_backward_pre_hook(lambda module, outs: seen.append(outs))
        model[0].register_forward_hook(lambda module, args, out: out * 2)
        model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        x = torch.randn(2, 4, device=device, requires_grad=True)
        y = model(x)
        y.sum().backward()
        return y, seen, x.grad, [p.grad for p in model.parameters()]

    assert_like_eager(program, device)


@on_each_device
def test_multi_grad_hook(device: str) -> None:
    calls = []
    with FakeTensorMode():
        a, b = (torch.randn(3, device=device, requires_grad=True) for _ in range(2))
        torch.autograd.graph.register_multi_grad_hook((a, b), lambda grads: calls.append(grads))
        (a * b).sum().backward()
    assert [tuple(grad.shape) for grad in calls[0]] == [(3,), (3,)]


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        assert x.shape == grad.shape
        return grad * ctx.factor, None


class AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.clone()


class SetUp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sort(dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> torch.Tensor:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grad).scatter(-1, order, grad)


@on_each_device
def test_custom_functions(device: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(3, 4, device=device, requires_grad=True)
        scaled = Scale.apply(x, 2.0)
        changed = AddInPlace.apply(scaled.clone())
        values, order = SetUp.apply(changed)
        values.sum().backward()
        return scaled, changed, values, order, x.grad

    assert_like_eager(program, device)


def test_once_differentiable_refuses_a_second_time() -> None:
    with FakeTensorMode():
        x = torch.randn(3, requires_grad=True)
        y = AddInPlace.apply(x * 2)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError):
            gradient.sum().backward()


@on_each_device
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_checkpoint(device: str, reentrant: bool, preserve: bool) -> None:
    def program(device: str) -> Any:
        runs = []
        layer = nn.Linear(4, 4, device=device)

        def block(x: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return nn.functional.dropout(layer(x).relu(), 0.5)

        x = torch.randn(2, 4, device=device, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=reentrant, preserve_rng_state=preserve)
        y.sum().backward()
        assert len(runs) == 2
        return y.detach(), x.grad, layer.weight.grad

    assert_like_eager(program, device)


@on_each_device
def test_checkpoint_in_sequence(device: str) -> None:
    def program(device: str) -> Any:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(device)
        x = torch.randn(2, 4, device=device, requires_grad=True)
        y = checkpoint_sequential(model, 2, x, use_reentrant=False)
        y.mean().backward()
        return x.grad, [p.grad for p in model.parameters()]

    assert_like_eager(program, device)


@on_each_device
def test_selective_checkpoint(device: str) -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def program(device: str) -> Any:
        x = torch.randn(4, 4, device=device, requires_grad=True)
        contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])  # noqa: E731
        y = checkpoint(lambda x: (x @ x).sin() @ x, x, use_reentrant=False, context_fn=contexts)
        y.sum().backward()
        return x.grad

    assert_like_eager(program, device)


@on_each_device
def test_saved_tensor_hooks(device: str) -> None:
    def program(device: str) -> Any:
        packed = []

        def pack(x: torch.Tensor) -> Any:
            packed.append(x.detach())
            return x.detach().to("cpu"), x.device

        def unpack(pair: Any) -> torch.Tensor:
            return pair[0].to(pair[1])

        x = torch.randn(3, 4, device=device, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = (x.exp() * x).sum()
        y.backward()
        return packed, x.grad

    assert_like_eager(program, device)


@on_each_device
def test_saved_on_cpu(device: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(3, 4, device=device, requires_grad=True)
        with torch.autograd.graph.save_on_cpu():
            y = (x.exp() * x).sum()
        y.backward()
        return x.grad

    assert_like_eager(program, device)


@on_each_device
def test_detach(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, device=device, requires_grad=True)
        y = x * 2
        apart = y.detach()
        assert not apart.requires_grad
        assert apart.is_leaf
        assert apart.untyped_storage()._cdata == y.untyped_storage()._cdata
        assert y.detach_() is y
        assert y.grad_fn is None
        assert x.data.requires_grad is False
        apart.add_(1)
        assert y._version == apart._version


@on_each_device
def test_writes_through_views(device: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(4, 4, device=device, requires_grad=True)
        base = x.clone()
        row = base[1]
        row.mul_(2)
        base[:, 2:].copy_(torch.zeros(4, 2, device=device))
        base.diagonal().add_(1)
        base.sum().backward()
        return base, row.detach(), x.grad, base._version, row._version

    assert_like_eager(program, device)


@on_each_device
def test_a_write_to_a_saved_tensor_is_found_in_backward(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, device=device, requires_grad=True)
        y = x.exp()
        z = y.sum()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.backward()


@on_each_device
def test_a_write_to_a_leaf_is_refused(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            x.add_(1)
        with torch.no_grad():
            x.add_(1)
        assert x._version == 1


def test_requires_grad_needs_floats() -> None:
    with FakeTensorMode():
        with pytest.raises(RuntimeError, match="floating point"):
            torch.zeros(3, dtype=torch.int64).requires_grad_()
        assert torch.zeros(3).requires_grad_().requires_grad


@on_each_device
def test_grad_modes(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, device=device, requires_grad=True)
        with torch.no_grad():
            assert not (x * 2).requires_grad
            with torch.enable_grad():
                assert (x * 2).requires_grad
        with torch.set_grad_enabled(False):
            assert (x * 2).grad_fn is None

        @torch.no_grad()
        def quiet(x: torch.Tensor) -> torch.Tensor:
            return x @ x

        assert quiet(x).grad_fn is None
    assert torch.is_grad_enabled()


def test_anomaly_mode() -> None:
    with FakeTensorMode(), torch.autograd.set_detect_anomaly(True, check_nan=False):
        x = torch.randn(3, requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad.shape == (3,)


@on_each_device
def test_several_devices_in_one_graph(device: str) -> None:
    def program(device: str) -> Any:
        a = torch.randn(3, device="cpu", requires_grad=True)
        b = torch.randn(3, device=device, requires_grad=True)
        (a.to(device) * b).cpu().sum().backward()
        assert str(a.grad.device) == "cpu"
        return b.grad

    assert_like_eager(program, device)


def test_backward_in_the_mode_gives_stand_ins_only() -> None:
    mode = FakeTensorMode()
    real = nn.Linear(3, 2)
    with mode:
        fake = {name: mode.from_tensor(p) for name, p in real.named_parameters()}
        torch.func.functional_call(real, fake, torch.randn(4, 3)).sum().backward()
    assert real.weight.grad is None
    assert type(fake["weight"].grad) is FakeTensor


@on_each_device
def test_outside_of_the_mode(device: str) -> None:
    """Operators and backward on stand-ins go on after the mode is left."""
    with FakeTensorMode():
        x = torch.randn(3, 3, device=device, requires_grad=True)
    y = (x @ x).softmax(-1)
    y.sum().backward()
    assert type(x.grad) is FakeTensor
    assert x.grad.device == torch.device(with_index(device))


@on_each_device
def test_wrong_gradient_shape_is_refused(device: str) -> None:
    with FakeTensorMode():
        x = torch.randn(3, device=device, requires_grad=True)
        with pytest.raises(RuntimeError):
            (x * 2).backward(torch.ones(4, device=device))
        with pytest.raises(RuntimeError, match="implicitly created only for scalar"):
            (x * 2).backward()
        with pytest.raises(RuntimeError):
            x.grad = torch.ones(4, device=device)


@pytest.mark.parametrize("move", [lambda t: t.t_(), lambda t: t.transpose_(0, 1), lambda t: t.unsqueeze_(0)])
def test_dimensions_of_a_tensor_with_differentiated_views_are_not_moved(
    move: Callable[[torch.Tensor], Any],
) -> None:
    """Autograd would make the view anew of the moved tensor: the gradient would be that of other elements."""
    with FakeTensorMode():
        x = torch.ones(3, 3, requires_grad=True)
        base = x.clone()
        view = base[0]
        with pytest.raises(
            UnsupportedMutationAliasingException, match="whose gradient would refer to other elements"
        ):
            move(base)
        del view
        assert move(x.clone()).requires_grad


def test_dimensions_of_tensors_without_gradients_are_moved() -> None:
    with FakeTensorMode():
        base = torch.ones(2, 3)
        view = base[0]
        assert base.t_().shape == (3, 2) and view.shape == (3,)


@pytest.mark.parametrize("env", [None, ShapeEnv()])
def test_anomalies_are_looked_for_and_not_found(env: ShapeEnv | None) -> None:
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(3, 4, requires_grad=True))
    with mode, pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        x.exp().sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_anomalies_of_known_values_are_found() -> None:
    with FakeTensorMode(), pytest.warns(UserWarning), torch.autograd.detect_anomaly():
        x = torch.zeros(3, requires_grad=True)
        with pytest.raises(RuntimeError, match="returned nan values"):
            (x * float("nan")).sum().backward()
