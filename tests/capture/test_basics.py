"""What comes out of make_fx: structures, names, metadata of nodes, and that torch's tools can work on it."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental import proxy_tensor
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.split_module import split_module

from tests.capture.captured import MODES, assert_same, captured, check, targets
from understudy import FakeTensor, FakeTensorProp, make_fx

aten = torch.ops.aten


# --- structures --------------------------------------------------------------------------------------------------


def test_any_structure_goes_in_and_comes_out() -> None:
    def f(xs: Any, table: Any, flag: Any) -> Any:
        return {"sum": [xs[0] + table["k"], xs[1]], "rest": (table["k"], None, 3, "text", flag)}

    check(f, [torch.randn(2), torch.randn(3)], {"k": torch.randn(2)}, True)


def test_a_list_stays_a_list() -> None:
    graphs = check(lambda xs: torch._foreach_add_(xs, 1), [torch.randn(2), torch.randn(3)])
    assert type(graphs["fake"]([torch.randn(2), torch.randn(3)])) is list


def test_programs_without_tensors() -> None:
    check(lambda: 3)
    check(lambda x: None, torch.randn(2))
    check(lambda: torch.ones(3))


def test_one_tensor_given_twice_is_one_tensor() -> None:
    x = torch.randn(3)
    check(lambda a, b: (a.add_(1), b * 2)[1], x, x)


@pytest.mark.parametrize("mode", MODES)
def test_the_last_placeholder_of_a_tensor_given_twice_is_read(mode: Any) -> None:
    def f(a: Any, b: Any) -> Any:
        return a - 2 * b

    x = torch.randn(3)
    readers = []
    for make in (make_fx, proxy_tensor.make_fx):
        first, last = make(f, tracing_mode=mode)(x, x).graph.find_nodes(op="placeholder")
        readers.append((len(first.users), len(last.users)))
    assert readers == [(0, 2), (0, 2)]


def test_placeholders_are_named_after_the_arguments() -> None:
    def f(alpha: Any, beta: Any) -> Any:
        return alpha + beta[1]

    graph = captured(f, torch.randn(2), [torch.randn(2), torch.randn(2)])
    assert [node.name for node in graph.graph.find_nodes(op="placeholder")] == ["alpha_1", "beta_1", "beta_2"]


def test_arguments_without_names() -> None:
    graph = captured(lambda *xs: xs[0] + xs[1], torch.randn(2), torch.randn(2))
    assert [node.name for node in graph.graph.find_nodes(op="placeholder")] == ["arg0_1", "arg1_1"]


def test_the_graph_module_is_named_after_the_function() -> None:
    def swish(x: Any) -> Any:
        return x * x.sigmoid()

    assert type(captured(swish, torch.randn(2))).__name__ == "swish"


def test_inputs_that_are_fakes_already_keep_their_mode() -> None:
    from understudy import FakeTensorMode, ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(5), source="x")
    graph = make_fx(lambda x: x * 2, tracing_mode="symbolic")(x)
    assert graph.shape_env is mode.shape_env
    (mul,) = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert mul.meta["val"].fake_mode is mode


# --- metadata ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_node_says_what_it_gives(mode: str) -> None:
    graph = captured(lambda x: x.view(6).split(2)[1] + 1, torch.randn(2, 3), mode=mode)
    for node in graph.graph.nodes:
        if node.op != "output":
            assert "val" in node.meta, node
    (add,) = graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert isinstance(add.meta["val"], FakeTensor)
    assert tuple(map(int, add.meta["val"].shape)) == (2,)
    assert add.meta["tensor_meta"].dtype is torch.float32
    assert tuple(map(int, add.meta["tensor_meta"].shape)) == (2,)


@pytest.mark.parametrize("mode", MODES)
def test_val_is_a_snapshot(mode: str) -> None:
    def f(x: Any) -> Any:
        y = x + 1
        y.t_()
        y.unsqueeze_(0)
        return y

    graph = captured(f, torch.randn(2, 3), mode=mode)
    shapes = {
        node.name: tuple(map(int, node.meta["val"].shape))
        for node in graph.graph.nodes
        if node.op == "call_function"
    }
    assert shapes == {"add": (2, 3), "t_": (3, 2), "unsqueeze_": (1, 3, 2)}
    (placeholder,) = graph.graph.find_nodes(op="placeholder")
    assert tuple(map(int, placeholder.meta["val"].shape)) == (2, 3)


def test_stack_traces_name_the_users_line() -> None:
    def inner(x: Any) -> Any:
        return x.sin()  # the line

    graph = captured(lambda x: inner(x) + 1, torch.randn(2))
    (sin,) = graph.graph.find_nodes(op="call_function", target=aten.sin.default)
    last = sin.meta["stack_trace"].splitlines()[-2:]
    assert "in inner" in last[0] and __file__ in last[0]
    assert last[1].strip() == "return x.sin()  # the line"
    assert (
        len(sin.meta["stack_trace"].splitlines()) == 4
    )  # the lambda and inner: nothing outside of the trace


def test_torch_functions_are_counted() -> None:
    graph = captured(lambda x: torch.sin(torch.sin(x)) + nn.functional.gelu(x), torch.randn(2))
    first, second = graph.graph.find_nodes(op="call_function", target=aten.sin.default)
    assert first.meta["torch_fn"] == ("sin_1", "builtin_function_or_method.sin")
    assert second.meta["torch_fn"] == ("sin_2", "builtin_function_or_method.sin")


def test_nodes_of_a_decomposition_say_which_operator_they_were() -> None:
    table = {aten.addmm.default: lambda bias, a, b: a.mm(b) + bias}
    graph = captured(
        lambda x, w, b: torch.addmm(b, x, w),
        torch.randn(2, 3),
        torch.randn(3, 2),
        torch.randn(2),
        decomposition_table=table,
    )
    assert targets(graph) == ["mm.default", "add.Tensor"]
    for node in graph.graph.find_nodes(op="call_function", target=aten.mm.default):
        assert node.meta["original_aten"] is aten.addmm.default


# --- tools -----------------------------------------------------------------------------------------------------------


def program(x: torch.Tensor) -> Any:
    y = x.view(-1) * torch.tensor(2.0)
    return y.sum() + x.shape[0], y


@pytest.fixture(params=MODES)
def graph(request: Any) -> torch.fx.GraphModule:
    return captured(program, torch.randn(3, 4), mode=request.param)


def test_it_can_be_printed(graph: Any) -> None:
    text = graph.print_readable(print_output=False)
    assert "torch.ops.aten.mul.Tensor" in text and "def forward(self, x_1" in text
    assert "aten.mul.Tensor" in str(graph.graph)


def test_it_can_be_copied(graph: Any) -> None:
    copied = copy.deepcopy(graph)
    assert_same(program, copied, torch.randn(3, 4))
    assert copied.graph is not graph.graph


def test_it_can_be_pickled(graph: Any) -> None:
    assert_same(program, pickle.loads(pickle.dumps(graph)), torch.randn(3, 4))


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_the_run_of_an_interpreter_is_captured(mode: str) -> None:
    model = torch.nn.Linear(4, 3).requires_grad_(False)
    graph = torch.fx.symbolic_trace(model)
    captured_again = make_fx(torch.fx.Interpreter(graph).run, tracing_mode=mode)(torch.randn(2, 4))
    assert_same(model, captured_again, torch.randn(2, 4))


def test_its_state_can_be_saved() -> None:
    graph = captured(program, torch.randn(3, 4))
    file = io.BytesIO()
    torch.save(graph.state_dict(), file)
    file.seek(0)
    assert list(torch.load(file)) == ["_tensor_constant0"]


def test_it_can_be_interpreted(graph: Any) -> None:
    x = torch.randn(3, 4)
    assert_same(program, lambda x: torch.fx.Interpreter(graph).run(x), x)


def test_passes_work_on_it(graph: Any) -> None:
    x = torch.randn(3, 4)
    ShapeProp(graph).propagate(x)
    order = {node: position for position, node in enumerate(graph.graph.nodes)}
    parts = split_module(graph, graph, lambda node: order[node] > len(order) // 2)  # type: ignore[arg-type, return-value]
    assert_same(program, parts, x)


def test_it_can_be_propagated(graph: Any) -> None:
    total, flat = FakeTensorProp(graph).propagate(torch.randn(3, 4))
    assert tuple(map(int, flat.shape)) == (12,)
    assert total.shape == ()


def test_it_can_be_traced_again(graph: Any) -> None:
    for mode in MODES:
        again = captured(graph, torch.randn(3, 4), mode=mode)
        assert_same(program, again, torch.randn(3, 4))


def test_it_can_be_edited(graph: Any) -> None:
    (mul,) = graph.graph.find_nodes(op="call_function", target=aten.mul.Tensor)
    with graph.graph.inserting_after(mul):
        neg = graph.graph.call_function(aten.neg.default, (mul,))
    mul.replace_all_uses_with(neg, delete_user_cb=lambda user: user is not neg)
    graph.recompile()
    assert torch.equal(graph(torch.ones(3, 4))[1], -2 * torch.ones(12))


# --- several at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_two_threads_trace_at_once(mode: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    models = [copy.deepcopy(model) for _ in range(2)]
    barrier = threading.Barrier(2)
    graphs: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                barrier.wait()
                graphs[number] = make_fx(models[number], tracing_mode=mode)(torch.randn(3 + number, 4))
        except BaseException as error:  # told by the thread that waits
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for number, graph in graphs.items():
        assert len(targets(graph)) == len(targets(graphs[0]))
        assert_same(models[number], graph, torch.randn(3 + number, 4))


def test_a_trace_inside_a_trace_has_a_graph_of_its_own() -> None:
    seen = []
    other = torch.randn(2)

    def f(x: Any) -> Any:
        seen.append(make_fx(lambda y: y.cos())(other))
        return x.sin()

    graph = captured(f, torch.randn(3), mode="real")
    assert targets(graph) == ["sin.default"]
    assert targets(seen[0]) == ["cos.default"]
