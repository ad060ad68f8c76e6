"""Composites of linear algebra on symbolic sizes: the operators of a real run, and no needless guards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from understudy import FakeTensorMode, ShapeEnv
from understudy.shapes.sizes import from_torch, hint_of


class Heard(TorchDispatchMode):
    """The operators that are called, with the shapes of what they give at the example's sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and func.name() != "aten::lift_fresh":
            self.calls.append((func.name(), [hint_of(from_torch(size)) for size in result.shape]))
        return result


def heard(program: Callable[..., Any], *inputs: Tensor) -> list[tuple[str, Any]]:
    with Heard() as listener:
        program(*inputs)
    return listener.calls


def on_symbols(program: Callable[..., Any], *reals: Tensor) -> tuple[ShapeEnv, Any]:
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env)
    inputs = [mode.from_tensor(real, source=name) for name, real in zip("xyzvw", reals, strict=False)]
    with mode:
        return env, program(*inputs)


def guards(program: Callable[..., Any], *shapes: tuple[int, ...]) -> list[str]:
    env, _ = on_symbols(program, *[torch.zeros(shape) for shape in shapes])
    return [str(guard.condition) for guard in env.guards]


def chain(*matrices: Tensor) -> Tensor:
    return torch.linalg.multi_dot(matrices)


@pytest.mark.parametrize("seed", range(12))
def test_chains_are_multiplied_in_the_same_order(seed: int) -> None:
    choose = random.Random(seed)
    sizes = [choose.randint(2, 9) for _ in range(choose.randint(4, 6))]
    reals = [torch.zeros(rows, columns) for rows, columns in itertools.pairwise(sizes)]
    _, calls = on_symbols(lambda *inputs: heard(chain, *inputs), *reals)
    assert calls == heard(chain, *reals)


def test_of_a_chain_only_what_is_multiplied_is_compared() -> None:
    """How the other parts would be split best makes no difference: that is the `min`."""
    found = guards(chain, (2, 3), (3, 4), (4, 5), (5, 6))
    assert found[:3] == ["x_1 == y_0", "y_1 == z_0", "z_1 == v_0"]
    assert len(found) == 6
    assert sum("min(" in guard for guard in found) == 1


def test_low_rank_is_no_more_than_either_size() -> None:
    with FakeTensorMode():
        assert torch.pca_lowrank(torch.zeros(9, 4))[0].shape == (9, 4)


@pytest.mark.parametrize(
    "program",
    [
        torch.linalg.matrix_rank,
        lambda x: torch.linalg.matrix_rank(x, atol=0.5),
        lambda x: torch.linalg.matrix_rank(x, atol=torch.tensor(0.5)),
        lambda x: torch.linalg.matrix_rank(x.mT @ x, hermitian=True),
        torch.linalg.pinv,
        lambda x: torch.linalg.pinv(x, atol=0.5),
    ],
)
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 5)])
def test_tolerances(program: Callable[[Tensor], Any], shape: tuple[int, ...]) -> None:
    env, calls = on_symbols(lambda x: heard(program, x), torch.zeros(shape))
    assert calls == heard(program, torch.zeros(shape))
    assert env.guards == []


def test_known_matrices_that_are_singular_are_refused() -> None:
    with FakeTensorMode():
        assert torch.linalg.inv(2 * torch.eye(2)).tolist() == [[0.5, 0], [0, 0.5]]
        with pytest.raises(torch.linalg.LinAlgError, match="the matrix is singular"):
            torch.linalg.inv(torch.zeros(2, 2))
