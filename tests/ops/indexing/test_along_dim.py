"""gather, scatter, take, put and masked_scatter, against the real operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ops.inputs import all_layouts, filled, layouts
from tests.oracle.real import check_rule
from understudy import FakeTensorMode

aten = torch.ops.aten


def indices_for(tensor: torch.Tensor) -> list[torch.Tensor]:
    shape = list(tensor.shape)
    shapes = [
        shape,
        [2, *shape[1:]],
        [2, *(1 for _ in shape[1:])],
        [*shape, 1],
        [0],
        [1],
        [],
        [9] * len(shape),
    ]
    found = [torch.zeros(s, dtype=torch.int64) for s in shapes]
    return [*found, found[0].int(), found[0].short(), found[0].float()]


def test_gather_and_scatter() -> None:
    for tensor in all_layouts():
        if tensor.numel() == 0:
            continue  # any index is out of range
        for index in indices_for(tensor):
            for dim in (0, -1, 5):
                check_rule(aten.gather.default, tensor, dim, index)
                check_rule(aten.scatter.value, tensor, dim, index, 1.0)
                check_rule(aten.scatter.src, tensor, dim, index, tensor)
                check_rule(aten.scatter_add.default, tensor, dim, index, tensor)
                check_rule(aten.scatter_reduce.two, tensor, dim, index, tensor, "sum")
            check_rule(aten.scatter.src, tensor, 0, index, tensor.double())
            check_rule(aten.scatter.src, tensor, 0, index, filled((2,)))


def test_reductions_of_scatter() -> None:
    index = torch.zeros(2, 3, dtype=torch.int64)
    for reduce in ("add", "multiply", "sum", "prod", "mean", "amax", "amin", "?"):
        check_rule(aten.scatter.reduce, filled((2, 3)), 0, index, filled((2, 3)), reduce=reduce)
        check_rule(aten.scatter.value_reduce, filled((2, 3)), 0, index, 1.0, reduce=reduce)
        check_rule(aten.scatter_reduce.two, filled((2, 3)), 0, index, filled((2, 3)), reduce)
    check_rule(aten.scatter_.src, filled((2, 3)), 0, index, filled((2, 3)))
    check_rule(aten.gather.out, filled((2, 3)), 0, index, out=torch.empty(2, 3))


def test_take_and_put() -> None:
    for tensor in all_layouts():
        for index in layouts(2, 3, dtype=torch.int64):
            index = index * 0
            check_rule(aten.take.default, tensor, index)
            check_rule(aten.put.default, tensor, index, filled((6,)))
            check_rule(aten.put.default, tensor, index, filled((5,)))
            check_rule(aten.take.default, tensor, index.int())
        check_rule(aten.take.default, tensor, torch.zeros(0, dtype=torch.int64))
    check_rule(aten.put.default, filled((3,)), torch.zeros(2, dtype=torch.int64), filled((2,), torch.float64))


def test_take_along_dim() -> None:
    for tensor in all_layouts():
        if tensor.numel() == 0:
            continue
        for index in indices_for(tensor):
            check_rule(aten.take_along_dim.default, tensor, index, 0)
            check_rule(aten.take_along_dim.default, tensor, index, -1)


def test_masked_scatter() -> None:
    masks: list[Any] = [torch.zeros(s, dtype=torch.bool) for s in [(), (4,), (3, 4), (2, 1, 4), (7,)]]
    for tensor in all_layouts():
        for mask in [*masks, torch.zeros(4), torch.zeros(4, dtype=torch.uint8)]:
            check_rule(aten.masked_scatter.default, tensor, mask, filled((99,)))
        check_rule(aten.masked_scatter.default, tensor, masks[0], filled((99,), torch.int64))
        check_rule(
            aten.masked_scatter_backward.default, tensor, torch.zeros(tensor.shape, dtype=torch.bool), [3, 4]
        )


def test_an_index_of_floats_is_refused_on_a_card_too() -> None:
    """The table of CPU kernels refuses it before the rule is asked, and does not apply here."""
    with FakeTensorMode():
        x = torch.zeros(2, 3, device="cuda")
        with pytest.raises(RuntimeError, match="gather: the index must be i64 or i32, got f32"):
            x.gather(0, torch.zeros(2, 3, device="cuda"))
