"""Layers that look alike and are not: their graph is the one that running all of them records."""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.capture.test_repeated_layers import Layer, Stack, capture, facts
from understudy import run_every_layer

COUNT = 6
Program = Callable[..., Any]


def assert_same_graph(make: Callable[[], Program], mode: str = "fake") -> None:
    """`make` begins anew each time: the program run as it is, with layers repeated, and with all of them run."""
    x = torch.randn(3, 8)
    expected = make()(x.clone())
    repeated = capture(make(), x.clone(), mode=mode)
    with run_every_layer():
        run = capture(make(), x.clone(), mode=mode)
    assert facts(repeated) == facts(run)
    results, wanted = torch.utils._pytree.tree_leaves((repeated(x.clone()), expected))[:2]
    assert torch.equal(results, wanted)


def scaled(
    scale: Callable[[Layer], float],
    count: int = COUNT,
    prepare: Callable[[nn.Module, int], None] | None = None,
) -> Stack:
    """Layers that ask a function for a factor."""

    class Scaled(Layer):
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return super().forward(x, scale(self))

    model = Stack(Scaled, count)
    for number, layer in enumerate(model.layers):
        if prepare is not None:
            prepare(layer, number)
    return model


# --- counters ---------------------------------------------------------------------------------------------------------


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Plain:
    count = 0

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def tick(self) -> float:
        self.count += 1
        return float(self.count)


class Shelf(dict[str, int]):
    count = 0


def two_deep() -> Program:
    outer = Plain(inner=Plain())
    return scaled(lambda layer: outer.inner.tick())


def in_slots() -> Program:
    slotted = Slotted()

    def tick(layer: Any) -> float:
        slotted.count += 1
        return float(slotted.count)

    return scaled(tick)


def in_a_list_of_a_dict() -> Program:
    table: dict[str, list[int]] = {"seen": []}

    def tick(layer: Any) -> float:
        table["seen"].append(1)
        return float(len(table["seen"]))

    return scaled(tick)


def in_keys() -> Program:
    table = {"a": 1}

    def tick(layer: Any) -> float:
        key = next(iter(table))
        table.clear()
        table[key + "a"] = 1
        return float(len(key))

    return scaled(tick)


def in_a_dict_with_attributes() -> Program:
    shelf = Shelf(a=1)

    def tick(layer: Any) -> float:
        shelf.count += 1
        return float(shelf.count)

    return scaled(tick)


class Counted(Layer):
    count = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        type(self).count += 1
        return super().forward(x, float(self.count))


def in_its_class() -> Program:
    Counted.count = 0
    return Stack(Counted, COUNT)


def in_another_class() -> Program:
    class Registry:
        count = 0

    def tick(layer: Any) -> float:
        Registry.count += 1
        return float(Registry.count)

    return scaled(tick)


def in_a_class_that_is_an_attribute() -> Program:
    class Registry:
        count = 0

    def tick(layer: Any) -> float:
        layer.registry.count += 1
        return float(layer.registry.count)

    return scaled(tick, prepare=lambda layer, number: setattr(layer, "registry", Registry))


def in_a_class_later() -> Program:
    class Registry:
        pass

    def tick(layer: Any) -> float:
        Registry.count = getattr(Registry, "count", 0) + 1  # type: ignore[attr-defined]
        return float(Registry.count)  # type: ignore[attr-defined]

    return scaled(tick)


SEEN: list[int] = []


class ByProperty(Layer):
    @property
    def factor(self) -> float:
        SEEN.append(1)
        return float(len(SEEN))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, self.factor)


class ByStaticMethod(Layer):
    @staticmethod
    def factor() -> float:
        SEEN.append(1)
        return float(len(SEEN))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, self.factor())


def by_property() -> Program:
    SEEN.clear()
    return Stack(ByProperty, COUNT)


def by_static_method() -> Program:
    SEEN.clear()
    return Stack(ByStaticMethod, COUNT)


settings = types.ModuleType("settings_of_blocks")
settings.__dict__["count"] = 0
sys.modules[settings.__name__] = settings


def in_a_module() -> Program:
    settings.__dict__["count"] = 0

    def tick(layer: Any) -> float:
        settings.count += 1
        return float(settings.count)

    return scaled(tick)


