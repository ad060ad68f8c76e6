"""Objects of torch.cuda, simulated: streams, events, random generators, properties, and the old tensor types.

They replace torch's own while a machine is simulated, and hold names and numbers only: a simulated stream has no
pending work.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from understudy.simulation.catalogue import Card
from understudy.simulation.machine import SimulationError, machine
from understudy.spec.error_context import with_line

CUDA_DEVICE_TYPE = 1
"""The number of the device type in torch's C++."""


def device_index(device: Any) -> int:
    """The index of a device that is given as a number, a name or a torch.device; of None, that of the selected device."""
    if isinstance(device, int):
        return device
    if device is None:
        return machine().current_device
    index = torch.device(device).index
    return machine().current_device if index is None else index


class Stream:
    """A queue of work, by its number: 0 is the default stream of a device."""

    def __init__(
        self, device: object = None, priority: int = 0, *, stream_id: int | None = None, device_index: int | None = None,
        device_type: int = CUDA_DEVICE_TYPE, stream_ptr: int | None = None,
    ) -> None:  # fmt: skip
        self.device_index = _index_of(device) if device_index is None else device_index
        self.stream_id = machine().new_stream() if stream_id is None else stream_id
        self.device_type = device_type
        self.priority = priority

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.device_index)

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        machine().synchronize(self.device_index, self.stream_id)

    def synchronize_allocator(self) -> None:
        """Blocks that wait for this stream are free, as after `synchronize`."""
        machine().free_waiting_blocks(self.device_index, self.stream_id)

    def wait_event(self, event: Event) -> None:
        machine().report("wait", self.device_index, self.stream_id, event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = CudaEvent() if event is None else event
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        self._before = Stream(
            stream_id=machine().current_stream(self.device_index), device_index=self.device_index
        )
        machine().set_stream(self.device_index, self.stream_id)
        return self

    def __exit__(self, *exception: object) -> None:
        machine().set_stream(self.device_index, self._before.stream_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[int, int]:
        return self.device_index, self.stream_id

    def __repr__(self) -> str:
        return f"<simulated stream {self.stream_id} of {self.device}>"


_index_of = device_index


class Event:
    """A point in a stream. Its time is that of the simulation itself: programs divide by what passes between two of them."""

    def __init__(
        self,
        device: object = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> None:
        """As `torch.Event` takes them."""
        self.enable_timing = enable_timing
        self.stream: Stream | None = None
        self.milliseconds = 0.0

    @property
    def device(self) -> torch.device | None:
        return None if self.stream is None else self.stream.device

    def record(self, stream: Stream | None = None) -> None:
        recorded: Any = torch.cuda.current_stream() if stream is None else stream
        self.stream = recorded
        self.milliseconds = time.perf_counter() * 1e3
        machine().report("record", recorded.device_index, recorded.stream_id, self)

    def wait(self, stream: Stream | None = None) -> None:
        waiting: Any = torch.cuda.current_stream() if stream is None else stream
        waiting.wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.stream is not None:
            machine().report("host waits", self.stream.device_index, self.stream.stream_id, self)
            self.stream.synchronize_allocator()

    def elapsed_time(self, end_event: Event) -> float:
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("both events have to be made with enable_timing=True")
        if self.stream is None or end_event.stream is None:
            raise ValueError("both events have to be recorded before elapsed_time")
        machine().note("elapsed times of CUDA events are those of the simulation, not of the card")
        return end_event.milliseconds - self.milliseconds

    def __repr__(self) -> str:
        return f"<simulated event of {self.device}>"


class CudaEvent(Event):
    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        """As `torch.cuda.Event` takes them."""
        super().__init__(enable_timing=enable_timing)


# --- random numbers -------------------------------------------------------------------------------------------------


RealGenerator = torch.Generator
STATE_BYTES = 16
"""Size of the state of a CUDA generator: seed and offset."""


class CudaGenerator(RealGenerator):
    """A generator of a simulated device: seed and offset. Nothing is drawn from it."""

    _index: int
    _seed: int
    _offset: int

    def __new__(cls, device: object = "cuda") -> CudaGenerator:
        made: CudaGenerator = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made._index = device_index(device)
        made._seed, made._offset = 67280421310721, 0
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._index)

    def manual_seed(self, seed: int) -> CudaGenerator:
        self._seed, self._offset = int(seed), 0
        return self

    def seed(self) -> int:
        self.manual_seed(zlib.crc32(str(id(self)).encode()))
        return self._seed

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> CudaGenerator:
        self._offset = offset
        return self

    def get_state(self) -> torch.Tensor:
        number = (self._seed % (1 << 64)) | self._offset << 64
        return torch.tensor(list(number.to_bytes(STATE_BYTES, "little")), dtype=torch.uint8)

    def set_state(self, new_state: torch.Tensor) -> CudaGenerator:
        if new_state.numel() == STATE_BYTES:
            number = int.from_bytes(bytes(new_state.tolist()), "little")
            self._seed, self._offset = number % (1 << 64), number >> 64
        return self

    def clone_state(self) -> CudaGenerator:
        twin = CudaGenerator(self.device)
        twin._seed, twin._offset = self._seed, self._offset
        return twin


def make_generator(device: Any = "cpu") -> torch.Generator:
    return CudaGenerator(device) if torch.device(device).type == "cuda" else RealGenerator(device)


# --- properties -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceProperties:
    """As torch's, from the catalogue."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    max_threads_per_multi_processor: int
    uuid: str
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 101376
    shared_memory_per_multiprocessor: int = 102400
    L2_cache_size: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_bus_id: int = 1
    pci_device_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""
    max_threads_per_block: int = 1024

    @staticmethod
    def of(card: Card, index: int) -> DeviceProperties:
        major, minor = card.capability or (0, 0)
        return DeviceProperties(
            name=card.name,
            major=major,
            minor=minor,
            total_memory=card.memory,
            multi_processor_count=card.multiprocessors or 0,
            max_threads_per_multi_processor=card.threads_per_multiprocessor or 0,
            uuid=f"00000000-0000-0000-0000-{index:012d}",
            warp_size=64 if card.kind == "rocm" else 32,
            pci_bus_id=index + 1,
            gcnArchName=f"gfx{major}{minor}" if card.kind == "rocm" else "",
        )


# --- legacy tensor types, and unsupported calls
# ------------------------------------------------------------------------


class _LegacyTensorType(type):
    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is cls.dtype

    def __call__(cls, *args: Any, device: Any = "cuda") -> torch.Tensor:
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.tensor(args[0], dtype=cls.dtype, device=device)
        sizes = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(sizes, dtype=cls.dtype, device=device)


def legacy_tensor_type(name: str, dtype: torch.dtype) -> type:
    """`torch.cuda.FloatTensor`: of sizes, or of data."""
    return _LegacyTensorType(name, (), {"dtype": dtype, "is_cuda": True, "__module__": "torch.cuda"})


def refuse_graph(*args: object, **kwargs: object) -> NoReturn:
    raise with_line(
        SimulationError("CUDA graphs are not simulated: their private memory pools are not modelled"),
        "torch.cuda.CUDAGraph", "", "call the captured function directly, without torch.cuda.graph",
    )  # fmt: skip


class RefusedGraph:
    """In the place of torch.cuda.CUDAGraph and torch.cuda.graph."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        refuse_graph()


class CudaRuntime(SimpleNamespace):
    """The functions of `torch.cuda.cudart()` that programs call."""

    cudaError = SimpleNamespace(success=0)

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:
        return machine().device(device).memory_info()

    @staticmethod
    def cudaProfilerStart() -> int:
        return 0

    @staticmethod
    def cudaProfilerStop() -> int:
        return 0

    @staticmethod
    def cudaHostRegister(pointer: int, size: int, flags: int) -> int:
        return 0

    @staticmethod
    def cudaHostUnregister(pointer: int) -> int:
        return 0


class Nvtx:
    """Marks for a profiler that is not there. Ranges are counted, as their depth is what torch returns."""

    def __init__(self) -> None:
        self._depth = 0

    def rangePushA(self, message: str) -> int:
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        self._depth = max(0, self._depth - 1)
        return self._depth

    def rangeStartA(self, message: str) -> int:
        return 0

    def rangeEnd(self, number: int) -> None: ...

    def markA(self, message: str) -> None: ...

    def deviceRangeStart(self, message: str, stream: int) -> object:
        return None

    def deviceRangeEnd(self, handle: object, stream: int) -> None: ...
