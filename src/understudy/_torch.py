"""The only file that touches private torch API: a new torch release is this file's work.

What is here: the dispatcher's objects under stable names, the making of tensors without data, the stack of
modes, registered fakes and decompositions of operators, and the names of torch's own fake classes, which
torch and its ecosystem ask for by `isinstance`. Those classes are named, never used.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
import torch._ops as _ops
import torch.autograd.forward_ad as _forward_ad
import torch.optim.optimizer as _optimizer
import torch.utils._foreach_utils as _foreach_utils
import torch.utils._python_dispatch as _modes
from torch import Tensor
from torch._C import DispatchKey
from torch._library.custom_ops import OPDEFS as _custom_definitions
from torch._library.simple_registry import singleton as _custom_registry
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nested._internal.nested_int import NestedIntNode as NestedIntNode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import LeafSpec, TreeSpec, tree_flatten, tree_map, tree_unflatten

__all__ = [
    "DispatchKey",
    "HigherOrderOperator",
    "LeafSpec",
    "OpOverload",
    "TorchDispatchMode",
    "TreeSpec",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]

# --- tensors without data ---------------------------------------------------------------------------------

make_wrapper: Any = Tensor._make_wrapper_subclass
make_subclass = Tensor._make_subclass
give_storage: Callable[[Tensor, Tensor], None] = torch._functionalize_unsafe_set
"""give_storage(tensor, other): let `tensor` stand on the storage of `other`, its metadata unchanged."""
NoDispatch = torch._C._DisableTorchDispatch
"""While such an object lives, calls go past every `__torch_dispatch__` straight to the C++ kernels."""
no_torch_function: Any = torch._C._disabled_torch_function_impl
no_torch_dispatch = torch._C._disabled_torch_dispatch_impl
set_conj, set_neg = torch._C._set_conj, torch._C._set_neg
negative_view = torch._neg_view
forbid_data_pointer = torch._C._set_throw_on_mutable_data_ptr
native_device = torch._C.TensorBase.device.__get__
native_data: Any = torch._C.TensorBase.data
set_native_data: Callable[[Tensor, Tensor], None] = native_data.__set__
DispatchKeySet = torch._C.DispatchKeySet
ZERO_TENSOR_KEYS = DispatchKeySet(DispatchKey.ZeroTensor)
native_storage, native_clone = torch._C.TensorBase.untyped_storage, torch._C.TensorBase.clone
NoTorchFunction = torch._C.DisableTorchFunctionSubclass
NoFunctionModes: Any = torch._C.DisableTorchFunction
"""Inside, calls go past every `__torch_function__`, those of modes too."""


def storage_id(tensor: Tensor) -> int:
    """A number that two tensors share exactly when they share their storage."""
    return native_storage(tensor)._cdata


def is_zero(tensor: Tensor) -> bool:
    """Whether it is one of those that forward differentiation makes for a gradient of zero, without memory."""
    return tensor._is_zerotensor()


def returns_nothing(op: Any) -> bool:
    return not op._schema.returns


def has_out_arguments(op: Any) -> bool:
    """Whether results are written to tensors that are given, which are resized to fit."""
    return any(argument.is_out for argument in op._schema.arguments)


def bytes_of(tensor: Tensor) -> bytes:
    """What is in the storage of a real CPU tensor."""
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def real_bytes(contents: bytes) -> Tensor:
    """A real tensor of these bytes."""
    with PastDispatch():
        return torch.frombuffer(bytearray(contents), dtype=torch.uint8)


def share_storage(tensor: Tensor, storage: Any) -> None:
    """Let `tensor` stand on `storage`, its metadata unchanged."""
    guard = NoDispatch()
    try:
        torch.ops.aten.set_.source_Storage_storage_offset(
            tensor, storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    finally:
        del guard


def as_result(leaf: Tensor) -> Any:
    """A tensor on the same storage with the same metadata that autograd takes for the result of a computation."""
    return _Result.apply(leaf)


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


weak_storage = StorageWeakRef


def is_expired(reference: Any) -> bool:
    return bool(reference.expired())


def strong_storage(reference: Any) -> Any:
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def hide_from_compiler(function: Any) -> None:
    """Neither this function nor what it calls is compiled, even where a compiled function called it."""
    eval_frame = torch._C._dynamo.eval_frame
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


def allow_foreach(kind: Any) -> None:
    """Let optimizers take tensors of this class for as good as plain ones when they choose their kernels."""
    for supported in (_foreach_utils._foreach_supported_types, _optimizer._foreach_supported_types):
        if kind not in supported:
            supported.append(kind)


def is_functorch_wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


ORDINARY_KEYS = torch._C._dispatch_keys(torch.empty(0)).raw_repr()


def is_ordinary(tensor: Tensor) -> bool:
    """Whether it is a plain tensor on the CPU: no layout, wrapper, lazy conjugation or inference is part of it."""
    return bool(torch._C._dispatch_keys(tensor).raw_repr() == ORDINARY_KEYS)


def unwrapped(tensor: Tensor) -> Any:
    """What is inside a functional or functorch wrapper, None if this is neither."""
    if torch._is_functional_tensor(tensor):
        return torch._from_functional_tensor(tensor)
    if is_functorch_wrapped(tensor):
        return torch._C._functorch.get_unwrapped(tensor)
    return None


def innermost(value: Any) -> Any:
    """What is inside of all functional and functorch wrappers; anything else as it is."""
    while isinstance(value, Tensor):
        if torch._is_functional_tensor(value):
            torch._sync(value)
        inner = value.elem if is_functional_wrapper(type(value)) else unwrapped(value)
        if inner is None:
            break
        value = inner
    return value


def new_nested_int(kind: Any) -> Any:
    """The size of a jagged dimension, equal to no other. `kind` is the class of its node."""
    nested: Any = sys.modules["torch.nested._internal.nested_tensor"]
    number = nested._tensor_id_counter
    nested._tensor_id_counter = number + 1
    return torch.SymInt(kind(number, 1))


def uses_python_dispatch(kind: type) -> bool:
    """Whether operators on tensors of this class go to a `__torch_dispatch__` of its own."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_functional_wrapper(kind: type) -> bool:
    """Whether tensors of this class are those of functionalization."""
    return getattr(kind, "_mode_key", None) == torch._C._TorchDispatchModeKey.FUNCTIONAL


