"""Tensors that the traced program did not make: literals, closed-over tensors, parameters and buffers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.captured import MODES, assert_same, captured, check, targets
from understudy import FakeTensorMode, make_fx


def test_a_literal_is_stored_once_and_copied_at_each_run() -> None:
    def f(x: Tensor) -> Any:
        c = torch.tensor(3.0)
        c.add_(1)
        return x * c

    for graph in check(f, torch.randn(5)).values():
        assert targets(graph)[:2] == ["lift_fresh_copy.default", "add_.Tensor"]
        assert [name for name, _ in graph.named_buffers()] == ["_tensor_constant0"]
        assert torch.equal(graph(torch.ones(2)), graph(torch.ones(2)))
        assert graph._tensor_constant0.item() == 3.0


def test_a_literal_with_several_elements_that_is_written() -> None:
    def f(x: Tensor) -> Any:
        c = torch.tensor([1.0, 2.0])
        c[0] = 5.0
        return x + c

    check(f, torch.randn(2))


def test_a_literal_that_is_made_and_written_after_another_write() -> None:
    def f(x: Tensor) -> Any:
        y = x.clone()
        y += 1
        steps = torch.tensor(0.0)
        steps += 1
        return y + steps

    check(f, torch.randn(2))


@pytest.mark.parametrize("is_read_first", [True, False])
def test_a_real_run_restores_all_tensors_that_share_memory(is_read_first: bool) -> None:
    whole = torch.zeros(4)
    first, second = whole[:2], whole[2:]

    def f(x: Tensor) -> Any:
        y = first * second if is_read_first else x
        first.add_(1)
        second.add_(2)
        whole.add_(1)
        return y + first

    graph = make_fx(f)(torch.zeros(2))
    assert whole.tolist() == [0.0, 0.0, 0.0, 0.0]
    graph(torch.zeros(2))
    assert whole.tolist() == [2.0, 2.0, 3.0, 3.0]


def test_a_tensor_from_outside_that_a_real_run_resizes_keeps_its_values() -> None:
    outside = torch.zeros(2)

    def f(x: Tensor) -> Any:
        return outside.resize_(10).fill_(1)[:2] + x

    make_fx(f)(torch.zeros(2))
    assert outside.shape == (10,)
    assert outside[:2].tolist() == [0.0, 0.0]


def test_values_of_literals_can_be_asked_for() -> None:
    def f(x: Tensor) -> Any:
        c = torch.tensor(3)
        if c == 3:
            x = x + c.item()
        if bool(c > 2) and c.is_nonzero():
            x = x + 1
        d = (c * 2 + 1).float()
        return x * int(d) + float(d.sqrt()) + [10, 20][torch.tensor(1)]

    for graph in check(f, torch.randn(2)).values():
        assert "_local_scalar_dense.default" not in targets(graph)


def test_a_literal_that_was_written_from_an_input_is_a_literal_no_more() -> None:
    def f(x: Tensor) -> Any:
        c = torch.tensor(3.0)
        c.copy_(x)
        return c.item()

    with pytest.raises(RuntimeError, match="symbolic"):
        captured(f, torch.tensor(5.0), mode="real")
    graph = captured(f, torch.tensor(5.0), mode="symbolic")
    assert graph(torch.tensor(7.0)) == 7.0


def test_a_literal_written_through_a_view_is_known_or_refused_never_wrong() -> None:
    def f(x: Tensor) -> Any:
        c = torch.tensor([3.0])
        c.view(()).add_(x)
        return c.item()

    for mode in MODES:
        try:
            graph = captured(f, torch.tensor(5.0), mode=mode)
        except RuntimeError:
            continue
        assert graph(torch.tensor(7.0)) == 10.0, mode


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(()), lambda: torch.tensor(3.0).uniform_(), lambda: torch.tensor([3.0])[0].normal_()],
)
def test_a_random_number_is_no_literal(draw: Any) -> None:
    with pytest.raises(RuntimeError, match="it reads a value of a traced tensor"):
        captured(lambda x: x * draw().item(), torch.randn(2), mode="real")


def test_factories_are_recorded() -> None:
    graphs = check(lambda x: x + torch.ones(3) + torch.arange(3) + torch.full((3,), 2.0), torch.randn(3))
    assert {"ones.default", "arange.default", "full.default"} <= set(targets(graphs["real"]))


# --- closed over -----------------------------------------------------------------------------------------------------


def test_a_closed_over_tensor_is_a_constant_of_the_graph() -> None:
    k = torch.randn(2)

    def f(x: Tensor) -> Any:
        return x + k * k

    graph = captured(f, torch.randn(2), mode="real")
    assert graph._tensor_constant0 is k
    assert len(graph.graph.find_nodes(op="get_attr")) == 1
    assert_same(f, graph, torch.randn(2))
    for mode in ("fake", "symbolic"):
        graph = captured(f, torch.randn(2), mode=mode, _allow_non_fake_inputs=True)
        assert graph._tensor_constant0 is k
        assert_same(f, graph, torch.randn(2))


def test_a_closed_over_parameter() -> None:
    k = nn.Parameter(torch.randn(2))
    graph = captured(lambda x: x + k, torch.randn(2), mode="real")
    assert graph._param_constant0 is k
    assert [name for name, _ in graph.named_parameters()] == ["_param_constant0"]


def test_a_real_tensor_among_stand_ins_is_refused_by_its_name() -> None:
    k = torch.randn(2)
    with pytest.raises(RuntimeError, match="real tensor"):
        captured(lambda x: x + k, torch.randn(2), mode="fake")


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_stand_in_of_the_surrounding_mode_is_a_constant(mode: str) -> None:
    with FakeTensorMode():
        y = torch.randn(2)
        graph = make_fx(lambda x: x + y, tracing_mode=mode)(torch.randn(2))
        assert graph(torch.randn(2)).shape == (2,) and graph._tensor_constant0 is y


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_stand_in_of_the_inputs_mode_is_a_constant_that_is_written(mode: str) -> None:
    with FakeTensorMode() as fakes:
        count, x = torch.tensor(3), torch.randn(2)
    graph = make_fx(lambda x: x * count.add_(1), tracing_mode=mode)(x)
    assert graph._tensor_constant0 is count and "add_" in graph.code
    with fakes:
        assert count.item() == 4


def test_a_stand_in_from_outside_is_refused() -> None:
    with FakeTensorMode():
        k = torch.randn(2)
    with pytest.raises(RuntimeError, match="_allow_fake_constant"):
        make_fx(lambda x: k + 1)(torch.randn(2))


# --- modules -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("scale", torch.randn(3))
        self.plain = torch.randn(3)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)) * self.scale + self.plain


@pytest.mark.parametrize("mode", MODES)
def test_a_module_keeps_its_names(mode: str) -> None:
    net = Net()
    graph = captured(net, torch.randn(2, 4), mode=mode)
    assert {name for name, _ in graph.named_parameters()} == {
        "first.weight",
        "first.bias",
        "second.weight",
        "second.bias",
    }
    assert graph.first.weight is net.first.weight
    assert graph.scale is net.scale
    assert_same(net, graph, torch.randn(2, 4))


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_is_used_twice_is_one_node(mode: str) -> None:
    linear = nn.Linear(3, 3)
    graph = captured(lambda x: linear(linear(x)), torch.randn(2, 3), mode=mode)
    assert len(graph.graph.find_nodes(op="get_attr")) == 2


@pytest.mark.parametrize("mode", MODES)
def test_tied_parameters(mode: str) -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    model = nn.Sequential(a, b)
    graph = captured(model, torch.randn(2, 3), mode=mode)
    assert len(graph.graph.find_nodes(op="get_attr")) == 3
    assert_same(model, graph, torch.randn(2, 3))


@pytest.mark.parametrize("mode", MODES)
def test_the_graph_sees_later_changes_of_a_parameter(mode: str) -> None:
    linear = nn.Linear(3, 2)
    graph = captured(linear, torch.randn(2, 3), mode=mode)
    with torch.no_grad():
        linear.weight.zero_()
    assert_same(linear, graph, torch.randn(2, 3))


def test_what_is_not_needed_any_more_is_freed() -> None:
    import weakref

    graph = captured(lambda x: x.sin(), torch.randn(3), mode="fake")
    seen = weakref.ref(graph)
    del graph
    gc.collect()
    assert seen() is None


def test_another_default_dtype_inside() -> None:
    def f(x: Tensor) -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return x + torch.ones(1), torch.arange(3.0)
        finally:
            torch.set_default_dtype(torch.float32)

    def g(x: Tensor) -> Any:
        size = torch.arange(3.0)  # determined with the dtype of here
        return *f(x), x * size.sum().item()

    for graph in (
        *check(f, torch.randn(3)).values(),
        *check(g, torch.randn(3), modes=("fake", "symbolic")).values(),
    ):
        assert targets(graph).count("set_default_dtype") == 2
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_sparse_tensors_inside(mode: str) -> None:
    """Made of values that the program determines, and of an input's."""

    def f(places: torch.Tensor, values: torch.Tensor, x: torch.Tensor) -> Any:
        literal = torch.sparse.mm(torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse(), x)
        return literal, torch.sparse_coo_tensor(places, values, (2, 2)) @ x

    given = torch.tensor([[0, 1], [1, 0]]), torch.randn(2), torch.randn(2, 3)
    for found, wanted in zip(make_fx(f, tracing_mode=mode)(*given)(*given), f(*given), strict=True):
        torch.testing.assert_close(found, wanted)
