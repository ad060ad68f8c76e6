"""Gradients, optimizers and the like inside of a traced program: the joint graph comes out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.capture.captured import MODES, assert_same, captured, check, targets
from understudy import make_fx


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


# --- gradients ---------------------------------------------------------------------------------------------------


def test_grad() -> None:
    check(lambda x: torch.autograd.grad((x.sin() * x).sum(), x), leaf(3, 4), others=((leaf(5, 2),),))


def test_second_order() -> None:
    def f(x: Tensor) -> Any:
        (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return first.detach(), torch.autograd.grad(first.sum(), x)

    check(f, leaf(3))


def test_a_batch_of_gradients() -> None:
    def f(x: Any, unused: Any) -> Any:
        gradients = torch.stack([torch.ones_like(x), x.detach()])
        of_batch = torch.autograd.grad(x**2, [x, unused], gradients, is_grads_batched=True, allow_unused=True)
        return of_batch, torch.autograd.functional.jacobian(lambda x: x.sum(0) ** 2, x, vectorize=True)

    x, other = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    gm = make_fx(f, tracing_mode="fake")(x, torch.ones(2, requires_grad=True))
    torch.testing.assert_close(gm(other, torch.ones(2)), f(other, torch.ones(2, requires_grad=True)))


def test_batches_of_gradients_of_a_size_that_was_read() -> None:
    def f(x: Tensor) -> Any:
        y = x.exp()
        of_rows = [torch.autograd.grad(y[row], x, retain_graph=True) for row in range(x.shape[0])]
        return of_rows, torch.autograd.functional.jacobian(torch.exp, x, vectorize=True)

    check(f, leaf(3), modes=("real", "fake"))


def test_backward_of_a_tensor_made_inside() -> None:
    def f(x: Tensor) -> Any:
        y = x.clone().detach().requires_grad_()
        (y * y).sum().backward()
        return y.grad

    check(f, torch.randn(3))


def test_backward_of_an_input_returns_its_gradient() -> None:
    def f(x: Tensor) -> Any:
        (x * x).sum().backward()
        gradient, x.grad = x.grad, None
        return gradient

    check(f, leaf(3))


def test_grad_accumulates() -> None:
    def f(x: Tensor) -> Any:
        y = x.detach().requires_grad_()
        for power in (2, 3):
            (y**power).sum().backward()
        return y.grad

    check(f, torch.randn(3))


def test_no_grad_and_inference() -> None:
    def f(x: Tensor) -> Any:
        with torch.no_grad():
            y = x * 2
        with torch.enable_grad():
            return torch.autograd.grad((x * y).sum(), x)

    check(f, leaf(3))


def triple_gradient(parameter: Any) -> None:
    parameter.grad.mul_(3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("above", [False, True])
def test_hooks_of_parameters_and_inputs_run(mode: str, above: bool) -> None:
    layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    for parameter in layers.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    layers[0].weight.register_post_accumulate_grad_hook(triple_gradient)

    def gradients(x: Tensor) -> Any:
        loss = layers(x).sum()
        found = torch.autograd.grad(loss, [x, *layers.parameters()], retain_graph=True)
        loss.backward()
        accumulated = layers[0].weight.grad
        layers.zero_grad()
        x.grad = None
        return found, accumulated

    x = leaf(2, 3)
    x.register_hook(lambda gradient: gradient * 5)
    graph = make_fx(gradients, tracing_mode=mode, pre_dispatch=above)(x)
    for a, b in zip(*(torch.utils._pytree.tree_leaves(run(x)) for run in (gradients, graph)), strict=True):
        torch.testing.assert_close(a, b)
    assert len(layers[0].weight._backward_hooks) == 1


def test_hooks_run() -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        y.register_hook(lambda gradient: gradient * 10)
        return torch.autograd.grad(y.sum(), x)

    check(f, leaf(3))


def test_in_place_in_the_middle() -> None:
    def f(x: Tensor) -> Any:
        y = x.sin()
        y.mul_(x)
        y[0] = 0
        return torch.autograd.grad(y.sum(), x)

    check(f, leaf(3, 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    def f(x: Tensor) -> Any:
        y = checkpoint(lambda x: (x.exp() * x).cos(), x, use_reentrant=reentrant)
        y.sum().backward()
        gradient, x.grad = x.grad, None
        return gradient

    graphs = check(f, leaf(3, 2))
    assert targets(graphs["fake"]).count("exp.default") == 2  # it is run again


# --- functions of one's own ----------------------------------------------------------------------------------------


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * x * 3.5


def test_autograd_function() -> None:
    check(lambda x: torch.autograd.grad(Cubed.apply(x).sum(), x), leaf(3))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_autograd_function_that_writes() -> None:
    check(lambda x: torch.autograd.grad(Doubled.apply(x.clone()).sum(), x), leaf(3))


# --- modules and optimizers ------------------------------------------------------------------------------------------


def test_gradients_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.LayerNorm(3))

    def f(x: Tensor) -> Any:
        return torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))

    check(f, torch.randn(3, 4), others=((torch.randn(6, 4),),))


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda w: torch.optim.Adam(w, lr=0.1),
    "AdamW for each": lambda w: torch.optim.AdamW(w, lr=0.1, foreach=False),
    "AdamW together": lambda w: torch.optim.AdamW(w, lr=0.1, foreach=True),
    "AdamW capturable": lambda w: torch.optim.AdamW(w, lr=0.1, amsgrad=True),
    "RMSprop": lambda w: torch.optim.RMSprop(w, lr=0.1),
    "Adagrad": lambda w: torch.optim.Adagrad(w, lr=0.1),
    "Adadelta": lambda w: torch.optim.Adadelta(w),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        w = w.detach().clone().requires_grad_()
        optimizer = OPTIMIZERS[name]([w])
        for _ in range(2):
            optimizer.zero_grad()
            (x @ w).pow(2).sum().backward()
            optimizer.step()
        return w.detach()

    check(f, torch.randn(3, 4), torch.randn(4, 2))


def test_a_training_step_writes_the_parameters_of_the_graph() -> None:
    model = nn.Linear(4, 2)
    start = copy.deepcopy(model.state_dict())

    def step(x: Tensor) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.randn(3, 4)
    for mode in ("fake", "symbolic"):
        graph = captured(step, x, mode=mode)
        assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
        expected = copy.deepcopy(model)
        with torch.no_grad():
            loss = graph(x)
        written = copy.deepcopy(model.state_dict())
        model.load_state_dict(start)
        assert torch.equal(loss, step(x))
        assert all(torch.equal(value, written[name]) for name, value in model.state_dict().items())
        model.load_state_dict(expected.state_dict())


def test_batch_norm_writes_its_buffers() -> None:
    model = nn.BatchNorm1d(3)
    start = copy.deepcopy(model.state_dict())
    x = torch.randn(4, 3)
    for mode in MODES:
        graph = captured(model, x, mode=mode)
        assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items()), mode
        result = graph(x)
        after = copy.deepcopy(model.state_dict())
        model.load_state_dict(start)
        assert torch.equal(model(x), result)
        assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
        model.load_state_dict(start)


def test_lstm_and_attention() -> None:
    lstm = nn.LSTM(3, 2, batch_first=True)
    check(lambda x: lstm(x)[0].detach(), torch.randn(2, 5, 3))
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    check(lambda x: attention(x, x, x)[0].detach(), torch.randn(2, 5, 4))


# --- autocast --------------------------------------------------------------------------------------------------------


def test_autocast() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ w + 1

    graphs = check(f, torch.randn(3, 4), torch.randn(4, 2))
    assert "_to_copy.default" in targets(graphs["fake"])


def test_gradients_through_autocast() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.relu(x @ w) @ w.t()
        return torch.autograd.grad(y.float().sum(), w)

    check(f, torch.randn(3, 4), leaf(4, 2))


def test_autocast_inside_of_kernels() -> None:
    """`pinv` and `bilinear` call products inside, which autocast casts; outside of its regions they are one
    node."""

    def f(x: Tensor, weight: Tensor) -> Any:
        def compute() -> Any:
            square = x[1:] + x[1:].mT
            return (
                torch.linalg.pinv(x),
                torch.linalg.pinv(square, hermitian=True),
                F.bilinear(x, x, weight),
            )

        plain = compute()
        with torch.autocast("cpu", torch.bfloat16):
            cast = compute()
        return (
            plain,
            [result.detach() for result in cast],
            torch.autograd.grad(cast[-1].float().sum(), weight),
        )

    graphs = check(f, torch.randn(4, 3), leaf(5, 3, 3))
    assert targets(graphs["fake"]).count("linalg_pinv.atol_rtol_tensor") == 2
    check(f, torch.randn(4, 3), leaf(5, 3, 3), pre_dispatch=True)


@pytest.mark.parametrize("is_inference", [False, True])
def test_autocast_casts_an_operator_as_a_whole(is_inference: bool) -> None:
    """Attention without a fused kernel computes products in float32 inside, which autocast leaves alone."""

    def f(q: Tensor, k: Tensor) -> Any:
        with torch.inference_mode(is_inference), torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, k), torch.tensordot(q[0], k[0].mT, 1)

    q, k = torch.randn(4, 3, 8), torch.randn(4, 6, 8)
    for mode in MODES:
        graph = make_fx(f, tracing_mode=mode)(q, k)
        for got, want in zip(graph(q, k), f(q, k), strict=True):
            assert torch.equal(got, want)


def test_autocast_around_the_trace() -> None:
    linear = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x)  # the cast of the weight is in the cache now
        cached = torch.is_autocast_cache_enabled()
        graph = make_fx(lambda x: linear(x), tracing_mode="fake")(x)
        assert torch.is_autocast_cache_enabled() is cached
    assert graph(x).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(linear, graph, x)


# --- operators of one's own --------------------------------------------------------------------------------------------


@torch.library.custom_op("understudy_fx_tests::triple", mutates_args=())
def triple(x: Tensor) -> Tensor:
    return x * 3


triple.register_fake(lambda x: torch.empty_like(x))
triple.register_autograd(lambda ctx, gradient: gradient * 3)


@torch.library.custom_op("understudy_fx_tests::bump", mutates_args=("x",))
def bump(x: Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("understudy_fx_tests::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x * 2


def test_custom_operator() -> None:
    graphs = check(lambda x: triple(x) + 1, torch.randn(3))
    assert "understudy_fx_tests.triple.default" in targets(graphs["symbolic"])
    check(lambda x: torch.autograd.grad(triple(x).sum(), x), leaf(3))


def test_custom_operator_that_writes_and_returns_nothing() -> None:
    def f(x: Tensor) -> Any:
        bump(x, 2.0)
        return x * 2

    check(f, torch.randn(3))


def test_custom_operator_that_says_nothing_about_its_result() -> None:
    check(lambda x: unknown(x) + 1, torch.randn(3), modes=("real",))
    with pytest.raises(RuntimeError, match=r"torch\.library\.register_fake"):
        captured(lambda x: unknown(x) + 1, torch.randn(3), mode="fake")


def test_backward_nodes_say_which_forward_nodes_they_belong_to() -> None:
    from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks

    def f(x: Tensor, w: Tensor) -> Any:
        loss = (x @ w).relu().sin().sum()
        setup_stacktrace_preservation_hooks([loss.grad_fn])
        return torch.autograd.grad(loss, [x, w])

    args = torch.randn(2, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    for mode in MODES:
        with torch.fx.traceback.preserve_node_meta():
            graph = make_fx(f, tracing_mode=mode)(*args)
        numbers = {node.name: node.meta["seq_nr"] for node in graph.graph.nodes if node.op == "call_function"}
        assert numbers["threshold_backward"] == numbers["relu"]
        assert numbers["cos"] == numbers["sin"] == numbers["relu"] + 1
        assert numbers["mm_1"] == numbers["mm_2"] == numbers["mm"]