def in_an_imported_module() -> Program:
    settings.__dict__["count"] = 0

    def tick(layer: Any) -> float:
        import settings_of_blocks as inner  # type: ignore[import-not-found]

        inner.count += 1
        return float(inner.count)

    return scaled(tick)


def in_defaults() -> Program:
    def tick(layer: Any, seen: list[int] = []) -> float:  # noqa: B006
        seen.append(1)
        return float(len(seen))

    return scaled(tick)


def in_a_functions_attributes() -> Program:
    def tick(layer: Any) -> float:
        vars(tick)["count"] = vars(tick).get("count", 0) + 1
        return float(vars(tick)["count"])

    return scaled(tick)


def in_a_bound_method() -> Program:
    tick = Plain().tick
    return scaled(lambda layer: tick())


def in_a_method_of_a_list() -> Program:
    seen: list[int] = []
    add, size = seen.append, seen.__len__

    def tick(layer: Any) -> float:
        add(1)
        return float(size())

    return scaled(tick)


def in_a_function_in_a_table() -> Program:
    plain = Plain()

    def tick() -> float:
        return plain.tick()

    return scaled(
        lambda layer: layer.table["tick"](),
        prepare=lambda layer, number: setattr(layer, "table", {"tick": tick}),
    )


def in_a_method_of_an_object() -> Program:
    total = [0]

    def add() -> float:
        total[0] += 1
        return float(total[0])

    class Helper:
        def tick(self) -> float:
            return add()

    helper = Helper()
    return scaled(
        lambda layer: layer.helper.tick(), prepare=lambda layer, number: setattr(layer, "helper", helper)
    )


def in_an_iterator() -> Program:
    numbers = itertools.count(1)
    return scaled(lambda layer: float(next(numbers)))


def in_a_generator() -> Program:
    numbers = (float(i) for i in range(100))
    return scaled(lambda layer: next(numbers))


def in_a_deque() -> Program:
    numbers = collections.deque([1.0, 2.0, 3.0])

    def turn(layer: Any) -> float:
        numbers.rotate(1)
        return numbers[0]

    return scaled(turn)


def in_an_array() -> Program:
    numbers = np.zeros(1)

    def tick(layer: Any) -> float:
        numbers[0] += 1
        return float(numbers[0])

    return scaled(tick)


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("count of blocks", default=0)


def in_a_context_variable() -> Program:
    VARIABLE.set(0)

    def tick(layer: Any) -> float:
        VARIABLE.set(VARIABLE.get() + 1)
        return float(VARIABLE.get())

    return scaled(tick)


def in_a_thread() -> Program:
    local = threading.local()
    local.count = 0

    def tick(layer: Any) -> float:
        local.count += 1
        return float(local.count)

    return scaled(tick)


def in_the_environment() -> Program:
    os.environ["BLOCKS_COUNT"] = "0"

    def tick(layer: Any) -> float:
        os.environ["BLOCKS_COUNT"] = str(int(os.environ["BLOCKS_COUNT"]) + 1)
        return float(os.environ["BLOCKS_COUNT"])

    return scaled(tick)


def in_a_cached_function() -> Program:
    plain = Plain()

    @functools.lru_cache(None)
    def of(layer: Any) -> float:
        return plain.tick()

    return scaled(of)


def in_a_cache_that_is_full() -> Program:
    plain = Plain()

    @functools.lru_cache(None)
    def of(layer: Any) -> float:
        return plain.tick()

    model = scaled(of)
    for layer in model.layers:
        of(layer)
    return model


COUNTERS = [
    two_deep, in_slots, in_a_list_of_a_dict, in_keys, in_a_dict_with_attributes, in_its_class, in_another_class,
    in_a_class_that_is_an_attribute, in_a_class_later, by_property, by_static_method, in_a_module, in_an_imported_module,
    in_defaults, in_a_functions_attributes, in_a_bound_method, in_a_method_of_a_list, in_a_function_in_a_table,
    in_a_method_of_an_object, in_an_iterator, in_a_generator, in_a_deque, in_an_array, in_a_context_variable, in_a_thread,
    in_the_environment, in_a_cached_function, in_a_cache_that_is_full,
]  # fmt: skip


