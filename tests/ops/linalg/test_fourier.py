from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import MORE_DTYPES, every, filled, layouts
from tests.oracle.real import spec_of
from understudy.ops.variants import rule_of

aten = torch.ops.aten
COMPLEX = torch.complex64
SHAPES = ((4, 5, 6), (1, 3, 1, 4), (6,), (4, 1), (2, 4, 3, 6))


def some_dims(ndim: int) -> Iterator[list[int]]:
    for count in range(1, min(ndim, 3) + 1):
        for dims in itertools.permutations(range(ndim), count):
            yield list(dims)


def test_complex_to_complex() -> None:
    def calls() -> Iterator[Any]:
        for shape in SHAPES:
            for x, dims in itertools.product(layouts(shape, COMPLEX, few=True), some_dims(len(shape))):
                yield aten._fft_c2c.default, x, dims, 0, True
                yield aten._fft_c2c.default, x.conj(), dims, 0, False
            yield aten._fft_c2c.default, x, [], 0, True
        x = filled((4, 6), COMPLEX)
        yield aten._fft_c2c.default, x, [2], 0, True
        yield aten._fft_c2c.default, x, [-1], 0, True
        yield aten._fft_c2c.default, x[:0], [1], 0, True
        for dtype in (*MORE_DTYPES, torch.complex32):
            yield aten._fft_c2c.default, x.to(dtype), [0], 0, True

    every(calls())


def test_real_to_complex() -> None:
    def calls() -> Iterator[Any]:
        for shape in SHAPES:
            for x, dims in itertools.product(layouts(shape, few=True), some_dims(len(shape))):
                for onesided in (True, False):
                    yield aten._fft_r2c.default, x, dims, 0, onesided
        x = filled((4, 6))
        yield aten._fft_r2c.default, x, [], 0, True
        yield aten._fft_r2c.default, x[:0], [1], 0, True
        for dtype in MORE_DTYPES:
            yield aten._fft_r2c.default, x.to(dtype), [0], 0, True

    every(calls())


def test_complex_to_real() -> None:
    def calls() -> Iterator[Any]:
        for shape in SHAPES:
            for x, dims in itertools.product(layouts(shape, COMPLEX, few=True), some_dims(len(shape))):
                given = shape[dims[-1]]
                for size in {2 * given - 2, 2 * given - 1, given} - {0}:
                    yield aten._fft_c2r.default, x, dims, 0, size
        x = filled((4, 6), COMPLEX)
        yield aten._fft_c2r.default, x, [1], 0, 20
        yield aten._fft_c2r.default, x, [], 0, 10
        for dtype in MORE_DTYPES:
            yield aten._fft_c2r.default, x.to(dtype), [0], 0, 6

    every(calls())


def test_no_elements() -> None:
    """Whether they are taken depends on the release."""

    def calls() -> Iterator[Any]:
        for shape in ((0, 6), (4, 0), (0, 2, 6), (2, 0, 6)):
            for dims in some_dims(len(shape)):
                for x in (torch.zeros(shape), torch.zeros(shape[::-1]).permute(*range(len(shape))[::-1])):
                    yield aten._fft_c2c.default, x.to(COMPLEX), dims, 0, True
                    yield aten._fft_r2c.default, x, dims, 0, True
                    yield aten._fft_r2c.default, x, dims, 0, False
                    yield aten._fft_c2r.default, x.to(COMPLEX), dims, 0, 6
                    yield aten._fft_c2r.default, x.to(COMPLEX), dims, 0, 20

    every(calls())


def test_on_cuda() -> None:
    x = spec_of(filled((4, 5, 6))).on(torch.device("cuda:0"))
    found = rule_of(aten._fft_r2c.default)
    assert found is not None
    assert str(found(x, [1, 2], 0, True)) == "c64[4, 5, 4]@cuda:0"
    assert str(found(x, [0, 1], 0, True)) == "c64[4, 3, 6]~(1, 4, 12)@cuda:0"
