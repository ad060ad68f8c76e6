"""Public names that no longer have an effect. They are removed in the next release."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def run_every_layer() -> Iterator[None]:
    """Has no effect: `make_fx`, `export` and `capture_step` run every layer."""
    warnings.warn(
        "run_every_layer has no effect: every layer is run. It will be removed in the next release; delete the call",
        DeprecationWarning,
        stacklevel=3,
    )
    yield
