"""Which arguments a call writes to, by its schema and against it, and which overlaps in memory it rejects."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch

from understudy import _torch
from understudy._torch import OpOverload
from understudy.ops.registry import OpFacts, record_of
from understudy.shapes.sizes import is_provably_equal
from understudy.spec import TensorSpec
from understudy.spec.call import Call, flat

kept_values = OpFacts.kept_values
kept_values.register(
    {"found_inf": "gradients without data have no infinities"}, "_amp_foreach_non_finite_check_and_unscale_"
)

is_own_tensor = OpFacts.is_own_tensor
is_own_tensor.mark("view.dtype")

writes_apart = OpFacts.writes_apart
writes_apart.mark(
    "cat.out", "gather.out", "take.out", "index_select.out", "kthvalue.values", "masked_select.out", "index_add_",
    "index_copy_", "index_put_", "index_reduce_", "scatter_.src", "scatter_.reduce", "scatter_add_", "scatter_reduce_.two",
)  # fmt: skip

reads_along = OpFacts.reads_along
reads_along.register((1,), "gather.out")


def joins_nothing(call: Call) -> bool:
    """Whether all inputs of this `cat` are vectors without elements, which eager skips."""
    if call.op is not torch.ops.aten.cat.out:
        return False
    return all(spec.ndim == 1 and type(spec.shape[0]) is int and spec.shape[0] == 0 for spec in call.args[0])


def fills_by_mask(call: Call) -> bool:
    """Whether eager runs an `index_put_` as `masked_fill_`: one value is written by one mask."""
    if call.op is not torch.ops.aten.index_put_.default:
        return False
    _, indices, values, *accumulate = call.args
    given = [index for index in indices if index is not None]
    return (
        len(given) == 1
        and given[0].dtype is torch.bool
        and is_provably_equal(values.numel, 1)
        and not any(accumulate)
    )


trusts_arguments = OpFacts.trusts_arguments
trusts_arguments.register(
    "it reads and writes beyond parameters that are too short",
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
    "_batch_norm_no_update", "native_batch_norm_backward", "batch_norm_backward", "_batch_norm_impl_index", "batch_norm",
    "_embedding_bag", "_embedding_bag_forward_only", "embedding_bag", "segment_reduce", "_segment_reduce_backward",
    "_pdist_forward", "_pdist_backward", "ormqr", "linalg_householder_product", "_ctc_loss", "_ctc_loss_backward",
    "native_layer_norm_backward", "native_group_norm_backward", "convolution_backward", "mkldnn_rnn_layer",
)  # fmt: skip
trusts_arguments.register("the size of its result depends on its values", "repeat_interleave")
trusts_arguments.register("it copies blocks, and assumes contiguous memory", "narrow_copy")
trusts_arguments.register(
    "it swaps rows by its pivots", "lu_unpack", "linalg_lu_solve", "linalg_ldl_solve", "lu_solve"
)
trusts_arguments.register(
    "it writes to the positions of its indices",
    "max_unpool2d", "max_unpool3d", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
    "fractional_max_pool2d_backward", "fractional_max_pool3d_backward", "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
)  # fmt: skip


checks_arguments = OpFacts.checks_arguments
checks_arguments.mark(
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_assert_async", "_cdist_forward", "_chunk_cat",
    "_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "_histogramdd_from_bin_tensors", "_trilinear",
    "huber_loss_backward", "mse_loss_backward", "smooth_l1_loss_backward", "soft_margin_loss_backward",
    "binary_cross_entropy_backward", "_linalg_check_errors", "_linalg_det", "_linalg_eigh", "_linalg_slogdet",
    "_linalg_solve_ex", "_linalg_svd", "_log_softmax", "_log_softmax_backward_data", "_prelu_kernel",
    "_softmax_backward_data", "_scaled_mm", "_scaled_mm_v2", "_softmax", "_unsafe_index", "_unsafe_masked_index",
    "_unsafe_masked_index_put_accumulate", "unfold_backward",
)  # fmt: skip


def may_trust_arguments(op: OpOverload) -> bool:
    """Whether its kernel may access memory out of bounds on wrong arguments: known cases, and operators that only
    torch's own code calls (private operators, gradients), with arguments that fit."""
    if record_of(op).checks_arguments:
        return False
    name = op.name().partition("::")[2].partition(".")[0]
    is_private = name.startswith(("_", "mkldnn")) and not name.startswith("_foreach")
    return is_private or "backward" in name or record_of(op).trusts_arguments is not None


writes_in_order = OpFacts.writes_in_order
for _name in (
    "add addcdiv addcmul addr atan2 bernoulli bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor "
    "clamp_max clamp_min copy copysign div eq floor_divide fmod gcd ge gt heaviside hypot igamma igammac lcm le lerp "
    "logical_and logical_or logical_xor lt masked_fill maximum minimum mul ne nextafter pow remainder sub where xlogy"
).split():
    writes_in_order.mark(_name, f"{_name}_")

