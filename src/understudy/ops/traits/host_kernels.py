"""CPU kernels: dtypes that few of them take, and the memory that they take besides their results.

    refuse_rare(call)          8-bit floats and large unsigned integers
    casts_of(call, results)    bytes of each copy of an operand, and of each tensor on the way
    size_of_cast(op, operands, number), tensor_positions    Python numbers that eager makes tensors of

On the CPU an elementwise kernel reads operands of one dtype only: `x * mask` copies the mask in the dtype of x first. CUDA
kernels convert each element as they read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from understudy import _torch
from understudy._torch import OpOverload
from understudy.errors import DtypeError
from understudy.ops.registry import Trait, record_of
from understudy.ops.shared.dtypes import FLOAT8, UNSIGNED
from understudy.ops.traits.scratch import NUMBER_DTYPES, Maybe, byte_count, copy_if, is_awkward
from understudy.spec import TensorSpec, is_channels_last_contiguous
from understudy.spec.call import Call, flat
from understudy.spec.elementwise import float_type, result_type

Results = Sequence[TensorSpec]
Sizes = tuple[int, ...]
GRAIN = 32_768
"""Elements from which on torch gives work to several threads."""

# --- dtypes with few kernels

RARE = FLOAT8 | UNSIGNED
on_float8: Trait[bool] = Trait("elementwise, and takes 8-bit floats", of_packets=True)
"""Beside those that `_is_taken` looks at more closely."""
on_float8.mark("abs", "clone", "conj_physical", "copy", "eq", "fill", "isfinite", "isnan", "ne", "positive", "where")

not_on_unsigned: Trait[bool] = Trait("elementwise, and refuses large unsigned integers", of_packets=True)
not_on_unsigned.mark(
    *"abs add addcmul bitwise_left_shift bitwise_not bitwise_right_shift clamp clamp_max clamp_min fmax fmin fmod gcd "
    "ge gt heaviside lcm le logical_and logical_not logical_or logical_xor lt max maximum min minimum neg relu remainder "
    "rsub sgn sign sub threshold threshold_backward __lshift__ __rshift__ __ilshift__".split()
)

not_made: Trait[frozenset[torch.dtype]] = Trait("dtypes that it refuses to make, or to write to", of_packets=True)
not_made.register(RARE, "arange", "linspace", "random", "bernoulli", "masked_fill")
not_made.register(FLOAT8, "rand", "randn", "randint", "uniform", "normal", "exponential")
not_made.register(UNSIGNED, "eye", "__irshift__")


def refuse_rare(call: Call) -> None:
    """Raise if eager has no CPU kernel for these dtypes. Other devices have kernels for other dtypes."""
    given = None
    for spec in call.inputs:
        if spec.dtype in RARE:
            given = spec
            break
    dtype = call.kwargs.get("dtype") if given is None else given.dtype
    if dtype not in RARE or _is_elsewhere(call, given):
        return
    name = call.op.overloadpacket.__name__
    name = name if name.endswith("__") else name.removesuffix("_")
    is_refused = name in not_made and dtype in not_made.by_name(name)
    record = record_of(call.op)
    if given is not None and record.is_pointwise and not record.is_composite:
        is_refused = is_refused or not _is_taken(name, given, call)
    if is_refused:
        raise DtypeError(f"{name}: not implemented on CPU for {dtype}")


def _is_elsewhere(call: Call, given: TensorSpec | None) -> bool:
    device = call.kwargs.get("device") if given is None else given.device
    return device is not None and device.type != "cpu"


def _is_taken(name: str, given: TensorSpec, call: Call) -> bool:
    if name == "pow":
        return any(type(number) in (int, float) and number in (0, 1) for number in call.args[:2]) or _is_cast(given, call)
    if given.dtype in UNSIGNED:
        return name not in not_on_unsigned or _is_cast(given, call)
    if name == "mul":
        return len(call.inputs) == 2 and all(spec.shape for spec in call.inputs)
    if name == "isinf":
        return given.dtype is torch.float8_e5m2
    return name in on_float8


def _is_cast(given: TensorSpec, call: Call) -> bool:
    """Whether type promotion with another operand makes it a computation in another dtype."""
    if given.dtype in FLOAT8:
        return False
    values: list[Any] = [*call.args, *call.kwargs.values()]
    return any(spec.dtype is not given.dtype for spec in call.inputs) or any(
        isinstance(value, (float, complex)) for value in values
    )


# --- copies of operands

keeps_dtypes: Trait[bool] = Trait("is elementwise, and takes operands of several dtypes as they are", of_packets=True)
keeps_dtypes.mark(
    "copy", "copy_", "_to_copy", "to", "clone", "fill", "fill_", "masked_fill", "masked_fill_", "lerp", "lerp_",
    "native_dropout_backward", "_fused_dropout", "ldexp", "view_as_complex", "view_as_real", "bernoulli", "bernoulli_",
)  # fmt: skip

reduces_in_result_dtype: Trait[bool] = Trait("reduces a copy of its input in the dtype of the result", of_packets=True)
reduces_in_result_dtype.mark("sum", "nansum", "prod", "cumsum", "cumprod", "linalg_vector_norm", "any", "all")


steps_of: Trait[Callable[..., Sizes]] = Trait("tensors that its CPU kernel makes on the way", of_packets=True)
"""Called with the results, then the arguments of the call. All of them are alive at a time, beside the results."""


def _size_of_number(number: object, dtype: torch.dtype) -> int:
    """A number that a kernel computes with is wrapped, and cast."""
    wrapped = NUMBER_DTYPES[type(number)]
    return wrapped.itemsize + (0 if wrapped is dtype else dtype.itemsize)


def _size_of_mean(reduction: int, dtype: torch.dtype) -> int:
    """A mean is a sum, divided by the number of elements."""
    return _size_of_number(1, dtype) if reduction == 1 else 0


@steps_of("mean")
def _of_mean(results: Results, x: TensorSpec, *rest: object, **settings: object) -> Sizes:
    """The sum is there before it is divided: a copy in another dtype is gone by then."""
    dtype = results[0].dtype
    return (max(0 if x.dtype is dtype else x.numel * dtype.itemsize, _size_of_mean(1, dtype)),)


@steps_of("mse_loss", "smooth_l1_loss", "huber_loss")
def _of_loss(
    results: Results, x: TensorSpec, target: TensorSpec, reduction: int = 1, *rest: object, **settings: object
) -> Sizes:
    """What is summed up, beside the result, which may keep its size."""
    if results[0].ndim == x.ndim:
        return ()
    dtype = results[0].dtype
    return max(x.numel, target.numel) * dtype.itemsize, _size_of_mean(reduction, dtype)


@steps_of("binary_cross_entropy")
def _of_loss_in_place(
    results: Results, x: TensorSpec, target: TensorSpec, weight: TensorSpec | None = None, reduction: int = 1,
    **settings: object,
) -> Sizes:  # fmt: skip
    """The sum, beside what it is written to."""
    return (x.itemsize, _size_of_mean(reduction, x.dtype)) if reduction else ()


@steps_of("soft_margin_loss")
def _of_soft_margin_loss(
    results: Results, x: TensorSpec, target: TensorSpec, reduction: int = 1, **settings: object
) -> Sizes:
    return _of_loss_in_place(results, x, target, None, reduction)


@steps_of("soft_margin_loss_backward")
def _of_soft_margin_loss_backward(
    results: Results, grad: TensorSpec, x: TensorSpec, *rest: object, **settings: object
) -> Sizes:
    """Three tensors, before the result."""
    return (2 * x.numel * x.itemsize,)


@steps_of("binary_cross_entropy_with_logits")
def _of_loss_of_logits(
    results: Results, x: TensorSpec, target: TensorSpec, weight: TensorSpec | None = None,
    pos_weight: TensorSpec | None = None, reduction: int = 1, **settings: object,
) -> Sizes:  # fmt: skip
    """The logarithms of sigmoids, and what they are computed with, or what is summed up; weights of positive examples."""
    size, result = x.numel * x.itemsize, results[0]
    if pos_weight is not None:
        before = 2 * size + pos_weight.numel * pos_weight.itemsize + _size_of_mean(1, x.dtype)
        return (max(0, before - result.numel * result.itemsize),)
    return (size,) if result.ndim else (size, size, _size_of_mean(reduction, x.dtype))


@steps_of(*(f"_foreach_{name}{suffix}" for name in ("add", "sub", "mul", "div") for suffix in ("", "_")))
def _of_list(results: Results, tensors: Sequence[TensorSpec], other: object, **settings: object) -> Sizes:
    """One tensor after the other, each with its number."""
    numbers = other if isinstance(other, (list, tuple)) else [other] * len(tensors)
    sizes = [
        _size_of_number(number, spec.dtype)
        for spec, number in zip(tensors, numbers, strict=True)
        if type(number) in NUMBER_DTYPES
    ]
    return (max(sizes),) if sizes else ()


@steps_of("mm")
def _of_product(results: Results, a: TensorSpec, b: TensorSpec, *rest: object, **settings: object) -> Sizes:
    return tuple(spec.numel * spec.itemsize for spec in (a, b) if is_awkward(spec))


@steps_of("addmm", "addmm_")
def _of_product_with_bias(
    results: Results, bias: TensorSpec, a: TensorSpec, b: TensorSpec, **settings: object
) -> Sizes:
    return _of_product(results, a, b)


KEY_BLOCK = 512


def _find_blocks(query: TensorSpec, key: TensorSpec) -> tuple[int, int, int]:
    """Of CPU attention: queries and keys that a thread takes at a time; bytes of an element that it computes with."""
    length = int(query.shape[-2])
    queries = min(256 if length >= 768 else 64 if length >= 192 else 32, length)
    return queries, min(KEY_BLOCK, int(key.shape[-2])), max(4, query.itemsize)


@steps_of("_scaled_dot_product_flash_attention_for_cpu")
def _of_attention(
    results: Results, query: TensorSpec, key: TensorSpec, *rest: object, **settings: object
) -> Sizes:
    """For each thread: weights of a block, and once more in a half type; the largest and the sum of each row; results."""
    queries, keys, itemsize = _find_blocks(query, key)
    halves = 2 * queries * keys if query.itemsize == 2 else 0
    return (torch.get_num_threads() * (itemsize * queries * (keys + 2 + query.shape[-1]) + halves),)


@steps_of("_scaled_dot_product_flash_attention_for_cpu_backward")
def _of_attention_backward(
    results: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, *rest: object, **settings: object
) -> Sizes:
    """The gradient laid out by rows; weights and their gradients for each thread; the sums of a block's rows."""
    queries, keys, itemsize = _find_blocks(query, key)
    halves = 2 if query.itemsize == 2 else 0
    (batch, heads, length, width), (by_batch, by_head, by_row, by_column) = grad.shape, grad.stride
    by_rows = grad.like((batch, length, heads, width), stride=(by_batch, by_row, by_head, by_column))
    copied = 0 if by_rows.is_contiguous else grad.numel * grad.itemsize
    return copied, torch.get_num_threads() * 2 * queries * keys * (itemsize + halves), queries * itemsize