# --- the stack of modes -----------------------------------------------------------------------------------

FAKE = torch._C._TorchDispatchModeKey.FAKE
Answer = TypeVar("Answer")
active_fake_mode: Callable[[], Any] = functools.partial(torch._C._get_dispatch_mode, FAKE)

_flag_lock = threading.Lock()
_flag_depth = 0
_flags_before: tuple[bool, bool] = (False, False)


def push_fake_mode(mode: Any) -> Any:
    """Put `mode` into the slot for fake modes of this thread; gives back the one that was there."""
    _raise_flags()  # first: it takes longest, and leaves nothing behind if it is interrupted
    previous = torch._C._unset_dispatch_mode(FAKE)
    only_lift = torch._C._only_lift_cpu_tensors()
    autocast = open_spare_autocast(True)
    # torch.tensor(..., device="cuda") then makes a CPU tensor and moves it through the dispatcher.
    torch._C._set_only_lift_cpu_tensors(True)
    _modes._push_on_torch_dispatch_stack(mode)
    return previous, only_lift, autocast


def pop_fake_mode(before: Any) -> None:
    previous, only_lift, autocast = before
    torch._C._unset_dispatch_mode(FAKE)
    open_spare_autocast(autocast)
    torch._C._set_only_lift_cpu_tensors(only_lift)
    if previous is not None:
        torch._C._set_dispatch_mode(previous)
    _lower_flags()


stand_in_devices: dict[torch.device, torch.device] = {}
"""Which device is meant by each index of the meta device that stands for one."""

Patch = Callable[[Any], Any]
_INITIAL, _DLPACK = ("uniform", "normal", "trunc_normal", "fill", "zero"), ("from_dlpack", "to_dlpack")
RANDOM_STATE, SAMPLERS = ("get_rng_state", "set_rng_state", "manual_seed"), ("Random", "SubsetRandom", "Distributed")
_LEVELS = ("grad", "jvp")
POOLING_TO_INTEGERS = """adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d""".split()
"""Operators to whose schemas the output's size is made of plain integers."""
PLACES: dict[str, tuple[Any, str]] = {
    "cuda autocast is unavailable": (torch.cuda.amp.common, "amp_definitely_not_available"),
    "cuda has bfloat16": (torch.cuda, "is_bf16_supported"),
    "cudnn takes a tensor": (torch.backends.cudnn, "is_acceptable"),
    "leaving autocast": (torch.amp.autocast_mode.autocast, "__exit__"),
    "grouping by device": (torch._C, "_group_tensors_by_device_and_dtype"),
    **{f"deepcopy of a {kind.__name__}": (kind, "__deepcopy__") for kind in (torch.Tensor, torch.nn.Parameter)},
    **{name: (torch, name) for name in ("compile", "ctc_loss", "linspace", "set_default_dtype")},
    "higher-order operators": (HigherOrderOperator, "dispatch"),
    "graphs of functionalization": (sys.modules["torch._higher_order_ops.utils"], "_maybe_fake_tracing"),
    "graphs of flex attention": (sys.modules["torch._higher_order_ops.flex_attention"], "make_fx"),
    "linearize": (sys.modules["torch._functorch.eager_transforms"], "make_fx"),
    "what dynamo leaves alone": (sys.modules["torch._functorch.eager_transforms"], "lazy_dynamo_disallow"),
    "operands of cond": (sys.modules["torch._higher_order_ops.cond"], "validate_subgraph_args_types"),
    **{f"initial {name}": (torch.nn.init, f"_no_grad_{name}_") for name in _INITIAL},
    **{f"initial {kind.__name__}": (kind, "reset_parameters") for kind in (torch.nn.Linear, torch.nn.modules.conv._ConvNd)},
    "encoders with padding": (torch.nn.TransformerEncoder, "forward"),
    "levels of vmap": (sys.modules["torch._functorch.vmap"], "vmap_increment_nesting"),
    **{f"levels of {t}": (sys.modules["torch._functorch.eager_transforms"], f"{t}_increment_nesting") for t in _LEVELS},
    "recurrent layers": (sys.modules["torch._decomp.decompositions"], "_rnn_helper"),
    "unpacking a sequence": (torch._VF, "_pad_packed_sequence"),
    "padding sequences": (torch._C._nn, "pad_sequence"),
    "broadcasting a mask": (torch.masked._ops, "_input_mask"),
    **{f"least size in {place.__name__}": (place, "min") for place in (torch._lowrank, torch.nn.functional)},
    **{name: (torch.nn.functional, name) for name in ("linear_cross_entropy", "adaptive_avg_pool1d", "one_hot")},
    **{f"share of {name}": (torch.nn.functional, name) for name in ("fractional_max_pool2d", "fractional_max_pool3d")},
    **{name: (torch._C._nn, name) for name in POOLING_TO_INTEGERS},
    **{f"places of {place.__name__}.tensor_split": (place, "tensor_split") for place in (torch, torch.Tensor)},
    **{f"order of {name}": (getattr(torch.utils.data, f"{name}Sampler"), "__iter__") for name in SAMPLERS},
    "loading by workers": (torch.utils.data.DataLoader, "_get_iterator"),
    "beginning to load data": (torch.utils.data.dataloader._BaseDataLoaderIter, "__init__"),
    "splitting data": (torch.utils.data.dataset, "randperm"),
    "applying a function of autograd": (torch.autograd.Function, "apply"),
    "making a subclass": (torch.Tensor, "_make_subclass"),
    **{name: (torch.Tensor, name) for name in ("device", "is_cuda", "as_subclass", "tolist", "data")},
    "scripted functions": (torch.jit.ScriptFunction, "__call__"),
    "symbols among arguments": (torch.SymInt, "__torch_function__"),
    **{f"{place.__name__}.{name}": (place, name) for place in (torch, torch.utils.dlpack) for name in _DLPACK},
    **{f"{place.__name__}.{name}": (place, name) for place in (torch, torch.random) for name in RANDOM_STATE},
    **{f"{place.__name__}.Generator": (place, "Generator") for place in (torch, torch._C)},
    "torch.lstm": (torch, "lstm"), **{name: (torch._VF, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{name: (torch._C._nn, name) for name in dir(torch._C._nn) if name.lstrip("_").startswith("upsample_")},
}
"""Where torch can be made to answer otherwise for as long as a fake mode is active."""
_patches: dict[str, Patch] = {}


def while_active(place: str) -> Callable[[Patch], Patch]:
    """Register a function from torch's own object in this place to the one that replaces it."""

    def register(patch: Patch) -> Patch:
        _patches[place] = patch
        return patch

    return register


WITH_CONCRETE_SIZES = tuple(
    name for name, (place, _) in PLACES.items()
    if place in (torch._C._nn, torch._VF) and name not in POOLING_TO_INTEGERS
)[2:]  # fmt: skip
"""Functions whose C++ side reads sizes as plain integers; torch has Python versions that do not."""


def generator_id(generator: torch.Generator) -> int:
    return int(generator._cdata)


def function_behind(scripted: Any) -> Any:
    """The Python function that `torch.jit.script` was given; None of what was traced, whose branches are taken already."""
    kept = vars(scripted)
    return kept.get("_torchdynamo_inline") if "__qualname__" in kept else None


def python_versions() -> Any:
    """A context in which operators that torch has written in Python as well are taken from there."""
    from torch._dispatch.python import enable_python_dispatcher  # why: only symbolic sizes need it

    return enable_python_dispatcher()


def call_innermost_mode(op: Any, args: tuple[Any, ...]) -> Any:
    """Call an operator on stand-ins as C++ does below autograd; without C++, numbers may be symbols in any place."""
    stand_in = next(value for value in args if is_stand_in(value))
    if not count_dispatch_modes():
        return stand_in.fake_mode.__torch_dispatch__(op, (type(stand_in),), args, {})
    with _modes._pop_mode_temporarily() as mode:
        return mode.__torch_dispatch__(op, (type(stand_in),), args, {})


def chunked_cross_entropy(
    x: Any, linear_weight: Any, target: Any, linear_bias: Any, weight: Any, reduction: str, ignore_index: int, options: Any
) -> Any:
    """The loss of logits that are computed in chunks of the batch, and never all at once."""
    import torch.nn.modules.linear_cross_entropy as chunked  # why: it defines its operators when it is loaded

    options = options._adjust(
        num_batches=x.shape[0], in_features=x.shape[-1], num_classes=linear_weight.shape[0], dtype=x.dtype, device=x.device
    )
    given = (x, linear_weight, target, linear_bias, weight)
    chunks = (options.batch_chunk_size, options.acc_policy, options.acc_dtype)
    if reduction == "none":
        return chunked._linear_cross_entropy_batch_chunked_no_reduction(*given, ignore_index, *chunks)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, linear_weight, linear_bias)]
    whole = chunked._linear_cross_entropy_batch_chunked(
        *given, reduction, ignore_index, 0.0, *chunks, options.allow_retain_graph, *wanted
    )
    return whole[0]


