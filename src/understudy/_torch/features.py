"""What kernels do in one release of torch and not in another: the kernel is asked, once, not the number of the release."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_Answer = TypeVar("_Answer")
_aten = torch.ops.aten


@functools.cache
def group_norm_takes_any_strides() -> bool:
    """The kernel of torch 2.13 refuses what is neither contiguous nor channels-last."""
    return _is_taken(lambda: _aten.native_group_norm.default(_zeros(1, 2, 2).mT, None, None, 1, 2, 2, 1, 1e-5))


@functools.cache
def group_norm_makes_absent_gradients() -> bool:
    """Whether gradients of weight and bias are made though there is no weight; torch 2.13 refuses to."""
    x, statistics = (1, 2, 2), (1, 1)
    return _is_taken(
        lambda: _aten.native_group_norm_backward.default(
            _zeros(*x), _zeros(*x), _zeros(*statistics), _zeros(*statistics), None, 1, 2, 2, 1, [True, True, True]
        )
    )


@functools.cache
def grid_sampler_takes_bicubic_volumes() -> bool:
    """Torch 2.13 samples images bicubically, and volumes not."""
    bicubic = 2
    return _is_taken(
        lambda: _aten.grid_sampler_3d.default(_zeros(1, 1, 1, 1, 1), _zeros(1, 1, 1, 1, 3), bicubic, 0, True)
    )


@functools.cache
def cummax_takes_any_dim_of_empty() -> bool:
    """Torch 2.13 does not look at the dimension if there are no elements."""
    return _is_taken(lambda: _aten.cummax.default(_zeros(0), 1))


@functools.cache
def arange_truncates_to_int64() -> bool:
    """Whether fractions are cut off before the steps of a range of int64 are counted; torch 2.14 counts as elsewhere."""
    return _ask_eager(lambda: _aten.arange.default(1.5, dtype=torch.int64).numel()) == 1


@functools.cache
def int64_takes_float_of_its_maximum() -> bool:
    """The maximum of int64, as a float, is one more than it; torch 2.14 refuses to store that."""
    return _is_taken(lambda: _aten.full.default([1], 2.0**63, dtype=torch.int64))


@functools.cache
def clamp_saturates() -> bool:
    """Whether integers are clamped by bounds beyond their range, as if by its ends; torch 2.13 can't store such a bound."""
    return _is_taken(lambda: _aten.clamp.default(torch.zeros(1, dtype=torch.uint8), -1, 256))


@functools.cache
def polar_takes_half() -> bool:
    """Torch 2.13 makes complex numbers of angles in float32 and float64 only."""
    return _is_taken(lambda: _aten.polar.default(_zeros(1).half(), _zeros(1).half()))


@functools.cache
def linear_gives_view() -> bool:
    """Whether C++ makes the rows that a biased linear layer has multiplied as one matrix a batch again by `view`; torch 2.15
    does it by `_unsafe_view`."""
    return _ask_eager(lambda: _aten.linear.default(_zeros(1, 1, 1), _zeros(1, 1), _zeros(1))._is_view())


@functools.cache
def fourier_takes_empty() -> bool:
    """The kernels of torch 2.13 and 2.14 refuse tensors without elements."""
    return _is_taken(lambda: _aten._fft_c2c.default(torch.zeros(0, 2, dtype=torch.complex64), [1], 0, True))


@functools.cache
def combinations_are_indexed() -> bool:
    """Whether `torch.combinations` takes elements by their places; in torch 2.13, by masks over a grid of all."""
    return "aten::index.Tensor" in _operators_of(lambda: torch.combinations(_zeros(2)))


@functools.cache
def cumprod_backward_scatters() -> bool:
    """Whether the first zero of a line is marked by a write to its place; torch 2.14 compares."""

    def run() -> None:
        _aten.cumprod_backward.default(_zeros(1, 2), _zeros(1, 2), 1, _zeros(1, 2))

    return "aten::scatter_.value" in _operators_of(run)


def _operators_of(call: Callable[[], object]) -> list[str]:
    """The operators that a composite one is made of, where no gradients are recorded."""

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            heard.append(op.name())
            return op(*args, **(kwargs or {}))

    def listen() -> None:
        with torch.no_grad(), Listener():
            call()

    heard: list[str] = []
    _ask_eager(listen)
    return heard


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def _is_taken(call: Callable[[], object]) -> bool:
    try:
        _ask_eager(call)
    except (RuntimeError, IndexError):
        return False
    return True


def _ask_eager(ask: Callable[[], _Answer]) -> _Answer:
    """In a thread of its own, where neither modes nor transforms are active. Its tensors have to be made there, too."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(ask).result()
