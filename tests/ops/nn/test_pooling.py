from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import understudy.ops  # noqa: F401  (registers)
from tests.ops.layouts import MORE_DTYPES, every, filled, formats

aten = torch.ops.aten
SPATIAL = pytest.mark.parametrize("spatial", [2, 3])


def op(name: str, spatial: int, suffix: str = "") -> Any:
    return getattr(aten, f"{name}{spatial}d{suffix}").default


def images(spatial: int) -> list[tuple[int, ...]]:
    sizes = (7, 6, 5)[:spatial]
    return [
        (2, 3, *sizes),
        (3, *sizes),
        (0, 3, *sizes),
        (2, 1, *sizes),
        (2, 0, *sizes),
        (2, 3, *(1,) * spatial),
        (4, 5),
    ]


WINDOWS = [
    ([2], [], [0], [1], False),
    ([3], [2], [1], [1], True),
    ([3], [2], [1], [2], True),
    ([2], [3], [0], [1], True),
    ([1], [1], [0], [1], False),
    ([2], [1], [2], [1], False),
    ([9], [1], [0], [1], False),
    ([2], [0], [0], [1], False),
]


@SPATIAL
def test_max_pool(spatial: int) -> None:
    def calls() -> Iterator[Any]:
        for shape, window in itertools.product(images(spatial), WINDOWS):
            *numbers, ceil_mode = window
            for x in formats(shape):
                yield op("max_pool", spatial, "_with_indices"), x, *(n * spatial for n in numbers), ceil_mode
                yield op("max_pool", spatial), x, *numbers, ceil_mode
        for dtype in MORE_DTYPES:
            yield op("max_pool", spatial, "_with_indices"), filled((2, 3, 4, 4, 4)[: spatial + 2], dtype), [2]

    every(calls())


@SPATIAL
def test_max_pool_backward(spatial: int) -> None:
    backward = op("max_pool", spatial, "_with_indices_backward")

    def calls() -> Iterator[Any]:
        for shape, pooled in (((2, 3, 4, 4, 4), (2, 3, 2, 2, 2)), ((2, 1, 4, 4, 4), (2, 1, 2, 2, 2))):
            shape, pooled = shape[: spatial + 2], pooled[: spatial + 2]
            window = ([2] * spatial, [2] * spatial, [0] * spatial, [1] * spatial, False)
            for x, grad, indices in itertools.product(
                formats(shape), formats(pooled), formats(pooled, torch.int64)[:2]
            ):
                yield backward, grad, x, *window, indices * 0
            yield backward, grad[0], x[0], *window, indices[0] * 0
            yield backward, x, x, *window, indices * 0
            for dtype in MORE_DTYPES:
                yield backward, grad.to(dtype), x.to(dtype), *window, indices * 0

    every(calls())


@SPATIAL
def test_avg_pool(spatial: int) -> None:
    forward, backward = op("avg_pool", spatial), op("avg_pool", spatial, "_backward")

    def calls() -> Iterator[Any]:
        for shape, (kernel, stride, padding, _, ceil_mode) in itertools.product(images(spatial), WINDOWS):
            for x in formats(shape):
                yield forward, x, kernel * spatial, stride * spatial, padding * spatial, ceil_mode
                yield forward, x, kernel, stride, padding, ceil_mode, False, 2
                try:
                    pooled = forward(x, kernel, stride, padding, ceil_mode)
                except (RuntimeError, IndexError):
                    continue
                for grad in formats(tuple(pooled.shape))[:3]:
                    yield backward, grad, x, kernel, stride, padding, ceil_mode, True, None
        x = filled((2, 3, 4, 4, 4)[: spatial + 2])
        yield forward, x, [2], [], [0], False, True, 0
        yield backward, x, x, [2], [2], [0], False, True, None
        for dtype in MORE_DTYPES:
            yield forward, x.to(dtype), [2]
            small = filled((2, 3, 2, 2, 2)[: spatial + 2], dtype)
            yield backward, small, x.to(dtype), [2], [2], [0], False, True, None

    every(calls())


