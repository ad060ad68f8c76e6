"""Memory that a CUDA kernel takes besides its results, and gives back when it has run: from specs and the device.

    scratch = scratch_of(call, results, facts)
    scratch.sizes      bytes of each block, all held at once
    scratch.bound      what a library may take in addition: 0, unless it decides by itself (cuDNN)
    scratch.is_exact   whether the sizes are those of the kernel, or an estimate

Beside it: which operators have a workspace of cuBLAS (`uses_blas`), and Python numbers that eager makes tensors of.

A formula is called with the device's facts, the specs of the results, then the arguments of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch

from understudy._torch import OpOverload
from understudy.ops.registry import Trait, record_of
from understudy.spec import TensorSpec
from understudy.spec.call import Call, flat
from understudy.spec.device_facts import DeviceFacts


class Scratch(NamedTuple):
    sizes: tuple[int, ...] = ()
    bound: int = 0
    is_exact: bool = True


NO_SCRATCH = Scratch()
Results = Sequence[TensorSpec]
Formula = Callable[..., Scratch]
Maybe = TensorSpec | None

scratch: Trait[Formula] = Trait("memory of a CUDA kernel besides its results", of_packets=True)


def scratch_of(call: Call, results: Iterable[TensorSpec], facts: DeviceFacts) -> Scratch:
    formula = scratch.of(call.op)
    if formula is not None:
        return formula(facts, tuple(results), *call.args, **call.kwargs)
    if torch.Tag.reduction in call.op.tags and call.inputs:
        return _reduce(call, tuple(results), facts)
    return NO_SCRATCH


def may_need_scratch(op: OpOverload) -> bool:
    return scratch.of(op) is not None or torch.Tag.reduction in op.tags


def _align(size: int, step: int) -> int:
    return -(-size // step) * step


def _bytes(spec: TensorSpec) -> int:
    return int(spec.numel) * spec.itemsize


def _copy_if(condition: bool, spec: TensorSpec) -> tuple[int, ...]:
    return (_bytes(spec),) if condition else ()


# --- reductions: how gpu_reduce_kernel spreads one over threads and blocks, and what blocks tell each other

WARP = 32
MOST_THREADS = 512
LEAST_VALUES, MOST_VALUES = 16, 256
"""For each thread."""
LEAST_TO_VECTORIZE = 128

accumulator: Trait[Callable[[TensorSpec], int]] = Trait("bytes of one partial result of a reduction", of_packets=True)


@accumulator("max", "min", "argmax", "argmin", "aminmax", "var", "std", "var_mean", "std_mean")
def value_and_index(x: TensorSpec) -> int:
    """A value with the index it is from; or mean, square sum and two counts."""
    return 32 if x.dtype is torch.float64 and x.is_complex else 16


@accumulator("all", "any")
def one_bool(x: TensorSpec) -> int:
    return 1


@accumulator("amax", "amin")
def one_element(x: TensorSpec) -> int:
    return x.itemsize


def _sum_size(x: TensorSpec) -> int:
    """Half types are summed in float32, integers in int64."""
    if x.is_floating_point or x.is_complex:
        return max(4, x.itemsize)
    return 8


def _reduce(call: Call, results: Results, facts: DeviceFacts) -> Scratch:
    x = call.inputs[0]
    if not results or not results[0].numel or not x.numel or x.numel == results[0].numel:
        return NO_SCRATCH
    kept = _dims_that_stay(x, results[0], call)
    if kept is None:
        return NO_SCRATCH
    find_size = accumulator.of(call.op) or _sum_size
    record = record_of(call.op)
    if record.packet in ("max", "min") and results[0].ndim == 0 and len(results) == 1:
        find_size = one_element  # of all elements, without an index
    return Scratch(reduction_sizes(x, kept, find_size(x), facts))


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


def _coalesce(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(size, stride) from the fastest; neighbours that are one in memory are one."""
    joined: list[tuple[int, int]] = []
    for size, stride in dims:
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * size, joined[-1][1])
        else:
            joined.append((size, stride))
    return joined


