"""docs/known-gaps.md is true: the gaps are there, and what it recommends instead works.

A test that fails because a gap is gone asks for its row to be deleted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from understudy import FakeTensorMode, ShapeEnv, dims, make_fx
from understudy.errors import NoDataError, UnsupportedFakeTensorException

Program = Callable[[], Any]


def raised_in_the_mode(program: Program) -> str:
    with FakeTensorMode(), pytest.raises(Exception) as caught:
        program()
    return str(caught.value)


def no_data() -> Any:
    return torch.randn(3)


NEEDS_DATA: dict[str, Program] = {
    "item": lambda: no_data().sum().item(),
    "branch": lambda: bool(no_data().sum() > 0),
    "nonzero": lambda: no_data().nonzero(),
    "mask": lambda: no_data()[no_data() > 0],
    "data_ptr": lambda: torch.arange(3).data_ptr(),
    "numpy": lambda: no_data().numpy(),
    "dlpack": lambda: torch.utils.dlpack.to_dlpack(no_data()),
    "filled": lambda: nn.LayerNorm(4).weight.tolist(),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "adaptive": lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5])(torch.randn(6, 8), torch.randint(20, (6,))),
}
HAS_ITS_OWN_ERROR: dict[str, tuple[Program, str]] = {
    "nested operands": (
        lambda: torch.cond(no_data().sum() > 0, lambda x: x[0] + 1, lambda x: x[0] - 1, ([no_data()],)),
        "can only be of",
    ),
}


@pytest.mark.parametrize("program", NEEDS_DATA.values(), ids=NEEDS_DATA)
def test_there_is_no_data(program: Program) -> None:
    assert "to do:" in raised_in_the_mode(program)


@pytest.mark.parametrize(("program", "message"), HAS_ITS_OWN_ERROR.values(), ids=HAS_ITS_OWN_ERROR)
def test_the_words_to_search_for(program: Program, message: str) -> None:
    assert message in raised_in_the_mode(program)


def test_determined_values_can_be_read() -> None:
    with FakeTensorMode():
        assert torch.arange(3).numpy().tolist() == [0, 1, 2]
        assert nn.Parameter(torch.ones(2)).tolist() == [1.0, 1.0]


def test_tensors_that_are_not_converted() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    quantised = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8)
    for real in (nested, quantised):
        with pytest.raises(UnsupportedFakeTensorException):
            FakeTensorMode().from_tensor(real)


def symbolic(*shape: int, **options: Any) -> tuple[ShapeEnv, FakeTensorMode, torch.Tensor]:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    names = dims(*"abc"[: len(shape)])
    return env, mode, mode.from_tensor(torch.zeros(*shape, **options), source="x", symbolic_context=names)


@pytest.mark.parametrize(
    "layer", [lambda: nn.GRU(5, 4), lambda: nn.RNN(5, 4), lambda: nn.LSTM(5, 4, proj_size=2)]
)
def test_steps_of_recurrent_layers_are_fixed(layer: Program) -> None:
    env, mode, x = symbolic(7, 3, 5)
    with mode:
        layer()(x)
    assert "a == 7" in [guard.text for guard in env.guards]


KEEP_SYMBOLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "lstm": lambda x: nn.LSTM(5, 4)(x),
    "histogram": lambda x: torch.histogram(x, 5),
    "stft": lambda x: torch.stft(x.flatten(1), 4, return_complex=True, window=torch.ones(4)),
}
"""What the page once had, or has as the way out."""


@pytest.mark.parametrize("program", KEEP_SYMBOLS.values(), ids=KEEP_SYMBOLS)
def test_sizes_stay_symbols(program: Callable[[torch.Tensor], Any]) -> None:
    env, mode, x = symbolic(7, 3, 5)
    with mode:
        program(x)
    assert not [guard for guard in env.guards if guard.text in ("a == 7", "b == 3")]


def test_istft_runs_on_symbols() -> None:
    window = torch.hann_window(64)

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        there = torch.stft(x, 64, return_complex=True, window=window)
        return torch.istft(there, 64, window=window)

    graph = make_fx(there_and_back, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.randn(2, 400))
    assert graph(torch.randn(3, 512)).shape == (3, 512)
    _, mode, x = symbolic(2, 400)
    with mode:
        back = torch.istft(
            torch.stft(x, 64, return_complex=True, window=torch.ones(64)), 64, window=torch.ones(64)
        )
    assert str(back.shape) == "torch.Size([a, 16*(b//16)])"


def test_bytes_of_a_storage_are_not_followed() -> None:
    _, mode, x = symbolic(7, 3)
    with mode:
        y = x + 1
    assert (x.untyped_storage().nbytes(), y.untyped_storage().nbytes(), str(x.nbytes)) == (84, 0, "4*a*b")


def test_graphs_and_their_environment() -> None:
    graph = make_fx(lambda x: x.view(-1, 2), tracing_mode="symbolic")(torch.zeros(4, 3))
    assert graph.shape_env.guards
    assert copy.deepcopy(graph).shape_env is None


def test_a_generator_from_outside_is_seeded_while_tracing() -> None:
    generator = torch.Generator()

    def program(x: torch.Tensor) -> torch.Tensor:
        generator.manual_seed(0)
        return x + torch.rand(3, generator=generator)

    graph = make_fx(program, tracing_mode="fake")(torch.zeros(3))
    assert not graph.graph.find_nodes(op="call_method", target="manual_seed")


def test_real_data_is_not_given_away() -> None:
    with FakeTensorMode(), pytest.raises(NoDataError, match="is a stand-in and has no data"):
        torch.randn(3).__dlpack__()


def test_composite_views_of_symbolic_sizes_count_their_own_writes_in_inference_mode() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.zeros(2, 3))
    with mode, torch.inference_mode():
        x.t().add_(1)
        x.T.add_(1)
    assert x._version == 1


def test_writes_through_data_count_in_a_graph() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x.data.mul_(2)
        return x

    x = torch.ones(3)
    assert write(x)._version == 0
    assert make_fx(write)(torch.ones(3))(x)._version == 1


def test_a_tensor_at_a_symbolic_place_is_no_size() -> None:
    x, lengths = torch.randn(2, 3), torch.tensor([1, 2, 4])
    with pytest.raises(RuntimeError, match="Cannot call numel"):
        make_fx(lambda x, lengths: x.repeat(lengths[-1], 1), tracing_mode="symbolic")(x, lengths)
    for program in (
        lambda x, n: x.repeat(n[-1].item(), 1),
        lambda x, n: x.repeat(n[1], 1),
        lambda x, n: torch.arange(n[-1]),
    ):
        graph = make_fx(program, tracing_mode="symbolic")(x, lengths)
        assert torch.equal(graph(x, lengths), program(x, lengths))
