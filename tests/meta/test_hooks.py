"""A subclass of MetaTracer that overrides a hook is called; proxies made by hand work, as those of torch's module do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx.experimental.meta_tracer as torch_meta_tracer
import torch.nn.functional as F
from torch import Tensor, nn

from understudy import (
    FakeTensor,
    FakeTensorMode,
    MetaTraceError,
    manual_meta_overrides,
    meta_tracer,
    symbolic_trace,
)
from understudy.meta_tracer import MetaAttribute, MetaDeviceAttribute, MetaProxy, MetaTracer

x = torch.randn(4, 6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) * self.weight
        y = y + torch.arange(y.shape[-1], device=y.device)
        return torch.relu(y) if y.shape[0] < 30 else torch.sigmoid(y)


def check(tracer: MetaTracer, program: Any = None) -> torch.fx.GraphModule:
    program = Model() if program is None else program
    traced = symbolic_trace(program, {"x": x}, tracer=tracer)
    assert torch.equal(traced(x), program(x))
    return traced


# --- hooks ---------------------------------------------------------------------------------------------------------


class Logging(MetaTracer):
    """Notes the calls of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []


def test_create_proxy_is_called_for_each_node() -> None:
    class Tracer(Logging):
        def create_proxy(
            self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any
        ) -> Any:
            proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
            self.log.append((proxy.node, args, proxy))
            return proxy

    tracer = Tracer()
    traced = check(tracer)
    nodes = [node for node in traced.graph.nodes if node.op != "output" and node.target is not getattr]
    assert {node.name for node, _, _ in tracer.log} == {node.name for node in nodes}
    for node, args, proxy in tracer.log:
        assert isinstance(proxy, MetaProxy) and isinstance(proxy, torch.fx.Proxy)
        assert proxy._tensor_meta._spec is node.meta["val"]._spec
        assert not any(isinstance(value, FakeTensor) for value in args)
        inputs = [value for value in node.args if isinstance(value, torch.fx.Node)]
        assert [value.node for value in args if isinstance(value, MetaProxy)] == inputs


def test_create_proxy_may_record_another_call() -> None:
    class Tracer(MetaTracer):
        def create_proxy(
            self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any
        ) -> Any:
            target = torch.relu if target == "relu" else target
            kind = "call_function" if target is torch.relu else kind
            return super().create_proxy(kind, target, args, kwargs, *rest, **options)

    traced = check(Tracer(), lambda x: x.relu() + 1)
    assert traced.graph.find_nodes(op="call_function", target=torch.relu)


def test_create_proxy_writes_in_place_once() -> None:
    class Tracer(MetaTracer):
        def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
            return super().create_proxy(*args, **kwargs)

    def program(x: Tensor) -> Tensor:
        y = x * 1
        y.t_()
        return y

    traced = check(Tracer(), program)
    assert traced.graph.find_nodes(op="call_method", target="t_")[0].meta["val"].shape == (6, 4)


def test_proxy_is_what_the_program_gets() -> None:
    class Own(MetaProxy):
        def rows(self) -> Any:
            return self.shape[0]

    class Tracer(MetaTracer):
        def proxy(self, node: torch.fx.Node) -> Any:
            return Own(node, self)

    seen: list[Any] = []

    def program(x: Any) -> Any:
        y = torch.zeros(x.shape) + F.relu(x)
        seen.extend([type(x), type(y)])
        return y * (y.rows() if isinstance(y, Own) else y.shape[0]) + y.size(0) + y.dim()

    check(Tracer(), program)
    assert seen[:2] == [Own, Own] and seen[2:] == [Tensor, Tensor]
    check(Tracer())


def test_modules_and_their_attributes() -> None:
    class Tracer(Logging):
        def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
            self.log.append(("getattr", attr))
            return super().getattr(attr, attr_val, parameter_proxy_cache)

        def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self.log.append(("call_module", type(m)))
            return super().call_module(m, forward, args, kwargs)

        def path_of_module(self, mod: nn.Module) -> str:
            self.log.append(("path_of_module", type(mod)))
            return super().path_of_module(mod)

        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            self.log.append(("is_leaf_module", module_qualified_name))
            return super().is_leaf_module(m, module_qualified_name)

    tracer = Tracer()
    check(tracer)
    assert [call for call in tracer.log if call[0] != "getattr"] == [
        ("call_module", nn.Linear), ("path_of_module", nn.Linear), ("is_leaf_module", "linear"),
        ("call_module", nn.LayerNorm), ("path_of_module", nn.LayerNorm), ("is_leaf_module", "norm"),
    ]  # fmt: skip
    assert [name for hook, name in tracer.log if hook == "getattr"] == ["norm", "linear", "weight"]


