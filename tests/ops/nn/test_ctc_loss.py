"""Of lengths and targets that do not fit the scores, stand-ins are refused as real tensors are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from understudy import FakeTensorMode, ShapeEnv
from understudy.errors import UnderstudyError

SCORES, TARGETS = torch.zeros(6, 2, 5), torch.ones(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("in_tensors", [False, True])
@pytest.mark.parametrize(
    ("targets", "of_inputs", "of_targets", "message"),
    [
        (TARGETS, [6], [3, 2], "expected 2 input lengths and 2 target lengths"),
        (TARGETS, [6, 6], [3, 2, 1], "expected 2 input lengths and 2 target lengths"),
        (TARGETS, [6, 7], [3, 2], "expected input lengths from 0 to 6"),
        (TARGETS, [6, 6], [3, -1], "target lengths of at least 0"),
        (TARGETS, [6, 6], [4, 2], "expected 2 targets of up to 4 classes"),
        (TARGETS.reshape(-1), [6, 6], [3, 2], "expected targets of 5 classes in all"),
    ],
)
def test_refused(
    targets: Any, of_inputs: list[int], of_targets: list[int], message: str, in_tensors: bool
) -> None:
    def loss(scores: Any, targets: Any) -> Any:
        lengths = (torch.tensor(each) if in_tensors else each for each in (of_inputs, of_targets))
        return torch.ctc_loss(scores, targets, *lengths)

    with pytest.raises(RuntimeError):
        loss(SCORES, targets)
    with FakeTensorMode() as mode, pytest.raises(UnderstudyError, match=message):
        loss(mode.from_tensor(SCORES), mode.from_tensor(targets))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_lengths_on_the_cpu(reduction: str) -> None:
    with FakeTensorMode():
        scores = torch.randn(6, 2, 5, device="cuda", requires_grad=True)
        lengths = torch.tensor([6, 5]), torch.tensor([3, 2])
        losses = torch.nn.functional.ctc_loss(
            scores, torch.ones(2, 3, device="cuda").long(), *lengths, reduction=reduction
        )
        losses.sum().backward()
    assert (
        losses.shape == ((2,) if reduction == "none" else ())
        and losses.device == scores.grad.device == scores.device
    )


def test_guards() -> None:
    env = ShapeEnv(duck_shape=False)
    with FakeTensorMode(shape_env=env) as mode:
        scores, targets = mode.from_tensor(SCORES, source="x"), mode.from_tensor(TARGETS, source="t")
        torch.ctc_loss(scores, targets, [5, 4], [3, 2])
    assert sorted(str(guard.condition) for guard in env.guards) == [
        "t_0 == 2",
        "t_1 >= 3",
        "x_0 >= 5",
        "x_1 == 2",
    ]
