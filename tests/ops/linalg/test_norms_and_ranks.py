"""Linear algebra on stand-ins that real runs decide by values."""

from __future__ import annotations

import pytest
import torch

from understudy import FakeTensorMode


def test_low_rank_is_no_more_than_either_size() -> None:
    with FakeTensorMode():
        assert torch.pca_lowrank(torch.zeros(9, 4))[0].shape == (9, 4)


def test_known_matrices_that_are_singular_are_refused() -> None:
    with FakeTensorMode():
        assert torch.linalg.inv(2 * torch.eye(2)).tolist() == [[0.5, 0], [0, 0.5]]
        with pytest.raises(torch.linalg.LinAlgError, match="the matrix is singular"):
            torch.linalg.inv(torch.zeros(2, 2))
