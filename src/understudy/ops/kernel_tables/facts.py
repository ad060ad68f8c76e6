"""Facts in which the kernels of torch's releases differ, each found by calling a kernel. Read by `table.holds`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten: Any = torch.ops.aten
Fact = Callable[[], bool]


def find_facts() -> dict[str, bool]:
    """All facts about the installed torch."""
    with torch.no_grad():
        return {name: find() for name, find in FACTS.items()}


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def _is_accepted(call: Callable[[], object]) -> Fact:
    def find() -> bool:
        try:
            call()
        except (RuntimeError, IndexError):
            return False
        return True

    return find


def _pad_to_nothing(name: str) -> Fact:
    dims = int(name[-2])
    return _is_accepted(
        lambda: getattr(aten, name).default(_zeros(1, *[4] * dims), [-2, -2, *[0, 0] * (dims - 1)])
    )


def _makes_absent_gradients() -> object:
    x, statistics = (_zeros(1, 2, 2), _zeros(1, 2, 2)), (_zeros(1, 1), _zeros(1, 1))
    return aten.native_group_norm_backward.default(*x, *statistics, None, 1, 2, 2, 1, [True, True, True])


PADDINGS = tuple(f"{kind}_pad{dims}d" for kind in ("reflection", "replication") for dims in (1, 2, 3))
BICUBIC = 2
FACTS: dict[str, Fact] = {
    # torch 2.13 raises for tensors that are neither contiguous nor channels-last
    "group_norm_takes_any_strides": _is_accepted(
        lambda: aten.native_group_norm.default(_zeros(1, 2, 2).mT, None, None, 1, 2, 2, 1, 1e-5)
    ),
    # gradients of weight and bias although the weight is None; torch 2.13 raises
    "group_norm_makes_absent_gradients": _is_accepted(_makes_absent_gradients),
    # torch 2.13 has bicubic sampling for images, not for volumes
    "grid_sampler_takes_bicubic_volumes": _is_accepted(
        lambda: aten.grid_sampler_3d.default(_zeros(1, 1, 1, 1, 1), _zeros(1, 1, 1, 1, 3), BICUBIC, 0, True)
    ),
    # for int64, arange truncates its arguments before it counts the steps; torch 2.14 does not
    "arange_truncates_to_int64": lambda: aten.arange.default(1.5, dtype=torch.int64).numel() == 1,
    # 2.0**63, the maximum of int64 as a float, can be stored in int64; torch 2.14 raises
    "int64_takes_float_of_its_maximum": _is_accepted(
        lambda: aten.full.default([1], 2.0**63, dtype=torch.int64)
    ),
    # integers can be clamped by bounds beyond their range; torch 2.13 raises
    "clamp_saturates": _is_accepted(lambda: aten.clamp.default(torch.zeros(1, dtype=torch.uint8), -1, 256)),
    # a biased linear layer restores the batch dimensions by `view`; torch 2.15 uses `_unsafe_view`
    "linear_gives_view": lambda: bool(
        aten.linear.default(_zeros(1, 1, 1), _zeros(1, 1), _zeros(1))._is_view()
    ),
    # torch 2.13 and 2.14 raise
    "fourier_takes_empty": _is_accepted(
        lambda: aten._fft_c2c.default(torch.zeros(0, 2, dtype=torch.complex64), [1], 0, True)
    ),
    # torch 2.13 does not check the dimension of empty tensors
    "cummax_takes_any_dim_of_empty": _is_accepted(lambda: aten.cummax.default(_zeros(0), 1)),
    # negative paddings of a dimension as large as its size; torch 2.14 raises for some of them, 2.15 for all
    **{f"{name}_may_leave_nothing": _pad_to_nothing(name) for name in PADDINGS},
}
