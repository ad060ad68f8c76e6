"""torch.cuda and torch.accelerator, as on a machine with the simulated cards.

torch's own Python code is left in place as far as it goes; what it asks of C++ is answered from here. Each answer stands in
a function whose docstring is the reason that the patch engine lists.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from understudy._torch import Device
from understudy.lines import user_frames
from understudy.ops.nn.attention_cuda import efficient_takes, find_facts, flash_takes
from understudy.patching import SIMULATION, patch
from understudy.simulation import cuda_objects as objects
from understudy.simulation.catalogue import read_software
from understudy.simulation.cuda_objects import CUDA_DEVICE_TYPE, DeviceProperties
from understudy.simulation.machine import machine

Function = Callable[..., object]
Answering = TypeVar("Answering", bound=Function)
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
"""For which the simulated build of torch has kernels: those of the default one."""


def answer(*places: str, is_new: bool = False) -> Callable[[Answering], Answering]:
    """Register a function that takes the place of torch's."""

    def register(function: Answering) -> Answering:
        patch(*places, during=SIMULATION, reason=function.__doc__ or "", is_new=is_new)(
            lambda original: function
        )
        return function

    return register


def driver(name: str) -> Callable[[Answering], Answering]:
    """A function of torch's C++ that only builds for CUDA have."""
    return answer(f"torch._C.{name}", is_new=True)


def substitute(*places: str, value: object, reason: str, is_new: bool = False) -> None:
    patch(*places, during=SIMULATION, reason=reason, is_new=is_new)(lambda original: value)


# --- which devices there are ------------------------------------------------------------------------------------------


@driver("_cuda_getDeviceCount")
def get_device_count() -> int:
    """torch takes a build that has this function for a build with CUDA; its result is the number of available devices."""
    return machine().device_count


@answer("torch.cuda.device_count", "torch.cuda.random.device_count")
def device_count() -> int:
    """torch calls NVML, which reports the real cards."""
    return machine().device_count


@answer("torch.cuda.is_available")
def is_available() -> bool:
    """torch may ask NVML, which counts the real cards."""
    return machine().device_count > 0


class _DeviceClass(type):
    """The metaclass of a replacement of `torch.device`, which can't be changed or subclassed. Its instances are
    torch's own devices, and it equals their class in comparisons, instance checks and dictionaries."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is int and machine().device_count:
            return Device("cuda", args[0])
        return Device(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance) is Device

    def __subclasscheck__(cls, other: type) -> bool:
        return other is Device or other is cls

    def __eq__(cls, other: object) -> bool:
        return other is Device or other is cls

    def __hash__(cls) -> int:
        return hash(Device)


substitute(
    "torch.device",
    value=_DeviceClass("device", (), {"__module__": "torch", "__doc__": torch.device.__doc__}),
    reason="`torch.device(0)` is a card: C++ looks for an accelerator, and this machine has none",
)


@answer("torch.cuda._lazy_init", "torch.cuda.memory._lazy_init", "torch.cuda.random._lazy_init")
def initialise() -> None:
    """A simulated machine has no driver to initialise."""
    machine().initialize()


@answer("torch.cuda.is_initialized", "torch.cuda.memory.is_initialized")
def is_initialized() -> bool:
    """The simulated driver is initialised by the first call that needs it, as the real one is."""
    return machine().is_initialized


@answer("torch.cuda._lazy_call", "torch.cuda.random._lazy_call")
def call_now(callable: Function, **options: object) -> None:
    """Calls that torch queues until CUDA is initialised would otherwise run after the simulation has ended."""
    if machine().device_count:
        machine().initialize()
        callable()


@answer("torch.cuda._get_device_properties", is_new=True)
def get_properties(index: int) -> DeviceProperties:
    """From the catalogue."""
    return DeviceProperties.of(machine().card, index)


@driver("_cuda_getDevice")
def get_device() -> int:
    """The selected device."""
    return machine().current_device


@driver("_cuda_setDevice")
def set_device(index: int) -> None:
    """Selects a device, for `device="cuda"` too."""
    machine().initialize()
    machine().set_device(index)


@answer("torch.cuda._exchange_device", "torch.cuda._maybe_exchange_device")
def exchange_device(index: int) -> int:
    """Used by `with torch.cuda.device(...)`."""
    return machine().exchange_device(index)


@driver("_cuda_getArchFlags")
def get_architectures() -> str:
    """The architectures of torch's default build for CUDA."""
    return ARCHITECTURES


