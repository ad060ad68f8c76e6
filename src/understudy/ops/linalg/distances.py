"""Distances between rows, cross products and renormalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decide_contiguity, decomposition
from understudy.ops.shared.dims import wrap_dim
from understudy.ops.shared.dtypes import COMPLEX, COMPLEX_HALF, FLOATS, NUMBERS, check_cpu_dtype
from understudy.ops.views.basic import transpose_spec
from understudy.shapes.sizes import from_torch, surely_equal, surely_less
from understudy.spec import (
    TensorSpec,
    broadcast_anyhow,
    broadcast_shapes,
    check_broadcastable,
    common_device,
    real_type,
    result_type,
    spec_of,
)

CDIST_DTYPES = frozenset({torch.float32, torch.float64})


@rule("dist")
def dist(spec: TensorSpec, other: TensorSpec, p: Any = 2) -> TensorSpec:
    check_broadcastable(spec.shape, other.shape)
    if torch.bool in (spec.dtype, other.dtype):
        raise DtypeError(f"dist: {spec} and {other} can't be subtracted, because of the bool")
    difference = spec.like((), dtype=result_type(spec, other), device=common_device((spec, other)))
    check_cpu_dtype("dist", difference, FLOATS | COMPLEX | COMPLEX_HALF)
    return difference.like(dtype=real_type(difference.dtype))


@rule("_cdist_forward", "cdist")
def cdist(x1: TensorSpec, x2: TensorSpec, p: float = 2.0, compute_mode: int | None = None) -> TensorSpec:
    _check_rows("cdist", x1, x2)
    if p < 0:
        raise ArgumentError(f"cdist: p must not be negative, got {p}")
    check_cpu_dtype("cdist", x1, CDIST_DTYPES)
    check_cpu_dtype("cdist", x2, CDIST_DTYPES)
    batch = broadcast_anyhow(x1.shape[:-2], x2.shape[:-2])
    return x1.like((*batch, x1.shape[-2], x2.shape[-2]), dtype=result_type(x1, x2))


@rule("_euclidean_dist")
def euclidean_dist(x1: TensorSpec, x2: TensorSpec) -> TensorSpec:
    _check_rows("cdist", x1, x2)
    batch = broadcast_anyhow(x1.shape[:-2], x2.shape[:-2])
    return x1.like((*batch, x1.shape[-2], x2.shape[-2]), dtype=result_type(x1, x2))


def _check_rows(what: str, x1: TensorSpec, x2: TensorSpec) -> None:
    if x1.ndim < 2 or x2.ndim < 2:
        raise ShapeMismatch(f"{what}: expected two tensors of rows, at least 2-D, got {x1} and {x2}")
    if x1.shape[-1] != x2.shape[-1]:
        raise ShapeMismatch(f"{what}: rows of {x1} have {x1.shape[-1]} columns, rows of {x2} have {x2.shape[-1]}")


@rule("_cdist_backward")
def cdist_backward(grad: TensorSpec, x1: TensorSpec, x2: TensorSpec, p: float, cdist: TensorSpec) -> TensorSpec:
    batch = broadcast_anyhow(x1.shape[:-2], x2.shape[:-2])
    if any(surely_equal(size, 0) for size in (*batch, *x1.shape[-2:], x2.shape[-2])):
        return x1.like(x1.shape)  # nothing to compute: zeros, as they are given
    return x1.like((*batch, *x1.shape[-2:]))


@rule("pdist")
def pdist(spec: TensorSpec, p: float = 2.0) -> TensorSpec:
    if p < 0:
        raise ArgumentError(f"pdist: p must not be negative, got {p}")
    return _between_rows(spec)


@rule("_pdist_forward")
def pdist_forward(spec: TensorSpec, p: float = 2.0) -> TensorSpec:
    if not spec.is_contiguous:
        raise ArgumentError(f"pdist: {spec} must be contiguous here; torch.pdist takes any layout")
    return _between_rows(spec)


def _between_rows(spec: TensorSpec) -> TensorSpec:
    """One distance for each pair of rows."""
    if spec.ndim != 2:
        raise ShapeMismatch(f"pdist: expected a matrix, got {spec}")
    check_cpu_dtype("pdist", spec, CDIST_DTYPES)
    rows = spec.shape[0]
    return spec.like((rows * (rows - 1) // 2,))


@rule("_pdist_backward")
def pdist_backward(grad: TensorSpec, spec: TensorSpec, p: float, pdist: TensorSpec) -> TensorSpec:
    if not spec.is_contiguous:
        raise ArgumentError(f"pdist: {spec} must be contiguous here; torch.pdist takes any layout")
    return spec.like()


@rule("linalg_cross")
def linalg_cross(spec: TensorSpec, other: TensorSpec, *, dim: int = -1) -> TensorSpec:
    return _cross_spec(spec, other, dim)


@rule("cross")
def cross(spec: TensorSpec, other: TensorSpec, dim: int | None = None) -> TensorSpec:
    if dim is None:
        found = next((d for d, size in enumerate(spec.shape) if size == 3), None)
        if found is None:
            raise ShapeMismatch(f"cross: {spec} has no dimension of size 3")
        dim = found
    return _cross_spec(spec, other, dim)


def _cross_spec(spec: TensorSpec, other: TensorSpec, dim: int) -> TensorSpec:
    if spec.ndim != other.ndim:
        raise ShapeMismatch(f"cross: {spec} and {other} must have as many dimensions")
    dim = wrap_dim(dim, spec.ndim)
    if not spec.shape or spec.shape[dim] != 3 or other.shape[dim] != 3:
        raise ShapeMismatch(f"cross: dimension {dim} of {spec} and of {other} must have size 3")
    check_cpu_dtype("cross", spec, NUMBERS)
    return spec.like(broadcast_shapes(spec.shape, other.shape))


@rule("renorm")
def renorm(spec: TensorSpec, p: Any, dim: int, maxnorm: Any) -> TensorSpec:
    if isinstance(p, complex) or p <= 0:
        raise ArgumentError(f"renorm: p must be a positive number, got {p}")
    if isinstance(maxnorm, complex) or maxnorm < 0:
        raise ArgumentError(f"renorm: maxnorm must not be negative, got {maxnorm}")
    if spec.ndim < 2:
        raise ShapeMismatch(f"renorm: expected at least 2 dimensions, got {spec}")
    wrap_dim(dim, spec.ndim)
    check_cpu_dtype("renorm", spec, FLOATS | COMPLEX)
    return spec.like()


aten = torch.ops.aten
Tensor = torch.Tensor
MANY_ROWS = 25
"""Of more rows than this, euclidean distances are computed by a product of matrices, unless told otherwise."""
IF_MANY, NEVER = (None, 0), 2
"""When to do so: `compute_mode`."""


@decomposition("cdist")
def decompose_cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """C++ asks first whether there are elements, also where one kernel takes what there is."""
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


def _may_be_contiguous_transposed(shape: Sequence[Any]) -> bool:
    """Whether there are sizes for which a matrix and its transpose are both contiguous."""
    *batch, rows, columns = map(from_torch, shape)
    return not (surely_less(1, rows) and surely_less(1, columns) and all(surely_less(0, size) for size in batch))


class GradientLayouts:
    """Decides, for autograd, what it asks of the gradient size by size: whether it is contiguous, and for the gradient of
    the second operand whether it and the result are, transposed. The specs are kept, and with them the answers."""

    def __init__(self, are_wanted: tuple[bool, bool], result: TensorSpec) -> None:
        self.are_wanted = are_wanted
        self.result = result
        self.asked: list[TensorSpec] = []

    def __call__(self, gradients: tuple[Any, ...]) -> None:
        (gradient,) = gradients
        spec = spec_of(gradient)
        if spec is None:
            return
        self.asked = [spec] if self.are_wanted[0] else []
        if self.are_wanted[1]:
            self.asked += [transpose_spec(each, -2, -1) for each in (spec, self.result)]
        for spec in self.asked:
            decide_contiguity(spec)
