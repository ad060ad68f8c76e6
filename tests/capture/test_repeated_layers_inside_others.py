"""Layers inside of layers, which differ somewhere; and layers that look at what a tensor's spec does not say."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.capture.test_repeated_layers import Layer, Stack
from tests.capture.test_repeated_layers_state import assert_same_graph, calling

# --- layers inside of layers ------------------------------------------------------------------------------------------


class Stage(Stack):
    def __init__(self) -> None:
        super().__init__(Layer, 3)


def differing(change: Callable[[Any], Any]) -> Callable[[], Any]:
    def make() -> Stack:
        model = Stack(Stage, 5)
        change(model.layers[3].layers[1])
        return model

    return make


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.norm, "eps", 0.3),
        lambda layer: setattr(layer, "act", nn.Tanh()),
        lambda layer: layer.up.register_forward_hook(lambda module, args, result: result * 2),
        lambda layer: setattr(layer.up, "name", "another"),  # which nobody reads
    ],
    ids=["number", "module", "hook", "unread"],
)
def test_an_inner_layer_that_differs(change: Callable[[Any], Any], mode: str) -> None:
    assert_same_graph(differing(change), mode)


# --- random models: what differs is anywhere ---------------------------------------------------------------------------

CALLS = {"count": 0}


class Leaf(Layer):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind, self.factor, self.note = kind, 1, ""
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        y = super().forward(x)
        if self.kind == 0:
            return y * self.factor
        if self.kind == 1:
            return self.dropout(y)
        if self.kind == 2:
            return y + (others[0] if others else 0)
        if self.kind == 3:
            CALLS["count"] += 1
            return y * CALLS["count"]
        return y * getattr(self, "optional", 1)


class Group(nn.Module):
    def __init__(self, chooses: random.Random, depth: int, kind: int) -> None:
        super().__init__()
        self.kind, self.factor, self.skips = kind, 1, False
        self.first = nn.Linear(8, 8)
        self.parts = nn.ModuleList(similar(chooses, depth - 1, chooses.randint(1, 3)))

    def forward(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        y = self.first(x) * (self.factor if self.kind == 0 else 1)
        for number, part in enumerate(self.parts):
            if not self.skips or number != 1:
                y = part(y, x) if self.kind == 1 else part(y, *others)
        return y + x


def similar(chooses: random.Random, depth: int, count: int) -> list[nn.Module]:
    """Modules that are made alike."""
    state = chooses.getstate()
    made: list[nn.Module] = []
    for _ in range(count):
        chooses.setstate(state)
        kind = chooses.randrange(5)
        made.append(Leaf(kind) if depth <= 0 else Group(chooses, depth, kind))
    return made


CHANGES: list[tuple[type, Callable[[Any, random.Random], Any]]] = [
    (nn.LayerNorm, lambda module, chooses: setattr(module, "eps", chooses.choice([1e-3, 0.1]))),
    (nn.Dropout, lambda module, chooses: setattr(module, "p", 0.5)),
    (nn.Linear, lambda module, chooses: setattr(module, "note", "unread")),
    (nn.Linear, lambda module, chooses: module.register_forward_hook(lambda *call: call[2] * 2)),
    (Leaf, lambda module, chooses: setattr(module, "factor", 3)),
    (Leaf, lambda module, chooses: setattr(module, "kind", chooses.randrange(5))),
    (Leaf, lambda module, chooses: setattr(module, "optional", 3)),
    (Leaf, lambda module, chooses: setattr(module, "note", "unread")),
    (Leaf, lambda module, chooses: setattr(module, "act", nn.Tanh())),
    (Leaf, lambda module, chooses: setattr(module, "forward", lambda x, *others: x * 3)),
    (Leaf, lambda module, chooses: module.eval()),
    (Group, lambda module, chooses: setattr(module, "factor", 3)),
    (Group, lambda module, chooses: setattr(module, "skips", True)),
]


class RandomModel(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        CALLS["count"] = 0
        chooses = random.Random(seed)
        self.layers = nn.ModuleList(similar(chooses, chooses.randint(0, 2), chooses.randint(2, 5)))
        self.hands_over = chooses.randrange(4)
        modules = [module for module in self.modules() if module is not self]
        for _ in range(chooses.randrange(4)):
            kind, change = chooses.choice(CHANGES)
            change(chooses.choice([module for module in modules if isinstance(module, kind)] or [self]), chooses)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        before = x
        for number, layer in enumerate(self.layers):
            others: tuple[Any, ...] = ((), (before,), (number % 2,), ())[self.hands_over]
            x, before = layer(layer(x) if self.hands_over == 3 else x, *others), x
        return x


@pytest.mark.parametrize("seed", range(40))
def test_random_models(seed: int) -> None:
    assert_same_graph(lambda: RandomModel(seed), ("fake", "symbolic")[seed % 2])


# --- tensors are more than their specs ----------------------------------------------------------------------------------


def every_other(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """Calls layers, of which every other one is given a changed tensor."""
    count = [0]

    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return layer(change(x) if count[0] % 2 else x)

    return call


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.grad = torch.zeros_like(x)
    return x


def for_inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


FACTS: dict[str, tuple[Callable[[Any], float], Callable[[torch.Tensor], torch.Tensor]]] = {
    "version": (lambda x: 1.0 + x._version, lambda x: x.clone().mul_(1)),
    "base": (lambda x: 1.0 if x._base is None else 2.0, lambda x: x[:]),
    "size of its base": (lambda x: 1.0 if x._base is None else x._base.shape[0], lambda x: torch.cat([x, x])[:3]),
    "is a view": (lambda x: 1.0 + x._is_view(), lambda x: x[:]),
    "size of its storage": (lambda x: x.untyped_storage().nbytes() / 32, lambda x: torch.cat([x, x])[:3]),
    "gradient": (lambda x: 1.0 if x.grad is None else 2.0, with_gradient),
    "inference": (lambda x: 1.0 + x.is_inference(), for_inference),
}


@pytest.mark.parametrize("fact", FACTS)
def test_what_a_layer_asks_of_its_input(fact: str) -> None:
    ask, change = FACTS[fact]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return Layer.forward(self, x, ask(x))

    with torch.no_grad():
        assert_same_graph(lambda: calling(forward, every_other(change)))


def test_ranges_of_values_by_which_a_layer_decides() -> None:
    def forward(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return Layer.forward(self, x, 2.0 if gate < 0 else 3.0)

    def make() -> Any:
        numbers = iter(range(100))
        return calling(forward, lambda layer, x: layer(x, torch.rand(()) - 5 * (next(numbers) % 2)))

    assert_same_graph(make)
