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
from understudy.fake import autocast, higher_order, packed

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


@while_active("deepcopy of a parameter")
@while_active("deepcopy of a tensor")
def real_stays_real(original: Function) -> Function:
    """`copy.deepcopy` of a real tensor copies its storage by operators; in a fake mode, too, it gives a real one."""

    def deepcopy(self: torch.Tensor, memo: Any) -> Any:
        if not _is_real(self):
            return original(self, memo)
        with _torch.without_fake_mode():
            return original(self, memo)

    return deepcopy


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


@while_active("compile")
def compiled_elsewhere(original: Function) -> Function:
    """torch's compiler does not know stand-ins, and there is nothing to win: what they run is run as it is.
    Higher-order operators that are called eagerly compile themselves."""

    def compile(model: Any = None, **options: Any) -> Any:
        if active_fake_mode() is None:
            return original(model, **options)
        return (lambda function: function) if model is None else model

    return compile


@while_active("higher-order operators")
def run_in_the_open(original: Function) -> Function:
    """torch's own way makes graphs of the functions that the operator is given, with its own mode and tracer."""

    def dispatch(self: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = higher_order.RUNS.get(self.name())
        mode = active_fake_mode()
        if (
            run is None
            or mode is None
            or type(mode) is _torch.torch_fake_mode_class()
            or _torch.is_recording()
        ):
            return original(self, key, *args, **kwargs)
        return run(*args, **kwargs)

    return dispatch


@while_active("truncated normal")
def drawn_once(original: Function) -> Function:
    """torch draws again until no value is outside of the bounds, and asks the values whether there is one."""

    def draw(tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None) -> Any:
        if not _torch.is_stand_in(tensor):
            return original(tensor, mean, std, a, b, generator)
        with torch.no_grad():
            return tensor.normal_(mean, std, generator=generator)

    return draw


def _in_python(place: str) -> None:
    @while_active(place)
    def patch(original: Function) -> Function:
        """C++ reads the sizes of its inputs as integers here, which symbols are not."""

        def called(*args: Any, **kwargs: Any) -> Any:
            mode = active_fake_mode()
            if mode is None or mode.shape_env is None:
                return original(*args, **kwargs)
            with _torch.python_versions():
                return original(*args, **kwargs)

        return called


for _place in _torch.WITH_CONCRETE_SIZES:
    _in_python(_place)


@while_active("unpacking a sequence")
def unpacked_by_operators(original: Function) -> Function:
    def pad(data: Any, batch_sizes: Any, batch_first: bool, value: Any, total_length: int) -> Any:
        if not _torch.is_stand_in(data):
            return original(data, batch_sizes, batch_first, value, total_length)
        return packed.pad_packed(data, batch_sizes.tolist(), batch_first, value, total_length)

    return pad
