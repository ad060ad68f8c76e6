"""What training needs at least, by formula: a second way to know, beside the allocations that were measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from understudy.simulation.least_memory import STATE_TENSORS, least_bytes

PARAMETERS = 8 * 8 + 8

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "Adam with amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop, centred, with momentum": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_formula_counts_the_state_of_real_optimizers(name: str) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = sum(
        value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    assert least_bytes([optimizer]) == {torch.device("cpu"): 4 * 2 * PARAMETERS + state}


def test_every_formula_is_compared_with_a_real_optimizer() -> None:
    made = {type(make([torch.nn.Parameter(torch.ones(1))])) for make in OPTIMIZERS.values()}
    assert made == set(STATE_TENSORS)


def test_shared_memory_counts_once_and_missing_gradients_not_at_all() -> None:
    first = torch.nn.Parameter(torch.ones(4))
    second = torch.nn.Parameter(first.detach())
    optimizers = [torch.optim.Adam([first, second]), torch.optim.Adam([first])]
    assert least_bytes(optimizers) == {torch.device("cpu"): 4 * 4}


def test_a_subclass_counts_as_having_no_state() -> None:
    class Lean(torch.optim.Adam):
        pass

    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optimizer = Lean([parameter])
    optimizer.step()
    assert least_bytes([optimizer]) == {torch.device("cpu"): 2 * 4 * 4}
