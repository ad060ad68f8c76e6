"""The modes of a thread: entering and leaving them safely, and deactivating them temporarily; torch's switches for them."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch._ops as _ops
import torch.utils._python_dispatch as _modes
from torch._C import DispatchKey

from understudy.patching import ANY_MODE, RECORDING, Hold, combine

FAKE = torch._C._TorchDispatchModeKey.FAKE
PROXY = torch._C._TorchDispatchModeKey.PROXY
_PRE_DISPATCH = DispatchKey.PreDispatch
_SPARE_AUTOCAST = DispatchKey.AutocastIPU
"""Kernels on this key cast the arguments of calls on stand-ins, in threads in which the key is not excluded."""
_count_dispatch_modes, _dispatch_mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_dispatch_mode_at, _pop_dispatch_mode = (
    torch._C._get_dispatch_stack_at,
    torch._C._pop_torch_dispatch_stack,
)
_unset_dispatch_mode, _push_dispatch_mode = (
    torch._C._unset_dispatch_mode,
    torch._C._push_on_torch_dispatch_stack,
)
_is_key_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded
_lifts_only_cpu, _lift_only_cpu = torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors
count_function_modes = torch._C._len_torch_function_stack
active_fake_mode: Callable[[], Any] = functools.partial(torch._C._get_dispatch_mode, FAKE)


class Entered(threading.local):
    """The fake modes and recorders that this thread has entered and not left, outermost first."""

    def __init__(self) -> None:
        self.fakes: list[FakeModeEntry] = []
        self.recorders: list[RecorderEntry] = []


ENTERED = Entered()


class ModeEntry:
    """One entry into a mode.

    A mode that is left out of order is removed, so that the modes entered after it do not restore it. After an interrupt,
    the modes entered after it are left with it: the interrupt may have come before their `__exit__`.
    """

    __slots__ = ("_hold", "_previous", "mode")

    def __init__(self, mode: Any) -> None:
        self.mode, self._hold = mode, Hold()
        self._previous: Any = None

    def among(self) -> list[Any]:
        """The list of entries of this thread."""
        raise NotImplementedError

    def is_innermost(self) -> bool:
        entries = self.among()
        return bool(entries) and entries[-1] is self

    def leave(self, error: object = None) -> bool:
        """Returns whether it was the innermost entry; `error`: the exception that ends the block."""
        entries = self.among()
        if isinstance(error, KeyboardInterrupt) and any(entry is self for entry in entries):
            while entries[-1] is not self:
                entries[-1].leave()
        is_innermost = self.is_innermost()
        if entries and entries[-1] is self:
            self._restore()
            entries.pop()
        elif any(entry is self for entry in entries):
            position = next(i for i, entry in enumerate(entries) if entry is self)
            entries[position + 1]._previous = self._previous
            entries[:] = [entry for entry in entries if entry is not self]
        self._hold.leave()
        return is_innermost

    def _restore(self) -> None:
        raise NotImplementedError


def latest_entry(entries: list[Any], mode: object) -> Any:
    """The last entry of a mode; None if this thread has not entered it."""
    for entry in reversed(entries):
        if entry.mode is mode:
            return entry
    return None


class FakeModeEntry(ModeEntry):
    """One entry into a fake mode, with the previous mode. `_is_inner`: the mode was active already, and stays so."""

    __slots__ = ("_is_inner",)

    def __init__(self, mode: Any) -> None:
        super().__init__(mode)
        self._is_inner = _dispatch_mode(FAKE) is mode

    def among(self) -> list[Any]:
        return ENTERED.fakes

    def is_innermost(self) -> bool:
        """Also true if torch's own mode, which uses the same slot, is active."""
        entries = ENTERED.fakes
        return bool(entries) and entries[-1] is self and _dispatch_mode(FAKE) in (self.mode, None)

    def enter(self, scopes: int) -> None:
        """Put the mode into the thread's slot for fake modes, with the patches of these scopes."""
        if self._is_inner:
            ENTERED.fakes.append(self)
            return
        self._hold.enter(scopes)
        self._previous = _dispatch_mode(FAKE), _lifts_only_cpu(), not _is_key_excluded(_SPARE_AUTOCAST)
        ENTERED.fakes.append(self)
        _unset_dispatch_mode(FAKE)
        _exclude_key(_SPARE_AUTOCAST, False)
        # With this, torch.tensor(..., device="cuda") makes a CPU tensor and moves it through the dispatcher.
        _lift_only_cpu(True)
        _push_dispatch_mode(self.mode)

    def leave(self, error: object = None) -> bool:
        if not self._is_inner:
            return super().leave(error)
        is_innermost = self.is_innermost()
        ENTERED.fakes[:] = [entry for entry in ENTERED.fakes if entry is not self]
        return is_innermost

    def _restore(self) -> None:
        previous, only_lift, is_open = self._previous
        foreign = _dispatch_mode(FAKE)
        if foreign is not None and foreign is not self.mode:  # torch's own mode, which will be left later
            _forget_mode(foreign, self.mode, previous, only_lift)
            _exclude_key(_SPARE_AUTOCAST, not is_open)
            return
        _unset_dispatch_mode(FAKE)
        _exclude_key(_SPARE_AUTOCAST, not is_open)
        # torch's own mode may have been left first.
        has_ended = previous is not None and getattr(previous, "enter_stack", None) == []
        _lift_only_cpu(only_lift and not has_ended)
        if previous is not None and not has_ended:
            torch._C._set_dispatch_mode(previous)


