"""Sizes at which random programs have found an answer not to hold, and their relatives: a guard excludes each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.oracle.cases import duplicate
from tests.oracle.compare import tensors_in
from understudy import FakeTensorMode, ShapeEnv
from understudy.shapes.input_dims import DYNAMIC

Call = Callable[..., Any]
F8 = torch.float8_e4m3fn
C64 = torch.complex64


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


ELSEWHERE: dict[str, tuple[Call, list[Tensor], list[Tensor]]] = {
    "a kernel without elements": (
        torch.nn.functional.conv3d, [ones(1, 1, 3, 3, 3), ones(2, 1, 2, 2, 2)], [ones(1, 1, 3, 3, 3), ones(2, 1, 2, 0, 2)]),
    "a transposed kernel without elements": (
        torch.nn.functional.conv_transpose1d, [ones(1, 2, 3), ones(2, 2, 2)], [ones(1, 2, 3), ones(2, 2, 0)]),
    "rows that are no columns": (
        lambda a, b, s, t: torch.ops.aten._scaled_mm_v2(a, b, [s], [0], [0], [t], [0], [0], None, torch.float32),
        [ones(4, 3, dtype=F8), ones(3, 2, dtype=F8), ones(1), ones(1)], [ones(4, 3, dtype=F8), ones(4, 2, dtype=F8), ones(1), ones(1)]),
    "weights of other classes": (
        lambda x, t, w: torch.nn.functional.multi_margin_loss(x, t, weight=w),
        [ones(2, 3), ones(2, dtype=torch.int64), ones(3)], [ones(2, 3), ones(2, dtype=torch.int64), ones(2)]),
    "rows without classes": (
        torch.nn.functional.multilabel_margin_loss,
        [ones(2, 3), ones(2, 3, dtype=torch.int64)], [ones(2, 0), ones(2, 0, dtype=torch.int64)]),
    "a transposed kernel that makes nothing": (
        lambda x, w: torch.nn.functional.conv_transpose1d(x, w, padding=1), [ones(1, 2, 2), ones(2, 2, 2)], [ones(1, 2, 1), ones(2, 2, 2)]),
    "points between bools": (lambda x: torch.linspace(0, 1, x.shape[0], dtype=torch.bool), [ones(1)], [ones(3)]),
    "more positions than 8 bits count": (
        lambda x: torch.nn.functional.max_pool3d(x.permute(0, 4, 1, 2, 3), 2),
        [ones(2, 4, 4, 4, 2, dtype=torch.int8)], [ones(2, 7, 7, 7, 2, dtype=torch.int8)]),
    "the largest of nothing": (lambda x: torch.renorm(x, torch.inf, 0, 1.0), [ones(2, 2)], [ones(2, 0)]),
    "one of no categories": (lambda x: torch.multinomial(x, 1, replacement=True), [ones(2)], [ones(0)]),
    "a part whose place is data": (
        lambda x, at: torch.narrow(x, 0, at, 2), [ones(4), torch.zeros((), dtype=torch.int64)], [ones(1), torch.zeros((), dtype=torch.int64)]),
    "a view that is scattered into": (
        lambda x, y: torch.as_strided_scatter(x, y, (2, 2), (2, 1)), [ones(3, 3), ones(2, 2)], [ones(2, 1), ones(2, 2)]),
    "a view that is scattered into, of one row": (
        lambda x, y: torch.as_strided_scatter(x[:1].expand(4, -1), y, (2, 2), (4, 2)),
        [ones(4, 2), ones(2, 2)], [ones(4, 1), ones(2, 2)]),
    "a view of a view of plain sizes": (
        lambda x: x.as_strided((2,), (1,)).as_strided((3,), (1,)), [ones(3)], [ones(2)]),
    "a view of what is moved in place": (lambda x: x.as_strided_((2,), (1,)).as_strided((3,), (1,)), [ones(3)], [ones(2)]),
    "flipped in 8 bits": (lambda x: x.fliplr(), [ones(5, 10, 5, dtype=F8)], [ones(1, 10, 1, dtype=F8)]),
    "a signal of frames that make none": (
        lambda x: torch.istft(x, 10), [ones(6, 2, dtype=C64)], [ones(6, 1, dtype=C64)]),
    "the least of nothing": (lambda x, y: torch._foreach_norm([x, y], -1), [ones(2), ones(3)], [ones(2), ones(0)]),
    "the least distance of nothing": (lambda x, y: torch.dist(x, y, -1), [ones(2), ones(2)], [ones(0), ones(0)]),
    "no elements, but a batch and channels": (
        lambda x, w: torch.nn.functional.conv1d(x, w, padding=1), [ones(2, 2, 1), ones(2, 2, 1)], [ones(2, 2, 0), ones(2, 2, 1)]),
    "no elements, but a batch and channels, transposed": (
        torch.nn.functional.conv_transpose1d, [ones(2, 2, 1), ones(2, 2, 3)], [ones(2, 2, 0), ones(2, 2, 3)]),
    "scales of other rows": (
        lambda a, b, s, t: torch.ops.aten._scaled_mm_v2(a, b, [s], [1], [0], [t], [1], [0], None, torch.float32),
        [ones(4, 3, dtype=F8), ones(3, 2, dtype=F8), ones(4, 1), ones(1, 2)],
        [ones(4, 3, dtype=F8), ones(3, 2, dtype=F8), ones(4, 1), ones(1, 3)]),
    "numbers of 8 bits times one": (
        lambda a, b: a * b, [ones(1, dtype=F8), ones(4, dtype=F8)], [ones(1, dtype=F8), ones(1, dtype=F8)]),
    "several targets for one row": (
        torch.nn.functional.nll_loss, [ones(3), torch.zeros(1, dtype=torch.int64)], [ones(3), torch.zeros(2, dtype=torch.int64)]),
    "several targets for one row of scores": (
        torch.nn.functional.cross_entropy, [ones(3), torch.zeros(1, dtype=torch.int64)], [ones(3), torch.zeros(2, dtype=torch.int64)]),
    "targets for more than there is": (
        torch.nn.functional.soft_margin_loss, [ones(1), ones(1)], [ones(1), ones(5)]),
    "repeated beyond 64 bits": (lambda x: x.tile((2**62,)), [ones(0)], [ones(3)]),
    "repeated in a row beyond 64 bits": (lambda x: x.repeat_interleave(2**62), [ones(0)], [ones(2)]),
    "more bytes than can be counted": (lambda x: torch.zeros(x.shape[0], 2**62), [ones(0)], [ones(2)]),
    "windows that are further apart than 64 bits tell": (lambda x: x.unfold(0, 2, 2**62), [ones(4, 1)], [ones(4, 2)]),
    "copies of windows that are so far apart": (lambda x: torch.unfold_copy(x, 0, 2, 2**62), [ones(4, 1)], [ones(4, 2)]),
    "copies of elements that are so far apart": (lambda x: torch.slice_copy(x, 0, 0, 4, 2**61), [ones(4, 3)], [ones(4, 4)]),
    "elements that are further apart than 64 bits tell": (lambda x: x[:: 2**61], [ones(4, 3)], [ones(4, 4)]),
    "a sum of size and step beyond 64 bits": (lambda x: x[:, :: 2**63 - 1], [ones(2, 1)], [ones(2, 2)]),
    "more values than a mask can pick": (
        lambda x, m, v: x.index_put((m,), v), [ones(5, 2), ones(5, dtype=torch.bool), ones(5, 2)],
        [ones(1, 2), ones(1, dtype=torch.bool), ones(2, 2)]),
    "more values than a mask of rows can pick": (
        lambda x, m, v: torch.ops.aten.index_put(x, [None, m], v), [ones(3, 5, 2), ones(5, dtype=torch.bool), ones(5, 1)],
        [ones(3, 1, 2), ones(1, dtype=torch.bool), ones(2, 1)]),
}  # fmt: skip


def call_with_symbols(call: Callable[..., Any], tensors: list[Tensor]) -> tuple[ShapeEnv, Any]:
    """The guards and the result of a call with stand-ins all of whose sizes are symbols."""
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env)
    fakes = [
        mode.from_tensor(each, source=source, symbolic_context=[DYNAMIC] * each.ndim)
        for source, each in zip("abcdef", tensors, strict=False)
    ]
    with mode:
        return env, call(*fakes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_refused_elsewhere_is_a_guard(name: str) -> None:
    call, here, there = ELSEWHERE[name]
    try:
        call(*duplicate(here))
    except Exception as error:
        pytest.skip(f"refused by this release of torch: {error}")
    env, _ = call_with_symbols(call, here)
    assert not env.check(*here)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        call(*duplicate(there))
    assert env.check(*there)


OTHERWISE: dict[str, tuple[Call, list[Tensor], list[Tensor]]] = {
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERWISE)
def test_what_is_another_answer_elsewhere_is_a_guard(name: str) -> None:
    call, here, there = OTHERWISE[name]
    env, result = call_with_symbols(call, duplicate(here))
    made = tensors_in(result)
    assert not env.check(*here)
    assert env.check(*there)
    for fake, real in zip(made, tensors_in(call(*duplicate(here))), strict=True):
        assert (fake.dtype, [int(n) for n in (*fake.shape, *fake.stride())]) == (
            real.dtype,
            [*real.shape, *real.stride()],
        )


@pytest.mark.parametrize("name", ["gather", "scatter_reduce", "index_select", "embedding"])
def test_an_index_points_into_something_by_a_guard(name: str) -> None:
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env)
    x, index = torch.zeros(3, 2), torch.zeros(2, 2, dtype=torch.int64)
    calls: dict[str, Call] = {
        "gather": lambda x, i: x.gather(0, i),
        "scatter_reduce": lambda x, i: x.scatter_reduce(0, i, x, "amin"),
        "index_select": lambda x, i: x.index_select(0, i[0]),
        "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    }
    fakes = [
        mode.from_tensor(each, source=s, symbolic_context=[DYNAMIC] * 2)
        for s, each in (("x", x), ("i", index))
    ]
    with mode:
        calls[name](*fakes)
    with pytest.raises((IndexError, RuntimeError)):
        calls[name](x[:0], index)
    assert env.check(x[:0], index)
    assert not env.check(x, index)


def test_a_transposed_convolution_makes_channels() -> None:
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env)
    reals = ones(2, 3, 5), ones(3, 1, 2)
    fakes = [
        mode.from_tensor(each, source=s, symbolic_context=[DYNAMIC] * 3)
        for s, each in zip("xw", reals, strict=True)
    ]
    with mode:
        torch.nn.functional.conv_transpose1d(*fakes)
    assert not env.check(*reals)
    assert env.check(reals[0], ones(3, 0, 2))


def test_a_view_stays_within_its_storage_by_a_guard() -> None:
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.zeros(6), source="x")
    with mode:
        x.as_strided((2, 2), (2, 1))
    (guard,) = env.guards
    assert guard.text == "x_0 >= 4"
    assert env.check(torch.zeros(3)) and not env.check(torch.zeros(4))


def test_a_size_of_0_goes_inside_of_a_1_beyond_expanded_dimensions() -> None:
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env)
    here = ones(1, 1, 1), ones(1, 2, 1)
    fakes = [
        mode.from_tensor(each, source=s, symbolic_context=[DYNAMIC] * 3)
        for s, each in zip("ab", here, strict=True)
    ]
    with mode:
        made = fakes[0] * fakes[1]
    there = ones(0, 1, 1), ones(1, 2, 1)
    assert (there[0] * there[1]).stride() == (1, 0, 0) != made.stride()
    assert env.check(*there) and not env.check(*here)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_as_many_values_as_a_mask_may_pick(count: int, symbolic: bool) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(specialize_zero_one=False) if symbolic else None)
    x, mask, values = (
        mode.from_tensor(each, symbolic_context=[DYNAMIC] * each.ndim if symbolic else None)
        for each in (ones(5, 2), ones(5, dtype=torch.bool), ones(count, 2))
    )
    with mode:
        x[mask] = values
        assert [int(size) for size in x.index_put((mask,), values).shape] == [5, 2]
    with mode, pytest.raises(RuntimeError):
        x[mask] = torch.ones(6, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_usual_calls_have_no_guards_on_small_sizes(dtype: torch.dtype) -> None:
    env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=env)
    x, y = (mode.from_tensor(ones(4, dtype=dtype), source=s, symbolic_context=[DYNAMIC]) for s in "xy")
    with mode:
        torch.mul(x, y, out=torch.empty_like(x))
    assert [guard.text for guard in env.guards] == ["x_0 == y_0"]
