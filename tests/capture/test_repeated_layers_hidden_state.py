"""Layers whose factor comes from state outside of the program: of the process, of Python's library, of torch, of files."""

from __future__ import annotations

import builtins
import collections
import copy
import decimal
import enum
import functools
import gc
import importlib
import io
import json
import logging
import math
import os
import pathlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.capture.test_repeated_layers import Layer, Stack, capture
from tests.capture.test_repeated_layers_state import COUNT, Program, assert_same_graph, between, scaled
from understudy import make_fx

LOG = logging.getLogger("tests.hidden")
LOCK = threading.Lock()
OBJECT = torch.utils.data.TensorDataset(torch.zeros(1))


@pytest.fixture(autouse=True)
def everything_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    dtype, filters, limit = torch.get_default_dtype(), warnings.filters[:], sys.getrecursionlimit()
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    collecting, digits, threads = gc.get_threshold(), decimal.getcontext().prec, torch.get_num_threads()
    # torch's own testing module, which other tests import, forbids to set flags of cuDNN.
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():
        yield
        torch.backends.cudnn.benchmark = benchmark
    begin_anew()
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    torch.set_anomaly_enabled(False)
    warnings.filters[:] = filters
    sys.setrecursionlimit(limit)
    gc.set_threshold(*collecting)
    decimal.getcontext().prec = digits


class Kind(enum.Enum):
    ONE = 1


# --- settings of torch and of the process ---------------------------------------------------------------------------------


def default_dtype(layer: Any) -> float:
    is_single = torch.get_default_dtype() is torch.float32
    torch.set_default_dtype(torch.float64 if is_single else torch.float32)
    return 2.0 if is_single else 3.0


def precision_of_products(layer: Any) -> float:
    is_highest = torch.get_float32_matmul_precision() == "highest"
    torch.set_float32_matmul_precision("high" if is_highest else "highest")
    return 2.0 if is_highest else 3.0


def anomaly_mode(layer: Any) -> float:
    torch.set_anomaly_enabled(not torch.is_anomaly_enabled())
    return 2.0 if torch.is_anomaly_enabled() else 3.0


def count_of_threads(layer: Any) -> float:
    torch.set_num_threads(3 - min(torch.get_num_threads(), 2))
    return float(torch.get_num_threads())


def backend_of_torch(layer: Any) -> float:
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    return 2.0 if torch.backends.cudnn.benchmark else 3.0


def limit_of_recursion(layer: Any) -> float:
    sys.setrecursionlimit(sys.getrecursionlimit() + 1)
    return float(sys.getrecursionlimit() % 100)


def filters_of_warnings(layer: Any) -> float:
    warnings.filterwarnings("ignore", message=f"none of {len(warnings.filters)}")
    return float(len(warnings.filters))


def filters_changed_directly(layer: Any) -> float:
    warnings.filters.append(("ignore", None, UserWarning, None, 0))  # type: ignore[attr-defined]
    return float(len(warnings.filters))


def level_of_a_logger(layer: Any) -> float:
    LOG.setLevel(LOG.level + 1)
    return float(LOG.getEffectiveLevel())


def level_of_a_logger_by_name(layer: Any) -> float:
    log = logging.getLogger("tests.hidden")
    log.level += 1
    return float(log.level)


def state_of_a_lock(layer: Any) -> float:
    if LOCK.locked():
        LOCK.release()
    else:
        LOCK.acquire()
    return 2.0 if LOCK.locked() else 3.0


def digits_of_decimals(layer: Any) -> float:
    decimal.getcontext().prec += 1
    return float(decimal.getcontext().prec)


def threshold_of_the_collector(layer: Any) -> float:
    gc.set_threshold(gc.get_threshold()[0] + 1)
    return float(gc.get_threshold()[0] % 100)


def working_directory(layer: Any) -> float:
    os.makedirs("inner", exist_ok=True)
    os.chdir("inner")
    return float(len(Path.cwd().parts))


# --- attributes of modules, classes and objects that are not the program's --------------------------------------------------


def attribute_of(owner: Any) -> Callable[[Any], float]:
    def tick(layer: Any) -> float:
        owner.count_of_layers = getattr(owner, "count_of_layers", 0) + 1
        return float(owner.count_of_layers)

    return tick


def attribute_of_sys(layer: Any) -> float:
    sys.count_of_layers = getattr(sys, "count_of_layers", 0) + 1  # type: ignore[attr-defined]
    return float(sys.count_of_layers)  # type: ignore[attr-defined]


