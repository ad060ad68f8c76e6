"""Scratch memory of CUDA kernels: figures of traces of an H100, and rules that can be counted by hand."""

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


def spec(*shape: int, stride: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape, stride, dtype=dtype, device=CUDA)


def scratch(op: torch._ops.OpOverload, *args: object, made: TensorSpec | tuple[TensorSpec, ...]) -> Scratch:
    results = made if isinstance(made, tuple) else (made,)
    return scratch_of(Call.of(op, args, {}), results, H100)


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
    found = scratch(aten._scaled_dot_product_flash_attention_backward.default, q, q, k, k, made=(q, k, k))
    lengths = 1024
    grouped = 2 * 1000 * 8 * 64 * 2
    assert found.sizes == (4 * 2 * 8 * lengths, 4 * 2 * lengths * 8 * 64, grouped, grouped)


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
    found = scratch(aten.index_put_.default, spec(10_000, 2560), [index], values, True, made=spec(10_000, 2560))
    assert found.sizes[0] == 5_242_880 and not found.is_exact
    assert scratch(aten.index_put_.default, spec(10, 4), [index], values, False, made=spec(10, 4)) == NO_SCRATCH
