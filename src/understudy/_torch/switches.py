"""Switches of torch's own fake tensors: those of its configuration modules, and their environment variables.

The modules are not imported for this: where nothing else has loaded them, nobody has set a switch, and what counts is the
environment variable that they would read.
"""

from __future__ import annotations

import os
import sys
from typing import Any

FUNCTORCH, DYNAMO = "torch._functorch.config", "torch._dynamo.config"
SWITCHES: dict[str, tuple[str, str, str, Any]] = {
    "fake_tensor_propagate_real_tensors": (FUNCTORCH, "", "", False),
    "generate_fake_kernels_from_real_mismatches": (FUNCTORCH, "", "", False),
    "fake_tensor_allow_unsafe_data_ptr_access": (FUNCTORCH, "", "", True),
    "fake_tensor_allow_meta": (FUNCTORCH, "FAKE_ALLOW_META", "0", True),
    "fake_tensor_cache_enabled": (DYNAMO, "TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0", True),
    "fake_tensor_cache_crosscheck_enabled": (
        DYNAMO,
        "TORCH_FAKE_TENSOR_DISPATCH_CACHE_CROSSCHECK",
        "1",
        False,
    ),
}
"""Switch → its module, its environment variable, the value of that which turns it over, its default."""


def switch(name: str) -> Any:
    """The value of a switch."""
    module, variable, other, default = SWITCHES[name]
    config = sys.modules.get(module)
    if config is not None:
        return getattr(config, name, default)
    return default != (os.environ.get(variable) == other) if variable else default


def capture_traceback() -> Any:
    """The stack of the caller, which is formatted when it is shown."""
    from torch.utils._traceback import CapturedTraceback  # why: only for debugging

    return CapturedTraceback.extract(skip=2)


class FakeTensorConfig:
    """Switches for debugging. `debug`: each stand-in keeps the stack of the line that made it, as `_debug_trace`; initially
    what the environment variable TORCH_FAKE_TENSOR_DEBUG says."""

    debug = os.environ.get("TORCH_FAKE_TENSOR_DEBUG", "0") == "1"
