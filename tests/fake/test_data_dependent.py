"""Data-dependent operators whose results have symbols as sizes, and the calls of them that eager refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from understudy import FakeTensorMode, ShapeEnv, statically_known_true
from understudy.errors import ShapeMismatch, UnderstudyError


def test_rows_without_elements_are_not_compared() -> None:
    real = torch.zeros(3, 0)
    with pytest.raises(RuntimeError, match="0 sized dimensions"):
        torch.unique(real, dim=0)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake: Any = mode.from_tensor(real, static_shapes=True)
    with mode:
        with pytest.raises(
            ShapeMismatch, match=r"unique_dim.*: expected slices with elements, got f32\[3, 0\]"
        ):
            torch.unique(fake, dim=0)
        columns, everything = torch.unique(fake, dim=1), torch.unique(fake)
    assert columns.shape == torch.unique(real, dim=1).shape
    assert everything.ndim == 1


def test_lengths_without_data() -> None:
    """The table of the backward pass has 2n + 1 columns, n being the longest target: a symbol."""
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        fakes = [
            mode.from_tensor(real, static_shapes=True)
            for real in (torch.zeros(6, 2, 5), torch.ones(2, 3, dtype=torch.int64))
        ]
        lengths = [torch.randint(4, 7, (2,)), torch.randint(1, 4, (2,))]
        losses, table = torch._ctc_loss(*fakes, *lengths)
        assert losses.shape == (2,) and table.shape[:2] == (2, 6)
        columns = table.shape[2]
        assert isinstance(columns, torch.SymInt) and str(columns) == "u0"
        assert statically_known_true(columns >= 1) and statically_known_true(columns <= 7)
        assert not statically_known_true(columns <= 6) and not statically_known_true(columns >= 2)
        with pytest.raises(UnderstudyError, match="expected one length for each entry of the batch"):
            torch._ctc_loss(*fakes, lengths[0], lengths[1][:1])
    assert not env.guards
