"""Zeros that C++ knows to be zeros: forward-mode gradients of what does not vary."""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.fake.handlers import handles
from understudy.fake.known import Filled, Known
from understudy.fake.native import canonical
from understudy.fake.realise import make_new, make_zeros
from understudy.shapes.sizes import from_torch
from understudy.spec import TensorSpec


class KnownZeros(Known):
    """Of a tensor without memory: what is viewed of it is such a one again."""

    __slots__ = ()
    is_zeros = True


@handles("aten::_efficientzerotensor")
def zero_tensor(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Where sizes are symbols, C++ would fix them for such a tensor. Inside of torch.func.jvp ordinary zeros serve as well;
    outside, C++ may take them for a number, whose value it reads.

    Answered here at any rate: a plan would be found by modes of the other kind.
    """
    spec = TensorSpec(
        tuple([from_torch(size) for size in args[0]]),
        dtype=kwargs.get("dtype") or torch.get_default_dtype(),
        device=canonical(kwargs.get("device") or torch.get_default_device()),
    )
    has_symbols = mode.shape_env is not None and not mode.static_shapes
    if spec.is_symbolic or (has_symbols and _torch.is_inside_jvp()):
        return make_new(mode, spec)
    return make_zeros(mode, spec, KnownZeros(Filled(spec, 0)))
