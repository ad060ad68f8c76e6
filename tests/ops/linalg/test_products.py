from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import MORE_DTYPES, every, filled, layouts
from tests.oracle.real import check_rule, spec_of
from understudy.errors import ShapeMismatch
from understudy.ops.variants import rule_of

aten = torch.ops.aten
SIZES = [(2, 3, 4), (0, 3, 4), (2, 0, 4), (2, 3, 0), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 1)]


def test_matrix_times_matrix() -> None:
    def calls() -> Iterator[Any]:
        for rows, inner, columns in SIZES:
            for a, b in itertools.product(layouts((rows, inner)), layouts((inner, columns))):
                yield aten.mm.default, a, b
                for bias in (
                    (columns,),
                    (rows, columns),
                    (),
                    (1, columns),
                    (rows, 1),
                    (5,),
                    (1, rows, columns),
                ):
                    yield aten.addmm.default, filled(bias), a, b
                yield aten.addmm.default, filled((columns, rows)).t(), a, b, {"beta": 0.5, "alpha": 2}
                yield aten._addmm_activation.default, filled((columns,)), a, b
        yield aten.mm.default, filled((2, 3)), filled((2, 3))
        yield aten.mm.default, filled((2, 3)), filled((3,))

    every(calls())


def test_batches_of_matrices() -> None:
    def calls() -> Iterator[Any]:
        for batch, (rows, inner, columns) in itertools.product((2, 1, 0), SIZES[:6]):
            left = layouts((batch, rows, inner), few=True)
            for a, b in itertools.product(left, layouts((batch, inner, columns), few=True)):
                yield aten.bmm.default, a, b
                yield aten.baddbmm.default, filled((columns,)), a, b
                yield aten.baddbmm.default, filled((batch, columns, rows)).transpose(1, 2), a, b
                yield aten.addbmm.default, filled((rows, columns)), a, b
        yield aten.bmm.default, filled((2, 2, 3)), filled((3, 3, 4))
        yield aten.bmm.default, filled((2, 2, 3)), filled((2, 4, 4))
        yield aten.bmm.default, filled((2, 2, 3)), filled((3, 4))

    every(calls())


def test_vectors() -> None:
    def calls() -> Iterator[Any]:
        for rows, inner, _ in SIZES:
            for matrix, vector in itertools.product(layouts((rows, inner)), layouts((inner,))):
                yield aten.mv.default, matrix, vector
                for bias in ((rows,), (), (1,)):
                    yield aten.addmv.default, filled(bias), matrix, vector
            for a, b in itertools.product(layouts((rows,)), layouts((inner,))):
                yield aten.dot.default, a, a
                yield aten.vdot.default, b, b
                yield aten.dot.default, a, b
                yield aten.outer.default, a, b
                for bias in ((inner,), (rows, 1), ()):
                    yield aten.addr.default, filled(bias), a, b
                for full in layouts((rows, inner)):
                    yield aten.addr.default, full, a, b
        yield aten.mv.default, filled((2, 3)), filled((2,))
        yield aten.mv.default, filled((2, 3)), filled((3, 1))
        yield aten.dot.default, filled((2, 3)), filled((3,))

    every(calls())


def test_conjugates() -> None:
    x = filled((3,), torch.complex64)
    every(
        (op, a, b)
        for op in (aten.dot.default, aten.vdot.default)
        for a, b in itertools.product((x, x.conj()), repeat=2)
    )
    y = filled((3, 3), torch.complex64)
    every(
        (op, a, b)
        for op in (aten.mm.default, aten.matmul.default)
        for a, b in itertools.product((y, y.mH), repeat=2)
    )


def test_dtypes() -> None:
    def calls() -> Iterator[Any]:
        for one, two in itertools.product((*MORE_DTYPES, torch.float8_e4m3fn), repeat=2):
            a, b = filled((2, 2), one), filled((2, 2), two)
            yield aten.mm.default, a, b
            yield aten.addmm.default, a, b, b
            yield aten._addmm_activation.default, a, b, b
            yield aten._addmm_activation.default, a, b, b, {"use_gelu": True}
            yield aten.bmm.default, a[None], b[None]
            yield aten.baddbmm.default, a[None], b[None], b[None]
            yield aten.addbmm.default, a, b[None], b[None]
            yield aten.mv.default, a, b[0]
            yield aten.addmv.default, a[0], b, b[0]
            yield aten.dot.default, a[0], b[0]
            yield aten.vdot.default, a[0], b[0]
            yield aten.linear.default, a, b
            yield aten.linear.default, a, a, b[0]
            yield aten.linear.default, a[None], b
            yield aten.matmul.default, a[None], b
            yield aten._int_mm.default, a.to(torch.int8), b.to(torch.int8)
            yield aten._int_mm.default, a, b
            if torch.float8_e4m3fn not in (one, two):  # promotion with it is left to torch's own refusal
                yield aten.addr.default, a, b[0], b[0]
                yield aten.addr.default, a, a[0], b[0]

    every(calls())


