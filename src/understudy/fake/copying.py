"""Copies of stand-ins: deepcopy, copy, pickle, torch.save and torch.load."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.fake.native import canonical
from understudy.fake.realise import make_new, make_unlike_view
from understudy.fake.tensor import FakeTensor
from understudy.spec import TensorSpec

if TYPE_CHECKING:
    from understudy.fake.mode import FakeTensorMode

NOT_COPIED = frozenset({"_spec", "fake_mode", "_known", "_nonzero_memo", "_item_memo", "_unique_memo"})


def deep_copy(mode: FakeTensorMode, fake: FakeTensor, memo: dict[int, Any]) -> FakeTensor:
    """An independent tensor in the same mode; tensors that share a storage share one in the copy too."""
    if id(fake) in memo:
        return memo[id(fake)]  # type: ignore[no-any-return]
    if not fake.is_leaf:
        raise RuntimeError(
            "only tensors that the user made can be deep-copied: this one is the result of a computation "
            "that autograd recorded; call .detach() first"
        )
    with torch.no_grad():
        twin = _twin(mode, fake, memo)
    twin.requires_grad_(fake.requires_grad)
    memo[id(fake)] = twin
    if fake.grad is not None:
        twin.grad = copy.deepcopy(fake.grad, memo)
    _copy_attributes(fake, twin, memo)
    return twin


def _twin(mode: FakeTensorMode, fake: FakeTensor, memo: dict[int, Any]) -> FakeTensor:
    spec = fake._spec
    if spec.layout is not torch.strided:
        return fake.detach().clone()  # type: ignore[return-value]
    storage_key = ("understudy storage", _torch.storage_id(fake))
    base = memo.get(storage_key)  # type: ignore[call-overload]
    if base is None:
        nbytes = _torch.native_storage(fake).nbytes()
        base = make_new(mode, TensorSpec((nbytes,), dtype=torch.uint8, device=spec.device))
        if fake._known is not None and fake._known.content is not None:
            base._known = type(fake._known)(fake._known.content, fake._known.literal)
        memo[storage_key] = base  # type: ignore[index]
    twin = make_unlike_view(mode, base, spec)
    twin._known = base._known
    return twin


def _copy_attributes(fake: FakeTensor, twin: FakeTensor, memo: dict[int, Any]) -> None:
    for name, value in fake.__dict__.items():
        if name not in NOT_COPIED:
            twin.__dict__[name] = copy.deepcopy(value, memo)


def shallow_copy(mode: FakeTensorMode, fake: FakeTensor) -> FakeTensor:
    """`copy.copy`: another tensor on the same storage."""
    with torch.no_grad():
        twin: Any = fake.detach()
    twin.requires_grad_(fake.requires_grad)
    for name, value in fake.__dict__.items():
        if name not in NOT_COPIED:
            twin.__dict__[name] = value
    return twin  # type: ignore[no-any-return]


# --- pickle ----------------------------------------------------------------------------------------------------


class PickledStorage:
    """Stands for a storage in a pickle: tensors that shared one find the same object again."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._bases: dict[Any, FakeTensor] = {}

    def __getstate__(self) -> Any:
        return {"nbytes": self.nbytes}

    def __setstate__(self, state: Any) -> None:
        self.__init__(state["nbytes"])  # type: ignore[misc]

    def base(self, mode: FakeTensorMode, device: torch.device) -> FakeTensor:
        if device not in self._bases:
            self._bases[device] = make_new(mode, TensorSpec((self.nbytes,), dtype=torch.uint8, device=device))
        return self._bases[device]


def reduce(fake: FakeTensor) -> Any:
    spec = fake._spec
    storage = _torch.native_storage(fake)
    token = getattr(storage, "_understudy_pickled", None)
    if token is None:
        token = PickledStorage(storage.nbytes() if spec.layout is torch.strided else 0)
        storage._understudy_pickled = token
    state = {name: value for name, value in fake.__dict__.items() if name not in NOT_COPIED}
    value = fake.fake_mode.value_of(fake) if fake._known is not None and fake._known.literal else None
    geometry = (tuple(spec.shape), tuple(spec.stride), spec.offset, spec.dtype, str(spec.device), spec.conj, spec.neg)
    return rebuild, (token, geometry, fake.requires_grad, value, fake.grad if fake.is_leaf else None, state)


def rebuild(token: PickledStorage, geometry: Any, requires_grad: bool, value: Any, grad: Any, state: Any) -> FakeTensor:
    """Unpickled stand-ins belong to the active mode, or to one made for them."""
    mode = mode_for_unpickling()
    shape, stride, offset, dtype, device, conj, neg = geometry
    where = canonical(torch.device(_torch.restored_location(device)))
    spec = TensorSpec(shape, stride, offset, dtype=dtype, device=where, conj=conj, neg=neg)
    fake = make_unlike_view(mode, token.base(mode, where), spec)
    if value is not None and isinstance(value, torch.Tensor) and type(value) is not FakeTensor:
        mode.remember_literal(fake, value)
    fake.requires_grad_(requires_grad)
    if grad is not None:
        fake.grad = grad
    fake.__dict__.update(state)
    return fake


def mode_for_unpickling() -> FakeTensorMode:
    from understudy.fake.mode import FakeTensorMode  # why: the mode imports this module

    active = _torch.active_fake_mode()
    return active if type(active) is FakeTensorMode else FakeTensorMode()
