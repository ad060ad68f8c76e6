"""The dispatcher: dispatch keys, and its thread-local state."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.machinery import PathFinder
from itertools import count
from typing import Any, cast

import torch
import torch._ops as _ops
import torch.autograd.forward_ad as _forward_ad
import torch.optim.optimizer as _optimizer
import torch.utils._foreach_utils as _foreach_utils
import torch.utils._python_dispatch as _modes
from torch import Tensor
from torch._C import DispatchKey
from torch.utils._device import DeviceContext

from understudy._torch.functorch import has_transforms
from understudy._torch.identity import call_on_demand, is_module_conversion
from understudy._torch.modes import (
    FAKE,
    active_fake_mode,
    count_function_modes,
    is_recorded_above_autograd,
    no_modes,
)
from understudy._torch.schema import OpOverload, tracks_own_views
from understudy._torch.tensors import DispatchKeySet, NoDispatch, innermost
from understudy.patching import ANY_MODE, ENGINE, switch


def hide_from_compiler(function: object) -> None:
    """Exclude this function and its callees from compilation, even if a compiled function calls it."""
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def allow_foreach(kind: Any) -> None:
    """Let optimizers choose their foreach kernels for tensors of this class."""
    for supported in (_foreach_utils._foreach_supported_types, _optimizer._foreach_supported_types):
        if kind not in supported:
            supported.append(kind)


class CompilerLoader:
    """Loads torch's compiler without patches. It makes tables of torch's functions when it is loaded, which optimizers
    and control-flow operators do when they are first used: replacements in these tables would stay."""

    def find_spec(self, name: str, path: Any = None, target: object = None) -> Any:
        """The spec of the compiler's package, for a program that imports it. Other packages are left to others."""
        if name != "torch._dynamo":
            return None
        sys.meta_path.remove(self)
        spec: Any = PathFinder.find_spec(name, path)
        if spec is not None:
            load = spec.loader.exec_module
            vars(spec.loader)["exec_module"] = lambda module: self._load(spec.loader, load, module)
        return spec

    @staticmethod
    def _load(loader: object, load: Callable[[object], None], module: object) -> None:
        del vars(loader)["exec_module"]
        with ENGINE.suspend():
            load(module)


if "torch._dynamo" not in sys.modules:
    sys.meta_path.insert(0, CompilerLoader())


# --- the stack of modes -----------------------------------------------------------------------------------


python_versions = call_on_demand("torch._dispatch.python", "enable_python_dispatcher")
"""A context in which Python implementations of operators are used where torch has them."""


def is_recording() -> bool:
    """Whether the operators of this thread are recorded in a graph."""
    keys = torch._C._TorchDispatchModeKey
    return is_recorded_above_autograd() or any(
        torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL)
    )


