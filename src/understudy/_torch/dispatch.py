"""The dispatcher: dispatch keys, and what is set for the operators of a thread."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch._ops as _ops
import torch.autograd.forward_ad as _forward_ad
import torch.optim.optimizer as _optimizer
import torch.utils._foreach_utils as _foreach_utils
import torch.utils._python_dispatch as _modes
from torch import Tensor
from torch._C import DispatchKey

from understudy._torch.identity import is_module_conversion
from understudy._torch.modes import (
    FAKE,
    active_fake_mode,
    active_recorder,
    count_function_modes,
    is_recorded_above_autograd,
    no_modes,
)
from understudy._torch.tensors import DispatchKeySet, NoDispatch, innermost, is_stand_in
from understudy.contexts import GuardedExit, guard_exit
from understudy.patching import ANY_MODE, switch


def hide_from_compiler(function: object) -> None:
    """Neither this function nor what it calls is compiled, even where a compiled function called it."""
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def allow_foreach(kind: Any) -> None:
    """Let optimizers take tensors of this class for as good as plain ones when they choose their kernels."""
    for supported in (_foreach_utils._foreach_supported_types, _optimizer._foreach_supported_types):
        if kind not in supported:
            supported.append(kind)


# --- the stack of modes -----------------------------------------------------------------------------------


def python_versions() -> Any:
    """A context in which operators that torch has written in Python as well are taken from there."""
    from torch._dispatch.python import enable_python_dispatcher  # why: only symbolic sizes need it

    return enable_python_dispatcher()


def call_innermost_mode(op: object, args: tuple[object, ...]) -> Any:
    """Call an operator on stand-ins as C++ does below autograd; without C++, numbers may be symbols in any place."""
    stand_in = next(value for value in args if is_stand_in(value))
    if not count_dispatch_modes():
        return stand_in.fake_mode.__torch_dispatch__(op, (type(stand_in),), args, {})
    with _modes._pop_mode_temporarily() as mode:
        return mode.__torch_dispatch__(op, (type(stand_in),), args, {})


def is_recording() -> bool:
    """Whether something takes down the operators of this thread in a graph."""
    keys = torch._C._TorchDispatchModeKey
    return is_recorded_above_autograd() or any(
        torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL)
    )


def is_past_dispatch() -> bool:
    """Whether operators that are called just now in this thread are heard of by no mode."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python)


def below_autograd() -> Any:
    return torch._C._AutoDispatchBelowAutograd()


def with_autograd() -> Any:
    """Autograd in calls of this thread again, where a rule of its own has left it out."""
    include, exclude = dispatch_keys_of_thread()
    return torch._C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD_KEYS)


_AUTOGRAD_KEYS = DispatchKeySet(DispatchKey.AutogradFunctionality) | DispatchKeySet(DispatchKey.AutogradOther)
_AUTOGRAD_KEYS |= DispatchKeySet(DispatchKey.AutogradNestedTensor)


def dispatch_keys_of_thread() -> tuple[Any, Any]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


class _CompilerFlags(NamedTuple):
    """As they were, and whether modes of torch's were active in the thread that was the first to enter one of ours."""

    in_mode: bool
    keeps_out_compiler: bool
    is_in_other_mode: bool


_flags_before: list[_CompilerFlags] = []


@switch("torch.utils._python_dispatch: the two flags that say 'in some mode'", during=ANY_MODE)
def turn_compiler_flags(is_on: bool) -> None:
    """torch's compiler leaves code alone that runs in a mode, by two flags of the process. torch's modes save and restore
    them, which breaks when two threads overlap; counting does not."""
    if is_on and not _flags_before:
        flags = _modes._is_in_torch_dispatch_mode, _modes._is_in_any_mode_without_ignore_compile_internals
        _flags_before.append(_CompilerFlags(*flags, bool(_other_modes())))
    if is_on:
        _set_flags(True, True)
    elif _flags_before:
        _restore_flags(_flags_before[0], _other_modes())
        _flags_before.clear()


