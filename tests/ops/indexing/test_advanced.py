"""Indexing against the real operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.inputs import all_layouts, filled, layouts
from tests.oracle.real import check_rule, spec_of
from tests.spec.layouts import tensor_of_shape
from understudy.errors import DynamicOutputShapeException
from understudy.ops.variants import rule_of

aten = torch.ops.aten


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


INDICES: list[list[torch.Tensor | None]] = [
    [zeros(2)],
    [zeros(2).int()],
    [zeros()],
    [zeros(0)],
    [zeros(3, 2).t()],
    [None, zeros(2)],
    [zeros(2), zeros(2)],
    [zeros(2), None, zeros(2)],
    [None, zeros(2), zeros(3, 1)],
    [zeros(2, 1).expand(2, 3), zeros(3).int()],
    [None, None, zeros(2, 3).t()],
    [None, zeros(2), None, zeros(2)],
    [zeros(2), zeros(3)],
    [zeros(2).float()],
    [zeros(2).short()],
    [None],
    [],
]


def test_index() -> None:
    for tensor in all_layouts():
        for indices in INDICES:
            check_rule(aten.index.Tensor, tensor, indices)
            if indices and indices[0] is not None and indices[0].dtype == torch.int64:
                check_rule(aten._unsafe_index.Tensor, tensor, indices)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=4), st.data())
def test_index_of_anything(shape: list[int], data: st.DataObject) -> None:
    tensor = data.draw(tensor_of_shape(tuple(shape)))
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    index_shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3))
    indices: list[torch.Tensor | None] = []
    for _ in range(data.draw(st.integers(1, tensor.ndim))):
        if data.draw(st.integers(0, 2)) == 0:
            indices.append(None)
            continue
        own = [1 if data.draw(st.integers(0, 3)) == 0 else size for size in index_shape]
        index = data.draw(
            tensor_of_shape(
                tuple(own[data.draw(st.integers(0, len(own))) if data.draw(st.booleans()) else 0 :])
            )
        )
        indices.append(index.to(torch.int32 if data.draw(st.integers(0, 3)) == 0 else torch.int64))
    check_rule(aten.index.Tensor, tensor, indices)
    if any(index is not None for index in indices):
        check_rule(aten.index_put.default, tensor, indices, torch.tensor(1.0))


def test_index_put() -> None:
    for tensor in all_layouts():
        for indices in INDICES:
            if not any(index is not None for index in indices):
                continue  # the real one does not check
            for values in (filled(()), filled((2,)), filled((1, 1)), filled((), torch.int64), filled((7, 9))):
                check_rule(aten.index_put.default, tensor, indices, values)
    for tensor in layouts(3, 4):
        for mask in (
            tensor > 1,
            (tensor > 1)[:, 0],
            torch.ones(7, dtype=torch.bool),
            torch.ones(3, dtype=torch.uint8),
        ):
            check_rule(aten.index_put.default, tensor, [mask], filled(()))
        check_rule(aten.index_put.default, tensor, [None, torch.ones(4, dtype=torch.bool)], filled(()))
    tensor = filled((3, 4)).t()
    check_rule(aten.index_put_.default, tensor, [zeros(2)], filled(()))
    check_rule(aten._index_put_impl_.default, tensor, [zeros(2)], filled(()), True)
    check_rule(aten._unsafe_index_put.default, tensor, [zeros(2)], filled(()))


def test_along_one_dimension() -> None:
    vectors = [
        zeros(2),
        zeros(2).int(),
        zeros(),
        zeros(1),
        zeros(0),
        zeros(1, 2),
        zeros(2).short(),
        zeros(2).float(),
    ]
    for tensor in all_layouts():
        for index in vectors:
            for dim in (0, 1, -1):
                if tensor.numel():
                    check_rule(aten.index_select.default, tensor, dim, index)
                    check_rule(aten.index_fill.int_Scalar, tensor, dim, index, 1)
                    check_rule(aten.index_fill.int_Tensor, tensor, dim, index, filled(()))
                    check_rule(aten.index_fill.int_Tensor, tensor, dim, index, filled((1,)))
        for source in [
            tensor,
            tensor[:2] if tensor.ndim else tensor,
            filled((2, 4)),
            filled(()),
            tensor.double(),
        ]:
            for index in vectors:
                if tensor.numel() == 0:
                    continue
                check_rule(aten.index_add.default, tensor, 0, index, source)
                check_rule(aten.index_copy.default, tensor, 0, index, source)
                check_rule(aten.index_reduce.default, tensor, 0, index, source, "mean")
    check_rule(aten.index_reduce.default, filled((3,)), 0, zeros(1), filled((1,)), "sum")
    check_rule(aten.index_fill.int_Scalar, filled((3,)), 0, zeros(1), 1j)
    check_rule(aten.index_add_.default, filled((3,)), 0, zeros(1), filled((1,)))


REFUSED = [
    (aten.nonzero.default, "nonzero_static"),
    (aten.argwhere.default, "nonzero_static"),
    (aten._unique2.default, "one element per distinct value"),
    (aten._unique.default, "one element per distinct value"),
    (aten.unique_consecutive.default, "run of equal values"),
    (aten.bincount.default, "histc"),
    (aten.one_hot.default, "give num_classes="),
]


@pytest.mark.parametrize(("op", "text"), REFUSED, ids=str)
def test_sizes_that_depend_on_data(op: Any, text: str) -> None:
    rule = rule_of(op)
    assert rule is not None
    with pytest.raises(DynamicOutputShapeException, match=text):
        rule(spec_of(zeros(3)))


def test_masks() -> None:
    tensor = spec_of(filled((3, 4)))
    mask = spec_of(torch.ones(3, 4, dtype=torch.bool))
    for op, args in [(aten.index.Tensor, [mask]), (aten.masked_select.default, mask)]:
        rule = rule_of(op)
        assert rule is not None
        with pytest.raises(DynamicOutputShapeException, match=r"mask.*masked_fill"):
            rule(tensor, args)


def test_searches() -> None:
    vector = torch.tensor([0.0, 1.0, 2.0])
    for tensor in all_layouts():
        for boundaries in (vector, vector.double(), vector[None], vector[:0], vector.expand(2, 3, 3)):
            check_rule(aten.bucketize.Tensor, tensor, boundaries)
            check_rule(aten.bucketize.Tensor, tensor, boundaries, out_int32=True)
            check_rule(aten.searchsorted.Tensor, boundaries, tensor)
        check_rule(aten.isin.Tensor_Tensor, tensor, vector)
        check_rule(aten.isin.Tensor_Tensor, tensor, vector[:0])
        check_rule(aten.isin.Tensor_Scalar, tensor, 1)
        check_rule(aten.isin.Scalar_Tensor, 1, tensor)
        for values in (
            zeros(3, 2).t(),
            zeros(9, 2).t(),
            zeros(3, 4)[:, :2],
            zeros(3, 2).double().t(),
        ):  # some are refused
            check_rule(aten.isin.Tensor_Tensor, tensor, values)
            check_rule(aten.isin.Tensor_Tensor, tensor.double(), values)
        check_rule(aten.histc.default, tensor, 5)
        check_rule(aten.nonzero_static.default, tensor, size=5)
        check_rule(aten.nonzero_static.default, tensor, size=0)
        check_rule(aten.one_hot.default, tensor.long(), 5)
        check_rule(aten.one_hot.default, tensor, 5)
    check_rule(aten.bucketize.Scalar, 1.0, vector)
    check_rule(aten.searchsorted.Scalar, vector, 1.0)
    check_rule(aten.searchsorted.Scalar, vector[None], 1.0)
    for sorter in (zeros(3), zeros(2), zeros(3).int()):
        check_rule(aten.searchsorted.Tensor, vector, vector, sorter=sorter)
    for side in ("left", "right", "up"):
        check_rule(aten.searchsorted.Tensor, vector, vector, right=True, side=side)
    check_rule(aten.histc.default, zeros(3), 5)
    check_rule(aten.histc.default, vector, 0)
    check_rule(aten.nonzero_static.default, vector, size=-1)
    check_rule(aten.one_hot.default, zeros(3), 0)
