"""Sorting, distances and cross products, against the real operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.inputs import all_layouts, filled, layouts
from tests.oracle.real import check_rule
from tests.spec.layouts import SIZES, tensor_of_shape

aten = torch.ops.aten

DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool,
    torch.complex64,
]  # fmt: skip


def test_sorts() -> None:
    for tensor in all_layouts():
        for dim in (0, 1, -1):
            check_rule(aten.sort.default, tensor, dim)
            check_rule(aten.sort.stable, tensor, stable=True, dim=dim)
            check_rule(aten.argsort.default, tensor, dim, True)
            check_rule(aten.argsort.stable, tensor, stable=True, dim=dim)
            for k in (0, 1, 3, -1):
                check_rule(aten.topk.default, tensor, k, dim)
        check_rule(aten.msort.default, tensor)


@settings(max_examples=100, deadline=None)
@given(st.lists(SIZES, max_size=4).flatmap(lambda shape: tensor_of_shape(tuple(shape))))
def test_sort_of_anything(tensor: torch.Tensor) -> None:
    check_rule(aten.sort.default, tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    tensor = filled((4, 3), dtype)
    check_rule(aten.sort.default, tensor)
    check_rule(aten.topk.default, tensor, 1)
    check_rule(aten.linalg_cross.default, tensor, tensor)
    check_rule(aten.renorm.default, tensor, 2, 0, 1.0)
    check_rule(aten.dist.default, tensor, tensor)
    check_rule(aten.dist.default, tensor, filled((4, 3)))
    check_rule(aten._cdist_forward.default, tensor, tensor, 2.0, None)
    check_rule(aten._pdist_forward.default, tensor)


def test_distances() -> None:
    for a in [
        *layouts(5, 3),
        *layouts(2, 5, 3),
        *layouts(4, 1, 5, 3),
        *layouts(5, 0),
        *layouts(0, 3),
        *layouts(5, 4),
        *layouts(3),
        *layouts(30, 3),
    ]:
        for b in [*layouts(4, 3), *layouts(2, 4, 3), *layouts(3, 4, 3), *layouts(4, 0), *layouts(30, 3)]:
            for p in (2.0, 1.0, -1.0):
                check_rule(aten._cdist_forward.default, a, b, p, None)
            check_rule(aten._cdist_forward.default, a, b, 2.0, 1)
            check_rule(aten.cdist.default, a, b)
        if a.ndim == 2:  # the real one does not check
            check_rule(aten._pdist_forward.default, a)
        check_rule(aten.pdist.default, a, -1.0)
    for a in layouts(2, 5, 3):
        for b in [*layouts(2, 4, 3), *layouts(4, 3)]:
            check_rule(aten._euclidean_dist.default, a, b)
            check_rule(
                aten._cdist_backward.default, filled((2, 5, 4)), a, b.expand(2, 4, 3), 1.0, filled((2, 5, 4))
            )
    for a in layouts(5, 3):
        check_rule(aten._pdist_backward.default, filled((10,)), a, 2.0, filled((10,)))
    for a in all_layouts():
        check_rule(aten.dist.default, a, filled((4,)))
        check_rule(aten.renorm.default, a, 2, 0, 1.0)
        check_rule(aten.renorm.default, a, 0, 0, 1.0)
        check_rule(aten.renorm.default, a, 2, 0, -1.0)


def test_cross_products() -> None:
    for a in [*layouts(4, 3), *layouts(3, 4), *layouts(2, 3, 3), *layouts(3), *layouts(), *layouts(0, 3)]:
        for b in [*layouts(4, 3), *layouts(1, 3), *layouts(3), *layouts()]:
            for dim in (-1, 0):
                check_rule(aten.linalg_cross.default, a, b, dim=dim)
                check_rule(aten.cross.default, a, b, dim)
            check_rule(aten.cross.default, a, b)