@pytest.mark.parametrize("make", COUNTERS)
def test_counters_wherever_they_are(make: Callable[[], Program]) -> None:
    assert_same_graph(make)


# --- chance -----------------------------------------------------------------------------------------------------------


def drawn_by_numpy() -> Program:
    np.random.seed(0)
    return scaled(lambda layer: float(np.random.rand()))


def drawn_by_a_generator_of_numpy() -> Program:
    generator = np.random.default_rng(0)
    return scaled(lambda layer: float(generator.random()))


def drawn_by_an_object() -> Program:
    generator = random.Random(0)
    return scaled(lambda layer: generator.random())


def drawn_and_put_back() -> Program:
    random.seed(0)

    def peek(layer: Any) -> float:
        state = random.getstate()
        value = random.random()
        random.setstate(state)
        return value

    model = scaled(peek)

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            random.random()
            x = layer(x)
        return x

    return program


def seeds_of_torch() -> Program:
    torch.manual_seed(0)

    def seed(layer: Any) -> float:
        torch.manual_seed(torch.initial_seed() + 1)
        return float(torch.initial_seed())

    return scaled(seed)


@pytest.mark.parametrize(
    "make",
    [drawn_by_numpy, drawn_by_a_generator_of_numpy, drawn_by_an_object, drawn_and_put_back, seeds_of_torch],
)
def test_numbers_that_are_drawn(make: Callable[[], Program]) -> None:
    assert_same_graph(make)


# --- who a layer is ---------------------------------------------------------------------------------------------------


def with_its_own_forward() -> Program:
    model = Stack(Layer, COUNT)
    layer = model.layers[4]
    layer.forward = lambda x: Layer.forward(layer, x, 3.0)
    return model


def that_knows_its_parent() -> Program:
    model = scaled(lambda layer: 5.0 if layer.parent[0].layers[-1] is layer else 1.0)
    for layer in model.layers:
        layer.parent = [model]
    return model


def that_refers_to_its_parent() -> Program:
    model = scaled(lambda layer: 5.0 if layer.parent().layers[-1] is layer else 1.0)
    for layer in model.layers:
        layer.parent = weakref.ref(model)
    return model


def that_is_compared() -> Program:
    chosen: list[nn.Module] = []
    model = scaled(lambda layer: 5.0 if chosen[0] is layer else 1.0)
    chosen.append(model.layers[3])
    return model


def in_a_table_of_layers() -> Program:
    factors: dict[Any, float] = {}
    return scaled(
        lambda layer: factors[layer], prepare=lambda layer, number: factors.update({layer: float(number)})
    )


def in_a_table_by_identity() -> Program:
    factors: dict[int, float] = {}
    return scaled(
        lambda layer: factors[id(layer)],
        prepare=lambda layer, number: factors.update({id(layer): float(number)}),
    )


class Shadowed(Layer):
    number = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, float(self.number))


def _numbered(model: Stack) -> Stack:
    for number, layer in enumerate(model.layers):
        layer.number = number
    return model


def whose_class_has_a_number_too() -> Program:
    return _numbered(Stack(Shadowed, COUNT))


def that_look_into_themselves() -> Program:
    return _numbered(scaled(lambda layer: float(vars(layer)["number"])))


def that_look_into_their_dict() -> Program:
    return _numbered(scaled(lambda layer: float(layer.__dict__.get("number", 77))))


def with_zeros_of_two_signs() -> Program:
    return scaled(
        lambda layer: layer.zero,
        prepare=lambda layer, number: setattr(layer, "zero", -0.0 if number > 3 else 0.0),
    )


IDENTITIES = [
    with_its_own_forward, that_knows_its_parent, that_refers_to_its_parent, that_is_compared, in_a_table_of_layers,
    in_a_table_by_identity, whose_class_has_a_number_too, that_look_into_themselves, that_look_into_their_dict,
    with_zeros_of_two_signs,
]  # fmt: skip


@pytest.mark.parametrize("make", IDENTITIES)
def test_layers_that_know_who_they_are(make: Callable[[], Program]) -> None:
    assert_same_graph(make)