def is_past_dispatch() -> bool:
    """Whether dispatch modes are disabled in this thread."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python)


def below_autograd() -> Any:
    """A context in which autograd is excluded, so that composite operators are not decomposed."""
    return torch._C._AutoDispatchBelowAutograd()


def with_autograd() -> Any:
    """A context in which autograd is active again, inside a rule of autograd that has excluded it."""
    include, exclude = dispatch_keys_of_thread()
    return torch._C._ForceDispatchKeyGuard(include, exclude - _AUTOGRAD_KEYS)


_AUTOGRAD_KEYS = DispatchKeySet(DispatchKey.AutogradFunctionality) | DispatchKeySet(DispatchKey.AutogradOther)
_AUTOGRAD_KEYS |= DispatchKeySet(DispatchKey.AutogradNestedTensor)


def inside_composite(op: OpOverload) -> Any:
    """A context as eager has it inside of a composite operator. A mode that is given the whole operator is called where
    C++ does not cast and, in inference mode, tracks no views and counts no writes; inside of it, eager does, unless the
    operator has a kernel of its own for that."""
    enabled = _list_enabled_autocast_keys()
    is_cast_whole = any(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key.name) for key in enabled
    )
    open_keys = [SPARE_AUTOCAST_KEYS, *map(DispatchKeySet, enabled)] if enabled and not is_cast_whole else []
    if torch.is_inference_mode_enabled() and not tracks_own_views(op):
        open_keys.append(_VIEW_KEYS)
    guard: Any = nullcontext()
    if open_keys:
        include, exclude = dispatch_keys_of_thread()
        for keys in open_keys:
            exclude = exclude - keys
        guard = torch._C._ForceDispatchKeyGuard(include, exclude)
    return without_casts(guard) if is_cast_whole else guard


_VIEW_KEYS = DispatchKeySet(DispatchKey.ADInplaceOrView)


class _CastsOfThread(threading.local):
    whole = 0
    """How many operators that autocast has cast as a whole are being decomposed, one inside of the other."""


_casts = _CastsOfThread()


@contextmanager
def without_casts(guard: Any) -> Iterator[None]:
    """Inside, autocast is disabled, as in eager inside of an operator that it has cast as a whole."""
    _casts.whole += 1
    try:
        with guard:
            yield
    finally:
        _casts.whole -= 1


def _list_enabled_autocast_keys() -> list[Any]:
    enabled = enabled_autocast_keys()
    return [key for key in _AUTOCAST_OF_DEVICES if enabled & DispatchKeySet(key).raw_repr()]


def enabled_autocast_keys() -> int:
    """The dispatch keys of autocast that the program has enabled, as bits. While a mode or a stand-in handles a call, they
    are excluded: the answer is the state that C++ saved before."""
    if _casts.whole:
        return 0
    if not _is_key_excluded(DispatchKey.PythonTLSSnapshot):
        return _AUTOCAST_OFF_KEYS & ~_excluded_keys().raw_repr()
    with torch._C._RestorePythonTLSSnapshot():
        return _AUTOCAST_OFF_KEYS & ~_excluded_keys().raw_repr()


def dispatch_keys_of_thread() -> tuple[Any, Any]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


_flags_before: list[tuple[bool, bool, bool]] = []
"""The two flags before the first mode of ours, and whether other modes were active in the thread that entered it."""


@switch("torch.utils._python_dispatch: the two flags that say 'in some mode'", during=ANY_MODE)
def turn_compiler_flags(is_on: bool) -> None:
    """With two flags of the process, torch's compiler skips code that runs in a mode. torch's modes save and restore
    them, which breaks when two threads overlap; counting does not."""
    if is_on:
        if not _flags_before:
            flags = _modes._is_in_torch_dispatch_mode, _modes._is_in_any_mode_without_ignore_compile_internals
            _flags_before.append((*flags, bool(_count_dispatch_modes() and _other_modes())))
        _set_flags(True, True)
    elif _flags_before:
        _restore_flags(*_flags_before[0], _other_modes() if _count_dispatch_modes() else [])
        _flags_before.clear()


_count_dispatch_modes = torch._C._len_torch_dispatch_stack


def _other_modes() -> list[Any]:
    """The modes of this thread that are not ours, outermost first."""
    return [
        mode
        for mode in _modes._get_current_dispatch_mode_stack()
        if getattr(mode, "old_dispatch_mode_flags", None)
    ]


def _restore_flags(
    in_mode: bool, keeps_out_compiler: bool, was_in_other_mode: bool, others: list[Any]
) -> None:
    """Also correct the flags that torch's modes have saved: one that was entered inside ours restores them later; one
    that was entered before ours may have been left already."""
    if others and not in_mode:
        others[0].old_dispatch_mode_flags[-1] = in_mode
        others[0].old_without_ignore_compile_internals_dispatch_mode_flags[-1] = keeps_out_compiler
        return
    has_ended = was_in_other_mode and not others
    _set_flags(in_mode and not has_ended, keeps_out_compiler and not has_ended)


def _set_flags(in_mode: bool, keeps_out_compiler: bool) -> None:
    _modes._is_in_torch_dispatch_mode = in_mode
    _modes._is_in_any_mode_without_ignore_compile_internals = keeps_out_compiler
    _modes.set_is_in_mode_without_ignore_compile_internals(keeps_out_compiler)


def is_only_mode(mode: object) -> bool:
    """Whether a call on stand-ins of `mode` reaches only this mode: no other mode, transform or autocast is active."""
    return (
        torch._C._len_torch_dispatch_stack() == (torch._C._get_dispatch_mode(FAKE) is mode)
        and torch._C._len_torch_function_stack() == 0
        and not is_autocast_enabled()
        and not has_transforms()
        and not is_recorded_above_autograd()
    )


def has_function_modes() -> bool:
    """Whether there is a function mode other than those that only count calls, which have the attribute `only_counts`."""
    stack = range(torch._C._len_torch_function_stack())
    return not all(getattr(torch._C._get_function_stack_at(i), "only_counts", False) for i in stack)


def is_autocast_enabled() -> bool:
    """Whether it is enabled for a device of the user's: stand-ins are cast on a key of a backend that has no users."""
    return bool(_excluded_keys().raw_repr() & _AUTOCAST_OFF_KEYS != _AUTOCAST_OFF_KEYS)


