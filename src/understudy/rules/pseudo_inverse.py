"""Pseudo-inverses: a product of what a decomposition gives, so that they are contiguous."""

from __future__ import annotations

from understudy.errors import ArgumentError, ShapeMismatch
from understudy.rules.linalg import check_matrix, check_square
from understudy.rules.registry import rule
from understudy.shapes.sizes import surely_less
from understudy.spec import TensorSpec


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
    *batch, rows, columns = a.shape
    return a.like((*batch, columns, rows))


def _check_square_unless_empty(a: TensorSpec) -> None:
    """Eager looks no further at matrices without elements. Both is one question, unless all sizes are known to be more."""
    if all(surely_less(0, size) for size in a.shape):
        check_square("pinv", a)
    elif a.numel * (a.shape[-2] - a.shape[-1]) != 0:
        raise ShapeMismatch(f"pinv: expected square matrices, got {a}")
