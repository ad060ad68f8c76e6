"""Settings for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import hypothesis
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Tests run in several processes on few cores: more threads would only take turns.
torch.set_num_threads(1)

# The same examples in every run: a test that passes here passes there.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    """No test may leave a mode, a default dtype or a gradient setting behind for the next one."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    left = _get_current_dispatch_mode_stack()
    assert not left, f"the test left modes active: {left}"
    assert torch.get_default_dtype() is dtype, "the test changed the default dtype"
    assert torch.is_grad_enabled() is grad, "the test changed whether gradients are recorded"