def can_skip_dispatch_for(mode: object) -> bool:
    """Whether the dispatch of an operator without autocast rule, on stand-ins of `mode`, can be skipped.

    No other mode would see it, and if no gradient is required, autograd only bumps version counters: neither inference
    mode nor forward mode is active.
    """
    return (
        _count_dispatch_modes() == (_dispatch_mode(FAKE) is mode)
        and (count_function_modes() == 0 or _has_only_device_contexts())
        and _transform() is None
        and not (_is_inference() or _is_profiled() or _is_traced() or _is_included(_PRE_DISPATCH))
        and _forward_ad._current_level < 0
    )


def _has_only_device_contexts() -> bool:
    """`with torch.device(...)` is a function mode that only affects factories."""
    count = count_function_modes()
    if count <= 1:  # called for every new parameter: a generator would be slower
        return count == 0 or type(_function_mode_at(0)) is DeviceContext
    return all(type(_function_mode_at(position)) is DeviceContext for position in range(count))


def device_of_context() -> torch.device | None:
    """The device that `with torch.device(...)` gives to factories; None outside. There must be no other function modes."""
    count = count_function_modes()
    return _function_mode_at(count - 1).device if count else None


def has_registration_hooks() -> bool:
    """Whether a function of the user is called for new parameters or buffers of any module."""
    return bool(_PARAMETER_HOOKS or _BUFFER_HOOKS)


_function_mode_at: Any = torch._C._get_function_stack_at
_PARAMETER_HOOKS = torch.nn.modules.module._global_parameter_registration_hooks
_BUFFER_HOOKS = torch.nn.modules.module._global_buffer_registration_hooks
_count_dispatch_modes, _dispatch_mode = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
_set_default_dtype = torch.set_default_dtype
_transform, _is_inference = torch._C._functorch.peek_interpreter_stack, torch.is_inference_mode_enabled
_is_profiled, _is_traced = torch._C._autograd._profiler_enabled, torch._C._is_tracing
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
count_dispatch_modes: Callable[[], int] = _count_dispatch_modes


class ReplayOnRealTensors:
    """A context to run recorded operators on real tensors: below all modes, without autocast, with the recorded default
    dtype."""

    __slots__ = ("_dtype", "_dtype_before", "_guards")

    def __init__(self, default_dtype: torch.dtype) -> None:
        self._dtype = default_dtype

    def __enter__(self) -> None:
        self._dtype_before = torch.get_default_dtype()
        # In this order, because the last one has to be freed first.
        self._guards = [NoDispatch(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)]
        self._guards[1].__enter__()
        if self._dtype_before is not self._dtype:
            _set_default_dtype(self._dtype)

    def __exit__(self, *exception: object) -> None:
        if self._dtype_before is not self._dtype:
            _set_default_dtype(self._dtype_before)
        while self._guards:
            self._guards[-1].__exit__(None, None, None)
            self._guards.pop()


_AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU)


def replays_on_real_tensors(default_dtype: torch.dtype) -> bool:
    """Whether operators called now run as in `ReplayOnRealTensors`."""
    is_below = _is_key_excluded(DispatchKey.Python) and _is_key_excluded(DispatchKey.AutocastCPU)
    return bool(is_below) and torch.get_default_dtype() is default_dtype


def has_modes() -> bool:
    """Whether a dispatch mode is active in this thread."""
    return bool(torch._C._len_torch_dispatch_stack() > 0)


def list_program_modes() -> list[Any]:
    """The dispatch modes of this thread that are neither ours nor torch's own, outermost first."""
    has_fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if torch._C._len_torch_dispatch_stack() <= has_fake_mode:
        return []
    return [mode for mode in _other_modes() if not type(mode).__module__.startswith("torch.")]


# --- recording ----------------------------------------------------------------------------------------------

_PRE_DISPATCH = DispatchKey.PreDispatch


def mark_above_autograd(mode: object) -> None:
    """Mark a new recorder as one above autograd."""
    mode.__dict__["_dispatch_key"] = _PRE_DISPATCH


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
enter_autocast: Any = torch.amp.autocast_mode._enter_autocast
exit_autocast: Any = torch.amp.autocast_mode._exit_autocast
handle_torch_function: Any = torch.overrides.handle_torch_function