def attribute_of_torch(layer: Any) -> float:
    torch.count_of_layers = getattr(torch, "count_of_layers", 0) + 1  # type: ignore[attr-defined]
    return float(torch.count_of_layers)  # type: ignore[attr-defined]


def attribute_by_a_computed_name(layer: Any) -> float:
    name = "_".join(("count", "of", "layers"))
    setattr(torch, name, getattr(torch, name, 0) + 1)
    return float(getattr(torch, name))


def attribute_in_a_namespace(layer: Any) -> float:
    vars(sys)["count_of_layers"] = vars(sys).get("count_of_layers", 0) + 1
    return float(vars(sys)["count_of_layers"])


def attribute_of_functional(layer: Any) -> float:
    space = nn.functional
    space.count_of_layers = getattr(space, "count_of_layers", 0) + 1  # type: ignore[attr-defined]
    return float(space.count_of_layers)  # type: ignore[attr-defined]


def attribute_of_the_builtins(layer: Any) -> float:
    builtins.count_of_layers = getattr(builtins, "count_of_layers", 0) + 1  # type: ignore[attr-defined]
    return float(count_of_layers)  # type: ignore[name-defined] # noqa: F821


def attribute_of_a_module_imported_inside(layer: Any) -> float:
    import math as numbers

    numbers.count_of_layers = getattr(numbers, "count_of_layers", 0) + 1  # type: ignore[attr-defined]
    return float(numbers.count_of_layers)  # type: ignore[attr-defined]


def attribute_of_a_module_found_by_name(layer: Any) -> float:
    module = importlib.import_module("collections")
    module.count_of_layers = getattr(module, "count_of_layers", 0) + 1  # type: ignore[attr-defined]
    return float(module.count_of_layers)


def attribute_of_an_enumeration(layer: Any) -> float:
    Kind.ONE.count = getattr(Kind.ONE, "count", 0) + 1  # type: ignore[attr-defined]
    return float(Kind.ONE.count)  # type: ignore[attr-defined]


def attribute_of_a_class_of_torch(layer: Any) -> float:
    nn.Linear.count_of_layers = getattr(nn.Linear, "count_of_layers", 0) + 1  # type: ignore[attr-defined]
    return float(nn.Linear.count_of_layers)  # type: ignore[attr-defined]


def attribute_of_the_class_of_a_part(layer: Any) -> float:
    kind = type(layer.up)
    kind.count_of_layers = getattr(kind, "count_of_layers", 0) + 1
    return float(layer.down.count_of_layers)


def attribute_of_an_object_of_torch(layer: Any) -> float:
    OBJECT.count_of_layers = getattr(OBJECT, "count_of_layers", 0) + 1  # type: ignore[attr-defined]
    return float(OBJECT.count_of_layers)  # type: ignore[attr-defined]


# --- files ------------------------------------------------------------------------------------------------------------------


def file_that_is_opened(layer: Any) -> float:
    with open("count", "a+") as file:
        file.write("x")
        return float(file.tell())


def file_opened_by_io(layer: Any) -> float:
    with io.open("count", "a") as file:  # noqa: UP020
        file.write("x")
    return float(os.path.getsize("count"))


def file_of_a_path(layer: Any) -> float:
    path = pathlib.Path("count")
    path.write_text((path.read_text() if path.exists() else "") + "x")
    return float(len(path.read_text()))


def file_of_a_path_in_an_attribute(layer: Any) -> float:
    layer.path.write_text((layer.path.read_text() if layer.path.exists() else "") + "x")
    return float(len(layer.path.read_text()))


def file_of_numpy(layer: Any) -> float:
    number = float(np.load("count.npy")) if os.path.exists("count.npy") else 0.0
    np.save("count.npy", number + 1)
    return number + 1


def file_in_json(layer: Any) -> float:
    number = json.loads(Path("count").read_text()) if Path("count").exists() else 0
    Path("count").write_text(json.dumps(number + 1))
    return float(number + 1)


SETTINGS = [
    default_dtype, precision_of_products, anomaly_mode, count_of_threads, backend_of_torch, limit_of_recursion,
    filters_of_warnings, filters_changed_directly, level_of_a_logger, level_of_a_logger_by_name, state_of_a_lock,
    digits_of_decimals, threshold_of_the_collector, working_directory,
]  # fmt: skip
ATTRIBUTES = [
    attribute_of_sys, attribute_of_torch, attribute_by_a_computed_name, attribute_in_a_namespace,
    attribute_of_functional, attribute_of_the_builtins, attribute_of_a_module_imported_inside,
    attribute_of_a_module_found_by_name, attribute_of_an_enumeration, attribute_of_a_class_of_torch,
    attribute_of_the_class_of_a_part, attribute_of_an_object_of_torch,
    *[attribute_of(owner) for owner in (sys, torch, math, np, collections, nn.functional)],
]  # fmt: skip
FILES = [
    file_that_is_opened, file_opened_by_io, file_of_a_path, file_of_a_path_in_an_attribute, file_of_numpy, file_in_json,
]  # fmt: skip


