"""Padding by symbolic numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from understudy import FakeTensorMode, ShapeEnv


def test_cropping_by_a_number_that_may_be_0_decides_nothing() -> None:
    """`1 - n` is at most 0: whether it is 0 depends on data, and does not matter."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        n = env.create_unbacked_symint(low=1, high=4)
        cropped: Any = F.pad(torch.ones(4, 6), (0, 0, 0, 1 - n))
        assert str(cropped.spec) == "f32[5 - u0, 6]@cpu"
    assert not env.guards and not env.runtime_asserts
