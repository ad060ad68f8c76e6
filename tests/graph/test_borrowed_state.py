"""What modules keep besides their tensors: after a trace it is as before; what they held before is a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from understudy import (
    FakeTensor,
    MetaTraceError,
    MixedTensorsError,
    UnsupportedOperatorException,
    export,
    make_fx,
    symbolic_trace,
)

X = torch.randn(2, 3)
TABLES: dict[str, Any] = {}


def made(length: int) -> torch.Tensor:
    return torch.arange(length) * 2.0


class Cache:
    def __init__(self) -> None:
        self.length, self.made = 0, None

    def get(self, length: int) -> Any:
        if self.length < length:
            self.length, self.made = length, made(length)
        return self.made


class OfObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cache.get(x.shape[1])


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = int(x.shape[1])
        if length not in self.tables:
            self.tables[length] = made(length)
        return x * self.tables[length]


class OfList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.pairs:
            self.pairs.append((made(x.shape[1]), 1))
        return x * self.pairs[0][0]


class OfAttribute(nn.Module):
    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = made(x.shape[1])
        return x * self.table


MODULES = [OfObject, OfDict, OfList, OfAttribute]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("kind", MODULES)
def test_nothing_of_the_trace_stays_in_a_module(kind: type[nn.Module], mode: str) -> None:
    program = kind()
    graph = make_fx(program, tracing_mode=mode)(X)
    after = program(X)
    assert type(after) is torch.Tensor
    assert torch.equal(graph(X), after)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_nothing_of_a_torch_level_trace_stays_in_a_module(kind: type[nn.Module], is_kept: bool) -> None:
    program = kind()
    before = program(X) if is_kept else None
    traced = symbolic_trace(program, meta_args={"x": X.to("meta")})
    after = program(X)
    assert type(after) is torch.Tensor and (before is None or torch.equal(before, after))
    assert torch.equal(traced(X), after)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("kind", MODULES)
def test_what_a_module_kept_before_is_a_constant(kind: type[nn.Module], mode: str) -> None:
    program = kind()
    before = program(X)
    graph = make_fx(program, tracing_mode=mode)(X)
    assert torch.equal(graph(X), before)
    assert torch.equal(program(X), before)


def test_after_an_error() -> None:
    class Fails(OfDict):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyError("no")

    program = Fails()
    with pytest.raises(KeyError):
        make_fx(program, tracing_mode="fake")(X)
    assert not program.tables


def by_global_dict(x: torch.Tensor) -> torch.Tensor:
    if "a" not in TABLES:
        TABLES["a"] = made(x.shape[1])
    return x * TABLES["a"]


def test_globals_are_left_as_the_program_leaves_them() -> None:
    TABLES.clear()
    make_fx(by_global_dict, tracing_mode="fake")(X)
    assert type(TABLES["a"]) is FakeTensor
    with pytest.raises(MixedTensorsError, match="is a stand-in that was made outside of this trace"):
        make_fx(by_global_dict, tracing_mode="fake")(X)
    TABLES.clear()
    by_global_dict(X)
    with pytest.raises(MixedTensorsError, match="got a real tensor"):
        make_fx(by_global_dict, tracing_mode="fake")(X)
    graph = make_fx(by_global_dict, tracing_mode="fake", allow_non_fake_inputs=True)(X)
    assert torch.equal(graph(X), by_global_dict(X))


def test_what_holds_no_stand_ins_stays() -> None:
    counts: list[int] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        counts.append(len(counts))
        return x + 1

    make_fx(program, tracing_mode="fake")(X)
    assert counts == [0]


# --- buffers to which a module assigns ---------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.ones(3))


class Mean(Buffered):
    def forward(self, x: torch.Tensor) -> Any:
        self.first = 0.9 * self.first + x.mean(0)
        self.first = self.first + 1
        return x - self.first


class Delays(Buffered):
    def forward(self, x: torch.Tensor) -> Any:
        result = x + self.first + 2 * self.second
        self.second = self.first
        self.first = x[0].clone()
        return result


class Exchanges(Buffered):
    def forward(self, x: torch.Tensor) -> Any:
        self.first, self.second = self.second, self.first
        return x + self.first


class AssignsItself(Buffered):
    def forward(self, x: torch.Tensor) -> Any:
        self.first = self.first.detach()
        self.second = self.second.contiguous()
        return x + self.first


ROUTES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "real": lambda model, x: make_fx(model)(x),
    "fake": lambda model, x: make_fx(model, tracing_mode="fake")(x),
    "symbolic": lambda model, x: make_fx(model, tracing_mode="symbolic")(x),
    "above autograd": lambda model, x: make_fx(model, tracing_mode="fake", pre_dispatch=True)(x),
    "torch level": lambda model, x: symbolic_trace(model, {"x": x}),
    "exported": lambda model, x: export(model, (x,)).module(),
    "decomposed": lambda model, x: export(
        model, (x,), decompositions=torch.export.default_decompositions()
    ).module(),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", [Mean, Delays, Exchanges, AssignsItself])
def test_buffers_that_are_assigned(kind: type[nn.Module], route: str) -> None:
    program, model = kind(), kind()
    before = dict(model.named_buffers())
    graph = ROUTES[route](model, X)
    assert all(model.get_buffer(name) is buffer for name, buffer in before.items())
    assert torch.equal(model.get_buffer("first"), torch.zeros(3))
    for _ in range(3):
        x = torch.randn(2, 3)
        torch.testing.assert_close(graph(x), program(x))
    for name, buffer in graph.named_buffers():
        torch.testing.assert_close(buffer, program.get_buffer(name))


class Grows(Buffered):
    def forward(self, x: torch.Tensor) -> Any:
        self.first = torch.cat([self.first, x[0]])
        return x + 1


def test_a_buffer_that_is_assigned_another_shape() -> None:
    for route in ("torch level", "exported", "decomposed"):
        with pytest.raises((MetaTraceError, UnsupportedOperatorException), match=r"buffer.*f32\[3\]"):
            ROUTES[route](Grows(), X)
    model = Grows()
    ROUTES["fake"](model, X)
    assert model.first.shape == (3,)
