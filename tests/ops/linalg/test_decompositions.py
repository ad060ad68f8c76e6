from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import MORE_DTYPES, every, filled, layouts

aten = torch.ops.aten
SQUARE = ((3, 3), (2, 3, 3), (0, 3, 3), (2, 0, 0), (1, 1), (2, 2, 3, 3))
OTHER = ((4, 3), (3, 4), (2, 4, 3), (2, 3, 4), (0, 4, 3), (2, 0, 3), (4, 0), (3,), ())


def well_behaved(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    """Positive definite matrices (or any, where they are not square) in every kind of layout."""
    for x in layouts(shape, dtype, few=True):
        if len(shape) >= 2 and shape[-1] == shape[-2]:
            if 0 in x.stride():
                x = (torch.eye(shape[-1]) * 9 + 1).to(dtype).expand(shape)
            else:
                x.copy_((torch.eye(shape[-1]) * 9 + 1).to(dtype).expand(shape))
        yield x


ON_SQUARE = [
    aten.linalg_cholesky_ex.default,
    aten.linalg_cholesky.default,
    *([aten.cholesky.default] if hasattr(aten, "cholesky") else []),  # gone since torch 2.14
    aten.cholesky_inverse.default,
    aten.linalg_inv_ex.default,
    aten.linalg_inv.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten._linalg_eigh.default,
    aten.linalg_eig.default,
    aten._linalg_eigvals.default,
    aten.linalg_ldl_factor_ex.default,
    aten.linalg_det.default,
    aten.linalg_eigh.default,
]
ON_ANY = [
    aten.linalg_lu_factor_ex.default,
    aten.linalg_lu.default,
    aten.linalg_qr.default,
    aten._linalg_svd.default,
    aten.geqrf.default,
    aten.linalg_svd.default,
]
OF_ITS_VALUES = ("singular", "positive-definite", "ill-conditioned", "failed to converge", "NaN")


def unless_values_matter(calls: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Leave out calls that eager refuses for what is in the matrices."""
    for op, *args in calls:
        kwargs = args[-1] if isinstance(args[-1], dict) else {}
        try:
            op(*(args[:-1] if kwargs else args), **kwargs)
        except (RuntimeError, IndexError) as refusal:
            if any(word in str(refusal) for word in OF_ITS_VALUES):
                continue
        yield op, *args


@pytest.mark.parametrize("op", ON_SQUARE + ON_ANY, ids=str)
def test_factorisations(op: Any) -> None:
    def calls() -> Iterator[Any]:
        for shape in SQUARE + OTHER:
            for x in well_behaved(shape):
                yield op, x
        for dtype in MORE_DTYPES:
            yield op, (torch.eye(3) * 9 + 1).to(dtype)

    every(unless_values_matter(calls()))


def test_options() -> None:
    def calls() -> Iterator[Any]:
        for shape in SQUARE + OTHER:
            for x in well_behaved(shape):
                for mode in ("complete", "r", "other"):
                    yield aten.linalg_qr.default, x, mode
                yield aten._linalg_svd.default, x, True
                yield aten._linalg_svd.default, x, False, False
                yield aten._linalg_eigh.default, x, "U", False
                yield aten._linalg_eigh.default, x, "X"
                yield aten.linalg_lu.default, x, {"pivot": False}
                yield aten.linalg_lu_factor_ex.default, x, {"pivot": False}

    every(unless_values_matter(calls()))


RIGHT_SIDES = ((3, 2), (2, 3, 2), (3,), (2, 3), (1, 3, 2), (3, 3), (0, 3, 2), (4, 2), (2, 2, 3, 2))


def test_solvers() -> None:
    def calls() -> Iterator[Any]:
        for shape, right in itertools.product(((3, 3), (2, 3, 3), (1, 3, 3), (2, 4)), RIGHT_SIDES):
            for a, b in itertools.product(well_behaved(shape), layouts(right, few=True)):
                yield aten._linalg_solve_ex.default, a, b
                yield aten.linalg_solve.default, a, b
                pivots = torch.ones(a.shape[:-1], dtype=torch.int32)
                fits = b.ndim > 1 and b.shape[-2] == a.shape[-1] == a.shape[-2] and 0 not in right
                if fits:  # else eager may crash
                    yield aten.linalg_lu_solve.default, a, pivots, b
                if fits and a.shape[:-2] == b.shape[:-2]:
                    yield aten.linalg_ldl_solve.default, a, pivots, b
                yield aten.linalg_solve_triangular.default, a, b, {"upper": True}
                yield aten.triangular_solve.default, b, a
                yield aten.cholesky_solve.default, b, a
                if b.ndim > 1:
                    yield aten._linalg_solve_ex.default, a, b.mT, {"left": False}
                    if fits:
                        yield aten.linalg_lu_solve.default, a, pivots, b.mT, {"left": False, "adjoint": True}
                    yield aten.linalg_solve_triangular.default, a, b.mT, {"upper": True, "left": False}
        for dtype, other in itertools.product(MORE_DTYPES, repeat=2):
            a, b = (torch.eye(3) * 9 + 1).to(dtype), filled((3, 2), other)
            yield aten._linalg_solve_ex.default, a, b
            yield aten.linalg_solve_triangular.default, a, b, {"upper": True}
            yield aten.triangular_solve.default, b, a
            yield aten.cholesky_solve.default, b, a

    every(unless_values_matter(calls()))


def test_solving_from_the_right_for_complex_numbers() -> None:
    def calls() -> Iterator[Any]:
        right = {"left": False}
        for batch in ((), (2,)):
            a, b = (
                filled((*batch, 3, 3), torch.complex64) + torch.eye(3),
                filled((*batch, 4, 3), torch.complex64),
            )
            pivots = torch.ones((*batch, 3), dtype=torch.int32)
            for matrix, side in itertools.product((a, a.conj()), (b, b.conj())):
                yield aten._linalg_solve_ex.default, matrix, side, right
                yield aten.linalg_solve.default, matrix, side, right
                yield aten.linalg_lu_solve.default, matrix, pivots, side, right
                yield aten.linalg_solve_triangular.default, matrix, side, {"upper": True, "left": False}

    every(calls())


def test_householder_products() -> None:
    def calls() -> Iterator[Any]:
        for shape, tau in (
            ((4, 3), (3,)),
            ((4, 3), (2,)),
            ((2, 4, 3), (2, 3)),
            ((3, 4), (3,)),
            ((2, 4, 3), (3, 3)),
        ):
            for a in layouts(shape, few=True):
                yield aten.linalg_householder_product.default, a, filled(tau)

    every(calls())


def test_unpacking() -> None:
    every(
        (aten.lu_unpack.default, lu, torch.ones((*shape[:-2], min(shape[-2:])), dtype=torch.int32), *parts)
        for shape in ((3, 3), (2, 4, 3), (2, 3, 4), (0, 3, 3))
        for lu in layouts(shape, few=True)
        for parts in ((), (True, False), (False, True), (False, False))
    )


def test_errors_are_not_looked_for() -> None:
    every(
        iter(
            [
                (
                    aten._linalg_check_errors.default,
                    torch.zeros((), dtype=torch.int32),
                    "inv",
                    {"is_matrix": True},
                )
            ]
        )
    )
