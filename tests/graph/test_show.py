"""show: the table that people read."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from understudy import make_fx, show
from understudy.graph.show import rows_of


def shown(gm: torch.fx.GraphModule, **options: object) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None)
    show(gm, console=console, **options)  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def program(x: torch.Tensor) -> torch.Tensor:
    halves = x.view(-1, 2)
    return torch.relu(halves).sum(0)


def test_rows_have_name_operator_spec_and_line() -> None:
    rows = rows_of(make_fx(program, tracing_mode="fake")(torch.randn(3, 4)))
    assert [row.name for row in rows] == ["x_1", "view", "relu", "sum_1", "output"]
    assert [row.operator for row in rows] == [
        "input", "aten.view(x_1, [-1, 2])", "aten.relu(view)", "aten.sum.dim_IntList(relu, [0])", "return sum_1",
    ]  # fmt: skip
    assert [row.spec for row in rows] == ["f32[3, 4]@cpu", "f32[6, 2]@cpu", "f32[6, 2]@cpu", "f32[2]@cpu", ""]
    line = program.__code__.co_firstlineno + 1
    assert rows[1].line.endswith(f"test_show.py:{line}")
    assert rows[2].line.endswith(f"test_show.py:{line + 1}")


def test_prints_a_table_and_the_guards() -> None:
    text = shown(make_fx(program, tracing_mode="symbolic")(torch.randn(3, 4)))
    assert "program: 3 calls" in text
    assert "f32[x_0*x_1//2, 2]@cpu" in text
    assert "guards (" in text
    assert "x_0*x_1 % 2 == 0" in text


def test_limit_keeps_the_ends() -> None:
    def long(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            x = x + 1
        return x

    text = shown(make_fx(long)(torch.ones(2)), limit=10)
    assert "42 more" in text
    assert "x_1" in text
    assert "return add_49" in text
    assert "add_20 " not in text


def test_results_that_are_structures() -> None:
    text = shown(make_fx(lambda x: torch.max(x, 0), tracing_mode="fake")(torch.randn(3, 4)))
    assert "(f32[4]@cpu, i64[4]@cpu)" in text


def test_everything_that_is_not_a_graph_is_refused() -> None:
    for value, name in ((torch.nn.Linear(1, 1), "a Linear"), (torch.nn.Linear, "Linear"), (3, "a int")):
        with pytest.raises(TypeError, match=f"expected a captured graph .*, got {name}: capture it first"):
            show(value)  # type: ignore[arg-type]


def test_parts_of_a_graph_that_are_no_plain_tensors() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    rows = rows_of(make_fx(branches, tracing_mode="fake")(torch.randn(3)))
    assert any("self.true_graph_0" in row.operator for row in rows)
    weight = torch.randn(3)
    constant = make_fx(lambda x: {"a": x * weight, "b": 2}, tracing_mode="real")(torch.randn(3))
    assert "self._tensor_constant0" in shown(constant)
    assert "return" in shown(constant)
