"""Tensors without data: construction, storages, wrappers, and flags of C++."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nested._internal.nested_int import NestedIntNode
from torch.nn.parameter import UninitializedTensorMixin as UninitializedTensorMixin

from understudy._torch.modes import inference_mode

make_wrapper: Any = Tensor._make_wrapper_subclass
make_subclass = Tensor._make_subclass
give_storage: Callable[[Tensor, Tensor], None] = torch._functionalize_unsafe_set
"""give_storage(tensor, other): put `tensor` on the storage of `other`, with its metadata unchanged."""
NoDispatch = torch._C._DisableTorchDispatch
"""While such an object is alive, every `__torch_dispatch__` is skipped, and C++ kernels are called."""
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
"""Inside, every `__torch_function__` is skipped, including those of modes."""
is_function_mode_active: Callable[[], bool] = torch._C._is_torch_function_mode_enabled


def storage_id(tensor: Tensor) -> int:
    """A number that is equal for two tensors exactly if they share their storage."""
    return native_storage(tensor)._cdata


TENSOR_REFERENCES, STORAGE_REFERENCES = 4, 2
"""The reference counts of an argument, and of its storage, in a call from C++, if nothing else refers to it."""


def is_held_only_by_caller(tensor: Tensor) -> bool:
    """Whether the C++ caller of an operator has the last reference to this argument and its storage."""
    references: Callable[[int], int] = torch._C._storage_Use_Count
    return tensor._use_count() <= TENSOR_REFERENCES and references(storage_id(tensor)) <= STORAGE_REFERENCES


def hand_out_storage(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of a stand-in, for programs. It is marked so that C++ raises wherever its memory is read, also
    through real tensors that are set on it later. Otherwise C++ would read from address 0."""
    forbid_data_pointer(tensor)
    storage = native_storage(tensor)
    place = _place_of_read_flag()
    if place is not None:
        ctypes.c_bool.from_address(storage._cdata + place).value = True
    return storage


class AllowMemoryAccess:
    """Clears the mark of a storage while C++ changes the metadata of tensors on it, which asks for the memory without
    reading it. With deterministic algorithms, C++ would also fill the memory that is new."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        place = _place_of_read_flag()
        # If the flag was not found, a dummy.
        self._flag = ctypes.c_bool() if place is None else ctypes.c_bool.from_address(storage._cdata + place)

    def __enter__(self) -> None:
        self._before = self._flag.value
        is_deterministic = torch._C._get_deterministic_algorithms()
        self._fills = is_deterministic and torch._C._get_deterministic_fill_uninitialized_memory()
        if self._before:
            self._flag.value = False
        if self._fills:
            torch._C._set_deterministic_fill_uninitialized_memory(False)

    def __exit__(self, *exception: object) -> None:
        if self._before:
            self._flag.value = True
        if self._fills:
            torch._C._set_deterministic_fill_uninitialized_memory(True)


def resize_handed_out(kind: type[Tensor], storage: torch.UntypedStorage, size: int) -> None:
    """Resize the storage of a stand-in. To C++ it is on the meta device afterwards."""
    with NoDispatch(), AllowMemoryAccess(storage):
        if storage.device.type != "meta":
            # The storage grows when a larger tensor is set on it; the meta device provides its allocator.
            other = make_wrapper(kind, (0,), dtype=torch.uint8)
            torch.ops.aten.set_.source_Storage_storage_offset(
                other, storage, 0, (storage.nbytes() + 1,), (1,)
            )
        native_resize(storage, size)


native_resize = torch._C.StorageBase.resize_


def has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether it is the storage of a real tensor with data."""
    try:
        return storage.device.type != "meta" and storage.data_ptr() != 0
    except RuntimeError:  # the storage of a stand-in
        return False


def bytes_on(storage: torch.UntypedStorage) -> Tensor:
    """A real tensor of all bytes in a real storage."""
    with PastDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@functools.cache
def _place_of_read_flag() -> int | None:
    """The offset of the flag "reads raise" in the C++ object of a storage; None if it is not found.

    Python can only set the flag for writes, which comes before it. Found by trying on a separate storage: the flag for
    writes is the byte that `forbid_data_pointer` changes, and setting the next one has to make a read raise.
    """
    with PastDispatch(), inference_mode(False):
        tried = torch.zeros(4, device="cpu")
        storage = native_storage(tried)
        before = ctypes.string_at(storage._cdata, LENGTH_SEARCHED)
        forbid_data_pointer(tried)
        after = ctypes.string_at(storage._cdata, LENGTH_SEARCHED)
        changed = [place for place in range(LENGTH_SEARCHED) if before[place] != after[place]]
        if len(changed) != 2 or after[changed[1] : changed[1] + 2] != b"\1\0":
            return None
        place = changed[1] + 1
        flag = ctypes.c_bool.from_address(storage._cdata + place)
        flag.value = True
        try:
            tried.sum()
        except RuntimeError:
            return place
        flag.value = False
        return None


LENGTH_SEARCHED = 72
"""The number of bytes of the C++ object that are searched: less than its size."""


def has_other_tensors(tensor: Tensor, known: int = 1) -> bool:
    """Whether more than the `known` tensors share its storage. The storage object made for the check counts as one
    reference."""
    storage = native_storage(tensor)
    return torch._C._storage_Use_Count(storage._cdata) > 1 + known


def storage_number(storage: torch.UntypedStorage) -> int:
    """As `storage_id`, of the storage itself."""
    return storage._cdata


