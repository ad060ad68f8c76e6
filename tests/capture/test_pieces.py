"""The pieces of tracing that programs import one by one, under the names that torch has for them."""

from __future__ import annotations

import operator
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Proxy
from torch.fx._symbolic_trace import PH
from torch.fx.experimental._backward_state import BackwardState

import understudy
from understudy import (
    DecompositionInterpreter,
    FakeTensor,
    FakeTensorMode,
    ProxySymDispatchMode,
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    ShapeEnv,
    decompose,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    dispatch_trace,
    extract_val,
    fake_signature,
    get_innermost_proxy_mode,
    get_isolated_graphmodule,
    get_proxy_mode,
    get_proxy_slot,
    get_torch_dispatch_modes,
    has_proxy_slot,
    is_sym_node,
    make_fx,
    maybe_disable_fake_tensor_mode,
    maybe_handle_decomp,
    py_sym_types,
    set_meta,
    set_original_aten_op,
    set_proxy_slot,
    snapshot_fake,
    thunkify,
    track_tensor,
    track_tensor_tree,
    wrap_key,
    wrapper_and_args_for_make_fx,
)

aten = torch.ops.aten


def targets(gm: Any) -> list[Any]:
    graph = gm if isinstance(gm, Graph) else gm.graph
    return [node.target for node in graph.nodes if node.op == "call_function"]


def no_modes_left() -> bool:
    return get_torch_dispatch_modes() == [] and get_proxy_mode() is None


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Any:
    yield
    assert no_modes_left()


# --- the recorder by hand -------------------------------------------------------------------------------------------


def recorded_by_hand(f: Any, x: torch.Tensor) -> GraphModule:
    tracer = PythonKeyTracer()
    proxy = tracer.create_proxy("placeholder", "x", (), {})
    track_tensor_tree(x, proxy, constant=None, tracer=tracer)
    with ProxyTorchDispatchMode(tracer, "real"):
        result = f(x)
    tracer.graph.output(get_proxy_slot(result, tracer).proxy.node)
    return GraphModule(tracer.root, tracer.graph)


def test_a_recorder_by_hand_on_real_tensors() -> None:
    x = torch.randn(3)
    gm = recorded_by_hand(lambda x: x.sin() + 1, x)
    assert targets(gm) == [aten.sin.default, aten.add.Tensor]
    y = torch.randn(3)
    assert torch.equal(gm(y), y.sin() + 1)


def test_a_recorder_by_hand_on_stand_ins() -> None:
    mode = FakeTensorMode()
    with mode:
        gm = recorded_by_hand(lambda x: x.sin() + 1, torch.empty(3))
    y = torch.randn(3)
    assert torch.equal(gm(y), y.sin() + 1)


def test_a_recorder_can_be_entered_again_and_in_itself() -> None:
    tracer = PythonKeyTracer()
    mode = ProxyTorchDispatchMode(tracer, "real")
    with mode:
        a = torch.ones(2)
        with mode:
            b = a + 1
        c = b * 2
    with mode:
        c.neg()
    assert targets(tracer.graph) == [aten.ones.default, aten.add.Tensor, aten.mul.Tensor, aten.neg.default]


def test_a_recorder_leaves_after_an_error() -> None:
    with pytest.raises(RuntimeError), ProxyTorchDispatchMode(PythonKeyTracer(), "real"):
        torch.ones(2) @ torch.ones(3)
    assert no_modes_left()


def test_a_trace_inside_does_not_take_nodes_away() -> None:
    """The inner trace meets the same stand-ins; afterwards they are still known to the outer one."""
    tracer = PythonKeyTracer()
    with FakeTensorMode(), ProxyTorchDispatchMode(tracer, "fake"):
        x = torch.ones(2)
        with disable_proxy_modes_tracing():
            make_fx(torch.sin, tracing_mode="fake")(x)
        x.cos()
    ones, cos = tracer.graph.nodes
    assert cos.args == (ones,)


