"""Embeddings: rows of a table, and bags of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import decomposition
from understudy.ops.shared.dtypes import FLOATS, check_any_dtype
from understudy.shapes.node import Shape, Size
from understudy.spec import Same, TensorSpec, promote

aten = torch.ops.aten
Tensor = torch.Tensor

SUM, MEAN, MAX = 0, 1, 2

# Dtypes for which the CPU has a kernel that sums rows without storing the bag of each row.
FAST_SUM_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _check_indices(what: str, indices: TensorSpec) -> None:
    if indices.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"{what}: indices must be i64 or i32, got {indices}")


@rule("embedding")
def embedding(
    weight: TensorSpec,
    indices: TensorSpec,
    padding_idx: Size = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> TensorSpec:
    if weight.ndim != 2:
        raise ShapeMismatch(f"embedding: the weight must be a matrix, got {weight}")
    _check_indices("embedding", indices)
    return weight.like((*indices.shape, weight.shape[1]))


@rule("embedding_dense_backward")
def embedding_dense_backward(
    grad_output: TensorSpec,
    indices: TensorSpec,
    num_weights: Size,
    padding_idx: Size,
    scale_grad_by_freq: bool,
) -> TensorSpec:
    _check_indices("embedding_dense_backward", indices)
    if not grad_output.shape or grad_output.numel != indices.numel * grad_output.shape[-1]:
        raise ShapeMismatch(
            f"embedding_dense_backward: gradient shape {grad_output} does not match indices {indices}"
        )
    return grad_output.like((num_weights, grad_output.shape[-1]))


@rule("embedding_renorm_")
def embedding_renorm_(spec: TensorSpec, indices: TensorSpec, max_norm: float, norm_type: float) -> Same:
    if spec.ndim != 2:
        raise ShapeMismatch(f"embedding_renorm_: the weight must be a matrix, got {spec}")
    _check_indices("embedding_renorm_", indices)
    return Same(0)


def _make_bag_rule(forward_only: bool) -> Callable[..., tuple[TensorSpec, ...]]:
    def bags(
        weight: TensorSpec,
        indices: TensorSpec,
        offsets: TensorSpec,
        scale_grad_by_freq: bool = False,
        mode: int = SUM,
        sparse: bool = False,
        per_sample_weights: TensorSpec | None = None,
        include_last_offset: bool = False,
        padding_idx: object = -1,
    ) -> tuple[TensorSpec, ...]:
        """The sums (or means, or maxima), the bag of each row, the size of each bag, the row of each maximum."""
        _check_bags(weight, indices, offsets, mode, per_sample_weights, include_last_offset)
        wide = offsets.like(dtype=promote(indices.dtype, offsets.dtype))
        rows, width = indices.shape[0], weight.shape[1]
        number = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
        output = weight.like((number, width))
        if weight.device.type != "cpu":
            largest: Shape = (number, width) if mode == MAX else (0,)
            return output, wide.like((rows,)), wide.like((offsets.shape[0],)), wide.like(largest)
        fast = mode == SUM and _has_fast_sum(weight, per_sample_weights, padding_idx)
        counted = offsets.shape[0] if mode == SUM and forward_only else number
        largest = (number, width) if mode == MAX else (counted,)
        return output, wide.like((0 if fast else rows,)), wide.like((counted,)), wide.like(largest)

    return bags


rule("_embedding_bag")(_make_bag_rule(forward_only=False))
rule("_embedding_bag_forward_only")(_make_bag_rule(forward_only=True))


def _has_fast_sum(weight: TensorSpec, scale: TensorSpec | None, padding_idx: Any) -> bool:
    return (
        weight.dtype in FAST_SUM_DTYPES
        and weight.stride[1] == 1
        and padding_idx < 0
        and (scale is None or scale.stride[0] == 1)
    )


def _check_bags(
    weight: TensorSpec,
    indices: TensorSpec,
    offsets: TensorSpec,
    mode: int,
    scale: TensorSpec | None,
    include_last_offset: bool,
) -> None:
    check_any_dtype("embedding_bag", weight, FLOATS)
    _check_indices("embedding_bag", offsets.like(dtype=promote(indices.dtype, offsets.dtype)))
    if weight.ndim != 2 or indices.ndim != 1 or offsets.ndim != 1:
        raise ShapeMismatch(
            f"embedding_bag: expected a matrix and two vectors, "
            f"got weight {weight}, indices {indices}, offsets {offsets}"
        )
    if include_last_offset and offsets.shape[0] < 1:
        raise ShapeMismatch("embedding_bag: include_last_offset=True needs at least one offset")
    if scale is None:
        return
    if mode != SUM:
        raise ArgumentError("embedding_bag: per_sample_weights need mode='sum'")
    if scale.ndim != 1 or scale.shape[0] != indices.shape[0]:
        raise ShapeMismatch(f"embedding_bag: expected one weight for each of {indices}, got {scale}")
    if scale.dtype is not weight.dtype:
        raise DtypeError(f"embedding_bag: expected per_sample_weights of dtype {weight.dtype}, got {scale}")


@rule("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad: TensorSpec,
    indices: TensorSpec,
    offset2bag: TensorSpec,
    bag_size: TensorSpec,
    maximum_indices: TensorSpec,
    num_weights: object,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: TensorSpec | None,
    padding_idx: object = -1,
) -> TensorSpec:
    return grad.like((num_weights, grad.shape[1]))


@rule("_embedding_bag_backward")
def embedding_bag_backward(
    grad: TensorSpec,
    indices: TensorSpec,
    offsets: TensorSpec,
    offset2bag: TensorSpec,
    bag_size: TensorSpec,
    maximum_indices: TensorSpec,
    num_weights: object,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: TensorSpec | None,
    padding_idx: object = -1,
) -> Any:
    return NotImplemented if sparse else grad.like((num_weights, grad.shape[1]))


@rule("_embedding_bag_per_sample_weights_backward")
def embedding_bag_per_sample_weights_backward(
    grad: TensorSpec,
    weight: TensorSpec,
    indices: TensorSpec,
    offsets: TensorSpec,
    offset2bag: TensorSpec,
    mode: int,
    padding_idx: object = -1,
) -> TensorSpec:
    return grad.like((indices.shape[0],))


# --- decompositions for symbolic sizes ----------------------------------------------------------------------


@decomposition("embedding_bag.padding_idx")
def decompose_embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool, mode: int, sparse: bool,
    per_sample_weights: Tensor | None, include_last_offset: bool, padding_idx: int | None,
) -> Any:  # fmt: skip
    """A negative `padding_idx` counts from the end: the operator below needs the number of the row."""
    if padding_idx is None or unpack_dual(weight).tangent is not None:
        return NotImplemented
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        raise ArgumentError(f"embedding_bag: padding_idx {padding_idx} is out of range for {rows} rows")
    number = padding_idx if padding_idx >= 0 else int(padding_idx + rows)
    with_gradient = weight.requires_grad or (
        per_sample_weights is not None and per_sample_weights.requires_grad
    )
    op = aten._embedding_bag if with_gradient else aten._embedding_bag_forward_only
    return op.default(
        weight, indices.contiguous(), offsets.contiguous(), scale_grad_by_freq, mode, sparse, per_sample_weights,
        include_last_offset, number,
    )  # fmt: skip
