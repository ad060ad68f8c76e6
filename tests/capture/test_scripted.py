"""Functions and modules of TorchScript inside of a traced function."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.capture.captured import check
from understudy import FakeTensorMode, ShapeEnv, make_fx


@torch.jit.script
def rows(x: Tensor, factor: int = 2) -> Tensor:
    count = x.size(0) * x.size(1)
    if factor > 5:
        count = count // 2
    return x.view(count, -1) * factor + torch.arange(count)[:, None]


@torch.jit.script
def rows_of_twice(x: Tensor) -> Tensor:
    return rows(x + x, factor=3)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(x.size(0) * x.size(1), -1) * self.scale


@pytest.mark.parametrize("f", [rows, rows_of_twice, lambda x: rows(x, 7), lambda x: rows(x=x)])
def test_symbolic_sizes_stay_open_in_scripted_functions(f: object) -> None:
    graph = check(f, torch.randn(2, 3, 4), others=((torch.randn(6, 5, 2),),))["symbolic"]  # type: ignore[arg-type]
    assert not graph.shape_env.specialisations


def test_scripted_functions_on_symbolic_stand_ins() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.randn(2, 3, 4))
    with mode:
        assert isinstance(rows(x).shape[0], torch.SymInt)


def test_what_was_traced_keeps_the_branch_it_took() -> None:
    def f(x: Tensor) -> Tensor:
        return x.view(-1) if bool(x.sum() > 0) else x.cos().view(-1)

    with pytest.warns(torch.jit.TracerWarning):
        traced = torch.jit.trace(f, (torch.ones(2, 3),))
    check(lambda x: traced(x), -torch.ones(2, 3))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_scripted_modules(mode: str, wrapped: bool) -> None:
    module = torch.jit.script(Scaled())
    x = torch.randn(2, 3, 4)
    graph = make_fx((lambda x: module(x)) if wrapped else module, tracing_mode=mode)(x)
    assert torch.equal(graph(x), module(x))
    assert type(module.linear.weight) is nn.Parameter
    held = {tensor.data_ptr() for tensor in graph.parameters()}
    assert held == {tensor.data_ptr() for tensor in module.parameters()}


def test_real_tensors_are_refused_again_after_a_scripted_module() -> None:
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.randn(2, 3, 4))
    make_fx(torch.jit.script(Scaled()), tracing_mode="fake")(x)
    assert not mode.allow_non_fake_inputs