def _forget_mode(foreign: object, ended: object, previous: object, only_lift: bool) -> None:
    """Correct what torch's own mode restores when it is left: the mode, and whether only CPU tensors are lifted."""
    stack: list[Any] = getattr(foreign, "enter_stack", [])
    for position, (is_entered, before, _) in enumerate(stack):
        if before is ended:
            stack[position] = is_entered, previous, only_lift


# --- recorders ------------------------------------------------------------------------------------------------


class SlotAboveAutograd:
    """torch has one slot above autograd for all threads: recorders of several threads take turns."""

    def __init__(self) -> None:
        self._threads: dict[int, int] = {}
        """By the id() of an entry."""
        self._changed = threading.Condition()

    def take(self, entry: object) -> None:
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: all(thread == me for thread in self._threads.values()))
            self._threads[id(entry)] = me

    def give(self, entry: object) -> None:
        """Release the slot; does nothing if the entry does not hold it."""
        if id(entry) in self._threads:
            with self._changed:
                self._threads.pop(id(entry), None)
                self._changed.notify_all()


_ABOVE_AUTOGRAD = SlotAboveAutograd()


def is_recorded_above_autograd() -> bool:
    """Whether this thread has a recorder above autograd."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH))


def active_recorder() -> Any:
    """Return the active recorder of this thread, below or above autograd, or None."""
    below = torch._C._get_dispatch_mode(PROXY)
    if below is None and is_recorded_above_autograd():
        return _ops._get_dispatch_mode_pre_dispatch(PROXY)
    return below


class RecorderEntry(ModeEntry):
    """One entry of a recorder, with the previous one. `also`: called when it is left."""

    __slots__ = ("_also",)

    def __init__(self, mode: Any, also: Callable[[], None] | None = None) -> None:
        super().__init__(mode)
        self._also = also

    def among(self) -> list[Any]:
        return ENTERED.recorders

    def enter(self) -> None:
        if self.mode.__dict__.get("_dispatch_key") is _PRE_DISPATCH:
            _ABOVE_AUTOGRAD.take(self)
        self._hold.enter(_WHILE_RECORDING)
        self._previous = _innermost_recorder()
        ENTERED.recorders.append(self)
        _take_recorder()
        _modes._push_mode(self.mode)

    def _restore(self) -> None:
        _take_recorder()
        if self._previous is not None:
            _modes._push_mode(self._previous)

    def leave(self, error: object = None) -> bool:
        is_innermost = super().leave(error)
        if self._also is not None:
            self._also()
        _ABOVE_AUTOGRAD.give(self)
        return is_innermost

    def __del__(self) -> None:
        _ABOVE_AUTOGRAD.give(self)  # for a thread that ends inside the mode


_WHILE_RECORDING = combine(ANY_MODE, RECORDING)


def _innermost_recorder() -> Any:
    """The recorder that `_take_recorder` would remove."""
    found = _ops._get_dispatch_mode_pre_dispatch(PROXY) if is_recorded_above_autograd() else None
    return torch._C._get_dispatch_mode(PROXY) if found is None else found


def _take_recorder() -> Any:
    if is_recorded_above_autograd():
        found = _ops.unset_mode_pre_dispatch(PROXY)
        if found is not None:
            return found
    return torch._C._unset_dispatch_mode(PROXY)


# --- temporary deactivation -----------------------------------------------------------------------------------


def dispatch_modes() -> list[Any]:
    """The dispatch modes of this thread, outermost first."""
    return _modes._get_current_dispatch_mode_stack()


class no_modes:
    """Deactivates all dispatch modes of this thread."""

    __slots__ = ("_taken",)

    def __enter__(self) -> None:
        taken = self._taken = [_dispatch_mode_at(place) for place in range(_count_dispatch_modes())]
        if is_recorded_above_autograd():
            above = _ops.mode_stack_state_for_pre_dispatch()
            taken += [mode for mode in (above.get(0), above.get(1), above._schema_check_mode) if mode]
            while above.count():
                _ops._pop_mode_from_pre_dispatch()
        while _count_dispatch_modes():
            _pop_dispatch_mode(None)

    def __exit__(self, *exception: object) -> None:
        for mode in self._taken:
            if getattr(mode, "_dispatch_key", None) is None:
                _push_dispatch_mode(mode)
            else:
                _modes._push_mode(mode)


class without_fake_mode:
    """Deactivates the active fake mode; yields it."""

    __slots__ = ("_previous",)

    def __enter__(self) -> Any:
        self._previous = torch._C._unset_dispatch_mode(FAKE)
        return self._previous

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None and _dispatch_mode(FAKE) is None:
            torch._C._set_dispatch_mode(self._previous)


class without_recorder:
    """Deactivates the active recorder; yields it."""

    __slots__ = ("_previous",)

    def __enter__(self) -> Any:
        self._previous = _take_recorder()
        return self._previous

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            _modes._push_mode(self._previous)


class dispatch_mode:
    """Enters a dispatch mode of any kind but those that have a slot of their own (fake modes, recorders)."""

    __slots__ = ("_depth", "_mode")

    def __init__(self, mode: Any) -> None:
        self._mode = mode

    def __enter__(self) -> Any:
        self._depth = _count_dispatch_modes()
        _push_dispatch_mode(self._mode)
        return self._mode

    def __exit__(self, *exception: object) -> None:
        while _count_dispatch_modes() > self._depth:
            _modes._pop_mode()


class FunctionMode(torch.overrides.TorchFunctionMode):
    """A function mode. Modes that were entered inside it are left with it."""

    def __exit__(self, *exception: object) -> None:
        pop_function_modes(len(function_modes_from(self)))


def function_modes_from(mode: object) -> list[Any]:
    """This function mode, and those entered after it, in order."""
    count = count_function_modes()
    if count and torch._C._get_function_stack_at(count - 1) is mode:
        return [mode]
    stack = [torch._C._get_function_stack_at(i) for i in range(count_function_modes())]
    place = next((i for i in range(len(stack) - 1, -1, -1) if stack[i] is mode), len(stack))
    return stack[place:]


def pop_function_modes(count: int) -> None:
    for _ in range(count):
        torch._C._pop_torch_function_stack()


def read_in_function_mode(getter: Callable[..., Any], tensor: torch.Tensor) -> Any:
    """`torch.overrides.handle_torch_function` for an attribute of a tensor, which programs read often: the innermost
    function mode is called, without the generators of torch's function."""
    if count_function_modes():
        mode = torch._C._pop_torch_function_stack()
        try:
            result = mode.__torch_function__(getter, (), (tensor,), {})
        finally:
            torch._C._push_on_torch_function_stack(mode)
        if result is not NotImplemented:
            return result
    return torch.overrides.handle_torch_function(getter, (tensor,), tensor)