def is_stand_in(tensor: Any) -> bool:
    return getattr(tensor, "fake_mode", None) is not None


def is_recording() -> bool:
    """Whether something takes down the operators of this thread in a graph."""
    keys = torch._C._TorchDispatchModeKey
    return is_recorded_above_autograd() or any(
        torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FUNCTIONAL)
    )


_tracer_lock = threading.Lock()
_tracer_depth = 0
_tracer_before: Any = None


@contextmanager
def announced_tracer(tracer: Any) -> Iterator[None]:
    """torch's higher-order operators ask a process-wide name for the tracer that is at work. Counted, as the flags are."""
    import torch.fx.experimental.proxy_tensor as tracing  # why: only the name in it is set

    global _tracer_depth, _tracer_before
    with _tracer_lock:
        before = tracing._CURRENT_MAKE_FX_TRACER
        _tracer_before = _tracer_before if _tracer_depth else before
        tracing._CURRENT_MAKE_FX_TRACER = tracer
        _tracer_depth += 1
    try:
        yield
    finally:
        with _tracer_lock:
            _tracer_depth -= 1
            here = tracer if before is _tracer_before else before  # another thread may have come later, and stay longer
            tracing._CURRENT_MAKE_FX_TRACER = here if _tracer_depth else _tracer_before


def recording_of(op: Any) -> Callable[..., Any] | None:
    """The function by which a higher-order operator says how torch's recorder is to record it."""
    return op.python_key_table.get(torch_recorder_class())


_answered: dict[int, tuple[int, dict[str, Any]]] = {}
"""By the identity of a module's names: how many handlers of it run, in all threads, and what it had before."""