# --- operands that are made contiguous first


def _copies(*positions: int, with_channels_last: bool = False) -> Callable[..., Sizes]:
    """Of a kernel that wants these operands laid out by rows; or, of images, with channels last."""

    def formula(results: Results, *args: object, **settings: object) -> Sizes:
        return tuple(
            size
            for spec in (args[position] for position in positions if position < len(args))
            if isinstance(spec, TensorSpec)
            for size in copy_if(not (spec.is_contiguous or (with_channels_last and has_channels_last(spec))), spec)
        )

    return formula


def has_channels_last(spec: TensorSpec) -> bool:
    return spec.ndim in (4, 5) and is_channels_last_contiguous(spec.shape, spec.stride)


steps_of("_softmax", "_log_softmax", "native_layer_norm", "embedding_dense_backward", "nll_loss_forward",
         "nll_loss2d_forward", "grid_sampler_2d_backward", "grid_sampler_3d_backward")(_copies(0))  # fmt: skip
steps_of("_softmax_backward_data", "_log_softmax_backward_data", "_cdist_forward")(_copies(0, 1))
steps_of(
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "avg_pool3d", "avg_pool3d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward",
    "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "adaptive_max_pool3d", "adaptive_max_pool3d_backward",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "reflection_pad1d_backward", "reflection_pad2d_backward",
    "reflection_pad3d_backward", "replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward",
    "upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward",
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_trilinear3d_backward",
    "upsample_bicubic2d_backward", "pixel_shuffle", "pixel_unshuffle",
)(_copies(0, with_channels_last=True))  # fmt: skip


