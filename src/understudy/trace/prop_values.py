"""What is written into a node: `val`, and `tensor_meta` on request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.node import map_aggregate

from understudy import _torch
from understudy.fake.helpers import is_fake
from understudy.fake.mode import FakeTensorMode
from understudy.fake.realise import make_view
from understudy.fake.tensor import FakeTensor
from understudy.infer.call import flat
from understudy.shapes.node import SymNode
from understudy.shapes.sizes import surely_equal
from understudy.spec import TensorSpec

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
NUMBERS = (*SYMBOLIC, int, float)


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is now, on the same storage, without gradient."""
    if type(tensor) is FakeTensor:
        return make_view(tensor.fake_mode, tensor, tensor._spec, is_asked=False)
    return tensor.detach()


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def val_of(value: Any, of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same structure with tensors and numbers in it, None for all else; None if it has neither."""
    if type(value) is FakeTensor:
        return of_tensor(value)
    is_empty = True

    def leaf(part: Any) -> Any:
        nonlocal is_empty
        if isinstance(part, torch.Tensor):
            is_empty = False
            return of_tensor(part)
        if isinstance(part, NUMBERS):
            is_empty = False
            return part
        return None

    val = map_aggregate(value, leaf)
    return None if is_empty else val


def in_stand_ins(mode: FakeTensorMode, value: Any) -> Any:
    """The value with each real tensor in it converted, with static shapes."""

    def convert(part: Any) -> Any:
        if not isinstance(part, torch.Tensor) or is_fake(part):
            return part
        return mode.from_tensor(part, static_shapes=True)

    if type(value) is FakeTensor or type(value) in NUMBERS:
        return value
    if isinstance(value, torch.Tensor):
        return convert(value)
    leaves, _ = _torch.tree_flatten(value)
    if all(convert(leaf) is leaf for leaf in leaves):
        return value
    return _torch.tree_map(convert, value)


def spec_of_val(val: Any) -> Any:
    """The same structure with specs in the place of tensors."""

    def leaf(part: Any) -> Any:
        return part._spec if type(part) is FakeTensor else part

    return map_aggregate(val, leaf)


def is_complete(mode: FakeTensorMode, val: Any) -> bool:
    """Whether a `val` is the whole value: stand-ins of this mode and numbers, and no place of something else."""
    if isinstance(val, (list, tuple)):
        return all(is_complete(mode, part) for part in val)
    if isinstance(val, dict):
        return all(is_complete(mode, part) for part in val.values())
    return mode.is_our_fake(val) or isinstance(val, NUMBERS)


def needs_attention(mode: FakeTensorMode, value: Any) -> tuple[bool, bool]:
    """Whether autograd, and whether something else in C++, has a say in calls with this value."""
    if type(value) is FakeTensor:
        spec = value._spec
        return value.requires_grad, spec.conj or spec.neg or value.fake_mode is not mode
    if isinstance(value, (list, tuple)):
        parts = [needs_attention(mode, part) for part in value]
        return any(grad for grad, _ in parts), any(odd for _, odd in parts)
    is_strange = isinstance(value, (torch.Tensor, dict))
    return is_strange, is_strange


# --- comparing two runs ---------------------------------------------------------------------------------------------


def is_alike(old: Any, new: Any) -> bool:
    """Whether nothing that is computed from one differs when computed from the other."""
    if type(old) is not type(new):
        return False
    if type(old) is FakeTensor:
        # Values that are followed may decide what comes out downstream, so they count as different.
        return (
            old._spec is new._spec
            and old._known is None
            and new._known is None
            and old.requires_grad == new.requires_grad
        )
    if isinstance(old, (list, tuple)):
        return len(old) == len(new) and all(map(is_alike, old, new))
    if isinstance(old, dict):
        return old.keys() == new.keys() and all(is_alike(old[key], new[key]) for key in old)
    if isinstance(old, SYMBOLIC):
        return type(old.node) is SymNode and old.node is new.node
    if isinstance(
        old, (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    ):
        return old == new
    return old is new


def storages_of(value: Any) -> list[int]:
    """The storages of the tensors in a value, in order."""
    if type(value) is FakeTensor:
        return [_torch.storage_id(value)]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    nested = [list(part.values()) if isinstance(part, dict) else part for part in values]
    return [_torch.storage_id(fake) for fake in flat(FakeTensor, nested, {})]


# --- tensor_meta ----------------------------------------------------------------------------------------------------

ORDERS = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}
"""The dimensions from the innermost on, where channels come last."""

FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def tensor_meta_of(value: Any) -> Any:
    """What `torch.fx`'s shape propagation writes: a `TensorMetadata` for each tensor; None if there is none."""
    from torch.fx.passes.shape_prop import TensorMetadata  # why: only on request

    if type(value) is FakeTensor and value._spec.is_symbolic and value._spec.layout is torch.strided:
        spec, strides = value._spec, value.stride()
        return TensorMetadata(
            value.shape, spec.dtype, value.requires_grad, strides, _surely_format(spec), is_quantized=False, qparams={}
        )
    is_empty = True

    def leaf(part: Any) -> Any:
        nonlocal is_empty
        if not isinstance(part, torch.Tensor):
            return part
        is_empty = False
        strided = part.layout is torch.strided
        return TensorMetadata(
            shape=part.shape,
            dtype=part.dtype,
            requires_grad=part.requires_grad,
            stride=part.stride() if strided else (),
            memory_format=_memory_format(part) if strided else None,
            is_quantized=False,
            qparams={},
        )

    meta = map_aggregate(value, leaf)
    return None if is_empty else meta


@functools.lru_cache(maxsize=4096)
def tensor_meta_of_numbers(spec: TensorSpec, requires_grad: bool) -> Any:
    """The `TensorMetadata` of a tensor in strided layout whose sizes are numbers."""
    from torch.fx.passes.shape_prop import TensorMetadata  # why: only on request

    memory_format = torch.contiguous_format if spec.numel == 0 else _surely_format(spec)
    return TensorMetadata(
        torch.Size(spec.shape), spec.dtype, requires_grad, spec.stride, memory_format, is_quantized=False, qparams={}
    )


def _memory_format(tensor: torch.Tensor) -> torch.memory_format | None:
    if type(tensor) is FakeTensor and tensor._spec.is_symbolic:
        return _surely_format(tensor._spec)
    for memory_format, dims in zip(FORMATS, (None, 4, 5), strict=True):
        if (dims is None or tensor.ndim == dims) and tensor.is_contiguous(memory_format=memory_format):
            return memory_format
    return None


def _surely_format(spec: TensorSpec) -> torch.memory_format | None:
    """Of symbolic sizes: as far as it is known. Nothing is to become a guard because it was written down."""
    if _surely_packed(spec, range(spec.ndim - 1, -1, -1)):
        return torch.contiguous_format
    if spec.ndim in ORDERS and _surely_packed(spec, ORDERS[spec.ndim]):
        return FORMATS[spec.ndim - 3]
    return None


def _surely_packed(spec: TensorSpec, order: Sequence[int]) -> bool:
    expected: Any = 1
    for dim in order:
        if surely_equal(spec.shape[dim], 1):
            continue
        if not surely_equal(spec.stride[dim], expected):
            return False
        expected = expected * spec.shape[dim]
    return True
