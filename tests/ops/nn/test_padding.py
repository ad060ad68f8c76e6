"""Padding by symbolic numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from understudy import Dim, FakeTensorMode, ShapeEnv


def test_cropping_by_a_size_needs_no_guard() -> None:
    """`1 - n` is at most 0, and it does not matter whether it is 0."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    x: Any = mode.from_tensor(torch.ones(4, 6), source="x", symbolic_context=(Dim("n", min=1), "static"))
    with mode:
        assert str(F.pad(x, (0, 0, 0, 1 - x.shape[0])).spec) == "f32[1, 6]@cpu"
    assert not env.guards
