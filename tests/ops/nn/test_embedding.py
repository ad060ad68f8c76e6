"""Embeddings against the real operators."""

from __future__ import annotations

import torch

from tests.ops.inputs import all_layouts, filled, layouts
from tests.oracle.real import check_rule

aten = torch.ops.aten


def test_embedding() -> None:
    for weight in [
        *layouts(5, 3),
        *layouts(5),
        *layouts(5, 2, 2),
        *layouts(5, 3, dtype=torch.bfloat16),
        *layouts(5, 0),
    ]:
        for indices in all_layouts(torch.int64, [(), (0,), (4,), (2, 3), (2, 1, 3)]):
            for dtype in (torch.int64, torch.int32, torch.int16, torch.float32):
                check_rule(aten.embedding.default, weight, indices.to(dtype))
    check_rule(aten.embedding.default, filled((5, 3)), torch.zeros(2, dtype=torch.int64), 1, True)


def test_embedding_backward() -> None:
    for grad in [*layouts(2, 3, 4), *layouts(2, 4, 4), *layouts(6, 4), *layouts(24)]:
        for dtype in (torch.int64, torch.int32, torch.float32):
            check_rule(
                aten.embedding_dense_backward.default, grad, torch.zeros(2, 3, dtype=dtype), 7, -1, False
            )
    check_rule(aten.embedding_renorm_.default, filled((5, 3)), torch.zeros(2, dtype=torch.int64), 1.0, 2.0)


def test_bags() -> None:
    indices = torch.zeros(6, dtype=torch.int64)
    offsets = torch.tensor([0, 2, 4])
    for weight in [
        *layouts(5, 3),
        *layouts(5, 3, dtype=torch.float64),
        *layouts(5, 3, dtype=torch.bfloat16),
        *layouts(5),
    ]:
        for mode in (0, 1, 2):
            for last in (False, True):
                for padding in (-1, 1):
                    for op in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
                        check_rule(op, weight, indices, offsets, False, mode, False, None, last, padding)
            for index_dtype in (torch.int32, torch.int64, torch.float32):
                for offset_dtype in (torch.int32, torch.int64):
                    check_rule(
                        aten._embedding_bag.default,
                        weight,
                        indices.to(index_dtype),
                        offsets.to(offset_dtype),
                        False,
                        mode,
                    )
            for scale in (
                filled((6,), weight.dtype),
                filled((12,), weight.dtype)[::2],
                filled((5,), weight.dtype),
                filled((6,), torch.int64),
            ):
                check_rule(aten._embedding_bag.default, weight, indices, offsets, False, mode, False, scale)


def test_gradients_of_bags() -> None:
    weight, indices, offsets = filled((5, 3)), torch.zeros(6, dtype=torch.int64), torch.tensor([0, 2, 4])
    for mode in (0, 1, 2):
        _, bags, sizes, largest = aten._embedding_bag(
            weight, indices, offsets, False, mode, False, None, False, 1
        )
        for grad in layouts(3, 3):
            rest = (7, False, mode, None)
            check_rule(aten._embedding_bag_dense_backward.default, grad, indices, bags, sizes, largest, *rest)
            check_rule(
                aten._embedding_bag_backward.default,
                grad,
                indices,
                offsets,
                bags,
                sizes,
                largest,
                7,
                False,
                mode,
                False,
                None,
            )
            if mode == 0:
                check_rule(
                    aten._embedding_bag_per_sample_weights_backward.default,
                    grad,
                    weight,
                    indices,
                    offsets,
                    bags,
                    0,
                )
