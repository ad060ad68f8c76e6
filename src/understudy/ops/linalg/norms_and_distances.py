"""Ranks and pseudo-inverses of matrices, least squares, distances between rows, cross products, renormalisation:
rules, and decompositions for symbolic sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.linalg.decompositions import check_matrix, check_square
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import (
    decide_contiguity,
    decomposition,
)
from understudy.ops.shared.dims import wrap_dim
from understudy.ops.shared.dtypes import (
    check_one_dtype,
    unless_empty,
)
from understudy.ops.variants import copy_into_out
from understudy.ops.views.basic import transpose_spec
from understudy.shapes.sizes import from_torch, is_provably_equal, is_provably_less
from understudy.spec import (
    TensorSpec,
    broadcast_shapes,
    broadcast_without_choice,
    check_broadcastable,
    common_device,
    contiguous_strides,
    preserved_copy,
    real_type,
    result_type,
    same_shape,
    spec_of,
)

aten = torch.ops.aten
Tensor = torch.Tensor


def rank_into_out(matrix_rank: Callable[..., Any], *args: object, out: Any = None, **kwargs: object) -> Any:
    """The rank is computed first, and copied into `out=`."""
    result = matrix_rank(*args, **kwargs)
    if out is None:
        return result
    return copy_into_out(result, out)


# --- Least squares, where the sizes of the four results do not depend on the rank of the matrices -------

CPU_DRIVERS = ("gels", "gelsy", "gelsd", "gelss")
DTYPES = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


@rule("linalg_lstsq")
def lstsq(a: TensorSpec, b: TensorSpec, rcond: object = None, *, driver: str | None = None) -> Any:
    driver = _driver(a, driver)
    is_vector = _check(a, b)
    if not is_vector and a.ndim != b.ndim:
        return NotImplemented
    rows, columns = a.shape[-2:]
    right = () if is_vector else b.shape[-1:]
    batch = broadcast_shapes(a.shape[:-2], b.shape[:-1] if is_vector else b.shape[:-2])
    if driver == "gels" and (a.is_symbolic or b.is_symbolic) and rows > columns:
        return (
            NotImplemented  # C++ asks for the number of residuals as an integer when it computes the gradient
        )
    if driver in ("gelsd", "gelss"):
        if rows > columns:
            return NotImplemented  # residuals exist only for matrices of full rank
        values = a.like((*a.shape[:-2], rows), dtype=real_type(a.dtype))
    else:
        values = a.like((0,), dtype=real_type(a.dtype))
    has_residuals = driver == "gels" and rows > columns
    residuals = a.like((*batch, *(right or (1,))) if has_residuals else (0,), dtype=real_type(a.dtype))
    rank = a.like(a.shape[:-2] if driver != "gels" else (0,), dtype=torch.int64)
    return _solution(a, batch, columns, right, rows), residuals, rank, values


def _driver(a: TensorSpec, driver: str | None) -> str:
    known = CPU_DRIVERS if a.device.type == "cpu" else ("gels",)
    if driver is not None and driver not in known:
        raise ArgumentError(
            f"linalg.lstsq: expected a driver of {', '.join(known)} on {a.device}, got {driver!r}"
        )
    return driver or ("gelsy" if a.device.type == "cpu" else "gels")


def _check(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether the right side is one of vectors."""
    if a.ndim < 2 or b.ndim < 1:
        raise ShapeMismatch(f"linalg.lstsq: expected matrices, got {a} and {b}")
    if a.dtype is not b.dtype or a.dtype not in DTYPES:
        raise DtypeError(
            f"linalg.lstsq: expected tensors of one dtype (float32, float64 or complex), got {a} and {b}"
        )
    if a.ndim - 1 == b.ndim and same_shape(b.shape, a.shape[:-1]):
        return True
    if not same_shape(b.shape[-2:-1], a.shape[-2:-1]):
        raise ShapeMismatch(f"linalg.lstsq: {a} and {b} differ in the number of rows")
    return False


def _solution(
    a: TensorSpec, batch: Sequence[Any], columns: object, right: Sequence[Any], rows: Any
) -> TensorSpec:
    """The first rows of the column-major buffer in which the kernel computes."""
    column = max(rows, columns, 1)
    width = right[0] if right else 1
    steps = [step * max(width, 1) * column for step in contiguous_strides(tuple(batch))]
    return TensorSpec(
        (*batch, columns, *right), (*steps, 1, *([column] if right else [])), dtype=a.dtype, device=a.device
    )


# --- Pseudo-inverses: the result of a matrix product, so contiguous ------------------


