"""Real tensors of many dtypes and layouts, and calls on them that are compared with rules."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from tests.oracle.real import check_rule

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
COMPLEX_BFLOAT = {torch.bfloat16.to_complex()} - {torch.complex64}  # empty where torch has no such dtype
MORE_DTYPES = (*DTYPES, torch.float16, torch.float64, torch.uint8, torch.complex32)


def overloads(*names: str) -> list[Any]:
    """`"add.Tensor"` → the operator."""
    return [functools.reduce(getattr, (name if "." in name else f"{name}.default").split("."), torch.ops.aten)
            for name in names]  # fmt: skip


def flat(dtype: torch.dtype) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ones(480, dtype=torch.float32).to(dtype)


def layouts(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """One tensor of each layout: dense and not, permuted, expanded, 0-dim, empty, odd strides."""
    data = flat(dtype)
    yield data[:6].view(2, 3)
    yield data[0]
    yield data[:12].view(4, 3).t()
    yield data[:120].view(2, 3, 4, 5).permute(0, 3, 1, 2)
    yield data[:120].view(2, 3, 4, 5).permute(2, 0, 3, 1)[::2]
    yield data[:3].view(3, 1).expand(3, 4)
    yield data[:3].expand(4, 2, 3).permute(2, 1, 0)
    yield data.as_strided((2, 1, 3), (3, 7, 1))
    yield data.as_strided((2, 1, 3), (1, 7, 4))
    yield data[:0].view(2, 0, 3).permute(2, 1, 0)
    yield data[1:9:2]


def pairs(a: torch.dtype, b: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs that broadcast together, in many layouts."""
    one, two = flat(a), flat(b)
    yield one[:6].view(2, 3), two[:3]
    yield one[0], two[0]
    yield one[0], two[:3]
    yield one[:3], two[0]
    yield one[:12].view(4, 3).t(), two[:12].view(3, 4)
    yield one[:12].view(3, 4), two[:12].view(4, 3).t()
    yield one[:4], two[:12].view(4, 3).t()
    yield one[:120].view(2, 3, 4, 5).permute(0, 3, 1, 2), two[:5].view(1, 5, 1, 1)
    yield one[:120].view(2, 3, 4, 5).permute(0, 3, 1, 2), two[:120].view(2, 3, 4, 5).permute(0, 3, 1, 2)
    yield one[:3].view(3, 1).expand(3, 4), two[:12].view(4, 3).t()
    yield one[:12].view(4, 3).t(), two[:3].view(3, 1).expand(3, 4)
    yield one[:3].view(3, 1).expand(3, 4), two[:1].expand(3, 4)
    yield one.as_strided((2, 1, 3), (3, 7, 1)), two.as_strided((2, 1, 3), (3, 7, 1))
    yield one[:0].view(2, 0, 3), two[:3]
    yield one[:6].view(2, 3), two[:2]


def check_all(op: Any, calls: Iterator[tuple[Any, ...]] | Any, **kwargs: Any) -> None:
    """The rule of each call against reality."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for args in calls:
            check_rule(op, *args, **kwargs)


def unary_calls(dtypes: Any = (*MORE_DTYPES, *COMPLEX_BFLOAT), *rest: Any) -> Iterator[tuple[Any, ...]]:
    for dtype in dtypes:
        for tensor in layouts(dtype):
            yield (tensor, *rest)


def binary_calls(dtypes: Any = DTYPES, *rest: Any) -> Iterator[tuple[Any, ...]]:
    for a, b in itertools.product(dtypes, repeat=2):
        for pair in pairs(a, b):
            yield (*pair, *rest)