def _other_modes() -> list[Any]:
    """Modes that are none of ours, of this thread, the outermost first."""
    return [mode for mode in _modes._get_current_dispatch_mode_stack() if getattr(mode, "old_dispatch_mode_flags", None)]


def _restore_flags(before: _CompilerFlags, others: list[Any]) -> None:
    """One of torch's that was entered inside of ours, and is left later, restores what it found then; one that was entered
    before ours may have been left already."""
    if others and not before.in_mode:
        for saved, value in (
            (others[0].old_dispatch_mode_flags, before.in_mode),
            (others[0].old_without_ignore_compile_internals_dispatch_mode_flags, before.keeps_out_compiler),
        ):
            saved[-1] = value
        return
    has_ended = before.is_in_other_mode and not others
    _set_flags(before.in_mode and not has_ended, before.keeps_out_compiler and not has_ended)


def _set_flags(in_mode: bool, keeps_out_compiler: bool) -> None:
    _modes._is_in_torch_dispatch_mode = in_mode
    _modes._is_in_any_mode_without_ignore_compile_internals = keeps_out_compiler
    _modes.set_is_in_mode_without_ignore_compile_internals(keeps_out_compiler)


def is_heard_alone(mode: object) -> bool:
    """Whether a call on stand-ins of `mode` reaches it and nothing else: no other mode, transform or cast."""
    return (
        torch._C._len_torch_dispatch_stack() == (torch._C._get_dispatch_mode(FAKE) is mode)
        and torch._C._len_torch_function_stack() == 0
        and not any(map(torch.is_autocast_enabled, _CASTING_DEVICES))
        and torch._C._functorch.peek_interpreter_stack() is None
        and not is_recorded_above_autograd()
    )


def is_function_heard(harmless: str = "only_counts") -> bool:
    """Whether there is a mode for torch functions that does more than count them. `harmless`: what it is known by."""
    stack = range(torch._C._len_torch_function_stack())
    return not all(getattr(torch._C._get_function_stack_at(i), harmless, False) for i in stack)


def is_recorded_alone(mode: object, recorder: object) -> bool:
    """Whether a call reaches this recorder and this fake mode and nothing else: no other mode, transform, cast or hook of
    all modules."""
    count = 2 - is_recorded_above_autograd()  # a recorder above autograd has a place of its own
    return (
        torch._C._len_torch_dispatch_stack() == count
        and torch._C._get_dispatch_mode(FAKE) is mode
        and active_recorder() is recorder
        and not is_function_heard("only_records")
        and not torch.nn.modules.module._has_any_global_hook()
        and not any(map(torch.is_autocast_enabled, _CASTING_DEVICES))
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.fx.traceback.has_preserved_node_meta()
    )


_CASTING_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def goes_unnoticed(mode: object) -> bool:
    """Whether an operator that autocast does not concern, on stand-ins of `mode`, could be left out of dispatch.

    Nobody but the mode would hear of it, and autograd, where no gradient is asked for, has only writes to count:
    neither inference nor forward mode.
    """
    return (
        _count_dispatch_modes() == (_dispatch_mode(FAKE) is mode)
        and count_function_modes() == 0
        and _transform() is None
        and not (_is_inference() or _is_profiled() or _is_traced() or _is_included(_PRE_DISPATCH))
        and _forward_ad._current_level < 0
    )


_count_dispatch_modes, _dispatch_mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_set_default_dtype = torch.set_default_dtype
_transform, _is_inference = torch._C._functorch.peek_interpreter_stack, torch.is_inference_mode_enabled
_is_profiled, _is_traced = torch._C._autograd._profiler_enabled, torch._C._is_tracing
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
count_dispatch_modes: Callable[[], int] = _count_dispatch_modes


