"""DTensor on simulated devices. Loaded with the first process group or DTensor, since patching that package imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.native import WITHOUT_INDEX, native
from understudy.fake.tensor import FakeTensor
from understudy.patching import ANY_MODE, OBSERVATION, patch, patch_call
from understudy.simulation.storages import ObservedMode


@patch_call(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    during=OBSERVATION,
)
def propagate_sharding_unobserved(original: Callable[..., object], *args: object, **kwargs: object) -> Any:
    """DTensor runs each new operator once more, on tensors of the global sizes, to know the metadata of its result."""
    mode = _torch.active_fake_mode()
    if not isinstance(mode, ObservedMode):
        return original(*args, **kwargs)
    with mode.pause():
        return original(*args, **kwargs)


@patch("torch.distributed.tensor._api.DTensor.__new__", during=ANY_MODE)
def add_dispatch_keys_to_wrappers(original: Callable[..., Any]) -> Any:
    """C++ gives a DTensor the device of the tensor inside it, and not the dispatch key by which autocast and the choice
    of an attention kernel find tensors on devices that are not here."""

    def new(cls: object, local_tensor: torch.Tensor, spec: Any, *, requires_grad: bool) -> Any:
        if type(local_tensor) is not FakeTensor or local_tensor._spec.device.type in WITHOUT_INDEX:
            return original(cls, local_tensor, spec, requires_grad=requires_grad)
        meta, device = spec.tensor_meta, native(local_tensor._spec.device)
        options = (
            None,
            local_tensor._spec.dtype,
            torch.strided,
            device,
            False,
            requires_grad,
            None,
            False,
            False,
        )
        wrapper = _torch.make_wrapper(cls, meta.shape, meta.stride, 0, *options, _torch.STAND_IN_KEYS)
        wrapper._spec, wrapper._local_tensor = spec, local_tensor
        return wrapper

    return staticmethod(new)
