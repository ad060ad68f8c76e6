"""Stand-ins indexed by symbolic numbers: of sizes, and of data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from understudy import FakeTensorMode, ShapeEnv, make_fx

MASK = torch.tensor([True, False, True])
INDICES: list[Any] = [
    lambda n: n, lambda n: (n,), lambda n: (n, 0), lambda n: (n, slice(1, 3)), lambda n: (0, n), lambda n: (slice(None), n),
    lambda n: (..., n), lambda n: (n, ..., 1), lambda n: (..., n, 1), lambda n: (None, n), lambda n: (slice(0, 2), None, n),
    lambda n: (n, n), lambda n: (n, n - 1, n), lambda n: (n, [0, 1]), lambda n: ([0, 2], n), lambda n: (True, n),
    lambda n: (n, torch.tensor([0, 1])), lambda n: -n, lambda n: (MASK, n),
]  # fmt: skip


def check_at_other_numbers(program: Any, mode: str) -> None:
    """The graph of one number gives what the program gives, for this number and for another."""
    x = torch.randn(3, 3, 3, 3)
    gm = make_fx(program, tracing_mode=mode, _allow_non_fake_inputs=True)(x, torch.tensor(2))
    for count in (1, 2):
        given = x, torch.tensor(count)
        for found, expected in zip(gm(*given), program(*given), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_reads_and_writes_by_a_number_of_data(index: Any, mode: str) -> None:
    def program(x: torch.Tensor, count: torch.Tensor) -> Any:
        n = count.item()
        torch._check(n >= 1)
        torch._check(n < 3)
        y = x.clone()
        y[index(n)] = 7.0
        return x[index(n)], y

    check_at_other_numbers(program, mode)


@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_reads_and_writes_by_a_tensor_of_one_number(index: Any, mode: str) -> None:
    def program(x: torch.Tensor, count: torch.Tensor) -> Any:
        y = x.clone()
        y[index(count)] = 7.0
        return x[index(count)], y

    check_at_other_numbers(program, mode)


def test_a_size_is_not_fixed_by_indexing_with_it() -> None:
    gm = make_fx(lambda x: x[x.shape[0] - 1], tracing_mode="symbolic")(torch.randn(5, 3))
    assert not gm.shape_env.specialisations
    x = torch.randn(8, 4)
    assert torch.equal(gm(x), x[7])


def test_a_number_that_may_be_too_large_is_expected_not_to_be() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x, n = mode.from_tensor(torch.randn(4, 3)), mode.from_tensor(torch.tensor(2))
    with mode:
        assert x[n.item()].dim() == 1
    assert len(env.runtime_asserts) >= 1


def test_other_indices_are_as_ever() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    x = mode.from_tensor(torch.randn(4, 3))
    with mode:
        assert x[1].shape == (3,)
        assert x[:, None, -1].shape == (4, 1)
        with pytest.raises(IndexError):
            x[4]


def test_what_was_checked_makes_sizes_short() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x, n = mode.from_tensor(torch.randn(4, 3), source="x"), mode.from_tensor(torch.tensor(2))
    with mode:
        k = n.item()
        torch._check(k >= 0)
        torch._check(k < x.shape[0])
        assert [str(part.shape[0]) for part in (x[:k], x[k:], x[k : k + 1])] == ["u0", "x_0 - u0", "1"]
