"""FakeTensorProp: what is written into nodes, what is left alone, what is said when it fails."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv as TorchShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from tests.graph.reality import aliasing, differences
from understudy import FakeTensor, FakeTensorMode, FakeTensorProp, PropagationError, ShapeEnv, symbolic_trace
from understudy import make_fx as capture
from understudy.errors import ShapeMismatch

aten = torch.ops.aten


def traced(function: Any) -> GraphModule:
    return torch.fx.symbolic_trace(function)


def node_named(module: GraphModule, name: str) -> Node:
    return next(node for node in module.graph.nodes if node.name == name)


# --- val ------------------------------------------------------------------------------------------------------------


def test_every_node_has_a_val() -> None:
    module = traced(lambda x, y: torch.relu(x) @ y)
    result = FakeTensorProp(module).propagate(torch.randn(2, 3), torch.randn(3, 4))
    assert type(result) is FakeTensor
    assert result.shape == (2, 4)
    assert all(type(node.meta["val"]) is FakeTensor for node in module.graph.nodes)


def test_structures_keep_their_shape_and_other_leaves_are_none() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    both = graph.call_function(lambda x: {"a": (x, "name"), "b": [x.shape[0], None]}, (x,))
    graph.output(both)
    module = GraphModule(nn.Module(), graph)
    FakeTensorProp(module).propagate(torch.randn(2))
    val = both.meta["val"]
    assert type(val["a"][0]) is FakeTensor
    assert val["a"][1] is None
    assert val["b"] == [2, None]
    assert str(FakeTensorProp.spec_of(both)["a"][0]) == "f32[2]@cpu"


def test_nothing_is_written_where_there_is_nothing_to_say() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    device = graph.call_function(getattr, (x, "device"))
    names = graph.call_function(lambda x: ["a", None], (x,))
    graph.output(x)
    device.meta["val"] = torch.empty(1)
    module = GraphModule(nn.Module(), graph)
    FakeTensorProp(module).propagate(torch.randn(2))
    assert "val" not in device.meta
    assert "val" not in names.meta
    assert FakeTensorProp.spec_of(names) is None


def test_a_later_write_does_not_change_what_was_recorded() -> None:
    module = traced(lambda x: x.t_().add_(1))
    FakeTensorProp(module).propagate(torch.randn(2, 3))
    shapes = [tuple(node.meta["val"].shape) for node in module.graph.nodes]
    assert shapes == [(2, 3), (3, 2), (3, 2), (3, 2)]
    assert differences(module, torch.randn(2, 3)) == []


def test_what_the_caller_does_to_inputs_and_outputs_does_not_change_it_either() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.relu.default, (x,)))
    module = GraphModule(nn.Module(), graph)
    mode = FakeTensorMode()
    given = mode.from_tensor(torch.randn(2, 3))
    result = FakeTensorProp(module, mode).propagate_dont_convert_inputs(given)
    given.t_()
    result.t_()
    assert [tuple(node.meta["val"].shape) for node in graph.nodes] == [(2, 3)] * 3


def test_values_have_no_gradient() -> None:
    module = traced(nn.Linear(3, 4))
    result = FakeTensorProp(module).propagate(torch.randn(2, 3))
    assert result.requires_grad
    assert not any(node.meta["val"].requires_grad for node in module.graph.nodes)


def test_views_share_storage() -> None:
    def program(x: torch.Tensor) -> Any:
        a = x.view(6)
        b, c = x.split(1)
        return a[1:], b, c.relu(), x + 1

    module = make_fx(program)(torch.randn(2, 3))
    FakeTensorProp(module).propagate(torch.randn(2, 3))
    groups = aliasing(module)
    assert ["x_1", "view", "split", "getitem", "getitem_1", "slice_1", "output"] in groups
    assert ["relu", "output"] in groups
    assert ["add", "output"] in groups


def test_aliasing_of_the_modules_tensors_is_kept() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))
            self.register_buffer("row", self.weight.detach()[0])

        def forward(self, x: torch.Tensor) -> Any:
            return x @ self.weight + self.row

    module = traced(Tied())
    FakeTensorProp(module).propagate(torch.randn(2, 3))
    assert ["weight", "row"] in aliasing(module) or ["row", "weight"] in aliasing(module)


def test_tensor_meta_on_request() -> None:
    module = traced(nn.Linear(3, 4))
    FakeTensorProp(module).propagate(torch.randn(2, 3))
    assert all("tensor_meta" not in node.meta for node in module.graph.nodes)
    FakeTensorProp(module, tensor_meta=True).propagate(torch.randn(2, 3))
    expected = torch.fx.passes.shape_prop.ShapeProp(module)
    ours = [node.meta["tensor_meta"] for node in module.graph.nodes]
    expected.propagate(torch.randn(2, 3))
    assert ours == [node.meta["tensor_meta"] for node in module.graph.nodes]


# --- modes and arguments ----------------------------------------------------------------------------------------------


def test_each_construction_moves_the_epoch_on() -> None:
    mode, module = FakeTensorMode(), traced(lambda x: x.relu())
    before = mode.epoch
    FakeTensorProp(module, mode)
    FakeTensorProp(module, mode).propagate(torch.randn(2))
    assert mode.epoch == before + 2


def test_arguments_that_are_no_tensors_pass() -> None:
    module = traced(lambda x, n, pair: x * n + pair[0])
    result = FakeTensorProp(module).propagate(torch.randn(2), 3, (torch.randn(4, 1), None))
    assert result.shape == (4, 2)
    assert node_named(module, "n").meta["val"] == 3


def test_defaults_and_starred_arguments() -> None:
    def program(x: torch.Tensor, scale: float = 2.0) -> Any:
        return x * scale

    assert FakeTensorProp(traced(program)).propagate(torch.randn(2)).shape == (2,)
    with pytest.raises(PropagationError, match="x"):
        FakeTensorProp(traced(program)).propagate()


def test_other_modes_hear_every_operator() -> None:
    heard = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(func)
            return func(*args, **(kwargs or {}))

    module = make_fx(lambda x: x.relu().sum())(torch.randn(3))
    mode = FakeTensorMode()
    prop = FakeTensorProp(module, mode)
    x = mode.from_tensor(torch.randn(3))
    with mode, Listener():
        prop.propagate_dont_convert_inputs(x)
    assert heard == [aten.relu.default, aten.sum.default]


def test_autocast_casts() -> None:
    module = make_fx(lambda x, y: aten.mm.default(x, y))(torch.randn(2, 3), torch.randn(3, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = FakeTensorProp(module).propagate(torch.randn(2, 3), torch.randn(3, 2))
    assert result.dtype is torch.bfloat16


def test_lone_numbers_where_lists_are_expected_and_lazy_bits() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    pooled = graph.call_function(aten.max_pool2d_with_indices.default, (x, 2))
    graph.output(graph.call_function(operator.getitem, (pooled, 0)))
    module = GraphModule(nn.Module(), graph)
    FakeTensorProp(module).propagate(torch.randn(1, 1, 4, 4))
    assert differences(module, torch.randn(1, 1, 4, 4)) == []
    lazy = make_fx(lambda x: (x.conj() + 1, x.conj().imag.neg(), x.conj().clone()))(
        torch.randn(3, dtype=torch.complex64)
    )
    FakeTensorProp(lazy).propagate(torch.randn(3, dtype=torch.complex64))
    assert differences(lazy, torch.randn(3, dtype=torch.complex64)) == []


def test_subclasses_of_the_interpreter_can_override() -> None:
    class Swapped(FakeTensorProp):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().call_function(torch.neg if target is torch.relu else target, args, kwargs)

    class Counting(FakeTensorProp):
        count = 0

        def run_node(self, n: Node) -> Any:
            self.count += 1
            return super().run_node(n)

    module = traced(lambda x: torch.relu(x) @ x)
    counting = Counting(module)
    assert counting.propagate(torch.randn(2, 2)).shape == (2, 2)
    assert counting.count == 4
    assert all("val" in node.meta for node in module.graph.nodes)
    assert Swapped(module).propagate(torch.randn(2, 2)).shape == (2, 2)
    with pytest.raises(PropagationError, match=r"called:  matmul\(f32\[2, 3\]@cpu, f32\[2, 3\]@cpu\)"):
        Swapped(module).propagate(torch.randn(2, 3))


# --- the module is left alone ------------------------------------------------------------------------------------------


class Writing(nn.Module):
    """A module that does to itself what modules should not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.scale = torch.tensor([1.0, 2.0, 3.0])
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.norm(x) * self.scale
        self.norm.running_mean = self.norm.running_mean + 1  # type: ignore[operator]
        return self.last


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Writing()
        self.inner.__module__ = "torch.nn.leaf"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ torch.ones(3, 2)


class LeafTracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Writing)


@pytest.mark.parametrize("width", [3, 4])
def test_the_module_is_untouched_with_and_without_errors(width: int) -> None:
    model = Outer()
    module = GraphModule(model, LeafTracer().trace(model))
    inner = module.inner
    before = dict(vars(inner)), dict(inner.norm._buffers), dict(inner.norm._parameters)
    tracked = inner.norm.num_batches_tracked._version
    prop = FakeTensorProp(module)
    if width == 3:
        assert prop.propagate(torch.randn(5, width)).shape == (5, 2)
    else:
        with pytest.raises(PropagationError):
            prop.propagate(torch.randn(5, width))
    assert vars(inner).keys() == before[0].keys()
    assert all(vars(inner)[key] is value for key, value in before[0].items())
    assert all(inner.norm._buffers[key] is value for key, value in before[1].items())
    assert all(inner.norm._parameters[key] is value for key, value in before[2].items())
    assert inner.norm.num_batches_tracked._version == tracked
    assert torch.is_grad_enabled()


def test_a_switch_that_the_graph_threw_is_thrown_back_after_an_error() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.set_grad_enabled, (False,))
    graph.output(graph.call_function(torch.mm, (x, x)))
    with pytest.raises(PropagationError):
        FakeTensorProp(GraphModule(nn.Module(), graph)).propagate(torch.randn(2, 3))
    assert torch.is_grad_enabled()