@steps_of("bmm")
def _of_batch(results: Results, a: TensorSpec, b: TensorSpec, *rest: object, **settings: object) -> Sizes:
    """One product after the other, where an operand was expanded; few numbers are multiplied as they are."""
    (_, rows, inner), columns = a.shape, b.shape[-1]
    if rows * inner * columns < 400:
        return ()
    matrices = (spec.like(spec.shape[-2:], stride=spec.stride[-2:]) for spec in (a, b))
    return tuple(byte_count(matrix) for matrix in matrices if is_awkward(matrix))


@steps_of("baddbmm", "baddbmm_")
def _of_batch_with_bias(results: Results, bias: TensorSpec, a: TensorSpec, b: TensorSpec, **settings: object) -> Sizes:
    return _of_batch(results, a, b)


@steps_of("mv", "addmv", "addmv_")
def _of_vector(results: Results, *operands: object, **settings: object) -> Sizes:
    return tuple(byte_count(spec) for spec in flat(TensorSpec, operands, {}) if spec.ndim == 2 and is_awkward(spec))


@steps_of("gather", "scatter", "scatter_", "scatter_add", "scatter_add_")
def _of_narrow_indices(
    results: Results, x: TensorSpec, dim: int, index: TensorSpec, *rest: object, **settings: object
) -> Sizes:
    return (index.numel * 8,) if index.dtype is not torch.int64 else ()


