"""Chunks of several tensors, put together chunk by chunk: what sharded parameters are gathered with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import ShapeMismatch
from understudy.rules.layouts import is_surely_row_major
from understudy.rules.registry import rule
from understudy.shapes.sizes import surely_equal
from understudy.spec import TensorSpec, contiguous_strides, product, same_shape
from understudy.spec.strides import CHANNELS_LAST_ORDER
from understudy.spec.tensor_spec import Size


@rule("_chunk_cat")
def chunk_cat(tensors: Sequence[TensorSpec], dim: int, num_chunks: int) -> Any:
    """Each tensor is filled up to whole chunks. For plain sizes, and where layouts matter, torch's own steps answer.

    These ask whether anything is to be filled up; the shape is the same in both cases.
    """
    if not any(spec.is_symbolic for spec in tensors):
        return NotImplemented
    first = tensors[0]
    is_plain = num_chunks >= 1 and all((spec.dtype, spec.device) == (first.dtype, first.device) for spec in tensors)
    if dim < 0 and all(spec.ndim == first.ndim for spec in tensors):
        dim += first.ndim
    if not is_plain or dim < 0 or any(dim >= spec.ndim for spec in tensors):
        return NotImplemented
    width: Any = 0
    for spec in tensors:
        if spec.is_empty:
            raise ShapeMismatch(f"_chunk_cat: {spec} has no elements")
        if not same_shape(spec.shape[:dim], first.shape[:dim]):
            raise ShapeMismatch(f"_chunk_cat: {first} and {spec} differ before dimension {dim}")
        chunk = (spec.shape[dim] + num_chunks - 1) // num_chunks * product(spec.shape[dim + 1 :])
        if not _goes_row_major(spec, (*spec.shape[:dim], num_chunks, chunk)):
            return NotImplemented
        width = width + chunk
    return first.like((*first.shape[:dim], num_chunks, width))


def _goes_row_major(spec: TensorSpec, shape: Size) -> bool:
    """Whether a tensor, cut into chunks of this shape, can't be taken for one in a channels-last format."""
    if len(shape) not in CHANNELS_LAST_ORDER:
        return True
    is_contiguous = all(map(surely_equal, spec.stride, contiguous_strides(spec.shape)))
    return is_contiguous and is_surely_row_major(spec.like(shape))
