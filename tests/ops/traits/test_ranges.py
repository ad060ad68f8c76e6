"""Ranges of values: they hold for every draw of the random numbers that a program computes with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from understudy import FakeTensorMode
from understudy.errors import DataDependentOutputException
from understudy.fake.values.ranges import range_of

DRAWS = 30


def u() -> torch.Tensor:
    return torch.rand(4, 3)


def n() -> torch.Tensor:
    return torch.randint(-3, 6, (4, 3))


PROGRAMS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": u,
    "randint": n,
    "shifted": lambda: u() * 4 - 3,
    "reversed": lambda: 2 - u(),
    "product of both signs": lambda: (u() - 0.5) * (u() * 3 - 2),
    "quotient": lambda: (u() - 0.5) / (u() + 1),
    "negative": lambda: -n(),
    "absolute": lambda: n().abs(),
    "square": lambda: n() * n(),
    "power": lambda: (u() - 0.5).pow(2),
    "exp": lambda: (u() - 1).exp(),
    "log": lambda: (u() + 1).log(),
    "sqrt": lambda: (u() * 9).sqrt(),
    "tanh": lambda: (u() * 8 - 4).tanh(),
    "sigmoid": lambda: (u() * 8 - 4).sigmoid(),
    "relu": lambda: F.relu(u() - 0.5),
    "clamped": lambda: (u() * 10 - 5).clamp(-1, 2),
    "clamped by tensors": lambda: (u() * 10).clamp(torch.tensor(2.0), torch.tensor(4.0)),
    "minimum": lambda: torch.minimum(u(), u() + 0.5),
    "maximum": lambda: torch.maximum(u(), u() + 0.5),
    "where": lambda: torch.where(u() > 0.5, u() + 1, -u()),
    "sum": lambda: u().sum(),
    "sum of a dimension": lambda: n().sum(1),
    "mean": lambda: (u() * 2 - 1).mean(),
    "largest": lambda: n().amax(),
    "smallest": lambda: n().amin(0),
    "positions": lambda: u().argmax(1),
    "softmax": lambda: u().softmax(-1),
    "counted": lambda: n().count_nonzero(),
    "floor": lambda: (u() * 7 - 3).floor(),
    "remainder": lambda: n() % 4,
    "rounded down": lambda: n() // 2,
    "converted": lambda: (u() * 5).to(torch.int64),
    "joined": lambda: torch.cat([u(), u() - 2]),
    "selected": lambda: (u() + 3)[1],
    "filled": lambda: torch.full((3,), 2.5),
    "a comparison": lambda: (u() > 0.3).to(torch.int64),
    "both": lambda: ((u() > 0.3) & (u() < 0.7)).to(torch.int64),
    "dropout": lambda: F.dropout(u() + 1, 0.5, True),
    "bernoulli": lambda: torch.bernoulli(u()),
    "permutation": lambda: torch.randperm(7),
    "added with a factor": lambda: torch.add(u(), u(), alpha=-2),
    "subtracted from": lambda: torch.rsub(u(), 5.0),
    "cumulated": lambda: u().cumsum(0),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_no_draw_leaves_the_range(program: Callable[[], torch.Tensor]) -> None:
    with FakeTensorMode():
        found = range_of(program())
    torch.manual_seed(0)
    for _ in range(DRAWS):
        real = program()
        assert found.low <= real.min().item() and real.max().item() <= found.high


def test_equal_calls_have_the_ranges_of_their_own_inputs() -> None:
    """They have one plan, which keeps what was inferred for each range."""
    with FakeTensorMode():
        for _ in range(2):
            x = torch.rand(())
            lows = []
            for _ in range(4):
                x = x + 1
                lows.append(round(range_of(x).low))
            assert lows == [1, 2, 3, 4]
            assert range_of(torch.randn(()) + 1).low == -math.inf


DECIDED: dict[str, tuple[Callable[[], Any], bool]] = {
    "below its bound": (lambda: (u() < 0).any(), False),
    "not above one": (lambda: (u() <= 1).all(), True),
    "negative": (lambda: (n() < -3).any(), False),
    "at most": (lambda: (n() <= 5).all(), True),
    "no NaN": (lambda: torch.isnan(n()).any(), False),
    "softmax": (lambda: (u().softmax(0) > 1).any(), False),
    "positions": (lambda: u().argmax(1).max() < 3, True),
    "or": (lambda: ((u() < 0) | (u() > 2)).any(), False),
    "and": (lambda: ((u() >= 0) & (u() <= 1)).all(), True),
    "not": (lambda: torch.logical_not(u() < 0).all(), True),
    "absolute": (lambda: (n().abs() < 0).any(), False),
}
OPEN: dict[str, Callable[[], Any]] = {
    "inside": lambda: (u() < 0.5).any(),
    "at the upper bound": lambda: (n() == 5).any(),
    "at the lower bound": lambda: (n() > -3).all(),
    "a mean": lambda: u().mean() > 0.5,
    "normal numbers": lambda: (torch.randn(3) > 100).any(),
    "a quotient by a range with 0": lambda: (1 / (u() - 0.5) > 5).any(),
    "NaN of a logarithm": lambda: torch.isnan((u() - 0.5).log()).any(),
}


@pytest.mark.parametrize(("question", "answer"), DECIDED.values(), ids=DECIDED)
def test_questions_that_the_range_decides(question: Callable[[], Any], answer: bool) -> None:
    torch.manual_seed(0)
    assert all(bool(question()) is answer for _ in range(DRAWS))
    with FakeTensorMode():
        assert bool(question()) is answer


@pytest.mark.parametrize("question", OPEN.values(), ids=OPEN)
def test_questions_that_the_draw_decides(question: Callable[[], Any]) -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        bool(question())


def test_the_likely_share_of_equal_numbers() -> None:
    with FakeTensorMode():
        few, many = torch.randint(0, 4, (9,)), torch.randint(0, 1 << 20, (9,))
        assert range_of(few == 1).likely == 1 / 4  # type: ignore[arg-type]
        assert range_of(few != 1).likely == 3 / 4  # type: ignore[arg-type]
        assert range_of(many == 1).likely == 1 / 2  # type: ignore[arg-type]
