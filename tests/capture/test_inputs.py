"""What a traced function may be given, refer to and return: numbers, symbols, stand-ins, modules, tensor subclasses."""

from __future__ import annotations

import importlib
import logging
import operator
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from understudy import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    MixedTensorsError,
    ShapeEnv,
    get_proxy_mode,
    get_torch_dispatch_modes,
    make_fx,
)
from understudy.errors import NotProvidedError

aten = torch.ops.aten
MODES = ("real", "fake", "symbolic")
each_mode = pytest.mark.parametrize("mode", MODES)
Pair = namedtuple("Pair", "left right")


def targets(gm: Any) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def placeholders(gm: Any) -> list[Any]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Any:
    yield
    assert get_proxy_mode() is None and get_torch_dispatch_modes() == []


# --- numbers and structures ---------------------------------------------------------------------------------------------


@each_mode
def test_numbers_none_and_text(mode: str) -> None:
    def f(x: Any, n: Any, nothing: Any, flag: Any, factor: Any, text: Any) -> Any:
        assert nothing is None and flag is True and text == "a"
        return x * n + factor

    gm = make_fx(f, tracing_mode=mode)(torch.randn(3), 5, None, True, 2.5, "a")
    assert [node.name for node in placeholders(gm)] == [
        "x_1",
        "n_1",
        "nothing_1",
        "flag_1",
        "factor_1",
        "text_1",
    ]
    x = torch.randn(3)
    assert torch.equal(gm(x, 5, None, True, 2.5, "a"), x * 5 + 2.5)
    if mode == "symbolic":  # an integer is a symbol
        assert torch.equal(gm(x, 7, None, True, 2.5, "a"), x * 7 + 2.5)


def test_an_integer_in_symbolic_mode_is_a_symbol_that_is_guarded() -> None:
    def f(x: torch.Tensor, n: Any) -> torch.Tensor:
        return x.repeat(n) if n > 3 else x

    gm = make_fx(f, tracing_mode="symbolic")(torch.randn(2), 5)
    node = placeholders(gm)[1]
    assert isinstance(node.meta["val"], torch.SymInt)
    assert torch.equal(gm(torch.ones(3), 4), torch.ones(12))
    assert any(">" in str(guard) or "<" in str(guard) for guard in gm.shape_env.guards)


@each_mode
def test_structures_in_and_out(mode: str) -> None:
    def f(tensors: Any, pair: Any) -> Any:
        total = tensors["a"] + tensors["b"][0]
        return Pair(total, [pair.left, None, 3]), OrderedDict(c=(pair.right * 2,)), "text"

    def given() -> Any:
        return {"a": torch.randn(3), "b": [torch.randn(3)]}, Pair(torch.randn(2), torch.randn(2))

    gm = make_fx(f, tracing_mode=mode)(*given())
    args = given()
    got, want = gm(*args), f(*args)
    assert type(got[0]) is Pair and type(got[1]) is OrderedDict and got[2] == "text"
    assert (
        torch.equal(got[0].left, want[0].left)
        and got[0].right[0] is args[1].left
        and got[0].right[1:] == [None, 3]
    )
    assert torch.equal(got[1]["c"][0], want[1]["c"][0])


@each_mode
@pytest.mark.parametrize("output", [None, 3, "text", ()], ids=str)
def test_outputs_that_are_no_tensors(output: Any, mode: str) -> None:
    assert make_fx(lambda x: output, tracing_mode=mode)(torch.randn(2))(torch.randn(2)) == output


@each_mode
def test_an_input_that_is_returned_or_unused(mode: str) -> None:
    gm = make_fx(lambda x, y: (x, x), tracing_mode=mode)(torch.randn(2), torch.randn(3))
    x, y = torch.randn(2), torch.randn(3)
    assert all(result is x for result in gm(x, y))


@each_mode
def test_one_tensor_twice(mode: str) -> None:
    same = torch.randn(2)
    gm = make_fx(lambda x, y: x + y, tracing_mode=mode)(same, same)
    x = torch.randn(2)
    assert torch.equal(gm(x, x), x + x)


def test_sizes_as_outputs() -> None:
    gm = make_fx(lambda x: (x.shape[0] * 2, x.numel(), x.sum()), tracing_mode="symbolic")(torch.randn(3, 4))
    size, numel, _ = gm(torch.randn(5, 7))
    assert (size, numel) == (10, 35)


# --- symbols and stand-ins of the user's own ----------------------------------------------------------------------------