class ReplayOnRealTensors:
    """Recorded operators run on real tensors: past every mode, not cast again, with the default dtype of then."""

    __slots__ = ("_dtype", "_dtype_before", "_guards")

    def __init__(self, default_dtype: torch.dtype) -> None:
        self._dtype = default_dtype

    def __enter__(self) -> None:
        self._dtype_before = torch.get_default_dtype()
        self._guards: list[Any] = []
        guard_exit(self, self._leave)
        # One after the other: the later one is to be let go of first.
        self._guards.append(NoDispatch())
        self._guards.append(torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS))
        self._guards[1].__enter__()
        if self._dtype_before is not self._dtype:
            _set_default_dtype(self._dtype)

    @GuardedExit
    def __exit__(self, *exception: object) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._dtype_before is not self._dtype:
            _set_default_dtype(self._dtype_before)
        while self._guards:
            self._guards[-1].__exit__(None, None, None)
            self._guards.pop()


_AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU)


def has_modes() -> bool:
    """Whether a dispatch mode of this thread would be asked."""
    return bool(torch._C._len_torch_dispatch_stack() > 0)


# --- recording ----------------------------------------------------------------------------------------------

_PRE_DISPATCH = DispatchKey.PreDispatch
def goes_above_autograd(mode: object) -> None:
    """Say of a recorder, when it is made, that its place is above autograd."""
    mode.__dict__["_dispatch_key"] = _PRE_DISPATCH


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
enter_autocast: Any = torch.amp.autocast_mode._enter_autocast
exit_autocast: Any = torch.amp.autocast_mode._exit_autocast


def is_transformed() -> bool:
    """Whether a transform of torch.func is under way in this thread."""
    return _transform() is not None


def place_of_generator() -> tuple[Any, str]:
    """Where the code of a graph finds the class of generators: (module, name)."""
    return torch._C, "Generator"


# --- devices that are not here ------------------------------------------------------------------------------


SPARE_AUTOCAST = "AutocastIPU"
SPARE_AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastIPU)
STAND_IN_KEYS = SPARE_AUTOCAST_KEYS | DispatchKeySet(DispatchKey.CPU)
"""Besides autocast: the CPU's bit, below that of meta and so without effect on dispatch, lets C++ take the tensor for
one whose data may be set to a tensor of another device, as between real devices."""


def below(keys: Any) -> Any:
    """A context in which calls go past these dispatch keys."""
    return torch._C._ExcludeDispatchKeyGuard(keys)


BATCHED_KEYS = DispatchKeySet(DispatchKey.FuncTorchBatched)


def kernel_libraries(key: str) -> tuple[Any, Any]:
    """A library for kernels on a key, and one that lets every other operator fall through it."""
    others = torch.library.Library("_", "IMPL", key)
    others.fallback(torch.library.fallthrough_kernel)
    return torch.library.Library("aten", "IMPL", key), others


def check_assigned_data(check: Callable[[Tensor, Any], None]) -> Any:
    """Have `check(tensor, data)` called before `tensor.data = data` if a mode is active, or one of the two is of a class
    with a dispatch of its own, inside of modes and outside. In force while the library lives that is returned.

    C++ does it past every dispatch, but asks an operator whether the types fit. Autograd's key answers that by itself; it
    falls through from here on, so that Python's key is asked. For plain tensors nothing changes.
    """
    name = "_has_compatible_shallow_copy_type"
    native = torch.library.get_kernel(f"aten::{name}", "CPU")

    def do_types_fit(keys: Any, tensor: Tensor, data: Tensor) -> Any:
        if not is_module_conversion(sys._getframe(1)):
            check(tensor, data)
        return native.call_boxed(keys, tensor, data)

    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCPU", "AutogradMeta"):
        library.impl(name, torch.library.fallthrough_kernel, key)
    library.impl(name, do_types_fit, "Python", with_keyset=True)
    return library


# --- composite operators on symbolic sizes ------------------------------------------------------------------

SPARE_WRAPPER, SPARE_MODE = "TESTING_ONLY_GenericWrapper", "TESTING_ONLY_GenericMode"
"""Dispatch keys above all that matter, which torch keeps for its own tests. The second: not for contiguous tensors."""
_spare: Any = [torch._C._parse_dispatch_key(name) for name in (SPARE_WRAPPER, SPARE_MODE)]
SYMBOLIC_KEYS = DispatchKeySet(_spare[0])
SCATTERED_KEYS = SYMBOLIC_KEYS | DispatchKeySet(_spare[1])
native_call: Callable[[Any], Callable[..., Any]] = operator.attrgetter("_op")
"""What a plain operator does when it is called, without the call of Python."""


