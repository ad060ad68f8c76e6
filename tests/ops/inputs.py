"""Real tensors for the tests of rules: one shape in many layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that are small and valid for every dtype."""
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count) % 5).to(dtype).reshape(shape)


def layouts(*shape: int, dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """The shape contiguous, transposed, sliced with an offset, with steps, expanded and channels-last."""
    yield filled(shape, dtype)
    if not shape:
        yield filled((3,), dtype)[1]
        return
    yield filled(shape[::-1], dtype).permute(*range(len(shape) - 1, -1, -1))
    yield filled((shape[0] + 2, *shape[1:]), dtype)[1:-1]
    yield filled((*shape[:-1], shape[-1] * 2 + 1), dtype)[..., 1::2]
    yield filled((1, *shape[1:]), dtype).expand(shape)
    yield filled((*shape[:-1], 1), dtype).expand(shape)
    if len(shape) > 2:
        yield filled((shape[1], shape[0], *shape[2:]), dtype).transpose(0, 1)
    if len(shape) == 4:
        yield filled(shape, dtype).to(memory_format=torch.channels_last)


SHAPES: list[tuple[int, ...]] = [
    (),
    (0,),
    (1,),
    (5,),
    (3, 4),
    (1, 4),
    (0, 3),
    (2, 3, 4),
    (2, 1, 3),
    (2, 3, 4, 5),
    (2, 1, 3, 1),
]


def all_layouts(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> Iterator[torch.Tensor]:
    for shape in shapes:
        yield from layouts(*shape, dtype=dtype)
