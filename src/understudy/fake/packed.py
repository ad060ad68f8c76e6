"""Packed sequences, unpacked, and sequences, padded to the longest one.

C++ writes the lengths into a tensor that it has just made, past every dispatch; inside a mode, that tensor has no data.
And it takes the lengths of sequences for plain numbers. So the same steps are taken here, as operators.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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


def pad_sequence(
    sequences: Sequence[torch.Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> torch.Tensor:
    if not sequences:
        raise RuntimeError("received an empty list of sequences")
    if padding_side not in ("left", "right"):
        raise RuntimeError(f"Expected padding_side to be one of left or right, but got {padding_side}.")
    first = sequences[0]
    longest = functools.reduce(torch.sym_max, (sequence.shape[0] for sequence in sequences))
    outer = (len(sequences), longest) if batch_first else (longest, len(sequences))
    padded = first.new_full((*outer, *first.shape[1:]), padding_value)
    for number, sequence in enumerate(sequences):
        length = sequence.shape[0]
        row = padded.select(0 if batch_first else 1, number)
        (row[:length] if padding_side == "right" else row[longest - length :]).copy_(sequence)
    return padded
