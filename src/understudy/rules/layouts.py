"""The memory format that eager takes a tensor to have, from its strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.shapes.sizes import surely_equal, surely_less
from understudy.spec import TensorSpec, channels_last_strides, contiguous_strides
from understudy.spec.strides import CHANNELS_LAST_ORDER

CHANNELS_LAST_OF = {4: torch.channels_last, 5: torch.channels_last_3d}


def looks_channels_last(spec: TensorSpec) -> bool:
    """Whether eager takes the strides for a channels-last format; where they leave it open, it does not."""
    order = CHANNELS_LAST_ORDER.get(spec.ndim)
    if order is None or (spec.is_symbolic and is_surely_row_major(spec)):
        return False
    if _is_surely_other(spec, order) or spec.stride[1] == 0:
        return False
    ends = _ends(spec, order)
    for dim, least in zip(order, ends, strict=False):
        if spec.shape[dim] == 0 or spec.stride[dim] < least:
            return False
        if dim == 0 and least == spec.stride[1]:
            # All sizes but the first are 1, and their strides say nothing.
            return False
    return True


def is_surely_row_major(spec: TensorSpec) -> bool:
    """Whether the strides are those of a fresh tensor, whatever the symbols are. No guard comes of asking.

    Such a tensor is never taken for channels-last: its last dimension lies within the channels, or all sizes but the first
    are 1, and then eager decides against it.
    """
    return all(map(surely_equal, spec.stride, contiguous_strides(spec.shape)))


def _is_surely_other(spec: TensorSpec, order: Sequence[int]) -> bool:
    """Whether a dimension lies within one that would have to be faster."""
    ends = _ends(spec, order)
    return any(surely_less(spec.stride[dim], least) for dim, least in zip(order, ends, strict=False))


def _ends(spec: TensorSpec, order: Sequence[int]) -> list[Any]:
    """For each dimension, the stride that it has at least after those that are faster."""
    return [0, *(spec.shape[dim] * spec.stride[dim] for dim in order)]


def suggested_format(spec: TensorSpec) -> torch.memory_format:
    return CHANNELS_LAST_OF[spec.ndim] if looks_channels_last(spec) else torch.contiguous_format


def suggested_strides(shape: Sequence[Any], model: TensorSpec) -> tuple[Any, ...]:
    """Strides for a new tensor of `shape` in the format that `model` seems to have."""
    if len(shape) == model.ndim and looks_channels_last(model):
        return channels_last_strides(shape)
    return contiguous_strides(shape)
