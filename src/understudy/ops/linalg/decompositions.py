"""Decompositions and solvers. LAPACK's matrices are column-major, and so are eager's results."""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.dtypes import (
    COMPLEX,
    INTEGERS,
    UNSIGNED,
    check_one_dtype,
)
from understudy.ops.shared.layouts import expand_strides
from understudy.shapes.node import Shape
from understudy.shapes.sizes import at_least_one, smaller
from understudy.spec import (
    TensorSpec,
    broadcast_without_choice,
    complex_type,
    contiguous_strides,
    is_contiguous,
    real_type,
    same_shape,
)

WIDE = frozenset({torch.float32, torch.float64}) | COMPLEX


def column_major(shape: Shape) -> Shape:
    """Strides of a batch of column-major matrices; vectors are contiguous."""
    strides = contiguous_strides(shape)
    if len(shape) < 2:
        return strides
    rows = shape[-2]
    return (*strides[:-2], 1, at_least_one(rows))


def _columns(spec: TensorSpec, shape: Shape, dtype: torch.dtype | None = None) -> TensorSpec:
    return spec.like(shape, stride=column_major(shape), dtype=dtype)


def check_matrix(what: str, a: TensorSpec, computed: TensorSpec | None = None) -> None:
    """`computed`: where this is empty, no kernel is missed, and floats of any width are taken."""
    if a.ndim < 2:
        raise ShapeMismatch(f"{what}: expected a matrix or a batch of them, got {a}")
    if a.dtype in WIDE:
        return
    if computed is None or not (a.is_floating_point or a.is_complex) or not computed.is_empty:
        raise DtypeError(f"{what}: expected float32, float64 or complex numbers, got {a}")


def check_square(what: str, a: TensorSpec, computed: TensorSpec | None = None) -> None:
    check_matrix(what, a, computed)
    if a.shape[-1] != a.shape[-2]:
        raise ShapeMismatch(f"{what}: expected square matrices, got {a}")


def _info(a: TensorSpec) -> TensorSpec:
    return a.like(a.shape[:-2], dtype=torch.int32)


def _least(a: TensorSpec) -> Any:
    rows, columns = a.shape[-2:]
    return smaller(rows, columns)


def _pivots(a: TensorSpec) -> TensorSpec:
    return a.like((*a.shape[:-2], _least(a)), dtype=torch.int32)


# --- factorisations of square matrices


@rule("linalg_cholesky_ex")
def cholesky_ex(a: TensorSpec, *, upper: bool = False, check_errors: bool = False) -> tuple[TensorSpec, ...]:
    check_square("cholesky", a)
    return _columns(a, a.shape), _info(a)


@rule("cholesky")
def cholesky(a: TensorSpec, upper: bool = False) -> TensorSpec:
    return a.like(stride=_cholesky_strides(a))


def _cholesky_strides(a: TensorSpec) -> Shape:
    if a.is_empty:  # eager skips the rest of the checks
        return contiguous_strides(a.shape)
    check_square("cholesky", a)
    return column_major(a.shape)


@rule("cholesky_inverse")
def cholesky_inverse(a: TensorSpec, upper: bool = False) -> TensorSpec:
    check_square("cholesky_inverse", a)
    return _columns(a, a.shape)


@rule("linalg_inv_ex")
def inv_ex(a: TensorSpec, *, check_errors: bool = False) -> tuple[TensorSpec, ...]:
    check_square("inv", a)
    return _columns(a, a.shape), _info(a)


@rule("_linalg_det")
def det(a: TensorSpec) -> tuple[TensorSpec, ...]:
    check_square("det", a)
    return a.like(a.shape[:-2]), _columns(a, a.shape), _pivots(a)


@rule("_linalg_slogdet")
def slogdet(a: TensorSpec) -> tuple[TensorSpec, ...]:
    check_square("slogdet", a)
    batch = a.shape[:-2]
    return a.like(batch), a.like(batch, dtype=real_type(a.dtype)), _columns(a, a.shape), _pivots(a)


