"""What programs do with devices beside torch.cuda: move real modules, scale gradients, use several cards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.inputs import is_real
from understudy.fake.patches.modules import name_device
from understudy.fake.tensor import FakeTensor, native_argument
from understudy.patching import SIMULATION, patch, patch_call
from understudy.simulation.machine import machine

Function = Callable[..., Any]
CONSTRUCTORS = (
    "arange", "empty", "full", "ones", "rand", "randint", "randn", "zeros", "zeros_like",
)  # fmt: skip
"""Those that training scripts call with `device=rank`."""


@patch(*(f"torch.{name}" for name in CONSTRUCTORS), during=SIMULATION)
def take_numbers_of_devices(original: Function) -> Function:
    """C++ asks the build for its accelerator where the device is a number, as in `torch.zeros(3, device=rank)`."""

    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("device")) is int:
            kwargs["device"] = name_device(kwargs["device"])
        return original(*args, **kwargs)

    return construct


@patch_call("torch.set_default_tensor_type", during=SIMULATION)
def name_default_type(original: Function, t: Any) -> None:
    """`"torch.cuda.FloatTensor"` is a dtype and a device; C++ refuses it in builds without CUDA."""
    name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
    if name.startswith("torch.cuda."):
        torch.set_default_dtype(getattr(torch, name.rpartition(".")[2]).dtype)
        torch.set_default_device("cuda")
    else:
        torch.set_default_device(None)
        original(t)


@patch("torch.Tensor.to", "torch.Tensor.cuda", during=SIMULATION)
def move_real_tensors(original: Function) -> Function:
    """C++ asks the build where `real.to("cuda")` is: a stand-in of the tensor is moved."""

    @functools.wraps(original)
    def move(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mode = machine().mode
        if type(self) is FakeTensor or not is_real(self) or _torch.is_past_dispatch():
            return original(self, *args, **kwargs)
        if _torch.active_fake_mode() is not mode:
            return original(self, *args, **kwargs)
        if _torch.unwrap(self) is not None:  # a wrapper of torch.func
            if original.__name__ == "cuda":
                return self.to(*(args or (kwargs.pop("device", None) or "cuda",)), **kwargs)
            named = {
                name: native_argument(value) if name == "device" else value for name, value in kwargs.items()
            }
            return original(self, *map(native_argument, args), **named)
        stand_in = mode.from_tensor(self)
        moved = getattr(stand_in, original.__name__)(*args, **kwargs)
        return self if moved is stand_in else moved

    return move


# --- real modules -------------------------------------------------------------------------------------------------------


class MovedModules:
    """Real parameters and buffers that were exchanged for stand-ins, and come back when the simulation is left."""

    def __init__(self) -> None:
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    def exchange(self, module: torch.nn.Module) -> None:
        """Replace the real tensors of one module, without its children, by stand-ins."""
        kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in kinds:
            for name, tensor in tensors.items():
                if (
                    tensor is not None
                    and type(tensor) is not FakeTensor
                    and not _torch.uses_python_dispatch(type(tensor))
                ):
                    self._before.append((tensors, name, tensor))
                    tensors[name] = machine().mode.from_tensor(tensor)

    def give_back(self) -> None:
        while self._before:
            tensors, name, tensor = self._before[-1]
            if name in tensors:
                tensors[name] = tensor
            self._before.pop()


@patch_call("torch.nn.Module._apply", during=SIMULATION)
def move_stand_ins(
    original: Function, self: torch.nn.Module, function: Function, recurse: bool = True
) -> Any:
    """`.to("cuda")` sets the data of real parameters to that of stand-ins. Stand-ins take their place first; the real ones
    come back when the simulation is left."""
    if _torch.active_fake_mode() is machine().mode:
        machine().moved_modules.exchange(self)
    return original(self, function, recurse)


# --- gradient scaling -----------------------------------------------------------------------------------------------------


@patch_call("torch.amp.grad_scaler.GradScaler._maybe_opt_step", during=SIMULATION)
def step_without_overflow(
    original: Function, self: object, optimizer: Any, optimizer_state: Any, *args: object, **kwargs: object
) -> Any:
    """Whether gradients have overflowed is data-dependent. Without a policy that answers it, they have not: the step
    is made."""
    fakes = [found for found in optimizer_state["found_inf_per_device"].values() if type(found) is FakeTensor]
    if not fakes:
        return original(self, optimizer, optimizer_state, *args, **kwargs)
    machine().note("GradScaler: assuming that no gradient overflows, so no step is skipped")
    if (answers := machine().mode.answers) is not None:
        answers.record("overflow of gradients", fakes[0].spec, False)
        return original(self, optimizer, optimizer_state, *args, **kwargs)
    return optimizer.step(*args, **kwargs)


@patch_call("torch.amp.grad_scaler.GradScaler.get_scale", during=SIMULATION)
def keep_loss_scale(original: Function, self: Any) -> float:
    """The updated scale is data of a tensor. Without overflows it stays at its initial value for thousands of steps."""
    if not self._enabled or self._scale is None or type(self._scale) is not FakeTensor:
        return float(original(self))
    if (answers := machine().mode.answers) is not None:
        answers.record("scale of GradScaler", self._scale.spec, float(self._init_scale))
    return float(self._init_scale)


# --- profilers -------------------------------------------------------------------------------------------------------------


@patch_call("torch.autograd.profiler.profile.__init__", during=SIMULATION)
def profile_without_cuda(original: Function, self: object, *args: Any, **kwargs: Any) -> None:
    """No kernels run that could be timed, and C++ would warn of every operator."""
    if kwargs.pop("use_cuda", False) or kwargs.get("use_device") == "cuda":
        machine().note("torch.profiler: no kernels run, its trace has the calls on the CPU only")
        kwargs.update(use_device=None, use_cpu=True)
    original(self, *args, **kwargs)


# --- several devices ------------------------------------------------------------------------------------------------------


@patch_call("torch.nn.DataParallel.forward", during=SIMULATION)
def run_on_first_device(original: Function, self: Any, *inputs: object, **kwargs: object) -> Any:
    """Copies of the module would run in threads, one for each device, with collectives that only CUDA has."""
    if not self.device_ids:
        return original(self, *inputs, **kwargs)
    if len(self.device_ids) > 1:
        machine().note(
            f"DataParallel over {len(self.device_ids)} devices: the whole batch runs on the first, "
            f"cuda:{self.device_ids[0]}; on the real machine each device has its part of the batch"
        )
    device = torch.device("cuda", self.device_ids[0])

    def move(value: object) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    inputs, kwargs = _torch.tree_map(move, (inputs, kwargs))
    return self.module(*inputs, **kwargs)
