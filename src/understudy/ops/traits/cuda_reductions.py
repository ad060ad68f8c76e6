"""How CUDA's reductions (`sum`, `mean`, `max`, norms) spread over threads and blocks, and what the blocks tell each other.

Where several blocks compute one result, a staging buffer has their partial results, and a semaphore for each result's
blocks says which of them is the last. As in `Reduce.cuh` of torch 2.13, from the input's layout and the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from understudy.spec import TensorSpec
from understudy.spec.device_facts import DeviceFacts
from understudy.spec.strides import sort_where_decided

WARP = 32
MOST_THREADS = 512
LEAST_VALUES, MOST_VALUES = 16, 256
"""For each thread."""


class ReducedDim(NamedTuple):
    """A dimension of the iteration: its size, the strides of the input and of the result. The latter is 0 if reduced."""

    size: int
    stride: int
    result_stride: int


def reduction_sizes(x: TensorSpec, kept: Sequence[int], element: int, facts: DeviceFacts) -> tuple[int, ...]:
    """Bytes of the staging buffer and of the semaphores; nothing where one block is enough for a result.

    `kept` are the dimensions that stay, `element` is the size of a partial result. How many neighbours a thread reads at
    once does not matter: rows for which it changes the block are too short for several blocks."""
    dims = coalesce(sort(_dims_of(x, kept)))
    inner = [dim for dim in dims if not dim.result_stride]
    outer = [dim for dim in dims if dim.result_stride]
    inputs, outputs = (prod(dim.size for dim in part) for part in (inner, outer))
    if inputs <= 1 or not outputs:
        return ()
    is_along_fastest = not outer or inner[0].stride < outer[0].stride
    width, height = (inputs, outputs) if is_along_fastest else (outputs, inputs)
    results_at_once = 1
    if not is_along_fastest and outer[0].stride == 1:
        results_at_once = _count_results_at_once(x, inner, outer)
        width //= results_at_once
    most = (256 if x.dtype is torch.complex128 else MOST_THREADS) // results_at_once
    block_width, block_height = _block(width, height, most)
    step_input, step_output = (block_width, 1) if is_along_fastest else (1, block_width)
    if _divide_up(inputs, step_input) < min(block_height * LEAST_VALUES, MOST_VALUES):
        return ()  # each row of threads has a result of its own
    values = _divide_up(inputs, step_input * block_height)
    grid = _divide_up(outputs // results_at_once, step_output)
    target = facts.multiprocessors * (facts.threads_per_multiprocessor // (block_width * block_height))
    if values < MOST_VALUES or grid > target:
        return ()
    blocks = max(
        min(_divide_up(target, grid), _divide_up(values, LEAST_VALUES)), _divide_up(values, MOST_VALUES)
    )
    if blocks <= 1:
        return ()
    buffer = element * outputs * blocks * (1 if is_along_fastest else block_width * results_at_once)
    return buffer, 4 * grid


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _last_power_of_two(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Threads along the fastest dimension, and across it."""
    across, down = (min(_last_power_of_two(size), most) for size in (width, height))
    block_height = min(down, most // min(across, WARP))
    return min(across, most // block_height), block_height


def _dims_of(x: TensorSpec, kept: Sequence[int]) -> list[ReducedDim]:
    """From the last dimension to the first, with a contiguous result."""
    shape, stride, _ = x.numbers
    dims: list[ReducedDim] = []
    step = 1
    for dim in reversed(range(x.ndim)):
        dims.append(ReducedDim(shape[dim], stride[dim], step if dim in kept else 0))
        step *= shape[dim] if dim in kept else 1
    return dims


def sort(dims: Sequence[ReducedDim]) -> list[ReducedDim]:
    """Reduced dimensions first; then by the strides of the result, and of the input where these leave it open."""
    return sort_where_decided(dims, _compare)


def _compare(one: ReducedDim, other: ReducedDim) -> int:
    """Positive if the second goes before the first."""
    if (one.result_stride == 0) != (other.result_stride == 0):
        return 1 if other.result_stride == 0 else -1
    for first, second in ((one.result_stride, other.result_stride), (one.stride, other.stride)):
        if first == 0 or second == 0:
            continue
        if first != second:
            return 1 if first > second else -1
        if one.size > other.size:
            return 1
    return 0


def coalesce(dims: Sequence[ReducedDim]) -> list[ReducedDim]:
    """Neighbours that are one in memory, of the input and of the result, are one."""
    joined: list[ReducedDim] = []
    for dim in dims:
        if not joined:
            joined.append(dim)
            continue
        last = joined[-1]
        follows = last.size * last.stride == dim.stride and last.size * last.result_stride == dim.result_stride
        if last.size == 1:
            joined[-1] = dim
        elif dim.size == 1:
            continue
        elif follows:
            joined[-1] = ReducedDim(last.size * dim.size, last.stride, last.result_stride)
        else:
            joined.append(dim)
    return joined


def _count_results_at_once(x: TensorSpec, inner: Sequence[ReducedDim], outer: Sequence[ReducedDim]) -> int:
    """How many neighbouring results a thread computes: a power of two up to 4 that divides sizes and strides."""
    count = 4
    for number in (x.offset, outer[0].size, *(dim.stride for dim in (*inner, *outer[1:]))):
        while number % count:
            count //= 2
    return count
