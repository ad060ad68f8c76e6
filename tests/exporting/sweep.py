"""A sweep over the model classes of `transformers`: `python -m tests.exporting.sweep [names]` prints a line for each."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tests.exporting.models import small_model
from tests.exporting.test_models import SIZES, differences, export_small, fixed_of, inputs_of, what_varies

WIDEST = 30_000_000
"""Parameters of the largest model that is tried."""


@dataclass
class Result:
    """`ok`, or what went wrong."""

    ours: str
    torch: str
    seconds: float


def sweep(names: Iterable[str], with_torch: bool) -> dict[str, Result]:
    results = {}
    for name in names:
        result = try_model(name, with_torch)
        if result is not None:
            results[name] = result
            print(name, result, flush=True)
    return results


def try_model(name: str, with_torch: bool) -> Result | None:
    """None for a model that can't be made small, or does not run on these inputs."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in small_model(name).parameters())
            if count > WIDEST:
                return None
            model: Any = small_model(name)
            for size in SIZES:
                model(**inputs_of(model, *size))
        except Exception:  # not one of those that are counted
            return None
        start = time.process_time()
        try:
            program, fixed = export_small(model)
            seconds = time.process_time() - start
            program.validate()
            difference = differences(model, program.module(), fixed)
            ours = "ok" if difference <= 1e-6 else f"differs by {difference}"
        except Exception as error:
            seconds = time.process_time() - start
            ours = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Result(ours, try_torch(model) if with_torch else "", seconds)


def try_torch(model: Any) -> str:
    inputs, fixed = inputs_of(model, *SIZES[0]), fixed_of(model)
    try:
        program = torch.export.export(model, (), {**inputs, **fixed}, dynamic_shapes=what_varies(model), strict=False)
        return "ok" if differences(model, program.module(), fixed) <= 1e-6 else "differs"
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    from tests.exporting.test_models import sweep_types

    sweep(sys.argv[1:] or sweep_types(), with_torch=False)
