from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import every, filled, formats, layouts, strided
from tests.oracle.real import spec_of
from understudy.ops.variants import rule_of

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.complex64)
MASKS = list(itertools.product((True, False), repeat=3))
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def test_layer_norm() -> None:
    def calls() -> Iterator[Any]:
        for shape in ((2, 3, 4), (0, 3, 4), (2, 3, 0), (4,), (2, 3, 1, 4)):
            for x, count in itertools.product(layouts(shape, few=True), (0, 1, 2, 3)):
                normalized = list(shape[len(shape) - count :])
                for weight, bias in itertools.product((None, filled(normalized)), repeat=2):
                    yield aten.native_layer_norm.default, x, normalized, weight, bias, 1e-5
                    yield aten._fused_rms_norm.default, x, normalized, weight, 1e-5
                yield aten.layer_norm.default, x, normalized, weight
                yield aten.rms_norm.default, x, normalized, weight
        x = filled((2, 3, 4))
        yield aten.native_layer_norm.default, x, [3], None, None, 1e-5
        yield aten.native_layer_norm.default, x, [4], filled((3,)), None, 1e-5
        for dtype in DTYPES:
            given = [None, *(filled((4,), parameter) for parameter in PARAMETER_DTYPES)]
            for weight, bias in itertools.product(given, repeat=2):
                yield aten.native_layer_norm.default, x.to(dtype), [4], weight, bias, 1e-5
                yield aten._fused_rms_norm.default, x.to(dtype), [4], weight, 1e-5

    every(calls())


def test_layer_norm_backward() -> None:
    def calls() -> Iterator[Any]:
        op = aten.native_layer_norm_backward.default
        for dtype, parameter_dtype in (
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
        ):
            for x, grad, mask in itertools.product(
                layouts((2, 3, 4), dtype, few=True), layouts((2, 3, 4), dtype, few=True), MASKS
            ):
                weight, bias = strided((4,), parameter_dtype), filled((4,), parameter_dtype)
                _, mean, rstd = aten.native_layer_norm.default(x, [4], weight, bias, 1e-5)
                yield op, grad, x, [4], mean, rstd, weight, bias, mask
                if not mask[2]:
                    yield op, grad, x, [4], mean, rstd, weight, None, mask
        x, weight = filled((2, 3, 4)), filled((4,))
        mean = filled((2, 3, 1))
        yield op, x, x, [4], mean, mean, None, None, [True, True, True]
        yield op, x.to(torch.bfloat16), x, [4], mean, mean, weight, weight, [True, True, True]

    every(calls())


