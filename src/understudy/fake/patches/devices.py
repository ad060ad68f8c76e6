"""What torch answers otherwise for as long as a fake mode is active, and why.

Each function takes torch's own object and gives the one that stands in its place: an answer for threads in which a fake
mode is active, or for stand-ins, and torch's own answer for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy._torch import active_fake_mode, while_active
from understudy.errors import Context, MixedTensorsError
from understudy.fake.kernels import autocast
from understudy.fake.tensor import FakeTensor
from understudy.lines import user_line

Function = Callable[..., Any]


def _answer(place: str, answer: bool) -> None:
    @while_active(place)
    def patch(original: Function) -> Function:
        def asked(*args: Any, **kwargs: Any) -> Any:
            return answer if active_fake_mode() is not None else original(*args, **kwargs)

        return asked


# torch.autocast("cuda") switches itself off, or refuses bfloat16, where there is no CUDA.
_answer("cuda autocast is unavailable", False)
_answer("cuda has bfloat16", True)
# Warns, for every recurrent module on a CUDA device, that this build has no cuDNN.
_answer("cudnn takes a tensor", False)


@while_active("leaving autocast")
def forget_casts(original: Function) -> Function:
    """Weights that were cast in a region are cast again in the next one."""

    def leave(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        outermost = torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
        if outermost:
            autocast.forget_casts()
        return result

    return leave


@while_active("grouping by device")
def group_by_device_that_is_meant(original: Function) -> Function:
    """Optimizers and the clipping of gradients choose their kernels by the device of each group."""

    def grouped(*args: Any, **kwargs: Any) -> Any:
        meant = _torch.stand_in_devices
        return {
            (meant.get(device, device), dtype): rest
            for (device, dtype), rest in original(*args, **kwargs).items()
        }

    return grouped


@while_active("deepcopy of a Parameter")
@while_active("deepcopy of a Tensor")
def real_stays_real(original: Function) -> Function:
    """`copy.deepcopy` of a real tensor copies its storage by operators; in a fake mode, too, it gives a real one."""

    def deepcopy(self: torch.Tensor, memo: Any) -> Any:
        if not _is_real(self):
            return original(self, memo)
        with _torch.without_fake_mode():
            return original(self, memo)

    return deepcopy


class RealTensorData:
    """`tensor.data`: C++ gives a real tensor the storage of a stand-in, past every dispatch, and who reads it then reads
    memory that is not there. Asked of the class, it is torch's own, which torch functions are known by."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __get__(self, tensor: torch.Tensor | None, owner: Any = None) -> Any:
        return self._original if tensor is None else self._original.__get__(tensor, owner)

    def __set__(self, tensor: torch.Tensor, data: Any) -> None:
        is_plain = _is_real(tensor) and _torch.unwrap(tensor) is None
        # A mode for torch functions is told, and may have another way.
        if type(data) is FakeTensor and is_plain and _torch.count_function_modes() == 0:
            raise MixedTensorsError(
                f"a real tensor can't be given the data of a stand-in, {data._spec}: it would be left without memory",
                context=Context(
                    line=user_line(),
                    hint="make the model inside the mode, or exchange the parameter itself: "
                    "module.weight = torch.nn.Parameter(data)",
                ),
            )
        self._original.__set__(tensor, data)


while_active("data")(RealTensorData)


def _is_real(tensor: Any) -> bool:
    if _torch.is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return all(_is_real(getattr(tensor, name)) for name in names)
    return not _torch.uses_python_dispatch(type(tensor))


# The wrappers of torch.func are plain tensors, and C++ answers for them with the device that stands for another.


@while_active("device")
def device_that_is_meant(original: Any) -> Any:
    def device(tensor: torch.Tensor) -> torch.device:
        answer = original.__get__(tensor)
        return _torch.stand_in_devices.get(answer, answer)

    return property(device)


@while_active("is_cuda")
def is_meant_as_cuda(original: Any) -> Any:
    def is_cuda(tensor: torch.Tensor) -> bool:
        meant = _torch.stand_in_devices.get(_torch.native_device(tensor))
        return original.__get__(tensor) if meant is None else meant.type == "cuda"

    return property(is_cuda)
