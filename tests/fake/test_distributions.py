"""torch.distributions: its checks of arguments need values, which are taken to be valid where they are not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
from torch import Tensor

from tests.capture.captured import MODES
from tests.fake.sides import assert_like_eager
from understudy import FakeTensorMode, make_fx

MADE: dict[str, Callable[[Tensor], D.Distribution]] = {
    "normal": lambda x: D.Normal(x, x),
    "categorical": lambda x: D.Categorical(logits=x.expand(2, 4)),
    "bernoulli": lambda x: D.Bernoulli(logits=x),
    "beta": lambda x: D.Beta(x, x),
    "gamma": lambda x: D.Gamma(x, x),
    "dirichlet": lambda x: D.Dirichlet(x.expand(2, 4)),
    "independent": lambda x: D.Independent(D.Normal(x, x), 1),
    "mixture": lambda x: D.MixtureSameFamily(D.Categorical(x), D.Normal(x, x)),
    "student": lambda x: D.StudentT(x + 2),
    "binomial": lambda x: D.Binomial(10, x / 20),
}


def program(make: Callable[[Tensor], D.Distribution]) -> Callable[[Tensor], Any]:
    def sample(x: Tensor) -> Any:
        made = make(x)
        drawn = made.sample((3,))
        return drawn, made.log_prob(drawn), made.mean

    return sample


@pytest.mark.parametrize("name", MADE)
def test_on_stand_ins(name: str) -> None:
    assert_like_eager(lambda device: program(MADE[name])(torch.randn(4, device=device) + 9), "cpu")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MADE)
def test_in_a_graph(name: str, mode: str) -> None:
    graph = make_fx(program(MADE[name]), tracing_mode=mode)(torch.rand(4) + 0.5)
    x = torch.rand(4) + 0.5
    torch.manual_seed(0)
    found = graph(x)
    torch.manual_seed(0)
    expected = program(MADE[name])(x)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_values_that_are_known_to_be_invalid_are_refused() -> None:
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.rand(4))
    with mode, pytest.raises(ValueError, match="to satisfy the constraint GreaterThan"):
        D.Normal(x, -torch.ones(4), validate_args=True)  # torch._dynamo switches it off by default


def test_a_real_run_refuses_what_eager_refuses() -> None:
    with pytest.raises(ValueError, match="to satisfy the constraint GreaterThan"):
        make_fx(lambda x: D.Normal(x, x, validate_args=True).sample())(-torch.ones(2))
