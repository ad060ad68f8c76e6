"""Devices that are not here.

A stand-in for a CPU tensor is a CPU tensor to C++. For any other device, C++ must not know its name: it would ask
for device guards and allocators that a build without that device does not have. An index of the meta device
stands for it instead: `meta:1` may be `cuda:0`, `meta:2` `cuda:3`, `meta:3` `xpu:0`. C++ carries the index along
(composite operators pass it on to the factories that they call), and the Python side translates both ways.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.errors import UnsupportedFakeTensorException
from understudy.spec import TensorSpec

CPU = torch.device("cpu")
META = torch.device("meta")
WITHOUT_INDEX = frozenset({"cpu", "meta"})
MOST = 126
_lock = threading.Lock()
on_first_device: list[Callable[[], object]] = []
"""Called when a device that is not here is first named: what such devices need is set up then, not at import."""
_native: dict[torch.device, torch.device] = {CPU: CPU, META: META}
_canonical: dict[torch.device, torch.device] = {CPU: CPU, META: META, torch.device("cpu:0"): CPU}


def canonical(device: torch.device) -> torch.device:
    """The device that is meant: with its index, and with stand-ins translated back."""
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
"""The index of the selected device of each type, where it is not 0."""


def current_index(device_type: str) -> int:
    """The index of a device that was named without one."""
    return current_indices.get(device_type, 0)


def native(device: torch.device) -> torch.device:
    """The device by which C++ knows this one."""
    found = _native.get(device)
    if found is not None:
        return found
    device = canonical(device)
    if device in _native:
        return _native[device]
    with _lock:
        if device not in _native:
            index = len(_native) - 1
            if index > MOST:
                raise UnsupportedFakeTensorException(f"more than {MOST} devices in one process, {device} the last")
            stand_in = torch.device("meta", index)
            for announce in on_first_device:
                announce()  # first: another thread that finds the device may use it at once
            _canonical[stand_in] = _torch.stand_in_devices[stand_in] = device
            _native[device] = stand_in
    return _native[device]


def prepare(spec: TensorSpec) -> tuple[object, ...]:
    """The arguments that make a wrapper for this spec, kept with the spec."""
    device = native(spec.device)
    arguments: tuple[Any, ...] = (spec.shape, spec.stride, spec.offset, None, spec.dtype, torch.strided, device)
    if spec.device.type not in WITHOUT_INDEX:
        arguments = (*arguments, False, False, None, False, False, _torch.STAND_IN_KEYS)
    spec.prepared = arguments
    return arguments
