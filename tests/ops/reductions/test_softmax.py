from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import MORE_DTYPES, SHAPES, every, filled, layouts
from tests.oracle.real import check_rule, spec_of
from understudy.ops.variants import rule_of

aten = torch.ops.aten


@pytest.mark.parametrize("op", [aten._softmax.default, aten._log_softmax.default], ids=str)
def test_forward(op: Any) -> None:
    def calls() -> Iterator[Any]:
        for shape in SHAPES:
            for x in layouts(shape, few=True):
                for dim in range(-len(shape) - 1, len(shape) + 1):
                    yield op, x, dim, False
        for dtype, widened in itertools.product(MORE_DTYPES, (False, True)):
            yield op, filled((2, 3), dtype), 0, widened

    every(calls())


@pytest.mark.parametrize("op", [aten.softmax.int, aten.log_softmax.int, aten._safe_softmax.default], ids=str)
def test_with_dtype(op: Any) -> None:
    every((op, x, dim) for shape in SHAPES for x in layouts(shape, few=True) for dim in (-1, 0, 1))
    every(
        (op, filled((2, 3), dtype), 0, wanted)
        for dtype in MORE_DTYPES
        for wanted in (None, torch.float32, torch.float64, torch.bfloat16, torch.int64)
    )


@pytest.mark.parametrize("op", [aten._softmax_backward_data, aten._log_softmax_backward_data], ids=str)
def test_backward(op: Any) -> None:
    def calls() -> Iterator[Any]:
        for shape in SHAPES:
            for grad, output in itertools.product(layouts(shape, few=True), repeat=2):
                yield op.default, grad, output, -1, torch.float32
        x = filled((2, 3))
        for dtypes in itertools.product(
            (torch.float32, torch.float16, torch.bfloat16, torch.int64), repeat=3
        ):
            yield op.default, x.to(dtypes[0]), x.to(dtypes[1]), 0, dtypes[2]
        if op is aten._softmax_backward_data:  # the other one reads beyond its input
            yield op.default, x, x[0], 0, torch.float32
        yield op.default, x, x, 2, torch.float32

    every(calls())


def test_in_place_and_out() -> None:
    check_rule(aten._softmax.out, filled((2, 3)), 0, False, out=torch.empty(2, 3))


def test_half_is_widened_on_cuda() -> None:
    found = rule_of(aten._softmax.default)
    assert found is not None
    spec = spec_of(filled((2, 3))).like(dtype=torch.float16, device=torch.device("cuda:0"))
    assert str(found(spec, 0, True)) == "f32[2, 3]@cuda:0"