# --- changes between layers -------------------------------------------------------------------------------------------


def between(model: Stack, change: Callable[[nn.Module, int, torch.Tensor], Any]) -> Program:
    def program(x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(model.layers):
            change(layer, number, x)
            x = layer(x)
        return x

    return program


def function_of_a_module() -> Program:
    settings.__dict__["activation"] = torch.relu
    model = scaled(lambda layer: float(settings.activation(torch.ones(()) * 0.5)))
    return between(
        model,
        lambda layer, number, x: settings.__dict__.update(
            activation=torch.relu if number < 3 else torch.square
        ),
    )


def method_of_the_class() -> Program:
    class Gaining(Layer):
        def factor(self) -> float:
            return 1.0

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, self.factor())

    def change(layer: Any, number: int, x: torch.Tensor) -> None:
        if number == 4:
            Gaining.factor = lambda self: 2.0  # type: ignore[method-assign]

    return between(Stack(Gaining, COUNT), change)


class Buffered(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(8))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) + self.bias


def buffers_that_are_written() -> Program:
    return between(
        Stack(Buffered, COUNT), lambda layer, number, x: layer.bias.add_(1.0) if number == 4 else None
    )


def buffers_that_are_computed() -> Program:
    return between(
        Stack(Buffered, COUNT),
        lambda layer, number, x: setattr(layer, "bias", x[0] * 2) if number > 2 else None,
    )


@pytest.mark.parametrize("make", [method_of_the_class, buffers_that_are_written, buffers_that_are_computed])
def test_changes_between_layers(make: Callable[[], Program]) -> None:
    assert_same_graph(make)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x[None, None]
        attended = nn.functional.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y))
        return x + self.out(attended)[0, 0]


