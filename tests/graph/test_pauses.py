"""The collector of garbage: paused while stand-ins are traced, afterwards as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from understudy import capture_step, make_fx
from understudy.graph.borrowed_state import no_collection


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    before = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if before else gc.disable)()


def seen_by(mode: str, fails: bool = False) -> bool:
    seen: list[bool] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        return x.nosuch if fails else x + 1

    make_fx(program, tracing_mode=mode)(torch.randn(3))
    return seen[0]


def test_it_is_paused_where_nothing_has_data() -> None:
    assert [seen_by(mode) for mode in ("real", "fake", "symbolic")] == [True, False, False]
    assert gc.isenabled()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_after_an_error_it_is_as_it_was(mode: str) -> None:
    with pytest.raises(AttributeError):
        seen_by(mode, fails=True)
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    seen_by("fake")
    assert not gc.isenabled()


def test_it_goes_on_when_the_last_is_done() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with no_collection():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with no_collection(), no_collection():
        pass
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_step_of_training_leaves_it_on() -> None:
    model = torch.nn.Linear(3, 2)

    def loss(*given: Any) -> torch.Tensor:
        return given[0].sum()

    capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 3))
    assert gc.isenabled()