read_shape = OpFacts.read_shape

reads_before = OpFacts.reads_before
reads_before.register((1,), "ldexp", "ldexp_")
reads_before.register((0,), "mvlgamma")


@read_shape("addr", "addr_")
def _see_column(position: int, spec: TensorSpec) -> TensorSpec:
    """The first vector is a column."""
    return (
        spec.as_view((*spec.shape, 1), spec.stride * 2, spec.offset)
        if position == 1 and spec.ndim == 1
        else spec
    )


class PlainWrite(Enum):
    """Where C++ writes in place with plain tensors, and makes a new one while a mode is active."""

    ADDS_GRADIENT = auto()
    """Autograd's engine adds a gradient to one that it holds alone."""
    FILLS_ZEROS = auto()
    """A formula of a gradient writes into zeros that it has just made."""
    JOINS_MASKS = auto()
    """The formula of a gradient writes into a mask of its own."""
    STARTS_FORMULA = auto()
    """The formula of a gradient makes a tensor that it then writes to: that of a loss of logits."""
    CONTINUES_FORMULA = auto()


plain_write = OpFacts.plain_write
plain_write.register(PlainWrite.ADDS_GRADIENT, "add.Tensor")
plain_write.register(
    PlainWrite.FILLS_ZEROS,
    "index_put", "index_add", "index_fill.int_Scalar", "index_fill.int_Tensor", "scatter_add", "scatter.src",
    "scatter.value", "put", "masked_scatter",
)  # fmt: skip

plain_write.register(PlainWrite.JOINS_MASKS, "logical_and", "logical_or")
plain_write.register(PlainWrite.STARTS_FORMULA, "sigmoid", "add.Scalar")
plain_write.register(PlainWrite.CONTINUES_FORMULA, "sub.Tensor", "mul.Tensor", "div.Tensor")

gives_zeros = OpFacts.gives_zeros
gives_zeros.mark("zeros", "new_zeros", "zeros_like")

LISTS_OF_TENSORS = "_foreach_"
"""How the names of operators on lists of tensors begin."""

CHANCE = "dropout_p"
"""Operators with such an argument draw no random numbers if it is zero, which it is by default."""


def written_values(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that a call writes to."""
    values = [_argument(position, name, args, kwargs) for position, name in _torch.written_arguments(op)]
    values += [_argument_named(op, name, args, kwargs) for name in _hidden_names(op, args, kwargs)]
    return [value for value in values if value is not None]


def written_inputs(call: Call) -> tuple[int, ...]:
    """The positions of the inputs whose values a call changes."""
    written = _torch.written_arguments(call.op)
    if not written and record_of(call.op).hidden_writes is None:
        return ()
    kept = record_of(call.op).kept_values or {}
    names = {name for _, name in written if name not in kept} | set(
        _hidden_names(call.op, call.args, call.kwargs)
    )
    positions: list[int] = []
    seen = 0
    for name, value in (*zip(_torch.argument_names(call.op), call.args, strict=False), *call.kwargs.items()):
        count = len(flat(TensorSpec, (value,), {}))
        if name in names:
            positions.extend(range(seen, seen + count))
        seen += count
    return tuple(positions)


def counts_own_writes(op: OpOverload) -> bool:
    """Whether its kernel, not the dispatcher, bumps the version counters of written tensors: operators on lists, and
    those of other libraries."""
    record = record_of(op)
    return record.packet.startswith(LISTS_OF_TENSORS) or not record.is_builtin


def is_pure(op: OpOverload, args: tuple[object, ...], kwargs: object) -> bool:
    """Whether a call has no effect besides its result."""
    return (
        isinstance(op, OpOverload)
        and record_of(op).is_builtin
        and not record_of(op).is_mutable
        and len(op._schema.returns) > 0  # without a result, it is called for an effect: `_assert_async`
        and torch.Tag.data_dependent_output not in op.tags  # an unread value may still be checked
        and not draws_numbers(op, args, kwargs)
        and not (record_of(op).may_write and written_values(op, args, kwargs))
    )


def draws_numbers(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a call draws random numbers, and so affects later draws."""
    if not record_of(op).is_random:
        return False
    return CHANCE not in _torch.argument_names(op) or _argument_named(op, CHANCE, args, kwargs) not in (
        None,
        0,
    )


def _hidden_names(op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[str, ...]:
    hidden = record_of(op).hidden_writes
    return hidden.written if hidden is not None and _argument_named(op, hidden.switch, args, kwargs) else ()


def _argument_named(op: OpOverload, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return _argument(_torch.argument_names(op).index(name), name, args, kwargs)


def _argument(position: int, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)
