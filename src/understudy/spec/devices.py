"""Which device the result of an operator call is on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from understudy.spec.tensor_spec import TensorSpec

CPU = torch.device("cpu")


def common_device(operands: Iterable[Any]) -> torch.device:
    """The device of the first spec that is no 0-dim CPU tensor; CPU if there is none.

    Anything that is no spec (numbers, None) has no say. That the devices go together was checked before.
    """
    for operand in operands:
        if isinstance(operand, TensorSpec) and (operand.shape or operand.device.type != "cpu"):
            return operand.device
    return CPU
