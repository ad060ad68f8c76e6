"""The kernels that a call runs on a card: family, sizes, FLOPs, bytes.

    describe_kernels(call, results)      [Kernel(family="matmul", sizes=(1, 8192, 4096, 1024), …)]

A family is a group of kernels whose speed follows one curve (`understudy.timing` has the curves). A view runs no kernel; a
convolution's backward runs two products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from understudy._torch import argument_names
from understudy.ops.registry import OpFacts, record_of
from understudy.ops.traits.flops import MOVES, VIEWS, bytes_stored, work_of
from understudy.spec import TensorSpec
from understudy.spec.call import Call

MATMUL, CONVOLUTION, GROUPED, DEPTHWISE = "matmul", "convolution", "grouped_convolution", "depthwise"
ATTENTION, ATTENTION_BACKWARD = "attention", "attention_backward"
ELEMENTWISE, REDUCTION, NORM, BATCH_NORM, SOFTMAX = (
    "elementwise",
    "reduction",
    "norm",
    "batch_norm",
    "softmax",
)
POOL, INDEX, COPY, TRANSPOSE, FILL = "pool", "index", "copy", "transpose", "fill"
OPTIMIZER, TO_CARD, TO_HOST, READ, WAIT = "optimizer", "to_card", "to_host", "read", "wait"
PRODUCTS = (MATMUL, CONVOLUTION, GROUPED, DEPTHWISE, ATTENTION, ATTENTION_BACKWARD)
MASKS = (torch.bool, torch.uint8)
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "input gradient", "weight gradient"


class Kernel(NamedTuple):
    """One kernel. `sizes` of a product: batch, rows, columns, length of the contraction; of attention: heads times batch,
    queries, keys, width."""

    family: str
    flops: float = 0
    bytes: float = 0
    dtype: torch.dtype = torch.float32
    sizes: tuple[Any, ...] = ()
    is_channels_last: bool = False
    part: str = FORWARD
    """Which part of a convolution."""
    is_blocking: bool = False
    """Whether the host waits for it."""


Results = Sequence[TensorSpec]

family, products, passes = OpFacts.kernel_family, OpFacts.kernel_products, OpFacts.kernel_passes


def describe_kernels(call: Call, results: Iterable[TensorSpec]) -> list[Kernel]:
    """In the order in which they run. None for a view, or where nothing is computed or moved. Collectives are not kernels of
    a stream: they are reported as events."""
    made = tuple(results)
    record = record_of(call.op)
    if record.kernel_family == WAIT:
        return [Kernel(WAIT)]
    if record.collective is not None:
        return []
    if record.kernel_products is not None:
        return record.kernel_products(call, made)
    specs = (*made, *call.inputs)
    if record.is_data_dependent or (record.has_dynamic_shape and _depends_on_values(call)):
        return [Kernel(READ, 0, _size(*call.inputs), _dtype_of(specs), is_blocking=True)]
    work = work_of(call, made)
    if work.kind == VIEWS or (not work.bytes_moved and not work.flops):
        return []
    if work.flops:
        return [Kernel(MATMUL, work.flops, work.bytes_moved, _dtype_of(call.inputs or made))]
    devices = {spec.device.type for spec in specs}
    if len(devices) > 1 and work.kind == MOVES:
        return [_describe_transfer(call, made)]
    name = record.kernel_family
    if name is None:
        if record.packet.startswith(("_foreach_", "_fused_", "_amp_foreach")):
            name = OPTIMIZER
        elif torch.Tag.reduction in call.op.tags:
            name = REDUCTION
        else:
            name = ELEMENTWISE
    if name == COPY and _changes_order(call, made):
        name = TRANSPOSE
    moved = work.bytes_moved * (record.kernel_passes or 1.0)
    if name == BATCH_NORM and _is_inference(call):
        moved = work.bytes_moved
    return [Kernel(name, 0, moved, _dtype_of(specs), is_channels_last=_is_channels_last(call.inputs))]


def _dtype_of(specs: Sequence[TensorSpec]) -> torch.dtype:
    return specs[0].dtype if specs else torch.float32


def _size(*specs: TensorSpec) -> int:
    return sum(map(bytes_stored, specs))


def _is_channels_last(specs: Sequence[TensorSpec]) -> bool:
    """Whether the channels of images lie next to each other."""
    for spec in filter(_has_strides, specs):
        if spec.ndim in (4, 5) and spec.shape[1] > 1 and prod(spec.shape[2:]) > 1:
            return bool(spec.stride[1] == 1)
    return False


def _depends_on_values(call: Call) -> bool:
    """Whether the sizes of the results are read from the card. Indexing does so only with masks."""
    return record_of(call.op).kernel_family != INDEX or any(spec.dtype in MASKS for spec in call.inputs[1:])


def _changes_order(call: Call, made: Results) -> bool:
    """Whether the order of elements changes: such a copy reads or writes with gaps."""
    large = [spec for spec in (*made, *call.inputs) if spec.numel > 1 and _has_strides(spec)]
    return len({_order_of_dims(spec) for spec in large if spec.ndim == large[0].ndim}) > 1


def _has_strides(spec: TensorSpec) -> bool:
    """Sparse tensors have none."""
    return spec.layout is torch.strided


def _order_of_dims(spec: TensorSpec) -> tuple[int, ...]:
    """From the slowest to the fastest. A dimension of size 1 has no place; an expanded one is last."""
    dims = [dim for dim in range(spec.ndim) if spec.shape[dim] > 1]
    return tuple(sorted(dims, key=lambda dim: (-spec.stride[dim], dim)))


def _is_inference(call: Call) -> bool:
    flags = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, bool)]
    return not (flags and flags[0])


def _describe_transfer(call: Call, made: Results) -> Kernel:
    """Between the host and a card, or between cards."""
    target = made[0].device.type if made else call.inputs[0].device.type
    is_to_host = target == "cpu"
    is_waiting = not bool(call.kwargs.get("non_blocking") or any(value is True for value in call.args[2:]))
    moved = min((_size(spec) for spec in (*made, *call.inputs) if spec.numel), default=0)
    return Kernel(TO_HOST if is_to_host else TO_CARD, 0, moved, _dtype_of(made), is_blocking=is_waiting)


def families_of(name: str) -> tuple[str, ...]:
    """The families that calls of an operator ("aten::mm") may belong to. Empty if the family does not follow from the
    name."""
    if name in family:
        return (family.by_name(name),)
    if name not in products:
        return ()
    if "convolution" in name:
        return CONVOLUTION, GROUPED, DEPTHWISE
    if "attention" in name:
        return (ATTENTION_BACKWARD,) if name.endswith("backward") else (ATTENTION,)
    return (MATMUL,)


# --- products of matrices


def _argument(call: Call, name: str, default: Any = None) -> Any:
    if name in call.kwargs:
        return call.kwargs[name]
    names = argument_names(call.op)
    position = names.index(name) if name in names else len(call.args)
    return call.args[position] if position < len(call.args) else default


def _describe_product(a: TensorSpec, b: TensorSpec, made: TensorSpec) -> list[Kernel]:
    k = a.shape[-1]
    batch = prod(made.shape[:-2])
    rows, columns = (made.shape[-2], made.shape[-1]) if made.ndim > 1 else (made.numel, 1)
    return [Kernel(MATMUL, 2 * made.numel * k, _size(a, b, made), a.dtype, (batch, rows, columns, k))]


@products("mm", "bmm", "_scaled_mm", "_int_mm")
def describe_product(call: Call, made: Results) -> list[Kernel]:
    return _describe_product(call.args[0], call.args[1], made[0])


@products("addmm", "baddbmm", "_addmm_activation")
def describe_product_with_bias(call: Call, made: Results) -> list[Kernel]:
    return _describe_product(call.args[1], call.args[2], made[0])


@products("linear")
def describe_linear(call: Call, made: Results) -> list[Kernel]:
    x, weight = call.args[:2]
    width = x.shape[-1]
    rows = x.numel // max(1, width)
    sizes = (1, rows, weight.shape[0], width)
    return [Kernel(MATMUL, 2 * prod(sizes), _size(x, weight, *made), x.dtype, sizes)]


# --- convolutions


def _name_convolution(x: TensorSpec, groups: int) -> str:
    return CONVOLUTION if groups == 1 else DEPTHWISE if groups == x.shape[1] else GROUPED


def _convolution_sizes(groups: int, rows: int, columns: int, flops: int) -> tuple[Any, ...]:
    """As a product of matrices for each group."""
    return groups, rows, columns, max(1, flops // max(1, 2 * rows * columns * groups))


@products("convolution", "_convolution")
def describe_convolution(call: Call, made: Results) -> list[Kernel]:
    x, weight, bias = call.args[:3]
    transposed, groups = _argument(call, "transposed", False), _argument(call, "groups", 1)
    out = made[0]
    flops = 2 * (x if transposed else out).numel * prod(weight.shape[1:])
    sizes = _convolution_sizes(groups, out.numel // max(1, out.shape[1]), out.shape[1] // groups, flops)
    is_last = _is_channels_last((x, out))
    found = [Kernel(_name_convolution(x, groups), flops, _size(x, weight, out), x.dtype, sizes, is_last)]
    if isinstance(bias, TensorSpec):
        found.append(Kernel(ELEMENTWISE, 0, 2 * _size(out), x.dtype, is_channels_last=is_last))
    return found


@products("convolution_backward")
def describe_convolution_backward(call: Call, made: Results) -> list[Kernel]:
    grad, x, weight = call.args[:3]
    transposed, groups = _argument(call, "transposed"), _argument(call, "groups")
    for_input, for_weight, for_bias = _argument(call, "output_mask")
    name = _name_convolution(x, groups)
    flops = 2 * (x if transposed else grad).numel * prod(weight.shape[1:])
    moved, is_last = _size(grad, x, weight), _is_channels_last((x, grad))
    found = []
    if for_input:
        sizes = _convolution_sizes(groups, x.numel // max(1, x.shape[1]), x.shape[1] // groups, flops)
        found.append(Kernel(name, flops, moved, x.dtype, sizes, is_last, INPUT_GRADIENT))
    if for_weight:
        sizes = _convolution_sizes(groups, weight.shape[0] // groups, prod(weight.shape[1:]), flops)
        found.append(Kernel(name, flops, moved, x.dtype, sizes, is_last, WEIGHT_GRADIENT))
    if for_bias:
        found.append(Kernel(REDUCTION, 0, _size(grad), x.dtype, is_channels_last=is_last))
    return found


# --- attention


def _describe_attention(
    name: str, call: Call, made: Results, qkv: Sequence[TensorSpec], count: int
) -> list[Kernel]:
    """(…, heads, length, width). `count`: products of scores with a width. With a causal mask, fused kernels leave out half
    of them."""
    query, key, value = qkv
    heads, queries, keys, width = prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]
    flops = 2 * heads * queries * keys * width * count
    if _argument(call, "is_causal", False):
        flops *= 0.5
    moved = _size(query, key, value, *made)
    return [Kernel(name, flops, moved, query.dtype, (heads, queries, keys, width))]


@products(
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "understudy::flex_attention",
)  # fmt: skip
def describe_attention(call: Call, made: Results) -> list[Kernel]:
    return _describe_attention(ATTENTION, call, made[:1], call.args[:3], 2)


@products(
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_fused_attention_overrideable_backward",
    "understudy::flex_attention_backward",
)  # fmt: skip
def describe_attention_backward(call: Call, made: Results) -> list[Kernel]:
    return _describe_attention(ATTENTION_BACKWARD, call, made, call.args[1:4], 5)


@products("_flash_attention_forward", "_efficient_attention_forward")
def describe_attention_by_rows(call: Call, made: Results) -> list[Kernel]:
    return _describe_attention_by_rows(ATTENTION, call, made, call.args[:2])


@products("_flash_attention_backward", "_efficient_attention_backward")
def describe_attention_by_rows_backward(call: Call, made: Results) -> list[Kernel]:
    return _describe_attention_by_rows(ATTENTION_BACKWARD, call, made, call.args[1:3])


def _describe_attention_by_rows(
    name: str, call: Call, made: Results, query_and_key: Sequence[TensorSpec]
) -> list[Kernel]:
    """(batch, length, heads, width), or (total length, heads, width) with offsets of the sequences."""
    query, key = query_and_key
    offsets = _argument(call, "cum_seq_q") or _argument(call, "cu_seqlens_q")
    sequences = query.shape[0] if offsets is None else offsets.numel - 1
    rows = query.shape[1] if offsets is None else _argument(call, "max_q") or _argument(call, "max_seqlen_q")
    columns = key.shape[1] if offsets is None else _argument(call, "max_k") or _argument(call, "max_seqlen_k")
    work = work_of(call, made)
    is_causal = _argument(call, "is_causal", False) or bool(_argument(call, "custom_mask_type", 0))
    flops = work.flops * (0.5 if is_causal else 1)
    sizes = (sequences * query.shape[-2], rows, columns, query.shape[-1])
    return [Kernel(name, flops, work.bytes_moved, query.dtype, sizes)]


# --- families of operators without products

_FAMILIES = {
    NORM: """native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm
        _fused_rms_norm_backward rms_norm layer_norm""",
    BATCH_NORM: """native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
        _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update
        batch_norm_backward batch_norm_elemt""",
    SOFTMAX: """_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax masked_softmax
        nll_loss_forward nll_loss_backward logsumexp""",
    REDUCTION: """sum mean max min amax amin var var_mean std std_mean argmax argmin linalg_vector_norm norm prod cumsum
        cumprod""",
    POOL: """max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward max_pool3d_with_indices max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward
        upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d
        upsample_bicubic2d_backward im2col col2im grid_sampler_2d grid_sampler_2d_backward""",
    INDEX: """embedding embedding_dense_backward index index_select gather scatter scatter_add index_put _index_put_impl
        index_add index_copy masked_fill masked_scatter take topk sort roll flip _unsafe_index _unsafe_index_put""",
    COPY: """clone _to_copy copy contiguous cat stack constant_pad_nd slice_backward select_backward slice_scatter
        select_scatter repeat pixel_shuffle pixel_unshuffle reflection_pad2d""",
    FILL: "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill zero arange",
}  # fmt: skip
for _family, _names in _FAMILIES.items():
    family.register(_family, *_names.split())
family.register(WAIT, "_c10d_functional::wait_tensor")
passes.register(
    1.5, "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"
)
passes.register(5 / 3, "native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
