"""CPU kernels: dtypes that few of them take, and the memory that they take besides their results.

    refuse_rare(call)          8-bit floats and large unsigned integers
    casts_of(call, results)    bytes of each copy of an operand, in order
    size_of_cast(op, operands, number), tensor_positions    Python numbers that eager makes tensors of

On the CPU an elementwise kernel reads operands of one dtype only: `x * mask` copies the mask in the dtype of x first. CUDA
kernels convert each element as they read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy._torch import OpOverload
from understudy.errors import DtypeError
from understudy.ops.registry import Trait, record_of
from understudy.ops.shared.dtypes import FLOAT8, UNSIGNED
from understudy.ops.traits.scratch import NUMBER_DTYPES, is_awkward
from understudy.spec import TensorSpec
from understudy.spec.call import Call
from understudy.spec.elementwise import float_type, result_type

Results = Sequence[TensorSpec]

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


steps_of: Trait[Callable[..., tuple[int, ...]]] = Trait("tensors that its CPU kernel makes on the way", of_packets=True)
"""Called with the results, then the arguments of the call. All of them are alive at a time, beside the results."""


def _size_of_number(number: object, dtype: torch.dtype) -> int:
    """A number that a kernel computes with is wrapped, and cast."""
    wrapped = NUMBER_DTYPES[type(number)]
    return wrapped.itemsize + (0 if wrapped is dtype else dtype.itemsize)


def _size_of_mean(reduction: int, dtype: torch.dtype) -> int:
    """A mean is a sum, divided by the number of elements."""
    return _size_of_number(1, dtype) if reduction == 1 else 0


@steps_of("mean")
def _of_mean(results: Results, x: TensorSpec, *rest: object, **settings: object) -> tuple[int, ...]:
    """The sum is there before it is divided: a copy in another dtype is gone by then."""
    dtype = results[0].dtype
    return (max(0 if x.dtype is dtype else x.numel * dtype.itemsize, _size_of_mean(1, dtype)),)


@steps_of("mse_loss", "smooth_l1_loss")
def _of_loss(
    results: Results, x: TensorSpec, target: TensorSpec, reduction: int = 1, *rest: object, **settings: object
) -> tuple[int, ...]:
    """What is summed up, beside the result, which keeps its size."""
    if results[0].ndim == x.ndim:
        return ()
    dtype = results[0].dtype
    return max(x.numel, target.numel) * dtype.itemsize, _size_of_mean(reduction, dtype)


@steps_of("huber_loss")
def _of_huber_loss(
    results: Results, x: TensorSpec, target: TensorSpec, reduction: int = 1, *rest: object, **settings: object
) -> tuple[int, ...]:
    """As above; the result is new, and comes last."""
    steps = _of_loss(results, x, target, reduction)
    return (*steps, results[0].itemsize) if steps else ()


@steps_of("binary_cross_entropy")
def _of_loss_in_place(
    results: Results, x: TensorSpec, target: TensorSpec, weight: TensorSpec | None = None, reduction: int = 1,
    **settings: object,
) -> tuple[int, ...]:  # fmt: skip
    """The sum, beside what it is written to."""
    return (x.itemsize, _size_of_mean(reduction, x.dtype)) if reduction else ()


@steps_of("soft_margin_loss")
def _of_soft_margin_loss(
    results: Results, x: TensorSpec, target: TensorSpec, reduction: int = 1, **settings: object
) -> tuple[int, ...]:
    return _of_loss_in_place(results, x, target, None, reduction)


@steps_of("soft_margin_loss_backward")
def _of_soft_margin_loss_backward(
    results: Results, grad: TensorSpec, x: TensorSpec, *rest: object, **settings: object
) -> tuple[int, ...]:
    """Three tensors, before the result."""
    return (2 * x.numel * x.itemsize,)


@steps_of("binary_cross_entropy_with_logits")
def _of_loss_of_logits(
    results: Results, x: TensorSpec, target: TensorSpec, weight: TensorSpec | None = None,
    pos_weight: TensorSpec | None = None, reduction: int = 1, **settings: object,
) -> tuple[int, ...]:  # fmt: skip
    """Before the result is there: the logarithms of sigmoids, and what they are computed with; the weights of positive
    examples, or what is summed up, and the sum."""
    size, result = x.numel * x.itemsize, results[0]
    if pos_weight is not None:
        return size, pos_weight.numel * pos_weight.itemsize, size, _size_of_mean(1, x.dtype)
    return (size, size) if result.ndim else (size, size, result.itemsize + _size_of_mean(reduction, x.dtype))


@steps_of(*(f"_foreach_{name}{suffix}" for name in ("add", "sub", "mul", "div") for suffix in ("", "_")))
def _of_list(results: Results, tensors: Sequence[TensorSpec], other: object, **settings: object) -> tuple[int, ...]:
    """One tensor after the other, each with its number."""
    numbers = other if isinstance(other, (list, tuple)) else [other] * len(tensors)
    sizes = [
        _size_of_number(number, spec.dtype)
        for spec, number in zip(tensors, numbers, strict=True)
        if type(number) in NUMBER_DTYPES
    ]
    return (max(sizes),) if sizes else ()


@steps_of("mm")
def _of_product(results: Results, a: TensorSpec, b: TensorSpec, *rest: object, **settings: object) -> tuple[int, ...]:
    return tuple(spec.numel * spec.itemsize for spec in (a, b) if is_awkward(spec))


@steps_of("addmm", "addmm_")
def _of_product_with_bias(
    results: Results, bias: TensorSpec, a: TensorSpec, b: TensorSpec, **settings: object
) -> tuple[int, ...]:
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
) -> tuple[int, ...]:
    """For each thread: weights of a block, and once more in a half type; the largest and the sum of each row; results."""
    queries, keys, itemsize = _find_blocks(query, key)
    halves = 2 * queries * keys if query.itemsize == 2 else 0
    return (torch.get_num_threads() * (itemsize * queries * (keys + 2 + query.shape[-1]) + halves),)


@steps_of("_scaled_dot_product_flash_attention_for_cpu_backward")
def _of_attention_backward(
    results: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, *rest: object, **settings: object
) -> tuple[int, ...]:
    """The gradient laid out by rows; weights and their gradients for each thread; the sums of a block's rows."""
    queries, keys, itemsize = _find_blocks(query, key)
    halves = 2 if query.itemsize == 2 else 0
    (batch, heads, length, width), (by_batch, by_head, by_row, by_column) = grad.shape, grad.stride
    by_rows = grad.like((batch, length, heads, width), stride=(by_batch, by_row, by_head, by_column))
    copied = 0 if by_rows.is_contiguous else grad.numel * grad.itemsize
    return copied, torch.get_num_threads() * 2 * queries * keys * (itemsize + halves), queries * itemsize


def casts_of(call: Call, results: Results) -> tuple[int, ...]:
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