def test_getattr_may_return_another_value() -> None:
    class Tracer(MetaTracer):
        def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
            return 1.0 if attr == "weight" else super().getattr(attr, attr_val, parameter_proxy_cache)

    model = Model()
    traced = symbolic_trace(model, {"x": x}, tracer=Tracer())
    assert "weight" not in [node.target for node in traced.graph.nodes]
    nn.init.ones_(model.weight)
    assert torch.equal(traced(x), model(x))


def test_functions_to_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_torch_function(value: Any, factor: int) -> Any:
        return value * factor

    monkeypatch.setattr(torch, "no_torch_function", no_torch_function, raising=False)

    class Tracer(MetaTracer):
        _TORCH_METHODS_TO_PATCH = [*MetaTracer._TORCH_METHODS_TO_PATCH, "no_torch_function"]

    def program(x: Tensor) -> Tensor:
        return torch.no_torch_function(x, 3) + torch.ones(4, 6)

    assert check(MetaTracer(), program).graph.find_nodes(op="call_function", target=no_torch_function) == []
    assert check(Tracer(), program).graph.find_nodes(op="call_function", target=no_torch_function)
    assert torch.no_torch_function is no_torch_function


def test_create_node_and_create_arg() -> None:
    class Tracer(Logging):
        def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
            node = super().create_node(kind, target, *args, **kwargs)
            node.meta["seen"] = True
            return node

        def create_arg(self, a: Any) -> Any:
            self.log.append(type(a))
            return super().create_arg(a)

    tracer = Tracer()
    traced = check(tracer)
    assert all(node.meta["seen"] for node in traced.graph.nodes) and FakeTensor in tracer.log


def test_the_names_of_torchs_tracer() -> None:
    for name, value in vars(torch_meta_tracer.MetaTracer).items():
        if not name.startswith("__") and inspect.isfunction(value):
            ours = inspect.signature(getattr(MetaTracer, name)).parameters
            assert list(ours)[: len(inspect.signature(value).parameters)] == list(
                inspect.signature(value).parameters
            )
    assert MetaTracer._TORCH_METHODS_TO_PATCH == torch_meta_tracer.MetaTracer._TORCH_METHODS_TO_PATCH
    ours, theirs = MetaTracer(), torch_meta_tracer.MetaTracer()
    model = nn.Sequential(nn.ReLU())
    ours.trace(model, {"input": x})
    theirs.trace(model, {"input": x.to("meta")})
    missing = [name for name in vars(theirs) if not hasattr(ours, name)]
    assert missing == []


# --- proxies -------------------------------------------------------------------------------------------------------


def proxy_of_input() -> MetaProxy:
    tracer = MetaTracer()
    tracer.trace(lambda x: x, {"x": x})
    node = next(iter(tracer.graph.nodes))
    tracer.is_over = False
    return MetaProxy(node, tracer)


def test_a_proxy_made_by_hand() -> None:
    proxy = proxy_of_input()
    assert isinstance(proxy, torch.fx.Proxy) and not hasattr(proxy, "_tensor_meta")
    proxy.install_tensor_meta(torch.empty(4, 6, device="meta"))
    assert proxy.shape == (4, 6) and proxy.size() == (4, 6) and proxy.size(0) == 4 and proxy.dim() == 2
    assert proxy.dtype is torch.float32 and meta_tracer.proxys_to_metas(proxy) is proxy._tensor_meta
    assert (proxy + 1)._tensor_meta.shape == (4, 6)


