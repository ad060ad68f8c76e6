"""Recurrent layers in symbolic graphs: the number of steps stays a symbol where oneDNN has an operator for the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from understudy import DataDependentOutputException, make_fx

LAYERS: dict[str, Callable[[], Any]] = {
    "GRU": lambda: nn.GRU(4, 6, 2, bidirectional=True, batch_first=True, dropout=0.3),
    "RNN": lambda: nn.RNN(4, 6),
    "RNN, relu": lambda: nn.RNN(4, 6, 3, nonlinearity="relu", dropout=0.3, bias=False),
    "LSTM, projected": lambda: nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True),
    "LSTM": lambda: nn.LSTM(4, 6, 2, batch_first=True, dropout=0.3),
    "LSTM, both ways": lambda: nn.LSTM(4, 6, bidirectional=True, bias=False),
}
WITH_SYMBOLIC_STEPS = ("LSTM", "LSTM, both ways")


def calls(graph: Any) -> list[str]:
    return [
        str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "sym_" not in str(n.target)
    ]


def same(graph: Any, f: Any, *args: Any, exact: bool = True) -> None:
    torch.manual_seed(1)
    expected = tree_leaves(f(*args))
    torch.manual_seed(1)
    found = tree_leaves(graph(*args))
    for a, b in zip(found, expected, strict=True):
        if exact:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b)


def specialised(graph: Any) -> list[str]:
    return [str(guard.condition) for guard in graph.shape_env.guards if guard.is_specialisation]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("train", [False, True])
def test_steps_without_gradients(name: str, train: bool) -> None:
    layer = LAYERS[name]().train(train)
    graph = make_fx(lambda x: layer(x), tracing_mode="symbolic")(torch.randn(3, 5, 4))
    stays = name in WITH_SYMBOLIC_STEPS
    assert (specialised(graph) == []) is stays
    steps_first = not layer.batch_first
    for sizes in ((3, 5, 4), (7, 2, 4) if stays else (3, 2, 4) if steps_first else (2, 5, 4)):
        same(graph, lambda x: layer(x), torch.randn(sizes), exact=stays)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", LAYERS)
def test_gradients(name: str) -> None:
    """They write the steps out, as many as the example has, but where oneDNN has an operator for them."""
    layer, embedding = LAYERS[name](), nn.Embedding(10, 4)
    parameters = [*layer.parameters(), *embedding.parameters()]

    def f(ids: torch.Tensor) -> Any:
        output, state = layer(embedding(ids))
        loss = output.sin().sum() + sum(part.cos().sum() for part in tree_leaves(state))
        return torch.autograd.grad(loss, parameters)

    graph = make_fx(f, tracing_mode="symbolic")(torch.randint(0, 10, (3, 5)))
    stays = name in WITH_SYMBOLIC_STEPS
    assert (specialised(graph) == []) is stays
    same(graph, f, torch.randint(0, 10, (3, 5)), exact=stays)
    batch_first = layer.batch_first
    sizes = (7, 8) if stays else (7, 5) if batch_first else (3, 7)
    same(graph, f, torch.randint(0, 10, sizes), exact=stays)


@pytest.mark.parametrize("name", WITH_SYMBOLIC_STEPS)
@pytest.mark.parametrize("train", [False, True])
def test_the_operators_of_onednn_are_those_of_static_sizes(name: str, train: bool) -> None:
    layer = LAYERS[name]().train(train)

    def f(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(layer(x)[0].sin().sum(), [x, *layer.parameters()])

    x = torch.randn(3, 5, 4)
    symbolic, fake = (
        [name for name in calls(make_fx(f, tracing_mode=mode)(x)) if "mkldnn" in name]
        for mode in ("symbolic", "fake")
    )
    assert symbolic == fake != []


def test_gradients_of_gradients_and_a_state_that_depends_on_the_input() -> None:
    layer = nn.GRU(4, 6).double()

    def f(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        output, _ = layer(x, x.sum(0, keepdim=True) @ x.new_ones(4, 6))
        (gradient,) = torch.autograd.grad(output.sin().sum(), [x], create_graph=True)
        return gradient, torch.autograd.grad(gradient.pow(2).sum(), list(layer.parameters()))

    x = torch.randn(3, 5, 4, dtype=torch.double)
    same(make_fx(f, tracing_mode="symbolic")(x), f, x, exact=False)


def test_a_checkpointed_layer() -> None:
    layer = nn.GRU(4, 6).double()

    def f(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        output = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
        return torch.autograd.grad(output.sin().sum(), list(layer.parameters()))

    x = torch.randn(3, 5, 4, dtype=torch.double)
    same(make_fx(f, tracing_mode="symbolic")(x), f, x, exact=False)


def test_sizes_that_do_not_fit_are_refused() -> None:
    layer = nn.GRU(4, 6)
    weights: list[Any] = list(layer.parameters())

    def f(x: torch.Tensor, h: torch.Tensor) -> Any:
        return torch.gru(x, h, weights, True, 1, 0.0, False, False, False)

    with pytest.raises(RuntimeError):
        make_fx(f, tracing_mode="symbolic")(torch.randn(3, 5, 3), torch.randn(1, 5, 6))


@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_above_autograd_a_layer_is_one_node(name: str) -> None:
    layer = LAYERS[name]().eval()
    x = torch.randn(3, 5, 4)
    graphs = [
        make_fx(lambda x: layer(x)[0], tracing_mode=mode, pre_dispatch=True)(x)
        for mode in ("fake", "symbolic")
    ]
    assert calls(graphs[0]) == calls(graphs[1])
    same(graphs[1], lambda x: layer(x)[0], x)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_layers_on_packed_sequences(mode: str, name: str) -> None:
    layer = LAYERS[name]().eval()

    def f(x: torch.Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 2], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(layer(packed)[0], batch_first=True)

    same(make_fx(f, tracing_mode=mode)(torch.randn(2, 3, 4)), f, torch.randn(2, 3, 4), exact=False)


def test_lengths_that_are_unpacked_in_a_real_run_would_be_fixed() -> None:
    def f(x: torch.Tensor, sizes: torch.Tensor) -> Any:
        return nn.utils.rnn.pad_packed_sequence(nn.utils.rnn.PackedSequence(x, sizes))

    with pytest.raises(DataDependentOutputException, match="the graph would hold"):
        make_fx(f)(torch.randn(5, 4), torch.tensor([2, 2, 1]))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_truncated_normal_numbers_are_in_their_bounds(mode: str) -> None:
    def f(x: torch.Tensor) -> Any:
        return nn.init.trunc_normal_(torch.empty_like(x), 0.5, 2.0, -1.0, 1.0)

    x = torch.empty(20_000)
    drawn, expected = make_fx(f, tracing_mode=mode)(x)(x), f(x)
    assert drawn.min() >= -1 and drawn.max() <= 1
    for statistic in (torch.mean, torch.std):
        assert abs(statistic(drawn) - statistic(expected)) < 0.03
