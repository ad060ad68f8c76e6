"""Differences of kernels between releases of torch. Each is found by calling the kernel, once, not by the release number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

CHECKPOINT_GENERATOR = "torch.utils.checkpoint._checkpoint_without_reentrant_generator"
"""What surrounds the function of a checkpoint; since torch 2.14 under another name."""
if hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator_impl"):
    CHECKPOINT_GENERATOR += "_impl"

_Answer = TypeVar("_Answer")
_aten = torch.ops.aten


@functools.cache
def group_norm_takes_any_strides() -> bool:
    """The kernel of torch 2.13 raises for tensors that are neither contiguous nor channels-last."""
    return _is_taken(lambda: _aten.native_group_norm.default(_zeros(1, 2, 2).mT, None, None, 1, 2, 2, 1, 1e-5))


@functools.cache
def group_norm_makes_absent_gradients() -> bool:
    """Whether gradients of weight and bias are computed although there is no weight; torch 2.13 raises."""
    x, statistics = (1, 2, 2), (1, 1)
    return _is_taken(
        lambda: _aten.native_group_norm_backward.default(
            _zeros(*x), _zeros(*x), _zeros(*statistics), _zeros(*statistics), None, 1, 2, 2, 1, [True, True, True]
        )
    )


@functools.cache
def grid_sampler_takes_bicubic_volumes() -> bool:
    """Torch 2.13 has bicubic sampling for images, not for volumes."""
    bicubic = 2
    return _is_taken(
        lambda: _aten.grid_sampler_3d.default(_zeros(1, 1, 1, 1, 1), _zeros(1, 1, 1, 1, 3), bicubic, 0, True)
    )


@functools.cache
def cummax_takes_any_dim_of_empty() -> bool:
    """Torch 2.13 does not check the dimension of empty tensors."""
    return _is_taken(lambda: _aten.cummax.default(_zeros(0), 1))


@functools.cache
def arange_truncates_to_int64() -> bool:
    """Whether arange truncates its arguments for int64 before it counts the steps; torch 2.14 does not."""
    return _run_in_plain_thread(lambda: _aten.arange.default(1.5, dtype=torch.int64).numel()) == 1


@functools.cache
def int64_takes_float_of_its_maximum() -> bool:
    """Whether 2.0**63, the maximum of int64 as a float, can be stored in int64; torch 2.14 raises."""
    return _is_taken(lambda: _aten.full.default([1], 2.0**63, dtype=torch.int64))


@functools.cache
def clamp_saturates() -> bool:
    """Whether integers can be clamped by bounds beyond their range; torch 2.13 raises."""
    return _is_taken(lambda: _aten.clamp.default(torch.zeros(1, dtype=torch.uint8), -1, 256))


@functools.cache
def polar_takes_half() -> bool:
    """Torch 2.13 accepts only float32 and float64."""
    return _is_taken(lambda: _aten.polar.default(_zeros(1).half(), _zeros(1).half()))


@functools.cache
def linear_gives_view() -> bool:
    """Whether a biased linear layer restores the batch dimensions by `view`; torch 2.15 uses `_unsafe_view`."""
    return _run_in_plain_thread(lambda: _aten.linear.default(_zeros(1, 1, 1), _zeros(1, 1), _zeros(1))._is_view())


@functools.cache
def fourier_takes_empty() -> bool:
    """The kernels of torch 2.13 and 2.14 raise for empty tensors."""
    return _is_taken(lambda: _aten._fft_c2c.default(torch.zeros(0, 2, dtype=torch.complex64), [1], 0, True))


@functools.cache
def scatter_takes_unsigned() -> bool:
    """Whether a number can be scattered into uint16, uint32 and uint64; torch 2.13 raises."""
    index = torch.zeros(1, dtype=torch.int64)
    return _is_taken(lambda: _aten.scatter.value(torch.zeros(1, dtype=torch.uint64), 0, index, 1))


@functools.cache
def padding_may_leave_nothing_of_a_dim(name: str, dims: int) -> bool:
    """Whether `reflection_pad2d` and its like take negative paddings of a dimension as large as its size; torch 2.14
    raises for some of them, 2.15 for all."""
    pad = getattr(_aten, name).default
    return _is_taken(lambda: pad(_zeros(1, *[4] * dims), [-2, -2, *[0, 0] * (dims - 1)]))


@functools.cache
def combinations_are_indexed() -> bool:
    """Whether `torch.combinations` selects elements by index; torch 2.13 uses masks over a grid."""
    return "aten::index.Tensor" in _operators_of(lambda: torch.combinations(_zeros(2)))


@functools.cache
def cumprod_backward_scatters() -> bool:
    """Whether the first zero of a line is found by scatter; torch 2.14 uses a comparison."""

    def run() -> None:
        _aten.cumprod_backward.default(_zeros(1, 2), _zeros(1, 2), 1, _zeros(1, 2))

    return "aten::scatter_.value" in _operators_of(run)


def _operators_of(call: Callable[[], object]) -> list[str]:
    """The inner operators of a composite, without gradients."""

    class OperatorCollector(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(op.name())
            return op(*args, **(kwargs or {}))

    def listen() -> None:
        with torch.no_grad(), OperatorCollector():
            call()

    heard: list[str] = []
    _run_in_plain_thread(listen)
    return heard


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def _is_taken(call: Callable[[], object]) -> bool:
    try:
        _run_in_plain_thread(call)
    except (RuntimeError, IndexError):
        return False
    return True


def _run_in_plain_thread(ask: Callable[[], _Answer]) -> _Answer:
    """Run a function in a new thread, in which neither modes nor transforms are active. Its tensors have to be made
    there, too."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()
