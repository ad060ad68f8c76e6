"""Upsampling to symbolic sizes.

The functions of `torch._C._nn` take the output's size, or factors. In C++ they work the size out in plain integers; here it
is worked out in symbols, and the operator below them, which takes symbols, is called with it.
"""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.fake.tensor import FakeTensor

aten = torch.ops.aten


def upsampled(name: str, args: Any, kwargs: Any) -> Any:
    """The call of such a function on a stand-in; NotImplemented if it is not in the form that takes factors."""
    with_corners = "nearest" not in name
    if kwargs or len(args) != 3 + with_corners:
        return NotImplemented
    if type(args[0]) is not FakeTensor and not _torch.is_functorch_wrapped(args[0]):
        return NotImplemented
    x, size, *corners, factors = args
    if not (factors is None or isinstance(factors, (list, tuple))):
        return NotImplemented
    if size is None and factors is not None:
        size = [
            torch.sym_int(torch.sym_float(length) * factor)
            for length, factor in zip(x.shape[2:], factors, strict=True)
        ]
    if size is None:
        return NotImplemented
    scales = factors if factors is not None else [None] * (x.ndim - 2)
    return getattr(aten, name).default(x, size, *corners, *scales)
