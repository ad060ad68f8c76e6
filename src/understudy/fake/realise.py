"""Tensors from outcomes: all stand-ins, dense and sparse, are made here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.native import WITHOUT_INDEX, canonical, in_inference_mode, is_grad_enabled, prepare
from understudy.fake.templates import make_symbolic
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import (
    DeterminedContents,
    count_hidden_write,
    record_for_alias,
    storage_of,
)
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
make_subclass = _torch.make_subclass
give_storage = _torch.give_storage
NoDispatch = _torch.NoDispatch
is_inference = torch.Tensor.is_inference


def wrapper_arguments(mode: FakeTensorMode, spec: TensorSpec) -> Any:
    """The arguments that make a wrapper for this spec in this mode and the current grad mode."""
    arguments = spec.prepared_no_grad
    if arguments is None or not mode.can_skip_dispatch or is_grad_enabled() or in_inference_mode():
        arguments = spec.prepared or prepare(spec)
    return arguments


def make_new(mode: FakeTensorMode, spec: TensorSpec) -> FakeTensor:
    """A stand-in on a storage of its own."""
    if spec.sparse is not None:
        fake = make_sparse(mode, spec)
    elif spec.is_symbolic:
        fake = make_symbolic(spec)
    else:
        fake = make_wrapper(FakeTensor, *wrapper_arguments(mode, spec))
    fake._spec = spec
    fake.fake_mode = mode
    if spec.conj:
        _torch.set_conj(fake, True)
    if spec.neg:
        _torch.set_neg(fake, True)
    if mode.is_observed:
        mode.observe_new_storage(fake)
    return fake


def make_view(
    mode: FakeTensorMode, base: FakeTensor, spec: TensorSpec, expects_operators: bool = True,
    is_inference: bool | None = None,
) -> FakeTensor:  # fmt: skip
    """A stand-in on the storage of another. `expects_operators`: see `make_symbolic`."""
    if spec.sparse is not None:
        return make_sparse(mode, spec)
    if is_inference is None:
        # A view has an inference tensor as base or not, whatever the current mode: views share the version counter of
        # their base, and inference tensors have none.
        is_inference = base.is_inference()
    elif is_inference is not base.is_inference():
        base._determined = record_for_alias(base)
    if is_inference is not in_inference_mode():
        with _torch.inference_mode(is_inference):
            return make_view(mode, base, spec, expects_operators, is_inference)
    # Measured: a wrapper that is then given the storage, 2.7 µs; as_strided past the dispatcher, 5.7; set_, 9.
    try:
        if spec.is_symbolic:
            fake = make_symbolic(spec, base, expects_operators)
        else:
            arguments = spec.prepared_no_grad  # as `wrapper_arguments`
            if arguments is None or not mode.can_skip_dispatch or is_grad_enabled() or is_inference:
                arguments = spec.prepared or prepare(spec)
            fake = make_wrapper(FakeTensor, *arguments)
            give_storage(fake, base)
    except RuntimeError:  # the storage was marked when it was handed out, or was resized
        fake = _make_view_of_marked_storage(mode, base, spec, expects_operators)
    fake._spec = spec
    fake.fake_mode = mode
    if spec.conj:
        _torch.set_conj(fake, True)
    if spec.neg:
        _torch.set_neg(fake, True)
    if base._determined is not None:
        if base._determined.is_zeros and not spec.is_symbolic:
            fake = make_zeros(mode, spec, base._determined)
            give_storage(fake, base)
            return fake
        fake._determined = base._determined
    if base._range is not None:
        fake._range = base._range
    return fake


def make_snapshot(mode: FakeTensorMode, fake: FakeTensor) -> FakeTensor:
    """Another stand-in of the same metadata on the same storage, without gradient: `make_view` by the shortest way."""
    spec = fake._spec
    if (
        fake._determined is not None
        or fake._range is not None
        or spec.sparse is not None
        or is_inference(fake)
    ):
        return make_view(mode, fake, spec, expects_operators=False)
    snapshot: FakeTensor
    if spec.is_symbolic:  # takes over the sizes, which are slow to set
        guard = NoDispatch()
        try:
            snapshot = make_subclass(FakeTensor, fake)
        finally:
            del guard
    else:
        try:
            snapshot = make_wrapper(FakeTensor, *(spec.prepared or prepare(spec)))
            give_storage(snapshot, fake)
        except RuntimeError:  # as in `make_view`
            return make_view(mode, fake, spec, expects_operators=False)
        if spec.conj or spec.neg:
            return make_view(mode, fake, spec, expects_operators=False)
    snapshot._spec, snapshot.fake_mode = spec, mode
    return snapshot


def is_snapshot(val: Any, fake: FakeTensor) -> bool:
    """Whether an earlier snapshot of a tensor shows all that is known of it now."""
    return (
        type(val) is FakeTensor
        and val._spec is fake._spec
        and val._determined is fake._determined is None
        and val._range is fake._range is None
    )


def make_zeros(mode: FakeTensorMode, spec: TensorSpec, known: DeterminedContents) -> FakeTensor:
    """A tensor with the ZeroTensor dispatch key, for which C++ skips operators without reading data."""
    keys = _torch.ZERO_TENSOR_KEYS
    if spec.device.type not in WITHOUT_INDEX:
        keys = keys | _torch.STAND_IN_KEYS
    options = prepare(spec)[:7]
    fake: FakeTensor = make_wrapper(FakeTensor, *options, False, False, None, False, False, keys)
    fake._spec = spec
    fake.fake_mode = mode
    fake._determined = known
    return fake


def _make_view_of_marked_storage(
    mode: FakeTensorMode, base: FakeTensor, spec: TensorSpec, expects_operators: bool
) -> FakeTensor:
    """On a storage that is marked: C++ must not ask for its memory."""
    try:
        with _torch.AllowMemoryAccess(_torch.native_storage(base)):
            if spec.is_symbolic:
                fake = make_symbolic(spec, base, expects_operators)
            else:
                fake = make_wrapper(FakeTensor, *wrapper_arguments(mode, spec))
                give_storage(fake, base)
    except RuntimeError:  # C++ moved a resized storage to the meta device, and refuses it
        fake = _make_view_without_dispatch(base, spec)
    return fake


def _make_view_without_dispatch(base: FakeTensor, spec: TensorSpec) -> FakeTensor:
    shape, stride, offset = map(to_torch, spec.shape), map(to_torch, spec.stride), to_torch(spec.offset)
    with _torch.grad_mode(False):
        guard = NoDispatch()
        try:
            # Not `as_strided`: C++ would make a view on the device of the storage.
            of_dtype = base if base._spec.dtype is spec.dtype else torch.Tensor.view(base, spec.dtype)
            view: FakeTensor = make_subclass(FakeTensor, of_dtype)
            torch.Tensor.as_strided_(view, tuple(shape), tuple(stride), offset)
            return view
        finally:
            del guard


def realise(mode: FakeTensorMode, outcomes: Any, inputs: list[FakeTensor]) -> Any:
    """The tensors of these outcomes, in the same lists and tuples."""
    kind = type(outcomes)
    if kind is New:  # compare types first: each pattern costs an isinstance
        return make_new(mode, outcomes.spec)
    if kind is tuple:
        return tuple(
            [
                make_new(mode, part.spec) if type(part) is New else realise(mode, part, inputs)
                for part in outcomes
            ]
        )
    match outcomes:
        case View(of, spec, is_linked):
            return make_view(mode, inputs[of], spec, is_inference=None if is_linked else in_inference_mode())
        case Same(of, None):
            return inputs[of]
        case Same(of, TensorSpec() as spec):
            change_spec(inputs[of], spec)
            return inputs[of]
        case Changed(changes):
            for change in changes:
                realise(mode, change, inputs)
            return None
        case list():
            return [realise(mode, part, inputs) for part in outcomes]
    return to_torch(outcomes.value)


def change_spec(fake: FakeTensor, spec: TensorSpec) -> None:
    """Change the metadata of a tensor in place, as `t_`, `resize_` and out= do; its storage grows if necessary."""
    if spec.sparse is not None:  # another number of entries, say
        if spec.shape != fake._spec.shape:
            adopt(fake, make_new(fake.fake_mode, spec))
        fake._spec = spec
        return
    if spec.is_symbolic or fake._spec.is_symbolic:
        adopt(fake, make_view(fake.fake_mode, fake, spec))
        return
    grows = extent(spec) * spec.itemsize > _torch.native_storage(fake).nbytes()
    is_within = (
        fake._spec.numel == 0 or extent(fake._spec) * spec.itemsize <= _torch.native_storage(fake).nbytes()
    )
    if grows and not is_within:
        # The storage of a tensor with symbolic sizes has no fixed size.
        adopt(fake, make_view(fake.fake_mode, fake, spec))
        return
    guard = NoDispatch()
    try:
        if grows:
            with _torch.AllowMemoryAccess(
                _torch.native_storage(fake)
            ):  # C++ counts from where the tensor begins
                torch.Tensor.resize_(fake, (extent(spec) - fake._spec.offset,))
        torch.Tensor.as_strided_(fake, *spec.numbers)
    finally:
        del guard
    if spec.conj:
        _torch.set_conj(fake, True)
    fake._spec = spec
    if grows and fake.fake_mode.is_observed:
        fake.fake_mode.observe_resize(_torch.native_storage(fake))


def extent(spec: TensorSpec) -> Any:
    """The number of elements from the start of the storage to the last one of the tensor."""
    last = spec.offset
    for size, step in zip(spec.shape, spec.stride, strict=True):
        if size == 0:
            return spec.offset
        last = last + (size - 1) * step
    return last + 1


def extent_if_nonempty(spec: TensorSpec) -> Any:
    """The same for a tensor that is not empty, without guards on its sizes."""
    last = spec.offset
    for size, step in zip(spec.shape, spec.stride, strict=True):
        last = last + (at_least_one(size) - 1) * step
    return last + 1


def adopt(fake: FakeTensor, other: FakeTensor) -> None:
    """`fake.data = other`: the same tensor object on the other's storage, with the other's metadata."""
    if other is fake:
        return
    guard = NoDispatch()
    try:
        _torch.set_native_data(fake, other)
    finally:
        del guard
    fake._spec = other._spec
    known = other._determined
    fake._determined = None if known is None or known.is_empty else known
    fake._range = None
    other._determined = record_for_alias(other)
    count_hidden_write(fake.fake_mode, storage_of(fake))