# --- norms


@steps_of("native_layer_norm_backward")
def _of_layer_norm_backward(
    results: Results, grad: TensorSpec, x: TensorSpec, normalized_shape: Sequence[int], mean: TensorSpec, rstd: TensorSpec,
    weight: Maybe, bias: Maybe, wanted: Sequence[bool], **settings: object,
) -> Sizes:  # fmt: skip
    """Each thread adds up gradients of weight and bias."""
    columns = x.numel // max(1, mean.numel)
    sums = 2 * torch.get_num_threads() * columns * x.itemsize if any(wanted[1:]) else 0
    return (*_copies(0, 1)(results, grad, x), sums)


@steps_of("native_group_norm_backward")
def _of_group_norm_backward(
    results: Results, grad: TensorSpec, x: TensorSpec, mean: TensorSpec, rstd: TensorSpec, weight: Maybe, batch: int,
    channels: int, *rest: object, **settings: object,
) -> Sizes:  # fmt: skip
    """Two sums for each channel. Kernels that take any strides make operands contiguous first."""
    copies = _copies(0, 1)(results, grad, x) if _torch.group_norm_takes_any_strides() else ()
    return (*copies, 2 * batch * channels * max(4, x.itemsize))


# --- images of another size


def _resizes(taps: int, most: int) -> Callable[..., Sizes]:
    """`taps`: neighbours that an element is computed of, in each dimension. `most`: up to this sum of sizes, images are
    copied with channels last, and the result is copied back; with one thread, all images of three channels between which
    bilinear weights are taken. Larger ones have tables of positions and weights."""

    def formula(results: Results, x: TensorSpec, *rest: object, **settings: object) -> Sizes:
        (result,) = results
        if not x.is_floating_point:
            return ()
        length = sum(result.shape[2:])
        is_single = most == 128 and taps == 2 and x.shape[1] == 3 and torch.get_num_threads() == 1
        has_vectors = taps < 4 and ((has_channels_last(x) and x.shape[1] > 3) or length <= most or is_single)
        if not has_vectors:
            return (taps * (8 + max(4, x.itemsize)) * length,)
        return tuple(size for spec in (x, result) for size in copy_if(not has_channels_last(spec), spec))

    return formula


steps_of("upsample_nearest1d", "_upsample_nearest_exact1d")(_resizes(1, 0))
steps_of("upsample_nearest2d", "_upsample_nearest_exact2d")(_resizes(1, 128))
steps_of("upsample_nearest3d", "_upsample_nearest_exact3d")(_resizes(1, 256))
steps_of("upsample_linear1d")(_resizes(2, 0))
steps_of("upsample_bilinear2d")(_resizes(2, 128))
steps_of("upsample_trilinear3d")(_resizes(2, 0))
steps_of("upsample_bicubic2d")(_resizes(4, 0))


# --- reductions, sorts and searches


@steps_of("logsumexp")
def _of_logsumexp(results: Results, x: TensorSpec, *rest: object, **settings: object) -> Sizes:
    """The largest element of each row, beside the exponentials, or beside whether it is infinite."""
    (row,) = results
    return byte_count(row), max(x.numel * row.itemsize, 8 + row.itemsize + row.numel)


@steps_of("std", "var")
def _of_deviation(results: Results, x: TensorSpec, *rest: object, **settings: object) -> Sizes:
    """The mean of all elements, and what it is divided by."""
    return (2 * x.itemsize + 8,) if results[0].numel == 1 and x.numel > 1 else ()


