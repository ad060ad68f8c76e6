from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ops.layouts import MORE_DTYPES, every, filled, formats
from understudy import make_fx
from understudy.ops.nn.upsampling import RESAMPLINGS, Resampling

aten = torch.ops.aten


@pytest.mark.parametrize("how", RESAMPLINGS, ids=lambda how: how.name)
def test_resampling(how: Resampling) -> None:
    spatial = how.spatial
    packet = getattr(aten, how.name)
    corners = () if "nearest" in how.name else (False,)

    def calls() -> Iterator[Any]:
        shapes = [(2, 3, *(5,) * spatial), (0, 3, *(5,) * spatial), (2, 1, *(5,) * spatial), (2, 0, *(5,) * spatial),
                  (2, 3, *(1,) * spatial), (3, *(5,) * spatial)]  # fmt: skip
        for shape, size in itertools.product(shapes, (7, 2, 1, 0)):
            for x in formats(shape):
                yield packet.default, x, [size] * spatial, *corners
        x = filled(shapes[0])
        for factor in (2.0, 0.5, 1.0, 1.3):
            yield packet.vec, x, None, *corners, [factor] * spatial
        yield packet.vec, x, [4] * spatial, *corners, None
        yield packet.vec, x, [4] * spatial, *corners, [2.0] * spatial
        yield packet.default, x, [4] * (spatial + 1), *corners
        for dtype in MORE_DTYPES:
            yield packet.default, x.to(dtype), [4] * spatial, *corners

    every(calls())


@pytest.mark.parametrize("how", RESAMPLINGS, ids=lambda how: how.name)
def test_resampling_backward(how: Resampling) -> None:
    spatial = how.spatial
    backward = getattr(aten, f"{how.name}_backward").default
    corners = () if "nearest" in how.name else (False,)

    def calls() -> Iterator[Any]:
        for batch, channels in ((2, 3), (2, 1), (1, 3)):
            sizes = [batch, channels, *[4] * spatial]
            for grad in formats((batch, channels, *(7,) * spatial)):
                yield backward, grad, [7] * spatial, sizes, *corners
        yield backward, grad, [6] * spatial, sizes, *corners
        yield backward, grad, [7] * spatial, sizes[1:], *corners
        for dtype in MORE_DTYPES:
            yield backward, grad.to(dtype), [7] * spatial, sizes, *corners

    every(calls())


@pytest.mark.parametrize("spatial", [2, 3])
def test_grids(spatial: int) -> None:
    forward = getattr(aten, f"grid_sampler_{spatial}d").default
    backward = getattr(aten, f"grid_sampler_{spatial}d_backward").default

    def calls() -> Iterator[Any]:
        grid_shape = (2, *(4,) * spatial, spatial)
        for x, grid, mode in itertools.product(
            formats((2, 3, *(5,) * spatial)), formats(grid_shape)[:3], (0, 1, 2)
        ):
            yield forward, x, grid, mode, 0, False
            if mode < 2:
                grad = filled((2, 3, *(4,) * spatial))
                yield backward, grad, x, grid, mode, 0, False, [True, True]
                yield backward, grad, x, grid, mode, 0, False, [False, True]
        yield forward, x, grid[:1], 0, 0, False
        yield forward, x, grid[..., :1], 0, 0, False
        yield forward, x[:, :, :0], grid, 0, 0, False
        yield forward, x[0], grid, 0, 0, False
        yield forward, x[:0], grid[:0], 0, 0, False
        for dtype in MORE_DTYPES:
            yield forward, x.to(dtype), grid.to(dtype), 0, 0, False
            yield forward, x.to(dtype), grid, 0, 0, False

    every(calls())


def test_affine_grids() -> None:
    def calls() -> Iterator[Any]:
        op = aten.affine_grid_generator.default
        for spatial, dtype in itertools.product((2, 3), MORE_DTYPES):
            for theta in formats((2, spatial, spatial + 1), dtype):
                yield op, theta, [2, 3, *(4, 5, 6)[:spatial]], False
        yield op, filled((2, 2, 3)), [3, 3, 4, 5], False
        yield op, filled((2, 2, 2)), [2, 3, 4, 5], False
        yield op, filled((2, 2, 3)), [2, 3, 4], False

    every(calls())


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
@pytest.mark.parametrize("options", [
    {"mode": "nearest"}, {"mode": "bilinear", "align_corners": False}, {"mode": "bicubic", "antialias": True},
], ids=str)  # fmt: skip
def test_sizes_that_are_tensors(options: dict[str, Any], tracing_mode: str) -> None:
    """The sizes of images, as rows of a tensor: C++ reads symbols there, which its resampling does not accept. Symbolic mode
    records torch's decomposition, which rounds otherwise than the kernels of some processors."""

    def resize(x: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        return [torch.nn.functional.interpolate(x, size=(height, width), **options) for height, width in grid]

    x = torch.randn(1, 3, 8, 8)
    graph = make_fx(resize, tracing_mode=tracing_mode)(x, torch.tensor([[4, 5], [4, 5]]))
    other = torch.tensor([[6, 3], [2, 2]])
    torch.testing.assert_close(
        graph(x, other), resize(x, other), rtol=0, atol=0 if tracing_mode == "fake" else 1e-6
    )


def test_pooled_sizes_that_are_tensors() -> None:
    pool = torch.nn.functional.adaptive_avg_pool2d
    x, sizes = torch.randn(1, 3, 8, 8), torch.tensor([4, 5])
    graph = make_fx(lambda x, sizes: pool(x, (sizes[0], sizes[1])), tracing_mode="fake")(x, sizes)
    other = torch.tensor([6, 3])
    torch.testing.assert_close(graph(x, other), pool(x, (6, 3)), rtol=0, atol=0)
