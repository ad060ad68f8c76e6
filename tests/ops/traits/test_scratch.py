"""Scratch memory of CUDA kernels: figures of traces of an H100, and rules that can be counted by hand.

RECORDED are the requests of torch 2.13.0+cu130 itself, besides those for results: its host code ran with the figures of an
H100 on a CUDA runtime that allocates addresses and launches nothing. Negative sizes are blocks that are given back before
others are taken.
"""

from __future__ import annotations

import pytest
import torch

from understudy.ops.traits.scratch import NO_SCRATCH, Scratch, scratch_of
from understudy.spec import TensorSpec
from understudy.spec.call import Call
from understudy.spec.device_facts import DeviceFacts

aten = torch.ops.aten
H100 = DeviceFacts("cuda", (9, 0), multiprocessors=132, threads_per_multiprocessor=2048)
CUDA = torch.device("cuda", 0)


def spec(
    *shape: int, stride: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
) -> TensorSpec:
    return TensorSpec(shape, stride, dtype=dtype, device=CUDA)


def scratch(
    op: torch._ops.OpOverload, *args: object, made: TensorSpec | tuple[TensorSpec, ...], **kwargs: object
) -> Scratch:
    results = made if isinstance(made, tuple) else (made,)
    return scratch_of(Call.of(op, args, kwargs), results, H100)


def test_max_over_a_strided_dimension_as_in_the_trace() -> None:
    x = spec(512, 10_000, stride=(1, 512))
    found = scratch(aten.max.dim, x, 1, made=(spec(512), spec(512, dtype=torch.int64)))
    assert found.sizes[0] == 16 * 512 * 157 * 32 * 4 == 164_626_432
    assert found.sizes[1] == 4 * 4  # a semaphore for each of 512 / 4 / 32 blocks
    assert found.is_exact


def test_sum_over_a_strided_dimension_as_in_the_trace() -> None:
    x = spec(4, 128, 2560, stride=(128, 1, 512))
    found = scratch(aten.sum.dim_IntList, x, [-1], True, made=spec(4, 128, 1))
    assert found.sizes[0] == 4 * 512 * 40 * 128 == 10_485_760


@pytest.mark.parametrize("rows", [512, 2048])
def test_short_rows_need_nothing(rows: int) -> None:
    assert scratch(aten.mean.dim, spec(rows, 2560), [-1], True, made=spec(rows, 1)) == NO_SCRATCH


def test_a_sum_of_everything() -> None:
    """2^24 elements: a block of 512 threads takes 4 at once, 2^24 / 512 = 32768 values for a thread; one output: 528
    blocks fill the card, 2048 would be needed for 16 values each, so 528."""
    found = scratch(aten.sum.default, spec(4096, 4096), made=spec())
    assert found.sizes == (4 * 1 * 528, 4)


def test_awkward_operands_of_products_are_copied() -> None:
    expanded = spec(4, 64, stride=(0, 0))
    assert scratch(aten.mm.default, expanded, spec(64, 8), made=spec(4, 8)).sizes == (4 * 64 * 4,)
    assert scratch(aten.mm.default, spec(4, 64, stride=(1, 4)), spec(64, 8), made=spec(4, 8)).sizes == ()


def test_flash_backward() -> None:
    q = spec(2, 8, 1000, 64, dtype=torch.bfloat16)
    k = spec(2, 2, 1000, 64, dtype=torch.bfloat16)
    by_rows = spec(2, 8, 1000, 64, stride=(512_000, 64, 512, 1), dtype=torch.bfloat16)
    op = aten._scaled_dot_product_flash_attention_backward.default
    lengths = 1024
    grouped = 2 * 1000 * 8 * 64 * 2
    needed = (4 * 2 * 8 * lengths, 4 * 2 * lengths * 8 * 64, grouped, grouped)
    assert scratch(op, by_rows, q, k, k, by_rows, made=(q, k, k)).sizes == needed
    assert scratch(op, q, q, k, k, q, made=(q, k, k)).sizes == (
        grouped,
        grouped,
        *needed,
    )  # copies of gradient and result


