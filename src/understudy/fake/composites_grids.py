"""Gradients of grids, for stand-ins with symbolic sizes: C++ reads the sizes of the image as numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from understudy.fake.composite_table import composite
from understudy.fake.spacing import spaced


@composite("affine_grid_generator_backward")
def affine_grid_backward(grad: Tensor, size: Any, align_corners: bool) -> Any:
    """The gradient of the transformation: the points of the grid times the gradients that meet there."""
    batch, _, *extents = size
    if len(extents) not in (2, 3) or not any(isinstance(extent, torch.SymInt) for extent in size):
        return NotImplemented
    coordinates = len(extents) + 1
    base = grad.new_empty([batch, *extents, coordinates])
    for axis, extent in enumerate(reversed(extents)):
        base.select(-1, axis).copy_(_along(extent, grad, align_corners).view(-1, *[1] * axis))
    base.select(-1, coordinates - 1).fill_(1)
    points = math.prod(extents)
    flat = base.view(batch, points, coordinates).transpose(1, 2)
    return flat.bmm(grad.reshape(batch, points, coordinates - 1)).transpose(1, 2)


def _along(extent: Any, grad: Tensor, align_corners: bool) -> Tensor:
    """Where the points lie along one dimension, from -1 to 1."""
    if extent <= 1:
        return grad.new_zeros(1)
    points: Tensor = spaced(-1, 1, extent, dtype=grad.dtype, device=grad.device)
    return points if align_corners else points * (extent - 1) / extent
