"""What a program keeps outside of its modules: after a trace it is as before; what it held before is a constant."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from understudy import (
    FakeTensor,
    MetaTraceError,
    UnsupportedOperatorException,
    export,
    make_fx,
    symbolic_trace,
)

X = torch.randn(2, 3)
TABLES: dict[str, Any] = {}
PAIRS: list[Any] = []
SPACE = SimpleNamespace(table=None)
VARIABLE: torch.Tensor | None = None


class Cache:
    table: torch.Tensor | None = None
    tables: dict[str, Any] = {}

    def __init__(self) -> None:
        self.length, self.made = 0, None

    def get(self, length: int) -> Any:
        if self.length < length:
            self.length, self.made = length, made(length)
        return self.made


OBJECT = Cache()


def made(length: int) -> torch.Tensor:
    return torch.arange(length) * 2.0


def by_global_dict(x: torch.Tensor) -> torch.Tensor:
    if "a" not in TABLES:
        TABLES["a"] = made(x.shape[1])
    return x * TABLES["a"]


def by_global_list(x: torch.Tensor) -> torch.Tensor:
    if not PAIRS:
        PAIRS.append((made(x.shape[1]), 1))
    return x * PAIRS[0][0]


def by_variable(x: torch.Tensor) -> torch.Tensor:
    global VARIABLE
    if VARIABLE is None:
        VARIABLE = made(x.shape[1])
    return x * VARIABLE


def by_class(x: torch.Tensor) -> torch.Tensor:
    if Cache.table is None:
        Cache.table = made(x.shape[1])
    return x * Cache.table


def by_dict_of_class(x: torch.Tensor) -> torch.Tensor:
    if "a" not in Cache.tables:
        Cache.tables["a"] = made(x.shape[1])
    return x * Cache.tables["a"]


def by_object(x: torch.Tensor) -> torch.Tensor:
    return x * OBJECT.get(x.shape[1])


def by_namespace(x: torch.Tensor) -> torch.Tensor:
    if SPACE.table is None:
        SPACE.table = made(x.shape[1])
    return x * SPACE.table


def by_default(x: torch.Tensor, kept: dict[str, Any] = {}) -> torch.Tensor:  # noqa: B006
    if "a" not in kept:
        kept["a"] = made(x.shape[1])
    return x * kept["a"]


def by_attribute(x: torch.Tensor) -> torch.Tensor:
    if not hasattr(by_attribute, "table"):
        by_attribute.table = made(x.shape[1])  # type: ignore[attr-defined]
    return x * by_attribute.table  # type: ignore[attr-defined]


def by_closure() -> Callable[[torch.Tensor], torch.Tensor]:
    kept: list[torch.Tensor] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(made(x.shape[1]))
        return x * kept[0]

    return program


class OfClass(nn.Module):
    shared: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if OfClass.shared is None:
            OfClass.shared = made(x.shape[1])
        return x * OfClass.shared


class OfObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cache.get(x.shape[1])


class OfGlobal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_global_dict(x)


PROGRAMS: dict[str, Callable[[], Callable[..., torch.Tensor]]] = {
    "dict": lambda: by_global_dict, "list": lambda: by_global_list, "class": lambda: by_class,
    "dict of a class": lambda: by_dict_of_class, "object": lambda: by_object, "namespace": lambda: by_namespace,
    "default": lambda: by_default, "attribute": lambda: by_attribute, "closure": by_closure,
    "class of a module": OfClass, "object of a module": OfObject, "global of a module": OfGlobal,
    "inside of another": lambda: lambda x: by_global_dict(x) + by_class(x),
}  # fmt: skip


@pytest.fixture(autouse=True)
def forget() -> None:
    global VARIABLE
    VARIABLE = Cache.table = OfClass.shared = SPACE.table = None
    OBJECT.length, OBJECT.made = 0, None
    for container in (TABLES, PAIRS, Cache.tables, vars(by_attribute), by_default.__defaults__[0]):  # type: ignore[index]
        container.clear()


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", [*PROGRAMS, "variable"])
def test_nothing_of_the_trace_stays(name: str, mode: str) -> None:
    program = by_variable if name == "variable" else PROGRAMS[name]()
    graph = make_fx(program, tracing_mode=mode)(X)
    after = program(X)
    assert type(after) is torch.Tensor
    assert torch.equal(graph(X), after)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", [*PROGRAMS, "variable"])
def test_nothing_of_a_torch_level_trace_stays(name: str, is_kept: bool) -> None:
    program = by_variable if name == "variable" else PROGRAMS[name]()
    before = program(X) if is_kept else None
    traced = symbolic_trace(program, meta_args={"x": X.to("meta")})
    after = program(X)
    assert type(after) is torch.Tensor and (before is None or torch.equal(before, after))
    assert torch.equal(traced(X), after)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_kept_before_is_a_constant(name: str, mode: str) -> None:
    program = PROGRAMS[name]()
    before = program(X)
    graph = make_fx(program, tracing_mode=mode)(X)
    assert torch.equal(graph(X), before)
    assert torch.equal(program(X), before)


def test_a_global_that_is_a_tensor_is_no_cache() -> None:
    by_variable(X)
    with pytest.raises(Exception, match="is a real tensor"):
        make_fx(by_variable, tracing_mode="fake")(X)


def test_after_an_error() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        by_global_dict(x)
        raise KeyError("no")

    with pytest.raises(KeyError):
        make_fx(program, tracing_mode="fake")(X)
    assert not TABLES


def test_what_holds_no_stand_ins_stays() -> None:
    counts: list[int] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        counts.append(len(counts))
        return x + 1

    make_fx(program, tracing_mode="fake")(X)
    assert counts == [0]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_what_depends_on_the_inputs_was_collected_on_purpose(mode: str) -> None:
    seen: list[torch.Tensor] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.exp())
        return seen[0] + 1

    make_fx(program, tracing_mode=mode)(X)
    assert [type(value) for value in seen] == [FakeTensor]


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
    "decomposed": lambda model, x: export(model, (x,), decompositions=torch.export.default_decompositions()).module(),
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
