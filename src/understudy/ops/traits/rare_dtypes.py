"""Dtypes with few CPU kernels: 8-bit floats and large unsigned integers."""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import DtypeError
from understudy.ops.registry import Trait, record_of
from understudy.ops.shared.dtypes import FLOAT8, UNSIGNED
from understudy.spec import TensorSpec
from understudy.spec.call import Call

RARE = FLOAT8 | UNSIGNED
on_float8: Trait[bool] = Trait("elementwise, and takes 8-bit floats", of_packets=True)
"""Beside those that `_is_taken` looks at more closely."""
on_float8.mark("abs", "clone", "conj_physical", "copy", "eq", "fill", "isfinite", "isnan", "ne", "positive", "where")

not_on_unsigned: Trait[bool] = Trait("elementwise, and refuses large unsigned integers", of_packets=True)
not_on_unsigned.mark(
    *"abs add addcmul bitwise_left_shift bitwise_not bitwise_right_shift clamp clamp_max clamp_min fmax fmin fmod gcd "
    "ge gt heaviside lcm le logical_and logical_not logical_or logical_xor lt max maximum min minimum neg relu remainder "
    "rsub sgn sign sub threshold threshold_backward __lshift__ __rshift__ __ilshift__".split()
)

not_made: Trait[frozenset[torch.dtype]] = Trait("dtypes that it refuses to make, or to write to", of_packets=True)
not_made.register(RARE, "arange", "linspace", "random", "bernoulli", "masked_fill")
not_made.register(FLOAT8, "rand", "randn", "randint", "uniform", "normal", "exponential")
not_made.register(UNSIGNED, "eye", "__irshift__")


def refuse_rare(call: Call) -> None:
    """Raise if eager has no CPU kernel for these dtypes. Other devices have kernels for other dtypes."""
    given = None
    for spec in call.inputs:
        if spec.dtype in RARE:
            given = spec
            break
    dtype = call.kwargs.get("dtype") if given is None else given.dtype
    if dtype not in RARE or _is_elsewhere(call, given):
        return
    name = call.op.overloadpacket.__name__
    name = name if name.endswith("__") else name.removesuffix("_")
    is_refused = name in not_made and dtype in not_made.by_name(name)
    record = record_of(call.op)
    if given is not None and record.is_pointwise and not record.is_composite:
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
        return name not in not_on_unsigned or _is_cast(given, call)
    if name == "mul":
        return len(call.inputs) == 2 and all(spec.shape for spec in call.inputs)
    if name == "isinf":
        return given.dtype is torch.float8_e5m2
    return name in on_float8


def _is_cast(given: TensorSpec, call: Call) -> bool:
    """Whether type promotion with another operand makes it a computation in another dtype."""
    if given.dtype in FLOAT8:
        return False
    values: list[Any] = [*call.args, *call.kwargs.values()]
    return any(spec.dtype is not given.dtype for spec in call.inputs) or any(
        isinstance(value, (float, complex)) for value in values
    )