def real_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A real CPU tensor, also inside a mode."""
    with PastDispatch():
        return torch.zeros(tuple(shape), dtype=dtype, device="cpu")


def is_zero(tensor: Tensor) -> bool:
    """Whether it is a ZeroTensor, which forward mode uses for zero gradients."""
    return tensor._is_zerotensor()


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes in the storage of a real CPU tensor."""
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


def real_bytes(contents: bytes) -> Tensor:
    """A real tensor of these bytes."""
    with PastDispatch():
        return torch.frombuffer(bytearray(contents), dtype=torch.uint8)


def share_storage(tensor: Tensor, storage: Any) -> None:
    """Put `tensor` on `storage`, with its metadata unchanged."""
    with NoDispatch(), AllowMemoryAccess(storage):
        torch.ops.aten.set_.source_Storage_storage_offset(
            tensor, storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )


def as_result(leaf: Tensor) -> Any:
    """A tensor on the same storage with the same metadata that has a `grad_fn`."""
    return _MarkAsResult.apply(leaf)


class _MarkAsResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


weak_storage = StorageWeakRef


def is_expired(reference: object) -> bool:
    return bool(torch.UntypedStorage._expired(reference.cdata))


def strong_storage(reference: object) -> Any:
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


def is_functorch_wrapped(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


ORDINARY_KEYS = torch._C._dispatch_keys(torch.empty(0)).raw_repr()


def is_ordinary(tensor: Tensor) -> bool:
    """Whether it is a plain CPU tensor by its dispatch keys: strided, no wrapper, no conjugation bit, no inference
    tensor."""
    return bool(torch._C._dispatch_keys(tensor).raw_repr() == ORDINARY_KEYS)


def unwrap(tensor: Tensor) -> Any:
    """The tensor inside a functional or functorch wrapper; None for other tensors."""
    if torch._is_functional_tensor(tensor):
        return torch._from_functional_tensor(tensor)
    if is_functorch_wrapped(tensor):
        return torch._C._functorch.get_unwrapped(tensor)
    return None


def innermost(value: object) -> Any:
    """The tensor inside all functional and functorch wrappers; any other value unchanged."""
    while isinstance(value, Tensor):
        if torch._is_functional_tensor(value):
            torch._sync(value)
        inner = value.elem if is_functional_wrapper(type(value)) else unwrap(value)
        if inner is None:
            break
        value = inner
    return value


def new_nested_int(kind: Any) -> Any:
    """A new nested int, the size of a jagged dimension. `kind` is the class of its node."""
    nested: Any = sys.modules["torch.nested._internal.nested_tensor"]
    number = nested._tensor_id_counter
    nested._tensor_id_counter = number + 1
    return torch.SymInt(kind(number, 1))


def uses_python_dispatch(kind: type) -> bool:
    """Whether this class has its own `__torch_dispatch__`."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_functional_wrapper(kind: type) -> bool:
    """Whether this is the wrapper class of functionalisation."""
    return getattr(kind, "_mode_key", None) == torch._C._TorchDispatchModeKey.FUNCTIONAL


Device = type(torch.device("cpu"))
"""The class of devices. `torch.device` is another one while cards are simulated, which takes plain numbers."""

stand_in_devices: dict[torch.device, torch.device] = {}
"""The device that each index of the meta device stands for."""


def generator_id(generator: torch.Generator) -> int:
    return int(generator._cdata)


def is_stand_in(tensor: object) -> bool:
    return getattr(tensor, "fake_mode", None) is not None


count_writes: Callable[[Any], None] = torch._C._increment_version


PastDispatch: Any = NoDispatch
"""Skips all modes, for calls on real tensors. Ten times cheaper than `no_modes`."""


def inner_device(tensor: Any) -> torch.device:
    """The device that a tensor reports, also inside functorch wrappers."""
    while is_functorch_wrapped(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.device


class RaggedNode(NestedIntNode):
    """As torch's class; a product with a symbol specialises the symbol."""

    def mul(self, other: object) -> RaggedNode:
        times = other.constant_int() if other.is_constant() else other.guard_int("", 0)
        return RaggedNode(self.t_id, self.coeff * times)


def flatten_wrapper(wrapper: torch.Tensor) -> tuple[list[str], object]:
    """The names of the inner tensors of a wrapper subclass, and the context to rebuild it."""
    return wrapper.__tensor_flatten__()


def unflatten_wrapper(
    kind: type[torch.Tensor], parts: dict[str, Any], context: object, shape: object, stride: object
) -> torch.Tensor:
    return kind.__tensor_unflatten__(parts, context, shape, stride)


def collect_device_constructors() -> None:
    """Fill the memoised set of functions that take a device, which `torch.device(...)` contexts use, before any of
    these is patched."""
    from torch.utils._device import _device_constructors  # why: only where a mode is active

    _device_constructors()


def uncounted_writes(tensor: Tensor) -> AbstractContextManager[Any]:
    """Inside, no write to this tensor is counted. One that is made for inference counts none anyway."""
    return nullcontext() if tensor.is_inference() else torch.autograd._unsafe_preserve_version_counter(tensor)


def has_borrowed_memory(tensor: torch.Tensor) -> bool:
    """Whether the memory of a real tensor belongs to another library: an array of NumPy, a buffer."""
    return tensor.layout is torch.strided and not tensor.untyped_storage().resizable()