def test_settings_of_the_process_are_left_alone() -> None:
    def program(x: Any, y: Any) -> Any:
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            z = torch.ones(3) + x @ y
        torch.set_grad_enabled(False)
        return z

    example = torch.randn(3, 3)
    module = capture(program, tracing_mode="fake", pre_dispatch=True)(example, example.clone())
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    prop = FakeTensorProp(module)
    assert prop.propagate(example, example).dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()
    with pytest.raises(PropagationError):
        prop.propagate(example, torch.randn(4, 4))
    assert torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0)


# --- errors --------------------------------------------------------------------------------------------------------------


def failing() -> GraphModule:
    graph = Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(aten.mm.default, (x, w))
    product.meta["stack_trace"] = (
        '  File "model.py", line 12, in forward\n    y = x @ w\n'
        f'  File "{torch.__file__}", line 5, in mm\n    return mm\n'
    )
    product.meta["nn_module_stack"] = {"": ("", nn.Module), "blocks.0.head": ("blocks.0.head", nn.Linear)}
    graph.output(product)
    return GraphModule(nn.Module(), graph)


def test_an_error_names_the_node_the_line_and_the_specs() -> None:
    module = failing()
    with pytest.raises(PropagationError) as caught:
        FakeTensorProp(module).propagate(torch.randn(2, 3), torch.randn(4, 5))
    said = str(caught.value).splitlines()
    assert said[0].startswith("mm:")
    assert said[1:4] == [
        "  node:    %mm_default = call_function aten.mm.default",
        "  in:      blocks.0.head",
        "  called:  aten.mm.default(f32[2, 3]@cpu, f32[4, 5]@cpu)",
    ]
    assert said[4] == "  at:      model.py:12: y = x @ w"
    assert said[5].startswith("  to do:   ")
    assert isinstance(caught.value, ShapeMismatch)
    assert isinstance(caught.value.__cause__, ShapeMismatch)
    assert caught.value.node is node_named(module, "mm_default")
    assert "val" not in caught.value.node.meta


def test_an_error_of_python_code_is_located_too() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("no_such_method", (x, 3)))
    with pytest.raises(PropagationError) as caught:
        FakeTensorProp(GraphModule(nn.Module(), graph)).propagate(torch.randn(2))
    assert "no_such_method" in str(caught.value)
    assert "  called:  no_such_method(f32[2]@cpu, 3)" in str(caught.value)
    assert isinstance(caught.value, AttributeError)
    assert isinstance(caught.value.__cause__, AttributeError)


# --- symbols ---------------------------------------------------------------------------------------------------------------


def dependent() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    places = graph.call_function(aten.nonzero.default, (x,))
    first = graph.call_function(aten.select.int, (places, 1, 0))
    total = graph.call_function(aten.sum.default, (x,))
    number = graph.call_function(aten._local_scalar_dense.default, (total,))
    graph.output((graph.call_function(aten.relu.default, (first,)), number))
    return GraphModule(nn.Module(), graph)


