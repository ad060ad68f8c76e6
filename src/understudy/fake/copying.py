"""Copies of stand-ins (deepcopy, copy, pickle, torch.save and torch.load), and copies of modules with stand-ins in them."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.overrides

from understudy import _torch
from understudy.fake.checkpoints import load_device
from understudy.fake.realise import make_new, make_view
from understudy.fake.tensor import FakeTensor
from understudy.fake.values.determined import DeterminedContents, LiteralStorage, record_for_alias
from understudy.spec import TensorSpec
from understudy.spec.sparse import SparseParts
from understudy.spec.tensor_spec import _rebuild as rebuild_spec

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

Module = TypeVar("Module", bound=torch.nn.Module)
NOT_COPIED = frozenset(
    "_spec fake_mode _determined _range _node _nonzero_memo _item_memo _unique_memo _unique_consecutive_memo "
    "_nested_int_memo _size_memos".split()
)


def deep_copy(mode: FakeTensorMode, fake: FakeTensor, memo: dict[int, Any]) -> FakeTensor:
    """An independent tensor in the same mode; tensors that share a storage share one in the copy too."""
    if id(fake) in memo:
        return memo[id(fake)]
    if not fake.is_leaf:
        raise RuntimeError(
            "only tensors that the user made can be deep-copied: this one is the result of a computation "
            "that autograd recorded; call .detach() first"
        )
    if getattr(fake, "_is_param", False):
        return _copy_parameter(fake, memo)
    with _torch.grad_mode(False):
        if _torch.active_recorder() is None:
            duplicate: Any = _copy_on_new_storage(mode, fake, memo)
        else:  # while a graph is recorded, the copy has to be an operator
            duplicate = fake.clone(memory_format=torch.preserve_format)
    duplicate.requires_grad_(fake.requires_grad)
    memo[id(fake)] = duplicate
    if fake.grad is not None:
        duplicate.grad = copy.deepcopy(fake.grad, memo)
    _copy_attributes(fake, duplicate, memo)
    return duplicate


def _copy_parameter(fake: FakeTensor, memo: dict[int, object]) -> FakeTensor:
    """As for a real parameter: cloned by an operator, without gradient and attributes."""
    with _torch.grad_mode(False):
        values = fake.clone(memory_format=torch.preserve_format)
    duplicate: Any = torch.nn.Parameter(values, fake.requires_grad)
    memo[id(fake)] = duplicate
    return duplicate


def _copy_on_new_storage(mode: FakeTensorMode, fake: FakeTensor, memo: dict[Any, Any]) -> FakeTensor:
    spec = fake._spec
    if spec.layout is not torch.strided:
        return make_new(mode, spec)
    storage_key = ("understudy storage", _torch.storage_id(fake))
    base = memo.get(storage_key)
    if base is None:
        nbytes = _torch.native_storage(fake).nbytes()
        base = make_new(mode, TensorSpec((nbytes,), dtype=torch.uint8, device=spec.device))
        if fake._determined is not None and fake._determined.content is not None:
            base._determined = DeterminedContents(fake._determined.content, fake._determined.literal)
        memo[storage_key] = base
    duplicate: Any = make_view(mode, base, spec.as_view(spec.shape, spec.stride, conj=False, neg=False))
    duplicate._determined = base._determined
    _torch.count_writes([duplicate])  # eager sets the copy on its storage, which counts as a write
    duplicate = duplicate.conj_physical() if spec.conj else duplicate
    return duplicate.neg() if spec.neg else duplicate


def _copy_attributes(fake: FakeTensor, duplicate: FakeTensor, memo: dict[int, object]) -> None:
    for name, value in fake.__dict__.items():
        if name not in NOT_COPIED:
            duplicate.__dict__[name] = copy.deepcopy(value, memo)


def shallow_copy(mode: FakeTensorMode, fake: FakeTensor) -> FakeTensor:
    """`copy.copy`: another tensor on the same storage, which counts its own writes."""
    with _torch.grad_mode(False):
        if _torch.active_recorder() is None and fake._spec.layout is torch.strided:
            duplicate: Any = _share_storage(mode, fake)
        else:  # while a graph is recorded, the copy has to be an operator
            duplicate = fake.detach()
    duplicate.requires_grad_(fake.requires_grad)
    for name, value in fake.__dict__.items():
        if name not in NOT_COPIED:
            duplicate.__dict__[name] = value
    return duplicate


def _share_storage(mode: FakeTensorMode, fake: FakeTensor) -> FakeTensor:
    spec = fake._spec
    if spec.device.type == "meta":  # eager makes a new one
        return make_new(mode, spec)
    if getattr(fake, "_is_param", False):
        return fake.data  # type: ignore[return-value]
    is_known = fake._determined is not None
    fake._determined = record_for_alias(fake)
    duplicate = make_view(mode, fake, spec, is_inference=torch.is_inference_mode_enabled())
    duplicate._range = None
    if not is_known:  # writes to the copy are noted on the storage: the original needs no record of its own
        del fake._determined
    if not duplicate.is_inference():
        _torch.count_writes([duplicate])  # eager sets the copy on the storage, which counts as a write
    return duplicate


# --- pickle ----------------------------------------------------------------------------------------------------

MOST_PICKLED_BYTES = 1 << 16
"""Determined values of a storage up to this size in bytes are part of the pickle."""


class PickledStorage:
    """Stands for a storage in a pickle. In files of `torch.save`, tensors that shared a storage refer to the same object."""

    def __init__(self, nbytes: int, contents: bytes | None = None, literal: bool = False) -> None:
        self.nbytes = nbytes
        self.contents = contents
        self.literal = literal
        self.as_real: Any = None
        self._bases: dict[torch.device, FakeTensor] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return PickledStorage, (self.nbytes, self.contents, self.literal)

    def base(self, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
        base = self._bases.get(device)
        if base is None:
            base = self._bases[device] = make_new(
                mode, TensorSpec((self.nbytes,), dtype=torch.uint8, device=device)
            )
            if self.contents:
                base._determined = DeterminedContents(
                    LiteralStorage(_torch.real_bytes(self.contents)), self.literal
                )
        return base


def reduce(fake: FakeTensor) -> object:
    if fake._spec.is_symbolic:
        raise pickle.PicklingError(
            f"{fake._spec} has symbolic sizes, which can't be pickled: pickle tensors with plain "
            "sizes (from_tensor(..., static_shapes=True)), or the specs as text"
        )
    if fake._spec.layout is not torch.strided:
        return rebuild_sparse, (
            fake.fake_mode,
            fake._spec,
            str(fake.device),
            fake.requires_grad,
            _state(fake),
        )
    token = _pickled_storage(fake)
    if _torch.writes_as_real():
        return _reduce_as_real(fake, token)
    spec = fake._spec
    geometry = (
        tuple(spec.shape),
        tuple(spec.stride),
        spec.offset,
        spec.dtype,
        str(spec.device),
        spec.conj,
        spec.neg,
    )
    return rebuild, (fake.fake_mode, token, geometry, fake.requires_grad, _state(fake))


def _state(fake: FakeTensor) -> dict[str, object]:
    return {name: value for name, value in fake.__dict__.items() if name not in NOT_COPIED}


def _pickled_storage(fake: FakeTensor) -> PickledStorage:
    """The one object for a storage, where pickle writes it once, however many tensors share it."""
    storage: Any = _torch.native_storage(fake)
    token: PickledStorage | None = getattr(storage, "_understudy_pickled", None)
    if token is None or not _torch.pickler_shares_storages():
        token = storage._understudy_pickled = PickledStorage(0)
    token.nbytes = storage.nbytes()
    token.contents, token.literal = _contents(fake)
    return token


def _contents(fake: FakeTensor) -> tuple[bytes | None, bool]:
    known = fake._determined
    if known is None or known.content is None or _torch.native_storage(fake).nbytes() > MOST_PICKLED_BYTES:
        return None, False
    with _torch.no_modes():
        return _torch.bytes_of(known.content.storage()), known.literal


def _reduce_as_real(fake: FakeTensor, token: PickledStorage) -> Any:
    """For `torch.serialization.skip_data(materialize_fake_tensors=True)`: a real model's checkpoint without data."""
    if getattr(fake, "_is_param", False):
        return _torch.reduce_parameter(fake.data, fake.requires_grad)
    if token.as_real is None or token.as_real.nbytes() != token.nbytes:
        token.as_real = _torch.meta_storage(token.nbytes, fake.device)
    bits = {"conj": fake.is_conj(), "neg": fake.is_neg()}
    return _torch.reduce_as_real(fake, token.as_real, {name: True for name, is_set in bits.items() if is_set})


