"""Resampling of images: to other sizes, and along grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from understudy import _torch
from understudy.errors import ArgumentError, OperatorError, ShapeMismatch
from understudy.ops.factories import symbolic_linspace
from understudy.ops.kernel_tables.table import holds
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition, is_recorded_symbolically
from understudy.ops.shared.dims import MOST_INT64
from understudy.ops.shared.dtypes import FLOATS, check_one_dtype
from understudy.ops.shared.layouts import suggested_strides
from understudy.shapes.node import Sizes
from understudy.shapes.sizes import from_torch, has_unbacked, hint_of
from understudy.spec import TensorSpec, same_shape, spec_of

WIDE = frozenset({torch.float32, torch.float64})
BYTES = frozenset({torch.uint8})


class Resampling(NamedTuple):
    name: str
    spatial: int
    dtypes: frozenset[torch.dtype]  # of the CPU kernel
    gradient_dtypes: frozenset[torch.dtype]
    gradient_keeps_format: bool


RESAMPLINGS = [
    Resampling("upsample_nearest1d", 1, FLOATS | BYTES, FLOATS, False),
    Resampling("upsample_nearest2d", 2, FLOATS | BYTES, FLOATS, True),
    Resampling("upsample_nearest3d", 3, FLOATS | BYTES, FLOATS, False),
    Resampling("_upsample_nearest_exact1d", 1, FLOATS | BYTES, FLOATS, False),
    Resampling("_upsample_nearest_exact2d", 2, FLOATS | BYTES, FLOATS, True),
    Resampling("_upsample_nearest_exact3d", 3, FLOATS | BYTES, FLOATS, False),
    Resampling("upsample_linear1d", 1, FLOATS, FLOATS, False),
    Resampling("upsample_bilinear2d", 2, FLOATS | BYTES, FLOATS, True),
    Resampling("upsample_bicubic2d", 2, FLOATS | BYTES, FLOATS, False),
    Resampling("upsample_trilinear3d", 3, FLOATS, FLOATS, True),
    Resampling("_upsample_bilinear2d_aa", 2, WIDE | BYTES, WIDE, True),
    Resampling("_upsample_bicubic2d_aa", 2, WIDE | BYTES, WIDE, False),
]


def _check_sizes(how: Resampling, sizes: Sizes, name: str) -> None:
    if len(sizes) != how.spatial:
        raise ArgumentError(f"{how.name}: expected {how.spatial} numbers as {name}, got {list(sizes)}")
    if any(size <= 0 for size in sizes):
        raise ShapeMismatch(f"{how.name}: expected positive {name}, got {list(sizes)}")


def _resample(how: Resampling, x: TensorSpec, sizes: Sizes) -> TensorSpec:
    _check_sizes(how, sizes, "output_size")
    if x.ndim != how.spatial + 2:
        raise ShapeMismatch(f"{how.name}: expected {how.spatial + 2} dimensions, got {x}")
    if any(size == 0 for size in x.shape[1:]):
        raise ShapeMismatch(f"{how.name}: {x} has an empty dimension other than the batch")
    shape = (*x.shape[:2], *sizes)
    return x.like(shape, stride=suggested_strides(shape, x))


def _gradient(how: Resampling, grad: TensorSpec, sizes: Sizes, input_size: Sizes) -> TensorSpec:
    _check_sizes(how, sizes, "output_size")
    shape = tuple(input_size)
    if len(shape) != how.spatial + 2:
        raise ArgumentError(
            f"{how.name} backward: expected {how.spatial + 2} numbers as input_size, got {list(shape)}"
        )
    if not same_shape(grad.shape, (*shape[:2], *sizes)):
        raise ShapeMismatch(
            f"{how.name} backward: gradient shape {grad} does not match input_size {list(shape)} and "
            f"output_size {list(sizes)}"
        )
    if any(size <= 0 for size in shape[2:]):
        raise ShapeMismatch(f"{how.name} backward: expected positive input_size, got {list(shape)}")
    return grad.like(shape, stride=suggested_strides(shape, grad) if how.gradient_keeps_format else None)


def _register(how: Resampling) -> None:
    @rule(how.name)
    def resample(x: TensorSpec, output_size: Sizes, *options: object) -> TensorSpec:
        return _resample(how, x, output_size)

    @rule(f"{how.name}_backward")
    def resample_backward(
        grad: TensorSpec, output_size: Sizes, input_size: Sizes, *options: object
    ) -> TensorSpec:
        return _gradient(how, grad, output_size, input_size)


for _how in RESAMPLINGS:
    _register(_how)


# --- along grids


BICUBIC = 2


def _check_grid(x: TensorSpec, grid: TensorSpec, spatial: int, mode: int) -> None:
    what = f"grid_sampler_{spatial}d"
    if x.ndim != spatial + 2 or grid.ndim != spatial + 2:
        raise ShapeMismatch(f"{what}: expected {spatial + 2} dimensions, got {x} and {grid}")
    if x.shape[0] != grid.shape[0]:
        raise ShapeMismatch(f"{what}: {x} and {grid} differ in batch size")
    if grid.shape[-1] != spatial:
        raise ShapeMismatch(f"{what}: expected {spatial} coordinates in the last dimension, got {grid}")
    if any(size == 0 for size in x.shape[2:]):
        raise ShapeMismatch(f"{what}: expected spatial sizes of at least 1, got {x}")
    check_one_dtype(what, x, grid)
    if spatial == 3 and mode == BICUBIC and not holds("grid_sampler_takes_bicubic_volumes"):
        raise ArgumentError("grid_sampler_3d: bicubic mode is not supported for 5-D input")


def _register_grid(spatial: int) -> None:
    @rule(f"grid_sampler_{spatial}d")
    def grid_sampler(
        x: TensorSpec, grid: TensorSpec, mode: int, padding: int, align_corners: bool
    ) -> TensorSpec:
        _check_grid(x, grid, spatial, mode)
        return x.like((*x.shape[:2], *grid.shape[1:-1]))

    @rule(f"grid_sampler_{spatial}d_backward")
    def grid_sampler_backward(
        grad: TensorSpec, x: TensorSpec, grid: TensorSpec, mode: int, padding: int, align_corners: bool,
        output_mask: Sequence[bool],
    ) -> tuple[TensorSpec | None, TensorSpec]:  # fmt: skip
        _check_grid(x, grid, spatial, mode)
        return x.like() if output_mask[0] else None, grid.like()


for _spatial in (2, 3):
    _register_grid(_spatial)


@rule("affine_grid_generator")
def affine_grid(theta: TensorSpec, size: Sizes, align_corners: bool) -> Any:
    spatial = len(size) - 2
    if spatial not in (2, 3):
        raise ArgumentError(f"affine_grid_generator: expected 4 or 5 numbers as size, got {list(size)}")
    if not same_shape(theta.shape, (size[0], spatial, spatial + 1)):
        raise ShapeMismatch(
            f"affine_grid_generator: expected theta of shape {[size[0], spatial, spatial + 1]}, got {theta}"
        )
    return theta.like((size[0], *size[2:], spatial))


# --- Upsampling to symbolic sizes ---------------------------------------------------------------------------
# The functions of `torch._C._nn` take the output's size, or factors. C++ computes the size in plain integers; here it
# is computed with symbols, and passed to the operator below, which accepts symbols.

aten = torch.ops.aten


def upsample_to_symbols(name: str, args: Any, kwargs: object) -> Any:
    """Run such a function on a stand-in; NotImplemented if the call is not of the form that takes factors."""
    with_corners = "nearest" not in name
    if kwargs or len(args) != 3 + with_corners:
        return NotImplemented
    if spec_of(args[0]) is None and not _torch.is_functorch_wrapped(args[0]):
        return NotImplemented
    if is_recorded_symbolically():
        return _torch.python_kernel(getattr(aten, name).vec)(*args)
    x, size, *corners, factors = args
    if not (factors is None or isinstance(factors, (list, tuple))):
        return NotImplemented
    if size is None and factors is not None:
        size = _scaled_sizes(name, x.shape[2:], factors)
    if size is None or any(isinstance(length, bool) for length in size):
        return NotImplemented
    scales = factors if factors is not None else [None] * (x.ndim - 2)
    return getattr(aten, name).default(x, size, *corners, *scales)


def _scaled_sizes(name: str, lengths: Any, factors: Any) -> list[Any]:
    if len(lengths) != len(factors):
        raise OperatorError(
            f"{name}: expected as many scale factors as spatial dimensions, got {len(factors)} and {len(lengths)}"
        )
    sizes = [
        torch.sym_int(torch.sym_float(length) * factor)
        for length, factor in zip(lengths, factors, strict=True)
    ]
    if any(hint_of(from_torch(size)) > MOST_INT64 for size in sizes if not has_unbacked(from_torch(size))):
        raise OperatorError(f"{name}: sizes {list(lengths)} times {list(factors)} overflow 64-bit integers")
    return sizes


# --- Gradients of grids, for stand-ins with symbolic sizes: C++ reads the sizes of the image as numbers -----


@decomposition("affine_grid_generator_backward")
def decompose_affine_grid_backward(grad: Tensor, size: Any, align_corners: bool) -> Any:
    """The gradient of the transformation: the points of the grid times the gradients at these points."""
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
    """The coordinates of the points along one dimension, from -1 to 1."""
    if extent <= 1:
        return grad.new_zeros(1)
    points: Tensor = symbolic_linspace(-1, 1, extent, dtype=grad.dtype, device=grad.device)
    return points if align_corners else points * (extent - 1) / extent


# --- decompositions for symbolic sizes ----------------------------------------------------------------------


UPSAMPLINGS = """upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d""".split()
UPSAMPLINGS_WITH_CORNERS = """upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa""".split()


def _register_upsampling(name: str) -> None:
    @decomposition(f"{name}.vec")
    def upsample(x: Tensor, output_size: object, scale_factors: object = None) -> object:
        return upsample_to_symbols(name, (x, output_size, scale_factors), {})


def _register_upsampling_with_corners(name: str) -> None:
    @decomposition(f"{name}.vec")
    def upsample(x: Tensor, output_size: object, align_corners: bool, scale_factors: object = None) -> object:
        return upsample_to_symbols(name, (x, output_size, align_corners, scale_factors), {})


for _name in UPSAMPLINGS:
    _register_upsampling(_name)
for _name in UPSAMPLINGS_WITH_CORNERS:
    _register_upsampling_with_corners(_name)
