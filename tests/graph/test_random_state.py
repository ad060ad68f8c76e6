"""Random numbers: with the same seed, the graph draws what the program draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.capture.captured import assert_same, captured, check, targets
from understudy import FakeTensorProp, make_fx

DRAWS = {
    "rand": lambda x: x + torch.rand(x.shape),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint": lambda x: x + torch.randint(0, 9, x.shape),
    "randperm": lambda x: x[torch.randperm(x.shape[0])],
    "normal_": lambda x: x + torch.empty_like(x).normal_(1, 2),
    "uniform_ on the input": lambda x: x.uniform_(),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x, 0.3, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature dropout": lambda x: F.dropout1d(x[None], 0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws(name: str) -> None:
    check(DRAWS[name], torch.randn(4, 3), others=((torch.randn(5, 6),),))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("is_first", [True, False])
def test_dropout_between_layers(kind: Any, is_first: bool) -> None:
    layers = kind(3, 3, 3, dropout=0.5, bidirectional=is_first, batch_first=is_first)
    other = torch.randn(5, 4, 3) if is_first else torch.randn(4, 5, 3)  # rounds are written out
    check(lambda x: layers(x)[0], torch.randn(4, 4, 3), modes=("fake",))
    graph = captured(lambda x: layers(x)[0], torch.randn_like(other))
    torch.manual_seed(3)
    found = graph(other)
    torch.manual_seed(3)
    torch.testing.assert_close(found, layers(other)[0])


def test_a_number_that_nobody_uses_is_drawn_all_the_same() -> None:
    def f(x: Tensor) -> Any:
        torch.rand(3)
        return x + torch.rand(2)

    check(f, torch.randn(2))


def test_evaluation_draws_nothing() -> None:
    graph = captured(nn.Dropout(0.5).eval(), torch.randn(3))
    assert targets(graph) == []


def test_a_seed_set_inside_is_set_in_the_graph() -> None:
    def f(x: Tensor) -> Any:
        torch.manual_seed(4)
        return x + torch.rand(2)

    graphs = check(f, torch.randn(2))
    assert torch.equal(graphs["fake"](torch.zeros(2)), graphs["fake"](torch.zeros(2)))


def test_a_seed_counts_for_branches() -> None:
    def f(x: Tensor) -> Any:
        torch.manual_seed(4)
        return torch.cond(x.sum() > 0, lambda x: x + torch.rand(2), lambda x: x - torch.rand(2), (x,))

    graph = captured(f, torch.ones(2), mode="fake")
    torch.manual_seed(4)
    want = torch.ones(2) + torch.rand(2)
    assert torch.equal(graph(torch.ones(2)), want)


def test_a_seed_counts_for_what_is_drawn_after_the_graph() -> None:
    def f(x: Tensor) -> Any:
        torch.manual_seed(4)
        return x * 2

    graph = captured(f, torch.ones(2), mode="fake")
    torch.manual_seed(1)
    graph(torch.ones(2))
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(4).get_state())


def test_a_state_that_is_put_back() -> None:
    def f(x: Tensor) -> Any:
        state = torch.get_rng_state()
        first = torch.rand(2)
        torch.set_rng_state(state)
        return first, torch.rand(2), x

    first, second, _ = check(f, torch.randn(2))["symbolic"](torch.randn(2))
    assert torch.equal(first, second)


def test_a_forked_generator() -> None:
    def f(x: Tensor) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            inside = torch.rand(3)
        return x + inside, torch.rand(3)

    check(f, torch.randn(3))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_numbers_twice(reentrant: bool) -> None:
    def f(x: Tensor) -> Any:
        y = checkpoint(lambda x: F.dropout(x.sin()), x, use_reentrant=reentrant)
        y.sum().backward()
        gradient, x.grad = x.grad, None
        return y.detach(), gradient

    check(f, torch.randn(4, 4, requires_grad=True))


def test_without_a_draw_the_state_is_not_in_the_graph() -> None:
    def f(x: Tensor) -> Any:
        y = checkpoint(torch.sin, x, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)

    assert not any(
        "rng_state" in target for target in targets(captured(f, torch.randn(3, requires_grad=True)))
    )


def test_a_generator_that_is_given() -> None:
    generator = torch.Generator()

    def f(x: Tensor) -> Any:
        generator.manual_seed(7)
        return x + torch.rand(3, generator=generator)

    graph = captured(f, torch.zeros(3), mode="real")
    expected = f(torch.zeros(3))
    generator.manual_seed(7)
    assert torch.equal(graph(torch.zeros(3)), expected)


def test_tracing_on_stand_ins_draws_no_numbers() -> None:
    x = torch.randn(3)
    before = torch.get_rng_state()
    make_fx(lambda x: F.dropout(x), tracing_mode="fake")(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_in_a_program_on_stand_ins_leaves_the_process_alone() -> None:
    def f(x: Tensor) -> Any:
        torch.manual_seed(4)
        state = torch.get_rng_state()
        first = x + torch.rand(2)
        torch.set_rng_state(state)
        return first, torch.rand(2)

    before = torch.get_rng_state()
    graph = make_fx(f, tracing_mode="fake")(torch.ones(2))
    FakeTensorProp(graph).propagate(torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_default_dtype_in_a_program_on_stand_ins_leaves_the_process_alone(mode: str) -> None:
    def f(x: Tensor) -> Any:
        torch.set_default_dtype(torch.float64)
        return x + torch.ones(2)

    graph = make_fx(f, tracing_mode=mode)(torch.ones(2))
    assert torch.get_default_dtype() is torch.float32
    try:
        assert graph(torch.ones(2)).dtype is torch.float64
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_copy_of_a_generator_goes_on_from_its_state() -> None:
    def f(x: Tensor) -> Any:
        generator = torch.Generator().manual_seed(3)
        first = torch.rand(2, generator=generator)
        other = generator.clone_state()
        return x + first, torch.rand(2, generator=generator), torch.rand(2, generator=other)

    check(f, torch.randn(2))


def test_passes_of_torch_keep_changes_of_state() -> None:
    def f(x: Tensor) -> Any:
        torch.manual_seed(4)
        torch.set_default_dtype(torch.float64)
        generator = torch.Generator()
        state = torch.get_rng_state()
        generator.manual_seed(3)
        drawn = torch.rand(2), torch.rand(2, generator=generator)
        torch.set_default_dtype(torch.float32)
        torch.set_rng_state(state)
        return x + torch.rand(2), drawn

    graph = captured(f, torch.ones(2), mode="fake")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    for _ in range(2):
        assert_same(f, graph, torch.ones(2))


# --- generators of the program's own ------------------------------------------------------------------------------


def _seeded_inside(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return x + torch.rand(x.shape, generator=generator) + torch.randn(3, generator=generator)


def _state_put_back(x: Tensor) -> Tensor:
    generator = torch.Generator(device="cpu")
    assert isinstance(generator, torch.Generator)
    generator.manual_seed(3)
    state = generator.get_state()
    first = torch.rand(3, generator=generator)
    generator.set_state(state)
    return x + first - torch.empty(3).uniform_(generator=generator)


@pytest.mark.parametrize("f", [_seeded_inside, _state_put_back])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_each_run_makes_its_own_generator(f: Any, pre_dispatch: bool) -> None:
    for graph in check(f, torch.zeros(2, 3), pre_dispatch=pre_dispatch).values():
        assert torch.equal(graph(torch.zeros(2, 3)), f(torch.zeros(2, 3)))  # once more
    retraced = make_fx(graph, tracing_mode="fake")(torch.zeros(2, 3))
    assert [torch.equal(retraced(torch.zeros(2, 3)), f(torch.zeros(2, 3))) for _ in range(2)] == [True, True]
    assert type(torch.Generator()) is torch.Generator


def test_layers_that_each_seed_a_generator() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + _seeded_inside(x)

    model = nn.Sequential(*(Noisy() for _ in range(4)))
    graph = make_fx(model, tracing_mode="fake")(torch.randn(2, 3))
    x = torch.randn(2, 3)
    assert [torch.equal(graph(x), model(x)) for _ in range(2)] == [True, True]


def test_states_by_the_names_in_torch_random() -> None:
    def f(x: Tensor) -> Tensor:
        state = torch.random.get_rng_state()
        first = torch.rand(3)
        torch.random.set_rng_state(state)
        again = torch.rand(3)
        torch.random.manual_seed(4)
        return x + first - again + torch.rand(3)

    check(f, torch.zeros(3))
