"""A sweep over the model classes of `transformers`: `python -m tests.exporting.sweep [names]` prints a line for each.

Each class runs in a process of its own, forked from one that has imported the libraries.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.exporting.models import small_model
from tests.exporting.test_models import SIZES, differences, export_small, fixed_of, inputs_of, what_varies
from tests.forks import prepare_forks, run_in_fork

WIDEST = 30_000_000
"""Parameters of the largest model that is tried."""
SECONDS = 300


@dataclass
class Result:
    """`ok`, or what went wrong. Torch's export takes longer than ours: it is asked where ours is not right."""

    ours: str
    torch: str = ""


def sweep(names: Iterable[str]) -> dict[str, Result]:
    list(try_model("bert"))  # imports what every class needs
    prepare_forks()
    results = {}
    for name in names:
        pieces, ending = run_in_fork(partial(try_model, name), SECONDS)
        if pieces:
            _, ours, torchs = (*pieces, ending, ending)[:3]
            results[name] = Result(ours, torchs)
            print(name, results[name], flush=True)
    return results


def try_model(name: str) -> Iterator[str]:
    """That eager runs it, what we say, and if that is not `ok`, what torch says. Nothing of a model that can't be made small,
    or does not run on these inputs."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                count = sum(p.numel() for p in small_model(name).parameters())
            if count > WIDEST:
                return
            model: Any = small_model(name)
            for size in SIZES:
                model(**inputs_of(model, *size))
        except Exception:  # not one of those that are counted
            return
        yield "eager"
        yield (ours := try_ours(model))
        if ours != "ok":
            yield try_torch(model)


def try_ours(model: Any) -> str:
    try:
        program, fixed = export_small(model)
        program.validate()
        difference = differences(model, program.module(), fixed)
        return "ok" if difference <= 1e-6 else f"differs by {difference}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def try_torch(model: Any) -> str:
    inputs, fixed = inputs_of(model, *SIZES[0]), fixed_of(model)
    try:
        program = torch.export.export(
            model, (), {**inputs, **fixed}, dynamic_shapes=what_varies(model), strict=False
        )
        return "ok" if differences(model, program.module(), fixed) <= 1e-6 else "differs"
    except Exception as error:
        return type(error).__name__


if __name__ == "__main__":
    from tests.exporting.test_models import sweep_types

    sweep(sys.argv[1:] or sweep_types())