@rule("_linalg_eigh")
def eigh(a: TensorSpec, UPLO: str = "L", compute_v: bool = True) -> tuple[TensorSpec, ...]:
    check_square("eigh", a)
    if UPLO.upper() not in ("L", "U"):
        raise ArgumentError(f"eigh: expected UPLO 'L' or 'U', got {UPLO!r}")
    values = a.like(a.shape[:-1], dtype=real_type(a.dtype))
    return values, _columns(a, a.shape) if compute_v else a.like((0,))


@rule("linalg_eig")
def eig(a: TensorSpec) -> tuple[TensorSpec, ...]:
    check_square("eig", a)
    dtype = complex_type(a.dtype)
    by_rows = a.device.type == "cuda"
    vectors = a.like(dtype=dtype) if by_rows else _columns(a, a.shape, dtype)
    return a.like(a.shape[:-1], dtype=dtype), vectors


# --- factorisations of any matrices


@rule("linalg_lu_factor_ex")
def lu_factor_ex(a: TensorSpec, *, pivot: bool = True, check_errors: bool = False) -> tuple[TensorSpec, ...]:
    check_matrix("lu_factor", a)
    if not pivot and a.device.type == "cpu" and not a.is_empty:
        raise ArgumentError("lu_factor: pivot=False is not supported on CPU")
    return _columns(a, a.shape), _pivots(a), _info(a)


@rule("linalg_lu")
def lu(a: TensorSpec, *, pivot: bool = True) -> tuple[TensorSpec, ...]:
    check_matrix("lu", a)
    if not pivot and a.device.type == "cpu" and not a.is_empty:
        raise ArgumentError("lu: pivot=False is not supported on CPU")
    (*batch, rows, columns), least = a.shape, _least(a)
    permutation = a.like((*batch, rows, rows) if pivot else (0,))
    return permutation, a.like((*batch, rows, least)), a.like((*batch, least, columns))


@rule("linalg_qr")
def qr(a: TensorSpec, mode: str = "reduced") -> tuple[TensorSpec, ...]:
    check_matrix("qr", a)
    if mode not in ("reduced", "complete", "r"):
        raise ArgumentError(f"qr: expected mode 'reduced', 'complete' or 'r', got {mode!r}")
    *batch, rows, columns = a.shape
    width = rows if mode == "complete" else _least(a)
    q = a.like((0,)) if mode == "r" else _columns(a, (*batch, rows, width))
    return q, _columns(a, (*batch, width, columns))


@rule("geqrf")
def geqrf(a: TensorSpec) -> tuple[TensorSpec, ...]:
    check_matrix("geqrf", a)
    return _columns(a, a.shape), a.like((*a.shape[:-2], _least(a)))


@rule("linalg_householder_product")
def householder_product(a: TensorSpec, tau: TensorSpec) -> TensorSpec:
    check_matrix("householder_product", a)
    if a.shape[-2] < a.shape[-1] or tau.ndim != a.ndim - 1 or tau.shape[-1] > a.shape[-1]:
        raise ShapeMismatch(f"householder_product: tau {tau} does not match {a}")
    if not same_shape(tau.shape[:-1], a.shape[:-2]) or tau.dtype is not a.dtype:
        raise ShapeMismatch(f"householder_product: expected tau with the batch and dtype of {a}, got {tau}")
    return _columns(a, a.shape)


