"""Views, their copies and their in-place variants, against the real operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.inputs import all_layouts, filled, layouts
from tests.oracle.real import check_rule, spec_of
from tests.spec.layouts import SIZES, tensor_of_shape
from understudy.errors import ShapeMismatch
from understudy.ops.variants import rule_of

aten = torch.ops.aten

DIM_PAIRS = [(0, 1), (-1, -2), (1, 1), (0, 5)]

# Operators with the arguments after the tensor.
CASES: list[tuple[Any, list[tuple[Any, ...]]]] = [
    (aten.view.default, [([-1],), ([],), ([1, -1],), ([-1, 2],), ([3, 4],), ([2, 12],), ([6, 4],), ([0, -1],), ([-1, -1],), ([-2],), ([2, 3, 4],), ([6, 20],), ([1, 2, 1, 3, 4, 5, 1],)]),
    (aten._unsafe_view.default, [([-1],), ([2, 12],)]),
    (aten.reshape.default, [([-1],), ([2, 12],), ([4, 3],), ([6, 4],), ([-1, 1],)]),
    (aten.ravel.default, [()]),
    (aten.flatten.using_ints, [(), (1,), (0, 1), (1, 0), (-2, -1), (5,)]),
    (aten.expand.default, [([-1],), ([2, -1, -1],), ([2, 3],), ([3, 4],), ([1, 1, 3, 4],), ([4, 2, 3, 4],), ([2, 4, 3],), ([-1, -1],), ([0],), ([7, 1],), ([],)]),
    (aten.permute.default, [([],), ([0],), ([1, 0],), ([2, 0, 1],), ([-1, 0, 1],), ([0, 0],), ([0, 2, 3, 1],)]),
    (aten.transpose.int, DIM_PAIRS),
    (aten.swapdims.default, DIM_PAIRS),
    (aten.swapaxes.default, DIM_PAIRS),
    (aten.t.default, [()]),
    (aten.numpy_T.default, [()]),
    (aten.mT.default, [()]),
    (aten.mH.default, [()]),
    (aten.movedim.int, DIM_PAIRS),
    (aten.movedim.intlist, [([0, 1], [1, 0]), ([0, 1], [-1, 0]), ([0], [1, 0]), ([0, 0], [0, 1])]),
    (aten.squeeze.default, [()]),
    (aten.squeeze.dim, [(0,), (1,), (-1,), (7,)]),
    (aten.squeeze.dims, [([0],), ([0, 1],), ([1, -1],), ([],), ([0, 0],)]),
    (aten.unsqueeze.default, [(0,), (1,), (-1,), (-2,), (5,)]),
    (aten.select.int, [(0, 0), (1, -1), (-1, 1), (0, 9), (3, 0)]),
    (aten.slice.Tensor, [(), (0, 1), (1, -2, 9), (0, None, None, 2), (-1, 1, 3, 3), (0, 3, 1), (0, 9), (0, 0, 1, 0), (0, 1, 2**63 - 1), (0, -1, -2), (0, -9, -8)]),
    (aten.narrow.default, [(0, 0, 1), (1, 1, 2), (-1, -1, 1), (0, 5, 0), (0, 0, 9), (0, 9, 0), (0, 0, -1)]),
    (aten.diagonal.default, [(), (1,), (-1,), (9,), (-9,), (0, 1, 0), (1, 0, -1), (0, 1, 1), (0, -1, -2)]),
    (aten.linalg_diagonal.default, [()]),
    (aten.unfold.default, [(0, 1, 1), (0, 2, 1), (-1, 2, 2), (1, 3, 1), (0, 0, 3), (0, -1, 1), (0, 1, 0), (0, 9, 1)]),
    (aten.alias.default, [()]),
    (aten.detach.default, [()]),
    (aten.view.dtype, [(torch.int32,), (torch.float32,), (torch.int16,), (torch.float64,), (torch.uint8,), (torch.complex64,)]),
    (aten.split.Tensor, [(1,), (2,), (2, 1), (2, -1), (0,), (-1,), (100,)]),
    (aten.unsafe_split.Tensor, [(2,)]),
    (aten.split_with_sizes.default, [([1, 2],), ([2, 0, 1],), ([1, 3], 1), ([1, -1, 3],), ([5],)]),
    (aten.split.sizes, [([1, 2],)]),
    (aten.unbind.int, [(), (1,), (-1,), (7,)]),
    (aten.chunk.default, [(2,), (3, 1), (2, -1), (9,), (0,)]),
    (aten.tensor_split.sections, [(2,), (3, 1), (0,)]),
    (aten.tensor_split.indices, [([1],), ([1, 2], 1), ([2, 1],), ([9],), ([-1],)]),
    (aten.hsplit.int, [(1,), (2,), (0,)]),
    (aten.vsplit.int, [(1,), (2,), (0,)]),
    (aten.dsplit.int, [(1,), (2,), (0,)]),
    (aten.hsplit.array, [([1],), ([2, 1],)]),
    (aten.vsplit.array, [([1],), ([2, 1],)]),
    (aten.dsplit.array, [([1],), ([2, 1],)]),
    (aten.broadcast_to.default, [([3, 4],), ([2, 3, 4],), ([],)]),
    (aten.atleast_1d.default, [()]),
    (aten.atleast_2d.default, [()]),
    (aten.atleast_3d.default, [()]),
    (aten.unflatten.int, [(0, [-1, 1]), (1, [2, 2]), (-1, [1, -1]), (0, []), (0, [3, 3])]),
    (aten.real.default, [()]),
    (aten.imag.default, [()]),
    (aten.conj.default, [()]),
    (aten._conj.default, [()]),
    (aten._neg_view.default, [()]),
    (aten.view_as_real.default, [()]),
    (aten.view_as_complex.default, [()]),
]  # fmt: skip

COPIES: list[tuple[Any, list[tuple[Any, ...]]]] = [
    (aten.view_copy.default, [([-1],), ([2, 12],)]),
    (aten._reshape_copy.default, [([-1],), ([2, 12],)]),
    (aten.expand_copy.default, [([3, 4],), ([2, -1, -1],)]),
    (aten.permute_copy.default, [([1, 0],), ([2, 0, 1],)]),
    (aten.transpose_copy.int, DIM_PAIRS),
    (aten.t_copy.default, [()]),
    (aten.squeeze_copy.default, [()]),
    (aten.squeeze_copy.dim, [(0,), (1,)]),
    (aten.squeeze_copy.dims, [([0, 1],)]),
    (aten.unsqueeze_copy.default, [(0,), (-1,)]),
    (aten.select_copy.int, [(0, 0), (1, -1)]),
    (aten.slice_copy.Tensor, [(), (0, 1), (1, -2, 9)]),
    (aten.narrow_copy.default, [(0, 0, 1), (1, 1, 2)]),
    (aten.diagonal_copy.default, [(), (1,)]),
    (aten.unfold_copy.default, [(0, 1, 1), (0, 2, 1)]),
    (aten.alias_copy.default, [()]),
    (aten.detach_copy.default, [()]),
    (aten.view_copy.dtype, [(torch.int32,), (torch.int16,)]),
    (aten.split_copy.Tensor, [(2,), (2, 1)]),
    (aten.split_with_sizes_copy.default, [([1, 2],)]),
    (aten.unbind_copy.int, [(), (1,)]),
    (aten._conj_copy.default, [()]),
    (aten._neg_view_copy.default, [()]),
    (aten.view_as_real_copy.default, [()]),
    (aten.view_as_complex_copy.default, [()]),
]

IN_PLACE: list[tuple[Any, list[tuple[Any, ...]]]] = [
    (aten.squeeze_.default, [()]),
    (aten.squeeze_.dim, [(0,), (1,)]),
    (aten.squeeze_.dims, [([0, 1],)]),
    (aten.unsqueeze_.default, [(0,), (-1,)]),
    (aten.t_.default, [()]),
    (aten.transpose_.default, DIM_PAIRS),
    (aten.swapdims_.default, DIM_PAIRS),
    (aten.as_strided_.default, [([1], [1]), ([1, 1], [3, 1], 0)]),
    (aten.resize_.default, [([2, 3],), ([3, 4],), ([5],), ([],), ([2, 3, 4],), ([0, 2],), ([-1],)]),
    (aten.resize.default, [([2, 3],), ([3, 4],), ([5],), ([],), ([2, 3, 4],), ([0, 2],), ([-1],)]),
]


def name(value: Any) -> str:
    return str(value) if isinstance(value, torch._ops.OpOverload) else ""


@pytest.mark.parametrize(("op", "arguments"), CASES + COPIES, ids=name)
def test_views(op: Any, arguments: list[tuple[Any, ...]]) -> None:
    for tensor in all_layouts():
        for rest in arguments:
            check_rule(op, tensor, *rest)


@pytest.mark.parametrize(("op", "arguments"), IN_PLACE, ids=name)
def test_metadata_in_place(op: Any, arguments: list[tuple[Any, ...]]) -> None:
    for rest in arguments:
        for tensor in all_layouts():
            if tensor.numel() == 0 and op is aten.as_strided_.default:
                continue  # whether a storage is large enough is not a rule's to know
            check_rule(op, tensor, *rest)


@pytest.mark.parametrize(
    "op",
    [
        aten.mH,
        aten.real,
        aten.imag,
        aten.conj,
        aten._conj,
        aten._neg_view,
        aten.view_as_real,
        aten._conj_copy,
        aten._neg_view_copy,
        aten.view_as_real_copy,
    ],
    ids=str,
)
def test_complex_views(op: Any) -> None:
    for tensor in all_layouts(torch.complex64):
        check_rule(op.default, tensor)
        check_rule(op.default, tensor.conj())
        check_rule(op.default, tensor._neg_view())


def test_views_of_complex_dtypes() -> None:
    for tensor in all_layouts(torch.complex64, [(2,), (3, 4), ()]):
        for dtype in (torch.float32, torch.complex64, torch.float64, torch.complex128):
            check_rule(aten.view.dtype, tensor, dtype)
            check_rule(aten.view.dtype, tensor.conj(), dtype)
    for tensor in all_layouts(shapes=[(2,), (3, 2), (3, 4, 2), (0, 2), (1, 2)]):
        check_rule(aten.view_as_complex.default, tensor)
        check_rule(aten.view_as_complex.default, tensor.double())
        check_rule(aten.view_as_complex.default, tensor.bfloat16())


def test_as_strided() -> None:
    for tensor in layouts(3, 4):
        for rest in [
            ([2], [1]),
            ([2, 2], [1, 0], 1),
            ([], [], 2),
            ([0], [4]),
            ([2], [1, 2]),
            ([2], [-1]),
            ([-2], [1]),
            ([2], [1], -1),
        ]:
            check_rule(aten.as_strided.default, tensor, *rest)
            check_rule(aten.as_strided_copy.default, tensor, *rest)
    check_rule(aten.detach_.default, torch.zeros(2))
    check_rule(aten._reshape_alias.default, filled((3, 4)), [4, 3], [3, 1])


def test_like_another_tensor() -> None:
    for other in layouts(3, 4):
        check_rule(aten.expand_as.default, filled((4,)), other)
        check_rule(aten.expand_as.default, filled((3,)), other)
        check_rule(aten.broadcast_tensors.default, [other, filled((4,)), filled(())])
        check_rule(aten.broadcast_tensors.default, [other, filled((3,)), filled(())])
        check_rule(aten.view_as.default, filled((12,)), other)
        check_rule(aten.resize_as_.default, filled((3,)), other)
        check_rule(aten.set_.source_Tensor, filled((3,)), other)


@pytest.mark.parametrize(
    "memory_format",
    [None, torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d],
)
def test_resize_to_a_format(memory_format: torch.memory_format | None) -> None:
    for shape in [(2, 3), (2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 0, 1), (2, 3, 4, 5, 2)]:
        check_rule(aten.resize_.default, filled((2, 3, 4, 5)), shape, memory_format=memory_format)
        for template in layouts(*shape):
            check_rule(aten.resize_as_.default, filled((2, 3, 4, 5)), template, memory_format=memory_format)


def test_a_view_that_needs_a_copy_suggests_reshape() -> None:
    rule = rule_of(aten.view.default)
    assert rule is not None
    with pytest.raises(ShapeMismatch, match=r"f32\[4, 3\].*use \.reshape\(\[12\]\)"):
        rule(spec_of(filled((3, 4)).t()), [-1])
    with pytest.raises(ShapeMismatch, match=r"shape \[5, 2\] holds 10 elements, f32\[3, 4\]@cpu has 12"):
        rule(spec_of(filled((3, 4))), [5, 2])


@st.composite
def tensors_and_shapes(draw: st.DrawFn) -> tuple[torch.Tensor, list[int]]:
    """A tensor, and its sizes split and joined at random."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6]), max_size=4))
    tensor = draw(tensor_of_shape(tuple(shape)))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    target: list[int] = []
    for size in tensor.shape:
        factor = draw(st.sampled_from([f for f in (1, 2, 3, size) if f and size % f == 0]))
        target += [size // factor, factor] if draw(st.booleans()) else [size]
        if len(target) > 1 and draw(st.booleans()):
            target[-2:] = [target[-2] * target[-1]]
        if draw(st.integers(0, 3)) == 0:
            target.append(1)
    return tensor, target


@settings(max_examples=300, deadline=None)
@given(tensors_and_shapes())
def test_any_view(case: tuple[torch.Tensor, list[int]]) -> None:
    tensor, shape = case
    check_rule(aten.view.default, tensor, shape)
    check_rule(aten.reshape.default, tensor, shape)
    check_rule(aten.flatten.using_ints, tensor, 0, -1)


@settings(max_examples=150, deadline=None)
@given(st.lists(SIZES, max_size=4).flatmap(lambda shape: tensor_of_shape(tuple(shape))), st.data())
def test_any_expand_and_as_strided(tensor: torch.Tensor, data: st.DataObject) -> None:
    sizes = [data.draw(st.sampled_from([-1, size, 2])) for size in tensor.shape]
    check_rule(aten.expand.default, tensor, data.draw(st.lists(SIZES, max_size=2)) + sizes)
    ndim = data.draw(st.integers(0, 3))
    size = data.draw(st.lists(st.integers(0, 1), min_size=ndim, max_size=ndim))
    stride = data.draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim))
    check_rule(
        aten.as_strided.default,
        torch.zeros(20).as_strided((2,), (1,), 3),
        size,
        stride,
        data.draw(st.sampled_from([None, 0, 4])),
    )
