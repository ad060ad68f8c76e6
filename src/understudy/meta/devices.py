"""DeviceOf: the device of a traced value. It is a device to torch, and `x.device` in the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node


class DeviceOf(str):
    """The device of a value: a str, which torch accepts as a device; as an argument of a node, it is `node`."""

    node: Node
    device: torch.device | None
    """None if the metadata of the value is unknown."""

    # Programs check `isinstance(x.device, torch.device)`; torch's C++ uses the type only.
    def _claimed_class(self) -> Any:
        return torch.device

    __class__ = property(_claimed_class)

    @property
    def known_device(self) -> torch.device:
        if self.device is None:
            raise AttributeError(
                f"the device of {self.node.name} is unknown; give an example of the argument in meta_args"
            )
        return self.device

    @property
    def type(self) -> str:
        return self.known_device.type

    @property
    def index(self) -> Any:
        return self.known_device.index

    def __eq__(self, other: object) -> bool:
        return self.known_device == (other.known_device if type(other) is DeviceOf else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.device)

    def __reduce_ex__(self, protocol: object) -> Any:
        return torch.device, (str(self.known_device),)

    def __enter__(self) -> Any:
        return self.known_device.__enter__()

    def __exit__(self, *error: object) -> Any:
        return self.known_device.__exit__(*error)


def make_device(node: Node, device: torch.device | None) -> DeviceOf:
    """The value of a node that is a device."""
    made = DeviceOf("meta" if device is None else device)
    made.node, made.device = node, device
    return made
