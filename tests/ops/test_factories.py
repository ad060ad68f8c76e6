from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.grid import DTYPES, layouts, overloads
from tests.oracle.real import check_rule
from understudy.ops.variants import rule_of
from understudy.spec import TensorSpec

aten = torch.ops.aten
SHAPES = ([], [2, 3], [2, 0, 3], [1, 2, 1], [2, -1], [2, 3, 4, 5])
OPTIONS: tuple[dict[str, Any], ...] = ({}, *({"dtype": dtype} for dtype in DTYPES))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sizes(shape: list[int]) -> None:
    (*plain, empty) = overloads("zeros", "ones", "empty.memory_format")
    for options in OPTIONS:
        for op in (*plain, empty):
            check_rule(op, shape, **options)
        for value in (1, 1.5, True, 1j):
            check_rule(aten.full.default, shape, value, **options)
            check_rule(aten.new_full.default, torch.ones(2, dtype=torch.int32), shape, value, **options)
        for name in ("new_empty", "new_zeros", "new_ones"):
            check_rule(overloads(name)[0], torch.ones(2, dtype=torch.int32), shape, **options)
    for memory_format in (
        torch.contiguous_format,
        torch.channels_last,
        torch.channels_last_3d,
        torch.preserve_format,
    ):
        check_rule(empty, shape, memory_format=memory_format)


def test_strides() -> None:
    for size, stride in (([2, 3], [1, 2]), ([2, 3], [1]), ([2, 3], [0, 5]), ([2, 3], [1, -1]), ([], [])):
        check_rule(aten.empty_strided.default, size, stride)
        check_rule(aten.new_empty_strided.default, torch.ones(2, dtype=torch.int32), size, stride)
    for size, layout in (
        ([2, 3, 4], [2, 0, 1]),
        ([2, 3], [0, 0]),
        ([2, 3], [0]),
        ([2, 0, 3], [2, 1, 0]),
        ([1, 2], [1, 0]),
    ):
        check_rule(aten.empty_permuted.default, size, layout)


@pytest.mark.parametrize("name", ["empty_like", "zeros_like", "ones_like"])
def test_like(name: str) -> None:
    (op,) = overloads(name)
    for x in layouts(torch.bfloat16):
        for options in OPTIONS:
            check_rule(op, x, **options)
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
            check_rule(op, x, memory_format=memory_format)


def test_full_like() -> None:
    for dtype, value in itertools.product(DTYPES, (1, 1.5, True, 1j)):
        for x in layouts(dtype):
            check_rule(aten.full_like.default, x, value)
        for options in OPTIONS:
            check_rule(aten.full_like.default, torch.ones(2, dtype=dtype), value, **options)


def test_scalars_and_eye() -> None:
    for options in OPTIONS:
        for value in (1, 1.5, True, 1j):
            check_rule(aten.scalar_tensor.default, value, **options)
        for n, m in ((3, 4), (0, 2), (-1, 2)):
            check_rule(aten.eye.default, n, **options)
            check_rule(aten.eye.m, n, m, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranges(options: dict[str, Any]) -> None:
    ends = (5, 0, -3, 5.0, 2.5, True, float("nan"), float("inf"), 1j)
    for end in ends:
        check_rule(aten.arange.default, end, **options)
    for start, end in itertools.product((0, 2, -1.5, 0.3), (5, 2.5, -4)):
        check_rule(aten.arange.start, start, end, **options)
        for step in (1, 2, 3, -1, -2, 0, 0.3, 1.5, -0.7):
            if options.get("dtype") is torch.int64 and isinstance(step, float):
                continue  # a fraction as a step of integers: eager computes with its truncation, a division by zero
            check_rule(aten.arange.start_step, start, end, step, **options)
            check_rule(aten.range.step, start, end, step, **options)
    for steps in (0, 1, 5, -1):
        for start, end in ((0, 1), (0.5, 1), (0, 1j)):
            for op in overloads("linspace", "logspace"):
                check_rule(op, start, end, steps, **options)
    for op in overloads("linspace.Tensor_Tensor", "logspace.Tensor_Tensor"):
        check_rule(op, torch.tensor(1), torch.tensor(2.0), 4, **options)
        check_rule(op, torch.tensor([1]), torch.tensor(2.0), 4, **options)


def test_triangles() -> None:
    for row, col, offset in itertools.product((-1, 0, 1, 3, 5), (-1, 0, 1, 4), range(-6, 7)):
        for op in overloads("tril_indices", "triu_indices"):
            check_rule(op, row, col, offset)
            check_rule(op, row, col, offset, dtype=torch.int32)


def test_windows() -> None:
    for op in overloads(
        "hann_window", "hamming_window", "blackman_window", "bartlett_window", "kaiser_window"
    ):
        for length in (0, 1, 5, -1):
            check_rule(op, length)
        for options in OPTIONS:
            check_rule(op, 4, **options)


def test_other_devices_and_default_dtype() -> None:
    zeros = rule_of(aten.zeros.default)
    assert zeros is not None
    cuda = torch.device("cuda", 0)
    assert zeros([2], device=cuda) is TensorSpec((2,), dtype=torch.float32, device=cuda)
    torch.set_default_dtype(torch.float64)
    try:
        assert zeros([2]) is TensorSpec((2,), dtype=torch.float64, device=torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
