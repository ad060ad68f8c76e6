"""Real tensors in every kind of layout, to compare rules with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.oracle.real import check_rule, spec_of

FLOAT, HALF, INT, BOOL, COMPLEX = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64
DTYPES = (FLOAT, HALF, INT, BOOL, COMPLEX)
MORE_DTYPES = (*DTYPES, torch.float64, torch.float16, torch.int32, torch.uint8, torch.complex128)
SHAPES = (
    (),
    (3,),
    (0,),
    (1,),
    (2, 3),
    (1, 3),
    (3, 1),
    (0, 3),
    (2, 3, 4),
    (2, 1, 4),
    (2, 0, 4),
    (2, 3, 4, 5),
    (2, 3, 1, 1),
)


def filled(shape: Sequence[int], dtype: torch.dtype = FLOAT) -> torch.Tensor:
    """Small positive numbers, the same in every run."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 5 + 1).to(dtype).reshape(shape)


def permuted(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype = FLOAT) -> torch.Tensor:
    """A dense tensor of this shape whose dimensions lie in memory in this order, the slowest first."""
    inverse = [order.index(dim) for dim in range(len(order))]
    return filled([shape[dim] for dim in order], dtype).permute(inverse)


def strided(shape: Sequence[int], dtype: torch.dtype = FLOAT) -> torch.Tensor:
    """Every second element of a larger tensor."""
    return filled([2 * size for size in shape], dtype)[tuple(slice(None, None, 2) for _ in shape)]


def expanded(shape: Sequence[int], dim: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    narrow = [1 if position == dim else size for position, size in enumerate(shape)]
    return filled(narrow, dtype).expand(*shape)


def layouts(shape: Sequence[int], dtype: torch.dtype = FLOAT, *, few: bool = False) -> Iterator[torch.Tensor]:
    """A tensor of this shape in row-major order, in permuted ones, with gaps, and expanded."""
    ndim = len(shape)
    yield filled(shape, dtype)
    if ndim == 0:
        return
    orders: list[tuple[int, ...]] = list(itertools.permutations(range(ndim)))[1:]
    if few and ndim > 2:
        orders = [
            (0, *range(2, ndim), 1),
            (*range(ndim - 2), ndim - 1, ndim - 2),
            tuple(reversed(range(ndim))),
        ]
    for order in orders:
        yield permuted(shape, order, dtype)
    yield strided(shape, dtype)
    for dim in (0, ndim - 1) if few else range(ndim):
        yield expanded(shape, dim, dtype)


def formats(shape: Sequence[int], dtype: torch.dtype = FLOAT) -> list[torch.Tensor]:
    """A batch of images in some layouts: contiguous, channels last, reversed, with gaps, expanded."""
    ndim = len(shape)
    return [
        filled(shape, dtype),
        permuted(shape, (0, *range(2, ndim), 1), dtype),
        permuted(shape, tuple(reversed(range(ndim))), dtype),
        strided(shape, dtype),
        expanded(shape, 0, dtype),
    ]


def every(checks: Iterator[tuple[Any, ...]]) -> None:
    """Check all of these calls, and show the first few that fail together."""
    failures = []
    for op, *call in checks:
        kwargs = call.pop() if call and isinstance(call[-1], dict) else {}
        try:
            check_rule(op, *call, **kwargs)
        except AssertionError as failure:
            failures.append(str(failure))
        except Exception as refusal:
            shown = [spec_of(x) if isinstance(x, torch.Tensor) else x for x in call]
            failures.append(
                f"{op}{shown}{kwargs}: only the rule refuses: {type(refusal).__name__}: {refusal}"
            )
    if failures:
        shown = "\n".join(failures[:8])
        pytest.fail(f"{len(failures)} calls differ:\n{shown}", pytrace=False)


Calls = Callable[[], Iterator[tuple[Any, ...]]]
