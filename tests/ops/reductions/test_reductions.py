from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import MORE_DTYPES, SHAPES, every, filled, layouts
from tests.oracle.real import check_rule, spec_of
from understudy.errors import DataDependentOutputException, DimensionError, DtypeError
from understudy.ops.variants import rule_of

aten = torch.ops.aten

OVER_DIMS = [
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.nansum.default,
    aten.amax.default,
    aten.amin.default,
    aten.logsumexp.default,
    aten.any.dims,
    aten.all.dims,
    aten.count_nonzero.dim_IntList,
    aten.var.dim,
    aten.std_mean.dim,
]
OVER_ONE_DIM = [
    aten.prod.dim_int,
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.any.dim,
    aten.all.dim,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.count_nonzero.default,
]
OVER_ALL = [
    aten.sum.default,
    aten.mean.default,
    aten.prod.default,
    aten.max.default,
    aten.min.default,
    aten.argmax.default,
    aten.aminmax.default,
    aten.any.default,
    aten.all.default,
    aten.var.default,
    aten.std.default,
    aten.var_mean.default,
    aten.std_mean.default,
    aten.norm.Scalar,
    aten.linalg_vector_norm.default,
    aten.median.default,
    aten.nanmedian.default,
    aten.count_nonzero.default,
    aten.trace.default,
    aten.nansum.default,
    aten.amax.default,
    aten._is_all_true.default,
]
KEEPS = {"keepdim": True}
WITHOUT_KEEPDIM = {aten.count_nonzero.default, aten.count_nonzero.dim_IntList}


def keepdims(op: Any) -> list[dict[str, Any]]:
    return [{}] if op in WITHOUT_KEEPDIM else [{}, KEEPS]


@pytest.mark.parametrize("op", OVER_DIMS, ids=str)
def test_over_dims(op: Any) -> None:
    def calls() -> Iterator[Any]:
        for shape in SHAPES:
            for x in layouts(shape, few=True):
                for count in range(len(shape) + 1):
                    for dims in itertools.combinations(range(len(shape)), count):
                        for keep in keepdims(op):
                            yield op, x, list(dims), keep
        x = filled((2, 3))
        for dims in ([-1], [0, 0], [2], [-3], [1, -1], [1, 0]):
            yield op, x, dims
        for dtype in MORE_DTYPES:
            yield op, filled((2, 3), dtype), [0]

    every(calls())


@pytest.mark.parametrize("op", OVER_ONE_DIM, ids=str)
def test_over_one_dim(op: Any) -> None:
    def calls() -> Iterator[Any]:
        for shape in SHAPES:
            for x in layouts(shape, few=True):
                for dim in range(-len(shape) - 1, len(shape) + 1):
                    for keep in keepdims(op):
                        yield op, x, dim, keep
        for dtype in MORE_DTYPES:
            yield op, filled((2, 3), dtype), 0

    every(calls())


@pytest.mark.parametrize("op", OVER_ALL, ids=str)
def test_over_all(op: Any) -> None:
    every((op, x) for shape in SHAPES for x in layouts(shape, few=True))
    every((op, filled((2, 3), dtype)) for dtype in MORE_DTYPES)


@pytest.mark.parametrize("op", [aten.var, aten.std, aten.var_mean, aten.std_mean], ids=str)
def test_variance_with_correction(op: Any) -> None:
    every(
        (op.correction, x, dims, {"correction": correction, "keepdim": keep})
        for shape in ((2, 3), (2, 3, 4))
        for x in layouts(shape, few=True)
        for dims in (None, [], [0], [-1], [1, 0])
        for correction in (None, 0, 1, 0.5)
        for keep in (False, True)
    )


@pytest.mark.parametrize("order", [2, 1, 0, 0.5, -1, float("inf"), -float("inf")])
def test_norms(order: Any) -> None:
    def calls() -> Iterator[Any]:
        for shape in ((), (3,), (0,), (2, 3), (2, 0, 4)):
            for x in layouts(shape, few=True):
                yield aten.norm.Scalar, x, order
                for dims in ([], [0], [-1], [1, 0], [0, 0]):
                    for keep in (False, True):
                        yield aten.linalg_vector_norm.default, x, order, dims, keep
                        yield aten.norm.ScalarOpt_dim, x, order, dims, keep
        for dtype, wanted in itertools.product(
            MORE_DTYPES, (torch.float32, torch.float64, torch.complex64, torch.int64)
        ):
            x = filled((2, 3), dtype)
            yield aten.linalg_vector_norm.default, x, order, {"dtype": wanted}
            yield aten.norm.ScalarOpt_dtype, x, order, {"dtype": wanted}
            yield aten.norm.ScalarOpt_dim_dtype, x, order, [0], True, {"dtype": wanted}

    every(calls())


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
def test_dtype_of_the_result(wanted: torch.dtype) -> None:
    def calls() -> Iterator[Any]:
        for dtype in MORE_DTYPES:
            x = filled((2, 3), dtype)
            for op in (aten.sum.default, aten.mean.default, aten.prod.default):
                yield op, x, {"dtype": wanted}
            for op in (aten.sum.dim_IntList, aten.mean.dim, aten.nansum.default):
                yield op, x, [0], {"dtype": wanted}
            yield aten.prod.dim_int, x, 0, {"dtype": wanted}

    every(calls())


def test_kthvalue_and_aminmax() -> None:
    every(
        (aten.kthvalue.default, x, k, dim)
        for shape in SHAPES
        for x in layouts(shape, few=True)
        for k in (0, 1, 3)
        for dim in (-1, 0)
    )
    every(
        (aten.aminmax.default, x, {"dim": dim, "keepdim": keep})
        for shape in SHAPES
        for x in layouts(shape, few=True)
        for dim in (-1, 0)
        for keep in (False, True)
    )


def test_conjugated_inputs_give_plain_results() -> None:
    x = filled((2, 3), torch.complex64).conj()
    check_rule(aten.sum.dim_IntList, x, [0])
    check_rule(aten.var_mean.default, x)


def test_written_into_out() -> None:
    check_rule(aten.sum.IntList_out, filled((2, 3)), [0], out=torch.empty(3))
    check_rule(aten.amax.out, filled((2, 3)), [0], out=torch.empty(0))


def test_other_devices_take_what_the_cpu_does_not() -> None:
    found = rule_of(aten.sum.default)
    assert found is not None
    spec = spec_of(filled((2, 3))).like(dtype=torch.complex32, device=torch.device("cuda:1"))
    assert str(found(spec)) == "c32[]@cuda:1"


def test_refusals_say_what_was_seen() -> None:
    x = spec_of(filled((2, 3), torch.int64))
    mean, amax, equal = rule_of(aten.mean.default), rule_of(aten.amax.default), rule_of(aten.equal.default)
    assert mean and amax and equal
    with pytest.raises(DtypeError, match=r"got torch\.int64 for i64\[2, 3\]@cpu; give dtype="):
        mean(x)
    with pytest.raises(DimensionError, match="dimension out of range: expected -2 to 1, got 5"):
        amax(x, [5])
    with pytest.raises(DimensionError, match="dimension 0 of i64\\[0\\]@cpu is empty"):
        amax(x.like((0,)), [0])
    with pytest.raises(DataDependentOutputException, match="depends on the values"):
        equal(x, x)
