"""Nested tensors in strided layout (rows of several lengths, which have no shape), traced in real mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from understudy import make_fx, show
from understudy.errors import UnsupportedFakeTensorException

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def rows() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)])


LINEAR, NORM = nn.Linear(4, 5), nn.LayerNorm(4)


def gradients(x: Tensor) -> Any:
    return torch.autograd.grad(
        torch.nested.to_padded_tensor(LINEAR(x), 0.0).sin().sum(), list(LINEAR.parameters())
    )


PROGRAMS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda x: x * 2 + x.sin(),
    "padded": lambda x: torch.nested.to_padded_tensor(x, 0.0),
    "unbind": lambda x: x.unbind(),
    "linear": lambda x: LINEAR(x),
    "layer norm": lambda x: NORM(x),
    "softmax": lambda x: x.softmax(-1),
    "products": lambda x: torch.bmm(x, x.transpose(1, 2)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "in place": lambda x: x.clone().add_(1.0),
    "chunk": lambda x: x.chunk(2, -1),
    "gradients": gradients,
}


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        for part, other in zip(a.unbind(), b.unbind(), strict=True) if a.is_nested else ((a, b),):
            assert torch.equal(part, other)


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_input(name: str) -> None:
    program = PROGRAMS[name]
    graph = make_fx(program)(rows())
    x = rows()
    torch.manual_seed(0)
    expected = program(x)
    torch.manual_seed(0)
    assert_same(graph(x), expected)


def test_a_constant() -> None:
    x, constant = rows(), rows()
    assert_same(make_fx(lambda x: x + constant)(x)(x), x + constant)


def test_made_inside() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([a, b]).sin(), 0.0)

    graph = make_fx(program)(torch.randn(2, 4), torch.randn(3, 4))
    args = torch.randn(5, 4), torch.randn(1, 4)
    assert torch.equal(graph(*args), program(*args))


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show(make_fx(lambda x: x.sin())(rows()))
    assert "nested f32[2 tensors]@cpu" in capsys.readouterr().out


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_there_are_no_stand_ins_for_them(tracing_mode: str) -> None:
    with pytest.raises(
        UnsupportedFakeTensorException, match=r"strided layout are not supported: use layout=torch\.jagged"
    ):
        make_fx(lambda x: x.sin(), tracing_mode=tracing_mode)(rows())
