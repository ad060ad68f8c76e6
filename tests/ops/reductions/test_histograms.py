from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.ops.layouts import MORE_DTYPES, every, layouts

aten = torch.ops.aten
SHAPES = ((5,), (3, 4), (0, 3), (), (2, 3, 2))


def test_of_one_dimension() -> None:
    def calls() -> Iterator[Any]:
        for shape in SHAPES:
            for x in layouts(shape, few=True):
                for edges in (
                    torch.arange(4.0),
                    torch.arange(2.0),
                    torch.rand(1),
                    torch.rand(0),
                    torch.rand(2, 2),
                ):
                    yield aten.histogram.bins_tensor, x, edges
                for count in (1, 7, 0, -1):
                    yield aten.histogram.bin_ct, x, count, {"range": [0.0, 1.0]}
                for weight in (torch.rand(shape), torch.rand(12), torch.rand(shape).double()):
                    yield aten.histogram.bins_tensor, x, torch.arange(4.0), {"weight": weight}
                    yield aten.histogram.bin_ct, x, 3, {"range": [0.0, 1.0], "weight": weight}
        for limits in ([0.0], [1.0, 0.0], [1.0, 1.0], [0.0, float("inf")], [0.0, float("nan")]):
            yield aten.histogram.bin_ct, torch.rand(5), 3, {"range": limits}
        for dtype in MORE_DTYPES:
            yield aten.histogram.bins_tensor, torch.ones(3).to(dtype), torch.arange(3).to(dtype)
            yield aten.histogram.bins_tensor, torch.ones(3).to(dtype), torch.arange(3.0)
            yield aten.histogram.bin_ct, torch.ones(3).to(dtype), 3
            yield aten.histogram.bin_ct, torch.ones(0).to(dtype), 3
            yield aten.histogram.bin_ct, torch.ones(3).to(dtype), 3, {"range": [0.0, 1.0]}
            yield aten._histogramdd_bin_edges.default, torch.ones(3, 1).to(dtype), [3]
            yield aten._histogramdd_bin_edges.default, torch.ones(3, 1).to(dtype), [3], {"range": [0.0, 1.0]}

    every(calls())


def test_of_several() -> None:
    def calls() -> Iterator[Any]:
        for shape in ((5, 2), (3, 4, 2), (0, 2), (2,), (3, 0), (5, 3)):
            for x in layouts(shape, few=True):
                for counts in ([2, 3], [2], [1, 0], []):
                    limits = [0.0, 1.0] * len(counts)
                    yield aten._histogramdd_bin_edges.default, x, counts, {"range": limits}
                    yield aten._histogramdd_from_bin_cts.default, x, counts, {"range": limits}
                    yield aten._histogramdd_from_bin_cts.default, x, counts, {"range": [0.0, 1.0]}
                    edges = [torch.arange(count + 1.0) for count in counts]
                    yield aten._histogramdd_from_bin_tensors.default, x, edges
                    for weight in (torch.rand(shape[:-1]), torch.rand(3), torch.rand(())):
                        yield aten._histogramdd_from_bin_tensors.default, x, edges, {"weight": weight}
                        yield (
                            aten._histogramdd_from_bin_cts.default,
                            x,
                            counts,
                            {"range": limits, "weight": weight},
                        )

    every(calls())