def give_a_path(layer: nn.Module, number: int) -> None:
    layer.path = Path("count")


def begin_anew() -> None:
    """As at the start of a test, for the next run of a program that counts."""
    for owner in (sys, torch, nn.functional, math, builtins, collections, np):
        vars(owner).pop("count_of_layers", None)
    vars(Kind.ONE).pop("count", None)
    vars(OBJECT).pop("count_of_layers", None)
    if hasattr(nn.Linear, "count_of_layers"):
        del nn.Linear.count_of_layers
    LOG.setLevel(10)
    if LOCK.locked():
        LOCK.release()
    for name in ("count", "count.npy"):
        Path(name).unlink(missing_ok=True)


@pytest.mark.parametrize("factor", [*SETTINGS, *ATTRIBUTES, *FILES])
def test_state_outside_of_the_program(
    factor: Callable[[Any], float], tmp_path: Path, everything_as_before: None
) -> None:
    settings = (torch.get_default_dtype(), sys.getrecursionlimit(), decimal.getcontext().prec, gc.get_threshold())
    filters = warnings.filters[:]

    def make() -> Program:
        begin_anew()
        os.chdir(tmp_path)
        torch.set_default_dtype(settings[0])
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(1)
        torch.set_anomaly_enabled(False)
        torch.backends.cudnn.benchmark = False
        sys.setrecursionlimit(settings[1])
        decimal.getcontext().prec = settings[2]
        gc.set_threshold(*settings[3])
        warnings.filters[:] = filters
        return scaled(factor, prepare=give_a_path if factor is file_of_a_path_in_an_attribute else None)

    assert_same_graph(make)


def test_settings_that_change_between_layers() -> None:
    def change(layer: nn.Module, number: int, x: torch.Tensor) -> None:
        sys.count_of_layers = number // 3  # type: ignore[attr-defined]

    assert_same_graph(lambda: between(scaled(lambda layer: float(sys.count_of_layers)), change))  # type: ignore[attr-defined]


# --- a module as others see it ---------------------------------------------------------------------------------------------


