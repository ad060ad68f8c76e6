"""Products of three tensors, summed over some dimensions: what bilinear layers and their gradients are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.rules.reduced_dims import wrap_dims
from understudy.rules.registry import rule
from understudy.spec import TensorSpec


@rule("_trilinear")
def trilinear(
    i1: TensorSpec, i2: TensorSpec, i3: TensorSpec, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Any:  # fmt: skip
    """Each tensor gets dimensions of size 1 at some places; sizes that meet are the same."""
    rank = i1.ndim + len(expand1)
    aligned = [
        _with_gaps(spec, wrap_dims(places, rank), rank)
        for spec, places in ((i1, expand1), (i2, expand2), (i3, expand3))
    ]
    if not 0 <= unroll_dim < rank or any(len(sizes) != rank for sizes in aligned):
        return NotImplemented
    if i2.dtype is not i1.dtype or i3.dtype is not i1.dtype:
        return NotImplemented
    shape: list[Any] = []
    summed = wrap_dims(sumdim, rank)
    for dim, meeting in enumerate(zip(*aligned, strict=True)):
        sizes = [size for size in meeting if size is not None]
        if not sizes or any(size != sizes[0] for size in sizes[1:]):
            return NotImplemented
        if dim not in summed:
            shape.append(sizes[0])
    return i1.like(shape)


def _with_gaps(spec: TensorSpec, places: Sequence[int], rank: int) -> list[Any]:
    sizes = iter(spec.shape)
    aligned = [None if dim in places else next(sizes, None) for dim in range(rank)]
    return [*aligned, *sizes]