@contextmanager
def answered_by(handler: Any, answers: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """While it runs, what the handler's module took from torch's tracing module by these names is replaced.

    `answers`: name → function from torch's own object to the one in its place, which other threads meet as well.
    """
    import torch.fx.experimental.proxy_tensor as tracing  # why: only to find the names that were taken from it

    while hasattr(handler, "__wrapped__") or hasattr(handler, "__func__"):
        handler = getattr(handler, "__func__", None) or handler.__wrapped__
    names = getattr(handler, "__globals__", {})
    with _tracer_lock:
        count, originals = _answered.get(id(names), (0, {}))
        if count == 0:
            originals = {name: names[name] for name in answers if names.get(name) is getattr(tracing, name)}
            names.update({name: answers[name](original) for name, original in originals.items()})
        _answered[id(names)] = count + 1, originals
    try:
        yield
    finally:
        with _tracer_lock:
            count, originals = _answered.pop(id(names))
            if count > 1:
                _answered[id(names)] = count - 1, originals
            else:
                names.update(originals)


def indexing_by_tensors() -> Any:
    """A context in which `table[i]`, for a tensor `i` of one element, is an operator and reads no value."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # why: slow to load

    return TransformGetItemToIndex()


SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction
"""What an `autograd.Function` is at one level of torch.func."""
unwrap_for_grad, count_autograd_nodes = torch._C._functorch._unwrap_for_grad, torch.autograd._get_sequence_nr
wrap_for_grad: Callable[[Tensor, int], Any] = torch._C._functorch._wrap_for_grad
with_batch_dimension = torch._C._functorch._add_batch_dim
running_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of autograd whose gradients are computed just now, None if there is none."""
BACKWARD = torch.autograd.graph._engine_run_backward.__code__
STARTED_FROM = "t_outputs"
"""Its variable with what the backward pass starts from."""


def shape_of_gradient(node: Any, result: int = 0) -> Any:
    return node._input_metadata[result].shape


def over_batches(function: Callable[..., Any], in_dims: tuple[int | None, ...], size: int, randomness: str) -> Any:
    """`torch.vmap` of a function of flat operands, which tells of each result where its batch is, None if it is none."""
    from torch._functorch.vmap import restore_vmap  # why: seldom needed

    return restore_vmap(function, in_dims, size, randomness)


def single_level_functions() -> Any:
    """A context in which such functions may be applied."""
    from torch._functorch.autograd_function import enable_single_level_autograd_function  # why: seldom needed

    return enable_single_level_autograd_function()


def innermost_transform(op: Any = None) -> tuple[Any, str, bool]:
    """The innermost transform of torch.func, its kind, and whether torch has a rule for the higher-order operator."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter  # why: seldom needed

    interpreter = retrieve_current_functorch_interpreter()
    return interpreter, interpreter.key().name, interpreter.key() in getattr(op, "functorch_table", ())


unwrapped_if_over: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead
"""What is inside of the wrapper of a transform that has ended; any other tensor as it is."""


def with_forward_gradients() -> Any:
    """A context in which forward differentiation goes on, where an autograd.Function has stopped it."""
    return _forward_ad._set_fwd_grad_enabled(True)


def while_loop() -> Any:
    from torch._higher_order_ops.while_loop import while_loop_op  # why: seldom needed

    return while_loop_op


def while_loop_with_all_rounds() -> Any:
    """A loop that gives its state after every round."""
    from torch._higher_order_ops.while_loop import while_loop_stack_output_op  # why: seldom needed

    return while_loop_stack_output_op


def is_past_dispatch() -> bool:
    """Whether operators that are called just now in this thread are heard of by no mode."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.Python)


def is_inside_jvp() -> bool:
    """Whether torch.func.jvp is running, also where its level has been taken off for the moment."""
    return bool(sys.modules["torch._functorch.eager_transforms"].JVP_NESTING > 0)


TRANSFORMS = DispatchKey.FuncTorchDynamicLayerFrontMode
"""The key on which calls go to the innermost transform."""


def batched_at(value: Any, dim: int, level: int) -> tuple[Any, bool]:
    """What is inside of a tensor that is batched at this level, its batch at this dimension, and whether it is one."""
    is_batch = isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)
    if not is_batch or torch._C._functorch.maybe_get_level(value) != level:
        return value, False
    inner = torch._C._functorch.get_unwrapped(value)
    return inner.movedim(torch._C._functorch.maybe_get_bdim(value), dim), True


def backward_of(function: Callable[..., Any], operands: tuple[Any, ...]) -> Callable[..., Any]:
    """The function from operands and gradients of the results to the gradients of the operands."""
    import torch._higher_order_ops.utils as utils  # why: loads parts of the compiler when it is called

    return utils.create_bw_fn(function, operands)


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


def as_graph(function: Callable[..., Any], operands: Any, keys: tuple[Any, Any]) -> torch.fx.GraphModule:
    """The graph of a function with gradients in it, made under the dispatch keys of another moment."""
    import torch._higher_order_ops.utils as utils  # why: the same

    return utils.materialize_as_graph(function, operands, *keys, force_enable_grad=True)


def registered_higher_order_fake(op: Any) -> Callable[..., Any] | None:
    import torch._higher_order_ops.utils as utils  # why: slow to load, and seldom needed

    return utils.registered_hop_fake_fns.get(op)


def plain_flex_attention(*args: Any) -> Any:
    """The mathematics of flex attention, written out in operators."""
    from torch._higher_order_ops.flex_attention import _permute_strides, math_attention  # why: slow to load

    out, *rest = math_attention(*args)
    return _permute_strides(out, args[0].stride()), *rest


_originals: list[tuple[Any, str, Any]] = []
_replacements: dict[str, tuple[Any, Any, Any]] = {}
"""What was put in a place when it was last patched, and for what: made once, as long as that stands there."""
_MISSING = object()


def _patch() -> None:
    """For as long as any fake mode is active anywhere."""
    for key, patch in _patches.items():
        place, name = PLACES[key]
        stands_there, replaced, replacement = _replacements.get(key, (None, None, None))
        original = vars(place).get(name, _MISSING)  # as it stands there: static or not
        if original is not stands_there or (original is _MISSING and getattr(place, name, None) is not replaced):
            replaced = getattr(place, name, None)
            replacement = patch(replaced)
            _replacements[key] = original, replaced, replacement
        _originals.append((place, name, original))
        setattr(place, name, replacement)


def _unpatch() -> None:
    while _originals:
        place, name, original = _originals.pop()
        if original is _MISSING:
            delattr(place, name)
        else:
            setattr(place, name, original)


def _raise_flags() -> None:
    """torch keeps two process-wide flags that say 'in some mode', for its compiler. Its own way of saving and
    restoring them breaks when two threads overlap; counting does not."""
    global _flag_depth, _flags_before
    with _flag_lock:
        if _flag_depth == 0:
            _flags_before = _modes._is_in_torch_dispatch_mode, _modes._is_in_any_mode_without_ignore_compile_internals
            try:
                _set_flags(True, True)
                _patch()
            except BaseException:
                _set_flags(*_flags_before)
                _unpatch()
                raise
        _flag_depth += 1


def _lower_flags() -> None:
    global _flag_depth
    with _flag_lock:
        _flag_depth -= 1
        if _flag_depth == 0:
            _set_flags(*_flags_before)
            _unpatch()


def _set_flags(in_mode: bool, keeps_out_compiler: bool) -> None:
    _modes._is_in_torch_dispatch_mode = in_mode
    _modes._is_in_any_mode_without_ignore_compile_internals = keeps_out_compiler
    _modes.set_is_in_mode_without_ignore_compile_internals(keeps_out_compiler)