def test_foreach_norm_has_a_partial_for_each_chunk() -> None:
    tensors = [spec(65_536 * 3 + 1), spec(10)]
    assert scratch(aten._foreach_norm.Scalar, tensors, made=(spec(), spec())).sizes == (2 * 4 * 4,)


def test_cudnn_is_a_bounded_unknown() -> None:
    x, weight, y = spec(8, 3, 32, 32), spec(16, 3, 3, 3), spec(8, 16, 32, 32)
    found = scratch(
        aten.convolution.default, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, made=y
    )
    assert not found.is_exact and found.sizes == ()
    assert found.bound == 4 * (8 * 3 * 1024 + 16 * 27 + 8 * 16 * 1024)


def test_index_put_that_accumulates_copies_values_in_another_order() -> None:
    values = spec(512, 2560, stride=(1, 512))
    index = spec(512, dtype=torch.int64)
    found = scratch(
        aten.index_put_.default, spec(10_000, 2560), [index], values, True, made=spec(10_000, 2560)
    )
    assert found.sizes == (4096, 4096, -4096, 5_242_880, 4096, 4096, 4096, 1)
    assert (
        scratch(aten.index_put_.default, spec(10, 4), [index], values, False, made=spec(10, 4)) == NO_SCRATCH
    )


def test_sum_of_other_dtypes_is_of_a_copy() -> None:
    """A sum of bools is int64: 8 bytes for each, then 528 blocks of 512 threads."""
    found = scratch(aten.sum.default, spec(4096, 4096, dtype=torch.bool), made=spec(dtype=torch.int64))
    assert found.sizes == (8 * 4096 * 4096, 8 * 528, 4)
    half = spec(4096, 4096, dtype=torch.bfloat16)
    assert scratch(aten.sum.default, half, made=spec()).sizes == (4 * 528, 4)


def test_sizes_of_partial_results() -> None:
    """2560 columns of 1024 rows: 4 columns at once, 32 x 4 threads, 1024 / 4 = 256 values each, in 256 / 16 blocks."""
    x = spec(1024, 2560)
    places = 2560 * 16 * 32 * 4
    assert scratch(aten.sum.dim_IntList, x, [0], made=spec(2560)).sizes == (4 * places, 4 * 20)
    assert scratch(aten.amax.default, x, [0], made=spec(2560)).sizes == (4 * places, 4 * 20)
    assert scratch(aten.aminmax.default, x, dim=0, made=(spec(2560), spec(2560))).sizes == (
        8 * places,
        4 * 20,
    )
    assert scratch(aten.var.correction, x, [0], made=spec(2560)).sizes == (16 * places, 4 * 20)
    wide = spec(1024, 2560, dtype=torch.float64)
    made = spec(2560, dtype=torch.float64)
    assert scratch(aten.var.correction, wide, [0], made=made).sizes == (32 * places, 4 * 20)
    bools = spec(1024, 2560, dtype=torch.bool)
    assert scratch(aten.any.dim, bools, 0, made=spec(2560, dtype=torch.bool)).sizes == (places, 4 * 20)


def test_reduction_of_expanded_dimensions() -> None:
    """What is expanded is not sorted: all that is reduced comes before what stays."""
    x = spec(1024, 2560, stride=(0, 1))
    assert (
        scratch(aten.sum.dim_IntList, x, [0], made=spec(2560)).sizes == ()
    )  # its stride is the smallest: along rows


def test_softmax_backward_has_a_product_of_its_size() -> None:
    y = spec(4, 12, 512, 512)
    assert scratch(aten._softmax_backward_data.default, y, y, -1, torch.float32, made=y).sizes == (
        4 * 4 * 12 * 512 * 512,
    )
    assert scratch(aten._log_softmax_backward_data.default, y, y, -1, torch.float32, made=y) == NO_SCRATCH
    turned = spec(512, 512, stride=(1, 512))
    assert scratch(aten._softmax.default, turned, -1, False, made=spec(512, 512)).sizes == (4 * 512 * 512,)


