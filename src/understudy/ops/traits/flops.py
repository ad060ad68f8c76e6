"""The work of a call, from its specs: multiply-adds, elementwise operations, bytes moved.

    work = work_of(call, results)        results: the specs of the returned tensors
    work.macs, work.flops, work.operations, work.bytes_moved, work.kind

Conventions, stated where figures are shown:

- A multiply-add (MAC) is one multiplication and one addition inside of a product: matrices, convolutions, attention,
  recurrent layers. FLOPs are 2 x MACs (a fused multiply-add is two). A product of complex numbers is four real ones.
- Attention and convolutions count every position: a causal mask or padding does not make the count smaller. The
  backward of fused attention computes five products where the forward computes two.
- Elementwise operators, reductions and normalisations have no products. They count operations for each element of their
  largest operand, one unless a table says more, beside the FLOPs and not among them.
- Views cost nothing; copies, gathers and factories move bytes and compute nothing.
- Everything else is `unknown`: it is listed with its share, and never counted as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from understudy._torch import OpOverload
from understudy.ops.registry import OpFacts, record_of
from understudy.spec import TensorSpec
from understudy.spec.call import Call, flat
from understudy.spec.sparse import count_bytes, count_values

Results = Sequence[TensorSpec]
Formula = Callable[..., int]
"""Called with the specs of the results, then with the arguments of the call; returns multiply-adds."""

PRODUCTS, ELEMENTWISE, MOVES, VIEWS, UNKNOWN = "products", "elementwise", "moves", "views", "unknown"


class Work(NamedTuple):
    kind: str
    macs: int = 0
    operations: int = 0
    bytes_moved: int = 0

    @property
    def flops(self) -> int:
        """The FLOPs of products."""
        return 2 * self.macs


macs = OpFacts.macs
operations = OpFacts.operations
moves = OpFacts.moves
reads_part = OpFacts.reads_part


def work_of(call: Call, results: Iterable[TensorSpec]) -> Work:
    """The work of one call with plain sizes."""
    made = tuple(results)
    record = record_of(call.op)
    formula = record.macs
    if formula is not None:
        count = int(formula(made, *call.args, **call.kwargs)) * (4 if made and made[0].is_complex else 1)
        for spec in call.inputs:
            if spec.sparse is not None:  # only stored elements are multiplied
                count = count * count_values(spec) // max(1, spec.numel)
        return Work(PRODUCTS, count, 0, _bytes_moved(call, made))
    is_move = record.moves
    if call.op.is_view or record.changes_metadata or not (record.is_mutable or made or is_move):
        return Work(VIEWS)
    if is_move is not None or (record.is_random and not call.inputs):
        return Work(MOVES, 0, 0, 0 if is_move is False else _bytes_moved(call, made))
    cost = record.operations
    if cost is None and _is_elementwise(call.op):
        cost = 1
    if cost is not None:
        return Work(ELEMENTWISE, 0, cost * _most_elements(call, made), _bytes_moved(call, made))
    return Work(UNKNOWN, 0, 0, _bytes_moved(call, made))


def _is_elementwise(op: OpOverload) -> bool:
    record = record_of(op)
    if record.is_pointwise or torch.Tag.reduction in op.tags or record.packet.startswith("_foreach_"):
        return True
    return record.packet.endswith("_") and _has_pointwise_variant(op)


def _has_pointwise_variant(op: OpOverload) -> bool:
    family = getattr(getattr(torch.ops, op.namespace), record_of(op).packet.removesuffix("_"), None)
    return family is not None and any(
        record_of(getattr(family, overload)).is_pointwise for overload in family.overloads()
    )


def _most_elements(call: Call, made: Results) -> int:
    """The number of elements of the largest operand; a list of tensors counts as one operand, and so do the results."""
    operands = [flat(TensorSpec, (value,), {}) for value in (*call.args, *call.kwargs.values())]
    return max((sum(map(_count_elements, operand)) for operand in (*operands, made)), default=0)


def _count_elements(spec: TensorSpec) -> int:
    return spec.numel if spec.sparse is None else count_values(spec)


def _bytes_moved(call: Call, made: Results) -> int:
    written = sum(spec.numel * spec.itemsize if spec.sparse is None else count_bytes(spec) for spec in made)
    read = call.inputs
    if record_of(call.op).reads_part:
        most = max((spec.numel for spec in made), default=0)
        return 2 * written + sum(spec.numel * spec.itemsize for spec in read if spec.numel <= most)
    return written + sum(map(bytes_stored, read))


def bytes_stored(spec: TensorSpec) -> int:
    """Expanded dimensions are read once; sparse tensors, their stored elements."""
    if spec.sparse is not None:
        return count_bytes(spec)
    sizes = zip(spec.numbers.shape, spec.numbers.stride, strict=True)
    return spec.itemsize * prod(size for size, step in sizes if step != 0 or size == 0)


# --- products of matrices and vectors


@macs("mm", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_sparse_mm", "bmm", "matmul", "_weight_int8pack_mm")
def count_product(made: Results, a: TensorSpec, b: TensorSpec, *rest: object, **settings: object) -> int:
    """Each element of the result is a row of the first times a column of the second."""
    return made[0].numel * a.shape[-1]


@macs("addmm", "baddbmm", "_addmm_activation", "addmv")
def count_product_with_bias(
    made: Results, bias: TensorSpec, a: TensorSpec, *rest: object, **settings: object
) -> int:
    return made[0].numel * a.shape[-1]


@macs("addbmm")
def count_sum_of_products(
    made: Results, bias: TensorSpec, a: TensorSpec, *rest: object, **settings: object
) -> int:
    return made[0].numel * a.shape[-1] * a.shape[0]


@macs("mv", "dot", "vdot")
def count_vector_product(made: Results, a: TensorSpec, *rest: object, **settings: object) -> int:
    return a.numel


@macs("linear", "mkldnn_linear", "_weight_int4pack_mm")
def count_linear(made: Results, x: TensorSpec, weight: TensorSpec, *rest: object, **settings: object) -> int:
    return made[0].numel * x.shape[-1]


@macs("_grouped_mm", "_scaled_grouped_mm", "transformers::grouped_mm_fallback")
def count_grouped(made: Results, a: TensorSpec, b: TensorSpec, *rest: object, **settings: object) -> int:
    """Rows (or columns of the contraction) belong to one group each, unless both operands are batches."""
    batch = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return batch * a.shape[-2] * a.shape[-1] * b.shape[-1]


@macs("_trilinear")
def count_trilinear(
    made: Results, a: TensorSpec, b: TensorSpec, c: TensorSpec, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], *rest: object, **settings: object,
) -> int:  # fmt: skip
    """Every element of the product of all three, which is then summed."""
    shapes = []
    for spec, expanded in ((a, expand1), (b, expand2), (c, expand3)):
        shape = list(spec.shape)
        for dim in sorted(expanded):
            shape.insert(dim, 1)
        shapes.append(shape)
    return prod(max(sizes) for sizes in zip(*shapes, strict=True))


@macs("_cdist_forward", "_euclidean_dist")
def count_distances(made: Results, a: TensorSpec, *rest: object, **settings: object) -> int:
    return made[0].numel * a.shape[-1]


# --- convolutions


@macs("convolution", "_convolution", "convolution_overrideable")
def count_convolution(
    made: Results, x: TensorSpec, weight: TensorSpec, bias: object, stride: object, padding: object, dilation: object,
    transposed: bool, *rest: object, **settings: object,
) -> int:  # fmt: skip
    """A window of the weight for each element of the result; transposed, for each element of the input."""
    return (x if transposed else made[0]).numel * prod(weight.shape[1:])


@macs("conv1d", "conv2d", "conv3d", "mkldnn_convolution", "cudnn_convolution", "_conv_depthwise2d", "conv_depthwise3d",
      "slow_conv3d", "slow_conv_dilated2d", "slow_conv_dilated3d", "thnn_conv2d", "_slow_conv2d_forward",
      "cudnn_convolution_relu", "cudnn_convolution_add_relu", "miopen_convolution")  # fmt: skip
def count_plain_convolution(
    made: Results, x: TensorSpec, weight: TensorSpec, *rest: object, **settings: object
) -> int:
    return made[0].numel * prod(weight.shape[1:])


@macs("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "cudnn_convolution_transpose", "slow_conv_transpose2d",
      "slow_conv_transpose3d")  # fmt: skip
def count_transposed_convolution(
    made: Results, x: TensorSpec, weight: TensorSpec, *rest: object, **settings: object
) -> int:
    return x.numel * prod(weight.shape[1:])


@macs("convolution_backward", "convolution_backward_overrideable")
def count_convolution_backward(
    made: Results, grad: TensorSpec, x: TensorSpec, weight: TensorSpec, bias_sizes: object, stride: object, padding: object,
    dilation: object, transposed: bool, output_padding: object, groups: object, output_mask: Sequence[bool], **settings: Any,
) -> int:  # fmt: skip
    """As much as the forward for the gradient of the input, and again for that of the weight."""
    forward = (x if transposed else grad).numel * prod(weight.shape[1:])
    return (bool(output_mask[0]) + bool(output_mask[1])) * forward


# --- attention


def _count_scores(query: TensorSpec, key: TensorSpec) -> int:
    """(..., heads, length, width): the number of heads is that of the query; several of them share grouped keys."""
    return query.numel // query.shape[-1] * key.shape[-2] if query.shape[-1] else 0


@macs(
    "scaled_dot_product_attention", "_scaled_dot_product_attention_math", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "understudy::flex_attention",
)  # fmt: skip
def count_attention(
    made: Results, query: TensorSpec, key: TensorSpec, value: TensorSpec, *rest: object, **settings: object
) -> int:
    return _count_scores(query, key) * (query.shape[-1] + value.shape[-1])


@macs(
    "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward", "understudy::flex_attention_backward",
)  # fmt: skip
def count_attention_backward(
    made: Results,
    grad: TensorSpec,
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    *rest: object,
    **settings: object,
) -> int:
    """The scores again, then the gradients of query and key (of their width), of weights and value (of its width)."""
    return _count_scores(query, key) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _count_scores_of_rows(query: TensorSpec, key: TensorSpec, offsets: TensorSpec | None, max_k: Any) -> int:
    """(batch, length, heads, width); with offsets all sequences lie in one, each of them at most `max_k` long."""
    rows = query.numel // query.shape[-1] if query.shape[-1] else 0
    return rows * (key.shape[-3] if offsets is None else max_k)


@macs("_flash_attention_forward")
def count_flash_forward(
    made: Results, query: TensorSpec, key: TensorSpec, value: TensorSpec, cum_seq_q: object, cum_seq_k: Any, max_q: object,
    max_k: object, *rest: object, **settings: object,
) -> int:  # fmt: skip
    return _count_scores_of_rows(query, key, cum_seq_k, max_k) * (query.shape[-1] + value.shape[-1])


@macs("_efficient_attention_forward")
def count_efficient_forward(
    made: Results, query: TensorSpec, key: TensorSpec, value: TensorSpec, bias: object, cu_seqlens_q: Any, cu_seqlens_k: Any,
    max_seqlen_q: object, max_seqlen_k: object, *rest: object, **settings: Any,
) -> int:  # fmt: skip
    return _count_scores_of_rows(query, key, cu_seqlens_k, max_seqlen_k) * (query.shape[-1] + value.shape[-1])


@macs("_flash_attention_backward")
def count_flash_backward(
    made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, out: object, logsumexp: object,
    cum_seq_q: object, cum_seq_k: Any, max_q: object, max_k: object, *rest: Any, **settings: Any,
) -> int:  # fmt: skip
    return _count_scores_of_rows(query, key, cum_seq_k, max_k) * (3 * query.shape[-1] + 2 * value.shape[-1])


@macs("_efficient_attention_backward")
def count_efficient_backward(
    made: Results, grad: TensorSpec, query: TensorSpec, key: TensorSpec, value: TensorSpec, bias: object, out: object,
    cu_seqlens_q: object, cu_seqlens_k: Any, max_seqlen_q: object, max_seqlen_k: object, *rest: Any, **settings: Any,
) -> int:  # fmt: skip
    return _count_scores_of_rows(query, key, cu_seqlens_k, max_seqlen_k) * (
        3 * query.shape[-1] + 2 * value.shape[-1]
    )


@macs("_native_multi_head_attention")
def count_multi_head(
    made: Results,
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    embed_dim: int,
    *rest: object,
    **settings: object,
) -> int:
    batch, rows, _ = query.shape
    projections = 4 * embed_dim * embed_dim * batch * rows
    return projections + 2 * batch * rows * key.shape[1] * embed_dim


@macs("_transformer_encoder_layer_fwd")
def count_encoder_layer(
    made: Results, src: TensorSpec, embed_dim: int, num_heads: int, *rest: object, **settings: object
) -> int:
    batch, rows, _ = src.shape
    weights = [spec for spec in flat(TensorSpec, rest, settings) if spec.ndim == 2]
    return batch * rows * sum(spec.numel for spec in weights[:4]) + 2 * batch * rows * rows * embed_dim


# --- recurrent layers


@macs("mkldnn_rnn_layer")
def count_onednn_layer(
    made: Results, x: TensorSpec, weight0: TensorSpec, weight1: TensorSpec, *rest: object, **settings: object
) -> int:
    return x.shape[0] * x.shape[1] * (weight0.numel + weight1.numel)


@macs("mkldnn_rnn_layer_backward")
def count_onednn_layer_backward(
    made: Results, x: TensorSpec, weight1: TensorSpec, weight2: TensorSpec, *rest: object, **settings: object
) -> int:
    return 2 * x.shape[0] * x.shape[1] * (weight1.numel + weight2.numel)


def _count_recurrent(x: TensorSpec, weights: Sequence[TensorSpec]) -> int:
    """Every row of the input (packed or padded) meets every matrix of every layer and direction."""
    rows = x.numel // x.shape[-1] if x.shape[-1] else 0
    return rows * sum(weight.numel for weight in weights if weight.ndim == 2)


@macs("_cudnn_rnn", "miopen_rnn")
def count_recurrent(
    made: Results, x: TensorSpec, weight: Sequence[TensorSpec], *rest: object, **settings: object
) -> int:
    return _count_recurrent(x, weight)


@macs("_cudnn_rnn_backward", "miopen_rnn_backward")
def count_recurrent_backward(
    made: Results, x: TensorSpec, weight: Sequence[TensorSpec], *rest: object, **settings: object
) -> int:
    return 2 * _count_recurrent(x, weight)


# --- operators without products

_OPERATIONS = {
    1: """_is_all_true _is_any_true _local_scalar_dense all any
        argmax argmin avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward
        avg_pool3d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward max_pool2d_with_indices
        max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward mkldnn_max_pool2d
        bincount cummax cummin cumprod cumsum logcumsumexp equal histc is_same_size isin max min mean sum prod norm
        native_dropout native_dropout_backward nll_loss_backward nll_loss_forward nll_loss2d_forward nll_loss2d_backward
        nansum count_nonzero median nanmedian kthvalue mode sort topk msort unique_consecutive _unique2 unique_dim
        nonzero searchsorted bucketize embedding_dense_backward index_add index_put _index_put_impl index_reduce
        scatter_add scatter_reduce segment_reduce _segment_reduce_backward _embedding_bag
        _embedding_bag_dense_backward _embedding_bag_forward_only upsample_nearest2d_backward threshold_backward
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale trace triu_indices renorm polar complex
        l1_loss mse_loss huber_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_backward
        channel_shuffle cross linalg_cross linalg_vector_norm dist aminmax std var std_mean var_mean
        reflection_pad1d_backward reflection_pad2d_backward replication_pad2d_backward logit_backward
        _masked_scale masked_scatter_backward put histogramdd_bin_edges histogram upsample_nearest1d_backward
        upsample_nearest3d_backward gelu_backward silu_backward _add_relu _fused_dropout _prelu_kernel _unique
        adaptive_max_pool3d adaptive_max_pool3d_backward addr binary_cross_entropy_with_logits elu_backward floor_divide
        fractional_max_pool2d fractional_max_pool3d glu glu_backward hardsigmoid_backward hardswish hardswish_backward
        hardtanh_backward huber_loss_backward leaky_relu_backward log_sigmoid_backward log_sigmoid_forward
        max_unpool2d max_unpool3d mse_loss_backward multi_margin_loss multilabel_margin_loss_forward nonzero_static
        reflection_pad3d_backward replication_pad1d_backward replication_pad3d_backward rrelu_with_noise
        rrelu_with_noise_backward rsub smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward
        softplus_backward _embedding_bag_per_sample_weights_backward _unsafe_index_put
        _unsafe_masked_index_put_accumulate _upsample_nearest_exact2d_backward _weight_norm_interface
        _weight_norm_interface_backward affine_grid_generator poisson _standard_gamma""",
    2: """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
        _native_batch_norm_legit_functional _batch_norm_with_update_functional cudnn_batch_norm
        _batch_norm_with_update _batch_norm_no_update batch_norm_elemt miopen_batch_norm
        _batch_norm_impl_index logsumexp _fused_sgd _prelu_kernel_backward""",
    5: """native_layer_norm native_group_norm _fused_rms_norm rms_norm layer_norm _softmax _log_softmax softmax
        log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data masked_softmax _masked_softmax
        upsample_bilinear2d upsample_bilinear2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
        upsample_linear1d upsample_linear1d_backward grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d
        native_batch_norm_backward cudnn_batch_norm_backward miopen_batch_norm_backward batch_norm_backward
        _ctc_loss _fused_adagrad _thnn_fused_lstm_cell _thnn_fused_gru_cell""",
    8: """native_layer_norm_backward native_group_norm_backward _fused_rms_norm_backward
        upsample_trilinear3d upsample_trilinear3d_backward _ctc_loss_backward _thnn_fused_lstm_cell_backward_impl
        _thnn_fused_lstm_cell_backward _thnn_fused_gru_cell_backward""",
    12: "_fused_adam _fused_adamw",
    16: """upsample_bicubic2d upsample_bicubic2d_backward _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
        grid_sampler_2d_bicubic""",
}
"""Operations for each element of the largest operand, where they are not one of a pointwise operator or reduction."""
for _cost, _names in _OPERATIONS.items():
    operations.register(_cost, *_names.split())

_MOVES = """
    _copy_from _copy_from_and_resize _pin_memory _reshape_alias_copy _reshape_copy _to_copy alias_copy arange
    as_strided_copy as_strided_scatter block_diag cat clone col2im constant_pad_nd contiguous copy detach_copy
    diag_embed diagonal_copy diagonal_scatter diagonal_backward embedding eye expand_copy fill flip full full_like
    gather im2col index index_copy index_fill index_select kaiser_window lift_fresh_copy linspace logspace
    masked_fill masked_scatter masked_select narrow_copy new_full new_ones new_zeros one_hot ones ones_like
    permute_copy pixel_shuffle pixel_unshuffle repeat repeat_interleave reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d roll rot90 scalar_tensor scatter
    select_backward select_copy select_scatter slice_backward slice_copy slice_scatter split_copy
    split_with_sizes_copy squeeze_copy stack t_copy take transpose_copy tril tril_indices triu unbind_copy
    unfold_backward unfold_copy unsqueeze_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d
    view_as_complex_copy view_as_real_copy view_copy zero zeros zeros_like _foreach_copy _foreach_zero _chunk_cat
    _nested_tensor_from_mask rand randn randint randperm rand_like randn_like randint_like normal uniform bernoulli
    exponential geometric log_normal cauchy random multinomial value_selecting_reduction_backward item is_nonzero
    _assert_async _functional_assert_async _unsafe_index _unsafe_masked_index _to_dense hann_window hamming_window
    bartlett_window blackman_window _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _pack_padded_sequence _pad_packed_sequence _cudnn_init_dropout_state _cudnn_rnn_flatten_weight
""".split()
moves.mark(*(name for name in _MOVES if name not in operations))
_MOVES_NOTHING = """
    _unsafe_view empty empty_like empty_permuted empty_strided lift lift_fresh new_empty new_empty_strided resize
    resize_as set split_with_sizes _efficientzerotensor resize_output record_stream is_pinned
    _has_same_storage_numel _version _resize_output unsafe_split unsafe_split_with_sizes _assert_scalar
    _assert_tensor_metadata _print
""".split()
moves.register(False, *_MOVES_NOTHING)
reads_part.mark(
    "embedding", "index", "index_select", "gather", "take", "masked_select", "embedding_dense_backward"
)
