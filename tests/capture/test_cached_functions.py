"""Caches: nothing of a trace stays in them; what a `functools.lru_cache` has kept from before is a constant."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from understudy import FakeTensor, capture_step, make_fx

MODES = ["real", "fake", "symbolic"]
X = torch.randn(4, 3)


@functools.lru_cache(maxsize=8)
def table(width: int) -> torch.Tensor:
    return torch.arange(width) * 2.0


@functools.cache
def tables(width: int) -> dict[str, Any]:
    return {"even": [torch.arange(width) * 2.0], "odd": (torch.arange(width) * 2.0 + 1,)}


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def angles(self, width: int) -> torch.Tensor:
        return torch.arange(width) / 3

    @staticmethod
    @functools.cache
    def scale(width: int) -> torch.Tensor:
        return torch.full((width,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.angles(3) + self.scale(3)


def by_table(x: torch.Tensor) -> torch.Tensor:
    return x * table(3)


def by_tables(x: torch.Tensor) -> torch.Tensor:
    kept = tables(3)
    return x * kept["even"][0] + kept["odd"][0]


def by_closure() -> Any:
    @functools.lru_cache
    def inner(width: int) -> torch.Tensor:
        return torch.ones(width) * 3

    def helper(x: torch.Tensor) -> torch.Tensor:
        return x + inner(3)

    return lambda x: helper(x)


PROGRAMS = {
    "global": lambda: by_table, "structures": lambda: by_tables, "closure": by_closure, "method": Rotary,
}  # fmt: skip


@pytest.fixture(autouse=True)
def empty_caches() -> None:
    for cache in (table, tables, Rotary.angles, Rotary.scale):
        cache.cache_clear()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_the_trace_stays(name: str, mode: str) -> None:
    program = PROGRAMS[name]()
    gm = make_fx(program, tracing_mode=mode)(X)
    after = program(X)
    assert type(after) is torch.Tensor
    assert torch.equal(gm(X), after)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", MODES)
def test_what_was_kept_before_is_a_constant(name: str, mode: str) -> None:
    program = PROGRAMS[name]()
    before = program(X)
    gm = make_fx(program, tracing_mode=mode)(X)
    assert torch.equal(gm(X), before)
    assert torch.equal(program(X), before)


def test_results_from_before_are_kept() -> None:
    before = table(3)
    make_fx(by_table, tracing_mode="fake")(X)
    assert table(3) is before


def test_a_cache_without_tensors_is_left_alone() -> None:
    calls: list[int] = []

    @functools.cache
    def width_of(width: int) -> int:
        calls.append(width)
        return width

    make_fx(lambda x: x * width_of(3), tracing_mode="fake")(X)
    assert width_of(3) == 3
    assert calls == [3]


def test_an_error_in_the_trace() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        table(3)
        raise RuntimeError("in the program")

    with pytest.raises(RuntimeError, match="in the program"):
        make_fx(fail, tracing_mode="fake")(X)
    assert type(table(3)) is torch.Tensor


def test_a_training_step() -> None:
    model = Rotary()
    step = capture_step(model, lambda y: y.sum(), torch.optim.SGD(model.parameters(), lr=0.1), X)
    assert type(Rotary.scale(3)) is torch.Tensor
    assert type(step(X)) is torch.Tensor


def test_other_real_tensors_are_refused_as_before() -> None:
    constant = torch.ones(3)
    with pytest.raises(Exception, match="got a real tensor"):
        make_fx(lambda x: x * constant, tracing_mode="fake")(X)


def test_twice_on_other_sizes() -> None:
    for rows in (2, 5):
        gm = make_fx(by_table, tracing_mode="symbolic")(torch.ones(rows, 3))
        assert torch.equal(gm(X), by_table(X))
    assert not isinstance(table(3), FakeTensor)


# --- dicts and lists of modules -----------------------------------------------------------------------------------------------


class Keeping(nn.Module):
    """Keeps what it has computed in a container of its own."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        self.container = container

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.arange(x.shape[1]) * 2.0
        if isinstance(self.container, dict):
            self.container.setdefault("tables", []).append((made,))
            self.container["last"] = made
        else:
            self.container.append({"made": made})
        return x * made


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("container", [{}, {"last": 1}, {"tables": [1]}, [], [0]])
def test_containers_of_modules(container: Any, mode: str) -> None:
    before, container = container, copy.deepcopy(container)
    model = Keeping(container)
    gm = make_fx(model, tracing_mode=mode)(X)
    assert model.container is container
    assert container == before
    assert torch.equal(gm(X), model(X))


