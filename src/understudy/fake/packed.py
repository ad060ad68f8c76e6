"""Packed sequences, unpacked.

C++ writes the lengths into a tensor that it has just made, past every dispatch; inside a mode, that tensor has no data.
So the same steps are taken here, as operators.
"""

from __future__ import annotations

from typing import Any

import torch


def pad_packed(
    data: torch.Tensor, counts: list[int], batch_first: bool, value: Any, total_length: int
) -> Any:
    """`counts` says, for each step, how many sequences are as long as that."""
    steps = max(total_length, len(counts))
    if 0 < total_length < len(counts):
        raise ValueError(f"total_length is {total_length}, but the longest sequence has {len(counts)} steps")
    padded = data.new_full((steps, counts[0], *data.shape[1:]), value)
    row = first = 0
    for step, count in enumerate(counts):
        # Steps of the same number of sequences are copied together.
        if step + 1 == len(counts) or counts[step + 1] != count:
            together = step + 1 - first
            block = data[row : row + together * count].view(together, count, *data.shape[1:])
            padded[first : step + 1, :count].copy_(block)
            row, first = row + together * count, step + 1
    lengths = torch.tensor([sum(count > sequence for count in counts) for sequence in range(counts[0])])
    return (padded.transpose(0, 1) if batch_first else padded), lengths
