"""Temporary memory of CUDA kernels, from specs and the device.

    scratch = scratch_of(call, results, facts)
    scratch.sizes      bytes of each block, in order; a negative number frees the latest block of that size early
    scratch.bound      what a library may allocate in addition: 0, unless it decides at run time (cuDNN)
    scratch.is_exact   whether the sizes are those of the kernel, or an estimate
    scratch.first      how many of the sizes come before the results, of operators that `makes_results_late` names

Also here: which operators have a workspace of cuBLAS (`uses_blas`); large scratch memory of CPU kernels (`host_scratch`).

A formula is called with the device's facts, the specs of the results, then the arguments of the call. Those of attention and
of sorts are in `cuda_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple, TypeVar

import torch

from understudy._torch import OpOverload
from understudy.ops.registry import OpFacts, record_of
from understudy.spec import TensorSpec, preserved_copy
from understudy.spec.call import Call, flat
from understudy.spec.device_facts import DeviceFacts
from understudy.spec.strides import sort_where_decided


class Scratch(NamedTuple):
    sizes: tuple[int, ...] = ()
    bound: int = 0
    is_exact: bool = True
    first: int = 0


NO_SCRATCH = Scratch()
HALF = (torch.float16, torch.bfloat16)
Results = Sequence[TensorSpec]
Result = TypeVar("Result")
Formula = Callable[..., Scratch]
Maybe = TensorSpec | None

scratch = OpFacts.scratch

host_scratch = OpFacts.host_scratch


def scratch_of(call: Call, results: Iterable[TensorSpec], facts: DeviceFacts) -> Scratch:
    if any(spec.sparse is not None for spec in call.inputs):
        return Scratch(is_exact=False)  # other kernels, of cuSPARSE
    formula = record_of(call.op).scratch
    if formula is not None:
        return formula(facts, tuple(results), *call.args, **call.kwargs)
    if torch.Tag.reduction in call.op.tags and call.inputs:
        return _reduce(call, tuple(results), facts)
    return NO_SCRATCH


def may_need_scratch(op: OpOverload) -> bool:
    return record_of(op).scratch is not None or torch.Tag.reduction in op.tags


def align(size: int, step: int) -> int:
    return -(-size // step) * step


def divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def byte_count(spec: TensorSpec) -> int:
    return int(spec.numel) * spec.itemsize


def copy_if(condition: bool, spec: TensorSpec) -> tuple[int, ...]:
    return (byte_count(spec),) if condition else ()


def for_a_while(*sizes: int) -> tuple[int, ...]:
    """Blocks that are freed before the next ones are allocated."""
    return (*sizes, *(-size for size in reversed(sizes)))


# --- reductions (`sum`, `mean`, `max`, norms), as in Reduce.cuh
#
# How they spread over threads and blocks follows from the input's layout and the device. Where several blocks compute one
# result, a staging buffer has their partial results, and a semaphore for each result counts the blocks that are done.

WARP = 32
MOST_THREADS = 512
LEAST_VALUES, MOST_VALUES = 16, 256
"""For each thread."""


class ReducedDim(NamedTuple):
    """A dimension of the iteration: its size, the strides of the input and of the result. The latter is 0 if reduced."""

    size: int
    stride: int
    result_stride: int


def reduction_sizes(x: TensorSpec, kept: Sequence[int], element: int, facts: DeviceFacts) -> tuple[int, ...]:
    """Bytes of the staging buffer and of the semaphores; nothing where one block is enough for a result.

    `kept` are the dimensions that stay, `element` is the size of a partial result. How many neighbours a thread reads at
    once does not matter: rows for which it changes the block are too short for several blocks."""
    dims = coalesce(sort_dims(_dims_of(x, kept)))
    inner = [dim for dim in dims if not dim.result_stride]
    outer = [dim for dim in dims if dim.result_stride]
    inputs, outputs = (prod(dim.size for dim in part) for part in (inner, outer))
    if inputs <= 1 or not outputs:
        return ()
    is_along_fastest = not outer or inner[0].stride < outer[0].stride
    width, height = (inputs, outputs) if is_along_fastest else (outputs, inputs)
    results_at_once = 1
    if not is_along_fastest and outer[0].stride == 1:
        results_at_once = _count_results_at_once(x, inner, outer)
        width //= results_at_once
    most = (256 if x.dtype is torch.complex128 else MOST_THREADS) // results_at_once
    block_width, block_height = _block(width, height, most)
    step_input, step_output = (block_width, 1) if is_along_fastest else (1, block_width)
    if divide_up(inputs, step_input) < min(block_height * LEAST_VALUES, MOST_VALUES):
        return ()  # each row of threads has a result of its own
    values = divide_up(inputs, step_input * block_height)
    grid = divide_up(outputs // results_at_once, step_output)
    target = facts.multiprocessors * (facts.threads_per_multiprocessor // (block_width * block_height))
    if values < MOST_VALUES or grid > target:
        return ()
    blocks = max(
        min(divide_up(target, grid), divide_up(values, LEAST_VALUES)), divide_up(values, MOST_VALUES)
    )
    if blocks <= 1:
        return ()
    buffer = element * outputs * blocks * (1 if is_along_fastest else block_width * results_at_once)
    return buffer, 4 * grid


def _last_power_of_two(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Threads along the fastest dimension, and across it."""
    across, down = (min(_last_power_of_two(size), most) for size in (width, height))
    block_height = min(down, most // min(across, WARP))
    return min(across, most // block_height), block_height


def _dims_of(x: TensorSpec, kept: Sequence[int]) -> list[ReducedDim]:
    """From the last dimension to the first, with a contiguous result."""
    shape, stride, _ = x.numbers
    dims: list[ReducedDim] = []
    step = 1
    for dim in reversed(range(x.ndim)):
        dims.append(ReducedDim(shape[dim], stride[dim], step if dim in kept else 0))
        step *= shape[dim] if dim in kept else 1
    return dims


def sort_dims(dims: Sequence[ReducedDim]) -> list[ReducedDim]:
    """Reduced dimensions first; then by the strides of the result, and of the input where these leave it open."""
    return sort_where_decided(dims, _compare)


def _compare(one: ReducedDim, other: ReducedDim) -> int:
    """Positive if the second goes before the first."""
    if (one.result_stride == 0) != (other.result_stride == 0):
        return 1 if other.result_stride == 0 else -1
    for first, second in ((one.result_stride, other.result_stride), (one.stride, other.stride)):
        if first == 0 or second == 0:
            continue
        if first != second:
            return 1 if first > second else -1
        if one.size > other.size:
            return 1
    return 0


def coalesce(dims: Sequence[ReducedDim]) -> list[ReducedDim]:
    """Neighbours that are one in memory, of the input and of the result, are one."""
    joined: list[ReducedDim] = []
    for dim in dims:
        if not joined:
            joined.append(dim)
            continue
        last = joined[-1]
        follows = (
            last.size * last.stride == dim.stride and last.size * last.result_stride == dim.result_stride
        )
        if last.size == 1:
            joined[-1] = dim
        elif dim.size == 1:
            continue
        elif follows:
            joined[-1] = ReducedDim(last.size * dim.size, last.stride, last.result_stride)
        else:
            joined.append(dim)
    return joined


def _count_results_at_once(x: TensorSpec, inner: Sequence[ReducedDim], outer: Sequence[ReducedDim]) -> int:
    """How many neighbouring results a thread computes: a power of two up to 4 that divides sizes and strides."""
    count = 4
    for number in (x.offset, outer[0].size, *(dim.stride for dim in (*inner, *outer[1:]))):
        while number % count:
            count //= 2
    return count


NORMS = ("linalg_vector_norm", "norm")

accumulator = OpFacts.accumulator


@accumulator("max", "min", "argmax", "argmin")
def value_and_index(x: TensorSpec) -> int:
    return 16


@accumulator("var", "std", "var_mean", "std_mean")
def moments(x: TensorSpec) -> int:
    """Mean, sum of squares and two counts."""
    return 32 if x.itemsize == 8 else 16


@accumulator("all", "any", "amax", "amin")
def one_element(x: TensorSpec) -> int:
    return x.itemsize


@accumulator("aminmax")
def two_elements(x: TensorSpec) -> int:
    return 2 * x.itemsize


def _reduce(call: Call, results: Results, facts: DeviceFacts) -> Scratch:
    x = call.inputs[0]
    if not results or not results[0].numel or not x.numel or x.numel == results[0].numel:
        return NO_SCRATCH
    kept = _dims_that_stay(x, results[0], call)
    if kept is None:
        return NO_SCRATCH
    packet = record_of(call.op).packet
    if packet in ("max", "min") and len(results) == 1:  # of all elements, without an index
        return Scratch(reduction_sizes(x, kept, x.itemsize, facts))
    find_size = record_of(call.op).accumulator
    if find_size is not None:
        return Scratch(reduction_sizes(x, kept, find_size(x), facts))
    summed = _as_summed(x, results[0].dtype)
    element = summed.itemsize // 2 if packet in NORMS and summed.is_complex else max(4, summed.itemsize)
    return Scratch(copy_if(summed is not x, summed) + reduction_sizes(summed, kept, element, facts))


def _as_summed(x: TensorSpec, result: torch.dtype) -> TensorSpec:
    """Sums are computed in the dtype of the result, from a copy if necessary; half types are widened by the kernel."""
    is_widened = x.dtype in HALF and result is torch.float32
    if is_widened or x.dtype is result or x.is_complex:
        return x
    return x.like(stride=preserved_copy(x).stride, dtype=result)


def _dims_that_stay(x: TensorSpec, result: TensorSpec, call: Call) -> tuple[int, ...] | None:
    """The dimensions that are left, by the `dim` argument; None if it can't be seen."""
    dims = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    if result.numel == 1 and not isinstance(dims, (int, list, tuple)):
        return ()
    if record_of(call.op).packet == "linalg_vector_norm":
        dims = call.kwargs.get("dim", call.args[2] if len(call.args) > 2 else None)
    if dims is None or isinstance(dims, (bool, float)):
        return () if result.numel == 1 else None
    reduced = {dim % max(1, x.ndim) for dim in ([dims] if isinstance(dims, int) else dims)}
    return tuple(dim for dim in range(x.ndim) if reduced and dim not in reduced)


# --- products: operands in an order that cuBLAS does not support are copied


def is_awkward(spec: TensorSpec) -> bool:
    """Whether a product copies this operand first, such as an expanded one."""
    rows, columns = spec.shape[-2:]
    step, inner = spec.stride[-2:]
    if spec.ndim == 3 and spec.is_contiguous and step and inner:
        return False
    return not ((inner == 1 and step >= max(1, columns)) or (step == 1 and inner >= max(1, rows)))


@scratch("mm", "bmm")
def of_product(
    facts: DeviceFacts, made: Results, a: TensorSpec, b: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    return Scratch(
        tuple(size for spec in (a, b) for size in copy_if(spec.numel > 0 and is_awkward(spec), spec))
    )


@scratch("addmm", "baddbmm", "_addmm_activation", "addmm_", "baddbmm_")
def of_product_with_bias(
    facts: DeviceFacts,
    made: Results,
    bias: TensorSpec,
    a: TensorSpec,
    b: TensorSpec,
    *rest: object,
    **settings: object,
) -> Scratch:
    return of_product(facts, made, a, b)


# --- convolutions and recurrent layers: cuDNN's plans


@scratch("convolution", "cudnn_convolution", "convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward",
         "cudnn_convolution_transpose", "cudnn_convolution_relu")  # fmt: skip
def of_cudnn(facts: DeviceFacts, made: Results, *args: object, **settings: object) -> Scratch:
    """Unknown from shapes. The bound is that of plans that copy all operands into another order."""
    operands = [*made, *flat(TensorSpec, args, settings)]
    return Scratch((), bound=sum(map(byte_count, operands)), is_exact=False)


# --- normalisation

MANY_ROWS, MOST_BLOCKS = 64 * 1024, 32 * 1024


@scratch("native_layer_norm", "_fused_rms_norm")
def of_norm(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    return Scratch(copy_if(not x.is_contiguous, x), first=1)


@scratch("native_layer_norm_backward")
def of_layer_norm_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[int], mean: TensorSpec,
    rstd: TensorSpec, weight: Maybe, bias: Maybe, wanted: Sequence[bool] = (True, True, True), **settings: object,
) -> Scratch:  # fmt: skip
    parameters = [
        spec
        for spec, is_wanted in zip((weight, bias), wanted[1:], strict=True)
        if spec is not None and is_wanted
    ]
    return _norm_backward(facts, grad, x, normalized_shape, parameters)


@scratch("_fused_rms_norm_backward")
def of_rms_norm_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[int], rstd: TensorSpec,
    weight: Maybe, wanted: Sequence[bool] = (True, True), **settings: object,
) -> Scratch:  # fmt: skip
    return _norm_backward(
        facts, grad, x, normalized_shape, [weight] if weight is not None and wanted[1] else []
    )


def _norm_backward(
    facts: DeviceFacts,
    grad: TensorSpec,
    x: TensorSpec,
    normalized_shape: Sequence[int],
    parameters: Sequence[TensorSpec],
) -> Scratch:
    """Partial sums for weight and bias, where there are many rows of few columns; they are summed into new tensors."""
    first = copy_if(not x.is_contiguous, x)
    copied = first + copy_if(not grad.is_contiguous, grad)
    columns = prod(normalized_shape)
    rows = int(x.numel) // max(1, columns)
    if rows <= MANY_ROWS or columns // WARP >= facts.multiprocessors // 2:
        return Scratch(copied, first=len(first))
    blocks = min(divide_up(rows, WARP), MOST_BLOCKS // divide_up(columns, WARP))
    partial = [spec.like((blocks, columns)) for spec in parameters]
    sums = [for_a_while(columns * spec.itemsize, *reduction_sizes(spec, (1,), 4, facts)) for spec in partial]
    return Scratch(
        (*copied, *map(byte_count, partial), *(size for taken in sums for size in taken)), first=len(first)
    )


@scratch("native_group_norm")
def of_group_norm(
    facts: DeviceFacts, made: Results, x: TensorSpec, weight: Maybe, bias: Maybe, batch: int, channels: int, pixels: int,
    groups: int, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """Means of half types in float32; a factor and a summand for each channel."""
    means = (4 * batch * groups,) * 2 if x.dtype in HALF else ()
    is_affine = pixels > 1 and not (weight is None and bias is None)
    return Scratch((*means, *((4 * batch * channels,) * 2 if is_affine else ())))


@scratch("native_group_norm_backward")
def of_group_norm_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, x: TensorSpec, mean: TensorSpec, rstd: TensorSpec, weight: Maybe,
    batch: int, channels: int, pixels: int, groups: int, wanted: Sequence[bool] = (True,), **settings: object,
) -> Scratch:  # fmt: skip
    """Two sums for each channel, two numbers for each group, and a factor for each channel."""
    by_channel, by_group = 4 * batch * channels, 4 * batch * groups
    factor = (by_channel,) if pixels > 1 and weight is not None else ()
    return Scratch((by_channel, by_channel, *((by_group, by_group, *factor) if wanted[0] else ())))


# --- softmax, losses and other operators that are written in terms of others


@scratch("_softmax", "_log_softmax")
def of_softmax(
    facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    return Scratch(copy_if(not x.is_contiguous, x))


@scratch("_log_softmax_backward_data")
def of_log_softmax_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, output: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    return Scratch(copy_if(not grad.is_contiguous, grad) + copy_if(not output.is_contiguous, output))


@scratch("_softmax_backward_data")
def of_softmax_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, output: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    """The product of the two comes first, laid out as they are."""
    product = (byte_count(grad),)
    if grad.is_contiguous and output.is_contiguous:
        return Scratch(product)
    first = output if grad.numel and 0 in grad.stride else grad
    return Scratch(
        product + copy_if(not first.is_contiguous, grad) + copy_if(not output.is_contiguous, output)
    )


keeps_whole = OpFacts.keeps_whole
keeps_whole.mark("mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy")


@scratch("huber_loss")
def of_huber_loss(
    facts: DeviceFacts, made: Results, x: TensorSpec, target: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    return of_loss(facts, made, x, target)._replace(first=1)


@scratch("mse_loss", "smooth_l1_loss")
def of_loss(
    facts: DeviceFacts, made: Results, x: TensorSpec, target: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    """The summands are stored in a tensor first."""
    return (
        Scratch((byte_count(x), *_sum_of_all(x, facts)))
        if made and made[0].ndim == 0 and x.ndim
        else NO_SCRATCH
    )


@scratch("binary_cross_entropy", "soft_margin_loss")
def of_loss_in_place(
    facts: DeviceFacts, made: Results, x: TensorSpec, target: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    return (
        Scratch((x.itemsize, *_sum_of_all(x, facts))) if made and made[0].ndim == 0 and x.ndim else NO_SCRATCH
    )


def _sum_of_all(x: TensorSpec, facts: DeviceFacts) -> tuple[int, ...]:
    return reduction_sizes(x.like(), (), max(4, x.itemsize), facts)


@scratch("binary_cross_entropy_with_logits")
def of_loss_of_logits(
    facts: DeviceFacts, made: Results, x: TensorSpec, target: TensorSpec, weight: Maybe = None, pos_weight: Maybe = None,
    *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """The logarithms of sigmoids, and the summands; the weights of positive examples, if there are any."""
    weighted = () if pos_weight is None else for_a_while(byte_count(pos_weight), byte_count(x))
    if made[0].ndim:
        return Scratch((byte_count(x), *weighted))
    return Scratch((byte_count(x), *weighted, byte_count(x), *_sum_of_all(x, facts)), first=2 + len(weighted))


@scratch("logsumexp")
def of_logsumexp(
    facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    """The largest element of each row, whether it is infinite, the exponentials; then they are summed up."""
    row, flags = byte_count(made[0]), int(made[0].numel)
    return Scratch((row, *for_a_while(row, flags), byte_count(x)), first=6)


@scratch("_safe_softmax")
def of_safe_softmax(
    facts: DeviceFacts, made: Results, x: TensorSpec, dim: int, *rest: object, **settings: object
) -> Scratch:
    """Masks of the elements, and of the rows, that are minus infinity; such rows are overwritten."""
    return Scratch((int(x.numel), int(x.numel) // max(1, x.shape[dim] if x.ndim else 1), x.itemsize))


@scratch("roll")
def of_roll(
    facts: DeviceFacts,
    made: Results,
    x: TensorSpec,
    shifts: Sequence[int],
    dims: Sequence[int] = (),
    **settings: object,
) -> Scratch:
    """Several dimensions are rolled one after the other."""
    before = max(0, len(dims) - 1)
    return Scratch((byte_count(x),) * before, first=before)


@scratch("isinf", "dist", "multinomial")
def of_one_more(
    facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    """An intermediate tensor like the argument: absolute values, differences, random numbers."""
    return Scratch((byte_count(x),), first=1) if x.is_floating_point else NO_SCRATCH


# --- lists of tensors

CHUNK = 65_536


@scratch("_foreach_norm")
def of_foreach_norm(
    facts: DeviceFacts, made: Results, tensors: Sequence[TensorSpec], *rest: object, **settings: object
) -> Scratch:
    """A partial norm for each chunk of the longest tensor, for every tensor."""
    chunks = max((-(-int(spec.numel) // CHUNK) for spec in tensors), default=0)
    return (
        Scratch((len(tensors) * chunks * max(4, tensors[0].itemsize),), first=1)
        if tensors and chunks
        else NO_SCRATCH
    )


# --- the order of requests

makes_results_late = OpFacts.makes_results_late
makes_results_late.mark(
    "_foreach_norm", "isinf", "logsumexp", "binary_cross_entropy_with_logits", "embedding_dense_backward", "embedding",
    "_embedding_bag_backward", "_embedding_bag_dense_backward", "index", "_unsafe_index", "huber_loss",
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "roll",
)  # fmt: skip

result_order = OpFacts.result_order
result_order.register((1, 0), "native_dropout")
result_order.register((2, 1, 0, 3), "_embedding_bag", "_embedding_bag_forward_only")


def has_other_order(op: OpOverload) -> bool:
    """Whether its results are not allocated first, or not in the order in which they are returned."""
    return record_of(op).makes_results_late or record_of(op).result_order is not None


def put_in_order(op: OpOverload, results: list[Result]) -> list[Result]:
    order = record_of(op).result_order
    return results if order is None or len(order) != len(results) else [results[place] for place in order]


# --- libraries

uses_blas = OpFacts.uses_blas
uses_blas.mark(
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "dot", "vdot", "addbmm", "addbmm_",
    "_addmm_activation", "_scaled_mm", "_int_mm", "_grouped_mm", "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
)  # fmt: skip


# --- Python numbers that eager makes tensors of

NUMBER_DTYPES: dict[type, torch.dtype] = {
    float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128,
}  # fmt: skip