def test_layer_norm_backward_of_many_rows() -> None:
    """70,000 rows of 64 columns: 2188 blocks of 32 rows, a row of partial sums for each; few, so one block sums them up."""
    x, w, statistics = spec(70_000, 64), spec(64), spec(70_000, 1)
    args = (x, x, [64], statistics, statistics, w, w, [True, True, True])
    found = scratch(aten.native_layer_norm_backward.default, *args, made=(x, w, w))
    staging = (4 * 64 * 18 * 64, 4)
    sums = (256, *staging, -staging[1], -staging[0], -256)
    assert found.sizes == (4 * 2188 * 64, 4 * 2188 * 64, *sums, *sums) and found.is_exact
    few = spec(64_000, 64)
    assert (
        scratch(aten.native_layer_norm_backward.default, few, few, *args[2:], made=(few, w, w)) == NO_SCRATCH
    )


def test_embedding_backward_of_many_indices() -> None:
    """8192 indices into 50,257 rows of 768: at most 8192 rows, and 819 more for those that are summed in tens."""
    grad, indices = spec(8, 1024, 768), spec(8, 1024, dtype=torch.int64)
    made = spec(50_257, 768)
    found = scratch(aten.embedding_dense_backward.default, grad, indices, 50_257, -1, False, made=made)
    n, partial = 8 * 8192, 8192 + 819
    sort, starts = (n, 137_727, -137_727, -n), (n, 8, n, 1279, -1279, -n)
    assert (
        found.sizes == (n, n, *sort, *starts, n, n, 1279, -1279, 8, 8 * partial, 4 * partial * 768)
        and found.is_exact
    )
    assert found.first == 6  # the gradient itself is made when the indices are sorted
    few = scratch(aten.embedding_dense_backward.default, spec(2, 16, 768), spec(2, 16, dtype=torch.int64), 9, -1, False,
                  made=spec(9, 768))  # fmt: skip
    assert few == NO_SCRATCH