def is_heard_alone(mode: Any) -> bool:
    """Whether a call on stand-ins of `mode` reaches it and nothing else: no other mode, transform or cast."""
    return (
        torch._C._len_torch_dispatch_stack() == (torch._C._get_dispatch_mode(FAKE) is mode)
        and torch._C._len_torch_function_stack() == 0
        and not any(map(torch.is_autocast_enabled, _CASTING_DEVICES))
        and torch._C._functorch.peek_interpreter_stack() is None
        and not is_recorded_above_autograd()
    )


def is_function_heard() -> bool:
    """Whether there is a mode for torch functions that does more than count them."""
    stack = range(torch._C._len_torch_function_stack())
    return not all(getattr(torch._C._get_function_stack_at(i), "only_counts", False) for i in stack)


def is_recorded_alone(mode: Any, recorder: Any) -> bool:
    """Whether a call reaches this recorder and this fake mode and nothing else: no other mode, transform, cast or hook of
    all modules."""
    return (
        torch._C._len_torch_dispatch_stack() == 2
        and torch._C._get_dispatch_mode(FAKE) is mode
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is recorder
        and not is_function_heard()
        and not torch.nn.modules.module._has_any_global_hook()
        and not any(map(torch.is_autocast_enabled, _CASTING_DEVICES))
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.fx.traceback.has_preserved_node_meta()
    )


_CASTING_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def goes_unnoticed(mode: Any) -> bool:
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
count_function_modes, _set_default_dtype = torch._C._len_torch_function_stack, torch.set_default_dtype
_transform, _is_inference = torch._C._functorch.peek_interpreter_stack, torch.is_inference_mode_enabled
_is_profiled, _is_traced = torch._C._autograd._profiler_enabled, torch._C._is_tracing
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
count_dispatch_modes: Callable[[], int] = _count_dispatch_modes
count_writes: Callable[[Any], None] = torch._C._increment_version


class PastDispatch:
    """Real torch for a moment, for calls on real tensors: past every mode. Ten times cheaper than `no_modes`."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        self._guard: Any = NoDispatch()

    def __exit__(self, *exception: Any) -> None:
        self._guard = None


class AsRecorded:
    """Recorded operators run on real tensors: past every mode, not cast again, with the default dtype of then."""

    __slots__ = ("_dtype", "_dtype_before", "_guards")

    def __init__(self, default_dtype: torch.dtype) -> None:
        self._dtype = default_dtype

    def __enter__(self) -> None:
        self._guards = NoDispatch(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)
        self._guards[1].__enter__()
        self._dtype_before = torch.get_default_dtype()
        if self._dtype_before is not self._dtype:
            _set_default_dtype(self._dtype)

    def __exit__(self, *exception: Any) -> None:
        if self._dtype_before is not self._dtype:
            _set_default_dtype(self._dtype_before)
        self._guards[1].__exit__(*exception)
        del self._guards


_AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU)


def has_modes() -> bool:
    """Whether a dispatch mode of this thread would be asked."""
    return bool(torch._C._len_torch_dispatch_stack() > 0)


@contextmanager
def no_modes() -> Iterator[None]:
    """Real torch for a moment: no dispatch mode of this thread is asked."""
    with _modes._disable_current_modes():
        yield


@contextmanager
def without_fake_mode() -> Iterator[Any]:
    """Take the active fake mode out for a moment; gives it."""
    previous = torch._C._unset_dispatch_mode(FAKE)
    try:
        yield previous
    finally:
        if previous is not None:
            torch._C._set_dispatch_mode(previous)


# --- recording ----------------------------------------------------------------------------------------------

PROXY = torch._C._TorchDispatchModeKey.PROXY
_PRE_DISPATCH = DispatchKey.PreDispatch
_above_autograd = threading.RLock()
"""torch has one place above autograd for all threads: recorders of several threads take turns."""


def is_recorded_above_autograd() -> bool:
    """Whether calls of this thread reach a recorder before autograd sees them."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH))


def active_recorder() -> Any:
    """The recorder of this thread, below autograd or above it; None if there is none."""
    below = torch._C._get_dispatch_mode(PROXY)
    if below is None and is_recorded_above_autograd():
        return _ops._get_dispatch_mode_pre_dispatch(PROXY)
    return below


def goes_above_autograd(mode: Any) -> None:
    """Say of a recorder, when it is made, that its place is above autograd."""
    mode.__dict__["_dispatch_key"] = _PRE_DISPATCH


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
enter_autocast: Any = torch.amp.autocast_mode._enter_autocast
exit_autocast: Any = torch.amp.autocast_mode._exit_autocast


def is_transformed() -> bool:
    """Whether a transform of torch.func is under way in this thread."""
    return _transform() is not None


def push_recorder(mode: Any) -> Any:
    """Make `mode` the recorder of this thread; gives back the one that was there."""
    is_above = mode.__dict__.get("_dispatch_key") is _PRE_DISPATCH
    if is_above:
        _above_autograd.acquire()
    _raise_flags()
    previous = _take_recorder()
    _modes._push_mode(mode)
    return previous, is_above


def pop_recorder(before: Any) -> None:
    previous, is_above = before
    _take_recorder()
    if previous is not None:
        _modes._push_mode(previous)
    _lower_flags()
    if is_above:
        _above_autograd.release()


def _take_recorder() -> Any:
    if is_recorded_above_autograd():
        found = _ops.unset_mode_pre_dispatch(PROXY)
        if found is not None:
            return found
    return torch._C._unset_dispatch_mode(PROXY)


@contextmanager
def without_recorder() -> Iterator[Any]:
    """Take the active recorder out for a moment; gives it."""
    previous = _take_recorder()
    try:
        yield previous
    finally:
        if previous is not None:
            _modes._push_mode(previous)


def dispatch_modes() -> list[Any]:
    """The dispatch modes of this thread, the one asked last first."""
    return list(_modes._get_current_dispatch_mode_stack())


def number_calls_anew(graph: torch.fx.Graph) -> None:
    """Calls as `sin`, `sin_1`, … in their order, without the numbers of calls that are no more."""
    calls = {}
    for node in graph.nodes:
        name = getattr(getattr(node.target, "overloadpacket", node.target), "__name__", "")
        if node.op == "call_function" and re.fullmatch(rf"{re.escape(name)}(_\d+)?", node.name):
            calls[node] = name
    names = graph._graph_namespace
    for table in (names._used_names, names._obj_to_name, names._base_count):
        table.clear()
    for node in graph.nodes:
        if node not in calls:
            names.create_name(node.name, node)
    for node, name in calls.items():
        node.name = names.create_name(name, node)


