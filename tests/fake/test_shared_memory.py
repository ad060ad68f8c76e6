"""What only the storage behind a stand-in tells: overlaps, bounds, storages that have grown, views of inference mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from understudy import FakeTensorMode
from understudy.errors import ArgumentError
from understudy.shapes.env import ShapeEnv

CROSSING: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda x: x.add_(x.t()),
    "shifted": lambda x: x[1:].mul_(x[:-1]),
    "a row into all": lambda x: x.sub_(x[0]),
    "copy": lambda x: x[1:].copy_(x[:-1]),
    "out": lambda x: torch.exp(x.t(), out=x),
    "out of two": lambda x: torch.add(x[1:], 1, out=x[:-1]),
    "compared": lambda x: x.eq_(x.t()),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0]), x[:1]),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), x[1]),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 1, dtype=torch.long), x),
    "gather by transposed": lambda x: gather_into(x.long(), lambda index: index.t()),
    "gather by shifted": lambda x: gather_into(
        x.long()[1:], lambda index: index.as_strided((3, 4), (4, 1), 0)
    ),
}

APART: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda x: x.add_(x),
    "the same elements": lambda x: x.add_(x.view(4, 4)),
    "other rows": lambda x: x[:2].add_(x[2:]),
    "a copy": lambda x: x.add_(x.t().clone()),
    "detached": lambda x: x.mul_(x.detach()),
    "with gaps": lambda x: x[:, :2].add_(x[:, 1:3]),
    "out": lambda x: torch.exp(x, out=x),
    "gather by itself": lambda x: gather_into(x.long(), lambda index: index),
    "gather by the same elements": lambda x: gather_into(x.long(), lambda index: index.view(4, 4)),
    "gather by another shape": lambda x: gather_into(x.long(), lambda index: index.view(16)),
    "take_along_dim": lambda x: torch.take_along_dim(x.long(), i := x.long(), 0, out=i),
    "read before": lambda x: torch.mvlgamma(x, 1, out=x.t()),
    "cat of nothing": lambda x: torch.cat([nothing := torch.ones(0), nothing], out=nothing),
}


def gather_into(index: torch.Tensor, out: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return torch.gather(torch.ones(4, 4, dtype=torch.long), 0, index, out=out(index))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", CROSSING)
def test_elements_that_are_read_in_another_order_are_not_written(name: str, warm: bool) -> None:
    with pytest.raises(RuntimeError, match="single memory location"):
        CROSSING[name](torch.ones(4, 4))
    with FakeTensorMode():
        if warm:  # the same call on tensors that share nothing leaves a plan behind
            torch.ones(4, 4).add_(torch.ones(4, 4).t())
        with pytest.raises(ArgumentError, match="memory"):
            CROSSING[name](torch.ones(4, 4))


def test_a_plan_of_tensors_apart_does_not_answer_for_shared_ones() -> None:
    with FakeTensorMode():
        x, y = torch.randn(3, 3), torch.randn(3, 3)
        x.add_(y.t())
        x.add_(y.t())
        with pytest.raises(ArgumentError, match=r"add_.*f32\[3, 3\]~\(1, 3\)@cpu"):
            x.add_(x.t())


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", APART)
def test_other_shared_memory_is_written(name: str) -> None:
    APART[name](torch.ones(4, 4))
    with FakeTensorMode():
        APART[name](torch.ones(4, 4))


def test_views_end_within_the_storage() -> None:
    with FakeTensorMode():
        x = torch.ones(3)
        assert x.as_strided((2,), (2,)).shape == (2,)
        assert x[1:].as_strided((3,), (1,), 0).shape == (3,)
        assert x.as_strided((0, 4), (1, 1), 5).shape == (0, 4)
        assert x.as_strided((1000,), (0,)).shape == (1000,)
        with pytest.raises(ArgumentError, match=r"reaches to byte 16, the storage of .* has 12"):
            x.as_strided((4,), (1,))
        with pytest.raises(RuntimeError):
            x[1:].as_strided((2,), (2,))
        with pytest.raises(RuntimeError):
            x.as_strided_((3,), (1,), 1)


def test_a_storage_that_has_grown_is_shared() -> None:
    with FakeTensorMode():
        x = torch.zeros(2).resize_(9)
        y = torch.zeros(1).set_(x.untyped_storage(), 1, (2, 2), (4, 1))
        z = torch.zeros(1).set_(x.untyped_storage())
        assert (y.shape, y.stride(), y.storage_offset(), z.shape) == ((2, 2), (4, 1), 1, (9,))
        storages = {each.untyped_storage()._cdata for each in (x, y, z)}
        assert len(storages) == 1
        y.set_(torch.zeros(4).untyped_storage())  # and back to one that has not
        assert y.shape == (4,)
        assert (y + 1).shape == (4,)


def test_views_of_tensors_of_inference_mode_are_such_tensors() -> None:
    def of(make: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        with torch.inference_mode():
            x = torch.randn(3, 4)
        return make(x).is_inference()

    for make in (lambda x: x[0], lambda x: x.t(), lambda x: x.view(12), lambda x: x + 1, lambda x: x.clone()):
        with FakeTensorMode():
            stand_in = of(make)
        assert stand_in == of(make)


def test_what_is_read_and_written_is_not_resized() -> None:
    with FakeTensorMode():
        x = torch.ones(4)
        with pytest.raises(ArgumentError, match="does not have the shape of the result"):
            torch.add(x, torch.ones(2, 4), out=x)
        assert torch.add(x, torch.ones(4), out=x) is x
        out = torch.empty(0)
        assert torch.add(x, torch.ones(2, 4), out=out).shape == (2, 4)


def test_a_part_of_a_storage_grows_as_far_as_it_must() -> None:
    def grown() -> list[int]:
        first, second, third = torch.zeros(4), torch.zeros(2, 3, 4), torch.zeros(4)
        first[1:].resize_(2, 5)
        second[:, 1:][2:].resize_(2, 2)  # of no elements, and it begins behind the end
        third[3:].resize_(1)
        return [tensor.untyped_storage().nbytes() for tensor in (first, second, third)]

    expected = grown()
    with FakeTensorMode():
        assert grown() == expected


def test_softmax_of_nothing_takes_every_dtype() -> None:
    for dtype in (torch.int64, torch.complex64, torch.float32):
        assert torch.empty(0, 3, dtype=dtype).softmax(1).dtype is dtype
        with FakeTensorMode():
            assert torch.empty(0, 3, dtype=dtype).softmax(1).dtype is dtype


STRIDED = {
    "plain": lambda: torch.zeros(4, 4),
    "slice": lambda: torch.zeros(10, 4)[2:5],
    "expanded": lambda: torch.zeros(4, 1).expand(4, 3),
    "empty": lambda: torch.zeros(0, 3),
}


@pytest.mark.parametrize("size", [(2,), (2, 2), (0, 2), ()])
@pytest.mark.parametrize("name", ["as_strided", "as_strided_copy", "as_strided_scatter"])
@pytest.mark.parametrize("make", STRIDED.values(), ids=STRIDED)
def test_strided_views_are_refused_where_eager_refuses_them(
    make: Any, name: str, size: tuple[int, ...]
) -> None:
    def run(stride: tuple[int, ...], offset: int | None) -> Any:
        source = (torch.zeros(size),) if name == "as_strided_scatter" else ()
        try:
            result = getattr(torch, name)(make(), *source, size, stride, offset)
        except RuntimeError:
            return "refused"
        return result.shape, result.stride(), result.storage_offset()

    for stride in itertools.product((0, 1, 6, 11, 200), repeat=len(size)):
        for offset in (None, 0, 5):
            real = run(stride, offset)
            with FakeTensorMode():
                assert run(stride, offset) == real, (stride, offset)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(x.t()),
        lambda x: x[1:].add_(x[:-1]),
        lambda x: x[1:].copy_(x[:-1]),
        lambda x: torch.cat([x, x], out=x),
        lambda x: torch.add(x[1:], x[:-1], out=x[1:]),
        lambda x: x.unsqueeze(0).expand(3, *x.shape).add_(1),
    ],
)
def test_symbolic_sizes_are_refused_as_plain_ones(write: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError):
        write(torch.ones(4, 4))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(4, 4), source="x")
    with mode, pytest.raises(RuntimeError, match=r"memory|expanded"):
        write(x)


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(x), lambda x: x[:2].add_(x[2:4]), lambda x: torch.add(x, 1, out=x)]
)
def test_symbolic_sizes_are_taken_as_plain_ones(write: Callable[[torch.Tensor], Any]) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(4, 4), source="x")
    with mode:
        assert tuple(map(int, write(x).shape)) == write(torch.ones(4, 4)).shape


def test_views_of_zeros_that_autograd_makes_share_their_memory() -> None:
    """The gradient of `sgn` is a tensor with torch's ZeroTensor key, for which C++ skips operators."""

    def program() -> tuple[bool, bool]:
        x = torch.ones(4, 6, requires_grad=True)
        (zeros,) = torch.autograd.grad(x.sgn().sum(), x)
        view = zeros.chunk(2)[-1].t()
        return zeros._is_zerotensor(), view.untyped_storage()._cdata == zeros.untyped_storage()._cdata

    assert program() == (True, True)
    with FakeTensorMode():
        assert program() == (True, True)