@pytest.mark.parametrize(("dtype", "width", "rows", "columns"), [
    (torch.float32, 64, 64, 64), (torch.bfloat16, 64, 64, 64), (torch.bfloat16, 128, 128, 128),
])  # fmt: skip
def test_efficient_backward_has_tiles_of_the_gradient(
    dtype: torch.dtype, width: int, rows: int, columns: int
) -> None:
    """A gradient that is laid out by heads, not by rows, is copied."""
    q = spec(2, 12, 300, width, dtype=dtype)
    by_rows = spec(2, 12, 300, width, stride=(12 * 300 * width, width, 12 * width, 1), dtype=dtype)
    found, with_copy = (scratch(
        aten._scaled_dot_product_efficient_attention_backward.default, grad, q, q, q, None, q, q, q, q, 0.0,
        [True, True, True, False], made=(q, q, q),
    ) for grad in (by_rows, q))  # fmt: skip
    tiles = -(-300 // rows) * -(-width // columns)
    delta = 4 * 2 * 12 * 300
    product = () if dtype is torch.bfloat16 else (delta * width, delta, delta, -delta, -delta * width)
    assert found.sizes == (*(product or (delta,)), 2 * 12 * tiles * (16 + 4 * rows * columns))
    assert with_copy.sizes == (2 * 12 * 300 * width * dtype.itemsize, *found.sizes)
    assert found.is_exact == (width <= 64)


def test_operators_that_are_written_in_terms_of_others() -> None:
    x = spec(512, 10_000)
    rows = 4 * 512
    assert scratch(aten.logsumexp.default, x, [-1], made=spec(512)).sizes == (
        rows,
        rows,
        512,
        -512,
        -rows,
        rows * 10_000,
    )
    staging = (4 * 528, 4)
    assert scratch(aten.mse_loss.default, x, x, made=spec()).sizes == (4 * 512 * 10_000, *staging)
    assert scratch(aten.mse_loss.default, x, x, 0, made=x) == NO_SCRATCH
    assert scratch(aten.binary_cross_entropy_with_logits.default, x, x, made=spec()).sizes == (
        *2 * (4 * 512 * 10_000,), *staging,
    )  # fmt: skip


def test_indices_of_two_layouts_are_copied() -> None:
    down, along = spec(64, 1, dtype=torch.int64), spec(1, 32, dtype=torch.int64)
    assert scratch(aten.index.Tensor, spec(99, 99), [down, along], made=spec(64, 32)).sizes == 2 * (
        8 * 64 * 32,
    )
    assert scratch(aten.index.Tensor, spec(99, 99), [along, along], made=spec(1, 32)) == NO_SCRATCH


def test_contiguous_batches_are_taken_as_they_are() -> None:
    one = spec(8, 1, 1, stride=(1, 5, 5))  # contiguous, whatever the strides of single rows are
    assert scratch(aten.bmm.default, one, one, made=one) == NO_SCRATCH


I64, BF16 = torch.int64, torch.bfloat16
long = spec(500, dtype=I64)


def sorted_of(x: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    return x.like(), x.like(dtype=I64)


RECORDED: dict[str, tuple[torch._ops.OpOverload, tuple[object, ...], tuple[TensorSpec, ...], tuple[int, ...]]] = {
    name: (op, args, made, tuple(map(int, sizes.split())))
    for name, op, args, made, sizes in (
        ("sort of short rows", aten.sort.default, (spec(100, 1000),), sorted_of(spec(100, 1000)), "8000"),
        ("sort of one row", aten.sort.default, (spec(100_000),), sorted_of(spec(100_000)), "800000 1228287 -1228287"),
        ("sort of bfloat16", aten.sort.default, (spec(1_000_000, dtype=BF16),), sorted_of(spec(1_000_000, dtype=BF16)),
         "8000000 10187007 -10187007"),
        ("sort of int64", aten.sort.default, (spec(5000, dtype=I64),), sorted_of(spec(5000, dtype=I64)),
         "40000 99327 -99327"),
        ("sort of uint8", aten.sort.default, (spec(100_000, dtype=torch.uint8),), sorted_of(spec(100_000)),
         "800000 32255 -32255"),
        ("sort of some rows", aten.sort.default, (spec(4, 50_000),), sorted_of(spec(4, 50_000)),
         "1600000 1600000 800000 2447615 -2447615 -800000 38399"),
        ("sort of many rows", aten.sort.default, (spec(1000, 5000),), sorted_of(spec(1000, 5000)), "40000000 60000255"),
        ("sort of very long rows", aten.sort.default, (spec(3, 3_000_000),), sorted_of(spec(3, 3_000_000)),
         "24000000 36581119 -36581119 36581119 -36581119 36581119 -36581119"),
        ("sort of columns", aten.sort.default, (spec(6000, 64), 0), sorted_of(spec(6000, 64)),
         "1536000 1536000 3072000 3072000 3072000 1536000 4690431 -4690431 -1536000 71167"),
        ("topk of long rows", aten.topk.default, (spec(16, 128_256), 50), sorted_of(spec(16, 50)),
         "64 128 128 376832 16384 2944 2944 1279 -1279 -2944 -2944 -16384 -376832 -128 -128 -64"),
        ("topk of many rows", aten.topk.default, (spec(1001, 30_000, dtype=BF16), 50), sorted_of(spec(1001, 50)),
         "2002 8008 8008 1025024 1025024 8008 8008 1279 -1279 -8008 -8008 -1025024 -1025024 -8008 -8008 -2002"),
        ("topk of short rows", aten.topk.default, (spec(8, 19_999), 50), sorted_of(spec(8, 50)), ""),
        ("median of all", aten.median.default, (spec(1000, 1000),), (spec(),),
         "4000000 8000000 8000000 12200191 -12200191"),
        ("median of rows", aten.median.dim, (spec(1000, 1000), 1), sorted_of(spec(1000)), ""),
        ("randperm", aten.randperm.default, (50_000,), (spec(50_000, dtype=I64),), "400000 400000 400000 822271"),
        ("cumsum", aten.cumsum.default, (spec(10_000_000), 0), (spec(10_000_000),), "42495"),
        ("cumsum of int64", aten.cumsum.default, (spec(100_000, dtype=I64), 0), (spec(100_000, dtype=I64),), "2815"),
        ("cumsum of bools", aten.cumsum.default, (spec(100, 1000, dtype=torch.bool), 1), (spec(100, 1000, dtype=I64),),
         "800000"),
        ("indices that are not contiguous", aten.embedding.default, (spec(50, 64), spec(2, 16, stride=(0, 1), dtype=I64)),
         (spec(2, 16, 64),), "256"),
        ("index_put of many", aten._index_put_impl_.default,
         (spec(100, 16), [spec(200_000, dtype=I64)], spec(200_000, 16), True, True), (spec(100, 16),),
         "1600000 1600000 -1600000 1600000 1600000 1600000 47615"),
        ("index_put by two that broadcast", aten._index_put_impl_.default,
         (spec(64, 32, 128), [spec(64, 1, dtype=I64), spec(1, 20, dtype=I64)], spec(64, 20, 128), True, True),
         (spec(64, 32, 128),), "10240 10240 -10240 10240 10240 -10240 -10240 10240 10240 10240 1"),
        ("index_put by two that are apart", aten._index_put_impl_.default,
         (spec(64, 32, 128), [long, None, long], spec(500, 32), True, True), (spec(64, 32, 128),),
         "4000 4000 -4000 4000 4000 -4000 -4000 1048576 4000 4000 4000 1"),
        ("index_put of one value", aten._index_put_impl_.default, (spec(64, 32, 128), [long], spec(1, 32, 128), True, True),
         (spec(64, 32, 128),), "4000 4000 -4000 8192000 4000 4000 4000 1"),
        ("group norm", aten.native_group_norm.default, (spec(4, 64, 32, 32, dtype=BF16), spec(64), spec(64), 4, 64, 1024, 8, 0.),
         (spec(4, 64, 32, 32, dtype=BF16), spec(4, 8), spec(4, 8)), "128 128 1024 1024"),
        ("group norm's backward", aten.native_group_norm_backward.default,
         (spec(4, 64, 32, 32), spec(4, 64, 32, 32), spec(4, 8), spec(4, 8), spec(64), 4, 64, 1024, 8, [True, True, True]),
         (spec(4, 64, 32, 32), spec(64), spec(64)), "1024 1024 128 128 1024"),
        ("layer norm's backward", aten.native_layer_norm_backward.default,
         (spec(70_000, 1024), spec(70_000, 1024), [1024], spec(70_000, 1), spec(70_000, 1), spec(1024), None,
          [True, True, False]), (spec(70_000, 1024), spec(1024)), "4194304 4096 8388608 32 -32 -8388608 -4096"),
        ("a loss that is summed up in place", aten.binary_cross_entropy.default, (spec(1000, 1000), spec(1000, 1000)),
         (spec(),), "4 492 4"),
        ("few rows with many indices", aten.embedding_dense_backward.default,
         (spec(65_536, 768), spec(65_536, dtype=I64), 512, -1, False), (spec(512, 768),),
         "524288 524288 524288 1068543 -1068543 -524288 524288 8 524288 1279 -1279 -524288 4096 4096 1279 -1279 8 "
         "56520 56520"),
        ("attention of one query of grouped heads", aten._scaled_dot_product_flash_attention.default,
         (spec(1, 32, 1, 128, dtype=BF16), spec(1, 8, 4096, 128, dtype=BF16), spec(1, 8, 4096, 128, dtype=BF16)),
         (spec(1, 32, 1, 128, dtype=BF16),), "4096 524288"),
        ("attention of few queries", aten._scaled_dot_product_flash_attention.default,
         tuple(spec(2, 8, 100, 256, dtype=BF16) for _ in "qkv"), (spec(2, 8, 100, 256, dtype=BF16),), "12800 3276800"),
        ("attention of many queries", aten._scaled_dot_product_flash_attention.default,
         tuple(spec(1, 16, 2048, 64, dtype=BF16) for _ in "qkv"), (spec(1, 16, 2048, 64, dtype=BF16),), ""),
        ("attention of wide heads", aten._scaled_dot_product_efficient_attention.default,
         (*(spec(2, 8, 300, 160, dtype=BF16) for _ in "qkv"), None, True), (spec(2, 8, 300, 160, dtype=BF16),), "3072000"),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_as_recorded(name: str) -> None:
    op, args, made, sizes = RECORDED[name]
    assert scratch(op, *args, made=made).sizes == sizes