def test_data_dependent_symbols_are_bound_and_keep_their_names() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    module = dependent()
    x = mode.from_tensor(torch.randint(5, (7,)), static_shapes=True)

    def run() -> tuple[list[str], dict[str, str]]:
        FakeTensorProp(module, mode).propagate_dont_convert_inputs(x)
        bindings = {
            node.name: str(node.meta["unbacked_bindings"])
            for node in module.graph.nodes
            if "unbacked_bindings" in node.meta
        }
        return [str(FakeTensorProp.spec_of(node)) for node in module.graph.nodes], bindings

    first, bindings = run()
    assert set(bindings) == {"nonzero_default", "_local_scalar_dense_default"}
    assert "i64[u0, 1]" in first[1]
    assert run() == (first, bindings)
    assert run() == (first, bindings)


def test_symbolic_inputs_stay_symbolic() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    module = make_fx(lambda x, w: x @ w + 1)(torch.randn(5, 3), torch.randn(3, 4))
    FakeTensorProp(module, mode).propagate(torch.randn(5, 3), torch.randn(3, 4))
    sizes = node_named(module, "mm").meta["val"].shape
    assert all(isinstance(size, torch.SymInt) for size in sizes)
    linear = traced(nn.Linear(3, 4))
    FakeTensorProp(linear, mode).propagate(torch.randn(5, 3))
    assert tuple(node_named(linear, "weight").meta["val"].shape) == (4, 3)


# --- graphs inside of graphs ---------------------------------------------------------------------------------------------


def subgraph() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.sin.default, (x,)),))
    return GraphModule(nn.Module(), graph)


def test_subgraphs_are_propagated_the_first_time_they_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    root = nn.Module()
    root.inner = subgraph()
    graph = Graph()
    x = graph.placeholder("x")
    inner = graph.get_attr("inner")
    invoke = torch.ops.higher_order.invoke_subgraph
    calls = [graph.call_function(invoke, (inner, "inner", x))]
    for _ in range(2):
        calls.append(
            graph.call_function(
                invoke, (inner, "inner", graph.call_function(operator.getitem, (calls[-1], 0)))
            )
        )
    graph.output(calls[-1])
    module = GraphModule(root, graph)
    ran = []
    sweep = FakeTensorProp._sweep
    monkeypatch.setattr(
        FakeTensorProp, "_sweep", lambda self, args: (ran.append(self.module), sweep(self, args))[1]
    )
    FakeTensorProp(module).propagate(torch.randn(2, 3))
    assert ran == [module, module.inner]
    assert [str(FakeTensorProp.spec_of(node)[0]) for node in calls] == ["f32[2, 3]@cpu"] * 3
    assert [tuple(node.meta["val"].shape) for node in list(module.inner.graph.nodes)[:2]] == [(2, 3)] * 2
    assert len(aliasing(module)) == 4  # x, and what each call made


def module_with_subgraph() -> GraphModule:
    root = nn.Module()
    root.inner = subgraph()
    graph = Graph()
    x = graph.placeholder("x")
    invoke = torch.ops.higher_order.invoke_subgraph
    graph.output(graph.call_function(invoke, (graph.get_attr("inner"), "inner", x)))
    return GraphModule(root, graph)


def test_seen_subgraphs() -> None:
    module = module_with_subgraph()
    prop = FakeTensorProp(module)
    assert len(prop.seen_subgraphs) == 0
    prop.propagate(torch.randn(2, 3))
    assert prop.seen_subgraphs == {"inner"}
    module = module_with_subgraph()
    prop = FakeTensorProp(module)
    prop.seen_subgraphs.add("inner")
    assert prop.propagate(torch.randn(2, 3))[0].shape == (2, 3)
    assert not any("val" in node.meta for node in module.inner.graph.nodes)