@rule("linalg_pinv.atol_rtol_tensor")
def pinv(
    a: TensorSpec, *, atol: TensorSpec | None = None, rtol: TensorSpec | None = None, hermitian: bool = False
) -> TensorSpec:
    check_matrix("pinv", a)
    if hermitian:
        _check_square_unless_empty(a)
    for name, tolerance in (("atol", atol), ("rtol", rtol)):
        if tolerance is not None and tolerance.is_complex:
            raise ArgumentError(f"pinv: {name} must be real, got {tolerance}")
    batch = a.shape[:-2]
    tolerances = [each.shape for each in (atol, rtol) if each is not None and each.ndim > 0]
    if tolerances and not a.is_empty:  # eager skips the other checks for empty matrices
        batch = broadcast_shapes(batch, *tolerances)
    return a.like((*batch, a.shape[-1], a.shape[-2]))


def _check_square_unless_empty(a: TensorSpec) -> None:
    """Eager accepts any empty matrices. Square or empty is one guard, unless all sizes are known to be positive."""
    if all(is_provably_less(0, size) for size in a.shape):
        check_square("pinv", a)
    elif a.numel * (a.shape[-2] - a.shape[-1]) != 0:
        raise ShapeMismatch(f"pinv: expected square matrices, got {a}")


@rule("dist")
def dist(spec: TensorSpec, other: TensorSpec, p: object = 2) -> TensorSpec:
    check_broadcastable(spec.shape, other.shape)
    if torch.bool in (spec.dtype, other.dtype):
        raise DtypeError(f"dist: bool tensors are not supported, got {spec} and {other}")
    if isinstance(p, (int, float)) and (p < 0 or p == math.inf) and (spec.is_empty or other.is_empty):
        raise ArgumentError(
            f"dist: the norm of order {p} is undefined without elements, got {spec} and {other}"
        )
    difference = spec.like((), dtype=result_type(spec, other), device=common_device((spec, other)))
    return difference.like(dtype=real_type(difference.dtype))


@rule("_cdist_forward", "cdist")
def cdist(x1: TensorSpec, x2: TensorSpec, p: float = 2.0, compute_mode: int | None = None) -> TensorSpec:
    _check_rows("cdist", x1, x2)
    if p < 0:
        raise ArgumentError(f"cdist: p must not be negative, got {p}")
    return _distances(x1, x2)


@rule("_euclidean_dist")
def euclidean_dist(x1: TensorSpec, x2: TensorSpec) -> TensorSpec:
    _check_rows("cdist", x1, x2)
    return _distances(x1, x2)


def _distances(x1: TensorSpec, x2: TensorSpec) -> TensorSpec:
    shape = (*broadcast_without_choice(x1.shape[:-2], x2.shape[:-2]), x1.shape[-2], x2.shape[-2])
    unless_empty((*shape, x1.shape[-1]), check_one_dtype, "cdist", x1, x2)
    return x1.like(shape)


def _check_rows(what: str, x1: TensorSpec, x2: TensorSpec) -> None:
    if x1.ndim < 2 or x2.ndim < 2:
        raise ShapeMismatch(f"{what}: expected two tensors of rows, at least 2-D, got {x1} and {x2}")
    if x1.shape[-1] != x2.shape[-1]:
        raise ShapeMismatch(
            f"{what}: rows of {x1} have {x1.shape[-1]} columns, rows of {x2} have {x2.shape[-1]}"
        )


@rule("_cdist_backward")
def cdist_backward(
    grad: TensorSpec, x1: TensorSpec, x2: TensorSpec, p: float, cdist: TensorSpec
) -> TensorSpec:
    batch = broadcast_without_choice(x1.shape[:-2], x2.shape[:-2])
    usual = x1.like((*batch, *x1.shape[-2:]))
    is_like_x1 = x1.ndim == usual.ndim and all(
        map(is_provably_equal, x1.shape + x1.stride, usual.shape + usual.stride)
    )
    if not is_like_x1 and (grad.is_empty or x1.is_empty):
        return preserved_copy(x1)  # there is nothing to compute: zeros like x1, without the batch of x2
    return usual


@rule("_pdist_forward")
def pdist_forward(spec: TensorSpec, p: float = 2.0) -> TensorSpec:
    if not spec.is_contiguous:
        raise ArgumentError(f"pdist: {spec} must be contiguous; torch.pdist supports any layout")
    return _between_rows(spec)


