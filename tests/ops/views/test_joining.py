"""Joining, padding and moving elements, against the real operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.inputs import all_layouts, filled, layouts
from tests.oracle.real import check_rule, spec_of
from tests.spec.layouts import tensor_of_shape
from understudy.errors import DynamicOutputShapeException, ShapeMismatch
from understudy.ops.variants import rule_of

aten = torch.ops.aten

JOINS = [aten.cat.default, aten.stack.default, aten.concat.default]
WHOLE_JOINS = [aten.hstack, aten.vstack, aten.dstack, aten.column_stack, aten.block_diag]


@pytest.mark.parametrize("op", JOINS, ids=str)
def test_joins_of_all_layouts(op: Any) -> None:
    for shape in [(), (0,), (3,), (3, 4), (0, 3), (2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 2, 2, 2)]:
        for a in layouts(*shape):
            for b in layouts(*shape):
                for dim in (0, 1, -1, 4):
                    check_rule(op, [a, b], dim)
            check_rule(op, [a])


@pytest.mark.parametrize("op", WHOLE_JOINS, ids=str)
def test_joins_of_raised_tensors(op: Any) -> None:
    shapes = [(), (0,), (3,), (3, 4), (2, 3, 4), (2, 3, 4, 5)]
    for shape in shapes:
        for a in layouts(*shape):
            check_rule(op.default, [a, filled(shape)])
            check_rule(op.default, [a, filled((3, 3))])
    check_rule(op.default, [filled((), torch.float64), filled((2,), torch.int32)])


def test_cat_skips_empty_vectors_and_promotes() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    for tensors in (
        [empty, filled((2, 3))],
        [filled((2, 3)), empty],
        [empty, empty],
        [empty, filled((2, 3, 4, 5)).to(memory_format=torch.channels_last)],
        [filled((2, 3)), filled((2, 3), torch.int64)],
        [filled((2, 3), torch.bool), filled((1, 3), torch.uint8)],
        [filled((2, 3)), filled((2, 4))],
        [filled((2, 3)), filled((2,))],
        [filled((2, 3)), filled((), torch.int64)],
        [],
    ):
        for dim in (0, 1, -1, 7):
            check_rule(aten.cat.default, tensors, dim)
    check_rule(aten.cat.out, [filled((2, 3)), filled((1, 3))], out=torch.empty(3, 3))
    check_rule(aten.cat.out, [filled((2, 3)), filled((1, 3))], out=torch.empty(0))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=5), st.data())
def test_cat_of_anything(shape: list[int], data: st.DataObject) -> None:
    tensors = data.draw(st.lists(tensor_of_shape(tuple(shape)), min_size=1, max_size=3))
    check_rule(aten.cat.default, tensors, data.draw(st.integers(-len(shape), len(shape) - 1)))
    check_rule(aten.stack.default, tensors, data.draw(st.integers(-len(shape), len(shape))))


def test_a_bad_cat_names_the_tensor() -> None:
    rule = rule_of(aten.cat.default)
    assert rule is not None
    with pytest.raises(ShapeMismatch, match=r"dimension 1 has size 3 in f32\[2, 3\]@cpu and 4 in tensor 1"):
        rule([spec_of(filled((2, 3))), spec_of(filled((2, 4)))], 0)


def test_the_kernel_of_stack() -> None:
    # Only with a dimension counted from the front: the real one does not check.
    for tensor in layouts(3, 4):
        check_rule(aten._stack.default, [tensor, tensor], 1)


def test_meshgrid() -> None:
    for tensors in (
        [filled((3,)), filled((4,))[::2], filled(())],
        [filled((3,))],
        [filled((0,)), filled((2,))],
        [filled((2, 2))],
        [],
    ):
        check_rule(aten.meshgrid.default, tensors)
        for indexing in ("ij", "xy", "?"):
            check_rule(aten.meshgrid.indexing, tensors, indexing=indexing)


PADS = [
    [],
    [0, 0],
    [1, 1],
    [1, -1],
    [-1, 0],
    [-1, -1],
    [1],
    [-9, 9],
    [-9, 0],
    [0, 1, 2, 0],
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
]


def test_constant_pad() -> None:
    for tensor in all_layouts():
        for pad in PADS:
            check_rule(aten.constant_pad_nd.default, tensor, pad)
            check_rule(aten.pad.default, tensor, pad)


@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_other_pads(kind: str, dims: int) -> None:
    forward = getattr(aten, f"{kind}_pad{dims}d").default
    backward = getattr(aten, f"{kind}_pad{dims}d_backward").default
    sizes = (3, 4, 3)[:dims]
    for lead in [(), (2,), (2, 3), (0, 2), (2, 0), (1, 1)]:
        for tensor in layouts(*lead, *sizes):
            for pad in ([1, 2], [0, 0], [-1, 1], [3, 0], [-2, -2], [5, 0], [9, 9]):
                check_rule(forward, tensor, pad * dims)
            if 0 in lead:
                continue
            for grad in layouts(*lead, *(size + 2 for size in sizes)):
                check_rule(backward, grad, tensor, [1, 1] * dims)
    for mode in ("reflect", "replicate"):
        check_rule(aten.pad.default, filled((2, 3, *sizes)), [1, 1] * dims, mode)


MOVES: list[tuple[Any, list[tuple[Any, ...]]]] = [
    (
        aten.repeat.default,
        [([2],), ([2, 3],), ([1, 2, 1],), ([0, 2, 1, 1],), ([-1, 1, 1, 1, 1],), ([1, 1, 1, 2, 1],)],
    ),
    (aten.tile.default, [([2],), ([2, 3],), ([],), ([1, 1, 1, 2, 1],)]),
    (aten.roll.default, [([1],), ([1], [0]), ([1, 2], [0, -1]), ([1, 2],), ([],), ([1], [7])]),
    (aten.flip.default, [([],), ([0],), ([0, 1],), ([-1],), ([0, 0],), ([9],)]),
    (aten.fliplr.default, [()]),
    (aten.flipud.default, [()]),
    (aten.rot90.default, [(), (2,), (3,), (4,), (-1,), (1, [1, 0]), (1, [0, -1]), (1, [0]), (1, [0, 0])]),
    (aten.tril.default, [(), (1,)]),
    (aten.triu.default, [(), (-1,)]),
    (aten.diag_embed.default, [(), (1,), (-2,), (0, 0, 1), (1, 1, 0), (0, 0, 0), (0, 0, -1)]),
    (aten.diag.default, [(), (1,), (-1,), (9,)]),
    (aten.pixel_shuffle.default, [(1,), (2,), (0,)]),
    (aten.pixel_unshuffle.default, [(1,), (2,), (0,)]),
    (aten.channel_shuffle.default, [(1,), (2,), (3,), (0,)]),
    (aten.repeat_interleave.self_int, [(2,), (2, 0), (0, -1), (2, 1), (-1,), (2, 7)]),
]


@pytest.mark.parametrize(
    ("op", "arguments"), MOVES, ids=lambda v: str(v) if isinstance(v, torch._ops.OpOverload) else ""
)
def test_moves(op: Any, arguments: list[tuple[Any, ...]]) -> None:
    for tensor in [
        *all_layouts(),
        *layouts(2, 4, 4, 6),
        *layouts(2, 4, 1, 1),
        *layouts(2, 8, 3, 2, 2),
        *layouts(0, 4, 2, 2),
    ]:
        for rest in arguments:
            check_rule(op, tensor, *rest)
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.complex64):
        for rest in arguments:
            check_rule(op, filled((4, 4), dtype), *rest)


def test_repeats_in_a_tensor_need_the_size() -> None:
    repeats = torch.tensor([1, 2, 0])
    check_rule(aten.repeat_interleave.Tensor, repeats, output_size=3)
    for tensor in layouts(3, 4):
        check_rule(aten.repeat_interleave.self_Tensor, tensor, repeats, 0, output_size=3)
    rule = rule_of(aten.repeat_interleave.Tensor)
    assert rule is not None
    with pytest.raises(DynamicOutputShapeException, match="output_size="):
        rule(spec_of(repeats))


def test_writes_through_views() -> None:
    for tensor in layouts(3, 4, 4):
        for src in layouts(3, 4, 2):
            check_rule(aten.slice_scatter.default, tensor, src, 2, 1, 3)
            check_rule(aten.slice_scatter.default, tensor, src, 2, 0, 4, 2)
            check_rule(aten.slice_scatter.default, tensor, src, 1, 0, 4, 2)
            check_rule(aten.slice_backward.default, src, [3, 4, 9], 2, 1, 3, 1)
        for src in layouts(3, 4):
            check_rule(aten.select_scatter.default, tensor, src, 2, 1)
            check_rule(aten.select_scatter.default, tensor, src, 0, 1)
            check_rule(aten.diagonal_scatter.default, tensor, src, 0, 1, 2)
            check_rule(aten.diagonal_backward.default, src, [3, 4, 4], 0, 1, 2)
            check_rule(aten.select_backward.default, src, [3, 4, 9], 2, 1)
            check_rule(aten.select_backward.default, src, [3, 4, 9], 2, 10)
        check_rule(aten.as_strided_scatter.default, tensor, filled((2, 2)), [2, 2], [1, 2])
        check_rule(aten.unfold_backward.default, tensor.unfold(1, 2, 1), [3, 4, 4], 1, 2, 1)


def test_blocks() -> None:
    for image in [*layouts(2, 3, 5, 6), *layouts(3, 5, 6), *layouts(0, 3, 5, 6), *layouts(2, 0, 5, 6)]:
        for rest in [
            ([2, 2], [1, 1], [0, 0], [1, 1]),
            ([2, 3], [2, 1], [1, 0], [1, 2]),
            ([9, 9], [1, 1], [0, 0], [1, 1]),
            ([2, 2], [1, 1], [0, 0], [0, 1]),
        ]:
            check_rule(aten.im2col.default, image, *rest)
    for columns in [
        *layouts(2, 12, 20),
        *layouts(12, 20),
        *layouts(0, 12, 20),
        *layouts(2, 13, 20),
        *layouts(2, 12, 21),
    ]:
        check_rule(aten.col2im.default, columns, [5, 6], [2, 2], [1, 1], [0, 0], [1, 1])