@answer("torch.cuda.is_bf16_supported")
def is_bf16_supported(including_emulation: bool = True) -> bool:
    """By the capability of the simulated card; torch would try it out, and remember the answer."""
    capability = machine().card.capability or (0, 0)
    return machine().card.kind == "rocm" or capability >= (8, 0) or including_emulation


substitute(
    "torch.cuda._cudart",
    value=objects.CudaRuntime(),
    reason="`torch.cuda.mem_get_info`, `torch.cuda.profiler` and programs call functions of the CUDA runtime.",
)


@answer("torch.cuda.ipc_collect")
def collect_nothing() -> None:
    """A simulated card has no memory of other processes."""


# --- memory -----------------------------------------------------------------------------------------------------------


@driver("_cuda_memoryStats")
def memory_statistics(device: int) -> dict[str, Any]:
    """The figures of the simulated allocator."""
    return machine().device(device).allocator.nested_statistics()


@driver("_cuda_resetPeakMemoryStats")
def reset_peaks(device: int) -> None:
    """The figures of the simulated allocator."""
    for allocator in machine().device(device).allocators():
        allocator.reset_peak_statistics()


@driver("_cuda_emptyCache")
def empty_cache(*args: object) -> None:
    """Releases the cached memory of the simulated allocators."""
    for memory in machine().memory.devices:
        memory.empty_cache()


@driver("_cuda_setMemoryFraction")
def set_memory_fraction(fraction: float, device: int) -> None:
    """A limit for the simulated allocator."""
    machine().device(device).capped.set_memory_fraction(fraction)


@answer("torch.cuda.memory._set_allocator_settings")
def change_settings(settings: str) -> None:
    """For the simulated allocators."""
    for memory in machine().memory.devices:
        for allocator in memory.allocators():
            allocator.change_settings(settings)


@driver("_cuda_record_memory_history")
def record_history(enabled: object = "all", context: object = "all", stacks: object = "all", max_entries: int = 1 << 62,
                   clear_history: bool = False, *rest: object) -> None:  # fmt: skip
    """The history of the simulated allocators, with the frames of the program."""
    for memory in machine().memory.devices:
        allocator = memory.allocator
        allocator.frames, allocator.clock = _frames, _microseconds
        if allocator.history is None or clear_history or not enabled:
            allocator.record_history(bool(enabled), None if max_entries >= 1 << 62 else max_entries)


def _frames() -> list[dict[str, Any]]:
    return [
        {"filename": frame.f_code.co_filename, "line": frame.f_lineno, "name": frame.f_code.co_name}
        for frame in user_frames()
    ]


def _microseconds() -> int:
    return time.time_ns() // 1000


@driver("_cuda_memorySnapshot")
def memory_snapshot(*args: object) -> dict[str, Any]:
    """The state of the simulated allocators, in torch's format."""
    parts = [memory.allocator.snapshot() for memory in machine().memory.devices]
    return {
        "segments": [segment for part in parts for segment in part["segments"]],
        "device_traces": [part["device_traces"][-1] for part in parts],
        "allocator_settings": parts[0]["allocator_settings"],
        "external_annotations": [],
    }


# --- streams ------------------------------------------------------------------------------------------------------------


@driver("_cuda_synchronize")
def synchronize() -> None:
    """All work of a simulated device is done."""
    machine().synchronize(machine().current_device)


@driver("_cuda_getCurrentStream")
def current_stream(device: int) -> tuple[int, int, int]:
    """The number of the stream, the device, and the number of its type."""
    return machine().current_stream(device), device, CUDA_DEVICE_TYPE


@driver("_cuda_getCurrentRawStream")
def get_raw_stream(device: int) -> int:
    """Kernels of libraries are started on the default stream, whose address is 0."""
    return 0


@driver("_cuda_getDefaultStream")
def default_stream(device: int) -> tuple[int, int, int]:
    """The number of the stream, the device, and the number of its type."""
    return 0, device, CUDA_DEVICE_TYPE


@driver("_cuda_setStream")
def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    """Selects the stream, and its device, as torch does."""
    machine().set_device(device_index)
    machine().set_stream(device_index, stream_id)


@answer("torch.cuda.graphs._cuda_isCurrentStreamCapturing")
def is_capturing() -> bool:
    """CUDA graphs are not simulated."""
    return False