def rebuild(
    mode: FakeTensorMode, token: PickledStorage, geometry: Any, requires_grad: bool, state: Any
) -> FakeTensor:
    shape, stride, offset, dtype, location, conj, neg = geometry
    device = load_device(location, token.nbytes)
    spec = TensorSpec(shape, stride, offset, dtype=dtype, device=device, conj=conj, neg=neg)
    base = token.base(mode, device)
    fake = make_view(mode, base, spec)
    fake._determined = base._determined
    _torch.count_writes([fake])  # as in eager, which sets it on its storage
    fake.requires_grad_(requires_grad)
    fake.__dict__.update(state)
    return fake


def rebuild_sparse(
    mode: FakeTensorMode, spec: TensorSpec, location: str, requires_grad: bool, state: dict[str, object]
) -> FakeTensor:
    fake = make_new(mode, spec.on(load_device(location, 0)))
    fake.requires_grad_(requires_grad)
    fake.__dict__.update(state)
    return fake


def mode_for_unpickling(
    allow_fallback_kernels: bool = True, allow_non_fake_inputs: bool = False, export: bool = False,
    crosscheck: bool | str = False,
) -> FakeTensorMode:  # fmt: skip
    """Unpickled stand-ins belong to the active mode, or to one made for all of them."""
    from understudy.fake.mode import FakeTensorMode  # why: the mode imports this module

    active = _torch.active_fake_mode()
    if issubclass(type(active), FakeTensorMode):
        return active
    return FakeTensorMode(
        allow_fallback_kernels=allow_fallback_kernels, allow_non_fake_inputs=allow_non_fake_inputs, export=export,
        crosscheck=crosscheck,
    )  # fmt: skip


# Allowed in files for `torch.load(weights_only=True)`: these only make stand-ins.
torch.serialization.add_safe_globals(
    [rebuild, rebuild_sparse, mode_for_unpickling, PickledStorage, rebuild_spec, SparseParts]
)


# --- modules -------------------------------------------------------------------------------------------------


class FakeCopyMode(_torch.FunctionMode):
    """`copy.deepcopy(module)` inside this gives a module whose parameters and buffers are stand-ins."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _torch.native_clone:
            return func(self.fake_mode.from_tensor(args[0], static_shapes=True), **kwargs)
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.fake_mode.from_tensor(tensor, static_shapes=True)
            return memo[id(tensor)]
        with _torch.NoTorchFunction():
            return func(*args, **kwargs)


def copy_module(mode: FakeTensorMode, module: Module) -> Module:
    """A copy of a module whose tensors are stand-ins; shared tensors are shared in the copy."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"from_module: expected an nn.Module, got a {type(module).__name__}; for a tensor, use from_tensor"
        )
    with FakeCopyMode(mode):
        return copy.deepcopy(module)