# --- who is recording ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_the_current_recorder_inside_f(pre_dispatch: bool) -> None:
    seen: list[Any] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.extend([get_proxy_mode(), get_innermost_proxy_mode()])
        with disable_proxy_modes_tracing() as taken:
            seen.append(taken)
            assert get_proxy_mode() is None
            x.cos()
        return x.sin()

    gm = make_fx(f, pre_dispatch=pre_dispatch)(torch.randn(2))
    assert targets(gm) == [aten.sin.default]
    assert isinstance(seen[0], ProxyTorchDispatchMode) and seen[0] is seen[1] is seen[2]
    assert isinstance(seen[0].tracer, PythonKeyTracer)
    assert seen[0].enable_tracing


def test_modes_of_this_thread() -> None:
    with FakeTensorMode() as mode, ProxyTorchDispatchMode(PythonKeyTracer(), "fake") as recorder:
        assert set(get_torch_dispatch_modes()) == {mode, recorder}
        other: list[Any] = []
        thread = threading.Thread(target=lambda: other.append((get_torch_dispatch_modes(), get_proxy_mode())))
        thread.start()
        thread.join()
    assert other == [([], None)]


def test_real_torch_inside_a_fake_trace() -> None:
    values = []

    def f(x: torch.Tensor) -> torch.Tensor:
        with maybe_disable_fake_tensor_mode() as mode, disable_proxy_modes_tracing():
            assert isinstance(mode, FakeTensorMode)
            values.append(torch.arange(3).sum().item())
        return x + 1

    make_fx(f, tracing_mode="fake")(torch.randn(2))
    assert values == [3]
    with maybe_disable_fake_tensor_mode() as mode:
        assert mode is None


# --- slots -----------------------------------------------------------------------------------------------------------


def test_the_slot_of_a_tensor() -> None:
    tracer = PythonKeyTracer()
    x, y = torch.ones(2), torch.ones(2)
    assert not has_proxy_slot(x, tracer)
    assert get_proxy_slot(x, tracer, "unknown") == "unknown"
    with pytest.raises(
        RuntimeError,
        match=r"a Tensor of shape \(2,\) has no node in the graph of this tracer.*track_tensor_tree",
    ):
        get_proxy_slot(x, tracer)
    proxy = tracer.create_proxy("placeholder", "x", (), {})
    track_tensor(x, proxy, constant=y, tracer=tracer)
    assert has_proxy_slot(x, tracer)
    slot = get_proxy_slot(x, tracer)
    assert slot.proxy.node is proxy.node and slot.constant is y
    assert get_proxy_slot(x, tracer, None, lambda slot: slot.proxy.node.name) == "x"
    other = tracer.create_proxy("placeholder", "other", (), {})
    slot.proxy = other
    set_proxy_slot(x, tracer, slot)
    assert get_proxy_slot(x, tracer).proxy.node is other.node
    assert not has_proxy_slot(x, PythonKeyTracer())


def test_the_slot_of_a_symbol() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(5, 7), source="x")
    tracer = PythonKeyTracer()
    assert not has_proxy_slot(x.shape[0], tracer)
    track_tensor(x, tracer.create_proxy("placeholder", "x", (), {}), constant=None, tracer=tracer)
    assert len(tracer.graph.nodes) == 1  # nothing is read before it is asked for
    thunk = get_proxy_slot(x.shape[0] * 2, tracer)
    assert len(tracer.graph.nodes) == 1
    proxy = thunk.force()
    assert proxy.node.target is operator.mul and is_sym_node(proxy.node)
    assert thunk.force() is proxy


def test_a_second_name_for_a_symbol_never_replaces_the_first() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.from_tensor(torch.randn(5), source="x").shape[0]
    tracer = PythonKeyTracer()
    first, second = (tracer.create_proxy("placeholder", name, (), {}) for name in "ab")
    forced = []

    def first_thunk() -> Proxy:
        forced.append(1)
        return first

    tracer.enable_thunkify = True
    set_proxy_slot(size, tracer, thunkify(tracer, first_thunk))
    set_proxy_slot(size, tracer, thunkify(tracer, lambda: second))
    assert not forced
    assert get_proxy_slot(size, tracer).force().node is first.node
    assert get_proxy_slot(size, tracer).force().node is first.node
    assert forced == [1]