@steps_of("sort")
def _of_sort(results: Results, x: TensorSpec, *rest: object, **settings: object) -> Sizes:
    """The positions along the dimension."""
    positions = [value for value in (settings.get("dim"), *rest) if type(value) is int]
    return (8 * x.shape[positions[0] if positions else -1],) if x.ndim else ()


@steps_of("kthvalue")
def _of_kthvalue(results: Results, x: TensorSpec, *rest: object, **settings: object) -> Sizes:
    """A copy, and the positions."""
    return byte_count(x), 8 * x.numel


@steps_of("median", "nanmedian")
def _of_median(results: Results, x: TensorSpec, *rest: object, **settings: object) -> Sizes:
    """A copy, where it is that of all elements."""
    return (byte_count(x),) if len(results) == 1 else ()


@steps_of("dist")
def _of_distance(results: Results, x: TensorSpec, other: TensorSpec, *rest: object, **settings: object) -> Sizes:
    """The difference."""
    return (max(x.numel, other.numel) * results[0].itemsize,)


@steps_of("isinf")
def _of_isinf(results: Results, x: TensorSpec, **settings: object) -> Sizes:
    """Absolute values, and infinity."""
    return (byte_count(x), 8 + x.itemsize) if x.is_floating_point else ()


@steps_of("masked_select")
def _of_masked_select(results: Results, x: TensorSpec, mask: TensorSpec, **settings: object) -> Sizes:
    """Masks as integers: to count them, before the result is there; and, with several threads, where each element goes."""
    count = max(x.numel, mask.numel)
    if (count >= GRAIN and torch.get_num_threads() > 1) or not (x.is_contiguous and mask.is_contiguous):
        return (16 * count,)
    return (max(0, 8 + 8 * count - byte_count(results[0])),)


@steps_of("multinomial")
def _of_multinomial(
    results: Results, x: TensorSpec, num_samples: int, replacement: bool = False, **settings: object
) -> Sizes:
    """Sums up to each element of a row, or a random number for each element; answers about their sums."""
    if replacement:
        return (x.shape[-1] * x.itemsize,)
    return byte_count(x), 2 + 8


@steps_of("roll")
def _of_roll(
    results: Results, x: TensorSpec, shifts: Sequence[int], dims: Sequence[int] = (), **settings: object
) -> Sizes:
    """Several dimensions are rolled one after the other."""
    return (byte_count(x),) * (len(dims) - 1)


@steps_of("_safe_softmax")
def _of_safe_softmax(results: Results, x: TensorSpec, dim: int, *rest: object, **settings: object) -> Sizes:
    """Whether elements are minus infinity, and whole rows, which are written over; or a copy of the operand before."""
    copied = sum(_copies(0)(results, x))
    flags = x.numel + x.numel // max(1, x.shape[dim] if x.ndim else 1) + x.itemsize
    return (max(copied, flags),)


@steps_of("_embedding_bag_backward")
def _of_bags(
    results: Results, grad: TensorSpec, indices: TensorSpec, offsets: TensorSpec, offset2bag: TensorSpec, *rest: object,
    **settings: object,
) -> Sizes:  # fmt: skip
    """The indices in order, where each was, and its bag."""
    found = 0 if offset2bag.numel else 8 * (indices.numel + 1)
    weights = map(byte_count, flat(TensorSpec, rest[2:], settings))
    return (*_copies(0)(results, grad), found, 3 * 8 * indices.numel, *weights)


@steps_of("_sample_dirichlet")
def _of_dirichlet(results: Results, x: TensorSpec, *rest: object, **settings: object) -> Sizes:
    """Gamma-distributed numbers in float64, and their sums."""
    return 8 * x.numel, byte_count(x)


# --- products of three


