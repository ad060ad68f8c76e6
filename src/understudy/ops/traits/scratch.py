"""Temporary memory of CUDA kernels, from specs and the device.

    scratch = scratch_of(call, results, facts)
    scratch.sizes      bytes of each block, all held at once
    scratch.bound      what a library may allocate in addition: 0, unless it decides at run time (cuDNN)
    scratch.is_exact   whether the sizes are those of the kernel, or an estimate

Beside it: which operators have a workspace of cuBLAS (`uses_blas`), and Python numbers that eager makes tensors of.

A formula is called with the device's facts, the specs of the results, then the arguments of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from math import prod
from typing import NamedTuple

import torch

from understudy._torch import OpOverload
from understudy.ops.registry import Trait, record_of
from understudy.ops.traits import cuda_reductions
from understudy.ops.traits.cuda_reductions import reduction_sizes
from understudy.spec import TensorSpec, preserved_copy
from understudy.spec.call import Call, flat
from understudy.spec.device_facts import DeviceFacts


class Scratch(NamedTuple):
    sizes: tuple[int, ...] = ()
    bound: int = 0
    is_exact: bool = True


NO_SCRATCH = Scratch()
HALF = (torch.float16, torch.bfloat16)
Results = Sequence[TensorSpec]
Formula = Callable[..., Scratch]
Maybe = TensorSpec | None

scratch: Trait[Formula] = Trait("memory of a CUDA kernel besides its results", of_packets=True)


def scratch_of(call: Call, results: Iterable[TensorSpec], facts: DeviceFacts) -> Scratch:
    if any(spec.sparse is not None for spec in call.inputs):
        return Scratch(is_exact=False)  # other kernels, of cuSPARSE
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


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _bytes(spec: TensorSpec) -> int:
    return int(spec.numel) * spec.itemsize


def _copy_if(condition: bool, spec: TensorSpec) -> tuple[int, ...]:
    return (_bytes(spec),) if condition else ()


# --- reductions

WARP = cuda_reductions.WARP
NORMS = ("linalg_vector_norm", "norm")

accumulator: Trait[Callable[[TensorSpec], int]] = Trait("bytes of one partial result of a reduction", of_packets=True)


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
    find_size = accumulator.of(call.op)
    if find_size is not None:
        return Scratch(reduction_sizes(x, kept, find_size(x), facts))
    summed = _as_summed(x, results[0].dtype)
    element = summed.itemsize // 2 if packet in NORMS and summed.is_complex else max(4, summed.itemsize)
    return Scratch(_copy_if(summed is not x, summed) + reduction_sizes(summed, kept, element, facts))


def _as_summed(x: TensorSpec, result: torch.dtype) -> TensorSpec:
    """Sums are computed in the dtype of the result, of a copy if need be; half types are widened on the way."""
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


# --- products: operands in an order that cuBLAS does not take are copied


def _is_awkward(spec: TensorSpec) -> bool:
    rows, columns = spec.shape[-2:]
    step, inner = spec.stride[-2:]
    if spec.ndim == 3 and spec.is_contiguous and step and inner:
        return False
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
    bias: Maybe, out: Maybe = None, logsumexp: Maybe = None, seed: Maybe = None, offset: Maybe = None,
    dropout_p: float = 0.0, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """delta; and for each head tiles of the query's gradient in float32, each with a lock. Half types that do not fit into
    registers have such tiles for key and value, too."""
    batch, heads, rows, width = query.numbers.shape
    columns, value_width = key.numbers.shape[2], value.numbers.shape[3]
    block_rows, block_columns = _efficient_block(max(width, value_width), query.dtype in HALF, dropout_p > 0, facts)
    tile = 16 + 4 * block_rows * block_columns if facts.capability >= (7, 0) or query.dtype in HALF else 0
    elements = _divide_up(rows, block_rows) * _divide_up(width, block_columns) * tile // 4
    if query.dtype in HALF and max(width, value_width) > block_rows:
        splits = max(1, min(_divide_up(columns, block_columns), 200 // (batch * heads)))
        if batch * heads >= 256 and columns <= 2 * block_columns:
            splits = 1
        elements += splits * block_columns * (_align(width, block_rows) + _align(value_width, block_rows))
    sizes = 4 * batch * heads * rows, 4 * batch * heads * _align(elements, 4)
    return Scratch(sizes, is_exact=max(width, value_width) <= 64)


def _efficient_block(width: int, is_half: bool, has_dropout: bool, facts: DeviceFacts) -> tuple[int, int]:
    """Rows and columns of a tile: of the first kernel in torch's list that takes heads of this width, and whose tiles fit
    into the shared memory of the device."""
    has_little_memory = facts.capability in ((8, 6), (8, 7), (8, 9)) or facts.capability >= (12, 0)
    if width <= 64 or facts.capability < (7, 0) or (facts.capability < (8, 0) and not is_half):
        return 64, 64
    if facts.capability < (8, 0):
        return 128, 64
    if is_half and width <= 128:
        if facts.capability in ((8, 6), (8, 9)) and width <= 96 and not has_dropout:
            return 128, 64
        return (64, 64) if has_little_memory else (128, 128)
    return (64, 64) if has_little_memory else (128, 64)


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

MANY_ROWS, MOST_BLOCKS = 64 * 1024, 32 * 1024


@scratch("native_layer_norm", "_fused_rms_norm")
def of_norm(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    return Scratch(_copy_if(not x.is_contiguous, x))


@scratch("native_layer_norm_backward")
def of_layer_norm_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[int], mean: TensorSpec,
    rstd: TensorSpec, weight: Maybe, bias: Maybe, wanted: Sequence[bool] = (True, True, True), **settings: object,
) -> Scratch:  # fmt: skip
    parameters = [spec for spec, is_wanted in zip((weight, bias), wanted[1:], strict=True) if spec is not None and is_wanted]
    return _norm_backward(facts, grad, x, normalized_shape, parameters)


@scratch("_fused_rms_norm_backward")
def of_rms_norm_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[int], rstd: TensorSpec,
    weight: Maybe, wanted: Sequence[bool] = (True, True), **settings: object,
) -> Scratch:  # fmt: skip
    return _norm_backward(facts, grad, x, normalized_shape, [weight] if weight is not None and wanted[1] else [])


def _norm_backward(
    facts: DeviceFacts, grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[int], parameters: Sequence[TensorSpec]
) -> Scratch:
    """Partial sums for weight and bias, where there are many rows of few columns; they are summed into new tensors."""
    copied = _copy_if(not x.is_contiguous, x) + _copy_if(not grad.is_contiguous, grad)
    columns = prod(normalized_shape)
    rows = int(x.numel) // max(1, columns)
    if rows <= MANY_ROWS or columns // WARP >= facts.multiprocessors // 2:
        return Scratch(copied)
    blocks = min(_divide_up(rows, WARP), MOST_BLOCKS // _divide_up(columns, WARP))
    partial = tuple(spec.itemsize * blocks * columns for spec in parameters)
    return Scratch((*copied, *partial, *(map(_bytes, parameters))))


# --- softmax, losses and other operators that are written in terms of others


@scratch("_softmax", "_log_softmax")
def of_softmax(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    return Scratch(_copy_if(not x.is_contiguous, x))


@scratch("_log_softmax_backward_data")
def of_log_softmax_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, output: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    return Scratch(_copy_if(not grad.is_contiguous, grad) + _copy_if(not output.is_contiguous, output))


@scratch("_softmax_backward_data")
def of_softmax_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, output: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    """The product of the two comes first, laid out as they are."""
    product = (_bytes(grad),)
    if grad.is_contiguous and output.is_contiguous:
        return Scratch(product)
    first = output if grad.numel and 0 in grad.stride else grad
    return Scratch(product + _copy_if(not first.is_contiguous, grad) + _copy_if(not output.is_contiguous, output))


@scratch("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
def of_loss(
    facts: DeviceFacts, made: Results, x: TensorSpec, target: TensorSpec, *rest: object, **settings: object
) -> Scratch:
    """What is summed up is a tensor first."""
    return Scratch((_bytes(x),)) if made and made[0].ndim == 0 and x.ndim else NO_SCRATCH


@scratch("binary_cross_entropy_with_logits")
def of_loss_of_logits(
    facts: DeviceFacts, made: Results, x: TensorSpec, target: TensorSpec, weight: Maybe = None, pos_weight: Maybe = None,
    *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """The logarithms of sigmoids, and what is summed up; the weights of positive examples, if there are any."""
    return Scratch((_bytes(x),) * (1 + (pos_weight is not None) + (made[0].ndim == 0)))


@scratch("logsumexp")
def of_logsumexp(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    """The largest element of each row, and the exponentials."""
    return Scratch((_bytes(made[0]), _bytes(x)))


@scratch("_safe_softmax")
def of_safe_softmax(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    """The plain softmax, and whether elements are minus infinity."""
    return Scratch((_bytes(made[0]), int(x.numel)))


@scratch("isinf", "dist", "multinomial")
def of_one_more(facts: DeviceFacts, made: Results, x: TensorSpec, *rest: object, **settings: object) -> Scratch:
    """A tensor like the argument on the way: absolute values, differences, random numbers."""
    return Scratch((_bytes(x),) if x.is_floating_point else ())


# --- sorting and what is built on it


ONE_TILE = 2304
"""Pairs of 8 bytes that one block sorts by itself."""


def _cub(elements: int) -> int:
    """Temporary storage of a radix sort of pairs: second buffers of keys and values, and what blocks tell each other."""
    return 1 if elements <= ONE_TILE else 16 * elements + elements // 4 + 16 * 1024


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


@scratch("index", "_unsafe_index")
def of_index(facts: DeviceFacts, made: Results, x: TensorSpec, indices: Sequence[Maybe]) -> Scratch:
    """Several indices are brought to one layout; those of 4 bytes become longer."""
    return Scratch(_copied_indices(indices))


def _copied_indices(indices: Sequence[Maybe]) -> tuple[int, ...]:
    used = [index for index in indices if index is not None and index.dtype is not torch.bool]
    elements = prod(max(sizes) for sizes in zip_longest(*(reversed(index.numbers.shape) for index in used), fillvalue=1))
    layouts = {(index.shape, index.stride) for index in used}
    copies = [8 * int(index.numel) for index in used if index.dtype is torch.int32]
    return (*copies, *(len(used) * [8 * elements] if len(layouts) > 1 else []))


@scratch("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def of_index_put(
    facts: DeviceFacts, made: Results, x: TensorSpec, indices: Sequence[Maybe], values: TensorSpec,
    accumulate: bool = False, *rest: object, **settings: object,
) -> Scratch:  # fmt: skip
    """Accumulating sorts the indices, with their order, and reads the values one after the other."""
    used = [index for index in indices if index is not None]
    if not accumulate or not used:
        return Scratch(_copied_indices(indices))
    n = max(int(index.numel) for index in used)
    copied = _copy_if(not values.is_contiguous, values)
    return Scratch((8 * n, *copied, 8 * n, 8 * n, 8 * n, _cub(n)), is_exact=n <= ONE_TILE)


FEW_INDICES, ROWS_AT_ONCE = 3072, 10


@scratch("embedding_dense_backward")
def of_embedding_backward(
    facts: DeviceFacts, made: Results, grad: TensorSpec, indices: TensorSpec, num_weights: int, padding_idx: int,
    scale_grad_by_freq: bool = False, **settings: object,
) -> Scratch:  # fmt: skip
    """Few indices need nothing. Many are sorted with their order, and the rows of one index summed up ten at a time, in
    float32: what sorting takes besides is gone by then."""
    copied = _copy_if(not indices.is_contiguous, indices) + _copy_if(not grad.is_contiguous, grad)
    n = int(indices.numel)
    if n <= FEW_INDICES and not scale_grad_by_freq:
        return Scratch(copied)
    width = grad.numbers.shape[-1] if grad.ndim else 1
    segments = min(n, num_weights)
    partial = segments + n // ROWS_AT_ONCE
    size = indices.itemsize
    counts = (size * n,) if scale_grad_by_freq else ()
    lists = (size * n, size * n, *counts, size * n, 8, size * segments, size * segments, 8, size * partial)
    return Scratch((*copied, *lists, max(4, grad.itemsize) * partial * width))


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