@rule("ormqr")
def ormqr(
    a: TensorSpec, tau: TensorSpec, other: TensorSpec, left: bool = True, transpose: bool = False
) -> TensorSpec:
    if a.ndim < 2 or other.ndim != a.ndim or tau.ndim != a.ndim - 1:
        raise ShapeMismatch(f"ormqr: shapes of {a}, {tau} and {other} do not match")
    if other.shape[-2 if left else -1] != a.shape[-2] or tau.shape[-1] > a.shape[-2]:
        raise ShapeMismatch(f"ormqr: shapes of {a}, {tau} and {other} do not match")
    batch = a.shape[:-2]
    if not same_shape(tau.shape[:-1], batch) or not same_shape(other.shape[:-2], batch):
        raise ShapeMismatch(f"ormqr: {a}, {tau} and {other} differ in batch")
    if tau.dtype is not a.dtype or other.dtype is not a.dtype or a.dtype not in WIDE:
        raise DtypeError(
            f"ormqr: expected one dtype, of float32, float64 or complex numbers: {a}, {tau}, {other}"
        )
    return _columns(other, other.shape)


@rule("_linalg_svd")
def svd(
    a: TensorSpec, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[TensorSpec, ...]:
    check_matrix("svd", a)
    if driver is not None and a.device.type == "cpu":
        raise ArgumentError("svd: driver= is supported on CUDA only")
    (*batch, rows, columns), least = a.shape, _least(a)
    values = a.like((*batch, least), dtype=real_type(a.dtype))
    if not compute_uv:
        return a.like((0,)), values, a.like((0,))
    u = _columns(a, (*batch, rows, rows if full_matrices else least))
    shape = (*batch, columns if full_matrices else least, columns)
    by_rows = (
        a.device.type != "cpu" and driver != "gesvd"
    )  # cuSOLVER's default driver returns V, which is transposed
    return u, values, a.like(shape) if by_rows else _columns(a, shape)


# --- solvers


def _check_pair(what: str, a: TensorSpec, b: TensorSpec) -> None:
    check_one_dtype(what, a, b)
    if b.dtype not in WIDE:
        raise DtypeError(f"{what}: expected float32, float64 or complex numbers, got {b}")


def _solved_shape(what: str, a: TensorSpec, b: TensorSpec, left: bool) -> Shape:
    if b.ndim < 2:
        raise ShapeMismatch(f"{what}: expected a matrix or a batch of them, got {b}")
    if a.shape[-1] != b.shape[-2 if left else -1]:
        raise ShapeMismatch(f"{what}: shapes of {a} and {b} do not match")
    return (*broadcast_without_choice(a.shape[:-2], b.shape[:-2]), *b.shape[-2:])


def _solution(spec: TensorSpec, shape: Shape, left: bool) -> TensorSpec:
    """With left=False the adjoint system is solved; the result is its transpose, with the conjugation bit set."""
    if left:
        return _columns(spec, shape)
    rows = spec.like(shape)
    if not spec.is_complex or rows.is_empty:
        return rows
    return rows.as_view(shape, rows.stride, conj=True)


@rule("_linalg_solve_ex")
def solve_ex(
    a: TensorSpec, b: TensorSpec, *, left: bool = True, check_errors: bool = False
) -> tuple[TensorSpec, ...]:
    check_square("solve", a)
    _check_pair("solve", a, b)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    if vector:
        if not left:
            raise ArgumentError("solve: left=False is not supported for vectors")
        if b.shape[-1] != a.shape[-1]:
            raise ShapeMismatch(f"solve: shapes of {a} and {b} do not match")
        shape = (*broadcast_without_choice(a.shape[:-2], b.shape[:-1]), b.shape[-1])
    else:
        shape = _solved_shape("solve", a, b, left)
    return _solution(a, shape, left), _columns(a, a.shape), _pivots(a), _info(a)


@rule("linalg_solve_triangular")
def solve_triangular(
    a: TensorSpec, b: TensorSpec, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    check_square("solve_triangular", a)
    shape = _solved_shape("solve_triangular", a, b, left)
    if a.device.type != "cpu":
        return NotImplemented
    if a.conj and _is_column_major(a, (*shape[:-2], *a.shape[-2:])):
        return b.like(shape)  # avoids a copy of the matrices: the adjoint system is solved, and transposed
    return _columns(a, shape)


def _is_column_major(a: TensorSpec, shape: Shape) -> bool:
    """Whether these matrices, broadcast to this shape, are dense and column-major."""
    stride = a.stride if same_shape(a.shape, shape) else expand_strides(a, shape)[1]
    transposed = (*shape[:-2], shape[-1], shape[-2]), (*stride[:-2], stride[-1], stride[-2])
    return is_contiguous(*transposed)


@rule("triangular_solve")
def triangular_solve(
    b: TensorSpec, a: TensorSpec, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    if a.ndim < 2 or b.ndim < 2:
        raise ShapeMismatch(f"triangular_solve: expected matrices, got {b} and {a}")
    check_square("triangular_solve", a)
    _check_pair("triangular_solve", a, b)
    shape = _solved_shape("triangular_solve", a, b, True)
    return _columns(b, shape), _columns(a, (*shape[:-2], *a.shape[-2:]))


@rule("cholesky_solve")
def cholesky_solve(b: TensorSpec, a: TensorSpec, upper: bool = False) -> TensorSpec:
    if a.ndim < 2 or b.ndim < 2:
        raise ShapeMismatch(f"cholesky_solve: expected matrices, got {b} and {a}")
    check_square("cholesky_solve", a)
    _check_pair("cholesky_solve", a, b)
    shape = _solved_shape("cholesky_solve", a, b, True)
    return _columns(b, shape)


@rule("linalg_lu_solve")
def lu_solve(
    lu: TensorSpec, pivots: TensorSpec, b: TensorSpec, *, left: bool = True, adjoint: bool = False
) -> TensorSpec:
    check_square("lu_solve", lu, b)
    check_one_dtype("lu_solve", lu, b)
    if pivots.dtype is not torch.int32:
        raise DtypeError(f"lu_solve: expected int32 pivots, got {pivots}")
    if not same_shape(pivots.shape, lu.shape[:-1]):
        raise ShapeMismatch(f"lu_solve: shape of pivots {pivots} does not match {lu}")
    return _solution(b, _solved_shape("lu_solve", lu, b, left), left)


@rule("lu_unpack")
def lu_unpack(
    lu: TensorSpec, pivots: TensorSpec, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[TensorSpec, ...]:
    if lu.ndim < 2:
        raise ShapeMismatch(f"lu_unpack: expected a matrix or a batch of them, got {lu}")
    if unpack_pivots and pivots.dtype is not torch.int32:
        raise DtypeError(f"lu_unpack: expected int32 pivots, got {pivots}")
    (*batch, rows, columns), least = lu.shape, _least(lu)
    nothing = lu.like((0,))
    permutation = lu.like((*batch, rows, rows)) if unpack_pivots else nothing
    if not unpack_data:
        return permutation, nothing, nothing
    return permutation, lu.like((*batch, rows, least)), lu.like((*batch, least, columns))


@rule("linalg_ldl_factor_ex")
def ldl_factor_ex(
    a: TensorSpec, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[TensorSpec, ...]:
    check_square("ldl_factor", a)
    return _columns(a, a.shape), _pivots(a), _info(a)


@rule("linalg_ldl_solve")
def ldl_solve(ld: TensorSpec, pivots: TensorSpec, b: TensorSpec, *, hermitian: bool = False) -> TensorSpec:
    check_square("ldl_solve", ld, ld)
    check_one_dtype("ldl_solve", ld, b)
    if not same_shape(pivots.shape, ld.shape[:-1]):
        raise ShapeMismatch(f"ldl_solve: shape of pivots {pivots} does not match {ld}")
    if pivots.dtype not in INTEGERS | UNSIGNED:
        raise DtypeError(f"ldl_solve: expected integer pivots, got {pivots}")
    return _columns(b, _solved_shape("ldl_solve", ld, b, True))


@rule("_linalg_eigvals")
def eigvals(a: TensorSpec) -> TensorSpec:
    return eig(a)[0]


@rule("_linalg_check_errors")
def check_errors(info: TensorSpec, api_name: str, *, is_matrix: bool) -> None:
    """A check of values: does nothing without data."""
