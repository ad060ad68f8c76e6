"""Writing results into a tensor that exists."""

from __future__ import annotations

from understudy.errors import ShapeMismatch
from understudy.rules.registry import check_castable, check_no_overlap
from understudy.spec import Same, TensorSpec, same_shape

__all__ = ["check_castable", "check_no_overlap", "written_in_place"]


def written_in_place(name: str, target: TensorSpec, result: TensorSpec, of: int = 0) -> Same:
    """`target`, input number `of`, after this result was written into it."""
    if not same_shape(result.shape, target.shape):
        raise ShapeMismatch(
            f"{name}: the result has shape {list(result.shape)}, which does not fit into {target}, "
            "written in place"
        )
    check_castable(name, result.dtype, target.dtype)
    check_no_overlap(name, target)
    return Same(of)
