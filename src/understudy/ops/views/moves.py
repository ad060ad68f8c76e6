"""Copies that move elements: repeat, roll, flip, triangles, shuffles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from understudy.errors import ArgumentError, DimensionError, DynamicOutputShapeException, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.dims import replace_size, with_inserted, wrap_dim, wrap_dims
from understudy.ops.shared.dtypes import FLOAT8
from understudy.ops.shared.layouts import is_provably_row_major, suggested_strides
from understudy.ops.views.basic import narrow_spec, transpose_spec
from understudy.ops.views.split_and_join import join_specs
from understudy.shapes.node import Size, Sizes
from understudy.shapes.sizes import fix_sizes
from understudy.spec import TensorSpec, View, preserved_copy


@rule("repeat")
def repeat(spec: TensorSpec, repeats: Sizes) -> TensorSpec:
    if len(repeats) < spec.ndim:
        raise ShapeMismatch(f"repeat: expected at least {spec.ndim} entries for {spec}, got {list(repeats)}")
    return _repeat_spec(spec, repeats)


def _repeat_spec(spec: TensorSpec, repeats: Sizes) -> TensorSpec:
    if any(times < 0 for times in repeats):
        raise ArgumentError(f"repeat: {list(repeats)} has a negative entry")
    sizes = (*(1,) * (len(repeats) - spec.ndim), *spec.shape)
    return spec.like([size * times for size, times in zip(sizes, repeats, strict=True)])


@rule("repeat_interleave.Tensor")
def repeat_interleave_indices(repeats: TensorSpec, *, output_size: object = None) -> TensorSpec:
    if repeats.ndim != 1:
        raise ShapeMismatch(f"repeat_interleave: repeats must have one dimension, got {repeats}")
    if output_size is None:
        raise DynamicOutputShapeException(
            "repeat_interleave: the size of the result is the sum of the values in repeats; give output_size=, "
            "or repeats as a Python int"
        )
    return repeats.like((output_size,))


@rule("repeat_interleave.self_Tensor")
def repeat_interleave_tensor(
    spec: TensorSpec, repeats: TensorSpec, dim: int | None = None, *, output_size: Any = None
) -> TensorSpec:
    flat = spec.like((spec.numel,)) if dim is None or not spec.shape else spec
    at = wrap_dim(0 if dim is None else dim, flat.ndim)
    if repeats.ndim > 1 or (repeats.shape and repeats.shape[0] not in (1, flat.shape[at])):
        raise ShapeMismatch(
            f"repeat_interleave: expected one repeat count, or one per index of dimension {at} of {flat}, got {repeats}"
        )
    if output_size is None:
        raise DynamicOutputShapeException(
            "repeat_interleave: the size of the result is the sum of the values in repeats; give output_size=, "
            "or repeats as a Python int"
        )
    return flat.like(replace_size(flat.shape, at, output_size))


@rule("roll")
def roll(spec: TensorSpec, shifts: object, dims: object = ()) -> TensorSpec:
    shift_list = shifts if isinstance(shifts, (list, tuple)) else (shifts,)
    dim_list = dims if isinstance(dims, (list, tuple)) else (dims,)
    if not shift_list:
        raise ArgumentError("roll: shifts must not be empty")
    along_dims = bool(dim_list) or len(shift_list) != 1
    if along_dims and len(shift_list) != len(dim_list):
        raise ArgumentError(
            f"roll: expected as many shifts as dimensions, got {len(shift_list)} and {len(dim_list)}"
        )
    if (along_dims or spec.ndim == 1) and spec.is_empty:
        return preserved_copy(spec)  # without checking the dimensions
    if along_dims and not spec.shape:
        raise DimensionError(f"roll: expected at least one dimension, got {spec}")
    rolled = spec if along_dims else spec.like()
    for dim, shift in zip(dim_list, shift_list, strict=False):
        rolled = _roll_spec(rolled, wrap_dim(dim, spec.ndim), shift)
    return rolled


def _roll_spec(spec: TensorSpec, dim: int, shift: Size) -> TensorSpec:
    """The CPU kernel splits the tensor and concatenates the parts, whose memory format the result takes."""
    if spec.device.type != "cpu":
        return spec.like()
    size = spec.shape[dim]
    start = (size - shift) % size
    pieces = narrow_spec(spec, dim, start, size - start), narrow_spec(spec, dim, 0, start)
    return spec.like(stride=join_specs(pieces, dim).stride)


@rule("flip")
def flip(spec: TensorSpec, dims: Sequence[int]) -> TensorSpec:
    wrap_dims(dims, spec.ndim)
    if spec.dtype in FLOAT8:
        fix_sizes(spec.shape)  # whether there is a kernel depends on the layout
    return preserved_copy(spec)


@rule("rot90")
def rot90(spec: TensorSpec, k: int = 1, dims: Sequence[int] = (0, 1)) -> TensorSpec:
    if len(dims) != 2:
        raise ArgumentError(f"rot90: expected two dimensions, got {list(dims)}")
    if spec.ndim < 2:
        raise ShapeMismatch(f"rot90: expected at least 2 dimensions, got {spec}")
    first, second = wrap_dims(dims, spec.ndim)
    turns = k % 4
    if turns == 0:
        return spec.like()
    return preserved_copy(spec) if turns == 2 else transpose_spec(preserved_copy(spec), first, second)


@rule("tril", "triu")
def triangle(spec: TensorSpec, diagonal: object = 0) -> TensorSpec:
    if spec.ndim < 2:
        raise ShapeMismatch(f"tril and triu: expected at least 2 dimensions, got {spec}")
    return spec.like()


@rule("diag_embed")
def diag_embed(spec: TensorSpec, offset: int = 0, dim1: int = -2, dim2: int = -1) -> TensorSpec:
    ndim = spec.ndim + 1
    first, second = wrap_dim(dim1, ndim), wrap_dim(dim2, ndim)
    if first == second:
        raise ArgumentError(f"diag_embed: expected two different dimensions, got {first} twice")
    if not spec.shape:
        raise DimensionError(f"diag_embed: expected at least one dimension, got {spec}")
    length = spec.shape[-1] + abs(offset)
    low, high = min(first, second), max(first, second)
    return spec.like(with_inserted(with_inserted(spec.shape[:-1], low, length), high, length))


@rule("pixel_shuffle")
def pixel_shuffle(spec: TensorSpec, upscale_factor: Any) -> TensorSpec:
    if spec.ndim < 3:
        raise ShapeMismatch(f"pixel_shuffle: expected at least 3 dimensions, got {spec}")
    if upscale_factor <= 0:
        raise ArgumentError(f"pixel_shuffle: the factor must be positive, got {upscale_factor}")
    *batch, channels, height, width = spec.shape
    pixels = upscale_factor * upscale_factor
    if channels % pixels != 0:
        raise ShapeMismatch(f"pixel_shuffle: {channels} channels of {spec} are not divisible by {pixels}")
    return _shuffle_spec(spec, (*batch, channels // pixels, height * upscale_factor, width * upscale_factor))


@rule("pixel_unshuffle")
def pixel_unshuffle(spec: TensorSpec, downscale_factor: Any) -> TensorSpec:
    if spec.ndim < 3:
        raise ShapeMismatch(f"pixel_unshuffle: expected at least 3 dimensions, got {spec}")
    factor = downscale_factor
    if factor <= 0:
        raise ArgumentError(f"pixel_unshuffle: the factor must be positive, got {factor}")
    *batch, channels, height, width = spec.shape
    if height % factor != 0 or width % factor != 0:
        raise ShapeMismatch(f"pixel_unshuffle: {height} × {width} of {spec} are not divisible by {factor}")
    is_the_same = type(factor) is int and factor == 1 and is_provably_row_major(spec)
    if spec.device.type == "cpu" and not is_the_same and spec.is_empty:
        return preserved_copy(spec)  # the CPU kernel returns before it checks the factor
    return _shuffle_spec(spec, (*batch, channels * factor * factor, height // factor, width // factor))


def _shuffle_spec(spec: TensorSpec, shape: tuple[object, ...]) -> TensorSpec:
    """The CPU kernel keeps a channels-last format; on other devices the shuffle is reshapes and a copy."""
    if spec.device.type != "cpu":
        return spec.like(shape)
    return spec.like(shape, stride=suggested_strides(shape, spec))


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(spec: TensorSpec, groups: Any) -> TensorSpec | View:
    if spec.ndim < 3:
        raise ShapeMismatch(f"channel_shuffle: expected at least 3 dimensions, got {spec}")
    if groups <= 0 or spec.shape[1] % groups != 0:
        raise ShapeMismatch(
            f"channel_shuffle: channels must be divisible by groups, got {spec} and groups={groups}"
        )
    if spec.is_empty:
        return View(0, spec)
    return _shuffle_spec(spec, spec.shape)
