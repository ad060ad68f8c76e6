"""DTensor on simulated devices. Loaded with the first process group or DTensor, since patching that package imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from understudy import _torch
from understudy.fake.native import WITHOUT_INDEX, native
from understudy.fake.tensor import FakeTensor
from understudy.patching import ANY_MODE, OBSERVATION, patch, patch_call
from understudy.simulation.network import network_of
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


def note_uneven_shards(spec: Any) -> None:
    """The network learns along which groups shards have different sizes, and where: ranks between two of these positions
    are alike."""
    sharded = [(i, part) for i, part in enumerate(spec.placements) if hasattr(part, "dim")]
    if len(sharded) > 1:  # FSDP2 divides what tensor parallelism has left
        sharded.sort(key=lambda entry: hasattr(entry[1], "split_factor"))
    sizes: dict[int, int] = {}
    for mesh_dim, placement in sharded:
        parts = spec.device_mesh.shape[mesh_dim]
        size = sizes.get(placement.dim, spec.tensor_meta.shape[placement.dim])
        sizes[placement.dim] = -(-size // parts)
        if size % parts and (network := network_of(_torch.active_fake_mode())) is not None:
            group = spec.device_mesh.get_group(mesh_dim)
            ranks = tuple(torch.distributed.get_process_group_ranks(group))
            network.breaks.setdefault(ranks, set()).update(find_breaks(size, parts))


def find_breaks(size: int, parts: int) -> set[int]:
    """Positions at which chunks of `size` in so many parts become smaller: the whole ones come first, then the rest, then
    empty ones."""
    each = -(-size // parts)
    return (
        {position for position in (size // each, -(-size // each)) if 0 < position < parts} if each else set()
    )


@patch("torch.distributed.tensor._api.DTensor.__new__", during=ANY_MODE)
def add_dispatch_keys_to_wrappers(original: Callable[..., Any]) -> Any:
    """C++ gives a DTensor the device of the tensor inside it, and not the dispatch key by which autocast and the choice
    of an attention kernel find tensors on devices that are not here."""

    def new(cls: object, local_tensor: torch.Tensor, spec: Any, *, requires_grad: bool) -> Any:
        if type(local_tensor) is not FakeTensor or local_tensor._spec.device.type in WITHOUT_INDEX:
            return original(cls, local_tensor, spec, requires_grad=requires_grad)
        note_uneven_shards(spec)
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
