"""Tensors of the program's own classes, and attributes that a program has set on tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.capture.captured import check
from understudy import FakeTensorMode, make_fx
from understudy.fake.tensor import FakeTensor


class Scaling(nn.Parameter):
    def twice(self) -> Tensor:
        return self * 2


class Plain(torch.Tensor):
    def twice(self) -> Tensor:
        return self * 2


class Adding(torch.Tensor):
    """`+` of which multiplies."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        func = torch.mul if func is torch.Tensor.add else func
        return super().__torch_function__(func, types, args, kwargs or {})


class Asking(nn.Module):
    """Decides by the classes and attributes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scaling(torch.randn(3))
        self.bias = nn.Parameter(torch.randn(3))
        self.bias.is_used = True  # type: ignore[attr-defined]
        self.register_buffer("offset", torch.randn(3).as_subclass(Plain))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale.twice() if isinstance(self.scale, Scaling) else x - 1000
        x = x + self.bias if getattr(self.bias, "is_used", False) else x - 2000
        return x - self.offset.twice() if isinstance(self.offset, Plain) else x - 3000  # type: ignore[operator]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_program_finds_its_classes_and_attributes(mode: str) -> None:
    module, x = Asking(), torch.randn(2, 3)
    graph = make_fx(module, tracing_mode=mode)(x)
    assert torch.equal(graph(x).as_subclass(Tensor), module(x).as_subclass(Tensor))
    assert type(module.scale) is Scaling
    assert "twice" not in vars(module.scale)


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("tags", [(1, 1, 1, 1), (1, 0, 1, 0)])
@pytest.mark.parametrize("is_grad", [True, False])
def test_layers_that_differ_in_an_attribute_of_a_parameter(
    mode: str, tags: tuple[int, ...], is_grad: bool
) -> None:
    class Tagged(nn.Module):
        def __init__(self, tag: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.weight.tag = tag  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if self.weight.tag else x + self.weight  # type: ignore[attr-defined]

    module, x = nn.Sequential(*map(Tagged, tags)), torch.randn(2, 3)
    with torch.set_grad_enabled(is_grad):
        graph = make_fx(module, tracing_mode=mode)(x)
        assert torch.equal(graph(x), module(x))


def test_inputs_with_attributes() -> None:
    x = torch.randn(3)
    x.factor = 3  # type: ignore[attr-defined]
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(lambda x: x * x.factor, tracing_mode=mode)(x)
        assert torch.equal(graph(x), x * 3)


def test_an_attribute_that_is_set_in_a_trace_is_not_left() -> None:
    x = torch.randn(3)

    def f(x: Tensor) -> Tensor:
        x.seen = True  # type: ignore[attr-defined]
        return x * 2

    make_fx(f, tracing_mode="fake")(x)
    assert not hasattr(x, "seen")


def test_as_subclass_inside() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin().as_subclass(Plain)
        assert isinstance(y, Plain)
        z = y.twice().as_subclass(Tensor)
        y.mul_(3)
        return z, y.as_subclass(Tensor) + 1

    check(f, torch.randn(3), others=((torch.randn(5),),))


def test_a_class_that_changes_functions_is_not_claimed() -> None:
    mode = FakeTensorMode()
    assert not isinstance(mode.from_tensor(torch.randn(3).as_subclass(Adding)), Adding)
    with pytest.raises(RuntimeError, match="Adding"):
        make_fx(lambda x: x.as_subclass(Adding) + 3, tracing_mode="fake")(torch.randn(3))


def test_a_stand_in_of_a_stand_in_has_no_attributes_of_the_first_mode() -> None:
    first = FakeTensorMode().from_tensor(nn.Parameter(torch.randn(3)))
    second = FakeTensorMode().from_tensor(first)
    assert type(second) is FakeTensor and second.fake_mode is not first.fake_mode
    assert isinstance(second, nn.Parameter)
