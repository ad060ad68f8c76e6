"""Sizes and numbers that lie in the data: symbols that a node of the graph makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.captured import assert_same, captured, check, targets
from understudy import FakeTensorMode, FakeTensorProp, ShapeEnv, make_fx, statically_known_true
from understudy.errors import DataDependentOutputException, GuardOnDataDependentSymNode

STAND_INS = ("fake", "symbolic")


def items(x: Tensor) -> Any:
    n = x.item()
    torch._check(n >= 0)
    torch._check(n < 100)
    return torch.arange(n) * 2, n + 1


def float_item(x: Tensor) -> Any:
    return x.new_ones(3) * x.item()


def nonzero_rows(x: Tensor) -> Any:
    places = (x > 0).nonzero()
    return places + 1, places.shape[0], torch.zeros(places.shape[0] * 2)


def masked(x: Tensor) -> Any:
    kept = x[x > 0]
    return kept.sin(), torch.masked_select(x, x > 1) * 2


def distinct(x: Tensor) -> Any:
    values, counts = x.round().unique(return_counts=True)
    return values, counts, values.numel()


def repeated(x: Tensor) -> Any:
    return torch.repeat_interleave(x, x.flatten().abs().long() + 1)


def chosen_rows(x: Tensor) -> Any:
    index = x.sum(1).argsort()
    return x[index], x.gather(0, x.argsort(0))


def where(x: Tensor) -> Any:
    rows, columns = torch.where(x > 0)
    return rows + columns


def listed(x: Tensor) -> Any:
    a, b = x[:2].tolist()
    torch._check(a >= 0)
    torch._check(b >= 0)
    return torch.ones(a), torch.ones(a + b)


def asked_twice(x: Tensor) -> Any:
    mask = x > 0
    return mask.nonzero(), x[mask], mask.nonzero().shape[0]


def from_written(x: Tensor) -> Any:
    x.add_(1)
    first = (x > 0).nonzero()
    x.sub_(3)
    return first, (x > 0).nonzero()


def written_by_a_mask(x: Tensor) -> Any:
    x[x > 0] = 0.0
    return x


def a_slice(x: Tensor) -> Any:
    n = (x > 0).sum().item()
    torch._check(n >= 0)
    torch._check(n <= x.numel())
    return x.flatten()[:n].clone()


OF_NUMBERS = [(items, torch.tensor(4), torch.tensor(7)), (float_item, torch.tensor(2.5), torch.tensor(-1.0)),
              (listed, torch.tensor([2, 3, 4]), torch.tensor([5, 1, 0, 2]))]  # fmt: skip
OF_MATRICES = [
    nonzero_rows, masked, distinct, repeated, chosen_rows, where, asked_twice, from_written, written_by_a_mask, a_slice,
]  # fmt: skip


@pytest.mark.parametrize(
    "program, example, other", OF_NUMBERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_numbers(program: Any, example: Tensor, other: Tensor) -> None:
    check(program, example, modes=STAND_INS, others=((other,),))


@pytest.mark.parametrize("program", OF_MATRICES, ids=lambda program: program.__name__)
def test_matrices(program: Any) -> None:
    graphs = check(program, torch.randn(4, 3), modes=STAND_INS, others=((torch.randn(6, 5),),))
    assert_same(program, graphs["fake"], torch.randn(4, 3))  # other data, other sizes inside


def test_sizes_by_data_run_for_real_as_they_are() -> None:
    check(nonzero_rows, torch.randn(4, 3), modes=("real",))


def test_the_node_says_which_symbols_it_makes() -> None:
    graph = captured(lambda x: x.nonzero() * 2, torch.randn(4))
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    ((symbol, path),) = node.meta["unbacked_bindings"].items()
    assert str(symbol) == "u0"
    assert str(path) == ".size()[0]"
    assert str(node.meta["val"].shape[0]) == "u0"

    graph = captured(items, torch.tensor([4]))
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default)
    assert [str(path) for path in node.meta["unbacked_bindings"].values()] == [""]
    assert isinstance(node.meta["val"], torch.SymInt)


def test_the_same_question_has_one_symbol() -> None:
    graph = captured(asked_twice, torch.randn(4))
    symbols = {str(node.meta["val"].shape[0]) for node in graph.graph.nodes if "nonzero" in node.name}
    assert symbols == {"u0"}


def test_a_branch_on_data_says_what_to_do() -> None:
    with pytest.raises(GuardOnDataDependentSymNode, match=r"torch\._check") as caught:
        captured(lambda x: x * 2 if x.sum() > 0 else x, torch.randn(3))
    assert "test_data_dependent.py" in str(caught.value)


def test_a_read_in_real_mode_says_what_to_do() -> None:
    with pytest.raises(DataDependentOutputException) as caught:
        captured(lambda x: x * x.sum().item(), torch.randn(3), mode="real")
    text = str(caught.value)
    assert "_local_scalar_dense" in text
    assert 'tracing_mode="symbolic"' in text and "_error_on_data_dependent_ops=False" in text
    assert "test_data_dependent.py" in text and "x.sum().item()" in text


def test_a_read_in_real_mode_can_be_allowed() -> None:
    graph = captured(
        lambda x: x * x.sum().item(), torch.ones(3), mode="real", _error_on_data_dependent_ops=False
    )
    assert torch.equal(graph(torch.ones(3)), 3 * torch.ones(3))
    assert torch.equal(graph(torch.full((3,), 2.0)), 6 * torch.ones(3))  # the number of the trace


def test_dead_reads_that_are_checked_stay() -> None:
    def f(x: Tensor) -> Any:
        n = x.item()
        torch._check(n >= 0)
        return torch.zeros(3)

    assert "_local_scalar_dense.default" in targets(captured(f, torch.tensor([3])))


def test_the_number_in_an_input_is_a_guard_of_the_graph() -> None:
    gm = captured(lambda x, t: x * t.item() if t.item() > 3 else x, torch.ones(2), torch.tensor(5))
    assert targets(gm) == ["_local_scalar_dense.default", "mul.Tensor"]
    assert torch.equal(gm(torch.ones(2), torch.tensor(7)), torch.full((2,), 7.0))
    assert gm.shape_env.evaluate_guards(torch.ones(2), torch.tensor(7))
    assert not gm.shape_env.evaluate_guards(torch.ones(2), torch.tensor(3))


# --- promises ---------------------------------------------------------------------------------------------------------------


def test_a_size_by_data_can_be_empty_or_not() -> None:
    gm = captured(lambda x: torch.empty(x.item()), torch.tensor([3]), mode="symbolic")
    assert gm(torch.tensor([5])).shape == (5,)
    assert gm(torch.tensor([0])).shape == (0,)


def test_a_range_by_data_is_a_node_and_is_known() -> None:
    def program(x: Tensor) -> Tensor:
        size = x.item()
        torch.sym_constrain_range_for_size(size, min=2, max=8)
        assert size >= 2
        assert not size > 8
        return torch.zeros(size)

    gm = captured(program, torch.tensor(3), mode="symbolic")
    assert "sym_constrain_range_for_size.default" in targets(gm) and "_assert_scalar.default" not in targets(
        gm
    )
    assert gm(torch.tensor(4)).shape == (4,)
    with pytest.raises(RuntimeError):
        gm(torch.tensor(9))


def test_what_was_promised_to_be_a_known_size_is_decided_as_that_size() -> None:
    def program(count: Tensor, y: Tensor) -> Tensor:
        made = torch.zeros(count.item())
        torch._check(made.shape[0] == y.shape[0])
        return y * 2 if made.shape[0] == 4 else y + 2

    gm = captured(program, torch.tensor([10]), torch.randn(10), mode="symbolic")
    assert "add.Tensor" in targets(gm)
    assert [guard.text for guard in gm.shape_env.guards] == ["y_0 != 4"]


def test_stand_ins_traced_without_their_mode_say_which_symbols_are_made() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    value = mode.from_tensor(torch.randn(5))
    gm = make_fx(lambda x: x.nonzero())(value)
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.nonzero.default)
    before = node.meta["val"].shape[0]
    assert [str(symbol) for symbol in node.meta["unbacked_bindings"]] == ["u0"]
    FakeTensorProp(gm, mode).propagate(value)
    assert statically_known_true(before == node.meta["val"].shape[0])


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_refusals_say_that_it_is_data_dependent(mode: str) -> None:
    with pytest.raises(RuntimeError, match="data-dependent"):
        make_fx(lambda a, b: torch.allclose(a, b), tracing_mode=mode)(torch.zeros(3), torch.zeros(3))
    with pytest.raises(RuntimeError, match="data-dependent"):
        make_fx(lambda a: -a if a.sum() > 0 else a, tracing_mode=mode)(torch.zeros(3))


def test_inputs_whose_sizes_are_datas() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    for tensor in (a, b):
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    graph = captured(lambda a, b: torch.cat([a, b]) * a.shape[0], a, b)
    assert torch.equal(graph(torch.ones(2, 3), torch.ones(5, 3)), torch.full((7, 3), 2.0))
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node in placeholders:
        ((symbol, path),) = node.meta["unbacked_bindings"].items()
        assert symbol == node.meta["val"].shape[0].node.expr and str(path) == ".size()[0]"
    assert graph.shape_env.pending_fresh_unbacked_symbols == []