def test_switches_that_are_set_for_some_layers() -> None:
    def make() -> Program:
        model = Stack(Attention, COUNT)

        def program(x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(model.layers):
                with sdpa_kernel(SDPBackend.MATH if number in (3, 4) else SDPBackend.FLASH_ATTENTION):
                    x = layer(x)
            return x

        return program

    assert_same_graph(make)


# --- arguments and results --------------------------------------------------------------------------------------------


def calling(forward: Any, call: Callable[[Any, torch.Tensor], torch.Tensor], prepare: Any = None) -> Program:
    """A program that calls layers with this forward in its own way."""
    kind = type("Called", (Layer,), {"forward": forward})
    model = Stack(kind, COUNT)
    for layer in model.layers if prepare is not None else ():
        prepare(layer)

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = call(layer, x)
        return x

    return program


def lists_that_are_changed() -> Program:
    def forward(self: Any, x: torch.Tensor, seen: list[float]) -> torch.Tensor:
        seen[0] += 1
        return Layer.forward(self, x)

    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        seen = [1.0]
        return layer(x, seen) * seen[0]

    return calling(forward, call)


def dicts_that_are_added_to() -> Program:
    def forward(self: Any, x: torch.Tensor, seen: dict[str, Any]) -> torch.Tensor:
        seen["x"] = x
        return Layer.forward(self, x)

    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        seen: dict[str, Any] = {}
        return layer(x, seen) + seen["x"]

    return calling(forward, call)


def lists_that_are_given_back() -> Program:
    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        seen = [1.0]
        x, same = layer(x, seen)
        same.append(1.0)
        return x * len(seen)

    return calling(lambda self, x, seen: (Layer.forward(self, x), seen), call)


def lists_of_a_layer() -> Program:
    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        x, same = layer(x)
        same.append(1.0)
        return x * len(layer.history)

    return calling(
        lambda self, x: (Layer.forward(self, x), self.history),
        call,
        lambda layer: setattr(layer, "history", [1.0]),
    )


def marks_on_tensors() -> Program:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        factor = getattr(x, "factor", 1.0)
        y = Layer.forward(self, x, factor)
        y.factor = factor + 1.0  # type: ignore[attr-defined]
        return y

    return calling(forward, lambda layer, x: layer(x))


def marks_on_arguments() -> Program:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.factor = 3.0  # type: ignore[attr-defined]
        return Layer.forward(self, x)

    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        x = x + 0
        y: torch.Tensor = layer(x) * x.factor  # type: ignore[attr-defined]
        return y

    return calling(forward, call)


def parameters_that_are_given_back() -> Program:
    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        x, weight = layer(x)
        return x * (2.0 if weight is layer.up.weight else 1.0)

    return calling(lambda self, x: (Layer.forward(self, x), self.up.weight), call)


def zeros_of_two_signs() -> Program:
    zeros = itertools.cycle([0.0, -0.0])
    return calling(Layer.forward, lambda layer, x: layer(x, next(zeros)))


def one_tensor_twice() -> Program:
    turns = itertools.count()
    return calling(
        lambda self, x, y: Layer.forward(self, x, 2.0 if x is y else 1.0) + y,
        lambda layer, x: layer(x, x) if next(turns) < 3 else layer(x, x.detach()),
    )


def values_that_are_known() -> Program:
    turns, factor = itertools.count(), []

    def call(layer: Any, x: torch.Tensor) -> torch.Tensor:
        turn = next(turns)
        if turn == 0:
            factor.append(torch.tensor(1.0))
        elif turn == 4:
            factor[0].fill_(5.0)
        y: torch.Tensor = layer(x, factor[0])
        return y

    return calling(lambda self, x, factor: Layer.forward(self, x, factor.item()), call)


def values_of_data() -> Program:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = Layer.forward(self, x)
        return y * y.sum().item()

    return calling(forward, lambda layer, x: layer(x))


ARGUMENTS = [
    lists_that_are_changed, dicts_that_are_added_to, lists_that_are_given_back, lists_of_a_layer, marks_on_tensors,
    marks_on_arguments, parameters_that_are_given_back, zeros_of_two_signs, one_tensor_twice, values_that_are_known,
    values_of_data,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("make", ARGUMENTS)
def test_arguments_and_results(make: Callable[[], Program], mode: str) -> None:
    assert_same_graph(make, mode)


def tensors_behind_the_scenes() -> Program:
    context = Plain(mask=None)

    def forward(self: Any, x: torch.Tensor) -> Any:
        return Layer.forward(self, x), context.mask

    inner = calling(forward, lambda layer, x: sum(layer(x)))

    def program(x: torch.Tensor) -> torch.Tensor:
        context.mask = x[0] * 2
        try:
            return inner(x)
        finally:
            context.mask = None

    return program


def parameters_that_were_read_before() -> Program:
    model = Stack(Layer, COUNT)

    def program(x: torch.Tensor) -> torch.Tensor:
        total = model.layers[0].down.weight.sum()
        return model(x) + total

    return program


@pytest.mark.parametrize("make", [tensors_behind_the_scenes, parameters_that_were_read_before])
def test_tensors_that_were_there_before(make: Callable[[], Program]) -> None:
    assert_same_graph(make)


def test_torch_functions_of_one_name_are_counted_apart() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0] + x.shape[1]
        return Layer.forward(self, torch.fft.fft(x).real) * rows

    assert_same_graph(lambda: calling(forward, lambda layer, x: layer(x)))


def test_layers_of_a_model_with_settings_are_still_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    from understudy.capture.repeated_layers.replay import LayerPlan

    replays: list[int] = []
    original = LayerPlan._results
    monkeypatch.setattr(LayerPlan, "_results", lambda plan, *given: replays.append(1) or original(plan, *given))
    config = Plain(inner=Plain(scales=[1.0, 2.0]), names={"a": 1}, activation=torch.relu)

    def prepare(layer: nn.Module, number: int) -> None:
        vars(layer).update(config=config, number=number)

    model = scaled(lambda layer: layer.config.inner.scales[1], prepare=prepare)
    capture(model, torch.randn(3, 8))
    assert len(replays) == COUNT - 1


def test_arguments_of_a_partial_with_and_without_names() -> None:
    def factor(*given: Any, **named: Any) -> float:
        return float(len(given) + 10 * len(named))

    def prepare(layer: nn.Module, number: int) -> None:
        layer.factor = functools.partial(factor, "a", 1) if number < 3 else functools.partial(factor, a=1)

    assert_same_graph(lambda: scaled(lambda layer: layer.factor(), prepare=prepare))
