"""accelerate_export: `torch.export.export` and `torch.onnx.export` on our capture, for code that calls them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from understudy.exporting.program import export
from understudy.patching import ACCELERATION, active, patch

ACCELERATED: ContextVar[bool] = ContextVar("accelerated", default=False)


class AccelerationWarning(UserWarning):
    """An export that took torch's own path."""


@contextmanager
def accelerate_export() -> Iterator[None]:
    """Inside, in this thread, `torch.export.export` captures with understudy; and so does `torch.onnx.export`, which calls it.

    A program that can't be exported so is exported by torch, with an `AccelerationWarning` that says why.
    """
    token = ACCELERATED.set(True)
    try:
        with active(ACCELERATION):
            yield
    finally:
        ACCELERATED.reset(token)


@patch("torch.export.export", during=ACCELERATION)
def capture_quickly(original: Callable[..., Any]) -> Callable[..., Any]:
    """The export that was asked for, from our capture; where that fails, from torch's."""

    @functools.wraps(original)
    def accelerated(mod: torch.nn.Module, args: Any, kwargs: Any = None, **options: Any) -> Any:
        if not ACCELERATED.get() or options.get("strict"):
            return original(mod, args, kwargs, **options)
        token = ACCELERATED.set(False)
        try:
            return export(mod, args, kwargs, guard_zero_one=False, **options)
        except Exception as error:  # whatever it is, torch may still be able to export the program
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"accelerate_export: torch's own export is used, because {type(error).__name__}: {reason}",
                AccelerationWarning, stacklevel=2,
            )  # fmt: skip
            return original(mod, args, kwargs, **options)
        finally:
            ACCELERATED.reset(token)

    return accelerated