class NodeAppender:
    """Adds nodes to the end of a graph: `graph.create_node` without its checks, at a sixth of the price."""

    __slots__ = ("_attributes", "_buckets", "_counts", "_create_name", "_names", "_used", "add", "graph")

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        if graph._insert == graph._root.prepend:
            graph._insert = graph._root._prepend  # the same without a function in between
        names = graph._graph_namespace
        self._used, self._names, self._counts = names._used_names, names._obj_to_name, names._base_count
        self._create_name = names.create_name
        self._buckets: dict[int, tuple[Any, dict[Any, None]]] = {}
        self._attributes = graph._find_nodes_lookup_table.table["get_attr", None]
        self.add = self._adding()

    def call(self, base: str, target: Any, args: Any, kwargs: Any) -> torch.fx.Node:
        """The arguments are nodes and numbers; the name is `add`, `add_1`, `add_2`, …, as the graph itself would choose."""
        return self.add(base, self.bucket(target), target, args, kwargs)

    def bucket(self, target: Any) -> dict[Any, None]:
        """Where the graph keeps the calls of this function."""
        found = self._buckets.get(id(target))  # the hash of an operator is slow
        if found is None:
            found = target, self.graph._find_nodes_lookup_table.table["call_function", target]
            self._buckets[id(target)] = found
        return found[1]

    def _adding(self) -> Callable[[str, dict[Any, None], Any, Any, Any], torch.fx.Node]:
        graph, counts, used, names, create_name = self.graph, self._counts, self._used, self._names, self._create_name

        def add(base: str, bucket: dict[Any, None], target: Any, args: Any, kwargs: Any) -> torch.fx.Node:
            """`call`, with the bucket at hand."""
            number = counts.get(base)
            if number is None:
                name = create_name(base, None)
            else:
                number += 1
                name = f"{base}_{number}"
                while name in used:
                    number += 1
                    name = f"{base}_{number}"
                counts[base] = number
                used.add(name)
            node = new_node(NODE)
            init_node(node, graph, name, "call_function", target, None)
            set_node_arguments(node, args, kwargs)
            names[node] = name
            graph._insert(node)
            bucket[node] = None
            graph._len += 1
            return node

        return add

    def read(self, target: str) -> torch.fx.Node:
        """An attribute of the graph module."""
        name = target.replace(".", "_")
        is_simple = name.isascii() and name.isidentifier() and not name[-1].isdigit() and name not in TAKEN_NAMES
        if not is_simple or name in self._used or name in self._counts:
            name = self._create_name(name, None)
        else:  # as it would choose, too
            self._used.add(name)
            self._counts[name] = 0
        graph = self.graph
        node = new_node(NODE)
        init_node(node, graph, name, "get_attr", target, None)
        set_node_arguments(node, (), {})
        self._names[node] = name
        graph._insert(node)
        self._attributes[node] = None
        graph._len += 1
        return node


TAKEN_NAMES, NODE = torch.fx.graph._illegal_names, torch.fx.Node
new_node = NODE.__new__
init_node = torch._C._NodeBase.__init__
set_node_arguments = torch._C._NodeBase._update_args_kwargs
set_node_meta = torch._C._NodeBase.meta.__set__  # past `Node.__setattr__`, which looks whether the node is found otherwise


def last_node(graph: torch.fx.Graph) -> torch.fx.Node:
    """The node that was added last; of an empty graph, the one that is before the first."""
    return graph._root.prev


def children(spec: Any) -> list[Any]:
    """The structures of the parts of a structure."""
    return list(spec.children())


def is_leaf(spec: Any) -> bool:
    return bool(spec.is_leaf())


def is_plain_structure(spec: Any) -> bool:
    """Whether it is made of lists, tuples and dicts only, which a graph can return as they are."""
    return is_leaf(spec) or (spec.type in (list, tuple, dict) and all(map(is_plain_structure, spec.children())))


def structured_code(names: list[str], in_spec: Any, out_spec: Any) -> Any:
    """What lets a graph of flat inputs and outputs be called with structures, and return one."""
    from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo  # why: private

    return _PyTreeCodeGen(_PyTreeInfo(names, in_spec, out_spec))


def codegen_of(graph: torch.fx.Graph) -> Any:
    return graph._codegen


def lazy_graph_module(root: Any, graph: torch.fx.Graph, name: str) -> torch.fx.GraphModule:
    """A graph module whose code is written when it is first asked for."""
    from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module  # why: private

    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph, name)


CodeOnlyModule = torch.fx.graph_module._CodeOnlyModule  # what stands for a graph module until its graph is read
MODULE_CALL = torch.nn.Module._call_impl.__code__
"""The code that calls the forward of every module."""


def symbolic_function(name: str) -> Callable[..., Any]:
    """`sqrt`, `cos`, … of a number that may be symbolic."""
    return getattr(torch, f"_sym_{name}", None) or getattr(math, name)


def is_broken_up(op: Any) -> bool:
    """Whether autograd breaks this operator up; below it, only its parts are expected."""
    return (
        isinstance(op, OpOverload)
        and has_composite_kernel(op)
        and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")
    )


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


def open_spare_autocast(is_open: bool) -> bool:
    """Let calls on stand-ins reach the spare autocast kernels in this thread; gives what was before."""
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.AutocastIPU)
    torch._C._dispatch_tls_set_dispatch_key_excluded(DispatchKey.AutocastIPU, not is_open)
    return not before


def kernel_libraries(key: str) -> tuple[Any, Any]:
    """A library for kernels on a key, and one that lets every other operator fall through it."""
    others = torch.library.Library("_", "IMPL", key)
    others.fallback(torch.library.fallthrough_kernel)
    return torch.library.Library("aten", "IMPL", key), others


# --- composite operators on symbolic sizes ------------------------------------------------------------------