class Described(Layer):
    """Shows its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def extra_repr(self) -> str:
        return "x" * self.__dict__["number"]


def numbered(scale: Callable[[Any], float], kind: type = Described) -> Callable[[], Program]:
    class Scaled(kind):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return super().forward(x, scale(self))

    def make() -> Program:
        numbers = iter(range(COUNT))
        return Stack(lambda: Scaled(next(numbers)), COUNT)

    return make


def count_of_reads(layer: Any) -> float:
    return float(len(repr(layer)))


LOOKS: list[Callable[[Any], float]] = [
    lambda layer: float(len(layer.__dict__)),
    lambda layer: float(len(vars(layer))),
    lambda layer: float(len(dir(layer))),
    lambda layer: float(sum(value for value in vars(layer).values() if type(value) is int)),
    lambda layer: float(vars(layer).get("number", 100)),
    lambda layer: float("forward" in vars(layer)),
    lambda layer: float(len(layer._parameters)),
    lambda layer: float(len(repr(layer))),
    lambda layer: float(len(f"{layer}")),
    lambda layer: float(len("%s" % layer)),  # noqa: UP031
    lambda layer: float(copy.copy(layer).number),
    lambda layer: float(copy.deepcopy(layer).number),
    lambda layer: float(layer.__getstate__()["number"]),
    lambda layer: float(object.__getattribute__(layer, "number")),
    lambda layer: float(getattr(layer, "number", 100)),
    lambda layer: float(hasattr(layer, "number")) + layer.number,
    count_of_reads,
]


@pytest.mark.parametrize("look", LOOKS)
def test_a_layer_that_looks_at_itself(look: Callable[[Any], float]) -> None:
    assert_same_graph(numbered(look))


def test_a_layer_that_shows_itself_and_uses_nothing_of_it() -> None:
    assert_same_graph(numbered(lambda layer: 2.0 if repr(layer) else 3.0))


BETWEEN: list[Callable[[nn.Module], Any]] = [
    lambda layer: len(vars(layer)),
    lambda layer: len(repr(layer)),
    lambda layer: layer.number + 10,
    lambda layer: vars(layer)["number"] + 20,
    lambda layer: copy.deepcopy(layer).number + 30,
]


@pytest.mark.parametrize("look", BETWEEN)
def test_a_model_that_looks_at_its_layers(look: Callable[[nn.Module], Any]) -> None:
    def make() -> Program:
        model = numbered(lambda layer: 2.0)()

        def program(x: torch.Tensor) -> torch.Tensor:
            for layer in model.layers:  # type: ignore[attr-defined]
                x = layer(x) * look(layer)
            return x

        return program

    assert_same_graph(make)


def test_a_copy_of_a_layer_is_not_the_layer() -> None:
    model, x = Stack(Layer, COUNT), torch.randn(3, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            twin = copy.copy(layer)
            twin.act = nn.Sigmoid()
            x = twin(layer(x))
        return x

    with torch.no_grad():
        assert torch.equal(make_fx(program, tracing_mode="fake")(x)(x), program(x))


def test_every_layer_prints(capsys: pytest.CaptureFixture[str]) -> None:
    capture(scaled(lambda layer: print("layer") or 2.0), torch.randn(3, 8))  # type: ignore[func-returns-value]
    assert capsys.readouterr().out == "layer\n" * COUNT


# --- classes are as before -------------------------------------------------------------------------------------------------


def test_classes_are_as_before() -> None:
    make = numbered(lambda layer: 2.0)
    model = make()
    kind = type(model.layers[0])  # type: ignore[attr-defined]
    before = dict(vars(kind)), dict(vars(nn.Linear)), dict(vars(Layer))
    capture(model, torch.randn(3, 8))
    assert (dict(vars(kind)), dict(vars(nn.Linear)), dict(vars(Layer))) == before


def test_classes_are_as_before_when_a_layer_fails() -> None:
    def fail(layer: Any) -> float:
        if layer.number == 3:
            raise RuntimeError("in layer 3")
        return 2.0

    model = numbered(fail)()
    kind = type(model.layers[0])  # type: ignore[attr-defined]
    before = dict(vars(kind))
    with pytest.raises(RuntimeError, match="in layer 3"):
        capture(model, torch.randn(3, 8))
    assert dict(vars(kind)) == before


def test_what_the_program_puts_into_a_class_stays() -> None:
    class Own(Layer):
        pass

    def forward(self: Layer, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x

    def program(x: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            x = layer(x)
        Own.forward = forward  # type: ignore[method-assign]
        return x

    model = Stack(Own, COUNT)
    capture(program, torch.randn(3, 8))
    assert Own.forward is forward


def test_two_threads_trace_layers_of_one_class() -> None:
    failures: list[BaseException] = []

    def trace() -> None:
        model, x = Stack(Layer, COUNT), torch.randn(3, 8)
        try:
            for _ in range(5):
                assert torch.equal(capture(model, x)(x), model(x))
        except BaseException as error:
            failures.append(error)

    before = dict(vars(Layer))
    threads = [threading.Thread(target=trace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert dict(vars(Layer)) == before


# --- what is harmless keeps layers from being run -----------------------------------------------------------------------------

HARMLESS: list[Callable[[Any], float]] = [
    lambda layer: math.sqrt(4.0),
    lambda layer: float(os.path.join("a", "b") == "a/b") + 1,
    lambda layer: float(functools.reduce(max, [1, 2, 3])),
    lambda layer: float(collections.OrderedDict(a=2)["a"]),
    lambda layer: 2.0 if sys.version_info >= (3, 8) else 3.0,
    lambda layer: 2.0 if torch.get_default_dtype() is torch.float32 else 3.0,
    lambda layer: float(os.environ.get("NOT_SET", "2")),
    lambda layer: 2.0 if warnings is not None else 3.0,
    lambda layer: 2.0 if LOG.isEnabledFor(10) else 3.0,
    lambda layer: float(Kind.ONE.value) + 1,
    lambda layer: float(np.sqrt(4.0)),
]


@pytest.mark.parametrize("factor", HARMLESS)
def test_layers_that_read_what_does_not_change_are_repeated(
    factor: Callable[[Any], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Any] = []

    def counted(layer: Any) -> float:
        return factor(layer)

    class Counting(Layer):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x, counted(self))

    from understudy.capture.repeated_layers.replay import LayerPlan

    original = LayerPlan.write_nodes
    monkeypatch.setattr(LayerPlan, "write_nodes", lambda plan, *given: runs.append(1) or original(plan, *given))
    capture(Stack(Counting, COUNT), torch.randn(3, 8))
    assert len(runs) >= COUNT - 2
