"""Zeros that C++ knows to be zeros: forward-mode gradients of what does not vary."""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.fake.handlers import handles
from understudy.fake.native import WITHOUT_INDEX, canonical, prepare
from understudy.fake.tensor import FakeTensor
from understudy.spec import TensorSpec


@handles("aten::_efficientzerotensor")
def zero_tensor(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """With the bit by which C++ leaves out operators on such tensors, before anybody asks for their data."""
    (shape,) = args
    if any(type(size) is not int for size in shape):
        return NotImplemented
    spec = TensorSpec(
        tuple(shape),
        dtype=kwargs.get("dtype") or torch.get_default_dtype(),
        device=canonical(kwargs.get("device") or torch.get_default_device()),
    )
    keys = _torch.ZERO_TENSOR_KEYS
    if spec.device.type not in WITHOUT_INDEX:
        keys = keys | _torch.STAND_IN_KEYS
    options = prepare(spec)[:7]
    fake: FakeTensor = _torch.make_wrapper(FakeTensor, *options, False, False, None, False, False, keys)
    fake._spec = spec
    fake.fake_mode = mode
    return fake