def _between_rows(spec: TensorSpec) -> TensorSpec:
    """One distance for each pair of rows."""
    if spec.ndim != 2:
        raise ShapeMismatch(f"pdist: expected a matrix, got {spec}")
    rows = spec.shape[0]
    return spec.like((rows * (rows - 1) // 2,))


@rule("_pdist_backward")
def pdist_backward(grad: TensorSpec, spec: TensorSpec, p: float, pdist: TensorSpec) -> TensorSpec:
    if not spec.is_contiguous:
        raise ArgumentError(f"pdist: {spec} must be contiguous; torch.pdist supports any layout")
    return spec.like()


@rule("linalg_cross")
def linalg_cross(spec: TensorSpec, other: TensorSpec, *, dim: int = -1) -> TensorSpec:
    return _cross_spec(spec, other, dim)


def _cross_spec(spec: TensorSpec, other: TensorSpec, dim: int) -> TensorSpec:
    if spec.ndim != other.ndim:
        raise ShapeMismatch(f"cross: expected the same number of dimensions, got {spec} and {other}")
    dim = wrap_dim(dim, spec.ndim)
    if not spec.shape or spec.shape[dim] != 3 or other.shape[dim] != 3:
        raise ShapeMismatch(f"cross: dimension {dim} of {spec} and of {other} must have size 3")
    return spec.like(broadcast_shapes(spec.shape, other.shape))


@decomposition("linalg_cond.p_str")
def decompose_condition(a: Tensor, p: str) -> Any:
    if a.dim() < 2 or not (a.is_floating_point() or a.is_complex()) or a.shape[-1] != a.shape[-2]:
        return NotImplemented
    if a.numel() == 0:
        return torch.zeros(a.shape[:-2], dtype=real_type(a.dtype), device=a.device)
    inverse, info = torch.linalg.inv_ex(a)
    inverse.masked_fill_(info.unsqueeze_(-1).unsqueeze_(-1) > 0, math.inf)
    norms = [torch.linalg.matrix_norm(each, p) for each in (a, inverse)]
    return norms[0].mul(norms[1]).nan_to_num_(math.inf, math.inf, -math.inf)


@rule("renorm")
def renorm(spec: TensorSpec, p: Any, dim: int, maxnorm: Any) -> TensorSpec:
    if isinstance(p, complex) or p <= 0:
        raise ArgumentError(f"renorm: p must be a positive number, got {p}")
    if isinstance(maxnorm, complex) or maxnorm < 0:
        raise ArgumentError(f"renorm: maxnorm must not be negative, got {maxnorm}")
    if spec.ndim < 2:
        raise ShapeMismatch(f"renorm: expected at least 2 dimensions, got {spec}")
    kept = wrap_dim(dim, spec.ndim)
    if p == math.inf and any(size == 0 for at, size in enumerate(spec.shape) if at != kept):
        raise ShapeMismatch(f"renorm: p=inf needs slices with elements, got {spec}")
    return spec.like()


MANY_ROWS = 25
"""With more rows than this, euclidean distances are computed by a matrix product, depending on `compute_mode`."""
IF_MANY, NEVER = (None, 0), 2
"""Values of `compute_mode`."""


@decomposition("cdist")
def decompose_cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """C++ checks first for empty inputs, which adds a guard even where the kernel would accept them."""
    if x1.dim() < 2 or x2.dim() < 2:
        return NotImplemented
    if p == 2 and compute_mode != NEVER:
        are_many = x1.shape[-2] > MANY_ROWS or x2.shape[-2] > MANY_ROWS
        if compute_mode not in IF_MANY or are_many:
            return NotImplemented
    result = aten._cdist_forward.default(x1, x2, p, compute_mode)
    if result.grad_fn is not None and _may_be_contiguous_transposed(result.shape):
        result.grad_fn.register_prehook(GradientLayouts((x1.requires_grad, x2.requires_grad), result._spec))
    return result


def _may_be_contiguous_transposed(shape: Sequence[object]) -> bool:
    """Whether there are sizes for which a matrix and its transpose are both contiguous."""
    *batch, rows, columns = map(from_torch, shape)
    are_larger = is_provably_less(1, rows) and is_provably_less(1, columns)
    return not (are_larger and all(is_provably_less(0, size) for size in batch))


class GradientLayouts:
    """Decides the layout questions that autograd asks about the gradient, with one guard each: whether it is
    contiguous, and, for the gradient of the second operand, whether it and the result are contiguous when transposed.
    Keeps the specs alive, and with them the answers."""

    def __init__(self, are_wanted: tuple[bool, bool], result: TensorSpec) -> None:
        self.are_wanted = are_wanted
        self.result = result
        self.asked: list[TensorSpec] = []

    def __call__(self, gradients: tuple[object, ...]) -> None:
        (gradient,) = gradients
        spec = spec_of(gradient)
        if spec is None:
            return
        self.asked = [spec] if self.are_wanted[0] else []
        if self.are_wanted[1]:
            self.asked += [transpose_spec(each, -2, -1) for each in (spec, self.result)]
        for spec in self.asked:
            decide_contiguity(spec)