@SPATIAL
def test_adaptive_pools(spatial: int) -> None:
    average, largest = op("_adaptive_avg_pool", spatial), op("adaptive_max_pool", spatial)

    def calls() -> Iterator[Any]:
        for shape, sizes in itertools.product(images(spatial), ([1], [3], [9], [0], [2, 2])):
            for x in formats(shape):
                output = sizes * spatial if len(sizes) == 1 else sizes
                yield average, x, output
                yield largest, x, output
        for shape in ((2, 3, 4, 4, 4), (2, 1, 4, 4, 4)):
            shape = shape[: spatial + 2]
            pooled = (*shape[:2], *(2,) * spatial)
            for x, grad, indices in itertools.product(
                formats(shape), formats(pooled), formats(pooled, torch.int64)[:2]
            ):
                yield op("_adaptive_avg_pool", spatial, "_backward"), grad, x
                yield op("adaptive_max_pool", spatial, "_backward"), grad, x, indices * 0
            for nothing in ((*shape[:2], 0, *pooled[3:]), (0, *pooled[1:])):
                yield (
                    op("_adaptive_avg_pool", spatial, "_backward"),
                    filled(nothing),
                    filled((nothing[0], *shape[1:])),
                )
                places = filled(nothing, torch.int64)
                yield (
                    op("adaptive_max_pool", spatial, "_backward"),
                    filled(nothing),
                    filled((nothing[0], *shape[1:])),
                    places,
                )
            for dtype in MORE_DTYPES:
                yield average, x.to(dtype), [2] * spatial
                yield largest, x.to(dtype), [2] * spatial
                yield op("_adaptive_avg_pool", spatial, "_backward"), grad.to(dtype), x.to(dtype)
                yield op("adaptive_max_pool", spatial, "_backward"), grad.to(dtype), x.to(dtype), indices * 0

    every(calls())


@SPATIAL
def test_fractional_pools(spatial: int) -> None:
    forward, backward = op("fractional_max_pool", spatial), op("fractional_max_pool", spatial, "_backward")

    def calls() -> Iterator[Any]:
        for batch, (kernel, sizes) in itertools.product((2, None), ((2, 3), (1, 6), (4, 6))):
            lead = (3,) if batch is None else (batch, 3)
            samples = torch.rand(batch or 1, 3, spatial)
            for x in formats((*lead, *(7,) * spatial)):
                yield forward, x, [kernel] * spatial, [sizes] * spatial, samples
            pooled = (*lead, *(3,) * spatial)
            for grad, x in itertools.product(formats(pooled), formats((*lead, *(7,) * spatial))):
                indices = torch.zeros(pooled, dtype=torch.int64)
                yield backward, grad, x, [2] * spatial, [3] * spatial, indices
        for dtype in MORE_DTYPES:
            x = filled((2, 3, *(7,) * spatial), dtype)
            yield forward, x, [2] * spatial, [3] * spatial, torch.rand(2, 3, spatial).to(dtype)
        shapes = (
            (1, 3, spatial),
            (3, 3, spatial),
            (2, 4, spatial),
            (2, 2, spatial),
            (2, 3, spatial + 1),
            (3, spatial),
        )
        for lead, samples in itertools.product(((2, 3), (3,)), (*shapes, (1, 2, 3, spatial))):
            yield (
                forward,
                torch.rand(*lead, *(7,) * spatial),
                [2] * spatial,
                [3] * spatial,
                torch.rand(samples),
            )

    every(calls())


@SPATIAL
def test_unpooling(spatial: int) -> None:
    def calls() -> Iterator[Any]:
        sizes = [8] * spatial
        more = () if spatial == 2 else ([2] * 3, [0] * 3)
        for shape, dtype in itertools.product(
            images(spatial)[:4], (torch.float32, torch.bfloat16, torch.int64)
        ):
            for x, indices in itertools.product(formats(shape, dtype), formats(shape, torch.int64)[:2]):
                yield op("max_unpool", spatial), x, indices * 0, sizes, *more
        yield op("max_unpool", spatial), x, indices[..., :2] * 0, sizes, *more
        yield op("max_unpool", spatial), x, indices.to(torch.int32) * 0, sizes, *more

    every(calls())


def test_whole_pools() -> None:
    def calls() -> Iterator[Any]:
        for spatial, size in itertools.product((2, 3), (1, 3)):
            for shape in images(spatial)[:-1]:
                for x in formats(shape):
                    yield op("adaptive_avg_pool", spatial), x, [size] * spatial
        for shape in ((2, 3, 7), (3, 7), (2, 1, 7), (0, 3, 7), (2, 0, 7), (2, 3, 1), (7, 2, 3, 4)):
            for x in formats(shape):
                for size in (1, 3):
                    yield aten.adaptive_avg_pool1d.default, x, [size]
                for kernel, stride, padding, _, ceil_mode in WINDOWS:
                    yield aten.avg_pool1d.default, x, kernel, stride, padding, ceil_mode
        for dtype in MORE_DTYPES:
            yield aten.avg_pool1d.default, filled((2, 3, 7), dtype), [2]
            yield aten.adaptive_avg_pool1d.default, filled((2, 3, 7), dtype), [2]
            yield aten.adaptive_avg_pool2d.default, filled((2, 3, 7, 7), dtype), [2, 2]

    every(calls())