SPARE_WRAPPER, SPARE_MODE = "TESTING_ONLY_GenericWrapper", "TESTING_ONLY_GenericMode"
"""Dispatch keys above all that matter, which torch keeps for its own tests. The second: not for contiguous tensors."""
_spare: Any = [torch._C._parse_dispatch_key(name) for name in (SPARE_WRAPPER, SPARE_MODE)]
SYMBOLIC_KEYS = DispatchKeySet(_spare[0])
SCATTERED_KEYS = SYMBOLIC_KEYS | DispatchKeySet(_spare[1])
native_call: Callable[[Any], Callable[..., Any]] = operator.attrgetter("_op")
"""What a plain operator does when it is called, without the call of Python."""


def key_without_spare(op: Any, key: Any, args: Any, kwargs: Any) -> Any:
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
        torch._C._get_mkldnn_enabled(), *attention_backends(),
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


def operator_named(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def inner_device(tensor: Any) -> torch.device:
    """The device that a tensor says it is on, seen through functorch wrappers."""
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.device


# --- operators --------------------------------------------------------------------------------------------


def has_composite_kernel(op: OpOverload) -> bool:
    """Whether eager breaks this operator up into others on every backend."""
    return op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)


def _awaits_description(op: OpOverload) -> bool:
    """`torch.library.custom_op` registers a function that refuses, until the author says what the operator returns."""
    definition = _custom_definitions.get(op.name().removesuffix(".default"))
    return definition is not None and definition._abstract_fn is None


def has_meta_kernel(op: OpOverload) -> bool:
    name = op.name()
    return not _awaits_description(op) and (
        torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta")
        or DispatchKey.Meta in op.py_kernels
    )


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    from torch._decomp import decomposition_table  # why: slow to load, and seldom needed

    return decomposition_table.get(op)


def registered_fake(op: OpOverload) -> Callable[..., Any] | None:
    """The function that the author of a custom operator registered with `torch.library.register_fake`."""
    if _awaits_description(op):
        return None
    entry = _custom_registry.find(op.name())
    return entry.fake_impl.kernel if entry.fake_impl.kernel is not None else None


def fake_context(op: OpOverload, make_size: Callable[..., Any], shape_env: Any) -> Any:
    """What `torch.library.get_ctx()` gives inside a registered fake."""
    import torch._library.fake_impl as fake_impl  # why: only for custom operators

    class Context:
        _shape_env = shape_env

        def create_unbacked_symint(self, *, min: int = 2, max: int | None = None) -> Any:
            return self.new_dynamic_size(min=min, max=max)

        def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Any:
            return make_size(op, min, max)

    return fake_impl.set_ctx_getter(lambda: Context())


def is_builtin_namespace(op: OpOverload) -> bool:
    return op.namespace in ("aten", "prims", "prim")


def once_for_each_operator(ask: Callable[[OpOverload], Answer]) -> Callable[[OpOverload], Answer]:
    """Keep the answer, by the operator's identity: its hash costs more than many an answer."""
    answers: dict[int, tuple[OpOverload, Answer]] = {}

    @functools.wraps(ask)
    def found(op: OpOverload) -> Answer:
        entry = answers.get(id(op))
        if entry is None:
            entry = answers[id(op)] = op, ask(op)  # kept alive, so that nothing else has its identity
        return entry[1]

    return found