@pytest.mark.parametrize("lead", [(), (2,), (1,), (0,), (2, 3), (2, 1), (2, 3, 2)])
def test_linear(lead: tuple[int, ...]) -> None:
    def calls() -> Iterator[Any]:
        for inner, outer in ((3, 4), (1, 4), (3, 1), (0, 4)):
            for x, weight in itertools.product(layouts((*lead, inner), few=True), layouts((outer, inner))):
                yield aten.linear.default, x, weight
                yield aten.linear.default, x, weight, filled((outer,))
        x = filled((*lead, 3))
        for weight, bias in (
            ((4, 2), None),
            ((3,), None),
            ((3,), ()),
            ((4, 3), (1,)),
            ((4, 3), (3,)),
            ((2, 4, 3), None),
        ):
            yield aten.linear.default, x, filled(weight), None if bias is None else filled(bias)

    every(calls())


def test_matmul() -> None:
    left = [(3,), (2, 3), (0, 3), (4, 2, 3), (1, 2, 3), (0, 2, 3), (4, 5, 2, 3), (4, 1, 2, 3)]
    right = [(), (3,), (3, 5), (3, 0), (4, 3, 5), (1, 3, 5), (4, 3, 1), (5, 3, 2), (4, 5, 3, 2), (2, 2)]
    every(
        (aten.matmul.default, a, b)
        for shapes in itertools.product(left, right)
        for a, b in itertools.product(*(layouts(shape, few=True) for shape in shapes))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_grouped_products(dtype: torch.dtype) -> None:
    offs = torch.tensor([2, 4, 6], dtype=torch.int32)

    def calls() -> Iterator[Any]:
        rows = [(6, 16), (3, 6, 16), (2, 6, 16), (6, 5), (1, 16), (16,)]
        columns = [(3, 16, 8), (16, 6), (3, 16, 6), (16, 8), (6, 16), (2, 16, 8), (1, 16, 8)]
        for left, right in itertools.product(rows, columns):
            for a, b in itertools.product(layouts(left, dtype, few=True), layouts(right, dtype, few=True)):
                # A product of two 2-D operands whose groups run past the inner dimension is an error of values.
                if (
                    a.ndim == b.ndim == 2
                    or (b.ndim == 2 and b.shape[1] != 6)
                    or (a.ndim == 2 and a.shape[0] != 6)
                ):
                    continue
                yield aten._grouped_mm.default, a, b, offs
                yield aten._grouped_mm.default, a, b
        yield aten._grouped_mm.default, filled((6, 8), dtype).t(), filled((6, 16), dtype), offs
        yield aten._grouped_mm.default, filled((6, 8), dtype).t()[:5], filled((6, 16), dtype)[:, :5], offs
        a, b = filled((6, 16), dtype), filled((3, 16, 8), dtype)
        yield aten._grouped_mm.default, a, b, offs.long()
        yield aten._grouped_mm.default, a, b, offs[:2]
        yield aten._grouped_mm.default, a, b, offs, filled((3, 8), dtype)
        yield aten._grouped_mm.default, a, b, offs, None, torch.float32
        yield aten._grouped_mm.default, a, b.to(torch.bfloat16), offs

    every(calls())


def test_scaled_products() -> None:
    a, b = filled((16, 32)).to(torch.float8_e4m3fn), filled((8, 32)).to(torch.float8_e4m3fn).t()
    one = torch.ones(())
    op = aten._scaled_mm.default
    every(
        iter(
            [
                (op, a, b, one, one),
                (op, a, b, one, one, filled((8,)), None, torch.float32),
                (op, a, b, torch.ones(16, 1), torch.ones(1, 8), {"out_dtype": torch.bfloat16}),
                (op, a, b.contiguous(), one, one),
                (op, a, a, one, one),
                (op, a.float(), b.float(), one, one),
                (op, a[0], b, one, one),
            ]
        )
    )


def test_in_place_and_out() -> None:
    a, b = filled((2, 3)), filled((3, 4))
    check_rule(aten.addmm_.default, filled((2, 4)), a, b)
    check_rule(aten.addmm_.default, filled((4,)), a, b)
    check_rule(aten.mm.out, a, b, out=torch.empty(4, 2).t())
    check_rule(aten.baddbmm_.default, filled((1, 2, 4)), a[None], b[None])


def test_results_in_another_dtype_exist_on_cuda() -> None:
    found = rule_of(aten.mm.dtype)
    assert found is not None
    a, b = (spec_of(filled(shape, torch.bfloat16)).on(torch.device("cuda:0")) for shape in ((2, 3), (3, 4)))
    assert str(found(a, b, torch.float32)) == "f32[2, 4]@cuda:0"


def test_refusals_say_what_was_seen() -> None:
    found = rule_of(aten.mm.default)
    assert found is not None
    with pytest.raises(
        ShapeMismatch, match="mm: f32\\[2, 3\\]@cpu has 3 columns, f32\\[2, 3\\]@cpu has 2 rows"
    ):
        found(spec_of(filled((2, 3))), spec_of(filled((2, 3))))
