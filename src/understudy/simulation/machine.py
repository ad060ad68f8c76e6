"""A simulated machine: some cards of one kind, their memory and streams, and the answers that the program got about
them.

    machine = Machine(*parse_devices("8xa100-80g"))
    machine.mode                     the ObservedMode in which the program runs
    machine.memory.devices[0]        the memory of the first card
    machine.notes                    what a report has to say: where the simulation differs from the real machine

Which machine is simulated just now: `ACTIVE.machine`. There is one for all threads, as there is in reality.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from understudy.errors import UnderstudyError
from understudy.fake import native
from understudy.simulation.allocator_parts import AllocatorSettings
from understudy.simulation.catalogue import Card, read_software
from understudy.simulation.events import StreamEvent
from understudy.simulation.memory import DeviceMemory, MachineMemory, OnOOM
from understudy.simulation.storages import ObservedMode
from understudy.simulation.workspaces import ScratchMemory, Workspaces
from understudy.spec.error_context import with_line

SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The first that is set is read, as torch does."""


class SimulationError(UnderstudyError, RuntimeError):
    """Something that a simulation does not do."""


class InvalidDeviceError(UnderstudyError, RuntimeError):
    """A device that the simulated machine does not have."""


class CardMemory(MachineMemory):
    """As MachineMemory, and refuses devices that the machine does not have."""

    def check_device(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda", "meta"):
            error = InvalidDeviceError(
                f"expected a device of the simulated machine (cpu, cuda), got {device}: it has none of type {device.type}"
            )
            raise with_line(error, "a tensor on", device, f"ask torch.{device.type}.is_available() first")
        if device.type == "cuda":
            count = len(self.devices)
            error = InvalidDeviceError(
                f"CUDA error: invalid device ordinal: {device} was named, and the simulated machine has {count} "
                f"device{'s' * (count != 1)}: cuda:0{f' to cuda:{count - 1}' if count > 1 else ''}"
            )
            hint = f'name another device, or simulate more of them: understudy.simulate("{device.index + 1}x...")'
            raise with_line(error, "a tensor on", device, hint)


class Machine:
    """`on_oom`, `context`: see `memory`. `settings`: in place of the environment's PYTORCH_CUDA_ALLOC_CONF.
    `answers`: the policy for reads of data that is not there."""

    def __init__(
        self, card: Card, count: int = 1, *, settings: str | None = None, on_oom: OnOOM = "raise",
        context: int | None = None, answers: object = "error",
    ) -> None:  # fmt: skip
        self.card = card
        self.count = 0 if card.kind == "cpu" else count
        self.software = read_software()
        self.notes: list[str] = []
        parsed = AllocatorSettings.parse(_read_environment_settings() if settings is None else settings)
        self.memory = CardMemory(card, count, parsed, on_oom, context)
        self.mode = ObservedMode(allow_non_fake_inputs=True, answers=answers)
        self.mode.device_facts = card.facts()
        self.mode.add_listener(self.memory)
        if self.count:
            self.workspaces = Workspaces(self)
            self.mode.add_listener(self.workspaces)
            self.scratch = ScratchMemory(self)
            self.mode.add_listener(self.scratch)
        self.generators: list[torch.Generator] = []
        """The default generator of each device."""
        self.moved_modules: Any = None  # a MovedModules, of a module that imports this one
        """What gives real modules their tensors back."""
        self._is_initialized = False
        self._visible: int | None = None
        self._current = 0
        self._streams: dict[int, int] = {}
        """The current stream of each device, where it is not the default one."""
        self._last_stream = 0

    # --- devices -------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        """What torch does at the first use of a device: from here on, CUDA_VISIBLE_DEVICES is settled."""
        if not self.device_count:
            raise RuntimeError(
                "No CUDA GPUs are available: CUDA_VISIBLE_DEVICES hides those of the simulated machine"
            )
        self._visible = self.device_count
        self._is_initialized = True

    @property
    def is_initialized(self) -> bool:
        """Making a stand-in on a card does not go through the driver: cards with allocated memory count as
        initialised, too."""
        return self._is_initialized or any(memory.capped.reserved for memory in self.memory.devices)

    @property
    def device_count(self) -> int:
        return len(list_visible(self.count)) if self._visible is None else self._visible

    @property
    def current_device(self) -> int:
        return self._current

    def set_device(self, index: int) -> None:
        self.check_index(index)
        self._current = index
        native.current_indices["cuda"] = index

    def exchange_device(self, index: int) -> int:
        """Select a device unless the index is negative, and return the one that was selected before."""
        before = self._current
        if index >= 0:
            self.set_device(index)
        return before

    def device(self, index: int | None = None) -> DeviceMemory:
        index = self._current if index is None or index < 0 else index
        self.check_index(index)
        return self.memory.devices[index]

    def check_index(self, index: int) -> None:
        if not 0 <= index < self.device_count:
            raise InvalidDeviceError(
                f"CUDA error: invalid device ordinal {index}: the simulated machine has {self.device_count} devices"
            )

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # --- streams -------------------------------------------------------------------------------------------

    def new_stream(self) -> int:
        self._last_stream += 1
        return self._last_stream

    def current_stream(self, index: int) -> int:
        return self._streams.get(index, 0)

    def set_stream(self, index: int, stream: int) -> None:
        self._streams[index] = stream
        self.report("select", index, stream)
        if self.mode.stream_of is None:
            self.mode.stream_of = self._stream_of
            self.mode.reset_endings()

    def _stream_of(self, device: torch.device) -> int:
        return self._streams.get(device.index or 0, 0) if device.type == "cuda" else 0

    def report(self, kind: str, index: int, stream: int, event: object = None) -> None:
        """Tell the one who follows time what happens to a stream."""
        if self.mode.on_event is not None:
            self.mode.on_event(StreamEvent(kind, index, stream, id(event)))

    def synchronize(self, index: int, stream: int | None = None) -> None:
        self.report("synchronize", index, -1 if stream is None else stream)
        self.free_waiting_blocks(index, stream)

    def free_waiting_blocks(self, index: int, stream: int | None) -> None:
        """Those that were freed while another stream used them."""
        for allocator in self.device(index).allocators():
            allocator.synchronize(stream)


def _read_environment_settings() -> str:
    return next((os.environ[name] for name in SETTINGS_VARIABLES if os.environ.get(name)), "")


def list_visible(count: int) -> tuple[int, ...]:
    """The machine's devices that CUDA_VISIBLE_DEVICES shows, in its order: up to the first that does not exist."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or count == 0:
        return tuple(range(count))
    seen: dict[str, int] = {}
    for part in (part.strip() for part in text.split(",")):
        is_named = part.startswith(("GPU-", "MIG-"))
        if part in seen or not (is_named or (part.isdecimal() and int(part) < count)):
            break
        seen[part] = len(seen) if is_named else int(part)
    return tuple(seen.values())[:count]


class _Active:
    machine: Machine | None = None


ACTIVE = _Active()


def machine() -> Machine:
    """The one that is simulated: for patches, which are in force only then."""
    assert ACTIVE.machine is not None
    return ACTIVE.machine