SHAPES = [(2, 4), (2, 4, 5), (2, 4, 5, 5), (2, 4, 3, 3, 3), (2, 1, 5, 5), (2, 4, 1, 1), (0, 4, 5, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_group_norm(shape: tuple[int, ...]) -> None:
    batch, channels = shape[:2]
    size = torch.Size(shape[2:]).numel()
    forward, backward = aten.native_group_norm.default, aten.native_group_norm_backward.default

    def calls() -> Iterator[Any]:
        for groups, dtype in itertools.product((1, channels), (torch.float32, torch.bfloat16)):
            sizes = (batch, channels, size, groups)
            for parameter_dtype in {dtype, torch.float32}:
                weight = filled((channels,), parameter_dtype)
                statistics = filled((batch, groups), parameter_dtype)
                for x in formats(shape, dtype):
                    yield forward, x, weight, weight, *sizes, 1e-5
                    yield forward, x, None, weight, *sizes, 1e-5
                    # Without a gradient for a channels-last input, eager crashes.
                    masks = MASKS if x.ndim < 4 else MASKS[:4]
                    for grad, mask in itertools.product(formats(shape, dtype), masks):
                        yield backward, grad, x, statistics, statistics, weight, *sizes, mask
            statistics = filled((batch, groups), dtype)
            yield forward, x.contiguous(), None, None, *sizes, 1e-5
            yield backward, x, x, statistics, statistics, None, *sizes, [True, True, True]

    every(calls())


def test_group_norm_dtypes() -> None:
    given = [None, *(filled((4,), dtype) for dtype in PARAMETER_DTYPES)]
    every(
        (aten.native_group_norm.default, filled((2, 4, 5), dtype), weight, bias, 2, 4, 5, 2, 1e-5)
        for dtype in DTYPES
        for weight, bias in itertools.product(given, repeat=2)
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm(shape: tuple[int, ...]) -> None:
    channels = shape[1]

    def calls() -> Iterator[Any]:
        for dtype in (torch.float32, torch.bfloat16):
            for x, parameter_dtype in itertools.product(formats(shape, dtype), {dtype, torch.float32}):
                one = filled((channels,), parameter_dtype)
                for training in (True, False):
                    yield aten.native_batch_norm.default, x, one, one, one, one, training, 0.1, 1e-5
                    yield aten._native_batch_norm_legit.default, x, one, None, one, one, training, 0.1, 1e-5
                    yield aten.native_batch_norm.default, x, None, None, one, one, training, 0.1, 1e-5
                    functional = aten._native_batch_norm_legit_functional.default
                    yield functional, x, one, one, one, one, training, 0.1, 1e-5
                yield aten._native_batch_norm_legit.no_stats, x, one, one, True, 0.1, 1e-5
                yield aten._native_batch_norm_legit_no_training.default, x, one, one, one, one, 0.1, 1e-5
                yield aten._batch_norm_with_update.default, x, one, one, one, one, 0.1, 1e-5
                yield aten._batch_norm_no_update.default, x, one, one, one, one, 0.1, 1e-5

    every(calls())


@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
def test_batch_norm_backward(shape: tuple[int, ...]) -> None:
    channels = shape[1]

    def calls() -> Iterator[Any]:
        for dtype in (torch.float32, torch.bfloat16):
            for x, grad in itertools.product(formats(shape, dtype), repeat=2):
                for parameter_dtype, mask in itertools.product({dtype, torch.float32}, MASKS):
                    one, none = filled((channels,), parameter_dtype), filled((0,), parameter_dtype)
                    backward = aten.native_batch_norm_backward.default
                    yield backward, grad, x, one, one, one, one, one, True, 1e-5, mask
                    yield backward, grad, x, one, one, one, none, none, False, 1e-5, mask
                    reserve = filled((0,), torch.uint8)
                    with_reserve = aten.batch_norm_backward.default
                    yield with_reserve, grad, x, one, one, one, one, one, True, 1e-5, mask, reserve

    every(calls())


@pytest.mark.parametrize(
    "shape", [(2, 4, 5, 1), (2, 4, 1, 5), (1, 4, 5, 3), (2, 4, 1), (2, 3, 1, 5, 2)], ids=str
)
def test_batch_norm_of_permuted_inputs(shape: tuple[int, ...]) -> None:
    """Strides of dimensions of size 1 may be any: a channels-last input is one to the kernel whatever they are."""
    orders = list(itertools.permutations(range(len(shape))))[:: 1 if len(shape) < 5 else 7]
    inputs = [
        filled([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
        for order in orders
    ]
    inputs.append(filled([2 * size for size in shape])[tuple(slice(size) for size in shape)])
    one = filled((shape[1],))
    apart = filled((2 * shape[1],))[::2]

    def calls() -> Iterator[Any]:
        for x in inputs:
            for weight in (one, apart, None):
                yield aten.native_batch_norm.default, x, weight, weight, one, one, True, 0.1, 1e-5
            for grad in inputs[::3]:
                yield (
                    aten.native_batch_norm_backward.default,
                    grad,
                    x,
                    one,
                    one,
                    one,
                    one,
                    one,
                    True,
                    1e-5,
                    [True] * 3,
                )

    every(calls())


def test_batch_norm_dtypes_and_refusals() -> None:
    def calls() -> Iterator[Any]:
        op = aten.native_batch_norm.default
        given = [None, *(filled((4,), dtype) for dtype in PARAMETER_DTYPES)]
        for dtype, training in itertools.product(DTYPES, (True, False)):
            x = filled((2, 4, 5), dtype)
            for weight, mean in itertools.product(
                given, given if training else given[1:]
            ):  # else eager crashes
                yield op, x, weight, weight, mean, mean, training, 0.1, 1e-5
        four = filled((4,))
        yield op, filled((4,)), four, four, four, four, True, 0.1, 1e-5

    every(calls())


def test_statistics_on_cuda() -> None:
    cuda = torch.device("cuda:0")
    x = spec_of(filled((2, 4, 5, 5), torch.bfloat16)).on(cuda)
    weight = spec_of(filled((4,))).on(cuda)
    norm = rule_of(aten.native_batch_norm.default)
    assert norm is not None
    results = norm(x, weight, weight, weight, weight, False, 0.1, 1e-5)
    assert [str(spec) for spec in results] == ["bf16[2, 4, 5, 5]@cuda:0", "f32[4]@cuda:0", "f32[4]@cuda:0"]
    norm = rule_of(aten.native_layer_norm.default)
    assert norm is not None
    results = norm(x, [5], None, None, 1e-5)
    assert [str(spec) for spec in results][1:] == ["f32[2, 4, 5, 1]@cuda:0"] * 2
