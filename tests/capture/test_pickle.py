"""Graphs out of a pickle do what they did: also calls that are given nothing, which torch would run while it reads them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.capture.captured import MODES, assert_same, captured


def with_own_generator(x: Tensor) -> Any:
    generator = torch.Generator().manual_seed(3)
    return x + torch.rand(3, 4, generator=generator)


def with_a_seed(x: Tensor) -> Any:
    torch.manual_seed(7)
    return x + torch.rand(3, 4)


def with_a_state(x: Tensor) -> Any:
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    return x + first, torch.rand(4)


def without_gradients(x: Tensor) -> Any:
    with torch.no_grad():
        return x * torch.ones(4)


def with_a_default_dtype(x: Tensor) -> Any:
    torch.set_default_dtype(torch.float64)
    y = x + torch.ones(4)
    torch.set_default_dtype(torch.float32)
    return y


def with_branches(x: Tensor) -> Any:
    def inner(z: Tensor) -> Tensor:
        return torch.cond(z.sum() > 1, lambda y: y + torch.rand(4), lambda y: y - 1, (z,))

    return torch.cond(x.sum() > 0, inner, lambda z: z * torch.zeros(4).add_(1), (x,))


PROGRAMS: dict[str, Any] = {
    "random numbers": lambda x: F.dropout(x) + torch.rand(3, 1),
    "zeros that are written to": lambda x: torch.zeros(4).add_(x[0]),
    "a literal that is written to": lambda x: torch.tensor([1.0, 2.0, 3.0, 4.0]).add_(x[0]),
    "a generator": with_own_generator,
    "a seed": with_a_seed,
    "a state of the generator": with_a_state,
    "a default dtype": with_a_default_dtype,
    "results with names": lambda x: (x.sort(0), [x.median(1)]),
    "no gradients": without_gradients,
    "branches": with_branches,
    "tensors of the sizes of others": lambda x: (
        torch.zeros(2, x.shape[0]) + torch.arange(x.shape[0]) + x.new_ones(x.shape)[:, 0]
    ),
}

ONE_SIZE = ("random numbers", "a generator", "a seed")
"""Programs that are for three rows."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_out_of_a_pickle(name: str, mode: str) -> None:
    f = PROGRAMS[name]
    for above in (False, True):
        graph = captured(f, torch.randn(3, 4), mode=mode, pre_dispatch=above)
        again = pickle.loads(pickle.dumps(graph))
        once_more = pickle.loads(pickle.dumps(again))
        for rows in (3, 3, 5) if mode == "symbolic" and name not in ONE_SIZE else (3, 3):
            x = torch.randn(rows, 4)
            assert_same(f, again, x)
            assert_same(f, once_more, x)


@dataclass
class Pair:
    first: Tensor
    others: Any


torch.utils._pytree.register_dataclass(Pair)


@pytest.mark.parametrize("mode", MODES)
def test_graphs_of_structures_out_of_a_pickle(mode: str) -> None:
    """torch traces the code of the graph, in which a proxy of a structure can't be taken apart."""

    def program(pair: Pair, number: Any) -> Pair:
        return Pair(pair.first * number["k"], [pair.others[0].sort(), None, pair.first])

    given = Pair(torch.randn(3, 4), (torch.randn(2),)), {"k": 2.5}
    graph = pickle.loads(pickle.dumps(captured(program, *given, mode=mode)))
    assert_same(program, graph, *given)
    assert_same(program, pickle.loads(pickle.dumps(graph)), *given)
    assert "list" not in graph.code.splitlines()[0]  # an annotation of ours
