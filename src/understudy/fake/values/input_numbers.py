"""Inputs that are one number in a tensor: in a mode with a `ShapeEnv`, `.item()` of them is a backed symbol.

    t = mode.from_tensor(torch.tensor(5), source="t")
    if t.item() > 3: …          guard: t.item() > 3

The value of the example is the hint, and decisions on it are guards, as decisions on sizes are. A write to the tensor ends
that: later reads depend on data. Not in modes made for export, where no guard could be checked.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from understudy import _torch
from understudy.shapes.input_dims import SizeSource, name_of
from understudy.shapes.torch_api.names import DimDynamic

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode
    from understudy.fake.tensor import FakeTensor

CLASSES = (torch.Tensor, torch.nn.Parameter)


def make_symbol_of_number(mode: FakeTensorMode, real: torch.Tensor, fake: FakeTensor, source: object) -> None:
    """Store a symbol as the result of `.item()` of an input. Only for the two dtypes of Python's numbers: smaller ones
    overflow, or round."""
    is_plain = type(real) in CLASSES and real.device.type == "cpu" and not real.dim()
    if not is_plain or real.dtype not in (torch.int64, torch.float64):
        return
    with _torch.no_modes():
        value = real.item()
    if not math.isfinite(value):
        return
    env, name = mode.shape_env, name_of(source)
    where = SizeSource(name, "item", 0, name)
    number = env.create_unspecified_symbol(value, where, DimDynamic.DYNAMIC)
    env.inputs.add_item(name, number)
    fake.item_memo = number.symbolic
