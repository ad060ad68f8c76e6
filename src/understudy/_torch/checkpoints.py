"""The state of torch.load and torch.save while they run."""

from __future__ import annotations

import multiprocessing.reduction
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

# --- checkpoints ------------------------------------------------------------------------------------------


class CheckpointSource(NamedTuple):
    """The variables of `torch.load` for the tensor that it is rebuilding."""

    storage: Any
    location: str | None
    file_offset: Any
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
    """The source of the tensor that torch.load is rebuilding; None if torch.load is not the caller."""
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


def _calling_frame(codes: Any, most: int, frame: object = None) -> Any:
    frame = frame or sys._getframe(2)
    for _ in range(most):
        if frame is None or frame.f_code in codes:
            return frame
        frame = frame.f_back
    return None


def map_location() -> Any:
    """The `map_location` of the current `torch.load` of this thread."""
    return torch.serialization._serialization_tls.map_location


def writes_as_real() -> bool:
    """Whether `torch.save` writes stand-ins like real tensors, without data."""
    state = torch.serialization._serialization_tls
    return bool(state.skip_data and state.materialize_fake_tensors)


_SHARING_PICKLERS = {
    torch.serialization._save.__code__, torch.serialization._legacy_save.__code__,
    multiprocessing.reduction.ForkingPickler.dumps.__func__.__code__, multiprocessing.reduction.dump.__code__,
}  # fmt: skip


def pickler_shares_storages() -> bool:
    """Whether tensors that share a storage do so when they are read again: those that `torch.save` writes, and those for
    other processes. Plain pickle writes the storage again with each tensor."""
    return _calling_frame(_SHARING_PICKLERS, sys.getrecursionlimit()) is not None


def meta_storage(nbytes: int, device: torch.device) -> Any:
    """A storage for `torch.save` that stands for one on `device`."""
    storage = torch.UntypedStorage(nbytes, device="meta")
    storage._fake_device = device
    return storage


def reduce_as_real(tensor: Tensor, storage: object, metadata: dict[str, bool]) -> Any:
    """The reduction of a real tensor with the metadata of `tensor` on `storage`."""
    geometry: Any = (
        tensor.storage_offset(),
        tuple(tensor.size()),
        tensor.stride(),
        tensor.requires_grad,
        OrderedDict(),
    )
    extra = (metadata,) if metadata else ()
    if tensor.dtype in torch.storage._new_dtypes():
        return torch._utils._rebuild_tensor_v3, (storage, *geometry, tensor.dtype, *extra)
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    typed._fake_device = storage._fake_device
    return torch._utils._rebuild_tensor_v2, (typed, *geometry, *extra)


def reduce_parameter(data: Tensor, requires_grad: bool) -> Any:
    return torch._utils._rebuild_parameter, (data, requires_grad, OrderedDict())
