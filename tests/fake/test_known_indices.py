"""Indices whose values follow from the program are checked: out of range they are refused, of symbols they make guards.
So are other values that the real operator refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from understudy import FakeTensorMode
from understudy.errors import DimensionError, OperatorError
from understudy.shapes.env import ShapeEnv

five = [5]
OUT_OF_RANGE: dict[str, Callable[[], Any]] = {
    "index": lambda: torch.ones(3)[torch.tensor(five)],
    "list": lambda: torch.ones(3)[five],
    "second dimension": lambda: torch.ones(9, 3)[:, five],
    "negative": lambda: torch.ones(3)[torch.tensor([-4])],
    "gather": lambda: torch.ones(3).gather(0, torch.tensor(five)),
    "index_select": lambda: torch.ones(3).index_select(0, torch.tensor(five)),
    "embedding": lambda: functional.embedding(torch.tensor(five), torch.ones(3, 2)),
    "index_put": lambda: torch.ones(3).index_put_((torch.tensor(five),), torch.tensor(1.0)),
    "take": lambda: torch.ones(3).take(torch.tensor(five)),
    "scatter": lambda: torch.ones(3).scatter(0, torch.tensor(five), 1.0),
    "index_add": lambda: torch.ones(3).index_add(0, torch.tensor(five), torch.ones(1)),
    "index_fill": lambda: torch.ones(3).index_fill(0, torch.tensor(five), 1.0),
    "embedding with a largest norm": lambda: functional.embedding(
        torch.tensor(five), torch.ones(3, 2), max_norm=1.0
    ),
    "embedding_bag": lambda: functional.embedding_bag(
        torch.tensor(five), torch.ones(3, 2), torch.tensor([0])
    ),
    "multi_margin_loss": lambda: functional.multi_margin_loss(torch.ones(1, 3), torch.tensor(five)),
    "cross_entropy": lambda: functional.cross_entropy(torch.ones(1, 3), torch.tensor(five)),
}
IN_RANGE: dict[str, Callable[[], Any]] = {
    "negative": lambda: torch.ones(3)[torch.tensor([-3])],
    "beside a mask": lambda: torch.ones(3, 9)[torch.tensor([2]), 8],
    "ignored class": lambda: functional.cross_entropy(torch.ones(1, 3), torch.tensor([-100])),
    "no index": lambda: torch.ones(3)[torch.tensor([], dtype=torch.int64)],
    "index_fill from the end": lambda: torch.ones(3).index_fill(0, torch.tensor([-1]), 1.0),
    "of a 0-dim tensor": lambda: torch.ones(()).index_select(0, torch.tensor([0])),
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_out_of_range(name: str) -> None:
    with pytest.raises((IndexError, RuntimeError)) as real:
        OUT_OF_RANGE[name]()
    with FakeTensorMode(), pytest.raises(real.type, match="out of bounds"):
        OUT_OF_RANGE[name]()


@pytest.mark.parametrize("name", IN_RANGE)
def test_in_range(name: str) -> None:
    shape = IN_RANGE[name]().shape
    with FakeTensorMode():
        assert IN_RANGE[name]().shape == shape


def test_a_replayed_plan_is_checked() -> None:
    with FakeTensorMode():
        rows = torch.ones(3)
        assert rows[torch.tensor([2])].shape == (1,)
        with pytest.raises(DimensionError, match=r"index 3 is out of bounds for a dimension of size 3"):
            rows[torch.tensor([3])]


def test_indices_without_data_are_taken() -> None:
    with FakeTensorMode():
        assert torch.ones(3)[torch.randint(0, 9, (4,))].shape == (4,)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[torch.tensor([2])],
        lambda x: x[[0, 2]],
        lambda x: x[torch.tensor([-3])],
        lambda x: x.gather(0, torch.tensor([[2]])),
        lambda x: x.index_select(0, torch.tensor([2])),
        lambda x: functional.embedding(torch.tensor([2]), x),
    ],
)
def test_symbolic_sizes_get_a_guard(call: Callable[[torch.Tensor], Any]) -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.ones(4, 7), source="x")
    with mode:
        call(x)
    assert [guard.text for guard in env.guards] == ["x_0 >= 3"]


GUARDED: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "counted": (lambda x, y: x[torch.arange(3)], ["x_0 >= 3"]),
    "computed": (lambda x, y: x[torch.arange(2) + torch.ones(2, dtype=torch.int64)], ["x_0 >= 3"]),
    "filled": (lambda x, y: x.gather(0, torch.full((y.shape[0], 1), 3)), ["x_0 >= 4"]),
    "filled alike": (lambda x, y: x[torch.full_like(y, 3, dtype=torch.int64)], ["x_0 >= 4"]),
    "part of what is filled": (lambda x, y: x[y.new_full(y.shape, 3, dtype=torch.int64)[:1]], ["x_0 >= 4"]),
    "rows of another": (lambda x, y: x[torch.arange(y.shape[0])], ["x_0 >= y_0"]),
    "positions": (
        lambda x, y: functional.embedding(torch.arange(x.shape[0]), torch.ones(512, 2)),
        ["x_0 <= 512"],
    ),
    "positions of a batch": (
        lambda x, y: functional.embedding(
            torch.arange(x.shape[0])[None].expand(y.shape[0], -1), torch.ones(512, 2)
        ),
        ["x_0 <= 512"],
    ),
    "positions after others": (
        lambda x, y: functional.embedding(
            torch.arange(y.shape[0], x.shape[0] + y.shape[0]), torch.ones(512, 2)
        ),
        ["x_0 + y_0 <= 512"],
    ),
    "ignored classes": (lambda x, y: functional.cross_entropy(x, torch.full((x.shape[0],), -100)), []),
}


@pytest.mark.parametrize("name", GUARDED)
def test_indices_of_symbolic_size_get_a_guard(name: str) -> None:
    call, wanted = GUARDED[name]
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    x, y = (mode.from_tensor(torch.ones(size, 7), source=source) for source, size in (("x", 6), ("y", 5)))
    with mode:
        call(x, y[:, 0])
    assert [guard.text for guard in env.guards if "_0" in guard.text] == wanted


def test_bounds_end_with_a_write() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.ones(6, 7), source="x")
    with mode:
        index = torch.arange(x.shape[0])
        index.copy_(torch.randint(0, 2, (x.shape[0],)))
        functional.embedding(index, torch.ones(512, 2))
    assert not env.guards


def test_what_is_left_out_needs_no_guard() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x = mode.from_tensor(torch.ones(6, 7), source="x")
    with mode:
        functional.embedding(torch.arange(x.shape[0])[:2], torch.ones(512, 2))
    assert not env.guards


# --- values other than indices ------------------------------------------------------------------------------------

REFUSED: dict[str, Callable[[], Any]] = {
    "//": lambda: torch.ones(3, dtype=torch.int64) // torch.tensor([1, 0, 1]),
    "// of a number": lambda: 1 // torch.tensor([0]),
    "// in place": lambda: torch.ones(1, dtype=torch.int64).floor_divide_(torch.tensor([0])),
    "%": lambda: torch.tensor([1]) % torch.tensor([0]),
    "fmod": lambda: torch.fmod(torch.tensor([1]), torch.zeros(1, dtype=torch.int64)),
    "div": lambda: torch.div(torch.tensor([1]), torch.tensor([0]), rounding_mode="trunc"),
    "_assert_async": lambda: torch._assert_async(torch.arange(3).sum() > 5),
    "_assert_async with a message": lambda: torch._assert_async(torch.tensor(0), "never"),
    "multinomial": lambda: torch.multinomial(torch.zeros(2), 1),
    "bernoulli": lambda: torch.bernoulli(torch.full((2,), 2.0)),
    "bernoulli_": lambda: torch.randn(2).bernoulli_(torch.tensor(2.0)),
    "normal": lambda: torch.normal(torch.randn(1), torch.tensor([-1.0])),
    "poisson": lambda: torch.poisson(-torch.ones(2)),
    "binary_cross_entropy": lambda: functional.binary_cross_entropy(torch.tensor([2.0]), torch.rand(1)),
    "one_hot": lambda: functional.one_hot(torch.tensor([1, -1])),
    "inverse": lambda: torch.linalg.inv(torch.zeros(2, 2)),
    "cholesky": lambda: torch.linalg.cholesky(-torch.eye(2)),
    "solve": lambda: torch.linalg.solve(torch.zeros(2, 2), torch.ones(2)),
}
TAKEN: dict[str, Callable[[], Any]] = {
    "// of floats": lambda: torch.tensor([1.0]) // torch.tensor([0.0]),
    "/": lambda: torch.tensor([1]) / torch.tensor([0]),
    "//": lambda: torch.tensor([4]) // torch.tensor([2]),
    "// of nothing": lambda: torch.zeros(0, dtype=torch.int64) // 0,
    "% by what has no data": lambda: torch.tensor([1]) % torch.randint(1, 5, (1,)),
    "_assert_async": lambda: torch._assert_async(torch.tensor(1)) or torch.ones(1),
    "multinomial": lambda: torch.multinomial(torch.ones(2), 1),
    "inverse": lambda: torch.linalg.inv(torch.eye(2)),
    "without a sorter": lambda: torch.searchsorted(torch.randn(2), torch.randn(1)),
    "one_hot": lambda: functional.one_hot(torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_eager_refuses(name: str) -> None:
    with pytest.raises((IndexError, RuntimeError)) as real:
        REFUSED[name]()
    with FakeTensorMode(), pytest.raises(OperatorError) as ours:
        REFUSED[name]()
    assert isinstance(ours.value, real.type)
    assert "test_known_indices.py" in str(ours.value)


@pytest.mark.parametrize("name", TAKEN)
def test_values_that_eager_takes(name: str) -> None:
    real = TAKEN[name]()
    with FakeTensorMode():
        fake = TAKEN[name]()
    assert (fake.shape, fake.stride(), fake._version) == (real.shape, real.stride(), real._version)


def test_values_on_other_devices_are_not_tried() -> None:
    """A GPU divides without complaint."""
    with FakeTensorMode():
        assert (
            torch.ones(1, dtype=torch.int64, device="cuda")
            // torch.zeros(1, dtype=torch.int64, device="cuda")
        ).is_cuda


def test_refused_where_no_kernel_takes_the_layout() -> None:
    with FakeTensorMode(), pytest.raises(NotImplementedError, match="real tensors fail as well"):
        torch.ones(2).to_sparse().view(2)