@steps_of("_trilinear")
def _of_trilinear(
    results: Results, a: TensorSpec, b: TensorSpec, c: TensorSpec, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Sizes:  # fmt: skip
    """The product of two slices, then that with the third, for one position of a dimension at a time."""
    first, second, third = (_expand(spec, dims) for spec, dims in ((a, expand1), (b, expand2), (c, expand3)))
    two, three = [], []
    for dim, sizes in enumerate(zip(first, second, third, strict=True)):
        is_unrolled, is_summed = dim == unroll_dim, dim in sumdim
        both = max(sizes[:2])
        two.append(1 if is_unrolled or (is_summed and dim in expand3) else both)
        three.append(1 if is_unrolled or is_summed else max(sizes))
    return tuple(prod(sizes) * results[0].itemsize for sizes in (two, three))


def _expand(spec: TensorSpec, dims: Sequence[int]) -> list[int]:
    sizes = [int(size) for size in spec.shape]
    for dim in dims:
        sizes.insert(dim, 1)
    return sizes


# --- all of it


def casts_of(call: Call, results: Results) -> Sizes:
    """Of a call whose tensors are all on the CPU; also what a kernel of several steps makes on the way."""
    if any(spec.sparse is not None or spec.dtype.is_complex for spec in (*call.inputs, *results)):
        return ()
    if (formula := steps_of.of(call.op)) is not None:
        return formula(results, *call.args, **call.kwargs)
    if not results:
        return ()
    if record_of(call.op).is_pointwise:
        return () if keeps_dtypes.of(call.op) else tuple(_cast_operands(call, results[0]))
    if reduces_in_result_dtype.of(call.op) and call.inputs[0].dtype is not results[0].dtype:
        return (call.inputs[0].numel * results[0].itemsize,)
    return ()


def _cast_operands(call: Call, result: TensorSpec) -> list[int]:
    operands = _operands_of(call)
    if not any(isinstance(operand, TensorSpec) for operand in operands):
        return []
    computed = computed_dtype(call.op, operands, result.dtype)
    sizes = [
        operand.numel * computed.itemsize
        for operand in operands
        if isinstance(operand, TensorSpec) and operand.dtype is not computed
    ]
    if record_of(call.op).is_mutable and result.dtype not in (computed, torch.bool):
        sizes.append(result.numel * computed.itemsize)  # the result, before it is copied back
    return sizes


def _operands_of(call: Call) -> list[object]:
    """Tensors and numbers that are computed with: neither a condition nor options."""
    given: list[object] = [value for value in call.args if isinstance(value, (TensorSpec, bool, int, float))]
    return given[1:] if record_of(call.op).packet == "where" else given


def computed_dtype(op: OpOverload, operands: Sequence[object], result: torch.dtype | None) -> torch.dtype:
    """The dtype in which a kernel computes: that of a new result, unless the result is an answer about the operands."""
    if result is not None and result is not torch.bool and not record_of(op).is_mutable:
        return result
    return result_type(*operands)


# --- Python numbers

saves_number: Trait[bool] = Trait("autograd keeps the number that is given for its second tensor")
saves_number.mark("mul.Tensor", "mul_.Tensor", "div.Tensor", "div_.Tensor", "div.Tensor_mode", "div_.Tensor_mode")

wraps_number: Trait[int] = Trait("makes a tensor of the number in this position")
_SECOND = (
    "eq", "ne", "lt", "le", "gt", "ge", "eq_", "ne_", "lt_", "le_", "gt_", "ge_", "remainder", "remainder_", "fmod", "fmod_",
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_and_", "bitwise_or_", "bitwise_xor_", "__lshift__", "__rshift__",
    "__ilshift__", "__irshift__", "rsub", "copysign", "copysign_", "add", "add_", "sub", "sub_", "mul", "mul_", "div",
    "div_",
)  # fmt: skip
wraps_number.register(1, *(f"{name}.Scalar" for name in _SECOND), "xlogy.Scalar_Other", "bitwise_left_shift.Tensor_Scalar")
wraps_number.register(0, "pow.Scalar")


def _find_positions(op: OpOverload) -> tuple[int, ...] | None:
    if not record_of(op).is_builtin:
        return ()
    tensors = [
        position
        for position, argument in enumerate(op._schema.arguments)
        if isinstance(argument.type, torch.TensorType) and not argument.kwarg_only
    ]
    wrapped = wraps_number.of(op)
    return tuple(tensors if wrapped is None else [*tensors, wrapped])


tensor_positions: Trait[tuple[int, ...]] = Trait(
    "positions of arguments that are tensors", derive=_find_positions, derived_from=(wraps_number,)
)
"""Python numbers in the place of tensors: eager makes a tensor of each, which the dispatcher shows as the number again."""


def size_of_cast(op: OpOverload, operands: Sequence[object], number: object) -> int:
    """A number is wrapped in the widest dtype of its kind, and cast to the one in which a kernel computes."""
    if not (record_of(op).is_pointwise or op._schema.name.endswith("_")):
        return 0
    computed = result_type(*operands)
    if record_of(op).packet in ("div", "div_") and op._overloadname == "Tensor":
        computed = float_type(computed)
    return 0 if computed is NUMBER_DTYPES[type(number)] else computed.itemsize