place_of_generator: tuple[Any, str] = (torch._C, "Generator")
"""The module and name with which the code of a graph refers to the class of generators."""

# --- devices that this machine lacks ------------------------------------------------------------------------------


SPARE_AUTOCAST = "AutocastIPU"
SPARE_AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastIPU)
STAND_IN_KEYS = SPARE_AUTOCAST_KEYS | DispatchKeySet(DispatchKey.CPU)
"""Besides autocast: the CPU's bit, which has lower priority than meta and so no effect on dispatch, makes C++ accept
`tensor.data = other` between devices, as for real ones."""


def below(keys: Any) -> Any:
    """A context in which these dispatch keys are excluded."""
    return torch._C._ExcludeDispatchKeyGuard(keys)


def kernel_libraries(key: str) -> tuple[Any, Any]:
    """A library for kernels on a key, and one that makes every other operator fall through."""
    others = torch.library.Library("_", "IMPL", key)
    others.fallback(torch.library.fallthrough_kernel)
    return torch.library.Library("aten", "IMPL", key), others


def check_assigned_data(check: Callable[[Tensor, Any], None]) -> Any:
    """Call `check(tensor, data)` before `tensor.data = data` if a mode is active, or if one of the two has its own
    `__torch_dispatch__`. In force while the returned library is alive.

    C++ sets the data without a dispatch, but calls an operator to check the types. The kernel on autograd's key is
    replaced by a fall-through, so that Python's key is reached. For plain tensors nothing changes.
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
"""Dispatch keys of high priority that torch reserves for its own tests. The second is not set for contiguous tensors."""
SPARE_STATIC = "DeferredInit"
"""A dispatch key above autograd that torch reserves for another package; on stand-ins with plain sizes."""
_spare: Any = [torch._C._parse_dispatch_key(name) for name in (SPARE_WRAPPER, SPARE_MODE, SPARE_STATIC)]
SYMBOLIC_KEYS = DispatchKeySet(_spare[0])
SCATTERED_KEYS = SYMBOLIC_KEYS | DispatchKeySet(_spare[1])
STATIC_KEYS = DispatchKeySet(_spare[2])
RECIPE_KEYS = SCATTERED_KEYS | STATIC_KEYS
native_call: Callable[[Any], Callable[..., Any]] = operator.attrgetter("_op")
"""The C++ function of an operator, without its Python `__call__`."""


def key_without_spare(op: object, key: object, args: object, kwargs: object) -> Any:
    """The dispatch key of a higher-order operator without the spare keys."""
    if key not in _SPARE:
        return key
    keys = _ops._compute_keyset(args, kwargs, op.non_fallthrough_keys - RECIPE_KEYS - SPARE_AUTOCAST_KEYS)
    return keys.highestPriorityTypeId()


_SPARE = (*_spare, DispatchKey.AutocastIPU)


def can_skip_composites_for(mode: object) -> bool:
    """Whether no other mode observes a composite operator on stand-ins of `mode`, or the operators inside it.

    The questions of `composites_are_observed` and `can_skip_dispatch_for` in one function, because every composite calls
    it.
    """
    return (
        _count_dispatch_modes() == (_dispatch_mode(FAKE) is mode)
        and _excluded_keys().raw_repr() & _OBSERVED_KEYS == _AUTOCAST_OFF_KEYS
        and count_function_modes() == 0
        and _transform() is None
        and not (_is_profiled() or _is_traced() or _is_included(_PRE_DISPATCH))
        and _forward_ad._current_level < 0
    )


def composites_are_observed() -> bool:
    """Whether a composite operator called now is observable itself, and not only its inner operators.

    It is where autograd is excluded (below other operators, in inference mode), for transforms, function modes and
    recorders above autograd; and autocast may cast its arguments.
    """
    return _excluded_keys().raw_repr() & _OBSERVED_KEYS != _AUTOCAST_OFF_KEYS or _have_observers()


def only_autocast_observes_composites() -> bool:
    return not _is_key_excluded(DispatchKey.AutogradOther) and not _have_observers()


def _have_observers() -> bool:
    return (
        count_function_modes() != 0 or _transform() is not None or _is_traced() or _is_included(_PRE_DISPATCH)
    )


def casting_key(op: OpOverload, device_type: str) -> DispatchKeySet | None:
    """The key whose kernel casts the arguments of this operator now; None if autocast leaves them, or has cast them."""
    key = DispatchKey.AutocastCPU if device_type == "cpu" else DispatchKey.AutocastIPU
    is_on = device_type != "meta" and torch.is_autocast_enabled(device_type) and not _is_key_excluded(key)
    has_kernel = is_on and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key.name)
    return DispatchKeySet(key) if has_kernel else None


_excluded_keys, _is_key_excluded = (
    torch._C._dispatch_tls_local_exclude_set,
    torch._C._dispatch_tls_is_dispatch_key_excluded,
)
_AUTOCAST_OF_DEVICES = [
    key
    for name, key in DispatchKey.__members__.items()
    if name.startswith("Autocast") and name != SPARE_AUTOCAST
]
_AUTOCAST_OFF_KEYS = sum(DispatchKeySet(key).raw_repr() for key in _AUTOCAST_OF_DEVICES)
"""The keys of autocast, which are excluded where it is disabled."""
_OBSERVED_KEYS = _AUTOCAST_OFF_KEYS | DispatchKeySet(DispatchKey.AutogradOther).raw_repr()


def attention_backends() -> list[bool]:
    """The switches for the backends of attention."""
    return [is_on() for is_on in _ATTENTION_SWITCHES]


_ATTENTION_SWITCHES = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_overrideable_sdp_enabled,
)


def hollow() -> Tensor:
    """An empty tensor, from which proxies of tensors are made."""
    with no_modes(), torch._C.DisableTorchFunction():
        return torch.empty((), dtype=torch.int64, device="meta")


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def simulated_facts(tensor: object) -> Any:
    """The facts of the simulated device of a stand-in, also inside wrappers; None if there are none."""
    mode = getattr(innermost(tensor), "fake_mode", None) or active_fake_mode()
    return getattr(mode, "device_facts", None)


make_fake_store = call_on_demand("torch.testing._internal.distributed.fake_pg", "FakeStore")
"""The store of torch's fake process group, which it registers with its import."""


