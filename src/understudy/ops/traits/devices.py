"""Which device a call happens on, and which calls may mix devices."""

from __future__ import annotations

import torch

from understudy.errors import FakeTensorDeviceMismatchError
from understudy.spec.call import Call

MAY_MIX = {
    "copy_": "copies across devices",
    "copy": "copies across devices",
    "_foreach_copy_": "copies across devices",
    "_foreach_copy": "copies across devices",
    "set_": "takes over the other tensor's storage",
    "set_data": "takes over the other tensor's storage",
    "is_same_size": "compares sizes only",
    "_to_copy": "device= says where to",
    "resize_as_": "reads the other tensor's size only",
    "resize_as_sparse_": "reads the other tensor's size only",
    "expand_as": "reads the other tensor's size only",
    "view_as": "reads the other tensor's size only",
    "reshape_as": "reads the other tensor's size only",
    "_has_compatible_shallow_copy_type": "compares kinds of tensors",
    "_fused_adam_": "step counters may be elsewhere",
    "_fused_adamw_": "step counters may be elsewhere",
    "_fused_sgd_": "the scale may be elsewhere",
    "_fused_adagrad_": "step counters may be elsewhere",
    "_nested_view_from_buffer": "sizes are kept on the CPU",
    "_embedding_bag": "offsets may be elsewhere",
    "_pack_padded_sequence": "lengths are kept on the CPU",
    "tensor_split": "sizes are kept on the CPU",
    "slice_scatter": "copies across devices",
    "select_scatter": "copies across devices",
    "diagonal_scatter": "copies across devices",
    "as_strided_scatter": "copies across devices",
}
INDEXING = frozenset({"index", "_unsafe_index"})
INDEXED_WRITES = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
"""The values that are written come last, and must be where the tensor is. Indices that are read by may be on the CPU,
indices that are written by on any device: eager moves them."""
NO_SCALARS = frozenset({"nextafter"})
"""A tensor without dimensions on the CPU goes with every device: not here, its kernel takes none."""


def device_of(call: Call) -> torch.device | None:
    """The device of the call's inputs, None if it has none. Raises if they do not go together."""
    inputs = call.inputs
    if not inputs:
        return None
    device = inputs[0].device
    deciding = -1 if _joins_any(inputs[0].device, inputs[0].shape) else 0
    for position, spec in enumerate(inputs):
        if spec.device == device:
            if deciding < 0 and spec.shape:
                deciding = position
            continue
        if call.op.overloadpacket.__name__ in NO_SCALARS:
            raise _mismatch(call, 0, position)
        if _joins_any(spec.device, spec.shape):
            continue
        if deciding >= 0:
            if _is_index(call, deciding, position):
                continue
            if _may_mix(call):
                return device
            raise _mismatch(call, deciding, position)
        deciding, device = position, spec.device
    if deciding > 0 and device != inputs[0].device and _is_elementwise_in_place(call):
        raise _mismatch(call, 0, deciding)  # it may join as an operand, not as the place of the result
    return device


def _joins_any(device: torch.device, shape: tuple[object, ...]) -> bool:
    return device.type == "cpu" and not shape


def _is_elementwise_in_place(call: Call) -> bool:
    name = call.op.overloadpacket.__name__
    return torch.Tag.pointwise in call.op.tags and name.endswith("_") and not name.endswith("__")


def _is_index(call: Call, deciding: int, position: int) -> bool:
    """Whether this input is an index that eager moves to the device of the tensor, which comes first."""
    name = call.op.overloadpacket.__name__
    if name in INDEXING:
        return call.inputs[position].device.type == "cpu"
    return name in INDEXED_WRITES and deciding == 0 and 0 < position < len(call.inputs) - 1


def _may_mix(call: Call) -> bool:
    name = call.op.overloadpacket.__name__
    return name in MAY_MIX or name.startswith("_foreach_") or not _is_ours(call)


def _is_ours(call: Call) -> bool:
    """Custom operators may take tensors of several devices: their own rules decide."""
    return call.op.namespace in ("aten", "prims")


def _mismatch(call: Call, first: int, second: int) -> FakeTensorDeviceMismatchError:
    a, b = call.inputs[first], call.inputs[second]
    error = FakeTensorDeviceMismatchError(
        f"Expected all tensors to be on the same device, but found two devices in {call.op}: "
        f"{call.argument_of(first)} is on {a.device}, but {call.argument_of(second)} is on {b.device}"
    )
    error.devices = (a.device, b.device)  # type: ignore[attr-defined]
    return error
