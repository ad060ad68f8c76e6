"""`torch.linspace` with a symbol for the number of points, which C++ takes for a plain number: the same by operators."""

from __future__ import annotations

from typing import Any

import torch

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def spaced(
    start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **options: Any
) -> Any:  # fmt: skip
    """From `start` up to the middle, and from `end` down to it, as the kernel counts: both ends are exact."""
    are_numbers = isinstance(start, NUMBERS) and isinstance(end, NUMBERS)
    if not are_numbers or options.get("out") is not None:
        return NotImplemented
    dtype = torch.get_default_dtype() if dtype is None else dtype
    counted = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
    places = torch.arange(steps, dtype=torch.int64, **options)
    step = (end - start) / torch.sym_max(steps - 1, 1)
    rising = places.to(counted) * step + start
    falling = (places - (steps - 1)).to(counted) * step + end
    values = torch.where(places < torch.sym_max(steps // 2, 1), rising, falling).to(dtype)
    return values.requires_grad_() if requires_grad else values