def test_stand_ins_bring_their_mode() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.randn(4, 5), source="x")
    gm = make_fx(lambda x: x.reshape(-1) + x.shape[1], tracing_mode="symbolic")(x)
    assert gm.shape_env is env
    assert all(node.meta["val"].fake_mode is mode for node in placeholders(gm))
    y = torch.randn(2, 3)
    assert torch.equal(gm(y), y.reshape(-1) + 3)
    assert x._node is None  # the caller's tensor has no marks of the trace


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_stand_ins_in_the_other_modes(mode: str) -> None:
    stand_ins = FakeTensorMode()
    x = stand_ins.from_tensor(torch.randn(3))
    gm = make_fx(lambda x: x.sin(), tracing_mode=mode)(x)
    (sin,) = (node for node in gm.graph.nodes if node.op == "call_function")
    assert type(sin.meta["val"]) is FakeTensor and sin.meta["val"].fake_mode is stand_ins
    assert torch.equal(gm(torch.ones(3)), torch.ones(3).sin())


def test_stand_ins_without_symbols_are_refused_where_symbols_are_wanted() -> None:
    x = FakeTensorMode().from_tensor(torch.randn(3))
    with pytest.raises(ValueError, match="without shape_env"):
        make_fx(torch.sin, tracing_mode="symbolic")(x)


def test_symbols_as_inputs() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(4, 5), source="x")
    gm = make_fx(lambda n, x: x + n * 2, tracing_mode="symbolic")(x.shape[0], x)
    assert targets(gm) == [operator.mul, aten.add.Tensor]
    assert torch.equal(gm(3, torch.ones(3, 2)), torch.ones(3, 2) + 6)


def test_a_symbol_alone() -> None:
    env = ShapeEnv()
    size = FakeTensorMode(shape_env=env).from_tensor(torch.randn(4), source="x").shape[0]
    gm = make_fx(lambda n: torch.zeros(n * 2), tracing_mode="symbolic")(size)
    assert gm.shape_env is env
    assert gm(3).shape == (6,)


def test_a_symbol_that_is_no_input() -> None:
    size = FakeTensorMode(shape_env=(env := ShapeEnv())).from_tensor(torch.randn(4), source="x").shape[0]
    y = FakeTensorMode(shape_env=env).from_tensor(torch.randn(7), source="y")
    with pytest.raises(
        Exception, match=r"neither an input of this graph(.|\n)*pass the tensor or the number"
    ):
        make_fx(lambda y: y.repeat(size), tracing_mode="symbolic")(y)


