"""Checkpoints: `torch.load` inside the mode, `torch.save` of stand-ins.

Inside a fake mode `torch.load` reads no data. For each tensor it makes an empty meta tensor and sets its storage to a
meta storage of the right size. The intended device, and which tensors share a storage, are determined only from the local
variables of the loader; the handlers of the two operators read them there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.inputs import handler
from understudy.fake.native import META, canonical
from understudy.fake.realise import adopt, make_new, make_view
from understudy.spec import TensorSpec

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode
    from understudy.fake.tensor import FakeTensor

READ_BYTES = 16
"""Storages up to this size hold single numbers (step counters, scales) that programs read: their values are loaded."""


class LoadDestination:
    """Passed to a `map_location` function in place of a storage: has no data, and can be moved between devices."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self.device = device

    def nbytes(self) -> int:
        return self._nbytes

    size = __len__ = nbytes

    def to(self, *, device: Any, non_blocking: bool = False) -> LoadDestination:
        return LoadDestination(self._nbytes, torch.device(device))

    def cuda(self, device: object = None, non_blocking: bool = False) -> LoadDestination:
        return self.to(device=torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def cpu(self) -> LoadDestination:
        return self.to(device="cpu")


def load_device(location: str, nbytes: int) -> torch.device:
    """The device to which `torch.load(map_location=...)` maps a saved location."""
    wanted = _torch.map_location()
    target: str | torch.device = location
    if isinstance(wanted, dict):
        target = wanted.get(location, location)
    elif isinstance(wanted, (str, torch.device)):
        target = wanted
    elif callable(wanted):
        # As with real storages: the function is given one on the CPU, and returns one on the device to load to.
        chosen = wanted(LoadDestination(nbytes, torch.device("cpu")), location)
        target = location if chosen is None else chosen.device
    return canonical(torch.device(target))


@handler("aten::empty.memory_format")
def empty_for_checkpoint(mode: FakeTensorMode, func: object, args: Any, kwargs: Any) -> Any:
    """The empty tensor that the loader starts from, on the device to load to.

    The results of handlers are not cached: the same call means another device for the next tensor.
    """
    if kwargs.get("device") != META or len(args[0]) != 1 or type(args[0][0]) is not int or args[0][0] != 0:
        return NotImplemented
    source = _torch.checkpoint_source()
    device = (
        META
        if source is None or source.location is None
        else load_device(source.location, source.storage.nbytes())
    )
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return make_new(mode, TensorSpec((0,), dtype=dtype, device=device))


@handler("aten::set_.source_Storage_storage_offset")
def set_storage(mode: FakeTensorMode, func: object, args: Any, kwargs: object) -> Any:
    """`tensor.set_(storage, offset, size, stride)`."""
    fake, _, offset, shape, stride = (*args, (), ())[
        :5
    ]  # the dispatcher strips defaults: a scalar has no sizes
    source = _torch.checkpoint_source()
    if source is not None:
        return _put_on_loaded_storage(mode, fake, source, offset, shape, stride)
    return set_whole_storage(mode, func, args, kwargs)


@handler("aten::set_.source_Storage", "aten::set_")
def set_whole_storage(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> Any:
    fake, storage = args[0], args[1] if len(args) > 1 else None
    other = getattr(storage, "resized_of", _get_no_mode)()
    if other is not None:
        adopt(fake, make_view(mode, other, _spec_on(storage, fake._spec, *args[2:])))
        return fake
    if storage is not None and _torch.has_memory(
        storage
    ):  # of a real tensor: a stand-in can't share its memory
        whole = mode.from_tensor(_torch.bytes_on(storage), static_shapes=True)
        args = (fake, _torch.native_storage(whole), *args[2:])
    if _is_resized(fake):  # C++ refuses to replace its storage by one on the CPU
        adopt(fake, make_new(mode, fake._spec))
    if storage is not None and storage.device.type == "meta" and fake._spec.device.type == "cpu":
        # Inside any fake mode, torch reads buffers and files into storages without data, on the meta device.
        whole = make_new(mode, TensorSpec((storage.nbytes(),), dtype=torch.uint8, device=fake._spec.device))
        args = (fake, _torch.native_storage(whole), *args[2:])
    with (
        _torch.PastDispatch(),
        _torch.AllowMemoryAccess(args[1] if len(args) > 1 else _torch.native_storage(fake)),
    ):
        func(*args, **kwargs)
    return _spec_from_native(args[0], getattr(args[1], "determined", None) if len(args) > 1 else None)


def _get_no_mode() -> None:
    return None


def _is_resized(fake: FakeTensor) -> bool:
    """Whether its storage was resized: C++ then has it on the meta device."""
    return fake._spec.device.type == "cpu" and _torch.native_storage(fake).device.type == "meta"


def _spec_on(
    storage: Any, spec: TensorSpec, offset: object = 0, shape: Any = None, stride: Any = None
) -> TensorSpec:
    """The spec of a tensor that is set on a storage: all of it, unless offset and sizes are given."""
    if shape is None:
        shape = (storage.nbytes() // spec.itemsize,)
    return TensorSpec(
        tuple(shape), tuple(stride) if stride else None, offset, dtype=spec.dtype, device=spec.device
    )


@handler("aten::set_.source_Tensor")
def set_tensor(mode: FakeTensorMode, func: object, args: Any, kwargs: object) -> Any:
    fake, other = args
    is_inference = fake.is_inference()  # it stays so, unlike in `fake.data = other`
    if other.is_inference() is not is_inference:
        other = make_view(mode, other, other._spec, is_inference=is_inference)
    adopt(fake, other)
    return fake


def _spec_from_native(fake: FakeTensor, determined: Any) -> FakeTensor:
    """The spec of a tensor whose sizes and strides C++ has changed."""
    spec = fake._spec
    geometry = tuple(fake.shape), fake.stride(), fake.storage_offset()
    fake._spec = TensorSpec(*geometry, dtype=spec.dtype, device=spec.device)
    fake._determined = determined
    return fake


def _put_on_loaded_storage(
    mode: FakeTensorMode, fake: FakeTensor, source: Any, offset: object, shape: Any, stride: Any
) -> FakeTensor:
    device = fake._spec.device
    # The loader makes a new meta storage for every tensor; tensors with the same offset in the file share one.
    key = ("stand-in", source.file_offset, device)
    base = source.loaded.get(key)
    if base is None:
        nbytes = source.storage.nbytes()
        base = source.loaded[key] = make_new(mode, TensorSpec((nbytes,), dtype=torch.uint8, device=device))
        contents = _contents(source) if 0 < nbytes <= READ_BYTES else None
        if contents is not None:
            mode.remember_literal(base, _torch.real_bytes(contents))
        _torch.native_storage(base)._checkpoint_offset = source.storage._checkpoint_offset  # torch reads it
    plain = TensorSpec(tuple(shape), tuple(stride), offset, dtype=fake._spec.dtype, device=device)
    adopt(fake, make_view(mode, base, plain))
    fake._determined = base._determined
    # The loader sets the conjugation and negation bits itself, right after this.
    fake._spec = plain.as_view(plain.shape, plain.stride, conj=source.conj, neg=source.neg)
    return fake


def _contents(source: Any) -> bytes | None:
    """The bytes of this storage in the file; None for files of the old format or of another byte order."""
    if source.reader is None:
        return None
    names = source.loaded.get("names by offset")
    if names is None:
        reader = source.reader
        names = {reader.get_record_offset(name): name for name in reader.get_all_records()}
        source.loaded["names by offset"] = names
    name = names.get(source.file_offset)
    return None if name is None else source.reader.get_record(name)
