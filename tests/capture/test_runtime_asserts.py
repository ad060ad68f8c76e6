"""What a trace assumes of numbers that only data knows is checked by its graph."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from torch.fx.passes.runtime_assert import insert_deferred_runtime_asserts as torchs_pass

from tests.capture.captured import targets
from tests.exporting.programs import Asserts, AssertsOfTensors
from understudy import (
    FakeTensorMode,
    FakeTensorProp,
    ShapeEnv,
    insert_deferred_runtime_asserts,
    make_fx,
    to_torch,
)

ASSERT = torch.ops.aten._assert_scalar.default
each_mode = pytest.mark.parametrize("mode", ["fake", "symbolic"])


def first_rows(x: Tensor, count: Tensor) -> Tensor:
    n = count.item()
    torch._check(n >= 2)
    torch._check(n <= x.shape[0])
    return x[:n] * 2


def four_of_them(x: Tensor, count: Tensor) -> Tensor:
    places = x.nonzero()[:, 0]
    torch._check(places.shape[0] == 4)
    return places + torch.arange(4)


def fits(x: Tensor, count: Tensor) -> Tensor:
    return torch.zeros(count.item()) + x


def asserts(gm: GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=ASSERT))


def traced(f: Any, mode: str = "symbolic") -> GraphModule:
    return make_fx(f, tracing_mode=mode)(torch.ones(4), torch.tensor([4]))


@each_mode
@pytest.mark.parametrize("runs", [lambda gm: gm, lambda gm: Interpreter(gm).run])
def test_a_broken_promise_is_an_error(mode: str, runs: Any) -> None:
    gm = traced(first_rows, mode)
    x = torch.randn(4)
    assert torch.equal(runs(gm)(x, torch.tensor([3])), first_rows(x, torch.tensor([3])))
    with pytest.raises(RuntimeError, match=r"expected u0 >= 2, which this graph assumes, at .*torch\._check"):
        runs(gm)(x, torch.tensor([1]))
    with pytest.raises(RuntimeError, match="assumes"):
        runs(gm)(x, torch.tensor([5]))


@each_mode
def test_it_is_checked_although_the_graph_computes_with_it(mode: str) -> None:
    gm = traced(four_of_them, mode)
    assert torch.equal(gm(torch.tensor([1.0, 1, 0, 1, 1]), None), four_of_them(torch.ones(4), None)) or mode
    with pytest.raises(RuntimeError, match="expected u0 == 4"):
        gm(torch.tensor([1.0, 0, 1, 1]), torch.tensor([4]))


@each_mode
def test_what_an_operator_takes_for_granted_is_checked(mode: str) -> None:
    gm = traced(fits, mode)
    assert torch.equal(gm(torch.ones(4), torch.tensor([4])), torch.ones(4))
    with pytest.raises(RuntimeError, match="assumes"):
        gm(torch.ones(4), torch.tensor([1]))  # eager would broadcast


def test_nothing_is_checked_before_it_can_be_known_nor_written_after_it_is_broken() -> None:
    def writes(x: Tensor, count: Tensor) -> Tensor:
        n = count.item()
        torch._check(n == 3)
        return x.add_(1)[:n]

    gm, x = traced(writes), torch.zeros(4)
    with pytest.raises(RuntimeError, match="expected u0 == 3"):
        gm(x, torch.tensor([2]))
    assert torch.equal(x, torch.zeros(4))


def test_other_graphs_stay_without() -> None:
    assert asserts(traced(lambda x, n: x.view(2, -1) * n)) == 0
    assert asserts(traced(lambda x, n: x.nonzero())) == 0


def test_a_promise_within_a_branch_is_checked_there() -> None:
    def yes(x: Tensor, count: Tensor) -> Tensor:
        n = count.item()
        torch._check(n >= 2)
        torch._check(n <= 4)
        return x[:n].sum()

    def f(x: Tensor, count: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, yes, lambda x, n: x.sum(), (x, count))

    gm = traced(f)
    assert asserts(gm) == 0 and asserts(gm.true_graph_0) == 2 and asserts(gm.false_graph_0) == 0  # type: ignore[arg-type]
    assert torch.equal(gm(-torch.ones(4), torch.tensor([1])), torch.tensor(-4.0))
    with pytest.raises(RuntimeError, match="assumes"):
        gm(torch.ones(4), torch.tensor([1]))


def test_the_pass_writes_each_promise_once() -> None:
    gm = traced(first_rows)
    before = targets(gm)
    insert_deferred_runtime_asserts(gm)
    assert targets(gm) == before
    for node in gm.graph.find_nodes(op="call_function", target=ASSERT):
        gm.graph.erase_node(node)
    gm.recompile()
    assert gm(torch.ones(4), torch.tensor([1])).shape == (1,)
    insert_deferred_runtime_asserts(gm, gm.shape_env, "again")
    assert asserts(gm) == 2
    with pytest.raises(RuntimeError, match="assumes"):
        gm(torch.ones(4), torch.tensor([1]))


PROGRAMS = [first_rows, four_of_them, fits, lambda x, n: x.view(2, -1) * n, lambda x, n: x.nonzero()]


@pytest.mark.parametrize("f", PROGRAMS)
def test_torchs_own_pass(f: Any) -> None:
    gm = traced(f)
    expected = gm(torch.ones(4), torch.tensor([4]))
    again = copy.deepcopy(gm)
    torchs_pass(again, gm.shape_env, "ours")
    again.recompile()
    assert torch.equal(again(torch.ones(4), torch.tensor([4])), expected)
    handed = to_torch(gm)
    vals = [node.meta.get("val") for node in handed.graph.nodes]
    env = next(val.fake_mode.shape_env for val in vals if isinstance(val, torch.Tensor))
    torchs_pass(handed, env, "torch's")
    handed.recompile()
    assert torch.equal(handed(torch.ones(4), torch.tensor([4])), expected)
    if asserts(gm):
        for graph in (again, handed):
            with pytest.raises(RuntimeError):
                graph(torch.tensor([1.0, 0, 1, 1]), torch.tensor([1]))


def test_graphs_with_promises_are_propagated() -> None:
    gm = traced(first_rows)
    FakeTensorProp(gm, FakeTensorMode(shape_env=ShapeEnv())).propagate(torch.ones(4), torch.tensor([4]))


@each_mode
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_an_assert_statement_is_a_promise(mode: str, pre_dispatch: bool) -> None:
    """It decides nothing that the graph could not check."""
    x = torch.ones(4)
    gm = make_fx(Asserts(), tracing_mode=mode, pre_dispatch=pre_dispatch)(x, torch.tensor([2]))
    assert torch.equal(gm(x, torch.tensor([4])), x * 2)
    with pytest.raises(RuntimeError, match=r"assumes, at .*assert n.item\(\)"):
        gm(x, torch.tensor([5]))
    gm = make_fx(AssertsOfTensors(), tracing_mode=mode, pre_dispatch=pre_dispatch)(x)
    assert asserts(gm) == 4 and torch.equal(gm(x), x * 2)
    for number in (200, torch.nan, -200, 7):
        with pytest.raises(RuntimeError, match=r"assumes, at .*assert "):
            gm(torch.full((4,), number))


@each_mode
def test_a_bool_that_must_not_be_true(mode: str) -> None:
    """The error of a data-dependent bool suggests to write this."""

    def f(x: Tensor, count: Tensor) -> Tensor:
        is_many = (count > 5).item()
        torch._check(torch.sym_not(is_many))
        return x * 2

    gm = traced(f, mode)
    assert torch.equal(gm(torch.ones(4), torch.tensor([5])), torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="expected u0 == 0, which this graph assumes"):
        gm(torch.ones(4), torch.tensor([6]))


@each_mode
def test_a_second_trace_of_the_same_stand_in(mode: str) -> None:
    """What was read off a stand-in's data before is the same symbol; each graph says where it is made."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    x, n = fake_mode.from_tensor(torch.ones(4)), fake_mode.from_tensor(torch.tensor([4]))

    def f(x: Tensor, n: Tensor) -> Any:
        return first_rows(x, n), x.nonzero() * 2, x.unique()

    graphs = [make_fx(f, tracing_mode=mode)(x, n) for _ in range(2)]
    first, second = [
        {node.name: str(node.meta["unbacked_bindings"]) for node in gm.graph.nodes if "unbacked_bindings" in node.meta}
        for gm in graphs
    ]  # fmt: skip
    assert first == second and list(first) == ["_local_scalar_dense", "nonzero", "_unique2"]
    assert [asserts(gm) for gm in graphs] == [2, 2]
