"""Gradients and transforms of torch.func through higher-order operators; the joint graph comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

from understudy import FakeTensorMode, UnsupportedMutationAliasingException, make_fx

pytestmark = pytest.mark.filterwarnings("ignore")
MODES = ("real", "fake", "symbolic")
in_each_mode = pytest.mark.parametrize("mode", MODES)
Program = Callable[[Tensor, Tensor], Tensor]


def cond_loss(x: Tensor, w: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: (x * w).sin(), lambda x: (x + w) * w, (x,)).sum()


def plain_cond(x: Tensor, w: Tensor) -> Tensor:
    return ((x * w).sin() if x.sum() > 0 else (x + w) * w).sum()


def scan_loss(x: Tensor, w: Tensor) -> Tensor:
    carry, rows = scan(lambda carry, row: (carry + row * w, carry * row * w), w * 0, x)
    return carry.sum() + rows.sum()


def plain_scan(x: Tensor, w: Tensor) -> Tensor:
    carry, total = w * 0, torch.zeros(())
    for row in x:
        total = total + (carry * row * w).sum()
        carry = carry + row * w
    return carry.sum() + total


def map_loss(x: Tensor, w: Tensor) -> Tensor:
    return map_over(lambda row: (row * w).sin(), x).sum()


def plain_map(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin().sum()


def loop_loss(x: Tensor, w: Tensor) -> Tensor:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * w), (torch.tensor(0), x))[1].sum()


def plain_loop(x: Tensor, w: Tensor) -> Tensor:
    return (x * w * w * w).sum()


PROGRAMS: dict[str, tuple[Program, Program]] = {
    "cond": (cond_loss, plain_cond),
    "scan": (scan_loss, plain_scan),
    "map": (map_loss, plain_map),
    "while_loop": (loop_loss, plain_loop),
}
each_program = pytest.mark.parametrize("name", PROGRAMS)


def inputs(length: int, width: int, sign: int = 1) -> tuple[Tensor, Tensor]:
    return sign * torch.rand(length, width), torch.randn(width)


def all_inputs(mode: str) -> list[tuple[Tensor, Tensor]]:
    same = [inputs(4, 3), inputs(4, 3, -1)]
    return [*same, inputs(6, 2), inputs(2, 5, -1)] if mode == "symbolic" else same


def by_autograd(f: Program) -> Callable[..., Any]:
    def gradients(x: Tensor, w: Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(f(x, w), (x, w))

    return gradients


@each_program
@in_each_mode
def test_joint_graph_by_autograd(name: str, mode: str) -> None:
    f, plain = PROGRAMS[name]
    gm = make_fx(by_autograd(f), tracing_mode=mode)(*inputs(4, 3))
    for given in all_inputs(mode):
        torch.testing.assert_close(gm(*given), by_autograd(plain)(*given))
    assert len([node for node in gm.graph.find_nodes(op="get_attr") if "graph" in str(node.target)]) >= 2


@each_program
@in_each_mode
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_joint_graph_by_torch_func(name: str, mode: str, argnums: Any) -> None:
    f, plain = PROGRAMS[name]
    gm = make_fx(torch.func.grad(f, argnums=argnums), tracing_mode=mode)(*inputs(4, 3))
    for given in all_inputs(mode):
        torch.testing.assert_close(gm(*given), torch.func.grad(plain, argnums=argnums)(*given))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad * w**3, (grad * x * 3 * w**2).sum(0)


@in_each_mode
def test_functions_with_gradients_of_their_own_in_a_branch(mode: str) -> None:
    def given(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, Cube.apply, lambda x, w: x * w, (x, w)).sum()

    def closed_over(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: Cube.apply(x, w), lambda x: x * w, (x,)).sum()

    x, w = inputs(4, 3)
    gm = make_fx(by_autograd(given), tracing_mode=mode)(x, w)
    torch.testing.assert_close(gm(x, w), by_autograd(lambda x, w: (x * w**3).sum())(x, w))
    with pytest.raises(
        UnsupportedMutationAliasingException, match=r"(?s)autograd.Function: its gradient.*as an operand"
    ):
        make_fx(by_autograd(closed_over), tracing_mode=mode)(x, w)


@in_each_mode
def test_gradients_asked_for_inside_of_a_branch(mode: str) -> None:
    def by_tape(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(leaf.sin().sum(), leaf)[0]

    def f(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, by_tape, torch.func.grad(lambda x: x.exp().sum()), (x,))

    gm = make_fx(f, tracing_mode=mode)(torch.ones(3))
    for x in (torch.rand(3), -torch.rand(3)):
        torch.testing.assert_close(gm(x), x.cos() if x.sum() > 0 else x.exp())


@in_each_mode
def test_training_step_of_a_module_with_a_choice_in_it(mode: str) -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.yes = nn.Linear(3, 3)
            self.no = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, self.yes, self.no, (x,))

    gate = Gate()

    def step(x: Tensor) -> Any:
        return torch.autograd.grad(gate(x).square().sum(), tuple(gate.parameters()))

    def plain(x: Tensor) -> Any:
        loss = (gate.yes(x) if x.sum() > 0 else gate.no(x)).square().sum()
        return torch.autograd.grad(loss, tuple(gate.parameters()), materialize_grads=True)

    gm = make_fx(step, tracing_mode=mode)(torch.rand(2, 3))
    for x in (torch.rand(2, 3), -torch.rand(2, 3)):
        torch.testing.assert_close(gm(x), plain(x))


@in_each_mode
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_is_traced_through(mode: str, use_reentrant: bool) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        checkpoint(lambda a, b: (a * b).sin(), x, w, use_reentrant=use_reentrant).sum().backward()
        assert w.grad is not None
        return w.grad

    gm = make_fx(f, tracing_mode=mode)(*inputs(4, 3))
    x, w = inputs(4, 3)
    torch.testing.assert_close(gm(x, w), ((x * w).cos() * x).sum(0))


def test_linearize_on_stand_ins() -> None:
    with FakeTensorMode():
        out, jvp = torch.func.linearize(lambda x: x.sin() * 2, torch.rand(3))
        assert (out.shape, jvp(torch.rand(3)).shape) == ((3,), (3,))


@in_each_mode
def test_functionalize(mode: str) -> None:
    def f(x: Tensor) -> Tensor:
        y = x.clone()
        y.add_(1)
        return torch.cond(y.sum() > 0, lambda x: x.clone().mul_(2), lambda x: x - 1, (y,))

    gm = make_fx(torch.func.functionalize(f), tracing_mode=mode)(torch.ones(3))
    for x in (torch.rand(3), torch.rand(3) - 5):
        torch.testing.assert_close(gm(x), (x + 1) * 2 if (x + 1).sum() > 0 else x)