def test_thunks_wait_if_the_tracer_is_lazy() -> None:
    tracer = PythonKeyTracer()
    calls: list[int] = []
    thunk = thunkify(tracer, calls.append, 1)
    assert calls == [1]
    thunk.force()
    assert calls == [1]
    tracer.enable_thunkify = True
    lazy = thunkify(tracer, lambda value: value + 1, value=2)
    assert lazy.force() == lazy.force() == 3


def test_a_tree_of_tensors() -> None:
    tracer = PythonKeyTracer()
    value = {"a": torch.ones(2), "b": (torch.zeros(1), 3, [torch.ones(3)])}
    proxy = tracer.create_proxy("placeholder", "x", (), {})
    assert track_tensor_tree(value, proxy, constant=None, tracer=tracer) is value
    assert [node.target for node in tracer.graph.nodes][1:] == [operator.getitem] * 5
    inner = get_proxy_slot(value["b"][2][0], tracer).proxy.node
    assert inner.meta["val"].shape == (3,) and inner.meta["tensor_meta"].shape == (3,)
    assert inner.args[0].args == (inner.args[0].args[0], 2)


def test_a_backward_state_gets_its_proxy() -> None:
    tracer = PythonKeyTracer()
    tracer.graph, tracer.root = Graph(tracer_cls=PythonKeyTracer), torch.nn.Module()
    state, inside = BackwardState(), BackwardState()
    proxy = tracer.create_proxy("placeholder", "state", (), {})
    track_tensor_tree(state, proxy, constant=None, tracer=tracer)
    assert state.proxy is proxy
    track_tensor_tree([3, inside], proxy, constant=None, tracer=tracer)
    assert inside.proxy.node.args == (proxy.node, 1)


def test_a_list_of_proxies_is_taken_apart_without_nodes() -> None:
    tracer = PythonKeyTracer()
    values = [torch.ones(2), torch.zeros(1)]
    proxies = [tracer.create_proxy("placeholder", name, (), {}) for name in "ab"]
    track_tensor_tree(values, proxies, constant=[None, values[1]], tracer=tracer)
    assert len(tracer.graph.nodes) == 2
    assert get_proxy_slot(values[1], tracer).constant is values[1]


# --- what nodes say ----------------------------------------------------------------------------------------------------


def test_vals() -> None:
    real = torch.randn(2, 3).t()
    mode = FakeTensorMode()
    fake = mode.from_tensor(real)
    val = extract_val({"a": [real, fake, 3], "b": None})
    assert type(val["a"][0]) is FakeTensor and val["a"][0].stride() == real.stride()
    assert type(val["a"][1]) is FakeTensor and val["a"][1] is not fake
    assert val["a"][2] == 3 and val["b"] is None
    snapshot = snapshot_fake(fake)
    fake.t_()
    assert snapshot.shape == (3, 2) and fake.shape == (2, 3)
    assert torch.equal(snapshot_fake(real), real)
    tracer = PythonKeyTracer()
    proxy = tracer.create_proxy("placeholder", "x", (), {})
    assert set_meta(proxy, real) is proxy
    assert proxy.node.meta["val"].shape == (3, 2)
    assert not is_sym_node(proxy.node)
    assert py_sym_types == (torch.SymInt, torch.SymFloat, torch.SymBool)


def test_vals_of_a_real_trace_hold_no_data() -> None:
    gm = make_fx(lambda x: (x + 1).max(0))(torch.randn(3, 2))
    for node in gm.graph.nodes:
        if node.op != "output":
            for val in (
                node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else (node.meta["val"],)
            ):
                assert type(val) is FakeTensor