class ByHand(MetaTracer):
    """Builds its graph itself, as programs do that interpret expressions: `trace` is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.root = nn.Module()
        self.root.weight = nn.Parameter(torch.ones(6))
        self.graph = torch.fx.Graph(tracer_cls=ByHand)
        self.tensor_attrs = {}
        self.meta_args = {"x": torch.empty(4, 6, device="meta")}
        self.orig_fns = {torch.zeros}
        self.patched_torch_methods = {"zeros": meta_tracer.gen_constructor_wrapper(torch.zeros)}


def test_a_graph_built_by_hand() -> None:
    tracer = ByHand()
    value = tracer.create_proxy("placeholder", "x", (), {})
    weight = tracer.create_proxy("get_attr", "weight", (), {})
    result = torch.cat([(value * weight).relu(), value])
    assert type(result) is MetaProxy and result.shape == (8, 6) and result.T.shape == (6, 8)
    module = tracer.create_proxy("call_function", torch.relu, (result,), {})
    assert module.size(0) == 8 and MetaAttribute(value, "T").node.target is getattr
    tracer.create_node("output", "output", (tracer.create_arg(module),), {})
    constant = tracer.create_arg(torch.ones(2))
    assert constant.op == "get_attr" and torch.equal(getattr(tracer.root, constant.target), torch.ones(2))
    traced = torch.fx.GraphModule(tracer.root, tracer.graph)
    example = torch.randn(4, 6)
    assert torch.equal(traced(example), torch.cat([example.relu(), example]).relu())


def test_unknown_metadata_of_a_graph_built_by_hand() -> None:
    tracer = ByHand()
    value = tracer.create_proxy("placeholder", "x", (), {})
    with pytest.warns(UserWarning, match="Could not compute metadata for call_method target no_such_method"):
        unknown = value.no_such_method()
    with pytest.warns(UserWarning, match=r"unknown; set it with install_tensor_meta\(example\)"):
        unknown + 1
    assert not hasattr(unknown, "_tensor_meta")


def test_an_attribute_made_by_hand() -> None:
    proxy = proxy_of_input()
    proxy.install_tensor_meta(torch.empty(4, 6))
    attribute = MetaAttribute(proxy, "T")
    before = len(proxy.tracer.graph.nodes)
    assert attribute.root is proxy and attribute.attr == "T" and attribute.shape == (6, 4)
    assert len(proxy.tracer.graph.nodes) == before
    assert (
        attribute.node.target is getattr
        and attribute.node.args[1] == "T"
        and attribute.node is attribute.node
    )
    called = MetaAttribute(proxy, "view")(24)
    assert called.node.op == "call_method" and called.shape == (24,)
    device = MetaDeviceAttribute(proxy, "device")
    assert isinstance(device, MetaAttribute) and device.node.args == (proxy.node, "device")
    assert isinstance(proxy.device, MetaDeviceAttribute)
    assert meta_tracer.proxys_to_metas(device) == torch.device("cpu")


# --- overrides and unknown metadata ------------------------------------------------------------------------------------


def test_the_default_overrides() -> None:
    assert list(manual_meta_overrides) == list(torch_meta_tracer.manual_meta_overrides)
    assert all(value.__module__ == "understudy.meta.overrides" for value in manual_meta_overrides.values())


def test_overrides_have_the_metadata_of_the_call() -> None:
    with FakeTensorMode():
        half = nn.Embedding(7, 5, dtype=torch.bfloat16)
        indices = torch.zeros(2, 3, dtype=torch.int64)
        assert meta_tracer.embedding_override(half, indices).dtype == half(indices).dtype == torch.bfloat16
        y = torch.zeros(4, 6)
        for result in (
            meta_tracer.nn_layernorm_override(nn.LayerNorm(6), y), meta_tracer.torch_relu_override(y),
            meta_tracer.functional_relu_override(y), meta_tracer.torch_abs_override(y),
            meta_tracer.torch_nn_relu_override(nn.ReLU(), y),
        ):  # fmt: skip
            assert result is not y and result.untyped_storage() is not y.untyped_storage()
        assert meta_tracer.torch_nn_relu_override(nn.ReLU(inplace=True), y) is y
        whole = torch.zeros(3, dtype=torch.int32)
        assert meta_tracer.torch_where_override(whole > 0, whole, whole).dtype == torch.int32


def test_overrides_that_refuse() -> None:
    y = FakeTensorMode().from_tensor(x)
    with pytest.raises(AssertionError, match="expected inplace=False, got True"):
        meta_tracer.functional_relu_override(y, inplace=True)
    with pytest.raises(AssertionError, match="expected out=None"):
        meta_tracer.torch_abs_override(y, out=y)

    def program(x: Tensor) -> Tensor:
        y = x * 1
        return F.relu(y, inplace=True) + torch.abs(y, out=y)

    check(MetaTracer(), program)  # the calls themselves are run


@torch.fx.wrap
def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def test_unknown_metadata_warns_and_goes_on() -> None:
    def program(x: Tensor) -> Tensor:
        y = by_numpy(x)
        return y.relu() + torch.zeros(4, 6) * y.sum()

    with pytest.warns(UserWarning, match="Could not compute metadata for call_function target by_numpy"):
        traced = symbolic_trace(program, {"x": x})
    assert torch.equal(traced(x), program(x))


def test_unknown_metadata_raises_if_strict() -> None:
    with pytest.raises(
        MetaTraceError, match="Could not compute metadata for call_function target by_numpy"
    ) as said:
        symbolic_trace(lambda x: by_numpy(x) + 1, {"x": x}, strict=True)
    assert "  to do:   compute it in understudy.manual_meta_overrides, or trace with strict=False" in str(
        said.value
    )
    with pytest.raises(MetaTraceError, match="Could not compute metadata"):
        MetaTracer().trace(lambda x: by_numpy(x) + 1, {"x": x}, strict=True)
