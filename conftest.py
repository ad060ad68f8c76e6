"""Settings for all tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

BFLOAT_PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); torch.addmm(a, a, a)"


def limit_instructions_if_needed() -> None:
    """Some virtual machines show AMX and do not grant it: there, products of bfloat16 matrices end the process. Try one in a
    child process, and limit oneDNN's instructions if it dies. Workers of pytest-xdist inherit the answer."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ or os.environ.get("UNDERSTUDY_TESTS_PROBED"):
        return
    os.environ["UNDERSTUDY_TESTS_PROBED"] = "1"
    if subprocess.run([sys.executable, "-c", BFLOAT_PRODUCT], capture_output=True).returncode < 0:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"


limit_instructions_if_needed()  # before torch is imported

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack  # noqa: E402

from understudy.patching import ENGINE, SCOPES  # noqa: E402

# Tests run in several processes on few cores: more threads would only take turns.
torch.set_num_threads(1)

# The same examples in every run: a test that passes here passes there.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    """No test may leave a mode, a patch of torch, a default dtype or a gradient setting behind for the next one."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    yield
    left = _get_current_dispatch_mode_stack()
    assert not left, f"the test left modes active: {left}"
    if ENGINE.active:
        gc.collect()  # an exception that a test keeps holds the frames of its modes
    scopes = [scope.name for scope in SCOPES if scope.bit & ENGINE.active]
    assert not ENGINE.active, f"the test left torch patched: {scopes}"
    assert torch.get_default_dtype() is dtype, "the test changed the default dtype"
    assert torch.is_grad_enabled() is grad, "the test changed whether gradients are recorded"
