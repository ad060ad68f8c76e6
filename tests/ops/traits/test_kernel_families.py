"""Kernels of calls: their families, sizes, FLOPs and bytes, counted by hand."""

from __future__ import annotations

import pytest
import torch

from tests.ops.traits.kernel_calls import convolution, kernels, product, spec
from understudy.ops.traits import kernel_families as families

aten = torch.ops.aten


def test_a_product_has_its_sizes() -> None:
    found = product(128, 256, 512)
    assert found.family == families.MATMUL
    assert found.sizes == (1, 128, 256, 512)
    assert found.flops == 2 * 128 * 256 * 512
    assert found.bytes == 2 * (128 * 512 + 512 * 256 + 128 * 256)


def test_an_expanded_operand_is_read_once() -> None:
    a, b = spec(64, 7, 32), spec(64, 32, 48, stride=(0, 48, 1))
    (found,) = kernels(aten.bmm.default, a, b, made=spec(64, 7, 48))
    assert found.bytes == 2 * (64 * 7 * 32 + 32 * 48 + 64 * 7 * 48)


def test_views_run_no_kernel() -> None:
    assert kernels(aten.view.default, spec(4, 4), [16], made=spec(16)) == []


def test_a_backward_convolution_is_two_products() -> None:
    x, weight = spec(8, 16, 32, 32), spec(16, 16, 3, 3)
    args = (x, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    found = kernels(aten.convolution_backward.default, *args, made=(x, weight))
    assert [kernel.part for kernel in found] == [families.INPUT_GRADIENT, families.WEIGHT_GRADIENT]
    assert {kernel.flops for kernel in found} == {2 * x.numel * 16 * 9}


def test_grouped_and_depthwise_convolutions_are_families_of_their_own() -> None:
    names = [convolution(groups).family for groups in (1, 32, 256)]
    assert names == [families.CONVOLUTION, families.GROUPED, families.DEPTHWISE]


def test_a_copy_to_another_layout_is_a_transpose() -> None:
    image = spec(8, 16, 32, 32)
    turned = spec(8, 16, 32, 32, stride=(16 * 1024, 1, 512, 16))
    assert kernels(aten.clone.default, image, made=image)[0].family == families.COPY
    assert kernels(aten.clone.default, image, made=turned)[0].family == families.TRANSPOSE


@pytest.mark.parametrize("waits", [True, False])
def test_a_copy_to_the_host_waits_unless_it_must_not(waits: bool) -> None:
    host = spec(1024, device=torch.device("cpu"))
    (found,) = kernels(
        aten._to_copy.default, spec(1024), device=torch.device("cpu"), non_blocking=not waits, made=host
    )
    assert (found.family, found.bytes, found.is_blocking) == (families.TO_HOST, 2048, waits)


def test_item_waits_for_the_card() -> None:
    (found,) = kernels(aten._local_scalar_dense.default, spec(dtype=torch.float32), made=())
    assert found.family == families.READ and found.is_blocking


def test_indices_do_not_wait_and_masks_do() -> None:
    table, rows = spec(100, 8), spec(5, dtype=torch.int64)
    assert not kernels(aten.index.Tensor, table, [rows], made=spec(5, 8))[0].is_blocking
    mask = spec(100, dtype=torch.bool)
    assert kernels(aten.index.Tensor, table, [mask], made=spec(50, 8))[0].is_blocking
