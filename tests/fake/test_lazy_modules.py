"""nn.LazyLinear and others: the same as in eager, without data."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from understudy import FakeTensor, FakeTensorMode


def make_net() -> nn.Sequential:
    layers = nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5)
    return nn.Sequential(*layers)


def describe(net: nn.Module) -> list[tuple[object, ...]]:
    return [
        (name, tuple(t.shape), t.dtype, t.requires_grad, isinstance(t, nn.Parameter))
        for name, t in net.state_dict(keep_vars=True).items()
    ]


def test_sizes_follow_from_the_first_batch() -> None:
    real = make_net()
    real(torch.randn(2, 3, 8, 8))
    with FakeTensorMode():
        net = make_net()
        assert all(is_lazy(parameter) for parameter in net[0].parameters())
        assert isinstance(net[0].weight, UninitializedParameter)
        assert isinstance(net[1].running_mean, UninitializedBuffer)
        assert net(torch.randn(2, 3, 8, 8)).shape == (2, 5)
    assert describe(net) == describe(real)
    assert [type(layer) for layer in net] == [type(layer) for layer in real]
    assert all(type(parameter) is FakeTensor for parameter in net.parameters())


def test_moved_and_cast_before_the_first_batch() -> None:
    with FakeTensorMode():
        net = copy.deepcopy(make_net()).to("cuda").half()
        out = net(torch.randn(2, 3, 8, 8, device="cuda", dtype=torch.half))
        out.sum().backward()
    assert {(t.device.type, t.dtype) for t in net.parameters()} == {("cuda", torch.half)}
    assert net[1].running_mean.is_cuda and net[4].weight.grad.shape == (5, 288)


def test_state_dict_gives_sizes() -> None:
    with FakeTensorMode():
        lazy = nn.LazyLinear(5)
        lazy.load_state_dict(nn.Linear(7, 5).state_dict())
        assert lazy.weight.shape == (5, 7)
        assert pickle.loads(pickle.dumps(nn.LazyLinear(2).weight)).requires_grad


@pytest.mark.parametrize(
    "use", [lambda p: p + 1, lambda p: p.sum(), lambda p: p.view(-1), lambda p: p.numel()]
)
def test_uses_before_the_first_batch_are_refused(use) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="uninitialized"):
        use(nn.LazyLinear(2).weight)
    with FakeTensorMode():
        parameter = nn.LazyLinear(2).weight
        with pytest.raises(
            ValueError, match=r"expected a parameter with a shape in .*; run the lazy module on a batch"
        ):
            use(parameter)
        with pytest.raises(RuntimeError, match="shape of an uninitialized parameter"):
            _ = parameter.shape
        assert repr(parameter) == str(parameter) == "<UninitializedParameter>"


def test_left_alone_outside_of_a_mode() -> None:
    with FakeTensorMode():
        pass
    assert type(nn.LazyLinear(2).weight) is UninitializedParameter
