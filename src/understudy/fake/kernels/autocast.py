"""Autocast on devices that this machine lacks.

C++ selects autocast kernels by the native device of a tensor, and a stand-in for `cuda:0` is natively a meta tensor. So
stand-ins carry the autocast dispatch key of a backend without users, `AutocastIPU`, on which the kernels of this file
are registered. They ask torch whether autocast is enabled for the device that the stand-in reports, cast the arguments
as torch documents for that operator, and redispatch below the key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.native import on_first_device
from understudy.fake.tensor import FakeTensor
from understudy.ops.registry import record_of
from understudy.ops.traits.autocast import WITHOUT_AUTOCAST, Casting, accelerator_path, casting
from understudy.spec.call import flat, map_structure

_LOW = (torch.float16, torch.bfloat16)
_libraries: list[Any] = []
_registering = threading.Lock()
_casts = threading.local()


def register_kernels() -> None:
    """Called once, when a device that this machine lacks is first named."""
    with _registering:
        if not _libraries:
            _libraries.extend(_torch.kernel_libraries(_torch.SPARE_AUTOCAST))
            for name in dict.fromkeys([*casting, *accelerator_path]):
                _libraries[0].impl(name, _make_kernel(_torch.operator_named(name)))


Policy = Callable[[Any, str, Any, Any], tuple[Any, Any]]


def _make_kernel(op: Any) -> Callable[..., Any]:
    record = record_of(op)
    path, how = record.accelerator_path, record.casting
    policy = _leave_arguments if how is None else POLICIES[how]

    def kernel(*args: object, **kwargs: object) -> Any:
        device_type = _casting_device(args, kwargs)
        with _torch.below(_torch.SPARE_AUTOCAST_KEYS):
            if device_type is not None:
                args, kwargs = policy(op, device_type, args, kwargs)
            answer = NotImplemented if path is None else path(*args, **kwargs)
            return op(*args, **kwargs) if answer is NotImplemented else answer

    return kernel


def _casting_device(args: Any, kwargs: Any) -> str | None:
    """The device type for which autocast is on, if these tensors are on such a device."""
    for tensor in flat(torch.Tensor, args, kwargs):
        device_type = _torch.inner_device(tensor).type
        if device_type not in ("cpu", "meta"):
            is_on = device_type not in WITHOUT_AUTOCAST and torch.is_autocast_enabled(device_type)
            return device_type if is_on else None
    return None


def _cast_to_lower(op: object, device_type: str, args: object, kwargs: object) -> tuple[Any, Any]:
    dtype = torch.get_autocast_dtype(device_type)
    return _cast_all(args, kwargs, dtype)


def _cast_to_float32(op: object, device_type: str, args: object, kwargs: object) -> tuple[Any, Any]:
    return _cast_all(args, kwargs, torch.float32)


def _request_float32(op: object, device_type: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """For operators with a `dtype` argument: they compute in float32 without a copy of their input."""
    if args[0].dtype in _LOW and kwargs.get("dtype") is None:
        return _set_dtype_argument(op, args, kwargs)
    return args, kwargs


def _set_dtype_argument(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    position = _torch.argument_names(op).index("dtype")
    if position < len(args):
        if args[position] is not None:
            return args, kwargs
        return (*args[:position], torch.float32, *args[position + 1 :]), kwargs
    return args, {**kwargs, "dtype": torch.float32}


def _cast_to_widest(op: object, device_type: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    tensors = flat(torch.Tensor, args, kwargs)
    wide = any(t.dtype is torch.float32 for t in tensors)
    return _cast_all(args, kwargs, torch.float32 if wide else torch.get_autocast_dtype(device_type))


def _leave_arguments(op: object, device_type: str, args: object, kwargs: object) -> tuple[Any, Any]:
    return args, kwargs


def _refuse_banned(op: object, device_type: str, args: object, kwargs: object) -> tuple[Any, Any]:
    raise RuntimeError(f"{op} under autocast: unsafe in 16 bit: use binary_cross_entropy_with_logits")


POLICIES: dict[Casting, Policy] = {
    Casting.LOWER: _cast_to_lower,
    Casting.FLOAT32: _cast_to_float32,
    Casting.FLOAT32_BY_DTYPE: _request_float32,
    Casting.WIDEST: _cast_to_widest,
    Casting.REFUSED: _refuse_banned,
}


def _cast_all(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """From the last argument to the first, as torch's C++ does: memory is allocated in that order."""

    def cast(value: object) -> Any:
        return map_structure(lambda t: _cast(t, dtype), torch.Tensor, value)

    named = {name: cast(value) for name, value in reversed(dict(kwargs).items())}
    return tuple(reversed([cast(value) for value in reversed(tuple(args))])), named


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    if _torch.inner_device(tensor).type in ("cpu", "meta"):
        return tensor
    if dtype in _LOW and tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf:
        return _cast_once(tensor, dtype)
    return tensor.to(dtype)


def _cast_once(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a weight once in an autocast region, as torch's own cache does."""
    is_stand_in = type(weight) is FakeTensor or _torch.is_traceable_wrapper_subclass(weight)
    if not torch.is_autocast_cache_enabled() or not is_stand_in:
        return weight.to(dtype)
    cache: dict[int, Any] = _casts.__dict__.setdefault("cache", {})
    found = cache.get(id(weight))
    if (
        found is not None
        and found[1].dtype is dtype
        and (found[1].requires_grad or not torch.is_grad_enabled())
    ):
        return found[1]
    cast = weight.to(dtype)
    cache[id(weight)] = (weight, cast)
    return cast


def clear_cast_cache() -> None:
    """Called at the end of the outermost autocast region, and when a mode is left."""
    _casts.__dict__.pop("cache", None)


on_first_device.append(register_kernels)
