"""A hint for errors about sizes, where the sizes of a module are divided by ranks.

    describe_sharding(error)    "Block at model.py:12 is sharded over tp (3): …", "" where nothing is sharded

Tensor parallelism gives each rank a part of the heads or of the vocabulary. A size that can't be divided is found later, as
a shape that does not fit, in code that does not know of ranks.
"""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Any

from torch import nn

from understudy.lines import short_path

WORDS = ("shape", "size", "divi", "split", "view", "dimension", "broadcast")
"""Words in messages about sizes."""
MOST_NAMES = 3


def describe_sharding(error: BaseException) -> str:
    """The sharding of the innermost module of the program with sharded parameters."""
    package = sys.modules.get("torch.distributed.tensor")
    if package is None or not any(word in str(error).lower() for word in WORDS):
        return ""
    found = ""
    step: TracebackType | None = error.__traceback__
    while step is not None:
        module = _find_module(step.tb_frame)
        if module is not None:
            place = (
                f"{type(module).__name__} at {short_path(step.tb_frame.f_code.co_filename)}:{step.tb_lineno}"
            )
            found = _describe(module, place, package.DTensor) or found
        step = step.tb_next
    return found


def _find_module(frame: FrameType) -> nn.Module | None:
    """Whose method this is, if it is of the program."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    owner = frame.f_locals.get(names[0]) if names else None
    is_own = isinstance(owner, nn.Module) and not type(owner).__module__.startswith("torch.")
    return owner if is_own and not frame.f_globals.get("__name__", "").startswith("torch.") else None


def _describe(module: nn.Module, place: str, dtensor: Any) -> str:
    dims: dict[str, int] = {}
    uneven: list[str] = []
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, dtensor):
            continue
        spec: Any = parameter
        mesh = spec.device_mesh
        names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
        for number, placement in enumerate(spec.placements):
            if placement.is_shard() and mesh.size(number) > 1:
                size, ways = int(parameter.shape[placement.dim]), mesh.size(number)
                dims[names[number]] = ways
                if size % ways:
                    uneven.append(f"{name} has {size} in dimension {placement.dim}")
    if not dims:
        return ""
    over = " x ".join(f"{name} ({ways})" for name, ways in dims.items())
    if uneven:
        shown = ", ".join(uneven[:MOST_NAMES])
        return f"{place} is sharded over {over}, but {shown}, which can't be divided evenly"
    return f"{place} is sharded over {over}: heads, batch size and vocabulary size must be divisible by it"