def push_function_modes(modes: list[Any]) -> None:
    """Restore the modes that `pop_function_modes` removed."""
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


# --- gradients ------------------------------------------------------------------------------------------------

inference_mode = torch._C._InferenceMode
"""As torch.inference_mode, which is a Python class around it."""


class grad_mode:
    """As torch.set_grad_enabled in a `with` statement; function modes are not called."""

    __slots__ = ("_is_enabled", "_was_enabled")

    def __init__(self, is_enabled: bool) -> None:
        self._is_enabled = is_enabled

    def __enter__(self) -> None:
        self._was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._is_enabled)

    def __exit__(self, *exception: object) -> None:
        torch._C._set_grad_enabled(self._was_enabled)


# --- switches ---------------------------------------------------------------------------------------------------------

# Torch's configuration modules are not imported for this: a module that is not loaded has no changed switch, and the
# environment variable that it would read decides.

FUNCTORCH, DYNAMO = "torch._functorch.config", "torch._dynamo.config"
SWITCHES: dict[str, tuple[str, str, str, Any]] = {
    "fake_tensor_propagate_real_tensors": (FUNCTORCH, "", "", False),
    "generate_fake_kernels_from_real_mismatches": (FUNCTORCH, "", "", False),
    "fake_tensor_allow_unsafe_data_ptr_access": (FUNCTORCH, "", "", True),
    "fake_tensor_allow_meta": (FUNCTORCH, "FAKE_ALLOW_META", "0", True),
    "fake_tensor_prefer_device_type": (FUNCTORCH, "", "", None),
    "fake_tensor_cache_enabled": (DYNAMO, "TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0", True),
    "fake_tensor_cache_crosscheck_enabled": (
        DYNAMO,
        "TORCH_FAKE_TENSOR_DISPATCH_CACHE_CROSSCHECK",
        "1",
        False,
    ),
}
"""Switch → its module, its environment variable, the value of that which turns it over, its default."""


def switches(*names: str) -> list[Any]:
    """The values of these switches."""
    values = []
    for name in names:
        module, variable, other, default = SWITCHES[name]
        config = sys.modules.get(module)
        if config is not None:
            values.append(getattr(config, name, default))
        else:
            values.append(default != (os.environ.get(variable) == other) if variable else default)
    return values


def capture_traceback() -> Any:
    """The stack of the caller, which is formatted when it is shown."""
    from torch.utils._traceback import CapturedTraceback  # why: only for debugging

    return CapturedTraceback.extract(skip=2)


class FakeTensorConfig:
    """Switches for debugging. `debug`: each stand-in keeps the stack of the line that made it, as `_debug_trace`; its
    initial value is the environment variable TORCH_FAKE_TENSOR_DEBUG."""

    debug = os.environ.get("TORCH_FAKE_TENSOR_DEBUG", "0") == "1"