@once_for_each_operator
def written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that the schema says is written to."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@once_for_each_operator
def argument_names(op: OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def is_mutable(op: OpOverload) -> bool:
    """Whether the schema says that it writes to an argument."""
    return bool(op._schema.is_mutable)


def has_out(op: OpOverload) -> bool:
    """Whether it writes into tensors that it may have to resize."""
    return any(argument.is_out for argument in op._schema.arguments)


def number_list_positions(op: OpOverload) -> tuple[int, ...]:
    """The positions of the arguments that are lists of numbers: C++ takes a lone number for a list there."""
    return tuple(
        position for position, argument in enumerate(op._schema.arguments) if str(argument.type) in _NUMBER_LISTS
    )


_NUMBER_LISTS = ("List[int]", "Optional[List[int]]", "List[float]", "Optional[List[float]]")


def returns_list(op: OpOverload) -> bool:
    """Whether it returns one list of tensors."""
    returns = op._schema.returns
    return len(returns) == 1 and isinstance(returns[0].type, torch.ListType)


def takes_tensor(op: OpOverload, position: int) -> bool:
    arguments = op._schema.arguments
    return position < len(arguments) and isinstance(arguments[position].type, torch.TensorType)


# --- checkpoints ------------------------------------------------------------------------------------------


class CheckpointSource(NamedTuple):
    """What `torch.load` knows about the tensor that it is rebuilding."""

    storage: Any
    location: str | None
    place: Any
    conj: bool
    neg: bool
    loaded: dict[Any, Any]
    reader: Any


_REBUILDERS = (torch._utils._rebuild_tensor.__code__, torch._utils._rebuild_tensor_v3.__code__)
_LOADERS = {
    torch.serialization._load.__code__: "loaded_storages",
    torch.serialization._legacy_load.__code__: "deserialized_objects",
}


def checkpoint_source() -> CheckpointSource | None:
    """Where the tensor comes from that torch.load is rebuilding, if it is torch.load that calls."""
    rebuilder = _calling_frame(_REBUILDERS, 8)
    loader = rebuilder and _calling_frame(_LOADERS, 60, rebuilder)
    if rebuilder is None or loader is None:
        return None
    storage = rebuilder.f_locals["storage"]
    storage = getattr(storage, "_untyped_storage", storage)
    values = rebuilder.f_locals if "metadata" in rebuilder.f_locals else rebuilder.f_back.f_locals
    bits = values.get("metadata") or {}
    is_native = loader.f_locals.get("byteorderdata") in (None, sys.byteorder.encode())
    return CheckpointSource(
        storage,
        storage._fake_device,
        storage._cdata if storage._checkpoint_offset is None else storage._checkpoint_offset,
        bool(bits.get("conj")),
        bool(bits.get("neg")),
        loader.f_locals[_LOADERS[loader.f_code]],
        loader.f_locals.get("zip_file") if is_native else None,
    )


def _calling_frame(codes: Any, most: int, frame: Any = None) -> Any:
    frame = frame or sys._getframe(2)
    for _ in range(most):
        if frame is None or frame.f_code in codes:
            return frame
        frame = frame.f_back
    return None


def map_location() -> Any:
    """What the `torch.load` of this thread was given as map_location."""
    return torch.serialization._serialization_tls.map_location


def writes_as_real() -> bool:
    """Whether `torch.save` is to write stand-ins as if they were real, without data."""
    state = torch.serialization._serialization_tls
    return bool(state.skip_data and state.materialize_fake_tensors)


def meta_storage(nbytes: int, device: torch.device) -> Any:
    """A storage for `torch.save` that stands for one on `device`."""
    storage = torch.UntypedStorage(nbytes, device="meta")
    storage._fake_device = device
    return storage


def reduced_as_real(tensor: Tensor, storage: Any, metadata: dict[str, bool]) -> Any:
    """How `torch.save` writes a real tensor with the metadata of `tensor` on `storage`."""
    place: Any = (tensor.storage_offset(), tuple(tensor.size()), tensor.stride(), tensor.requires_grad, OrderedDict())
    extra = (metadata,) if metadata else ()
    if tensor.dtype in torch.storage._new_dtypes():
        return torch._utils._rebuild_tensor_v3, (storage, *place, tensor.dtype, *extra)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    typed._fake_device = storage._fake_device
    return torch._utils._rebuild_tensor_v2, (typed, *place, *extra)


def reduced_parameter(data: Tensor, requires_grad: bool) -> Any:
    return torch._utils._rebuild_parameter, (data, requires_grad, OrderedDict())


# --- sympy, as torch's tools speak it -----------------------------------------------------------------------


def sympy_functions() -> Any:
    """The module of torch's own sympy functions: `FloorDiv`, `Mod`, `PythonMod`, `Max`, `Min`, …"""
    import torch.utils._sympy.functions as functions  # why: loads sympy, which only other tools want

    return functions


def value_range(low: int | None, high: int | None) -> Any:
    """The range from `low` to `high` (None: unbounded) as torch's tools know ranges."""
    from torch.utils._sympy.numbers import int_oo  # why: loads sympy, which only other tools want
    from torch.utils._sympy.value_ranges import ValueRanges  # why: the same

    return ValueRanges(-int_oo if low is None else low, int_oo if high is None else high)


def keys_of_step(kind: str, key: Any) -> tuple[Any, ...]:
    """One step on the way to a number in a result, as torch's tools write it: they ask for these classes."""
    import torch.fx.experimental.symbolic_shapes as shapes  # why: only the names of ways are taken from it
    from torch.utils._pytree import MappingKey, SequenceKey  # why: the same

    if kind == "item":
        return (SequenceKey(key) if isinstance(key, int) else MappingKey(key),)
    if kind == "attribute":
        return (shapes.InnerTensorKey(key),)
    if kind == "offset":
        return (shapes.CallMethodKey("storage_offset"),)
    if kind == "divided":
        return (shapes.DivideByKey(key),)
    return shapes.CallMethodKey(kind), SequenceKey(key)


def any_number() -> Any:
    """The range of a number of which nothing is known, as torch's tools know ranges."""
    from torch.utils._sympy.numbers import int_oo  # why: loads sympy, which only other tools want
    from torch.utils._sympy.value_ranges import ValueRanges  # why: the same

    return ValueRanges(-int_oo, int_oo)


# --- tracing at the level of torch ---------------------------------------------------------------------------


def hollow() -> Tensor:
    """A tensor of nothing: what values of a trace are made of."""
    with no_modes(), torch._C.DisableTorchFunction():
        return torch.empty((), dtype=torch.int64, device="meta")


@contextmanager
def below_function_mode(mode: Any) -> Iterator[None]:
    """Without this mode for torch functions, and without those that were entered after it."""
    depth = torch._C._len_torch_function_stack()
    stack = [torch._C._get_function_stack_at(position) for position in range(depth)]
    above = stack[stack.index(mode) :] if mode in stack else []
    for _ in above:
        torch._C._pop_torch_function_stack()
    try:
        yield
    finally:
        for entered in above:
            torch._C._push_on_torch_function_stack(entered)


def functions_wrapped_for_fx() -> list[tuple[dict[str, Any], str]]:
    """What `torch.fx.wrap` was called with: the global names of modules."""
    return [(space, name) for (_, name), space in torch.fx._symbolic_trace._wrapped_fns_to_patch.items()]


def python_behind(function: Any) -> Callable[..., Any]:
    """The Python function that a function of TorchScript was made of; itself if that is not known."""
    return getattr(function, "_torchdynamo_inline", None) or function


def place_of_vmap() -> tuple[Any, str]:
    """Where every function that `torch.vmap` made goes through: (module, name)."""
    return torch._functorch.apis, "vmap_impl"


def place_of_differentiation() -> tuple[Any, str]:
    """Where each input of a function that `torch.func` differentiates goes through: (module, name)."""
    return torch._functorch.eager_transforms, "_wrap_tensor_for_grad"


def vmap_inputs(in_dims: Any, args: tuple[Any, ...], func: Any) -> tuple[list[int | None], list[Any], Any]:
    """The dimension that is mapped of each input (None: none), the inputs as a flat list, and their structure."""
    _, flat_dims, flat, structure = torch._functorch.vmap._process_batched_inputs(in_dims, args, func)
    return flat_dims, flat, structure


# --- asked for by isinstance ------------------------------------------------------------------------------


def asked_by_module_conversion(frame: Any) -> bool:
    """Whether it is `nn.Module._apply` that asks, in this frame, what class a tensor is, and may set a stand-in's data."""
    if frame.f_code.co_name == _APPLY_INNER and frame.f_back.f_code is _APPLY:
        return is_stand_in(frame.f_locals["tensor"])
    return frame.f_code is _APPLY


_APPLY = torch.nn.Module._apply.__code__
_APPLY_INNER = "compute_should_use_set_data"


def torch_fake_tensor_class() -> Any:
    from torch._subclasses.fake_tensor import FakeTensor  # why: only when somebody asks who we are

    return FakeTensor


def torch_fake_mode_class() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode  # why: only when somebody asks who we are

    return FakeTensorMode


def torch_recorder_class() -> Any:
    # why: only when somebody asks who we are
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    return ProxyTorchDispatchMode


def torch_state_recorder_class() -> Any:
    # why: only when somebody asks who we are
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    return PreDispatchTorchFunctionMode