def _last_power_of_two(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def reduction_sizes(x: TensorSpec, kept: Sequence[int], element: int, facts: DeviceFacts) -> tuple[int, ...]:
    """The staging buffer and the semaphores where several blocks compute one result; nothing where one is enough."""
    sized = [dim for dim in range(x.ndim) if x.shape[dim] > 1]
    shape, stride, _ = x.numbers
    inner = _coalesce(sorted(((shape[d], stride[d]) for d in sized if d not in kept), key=lambda dim: dim[1]))
    outer = _coalesce([(shape[d], stride[d]) for d in reversed(sized) if d in kept])
    inputs = prod(size for size, _ in inner)
    outputs = prod(size for size, _ in outer)
    if inputs <= 1:
        return ()
    is_along_fastest = not outer or inner[0][1] < outer[0][1]
    width, height = (inputs, outputs) if is_along_fastest else (outputs, inputs)
    vector = 1
    if (inner if is_along_fastest else outer)[0][1] == 1:
        if not is_along_fastest:
            vector = _output_vector(x, inner, outer)
            width //= vector
        elif inputs >= LEAST_TO_VECTORIZE and len(inner) == 1:
            width //= 8 if x.itemsize == 2 else 4
    most = (256 if x.dtype is torch.complex128 else MOST_THREADS) // vector
    width_power, height_power = (min(_last_power_of_two(size), most) for size in (width, height))
    block_height = min(height_power, most // min(width_power, WARP))
    block_width = min(width_power, most // block_height)
    step_input, step_output = (block_width, 1) if is_along_fastest else (1, block_width)
    if -(-inputs // step_input) < min(block_height * LEAST_VALUES, MOST_VALUES):
        return ()  # each row of threads has a result of its own
    values = -(-inputs // (step_input * block_height))
    grid = -(-(outputs // vector) // step_output)
    target = facts.multiprocessors * (facts.threads_per_multiprocessor // (block_width * block_height))
    if values < MOST_VALUES or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    if blocks <= 1:
        return ()
    buffer = element * outputs * blocks * (1 if is_along_fastest else block_width * vector)
    return buffer, 4 * grid


def _output_vector(x: TensorSpec, inner: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> int:
    vector = 4
    for number in (x.offset, outer[0][0], *(stride for _, stride in (*inner, *outer[1:]))):
        while number % vector:
            vector //= 2
    return vector


# --- products: operands in an order that cuBLAS does not take are copied


def _is_awkward(spec: TensorSpec) -> bool:
    rows, columns = spec.shape[-2:]
    step, inner = spec.stride[-2:]
    return not ((inner == 1 and step >= max(1, columns)) or (step == 1 and inner >= max(1, rows)))


@scratch("mm", "bmm")
def of_product(
    facts: DeviceFacts, made: Results, a: TensorSpec, b: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    return Scratch(tuple(size for spec in (a, b) for size in _copy_if(spec.numel > 0 and _is_awkward(spec), spec)))


@scratch("addmm", "baddbmm", "_addmm_activation", "addmm_", "baddbmm_")
def of_product_with_bias(
    facts: DeviceFacts, made: Results, bias: TensorSpec, a: TensorSpec, b: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    return of_product(facts, made, a, b)


# --- attention


@scratch("_scaled_dot_product_flash_attention_backward")
def of_flash_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec,
    *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    batch, heads, rows, width = query.numbers.shape
    sizes = [4 * batch * heads * _align(rows, 128)]
    sizes.append(4 * batch * _align(rows, 128) * heads * _align(width, 32 if width <= 128 else 64))
    if key.shape[1] != heads:
        sizes += 2 * [batch * key.numbers.shape[2] * heads * width * query.itemsize]
    return Scratch(tuple(sizes))


@scratch("_scaled_dot_product_efficient_attention_backward")
def of_efficient_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec,
    *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """delta; half types accumulate the gradient of the query in float32, in blocks."""
    batch, heads, rows, width = query.numbers.shape
    delta = 4 * batch * heads * rows
    if query.dtype is torch.float32:
        return Scratch((delta,))
    return Scratch((delta, 4 * batch * heads * _align(rows, 64) * _align(width, 64)), is_exact=False)


@scratch("_scaled_dot_product_cudnn_attention_backward")
def of_cudnn_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec,
    *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """cuDNN decides by itself; the accumulator of the query's gradient is what such kernels need."""
    batch, heads, rows, width = query.numbers.shape
    accumulated = 4 * batch * heads * _align(rows, 128) * width
    return Scratch((accumulated + 4 * batch * heads * rows,), bound=accumulated, is_exact=False)


# --- convolutions and recurrent layers: cuDNN's plans


@scratch("convolution", "cudnn_convolution", "convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward",
         "cudnn_convolution_transpose", "cudnn_convolution_relu")  # fmt: skip
def of_cudnn(facts: DeviceFacts, made: Results, *args: object, **settings: object) -> Scratch:
    """Not known from shapes. Plans that copy operands into another order need as much as these."""
    operands = [*made, *flat(TensorSpec, args, settings)]
    return Scratch((), bound=sum(map(_bytes, operands)), is_exact=False)


# --- normalisation


@scratch("native_layer_norm_backward")
def of_layer_norm_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[int], *rest: object,
    **settings: object,
) -> Scratch:  # fmt: skip
    """Partial sums for weight and bias, where there are many rows of few columns."""
    columns = prod(normalized_shape)
    rows = int(x.numel) // max(1, columns)
    if rows <= 64 * 1024 or columns // WARP >= facts.multiprocessors // 2:
        return NO_SCRATCH
    across = -(-columns // WARP)
    blocks = min(-(-rows // WARP), 32 * 1024 // across)
    return Scratch(2 * (4 * blocks * columns,), is_exact=False)


# --- sorting and what is built on it


def _cub(elements: int) -> int:
    """Temporary storage of a radix sort: histograms, beside the second buffer of keys and values."""
    return 1024 + elements // 16


@scratch("sort", "argsort", "msort", "_unique2", "unique_dim", "unique_consecutive", "mode", "median", "kthvalue")
def of_sort(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    """Copies of keys and of indices."""
    n = int(x.numel)
    return Scratch((n * x.itemsize, 8 * n, 8 * n, _cub(n)), is_exact=False)


@scratch("topk")
def of_topk(
    facts: DeviceFacts, made: Results, x: TensorSpec, k: int, dim: int = -1, *rest: object, **settings: object
) -> Scratch:
    """Long slices are counted by several blocks."""
    length = x.shape[dim] if x.ndim else 1
    slices = int(x.numel) // max(1, length)
    if length < 20_000 or slices > 1000:
        return NO_SCRATCH
    blocks = slices * -(-length // 4096)
    return Scratch((4 * slices, 4 * slices, 2 * 256 * blocks), is_exact=False)


@scratch("cumsum", "cumprod")
def of_scan(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    """One dimension goes through cub, several do not."""
    if x.ndim > 1 and max(x.shape) != x.numel:
        return NO_SCRATCH
    return Scratch((1024 + 16 * (int(x.numel) // 2048),), is_exact=False)


@scratch("nonzero", "masked_select")
def of_nonzero(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    return Scratch((512, 1024 + 8 * (int(x.numel) // 2048)), is_exact=False)


@scratch("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def of_index_put(
    facts: DeviceFacts, made: Results, x: TensorSpec, indices: Sequence[Maybe], values: TensorSpec,
    accumulate: bool = False, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """Accumulating sorts the indices, with their order, and reads the values one after the other."""
    used = [index for index in indices if index is not None]
    if not accumulate or not used:
        return NO_SCRATCH
    n = max(int(index.numel) for index in used)
    copied = _copy_if(not values.is_contiguous, values)
    return Scratch((*copied, 8 * n, 8 * n, 8 * n, 8 * n, _cub(n)), is_exact=False)


@scratch("embedding_dense_backward")
def of_embedding_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, indices: TensorSpec, num_weights: int, padding_idx: int,
    scale_grad_by_freq: bool = False, **settings: object,
) -> Scratch:  # fmt: skip
    """Few indices need nothing; many are sorted, and summed up in segments of at most ten."""
    copied = _copy_if(not grad.is_contiguous, grad)
    n = int(indices.numel)
    if n <= 3072 and not scale_grad_by_freq:
        return Scratch(copied)
    width = grad.numbers.shape[-1] if grad.ndim else 1
    segments = min(n, num_weights) + n // 10
    partial = 4 * segments * _align(width, WARP)
    return Scratch((*copied, 8 * n, 8 * n, 8 * n, _cub(n), 8 * n, 8 * n, partial), is_exact=False)


# --- lists of tensors

CHUNK = 65_536


@scratch("_foreach_norm")
def of_foreach_norm(
    facts: DeviceFacts, made: Results, tensors: Sequence[TensorSpec], *rest: object, **settings: object
) -> Scratch:
    """A partial norm for each chunk of the longest tensor, for every tensor."""
    chunks = max((-(-int(spec.numel) // CHUNK) for spec in tensors), default=0)
    return Scratch((len(tensors) * chunks * max(4, tensors[0].itemsize),) if tensors and chunks else ())


# --- libraries

uses_blas: Trait[bool] = Trait("is computed by cuBLAS on CUDA devices", of_packets=True)
uses_blas.mark(
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_", "dot", "vdot", "addbmm", "addbmm_",
    "_addmm_activation", "_scaled_mm", "_int_mm", "_grouped_mm",
)  # fmt: skip


# --- Python numbers in the place of tensors: eager makes a tensor of each, which the dispatcher shows as the number again

saves_number: Trait[bool] = Trait("autograd keeps the number that is given for its second tensor")
saves_number.mark("mul.Tensor", "mul_.Tensor", "div.Tensor", "div_.Tensor", "div.Tensor_mode", "div_.Tensor_mode")

NUMBER_SIZES: dict[type, int] = {float: 8, int: 8, bool: 1, complex: 16}


def _find_positions(op: OpOverload) -> tuple[int, ...] | None:
    if not record_of(op).is_builtin:
        return ()
    return tuple(
        position
        for position, argument in enumerate(op._schema.arguments)
        if isinstance(argument.type, torch.TensorType) and not argument.kwarg_only
    )


tensor_positions: Trait[tuple[int, ...]] = Trait("positions of arguments that are tensors", derive=_find_positions)
