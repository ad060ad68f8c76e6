"""Tensors from outcomes: the only place where stand-ins come into being, dense and sparse ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.native import WITHOUT_INDEX, canonical, prepare
from understudy.fake.templates import make_symbolic
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import DeterminedContents
from understudy.shapes.sizes import at_least_one, to_torch
from understudy.spec import Changed, New, Same, TensorSpec, View
from understudy.spec.sparse import sparse_on, spec_of_sparse

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

META = torch.device("meta")


def convert_sparse(mode: FakeTensorMode, t: torch.Tensor) -> FakeTensor:
    return make_sparse(mode, spec_of_sparse(t.detach(), canonical(t.device)))


def make_sparse(mode: FakeTensorMode, spec: TensorSpec) -> FakeTensor:
    guard = _torch.NoDispatch()
    try:
        fake: Any = _torch.make_subclass(FakeTensor, sparse_on(spec, META))
    finally:
        del guard
    fake._spec = spec
    fake.fake_mode = mode
    return fake


# --- Dense stand-ins ----------------------------------------------------------------------------------------

make_wrapper = _torch.make_wrapper
in_inference_mode = torch.is_inference_mode_enabled
make_subclass = _torch.make_subclass
give_storage = _torch.give_storage
NoDispatch = _torch.NoDispatch


def make_new(mode: FakeTensorMode, spec: TensorSpec) -> FakeTensor:
    """A stand-in on a storage of its own."""
    if spec.sparse is not None:
        fake = make_sparse(mode, spec)
    elif spec.is_symbolic:
        fake = make_symbolic(spec)
    else:
        fake = make_wrapper(FakeTensor, *(spec.prepared or prepare(spec)))
    fake._spec = spec
    fake.fake_mode = mode
    if spec.conj:
        _torch.set_conj(fake, True)
    if spec.neg:
        _torch.set_neg(fake, True)
    if mode.is_observed:
        mode.follow(fake)
    return fake


def make_view(mode: FakeTensorMode, base: FakeTensor, spec: TensorSpec, is_asked: bool = True) -> FakeTensor:
    """A stand-in on the storage of another. `is_asked`: see `make_symbolic`."""
    if spec.sparse is not None:
        return make_sparse(mode, spec)
    if base.is_inference() is not in_inference_mode():
        # A view of an ordinary tensor is an ordinary tensor everywhere: they count their writes together. One of a
        # tensor that inference mode made counts none, outside of that mode as well.
        with torch.inference_mode(base.is_inference()):
            return make_view(mode, base, spec, is_asked)
    # Measured: a wrapper that is then given the storage, 2.7 µs; as_strided past the dispatcher, 5.7; set_, 9.
    try:
        if spec.is_symbolic:
            fake = make_symbolic(spec, base, is_asked)
        else:
            fake = make_wrapper(FakeTensor, *(spec.prepared or prepare(spec)))
            give_storage(fake, base)
    except RuntimeError:  # the storage was handed out, or has grown
        fake = _view_handed_out(base, spec, is_asked)
    fake._spec = spec
    fake.fake_mode = mode
    if spec.conj:
        _torch.set_conj(fake, True)
    if spec.neg:
        _torch.set_neg(fake, True)
    if base._known is not None:
        if base._known.is_zeros and not spec.is_symbolic:
            return make_zeros(mode, spec, base._known)
        fake._known = base._known
    elif base._range is not None:
        fake._range = base._range
    return fake


def make_zeros(mode: FakeTensorMode, spec: TensorSpec, known: DeterminedContents) -> FakeTensor:
    """With the bit by which C++ leaves out operators on such tensors, before anybody asks for their data."""
    keys = _torch.ZERO_TENSOR_KEYS
    if spec.device.type not in WITHOUT_INDEX:
        keys = keys | _torch.STAND_IN_KEYS
    options = prepare(spec)[:7]
    fake: FakeTensor = make_wrapper(FakeTensor, *options, False, False, None, False, False, keys)
    fake._spec = spec
    fake.fake_mode = mode
    fake._known = known
    return fake


def make_again(mode: FakeTensorMode, spec: TensorSpec, base: FakeTensor | None) -> FakeTensor:
    """A stand-in of a spec that `make_new` has made before, on a storage of its own or on that of another one: in
    strided layout, outside of inference mode, where nothing is known of values."""
    try:
        if spec.is_symbolic:
            fake = make_symbolic(spec, base, is_asked=False)
        else:
            fake = make_wrapper(FakeTensor, *spec.prepared)
            if base is not None:
                give_storage(fake, base)
    except RuntimeError:  # as in `make_view`
        if base is None:
            raise
        fake = _view_handed_out(base, spec, is_asked=False)
    fake._spec = spec
    fake.fake_mode = mode
    return fake


def can_be_made_again(spec: TensorSpec) -> bool:
    return spec.prepared is not None and not (spec.sparse is not None or spec.conj or spec.neg)


def _view_handed_out(base: FakeTensor, spec: TensorSpec, is_asked: bool) -> FakeTensor:
    """On a storage whose memory C++ must not ask for."""
    try:
        with _torch.MemoryAsked(_torch.native_storage(base)):
            if spec.is_symbolic:
                fake = make_symbolic(spec, base, is_asked)
            else:
                fake = make_wrapper(FakeTensor, *(spec.prepared or prepare(spec)))
                give_storage(fake, base)
    except RuntimeError:  # a storage that has grown is on the meta device to C++, and is refused
        fake = _viewed_past_dispatch(base, spec)
    return fake


def _viewed_past_dispatch(base: FakeTensor, spec: TensorSpec) -> FakeTensor:
    shape, stride, offset = map(to_torch, spec.shape), map(to_torch, spec.stride), to_torch(spec.offset)
    with torch.no_grad():
        guard = NoDispatch()
        try:
            # Not `as_strided`: a view that C++ makes is on the device of the storage.
            of_dtype = base if base._spec.dtype is spec.dtype else torch.Tensor.view(base, spec.dtype)
            view: FakeTensor = make_subclass(FakeTensor, of_dtype)
            torch.Tensor.as_strided_(view, tuple(shape), tuple(stride), offset)
            return view
        finally:
            del guard


def realise(mode: FakeTensorMode, outcomes: Any, inputs: list[FakeTensor]) -> Any:
    """Tensors, lists and tuples of them, as the outcomes say."""
    match outcomes:
        case New(spec):
            return make_new(mode, spec)
        case View(of, spec):
            return make_view(mode, inputs[of], spec)
        case Same(of, None):
            return inputs[of]
        case Same(of, TensorSpec() as spec):
            change_spec(inputs[of], spec)
            return inputs[of]
        case Changed(changes):
            for change in changes:
                realise(mode, change, inputs)
            return None
        case tuple():
            return tuple([realise(mode, part, inputs) for part in outcomes])
        case list():
            return [realise(mode, part, inputs) for part in outcomes]
    return to_torch(outcomes.value)


def change_spec(fake: FakeTensor, spec: TensorSpec) -> None:
    """Give a tensor other metadata in place, as `t_`, `resize_` and out= do; its storage grows if it must."""
    if spec.is_symbolic or fake._spec.is_symbolic:
        adopt(fake, make_view(fake.fake_mode, fake, spec))
        return
    grows = extent(spec) * spec.itemsize > _torch.native_storage(fake).nbytes()
    is_within = fake._spec.numel == 0 or extent(fake._spec) * spec.itemsize <= _torch.native_storage(fake).nbytes()
    if grows and not is_within:
        # The storage of a tensor with symbolic sizes: it has no size that it could outgrow.
        adopt(fake, make_view(fake.fake_mode, fake, spec))
        return
    guard = NoDispatch()
    try:
        if grows:
            with _torch.MemoryAsked(_torch.native_storage(fake)):  # C++ counts from where the tensor begins
                torch.Tensor.resize_(fake, (extent(spec) - fake._spec.offset,))
        torch.Tensor.as_strided_(fake, *spec.numbers)
    finally:
        del guard
    if spec.conj:
        _torch.set_conj(fake, True)
    fake._spec = spec
    if grows and fake.fake_mode.is_observed:
        fake.fake_mode.follow_resize(_torch.native_storage(fake))


def extent(spec: TensorSpec) -> Any:
    """Elements from the start of the storage to the last one that the tensor reaches."""
    last = spec.offset
    for size, step in zip(spec.shape, spec.stride, strict=True):
        if size == 0:
            return spec.offset
        last = last + (size - 1) * step
    return last + 1


def extent_if_filled(spec: TensorSpec) -> Any:
    """The same of a tensor that has elements, with no question asked of its sizes."""
    last = spec.offset
    for size, step in zip(spec.shape, spec.stride, strict=True):
        last = last + (at_least_one(size) - 1) * step
    return last + 1


def adopt(fake: FakeTensor, other: FakeTensor) -> None:
    """`fake.data = other`: the same tensor object on the other's storage, with the other's metadata."""
    guard = NoDispatch()
    try:
        _torch.set_native_data(fake, other)
    finally:
        del guard
    fake._spec = other._spec
    fake._known = other._known
