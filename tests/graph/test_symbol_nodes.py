"""Symbolic sizes in graphs: what is recorded, what is not, and that it holds at other sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.captured import captured, check, targets
from understudy import fx_placeholder_vals, make_fx

aten = torch.ops.aten

PROGRAMS: dict[str, Any] = {
    "sizes multiplied": lambda x: x.view(x.shape[0] * x.shape[1]),
    "sizes added": lambda x: torch.ones(x.shape[0] + x.shape[1] + 3),
    "subtracted": lambda x: x[: x.shape[0] - 2],
    "divided": lambda x: x[: x.shape[0] // 2],
    "remainder": lambda x: x.new_zeros(x.shape[0] % 3 + 1),
    "power": lambda x: x.new_zeros(x.shape[0] ** 2),
    "least": lambda x: x.new_zeros(min(x.shape[0], x.shape[1])),
    "sym_max": lambda x: x.new_zeros(torch.sym_max(x.shape[0], 2 * x.shape[1])),
    "negative": lambda x: x[-(x.shape[0] - 1) :],
    "numel": lambda x: x.sum() / x.numel(),
    "true division": lambda x: x * (x.shape[0] / x.shape[1]),
    "sym_float": lambda x: x + torch.sym_float(x.shape[0]) * 0.5,
    "sym_sqrt": lambda x: x * torch.sym_sqrt(x.shape[0]),
    "ceiling": lambda x: x.new_zeros(math.ceil(x.shape[0] / 2)),
    "floor of float": lambda x: x.new_zeros(torch.sym_int(x.shape[0] * 1.5)),
    "round": lambda x: x.new_zeros(round(x.shape[0] / 2) + 1),
    "a comparison as a number": lambda x: x * (x.shape[0] > 2),
    "shapes returned": lambda x: (x.shape, x.numel(), x.stride(), x.shape[0] * 2),
    "conditional": lambda x: x * 2 if x.shape[0] > 1 else x * 3,
    "expand": lambda x: x.sum(0).expand(x.shape),
    "cat": lambda x: torch.cat([x, x * 2], 0).view(2, *x.shape),
    "arange": lambda x: torch.arange(x.shape[0]) + x.new_ones(x.shape[0]).cumsum(0),
    "stride as a number": lambda x: x.as_strided((x.shape[0],), (x.stride(0),)),
    "pad": lambda x: torch.nn.functional.pad(x, (1, x.shape[0])),
    "repeat": lambda x: x.repeat(2, x.shape[0]),
    "split": lambda x: torch.split(x, [1, x.shape[0] - 1]),
    "chunk": lambda x: x.T.contiguous().T.flatten(),
    "pool": lambda x: torch.nn.functional.adaptive_avg_pool1d(x[None], 1),
    "interpolate": lambda x: torch.nn.functional.interpolate(x[None], scale_factor=2.0, mode="nearest"),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "norm": lambda x: torch.nn.functional.layer_norm(x, (x.shape[1],)),
    "mean": lambda x: x.mean(0) - x.var(0),
    "diagonal": lambda x: x.diagonal(),
    "roll": lambda x: x.roll(x.shape[0] // 2, 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    check(PROGRAMS[name], torch.randn(6, 4), others=((torch.randn(9, 5),), (torch.randn(8, 7),)))


def test_only_what_is_used_is_recorded() -> None:
    def f(x: Tensor) -> Any:
        x.shape[0] * x.shape[1] + x.shape[0] // 3
        return x.sin()

    assert targets(captured(f, torch.randn(5, 3))) == ["sin.default"]


def test_a_size_is_read_once() -> None:
    def f(x: Tensor) -> Any:
        return (
            x.new_ones(x.shape[0]),
            x.new_ones(x.shape[0] * 2),
            x.view(x.shape[0] * x.shape[1]),
            x.new_ones(2 * x.shape[0]),
        )

    graph = captured(f, torch.randn(5, 3))
    assert targets(graph).count("sym_size.int") == 2
    assert targets(graph).count("mul") == 2


def test_times_one_and_plus_zero_record_nothing() -> None:
    graph = captured(lambda x: x.new_ones(x.shape[0] * 1 + 0), torch.randn(5))
    assert targets(graph) == ["sym_size.int", "new_ones.default"]


def test_equal_sizes_are_one_size() -> None:
    graph = captured(lambda x, y: (x + y).new_ones(y.shape[0]), torch.randn(5), torch.randn(5))
    assert targets(graph).count("sym_size.int") == 1


def test_a_size_of_a_result_is_computed_from_sizes_of_inputs() -> None:
    def f(x: Tensor) -> Any:
        y = torch.cat([x, x])
        return y.new_ones(y.shape[0])

    graph = captured(f, torch.randn(5))
    assert "mul" in targets(graph)
    check(f, torch.randn(5), others=((torch.randn(7),),))


# --- numbers as inputs -------------------------------------------------------------------------------------------------


def test_an_integer_is_a_symbol() -> None:
    graphs = check(lambda x, n: x.repeat(n) + n, torch.randn(4), 3, others=((torch.randn(5), 4),))
    placeholders = graphs["symbolic"].graph.find_nodes(op="placeholder")
    assert isinstance(placeholders[1].meta["val"], torch.SymInt)
    assert placeholders[1].name == "n_1"


def test_integers_that_sizes_are_made_of() -> None:
    def f(n: Any, m: Any) -> Any:
        return torch.zeros(n, m + 1), n * m

    check(f, 3, 5, others=((4, 7),))


def test_other_numbers_stay_as_they_are() -> None:
    check(lambda x, a, b: x * a if b else x, torch.randn(3), 2.5, True)


def test_an_integer_that_equals_a_size_is_no_size() -> None:
    check(lambda x, n: x.new_ones(n), torch.randn(5), 5, others=((torch.randn(5), 7), (torch.randn(6), 6)))


# --- guards ------------------------------------------------------------------------------------------------------------


def test_a_branch_is_a_guard() -> None:
    graph = captured(lambda x: x * 2 if x.shape[0] > 3 else x * 3, torch.randn(5))
    assert any(
        "x_0" in str(guard.condition) or "x" in str(guard.condition) for guard in graph.shape_env.guards
    )
    assert len(graph.shape_env.guards) == 1


def test_recording_makes_no_guards() -> None:
    graph = captured(lambda x: (x.t() * 2).t() + x.permute(1, 0).T, torch.randn(5, 3))
    assert not graph.shape_env.guards


def test_torch_check_is_a_guard_on_sizes() -> None:
    def f(x: Tensor) -> Any:
        torch._check(x.shape[0] % 2 == 0)
        return x.view(-1, 2)

    check(f, torch.randn(6), others=((torch.randn(10),),))


def test_sizes_of_one_are_numbers() -> None:
    graph = captured(lambda x: x.expand(3, 4), torch.randn(1, 4))
    (placeholder,) = graph.graph.find_nodes(op="placeholder")
    assert placeholder.meta["val"].shape[0] == 1 and type(placeholder.meta["val"].shape[0]) is int


def test_gradients_at_other_sizes() -> None:
    def f(x: Tensor, w: Tensor) -> Any:
        y = (x @ w).softmax(-1).view(x.shape[0], -1)
        return torch.autograd.grad(y.pow(2).mean(), (x, w))

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    check(f, leaf(3, 4), leaf(4, 2), others=((leaf(5, 6), leaf(6, 3)),))


# --- as it is written ---------------------------------------------------------------------------------------------------------


def test_what_is_negated_is_negated() -> None:
    gm = captured(lambda x: torch.empty(10 - x.shape[0]), torch.randn(2), mode="symbolic")
    assert "neg = -sym_size_int" in gm.code
    assert gm(torch.randn(3)).shape == (7,)


def test_a_size_that_is_returned_is_a_tuple() -> None:
    gm = captured(lambda x: x.shape, torch.randn(5, 3), mode="symbolic")
    assert gm.code.strip().startswith("def forward(self, x_1):")
    assert gm.code.strip().endswith("return (sym_size_int, sym_size_int_1)")
    assert gm(torch.randn(4, 6)) == torch.Size((4, 6))


def test_a_float_of_a_size_is_a_float() -> None:
    gm = captured(lambda x, n: torch.add(torch.sym_float(x.shape[0]), n), torch.randn(3), 2, mode="symbolic")
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert node.meta["val"].dtype is gm(torch.randn(4), 2).dtype is torch.float32


def test_torchs_decompositions_are_given_symbolic_floats() -> None:
    table = torch._decomp.decomposition_table
    gm = make_fx(lambda x: x / x.shape[0], table, tracing_mode="symbolic")(torch.randn(4))
    assert targets(gm) == ["sym_size.int", "sym_float", "prims.div.default"]
    x = torch.randn(7)
    assert torch.equal(gm(x), x / 7)


def test_guards_that_say_more_than_a_range() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        assert a.shape[0] < 20
        assert a.shape[0] == b.shape[0]
        assert a.shape[1] * b.shape[1] > 20
        return a.cos()

    gm = captured(program, torch.randn(5, 6), torch.randn(5, 8), mode="symbolic")
    assert len(gm.shape_env.guards) == 2
    assert len(gm.shape_env.get_nontrivial_guards()) == 1
    names = ["a", "b"]
    shown = gm.shape_env.produce_guards(fx_placeholder_vals(gm), names, _simplified=True)
    assert shown == ["L['a'].size()[1]*L['b'].size()[1] >= 21", "L['a'].size()[0] <= 19"]


@pytest.mark.parametrize("number", [lambda n: torch.mul(n, 3).item(), lambda n: (torch.tensor(2) * n).item()])
def test_whole_numbers_computed_from_a_size_are_symbols(number: Any) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + number(x.size(1))

    gm = make_fx(program, tracing_mode="symbolic")(torch.randn(3, 8))
    x = torch.randn(4, 5)
    assert torch.equal(gm(x), program(x))
    assert not gm.shape_env.guards


@pytest.mark.parametrize(
    "number",
    [
        lambda n: torch.div(n, 4, rounding_mode="trunc").item(),
        lambda n: (torch.zeros(2) + n).tolist()[0],
    ],
)
def test_values_computed_from_a_size_are_those_at_hand(number: Any) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + number(x.size(1))

    x = torch.randn(3, 8)
    gm = make_fx(program, tracing_mode="symbolic")(x)
    assert torch.equal(gm(x), program(x))
    assert [str(guard.condition) for guard in gm.shape_env.guards] == ["x_1 == 8"]


@pytest.mark.parametrize(
    "number", [lambda n: (torch.tensor(2) * n).item(), lambda n: torch.full((), n).item()]
)
def test_values_computed_from_a_number_of_data_are_of_data(number: Any) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + number(x.sum().long().item())

    gm = make_fx(program, tracing_mode="fake")(torch.ones(3))
    assert torch.equal(gm(torch.full((3,), 4.0)), program(torch.full((3,), 4.0)))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x + torch.tensor(x.shape[0]),
        lambda x: x.sum() + torch.tensor([x.shape[0], 2.5]),
        lambda x: x.sum() + torch.tensor(x.shape),
        lambda x: x * torch.as_tensor(1 / x.shape[0]),
        lambda x: x.sum() + x.new_tensor([[x.shape[0], x.shape[0] + 1]]),
    ],
)
def test_tensors_of_sizes_stay_open(f: Any) -> None:
    graph = check(f, torch.randn(3, 2), others=((torch.randn(5, 2),),))["symbolic"]
    assert not graph.shape_env.specialisations


def test_a_tensor_of_a_size_that_is_read_is_a_guard() -> None:
    graph = captured(lambda x: x.view(torch.tensor(x.shape[0]).item(), -1), torch.randn(3, 2, 2))
    assert graph(torch.randn(3, 2, 2)).shape == (3, 4)