def test_a_mode_of_torch() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    product = graph.call_function(aten.mm.default, (x, y))
    graph.output(product)
    module = GraphModule(nn.Module(), graph)
    theirs = TorchFakeTensorMode()
    real = torch.randn(2, 3), torch.randn(3, 4)
    fakes = [theirs.from_tensor(tensor) for tensor in real]
    for run in ("propagate", "propagate_dont_convert_inputs"):
        prop = FakeTensorProp(module, theirs)
        for args in (real, fakes) if run == "propagate" else (fakes,):
            result = getattr(prop, run)(*args)
            assert type(result) is FakeTensor and result.fake_mode is prop.mode
            assert str(product.meta["val"].spec) == "f32[2, 4]@cpu"
    symbolic = TorchFakeTensorMode(shape_env=TorchShapeEnv())
    assert str(FakeTensorProp(module, symbolic).propagate(*real).shape[0].node.expr) != "2"
    with pytest.raises(
        TypeError, match="expected plain sizes, got a fake of torch's own mode with symbolic sizes"
    ):
        FakeTensorProp(module, symbolic).propagate(*[symbolic.from_tensor(tensor) for tensor in real])
    with pytest.raises(TypeError, match="expected a FakeTensorMode, got a str"):
        FakeTensorProp(module, "fake")  # type: ignore[arg-type]


def test_both_branches_have_values() -> None:
    root = nn.Module()
    root.yes, root.no = subgraph(), subgraph()
    graph = Graph()
    x, choice = graph.placeholder("x"), graph.placeholder("choice")
    branches = graph.get_attr("yes"), graph.get_attr("no")
    graph.output(graph.call_function(torch.ops.higher_order.cond, (choice, *branches, (x,))))
    module = GraphModule(root, graph)
    mode = FakeTensorMode()
    result = FakeTensorProp(module, mode).propagate(torch.randn(2, 3), torch.tensor(True))
    assert result[0].shape == (2, 3)
    for branch in (module.yes, module.no):
        assert all("val" in node.meta for node in branch.graph.nodes)
    assert node_named(module, "cond").meta["val"][0].shape == (2, 3)


def test_floats_and_truths_that_data_decides_keep_their_names() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_method("sum", (x,))
    number = graph.call_method("item", (total,))
    graph.call_function(operator.mul, (number, 2))
    truth = graph.call_method("item", (graph.call_function(torch.gt, (total, 0)),))
    graph.output((number, truth))
    module = torch.fx.GraphModule(nn.Module(), graph)
    mode = FakeTensorMode(shape_env=ShapeEnv())

    def names() -> list[str]:
        FakeTensorProp(module, mode).propagate(torch.randn(4, 3))
        return [str(node.meta.get("val")) for node in module.graph.nodes]

    first = names()
    assert names() == first
    assert names() == first


# --- data-dependent sizes, and no environment given ---------------------------------------------------------------------


def count_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.nonzero()
    return rows[:, 0] + torch.arange(rows.shape[0])


def read_a_number(x: torch.Tensor) -> torch.Tensor:
    number = x.sum().to(torch.int64).item()
    torch._check(number >= 0)
    return torch.zeros(number) + x.unique().sum()


def select_by_mask(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].view(-1, 1) * 2


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
@pytest.mark.parametrize("function", [count_rows, read_a_number, select_by_mask])
def test_a_graph_brings_the_environment_of_its_symbols(function: Any, tracing_mode: Any) -> None:
    x = torch.ones(4, 3)
    captured = capture(function, tracing_mode=tracing_mode)(x)
    before = {node.name: str(node.meta.get("unbacked_bindings")) for node in captured.graph.nodes}
    shapes = {node: str(getattr(node.meta.get("val"), "shape", None)) for node in captured.graph.nodes}
    for _ in range(2):
        prop = FakeTensorProp(captured)
        prop.propagate(x)
        prop.propagate(x)
        assert {node.name: str(node.meta.get("unbacked_bindings")) for node in captured.graph.nodes} == before
        now = {node: str(getattr(node.meta.get("val"), "shape", None)) for node in captured.graph.nodes}
        if tracing_mode == "fake":
            assert all(now[node] == shapes[node] for node in shapes if node.op == "call_function")


def test_a_torch_level_graph_brings_its_environment() -> None:
    traced = symbolic_trace(count_rows, {"x": torch.ones(4, 3)})
    result = FakeTensorProp(traced).propagate(torch.ones(4, 3))
    assert isinstance(result.shape[0], torch.SymInt)


def test_sizes_that_are_numbers_need_no_environment() -> None:
    captured = capture(lambda x: x @ x.T, tracing_mode="symbolic")(torch.ones(4, 3))
    prop = FakeTensorProp(captured)
    assert prop.mode.shape_env is None
    assert prop.propagate(torch.ones(5, 2)).shape == (5, 5)
