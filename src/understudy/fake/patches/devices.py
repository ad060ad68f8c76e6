"""Patches for devices that this machine lacks, and for real tensors beside fakes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy._torch import active_fake_mode
from understudy.fake.inputs import is_real
from understudy.fake.kernels import autocast
from understudy.fake.native import WITHOUT_INDEX, canonical, native, on_first_device
from understudy.fake.realise import make_new
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import count_hidden_write, storage_of
from understudy.patching import ABSENT_DEVICES, ANY_MODE, ENGINE, STORAGES, patch, patch_call
from understudy.spec import TensorSpec
from understudy.spec.call import flat
from understudy.spec.error_context import make_unsized_sparse_error

Function = Callable[..., Any]


@on_first_device.append
def patch_for_absent_devices() -> None:
    ENGINE.begin_with_modes(ABSENT_DEVICES)


@patch("torch.cuda.amp.common.amp_definitely_not_available", during=ANY_MODE)
def keep_cuda_autocast(original: Function) -> Function:
    """`torch.autocast("cuda")` disables itself in builds without CUDA."""
    return _answer_in_mode(original, False)


@patch("torch.cuda.is_bf16_supported", during=ANY_MODE)
def allow_bfloat16_on_cuda(original: Function) -> Function:
    """`torch.autocast("cuda")` refuses bfloat16 in builds without CUDA."""
    return _answer_in_mode(original, True)


@patch("torch.backends.cudnn.is_acceptable", during=ABSENT_DEVICES)
def skip_cudnn(original: Function) -> Function:
    """torch warns for every recurrent module on a CUDA device that this build has no cuDNN."""
    return _answer_in_mode(original, False)


@patch("torch._C._is_any_autocast_enabled", during=ANY_MODE)
def find_autocast_of_program(original: Callable[[], bool]) -> Callable[[], bool]:
    """Recurrent layers accept any dtype under autocast, and C++ takes the key on which stand-ins are cast for autocast."""
    return lambda: original() if active_fake_mode() is None else _torch.is_autocast_enabled()


def _answer_in_mode(original: Function, answer: bool) -> Function:
    def ask(*args: object, **kwargs: object) -> bool:
        return answer if active_fake_mode() is not None else original(*args, **kwargs)

    return ask


@patch_call("torch.clear_autocast_cache", during=ANY_MODE)
def forget_casts_of_region(original: Callable[[], None]) -> None:
    """Weights that were cast in an autocast region are cast again in the next one."""
    original()
    autocast.clear_cast_cache()


@patch_call("torch._C._group_tensors_by_device_and_dtype", during=ANY_MODE)
def group_by_simulated_device(
    original: Function, tensors: list[list[Any]], with_indices: bool = False
) -> object:
    """Optimizers and gradient clipping choose their kernels by the device of each group."""
    meant = _torch.stand_in_devices
    places = {
        id(t): _dense_in_place_of(t)
        for row in tensors
        for t in row
        if type(t) is FakeTensor and t._spec.sparse
    }
    shown = [[places.get(id(t), t) for t in row] for row in tensors] if places else tensors
    sparse = {id(places[id(t)]): t for row in tensors for t in row if id(t) in places}
    return {
        (meant.get(device, device), dtype): ([[sparse.get(id(t), t) for t in row] for row in rows], indices)
        for (device, dtype), (rows, indices) in original(shown, with_indices).items()
    }


def _dense_in_place_of(sparse: FakeTensor) -> FakeTensor:
    """C++ gives sparse tensors a meta device without a number, so that they seem to be on another device."""
    spec = sparse._spec
    return make_new(sparse.fake_mode, TensorSpec((0,), (1,), dtype=spec.dtype, device=spec.device))


@patch_call("torch.Tensor.__deepcopy__", "torch.nn.Parameter.__deepcopy__", during=ANY_MODE)
def copy_real_tensors_outside_of_mode(
    original: Function, self: torch.Tensor, memo: dict[str, object]
) -> object:
    """`copy.deepcopy` of a real tensor copies its storage by operators; in a fake mode, too, it gives a real one."""
    if not is_real(self):
        return original(self, memo)
    with _torch.without_fake_mode():
        return original(self, memo)


@patch("torch.Tensor.device", during=ABSENT_DEVICES)
def report_simulated_device(original: Any) -> Any:
    """Wrappers of torch.func are plain tensors: C++ returns the meta device that stands for the real one."""

    def device(tensor: torch.Tensor) -> torch.device:
        answer = original.__get__(tensor)
        return _torch.stand_in_devices.get(answer, answer)

    return property(device)


@patch("torch.Tensor.is_cuda", during=ABSENT_DEVICES)
def report_simulated_cuda(original: Any) -> Any:
    """As `device`, for the wrappers of torch.func."""

    def is_cuda(tensor: torch.Tensor) -> bool:
        meant = _torch.stand_in_devices.get(_torch.native_device(tensor))
        return original.__get__(tensor) if meant is None else meant.type == "cuda"

    return property(is_cuda)


WRAPPER_OPTIONS = (
    "strides", "storage_offset", "memory_format", "dtype", "layout", "device", "pin_memory", "requires_grad",
    "dispatch_sizes_strides_policy", "dispatch_device", "dispatch_layout", "_extra_dispatch_keys",
)  # fmt: skip
"""Parameters of `torch.Tensor._make_wrapper_subclass` after the class and the sizes."""


@patch("torch.Tensor._make_wrapper_subclass", during=ABSENT_DEVICES)
def make_wrappers_on_stand_in_devices(original: Function) -> Any:
    """Jagged tensors and subclasses of programs are given the device of the tensor inside: C++ would end the process when
    autograd asks for its guard, and does not find the dispatch key of autocast."""

    def make_wrapper(cls: object, size: object, *args: object, **kwargs: Any) -> Any:
        options = {**dict(zip(WRAPPER_OPTIONS, args, strict=False)), **kwargs}
        device = options.get("device")
        if active_fake_mode() is None or device is None or torch.device(device).type in WITHOUT_INDEX:
            return original(cls, size, *args, **kwargs)
        keys = options.get("_extra_dispatch_keys")
        options["device"] = native(torch.device(device))
        options["_extra_dispatch_keys"] = (
            _torch.STAND_IN_KEYS if keys is None else keys | _torch.STAND_IN_KEYS
        )
        return original(cls, size, **options)

    return staticmethod(make_wrapper)


# --- tensors made of data -------------------------------------------------------------------------------------------------

SYMBOLIC = (torch.SymInt, torch.SymFloat)
OPTIONS = frozenset({"dtype", "device", "requires_grad"})


@patch("torch.tensor", "torch.as_tensor", "torch.asarray", during=ANY_MODE)
def take_data(original: Function) -> Function:
    """C++ reads numbers from lists of tensors and bytes from storages (`safetensors` reads files this way) without a
    dispatch, and a device without an index needs a build with that device."""
    _torch.collect_device_constructors()

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        mode = active_fake_mode()
        if mode is None or not args:
            return original(*args, **kwargs)
        data, *rest = args
        if isinstance(data, torch.UntypedStorage):
            with _torch.no_modes():
                real = original(*args, **kwargs)
            return mode.from_tensor(real)
        kwargs.update(zip(("dtype", "device"), rest, strict=False))  # as_tensor takes them by position
        device = kwargs.get("device")
        if device is None and hasattr(data, "__array__") and _torch.count_function_modes():
            device = torch.get_default_device()  # of an array or a tensor, which C++ moves there
        if device is not None:  # a number is a CUDA device, as in scripts with `device=rank`
            device = torch.device("cuda", device) if type(device) is int else torch.device(device)
            kwargs["device"] = canonical(device)
        if mode.shape_env is not None and kwargs.keys() <= OPTIONS and flat(torch.SymInt, (data,), {}):
            return stack_data(original, (), data, kwargs)  # C++ would specialise the sizes
        try:
            return original(data, **kwargs)
        except (RuntimeError, TypeError):
            if not isinstance(data, (list, tuple)) or not has_stand_ins(data) or not kwargs.keys() <= OPTIONS:
                raise
        return stack_data(original, (), data, kwargs)

    return make


@patch_call("torch.frombuffer", during=ANY_MODE)
def lift_buffer(original: Function, *args: object, requires_grad: bool = False, **kwargs: object) -> Any:
    """C++ makes a real tensor from a buffer without a dispatch; `torch.from_numpy` dispatches."""
    made = original(*args, **kwargs)
    if active_fake_mode() is not None:
        made = torch.ops.aten.lift_fresh(made)
    return made.requires_grad_() if requires_grad else made


@patch_call("torch.sparse_coo_tensor", during=ANY_MODE)
def find_size_of_sparse(original: Function, *args: Any, **kwargs: Any) -> Any:
    """C++ reads the indices to find a size that is not given and to check bounds, and checks that the build has the
    device."""
    given = dict(zip(("indices", "values", "size"), args, strict=False)) | kwargs
    mode = active_fake_mode()
    if mode is None or "values" not in given:
        return original(*args, **kwargs)
    is_checked = given.pop("check_invariants", None)
    if is_checked is None:
        is_checked = torch.sparse.check_sparse_tensor_invariants.is_enabled()
    values = torch.as_tensor(
        given.pop("values"), dtype=given.pop("dtype", None), device=given.pop("device", None)
    )
    indices = torch.as_tensor(given.pop("indices"), dtype=torch.int64, device=values.device)
    size = given.pop("size", None)
    if size is None or is_checked:
        size = _size_of_sparse(mode, original, indices, values, size, is_checked)
    return original(indices, values, size, check_invariants=False, **given)


def _size_of_sparse(
    mode: Any, original: Function, indices: Any, values: Any, size: Any, is_checked: bool
) -> Any:
    known = mode.value_without_guards(indices) if type(indices) is FakeTensor else None
    if known is not None and known.device.type == "cpu":
        with _torch.no_modes():
            entries = torch.zeros(()).expand(tuple(map(int, values.shape)))
            return original(
                known, entries, *([] if size is None else [size]), check_invariants=is_checked
            ).shape
    if size is None:
        raise make_unsized_sparse_error("torch.sparse_coo_tensor", getattr(indices, "_spec", indices))
    return size


def has_stand_ins(data: object) -> bool:
    return any(type(_torch.innermost(tensor)) is FakeTensor for tensor in flat(torch.Tensor, (data,), {}))


def stack_data(func: Function, of: Any, data: object, kwargs: dict[str, Any]) -> torch.Tensor:
    """The tensor that `func` makes of nested lists with tensors or symbolic numbers in them, by operators. `of` holds the
    tensor whose method `func` is."""
    example = _make_example(func, of, data, kwargs)
    leaves = [_make_leaf(value, example.dtype) for value in _list_leaves(data)]
    result = torch.stack(leaves) if example.ndim else leaves[0]
    result = result.view(example.shape) if example.ndim > 1 else result
    device = kwargs.get("device", of[0].device if of else None)
    result = result if device is None else result.to(device)
    return result.requires_grad_() if example.requires_grad else result


def _list_leaves(data: object) -> list[object]:
    if not isinstance(data, (list, tuple)):
        return [data]
    return [leaf for part in data for leaf in _list_leaves(part)]


def _make_example(func: Function, of: Any, data: object, kwargs: dict[str, Any]) -> torch.Tensor:
    """Call torch on such lists with zeros, to get shape and dtype, and the errors that torch raises."""

    def zeros(part: object) -> Any:
        if isinstance(part, (list, tuple)):
            return [zeros(value) for value in part]
        if isinstance(part, torch.Tensor):
            return torch.zeros((), dtype=part.dtype).expand(tuple(map(int, part.shape)))
        return (0 if isinstance(part, torch.SymInt) else 0.0) if isinstance(part, SYMBOLIC) else part

    options = {name: value for name, value in kwargs.items() if name != "device"}
    with _torch.no_modes(), _torch.NoFunctionModes():
        example: torch.Tensor = func(
            *(torch.zeros((), dtype=value.dtype) for value in of), zeros(data), **options
        )
    return example


def _make_leaf(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(()).to(device="cpu", dtype=dtype)
    return torch.scalar_tensor(value, dtype=dtype)


# --- other functions that reach the memory of a fake --------------------------------------------------------------


@patch_call("torch.to_dlpack", "torch.utils.dlpack.to_dlpack", during=ANY_MODE)
def refuse_memory_of_fakes(original: Function, tensor: torch.Tensor) -> object:
    """C++ would hand out memory that is not there."""
    return tensor.__dlpack__() if type(tensor) is FakeTensor else original(tensor)  # which raises NoDataError


@patch_call("torch._C._autograd._unsafe_set_version_counter", during=ANY_MODE)
def count_hidden_writes(original: Function, tensors: Any, versions: object) -> object:
    """A version counter that is set back hides writes, so tracked values would be stale."""
    for fake in flat(FakeTensor, (tensors,), {}):
        count_hidden_write(fake.fake_mode, storage_of(fake))
    return original(tensors, versions)


@patch_call("torch.UntypedStorage.resize_", during=STORAGES)
def resize_storages_of_fakes(original: Function, storage: Any, size: Any) -> Any:
    """C++ refuses storages without memory on the CPU. FSDP frees the memory of parameters this way, and takes it again."""
    if not hasattr(storage, "is_of_fake"):
        return original(storage, size)
    known = getattr(storage, "determined", None)
    if known is not None and size < storage.nbytes():
        known.forget()
    _torch.resize_handed_out(FakeTensor, storage, int(size))
    return storage