@answer("torch.Tensor.record_stream")
def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """The C++ function accepts only streams that C++ made."""
    record = machine().mode.find_record(tensor)
    if record is not None and record.device.index is not None:
        machine().device(record.device.index).record_stream(record, stream.stream_id)


BY_NUMBERS = "torch's class asks the driver, which a simulated device does not have."
substitute("torch.Stream", "torch.cuda.Stream", value=objects.Stream, reason=BY_NUMBERS)
substitute("torch.Event", value=objects.Event, reason=BY_NUMBERS)
substitute("torch.cuda.Event", value=objects.CudaEvent, reason=BY_NUMBERS)
NO_GRAPHS = "CUDA graphs have a memory pool of their own, which is not simulated: they are refused."
substitute("torch.cuda.CUDAGraph", value=objects.RefusedGraph, reason=NO_GRAPHS)
substitute("torch.cuda.nvtx._nvtx", value=objects.Nvtx(), reason="A build without CUDA has no NVTX.")


# --- random numbers, tensor types, versions ------------------------------------------------------------------------------


@patch("torch.cuda.default_generators", during=SIMULATION)
def have_generators(original: object) -> Any:
    """One for each simulated device."""
    return _Generators()


class _Generators:
    """Generators of the machine that is simulated when they are read."""

    def __getitem__(self, index: int) -> torch.Generator:
        machine().check_index(index)
        return machine().generators[index]

    def __len__(self) -> int:
        return machine().device_count


@patch("torch.Generator", during=SIMULATION)
def make_simulated_generators(original: Any) -> Any:
    """`torch.Generator("cuda")` needs a build for CUDA. The class stays the one that C++ and `isinstance` know."""

    class Either(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

        def __call__(cls, device: object = "cpu") -> Any:
            return objects.make_generator(device)

    return Either("Generator", (original,), {"__module__": "torch"})


LEGACY_TYPES = {
    "FloatTensor": torch.float32, "HalfTensor": torch.float16, "LongTensor": torch.int64, "ByteTensor": torch.uint8,
}  # fmt: skip
for _name, _dtype in LEGACY_TYPES.items():
    substitute(
        f"torch.cuda.{_name}", value=objects.legacy_tensor_type(_name, _dtype),
        reason="The oldest constructors of tensors on CUDA devices refuse in other builds.",
    )  # fmt: skip


substitute("torch.version.cuda", value=read_software().cuda, reason="The simulated software.")


@answer("torch.backends.cudnn.version")
def cudnn_version() -> int:
    """The simulated software."""
    return machine().software.cudnn


@answer("torch.backends.cudnn.is_available", "torch.backends.cuda.is_built")
def is_built() -> bool:
    """The simulated software has CUDA and cuDNN."""
    return True


@answer("torch._C._can_use_flash_attention")
def can_use_flash_attention(params: Any, debug: bool = False) -> bool:
    """C++ sees a meta device. Jagged tensors choose their kernel by this."""
    return flash_takes(params, find_facts(params.query))


@answer("torch._C._can_use_mem_efficient_attention")
def can_use_efficient_attention(params: Any, debug: bool = False) -> bool:
    """As for flash attention."""
    return efficient_takes(params, find_facts(params.query))


@answer("torch.cuda.nccl.version")
def nccl_version() -> tuple[int, ...]:
    """The simulated software."""
    return tuple(int(part) for part in machine().software.nccl.split("."))


# --- torch.accelerator: the same, by other names ---------------------------------------------------------------------------


@answer("torch._C._accelerator_getAccelerator", "torch._C._get_accelerator")
def get_accelerator() -> torch.device | None:
    """The accelerator of the simulated build."""
    return torch.device("cuda")


@answer("torch._C._accelerator_getDeviceIndex")
def get_accelerator_index() -> int:
    """The selected device."""
    return machine().current_device


@answer("torch._C._accelerator_setDeviceIndex")
def set_accelerator_index(index: int) -> None:
    """Selects a simulated device."""
    set_device(index)


@answer("torch._C._accelerator_synchronizeDevice")
def synchronize_accelerator(index: int) -> None:
    """All work of a simulated device is done."""
    machine().synchronize(index)


@answer("torch._C._accelerator_getStream")
def get_accelerator_stream(index: int) -> objects.Stream:
    """A simulated stream."""
    return objects.Stream(stream_id=machine().current_stream(index), device_index=index)
