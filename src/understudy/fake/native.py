"""Devices that this machine lacks.

A stand-in for a CPU tensor is a CPU tensor to C++. For any other device, C++ must not see its type: it would ask for
device guards and allocators that a build without that device does not have. An index of the meta device stands for it
instead: `meta:1` may be `cuda:0`, `meta:2` `cuda:3`, `meta:3` `xpu:0`. C++ carries the index along
(composite operators pass it on to the factories that they call), and the Python side translates both ways.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.errors import UnsupportedFakeTensorException
from understudy.spec import TensorSpec, contiguous_strides

if TYPE_CHECKING:
    pass

CPU = torch.device("cpu")
META = torch.device("meta")
WITHOUT_INDEX = frozenset({"cpu", "meta"})
MOST_DEVICES = 126
_lock = threading.Lock()
on_first_device: list[Callable[[], object]] = []
"""Called when a device that this machine lacks is first named, to set up what such devices need."""
on_first_recipe: list[Callable[[], object]] = []
"""Called before the first stand-in that carries the key of recipes is made."""
is_grad_enabled, in_inference_mode = torch.is_grad_enabled, torch.is_inference_mode_enabled
_native: dict[torch.device, torch.device] = {CPU: CPU, META: META}
_canonical: dict[torch.device, torch.device] = {CPU: CPU, META: META, torch.device("cpu:0"): CPU}


def canonical(device: torch.device) -> torch.device:
    """The device with its index; an index of the meta device is translated back to the device that it stands for."""
    found = _canonical.get(device)
    if found is None:
        if device.type in WITHOUT_INDEX:
            return torch.device(device.type)
        index = device.index if device.index is not None else current_index(device.type)
        found = torch.device(device.type, index)
        if device.index is not None:
            _canonical[device] = found
    return found


current_indices: dict[str, int] = {}
"""The index of the current device of each type, where it is not 0."""


def current_index(device_type: str) -> int:
    """The index of the current device of a type."""
    return current_indices.get(device_type, 0)


def native(device: torch.device) -> torch.device:
    """The device that stands for this one in C++."""
    found = _native.get(device)
    if found is not None:
        return found
    device = canonical(device)
    if device in _native:
        return _native[device]
    with _lock:
        if device not in _native:
            index = len(_native) - 1
            if index > MOST_DEVICES:
                raise UnsupportedFakeTensorException(
                    f"expected at most {MOST_DEVICES} devices in one process, got one more: {device}"
                )
            stand_in = torch.device("meta", index)
            for announce in on_first_device:
                announce()  # before publishing it: another thread may use it at once
            _canonical[stand_in] = _torch.stand_in_devices[stand_in] = device
            _native[device] = stand_in
    return _native[device]


def prepare(spec: TensorSpec) -> tuple[object, ...]:
    """The arguments that make a wrapper for this spec, memoised on the spec as `prepared`.

    `prepared_no_grad` are those where no gradient is recorded: the wrapper carries a dispatch key on which composite
    operators are remembered (`fake/kernels/recipes.py`). Where gradients are recorded, each operator has to be dispatched,
    and without the key C++ does not ask. Only stand-ins with plain sizes and three dimensions or more carry it, as
    activations have: most of those that a backward pass or an optimizer makes have fewer.
    """
    device = native(spec.device)
    stride: Any = spec.stride
    offset: Any = spec.offset
    if not spec.is_symbolic and offset == 0:
        # Row-major strides and no offset are what C++ assumes. Reading them would take it a third of its time.
        offset = None
        stride = None if stride == contiguous_strides(spec.shape) else stride
    arguments: tuple[Any, ...] = (spec.shape, stride, offset, None, spec.dtype, torch.strided, device)
    is_native = spec.device.type in WITHOUT_INDEX
    if len(spec.shape) >= 3 and spec.dtype.is_floating_point and not spec.is_symbolic:
        keys = _torch.STATIC_KEYS if is_native else _torch.STATIC_KEYS | _torch.STAND_IN_KEYS
        spec.prepared_no_grad = (*arguments, False, False, None, False, False, keys)
        while on_first_recipe:
            on_first_recipe.pop()()
    if not is_native:
        arguments = (*arguments, False, False, None, False, False, _torch.STAND_IN_KEYS)
    spec.prepared = arguments
    return arguments
