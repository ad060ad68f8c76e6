"""A second way to know: what training needs at least, by formula. It does not use the allocations that were measured.

    least_bytes([optimizer])      {device: bytes} of parameters, their gradients, and the optimizer state that has begun

All of these are alive together at the end of a step, so no true peak is below their sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor

STATE_TENSORS: dict[type, Callable[[Mapping[str, Any]], int]] = {
    torch.optim.SGD: lambda group: int(bool(group["momentum"])),
    torch.optim.Adam: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.AdamW: lambda group: 2 + bool(group["amsgrad"]),
    torch.optim.NAdam: lambda group: 2,
    torch.optim.RAdam: lambda group: 2,
    torch.optim.Adamax: lambda group: 2,
    torch.optim.Adagrad: lambda group: 1,
    torch.optim.Adadelta: lambda group: 2,
    torch.optim.RMSprop: lambda group: 1 + bool(group["momentum"]) + bool(group["centered"]),
}
"""Tensors of a parameter's shape that a step leaves behind. Other optimizers, and subclasses, count as having none."""


def least_bytes(optimizers: Iterable[Any]) -> dict[torch.device, int]:
    """`optimizers`: those that have just stepped, and those whose parameters are held."""
    tensors: dict[int, tuple[torch.device, int]] = {}
    states: dict[torch.device, int] = defaultdict(int)
    seen: set[int] = set()
    for optimizer in optimizers:
        count = STATE_TENSORS.get(type(optimizer))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in seen or not _is_plain(parameter):
                    continue
                seen.add(id(parameter))
                size = _add_storage(tensors, parameter)
                gradient = parameter.grad
                if gradient is not None and _is_plain(gradient):
                    _add_storage(tensors, gradient)
                    if count is not None and optimizer.state.get(parameter):
                        states[parameter.device] += count(group) * size
    for device, size in tensors.values():
        states[device] += size
    return dict(states)


def _is_plain(tensor: Any) -> bool:
    """Parts of a tensor that is spread over devices, and sparse ones, have other sizes than their shapes say."""
    return tensor.layout is torch.strided and (type(tensor) is FakeTensor or not hasattr(tensor, "to_local"))


def _add_storage(tensors: dict[int, tuple[torch.device, int]], tensor: torch.Tensor) -> int:
    """Tensors that share memory count once. Returns the size of this one."""
    storage, device = _torch.native_storage(tensor), tensor.device
    own = min(tensor.nbytes, storage.nbytes())
    _, size = tensors.get(storage._cdata, (device, 0))
    tensors[storage._cdata] = device, max(size, own)
    return own