# --- what the function refers to ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_a_stand_in_as_a_constant(tracing_mode: str) -> None:
    """As in torch: one of the mode that the inputs belong to, or that is active."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, other = mode.from_tensor(torch.randn(3)), mode.from_tensor(torch.randn(3))
    gm = make_fx(lambda x: x + other, tracing_mode=tracing_mode)(x)
    assert gm._tensor_constant0 is other
    if tracing_mode != "real":
        with mode:
            gm = make_fx(lambda x: x + other, tracing_mode=tracing_mode)(torch.randn(3))
        assert gm._tensor_constant0 is other
    message = r"made outside of this trace(.|\n)*_allow_fake_constant=True"
    for foreign in (torch.randn(3), FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.randn(3))):
        with pytest.raises(MixedTensorsError, match=message):
            make_fx(lambda x: x + other, tracing_mode=tracing_mode)(foreign)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_real_tensor_beside_stand_ins(mode: str) -> None:
    other = torch.randn(3)
    with pytest.raises(MixedTensorsError, match="got a real tensor"):
        make_fx(lambda x: x * other, tracing_mode=mode)(torch.randn(3))
    gm = make_fx(lambda x: x * other, tracing_mode=mode, _allow_non_fake_inputs=True)(torch.randn(3))
    x = torch.randn(3)
    assert torch.equal(gm(x), x * other) and gm._tensor_constant0 is other


def test_values_that_are_asked_for() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    with pytest.raises(
        DataDependentOutputException, match=r"symbolic(.|\n)*_error_on_data_dependent_ops=False"
    ):
        make_fx(f)(torch.ones(3))
    gm = make_fx(f, _error_on_data_dependent_ops=False)(torch.ones(3))
    assert torch.equal(gm(torch.ones(3)), torch.ones(3) * 3)
    assert targets(gm)[-1] is aten.mul.Tensor and list(gm.graph.nodes)[-2].args[1] == 3.0


def test_an_unknown_mode() -> None:
    with pytest.raises(
        ValueError, match="tracing_mode must be one of 'real', 'fake', 'symbolic', got 'other'"
    ):
        make_fx(torch.sin, tracing_mode="other")


def test_declarations_of_dynamic_sizes_are_refused() -> None:
    with pytest.raises(NotProvidedError, match=r"does not read .* Use tracing_mode='symbolic'"):
        make_fx(torch.sin, tracing_mode="fake", dynamic_shapes={"x": {0: True}})
    spec = importlib.import_module("torch.fx.experimental.dynamic_spec")
    if not hasattr(spec, "dynamic_spec"):
        pytest.skip("this release of torch has no @dynamic_spec")

    @spec.dynamic_spec({"x": spec.TensorSpec([spec.ShapeVar("rows"), 3])})
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    with pytest.raises(NotProvidedError, match=r"@dynamic_spec"):
        make_fx(f, tracing_mode="fake")


# --- modules as inputs ---------------------------------------------------------------------------------------------------


@each_mode
def test_a_module_as_an_input(mode: str) -> None:
    linear = torch.nn.Linear(3, 2)
    before = dict(linear.named_parameters())
    gm = make_fx(lambda module, x: module(x).relu(), tracing_mode=mode)(linear, torch.randn(4, 3))
    x = torch.randn(4, 3)
    assert torch.equal(gm(None, x), linear(x).relu())
    assert all(linear.get_parameter(name) is parameter for name, parameter in before.items())


@each_mode
def test_a_module_as_a_proxy(mode: str) -> None:
    """The graph takes the module it is given."""

    def f(module: Any, x: torch.Tensor) -> Any:
        assert isinstance(module, torch.fx.Proxy)
        return x.sin(), module.weight

    linear = torch.nn.Linear(3, 2)
    gm = make_fx(f, tracing_mode=mode, proxy_module_inputs=True)(linear, torch.randn(3))
    other, x = torch.nn.Linear(3, 2), torch.randn(3)
    sin, weight = gm(other, x)
    assert torch.equal(sin, x.sin()) and weight is other.weight


# --- tensor subclasses -----------------------------------------------------------------------------------------------------


def two() -> TwoTensor:
    return TwoTensor(torch.randn(3), torch.randn(3))


@each_mode
def test_a_wrapper_as_an_input(mode: str) -> None:
    gm = make_fx(lambda x: x.sin() + 1, tracing_mode=mode)(two())
    assert targets(gm) == [aten.sin.default, aten.add.Tensor]
    x = two()
    result = gm(x)
    assert type(result) is TwoTensor
    assert torch.equal(result.a, x.a.sin() + 1) and torch.equal(result.b, x.b.sin() + 1)


@each_mode
def test_a_wrapper_that_is_made_inside_desugars(mode: str) -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        both = TwoTensor(a, b).sin() * 2
        return both.a, both.b

    gm = make_fx(f, tracing_mode=mode)(torch.randn(3), torch.randn(3))
    assert targets(gm) == [aten.sin.default, aten.sin.default, aten.mul.Tensor, aten.mul.Tensor]
    a, b = torch.randn(3), torch.randn(3)
    assert all(map(torch.equal, gm(a, b), f(a, b)))


@each_mode
def test_a_wrapper_as_a_parameter_desugars(mode: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(two())

        def forward(self, x: torch.Tensor) -> Any:
            both = x * self.weight
            return both.a, both.b

    model = Model()
    weight = model.weight
    gm = make_fx(model, tracing_mode=mode)(torch.randn(3))
    assert targets(gm) == [aten.mul.Tensor, aten.mul.Tensor]
    assert {node.target for node in gm.graph.nodes if node.op == "get_attr"} == {"weight_a", "weight_b"}
    x = torch.randn(3)
    assert all(map(torch.equal, gm(x), (x * weight.a, x * weight.b)))
    assert model.weight is weight


def test_a_wrapper_as_a_constant_desugars() -> None:
    constant = two()
    gm = make_fx(lambda x: (x + constant).b)(torch.randn(3))
    x = torch.randn(3)
    assert torch.equal(gm(x), x + constant.b)


class Strange(torch.Tensor):
    """A subclass that answers nothing."""

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NotImplemented


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_subclass_that_nobody_can_handle(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    strange = Strange(torch.randn(3))
    with caplog.at_level(logging.DEBUG, logger="understudy"), pytest.raises(TypeError):
        make_fx(lambda x: torch.add(x, strange), tracing_mode=mode)(torch.randn(3))
    assert "Strange" in caplog.text and "__torch_dispatch__" in caplog.text


@pytest.mark.parametrize("number", [-1, -7, 5])
def test_any_integer_among_the_inputs_may_vary(number: int) -> None:
    x = torch.arange(12.0).view(3, 4)
    graph = make_fx(lambda x, n: x * n["deep"][0] + n["deep"][0], tracing_mode="symbolic")(
        x, {"deep": [number]}
    )
    for other in (number, 2 * number):
        assert torch.equal(graph(x, {"deep": [other]}), x * other + other)


def test_a_negative_dimension_is_a_guard() -> None:
    graph = make_fx(lambda x, dim: x.sum(dim), tracing_mode="symbolic")(torch.ones(3, 4), -1)
    assert graph(torch.ones(3, 4), -1).shape == (3,)
    assert [guard.text for guard in graph.shape_env.guards] == ["dim == -1"]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", ["allow_non_fake_inputs", "_allow_non_fake_inputs"])
def test_real_tensors_may_be_constants(mode: str, name: str) -> None:
    constant, x = torch.tensor([1.0, 2.0, 3.0]), torch.randn(2, 3)
    gm = make_fx(lambda x: x * constant, tracing_mode=mode, **{name: True})(x)
    assert torch.equal(gm(x), x * constant)
