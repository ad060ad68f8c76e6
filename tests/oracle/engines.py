"""The engines that can be put to the test: ours, and torch's own for comparison."""

from __future__ import annotations

import os
from typing import Any

NAMES = ("understudy", "torch")

# The tests can be turned on torch's engine as well: that shows what they are worth, and where it stands.
UNDER_TEST = os.environ.get("ORACLE_ENGINE", "understudy")

DATA_DEPENDENT = ("DataDependentOutputException", "DynamicOutputShapeException")


def new_mode(engine: str, **options: Any) -> Any:
    """A fresh mode of an engine."""
    return mode_class(engine)(**options)


def mode_class(engine: str) -> Any:
    # Imported here so that one engine can be used where the other one is broken or absent.
    if engine == "understudy":
        from understudy import FakeTensorMode as Ours

        return Ours
    if engine == "torch":
        from torch._subclasses.fake_tensor import FakeTensorMode as Theirs

        return Theirs
    raise ValueError(f"no engine {engine!r}; there are {NAMES}")


def is_data_dependent(error: BaseException) -> bool:
    """Whether an exception says, in either engine's words, that the answer lies in the data."""
    seen: BaseException | None = error
    while seen is not None:
        if any(base.__name__ in DATA_DEPENDENT for base in type(seen).__mro__):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