def test_containers_that_only_count_are_left_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(1)
            return x * 2

    model = Counting()
    make_fx(model, tracing_mode="fake")(X)
    assert model.seen == [1]


def kept_unless_compiling(function: Any) -> Any:
    kept = functools.lru_cache(function)

    @functools.wraps(function)
    def call(*args: int) -> torch.Tensor:
        return function(*args) if torch.compiler.is_compiling() else kept(*args)

    return call


@kept_unless_compiling
def grid(height: int, width: int) -> torch.Tensor:
    return torch.stack(
        torch.meshgrid(torch.arange(height) / height, torch.arange(width) / width, indexing="ij"), -1
    ).flatten()


class OnGrid(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum((1, 2))[:, None] * grid(x.shape[1], x.shape[2])


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_cache_behind_a_wrapper(mode: str, is_kept: bool) -> None:
    model, x = OnGrid(), torch.randn(2, 3, 4)
    grid.__closure__[1].cell_contents.cache_clear()
    before = model(x) if is_kept else None
    graph = make_fx(model, tracing_mode=mode)(x)
    other = torch.randn(5, 3, 4) if mode == "symbolic" else torch.randn(2, 3, 4)
    assert torch.equal(graph(other), model(other))
    assert type(grid(3, 4)) is torch.Tensor
    assert before is None or torch.equal(model(x), before)


class OnSteps(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum((1, 2))[:, None] * steps(x.shape[1:]) + self.ramp(x.shape[1]).sum()

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def ramp(self, length: int) -> torch.Tensor:
        return torch.arange(length) / length


@functools.lru_cache
def steps(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(sizes[0] * sizes[1])


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("kind", [OnGrid, OnSteps])
def test_sizes_as_keys_of_a_cache_stay_symbols(kind: type, is_kept: bool) -> None:
    model, x, other = kind(), torch.randn(2, 3, 4), torch.randn(7, 2, 5)
    if is_kept:
        model(x), model(other)
    cached = (grid.__closure__[1].cell_contents, steps, vars(OnSteps)["ramp"])
    graph = make_fx(model, tracing_mode="symbolic")(x)
    assert (grid.__closure__[1].cell_contents, steps, vars(OnSteps)["ramp"]) == cached
    assert not graph.shape_env.specialisations
    assert torch.equal(graph(other), model(other))


def test_the_functions_of_a_cache_while_sizes_are_symbols() -> None:
    def program(x: torch.Tensor) -> Any:
        steps.cache_clear()
        steps((2, 3)), steps((2, 3)), steps((x.shape[0], 3))
        return x + steps.cache_info().hits

    assert torch.equal(
        make_fx(program, tracing_mode="symbolic")(torch.zeros(2))(torch.zeros(4)), torch.ones(4)
    )


def test_sizes_as_keys_of_a_dict_are_fixed() -> None:
    table = {3: 1.5, 4: 2.5}
    graph = make_fx(lambda x: x * table[x.shape[1]], tracing_mode="symbolic")(torch.randn(2, 3))
    env: Any = graph.shape_env
    assert env.evaluate_guards(torch.randn(7, 3))
    assert not env.evaluate_guards(torch.randn(7, 4))
    assert [entry.number for entry in env.specialisations] == [3]
    assert "test_cached_functions.py" in str(env.specialisations[0])


class KeepsBiases(nn.Module):
    """In evaluation mode it keeps what it computes of its parameters, for each device, as LeViT does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6))
        self.kept: Any = {"dict": {}, "list": [], "nested": {"cpu": []}}[kind]

    def biases(self) -> torch.Tensor:
        kept = self.kept["cpu"] if isinstance(self.kept, dict) and "cpu" in self.kept else self.kept
        if isinstance(kept, list):
            if not kept:
                kept.append(self.bias[[0, 2, 4]])
            return kept[0]
        if "bias" not in kept:
            kept["bias"] = self.bias[[0, 2, 4]]
        return kept["bias"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.biases()


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("kind", ["dict", "list", "nested"])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_module_has_kept_in_a_container(mode: str, kind: str, is_kept: bool) -> None:
    model, x = nn.Sequential(KeepsBiases(kind)).eval(), torch.randn(4, 3)
    with torch.no_grad():
        before = model(x) if is_kept else None
        graph = make_fx(model, tracing_mode=mode)(x)
        other = torch.randn(5, 3) if mode == "symbolic" else torch.randn(4, 3)
        assert torch.equal(graph(other), model(other))
        assert before is None or torch.equal(model(x), before)