def make_finished_work() -> Any:
    """What a collective returns that is done, as operators hold it."""
    from torch._C._distributed_c10d import FakeWork  # why: builds without torch.distributed do not have it

    work = FakeWork()
    work.seq_id = next(_work_numbers)
    return cast(Any, work).boxed()


_work_numbers = count(1)


def set_bucket_hook(reducer: Any, state: object, hook: Callable[..., object]) -> None:
    """Set the communication hook, which DistributedDataParallel calls with `state` and each complete bucket of gradients."""
    torch.distributed._register_comm_hook(reducer, state, hook)


def assign_buckets(tensors: list[Tensor], size: int) -> list[list[int]]:
    """The indices of the tensors of each bucket of about so many bytes."""
    return torch.distributed._compute_bucket_assignment_by_size(tensors, [size])[0]


flatten_tensors: Callable[..., Any] = torch._utils._flatten_dense_tensors
unflatten_tensors: Callable[..., Any] = torch._utils._unflatten_dense_tensors
"""Dense tensors as one of one dimension, and back."""


WORK_WAITS = "torch.distributed.Work.wait", "torch._C._distributed_c10d.FakeWork.wait"
"""What a program calls to wait for a collective: the one of torch's fake process group has its own."""


def name_of_process_group(group: Any) -> str:
    """The name of a process group, or of the object that stands for it in operators."""
    if isinstance(group, torch.ScriptObject):
        group = torch.distributed.ProcessGroup.unbox(group)
    return str(group.group_name)


def ranks_of_process_group(name: str) -> list[int]:
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group
    return torch.distributed.get_process_group_ranks(resolve(name))


def unsharded_gradients(module: torch.nn.Module) -> list[Tensor]:
    """Gradients of whole parameters that FSDP2 keeps until it reduces them."""
    state = getattr(type(module), "_get_fsdp_state", None)
    if state is None:
        return []
    found = [
        gradient
        for group in getattr(state(module), "_fsdp_param_groups", None) or [state(module)._fsdp_param_group]
        for parameter in (group.fsdp_params if group is not None else ())
        for gradient in (
            parameter.unsharded_accumulated_grad,
            getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
        )
    ]
    return [gradient for gradient in found if gradient is not None]


@contextmanager
def with_meta_kernels() -> Iterator[None]:
    """Inside, the kernels of the meta device run on stand-ins, without a dispatch to Python."""
    with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
        torch._C._set_meta_in_tls_dispatch_include(True)
        yield
