from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.ops.layouts import every, layouts

trilinear = torch.ops.aten._trilinear.default


def test_a_bilinear_layer_and_its_gradients() -> None:
    """The four ways in which autograd calls it."""

    def calls() -> Iterator[Any]:
        for n, o, i, j in ((2, 5, 3, 4), (1, 1, 1, 1), (0, 5, 3, 4), (2, 0, 3, 4)):
            x, weight, y, grad = (torch.rand(shape) for shape in ((n, i), (o, i, j), (n, j), (n, o)))
            for first in layouts((n, i), few=True):
                yield trilinear, first, weight, y, [1, 3], [0], [1, 2], [2, 3]
            yield trilinear, grad, weight, y, [2, 3], [0], [1, 2], [1, 3]
            yield trilinear, grad, x, y, [2, 3], [1, 3], [1, 2], [0]
            yield trilinear, grad, weight, x, [2, 3], [0], [1, 3], [1, 2]
            yield (
                trilinear,
                x.to(torch.complex64),
                weight.to(torch.complex64),
                y.to(torch.complex64),
                [1, 3],
                [0],
                [1, 2],
                [2, 3],
            )

    every(calls())