# --- tracing through a tracer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fake", [False, True])
def test_dispatch_trace(fake: bool) -> None:
    tracer = PythonKeyTracer()
    weight = torch.nn.Parameter(torch.randn(3))

    def f(x: torch.Tensor, y: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"out": x * y[0] + y[1]}

    args: Any = (torch.randn(3), [torch.randn(3), weight.detach()])
    if fake:
        mode = FakeTensorMode()
        args = (mode.from_tensor(args[0]), [mode.from_tensor(part) for part in args[1]])
    with ProxyTorchDispatchMode(tracer, "fake" if fake else "real"):
        gm = dispatch_trace(wrap_key(f, args, tracer), tracer=tracer, concrete_args=(PH, [PH, PH]))
    assert targets(gm) == [aten.mul.Tensor, aten.add.Tensor]
    x, y, z = torch.randn(3, 3)
    assert torch.equal(gm(x, [y, z])["out"], x * y + z)


def test_a_function_of_varargs_with_a_signature() -> None:
    made = fake_signature(lambda *args: args, 3)
    assert made.__code__.co_varnames == ("arg0", "arg1", "arg2")
    assert made(1, 2, 3) == (1, 2, 3)


def test_keywords_for_make_fx() -> None:
    def f(x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    x, scale = torch.randn(2), torch.randn(2)
    wrapped, flat = wrapper_and_args_for_make_fx(f, (x,), {"scale": scale})
    assert flat == [x, scale]
    gm = make_fx(wrapped)(flat)
    assert torch.equal(gm([scale, x]), x * scale)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_trace_inside_leaves_no_marks(mode: str) -> None:
    inner: list[GraphModule] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        inner.append(get_isolated_graphmodule(lambda a, *, b: a.cos() * b, (y,), {"b": y}, tracing_mode=mode))
        return y + 1

    gm = make_fx(f, tracing_mode=mode)(torch.randn(2))
    assert targets(gm) == [aten.sin.default, aten.add.Tensor]
    assert targets(inner[0]) == [aten.cos.default, aten.mul.Tensor]
    x = torch.randn(2)
    assert torch.equal(gm(x), x.sin() + 1)


def test_symbolic_arithmetic_by_hand() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.from_tensor(torch.randn(5), source="x").shape[0]
    tracer = PythonKeyTracer()
    with ProxySymDispatchMode(tracer) as symbols:
        assert symbols.__sym_dispatch__(operator.mul, (), (size, 1), {}) is size
        assert symbols.__sym_dispatch__(operator.mul, (), (1, size), {}) is size
        tripled = symbols.__sym_dispatch__(operator.mul, (), (size, 3), {})
    assert symbols.tracer is tracer and symbols.enable_tracing
    assert tracer.shape_env is mode.shape_env
    assert len(tracer.graph.nodes) == 0
    tracer.symbols.bind(size, tracer.placeholder("n"))
    assert get_proxy_slot(tripled, tracer).force().node.target is operator.mul


# --- decomposing by hand -------------------------------------------------------------------------------------------------


def silu_by_parts(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def test_a_decomposition_by_hand() -> None:
    tracer = PythonKeyTracer()
    recorder = ProxyTorchDispatchMode(tracer, "real", decomposition_table={aten.silu.default: silu_by_parts})
    x = torch.randn(3)
    assert maybe_handle_decomp(recorder, aten.relu.default, (x,), {}) is NotImplemented
    result = maybe_handle_decomp(recorder, aten.silu.default, (x,), {})
    assert torch.equal(result, silu_by_parts(x))
    assert targets(tracer.graph) == [aten.sigmoid.default, aten.mul.Tensor]
    assert {node.meta.get("original_aten") for node in tracer.graph.nodes if node.op == "call_function"} == {
        aten.silu.default
    }


def test_the_original_operator_by_hand() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        with set_original_aten_op(aten.silu.default), set_original_aten_op(aten.relu.default):
            x = x.sin()
        return x.cos()

    gm = make_fx(f)(torch.randn(2))
    sin, cos = (node for node in gm.graph.nodes if node.op == "call_function")
    assert sin.meta["original_aten"] is aten.silu.default
    assert "original_aten" not in cos.meta
    with set_original_aten_op(aten.silu.default):  # outside of a trace there is nothing to say
        pass


def test_a_graph_recorded_again_through_decompositions() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> Any:
            return {"y": torch.nn.functional.silu(x * self.weight)}, x.sum()

    def with_constant(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) * torch.tensor(1.0)

    gm = make_fx(Model())(torch.randn(3))
    new_graph = Graph()
    x = torch.randn(3)
    expected = gm(x)
    result = DecompositionInterpreter(gm, new_graph, {aten.silu.default: with_constant}).run(x)
    again = GraphModule(gm, new_graph)
    assert aten.silu.default not in targets(again) and aten.sigmoid.default in targets(again)
    y = torch.randn(3)
    for got, want in ((result, expected), (again(y), gm(y))):
        torch.testing.assert_close(got[0]["y"], want[0]["y"])
        assert torch.equal(got[1], want[1])


def test_autocast_casts_each_time() -> None:
    before = torch.is_autocast_cache_enabled()
    with disable_autocast_cache():
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled() is before
    with pytest.raises(ValueError), disable_autocast_cache():
        raise ValueError
    assert torch.is_autocast_cache_enabled() is before


def test_decompose_restores_after_an_error() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        try:
            with decompose({aten.silu.default: silu_by_parts}):
                raise ValueError
        except ValueError:
            return torch.nn.functional.silu(x)

    assert targets(make_fx(f)(torch.randn(2))) == [aten.silu.default]


def test_the_names_are_torchs() -> None:
    import torch.fx.experimental.proxy_tensor as theirs

    for name in understudy.__all__:
        if hasattr(theirs, name) and name not in ("py_sym_types",):
            assert callable(getattr(theirs, name)) == callable(getattr(understudy, name)), name


# --- subclasses of the tracer ------------------------------------------------------------------------------------------


class CountsNodes(PythonKeyTracer):
    def __init__(self) -> None:
        super().__init__()
        self.created: list[str] = []

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> Any:
        self.created.append(f"{kind} {target}")
        return super().create_node(kind, target, args, kwargs, name, type_expr)


class CountsProxies(PythonKeyTracer):
    def __init__(self) -> None:
        super().__init__()
        self.created: list[str] = []

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        self.created.append(f"{kind} {target}")
        return super().create_proxy(kind, target, *args, **kwargs)


@pytest.mark.parametrize("is_fake", [True, False])
@pytest.mark.parametrize("kind", [CountsNodes, CountsProxies])
def test_hooks_of_a_tracer_are_called_for_every_node(kind: Any, is_fake: bool) -> None:
    tracer, weight = kind(), torch.ones(3)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x = mode.from_tensor(torch.randn(2, 3)) if is_fake else torch.randn(2, 3)
    tracer.remember(x, tracer.placeholder("x"))
    with mode if is_fake else nullcontext(), ProxyTorchDispatchMode(tracer, "fake" if is_fake else "real"):
        first, _ = (x * weight).chunk(2)
        first.sin_()
    targets = [
        "get_attr _tensor_constant0",
        "aten.mul.Tensor",
        "aten.split.Tensor",
        "getitem",
        "getitem",
        "aten.sin_",
    ]
    assert len(tracer.created) == len(targets)
    assert all(expected in found for expected, found in zip(targets, tracer.created, strict=True)), (
        tracer.created
    )
    tracer.graph.lint()
    assert all("val" in node.meta for node in tracer.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("is_fake", [True, False])
def test_recording_can_be_switched_off(is_fake: bool) -> None:
    tracer, mode = PythonKeyTracer(), FakeTensorMode()
    x = mode.from_tensor(torch.randn(2)) if is_fake else torch.randn(2)
    tracer.remember(x, tracer.placeholder("x"))
    recorder = ProxyTorchDispatchMode(tracer, "fake" if is_fake else "real")
    with mode if is_fake else nullcontext(), recorder:
        x.sin()
        recorder.enable_tracing = False
        assert x.cos().shape == (2,)
        recorder.enable_tracing = True
        x.exp()
    assert [node.name for node in tracer.graph.nodes] == ["x", "sin", "exp"]
