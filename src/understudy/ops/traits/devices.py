"""On which device a call runs, and which calls accept inputs on several devices."""

from __future__ import annotations

import torch

from understudy.errors import DtypeError, FakeTensorDeviceMismatchError
from understudy.ops.registry import OpFacts, record_of
from understudy.ops.traits.writes import LISTS_OF_TENSORS
from understudy.spec.call import Call

may_mix = OpFacts.may_mix
may_mix.register(
    "copies across devices",
    "copy_", "copy", "_foreach_copy_", "_foreach_copy", "slice_scatter", "select_scatter", "diagonal_scatter",
    "as_strided_scatter",
)  # fmt: skip
may_mix.register("takes over the other tensor's storage", "set_", "set_data")
may_mix.register(
    "reads the other tensor's size only",
    "resize_as_",
    "resize_as_sparse_",
    "expand_as",
    "view_as",
    "reshape_as",
)
may_mix.register("step counters may be elsewhere", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")
may_mix.register("sizes are kept on the CPU", "_nested_view_from_buffer", "tensor_split")
may_mix.register_all(
    {
        "is_same_size": "compares sizes only",
        "_to_copy": "moves to device=",
        "_has_compatible_shallow_copy_type": "compares kinds of tensors",
        "_fused_sgd_": "the scale may be elsewhere",
        "_embedding_bag": "offsets may be elsewhere",
        "_pack_padded_sequence": "lengths are kept on the CPU",
    }
)

reads_by_index = OpFacts.reads_by_index
reads_by_index.mark("index", "_unsafe_index")

writes_by_index = OpFacts.writes_by_index
writes_by_index.mark("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")

accepts_meta = OpFacts.accepts_meta
accepts_meta.register("its result is on the device of the first tensor", "add_.Tensor", "embedding")

takes_no_cpu_scalar = OpFacts.takes_no_cpu_scalar
takes_no_cpu_scalar.register("its kernel accepts none", "nextafter")


def device_of(call: Call) -> torch.device | None:
    """The device of the call's inputs, None without inputs. Raises if the devices do not match."""
    inputs = call.inputs
    if not inputs:
        return None
    device = inputs[0].device
    deciding = -1 if _joins_any(inputs[0].device, inputs[0].shape) else 0
    for position, spec in enumerate(inputs):
        if spec.device is device or spec.device == device:
            if deciding < 0 and spec.shape:
                deciding = position
            continue
        if record_of(call.op).takes_no_cpu_scalar is not None:
            raise _mismatch(call, 0, position)
        if _joins_any(spec.device, spec.shape):
            continue
        if deciding >= 0:
            if _is_index(call, deciding, position):
                continue
            if _may_mix(call):
                return device
            if record_of(call.op).accepts_meta is not None and "meta" in (spec.device.type, device.type):
                continue
            raise _mismatch(call, deciding, position)
        deciding, device = position, spec.device
    if deciding > 0 and device != inputs[0].device and _is_elementwise_in_place(call):
        raise _mismatch(call, 0, deciding)  # a 0-dimensional CPU tensor may be an operand, not the result
    return device


def refuse_without_kernel(call: Call) -> None:
    """Raise for CPU tensors: the operator has no CPU kernel."""
    inputs = call.inputs
    if inputs and all(spec.device.type == "cpu" and spec.layout is torch.strided for spec in inputs):
        raise DtypeError(f"Could not run '{call.op.name()}' with arguments from the 'CPU' backend")


def _joins_any(device: torch.device, shape: tuple[object, ...]) -> bool:
    return device.type == "cpu" and not shape


def _is_elementwise_in_place(call: Call) -> bool:
    name = record_of(call.op).packet
    return record_of(call.op).is_pointwise and name.endswith("_") and not name.endswith("__")


def _is_index(call: Call, deciding: int, position: int) -> bool:
    """Whether this input is an index that eager moves to the device of the tensor, which comes first. Since torch 2.15, C++
    makes the index of a list, as in `x[[0, 1]]`, on the native device of a stand-in, which is meta."""
    if record_of(call.op).reads_by_index:
        return call.inputs[position].device.type in ("cpu", "meta")
    return (
        record_of(call.op).writes_by_index is not None
        and deciding == 0
        and 0 < position < len(call.inputs) - 1
    )


def _may_mix(call: Call) -> bool:
    is_of_lists = record_of(call.op).packet.startswith(LISTS_OF_TENSORS)
    return record_of(call.op).may_mix is not None or is_of_lists or not _is_ours(call)


def _is_ours(call: Call) -> bool:
    """Custom operators may take tensors of several devices: their own rules decide."""
    return call.op.namespace in ("aten", "prims")


def _mismatch(call: Call, first: int, second: int) -> FakeTensorDeviceMismatchError:
    a, b = call.inputs[first], call.inputs[second]
    error = FakeTensorDeviceMismatchError(
        f"Expected all tensors to be on the same device, but found two devices in {call.op}: "
        f"{call.argument_of(first)} is on {a.device}, but {call.argument_of(second)} is on {b.device}"
    )
    error.devices = (a.device, b.device)
    return error