def key_without_spare(op: object, key: object, args: object, kwargs: object) -> Any:
    """The key on which a higher-order operator goes on, which knows nothing of the spare ones."""
    if key not in _SPARE:
        return key
    keys = _ops._compute_keyset(args, kwargs, op.non_fallthrough_keys - SCATTERED_KEYS - SPARE_AUTOCAST_KEYS)
    return keys.highestPriorityTypeId()


_SPARE = (*_spare, DispatchKey.AutocastIPU)


def composites_are_special() -> bool:
    """Whether a composite operator, called just now, is more than the operators that it is made of.

    It is heard of itself where autograd is left out (below other operators, and in inference mode), by transforms, by
    modes for functions and by recorders above autograd; and autocast has a say.
    """
    return (
        _excluded_keys().raw_repr() & _TELLING_KEYS != _SILENT_KEYS
        or count_function_modes() != 0
        or _transform() is not None
        or _is_traced()
        or _is_included(_PRE_DISPATCH)
    )


_excluded_keys = torch._C._dispatch_tls_local_exclude_set
_SILENT_KEYS = sum(
    DispatchKeySet(key).raw_repr()
    for name, key in DispatchKey.__members__.items()
    if name.startswith("Autocast") and name != SPARE_AUTOCAST
)
"""The keys of autocast, which are excluded where it is off."""
_TELLING_KEYS = _SILENT_KEYS | DispatchKeySet(DispatchKey.AutogradOther).raw_repr()


def settings() -> tuple[Any, ...]:
    """What is set for all operators and makes a difference to which of them run."""
    return (
        torch.get_default_dtype(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch._C._get_mkldnn_enabled(), torch.get_float32_matmul_precision(), torch.get_num_threads(),
        torch.is_anomaly_enabled(), *attention_backends(),
    )  # fmt: skip


def attention_backends() -> list[bool]:
    """The switches by which C++ chooses how to compute attention."""
    return [is_on() for is_on in _ATTENTION_SWITCHES]


_ATTENTION_SWITCHES = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_overrideable_sdp_enabled,
)


def function_modes_from(mode: object) -> list[Any]:
    """This mode for torch functions, and those that were entered after it, in their order."""
    stack = [torch._C._get_function_stack_at(i) for i in range(count_function_modes())]
    place = next((i for i in range(len(stack) - 1, -1, -1) if stack[i] is mode), len(stack))
    return stack[place:]


def pop_function_modes(count: int) -> None:
    for _ in range(count):
        torch._C._pop_torch_function_stack()


def push_function_modes(taken: list[Any]) -> None:
    """Put back what `pop_function_modes` took out, as far as an interrupt has let it."""
    for mode in taken:
        if mode not in function_modes_from(mode):
            torch._C._push_on_torch_function_stack(mode)


def hollow() -> Tensor:
    """A tensor of nothing: what values of a trace are made of."""
    with no_modes(), torch._C.DisableTorchFunction():
        return torch.empty((), dtype=torch.int64, device="meta")


def is_in_backward() -> bool:
    """Whether this thread computes gradients: autograd's engine is at work."""
    return bool(torch._C._current_graph_task_id() != -1)


def simulated_facts(tensor: object) -> Any:
    """What is known of the device on which a stand-in is, seen through wrappers; None if nothing is."""
    mode = getattr(innermost(tensor), "fake_mode", None) or active_fake_mode()
    return getattr(mode, "device_facts", None)


def make_fake_store() -> Any:
    """The store of torch's fake process group, which it registers with its import."""
    from torch.testing._internal.distributed.fake_pg import (
        FakeStore,  # why: only programs with processes need it
    )

    return FakeStore()


def set_bucket_hook(reducer: Any, hook: Callable[..., object]) -> None:
    """What DistributedDataParallel calls with each bucket of gradients that is complete."""
    torch.distributed._register_comm_hook(reducer, None, hook)
