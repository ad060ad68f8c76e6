"""Every layer of a model is run, whatever captures it and however alike the layers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from understudy import capture_step, export, make_fx, run_every_layer

LAYERS = 6
called: list[int] = []


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.act, self.down, self.norm = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        called.append(self.number)
        y: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(number) for number in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def step(model: nn.Module, x: torch.Tensor) -> None:
    capture_step(model, lambda y: y.sum(), torch.optim.AdamW(model.parameters()), x)


CAPTURES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "fake": lambda model, x: make_fx(model, tracing_mode="fake")(x),
    "symbolic": lambda model, x: make_fx(model, tracing_mode="symbolic")(x),
    "pre-dispatch": lambda model, x: make_fx(model, tracing_mode="fake", pre_dispatch=True)(x),
    "export": lambda model, x: export(model, (x,)),
    "capture_step": step,
}


@pytest.mark.parametrize("name", CAPTURES)
@pytest.mark.parametrize("is_grad_enabled", [True, False])
def test_each_layer_is_run_once(name: str, is_grad_enabled: bool) -> None:
    called.clear()
    with torch.set_grad_enabled(is_grad_enabled or name == "capture_step"):
        CAPTURES[name](Model(), torch.randn(2, 4))
    assert called == list(range(LAYERS))


def test_run_every_layer_is_deprecated_and_has_no_effect() -> None:
    model, x = Model(), torch.randn(2, 4)
    expected = make_fx(model, tracing_mode="fake")(x).code
    called.clear()
    with (
        pytest.warns(DeprecationWarning, match="run_every_layer has no effect: every layer is run"),
        run_every_layer(),
    ):
        assert make_fx(model, tracing_mode="fake")(x).code == expected
    assert called == list(range(LAYERS))
