"""Dtypes that are for storing numbers, 8-bit floats and large unsigned integers: the CPU computes little with them."""

from __future__ import annotations

from typing import Any

import torch

from understudy import _torch
from understudy.errors import DtypeError
from understudy.ops.shared.dtypes import FLOAT8, UNSIGNED
from understudy.spec import TensorSpec
from understudy.spec.call import Call

RARE = FLOAT8 | UNSIGNED
ELEMENTWISE_ON_FLOAT8 = frozenset("abs clone conj_physical copy eq fill isfinite isnan ne positive where".split())
"""The elementwise operators that take them, beside those that `_is_taken` looks at more closely."""
NOT_ON_UNSIGNED = frozenset(
    "abs add addcmul bitwise_left_shift bitwise_not bitwise_right_shift clamp clamp_max clamp_min fmax fmin fmod gcd ge gt "
    "heaviside lcm le logical_and logical_not logical_or logical_xor lt max maximum min minimum neg relu remainder "
    "rsub sgn sign sub threshold threshold_backward".split()
)
"""The elementwise operators that refuse them."""
NOT_MADE = {
    **dict.fromkeys(("arange", "linspace", "random", "bernoulli"), RARE),
    **dict.fromkeys(("rand", "randn", "randint", "uniform", "normal", "exponential"), FLOAT8),
    "eye": UNSIGNED,
    "masked_fill": RARE,
}
"""Other operators that refuse to make them, or to write to them."""


def refuse_rare(call: Call) -> None:
    """Refuse what eager has no CPU kernel for. Other devices have kernels for other dtypes."""
    given = next((spec for spec in call.inputs if spec.dtype in RARE), None)
    dtype = call.kwargs.get("dtype") if given is None else given.dtype
    if dtype not in RARE or _is_elsewhere(call, given):
        return
    name = call.op.overloadpacket.__name__.removesuffix("_")
    is_refused = dtype in NOT_MADE.get(name, ())
    if given is not None and torch.Tag.pointwise in call.op.tags and not _torch.has_composite_kernel(call.op):
        is_refused = is_refused or not _is_taken(name, given, call)
    if is_refused:
        raise DtypeError(f"{name}: not implemented on CPU for {dtype}")


def _is_elsewhere(call: Call, given: TensorSpec | None) -> bool:
    device = call.kwargs.get("device") if given is None else given.device
    return device is not None and device.type != "cpu"


def _is_taken(name: str, given: TensorSpec, call: Call) -> bool:
    if name == "pow":
        return any(type(number) in (int, float) and number in (0, 1) for number in call.args[:2]) or _is_cast(given, call)
    if given.dtype in UNSIGNED:
        return name not in NOT_ON_UNSIGNED or _is_cast(given, call)
    if name == "mul":
        return len(call.inputs) == 2 and all(spec.shape for spec in call.inputs)
    if name == "isinf":
        return given.dtype is torch.float8_e5m2
    return name in ELEMENTWISE_ON_FLOAT8


def _is_cast(given: TensorSpec, call: Call) -> bool:
    """Whether an operand of another kind makes it a computation in another dtype."""
    if given.dtype in FLOAT8:
        return False
    values: list[Any] = [*call.args, *call.kwargs.values()]
    return any(spec.dtype is not given.dtype for spec in call.inputs) or any(
        isinstance(value, (float, complex)) for value in values
    )
