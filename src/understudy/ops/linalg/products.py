"""Products of matrices and vectors. All results are contiguous, except those of `addr` and grouped products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch
from understudy.ops.kernel_tables.table import holds
from understudy.ops.registry import rule
from understudy.ops.shared.decompositions import (
    broadcast,
    decomposition,
    is_recorded_symbolically,
)
from understudy.ops.shared.dims import wrap_dims
from understudy.ops.shared.dtypes import (
    FLOAT8,
    check_any_dtype,
    check_dtype,
    check_one_dtype,
    refuse_cpu,
)
from understudy.ops.shared.layouts import expand_strides, view_strides
from understudy.ops.traits.caching import ViewOfNew, whole_result
from understudy.ops.variants import check_no_overlap
from understudy.shapes.bindings import guard_or_false
from understudy.shapes.node import Shape
from understudy.shapes.sizes import from_torch
from understudy.spec import (
    Same,
    TensorSpec,
    broadcast_shapes,
    check_expandable,
    elementwise_strides,
    product,
    result_type,
    same_shape,
    spec_of,
)

Tensor = torch.Tensor
aten = torch.ops.aten


def _check_rank(what: str, spec: TensorSpec, ndim: int) -> None:
    if spec.ndim != ndim:
        raise ShapeMismatch(f"{what}: expected {ndim} dimensions, got {spec}")


def _check_inner(what: str, a: TensorSpec, b: TensorSpec, columns: object, rows: object) -> None:
    if columns != rows:
        raise ShapeMismatch(f"{what}: {a} has {columns} columns, {b} has {rows} rows")


# --- matrix times matrix


@rule("mm")
def mm(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    _check_rank("mm", a, 2)
    _check_rank("mm", b, 2)
    check_one_dtype("mm", a, b)
    _check_inner("mm", a, b, a.shape[1], b.shape[0])
    return a.like((a.shape[0], b.shape[1]))


@rule("bmm")
def bmm(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    return _batch_product("bmm", a, b)


def _batch_product(what: str, a: TensorSpec, b: TensorSpec) -> TensorSpec:
    _check_rank(what, a, 3)
    _check_rank(what, b, 3)
    check_one_dtype(what, a, b)
    if a.shape[0] != b.shape[0]:
        raise ShapeMismatch(f"{what}: {a} and {b} differ in batch size")
    _check_inner(what, a, b, a.shape[2], b.shape[1])
    return a.like((a.shape[0], a.shape[1], b.shape[2]))


@rule("addmm")
def addmm(
    bias: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: object = 1, alpha: object = 1
) -> TensorSpec:
    return _add_bias("addmm", bias, mm(a, b))


@rule("_addmm_activation")
def addmm_activation(
    bias: TensorSpec,
    a: TensorSpec,
    b: TensorSpec,
    *,
    beta: object = 1,
    alpha: object = 1,
    use_gelu: bool = False,
) -> TensorSpec:
    check_dtype("_addmm_activation", a.dtype, "if")
    return _add_bias("_addmm_activation", bias, mm(a, b))


@rule("baddbmm")
def baddbmm(
    bias: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: object = 1, alpha: object = 1
) -> TensorSpec:
    return _add_bias("baddbmm", bias, _batch_product("baddbmm", a, b))


@rule("addbmm")
def addbmm(
    bias: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: object = 1, alpha: object = 1
) -> TensorSpec:
    products = _batch_product("addbmm", a, b)
    return _add_bias("addbmm", bias, products.like(products.shape[1:]))


@rule("addbmm_")
def addbmm_in_place(
    target: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: object = 1, alpha: object = 1
) -> Same:
    """Unlike the other in-place products, it resizes a target that has to be broadcast."""
    result = addbmm(target, a, b)
    check_no_overlap("addbmm_", target)
    if same_shape(result.shape, target.shape):
        return Same(0)
    return Same(0, target.as_view(result.shape, result.stride))


def _add_bias(what: str, bias: TensorSpec, result: TensorSpec) -> TensorSpec:
    check_one_dtype(what, bias, result)
    if not same_shape(bias.shape, result.shape):
        check_expandable(bias.shape, result.shape, what)
    return result


@rule("mm.dtype", "bmm.dtype")
def mm_to_dtype(a: TensorSpec, b: TensorSpec, out_dtype: torch.dtype) -> TensorSpec:
    refuse_cpu("mm with a dtype for its result", a)
    result = mm(a, b) if a.ndim == 2 else bmm(a, b)
    return result.like(dtype=out_dtype)


@rule("addmm.dtype", "baddbmm.dtype")
def addmm_to_dtype(
    bias: TensorSpec,
    a: TensorSpec,
    b: TensorSpec,
    out_dtype: torch.dtype,
    *,
    beta: object = 1,
    alpha: object = 1,
) -> TensorSpec:
    refuse_cpu("addmm with a dtype for its result", a)
    result = mm_to_dtype(a, b, out_dtype)
    check_expandable(bias.shape, result.shape, "addmm")
    return result


@rule("_int_mm")
def int_mm(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    check_any_dtype("_int_mm", a, (torch.int8,))
    return mm(a, b).like(dtype=torch.int32)


# --- matrix times vector, vector times vector


@rule("mv")
def mv(matrix: TensorSpec, vector: TensorSpec) -> TensorSpec:
    _check_rank("mv", matrix, 2)
    _check_rank("mv", vector, 1)
    check_one_dtype("mv", matrix, vector)
    _check_inner("mv", matrix, vector, matrix.shape[1], vector.shape[0])
    return matrix.like((matrix.shape[0],))


@rule("addmv")
def addmv(
    bias: TensorSpec, matrix: TensorSpec, vector: TensorSpec, *, beta: object = 1, alpha: object = 1
) -> TensorSpec:
    result = _add_bias("addmv", bias, mv(matrix, vector))
    # For an empty matrix, eager scales the bias without expanding it.
    return result if not matrix.is_empty or beta == 0 else result.like(bias.shape)


@rule("dot")
def dot(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    return _inner_product(a, b, lazily_conjugated=a.conj and b.conj)


@rule("vdot")
def vdot(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    return _inner_product(a, b, lazily_conjugated=b.conj and not a.conj)


def _inner_product(a: TensorSpec, b: TensorSpec, lazily_conjugated: bool) -> TensorSpec:
    """Conjugations are not computed but counted; an odd one becomes the conjugation bit of the result."""
    _check_rank("dot", a, 1)
    _check_rank("dot", b, 1)
    check_one_dtype("dot", a, b)
    if not same_shape(a.shape, b.shape):
        raise ShapeMismatch(f"dot: {a} and {b} differ in size")
    result = a.like(())
    return result.as_view((), (), conj=True) if lazily_conjugated else result


@rule("addr")
def addr(
    bias: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: object = 1, alpha: object = 1
) -> TensorSpec:
    """Computed elementwise on the bias, a column and a row: the only product whose strides follow its operands."""
    _check_rank("addr", a, 1)
    _check_rank("addr", b, 1)
    shape = (a.shape[0], b.shape[0])
    check_expandable(bias.shape, shape, "addr")
    expanded, column = bias.as_view(*expand_strides(bias, shape)), a.as_view((shape[0], 1), (a.stride[0], 1))
    dtype = result_type(bias, a, b)
    if dtype is not torch.bool and (isinstance(beta, bool) or isinstance(alpha, bool)):
        raise DtypeError(f"addr: bool beta and alpha need a bool result, got {dtype}")
    return a.like(shape, stride=elementwise_strides(shape, (expanded, column, b)), dtype=dtype)


# --- composites, which arrive whole in inference mode


@rule("linear")
def linear(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None) -> TensorSpec:
    if x.ndim == 0 or weight.ndim == 0:
        raise DimensionError(f"linear: needs at least one dimension, got {x} and {weight}")
    if weight.ndim > 2 or (weight.ndim == 1 and x.ndim == 2 and bias is not None):
        raise ShapeMismatch(f"linear: expected a matrix as weight, got {weight}")
    check_one_dtype("linear", x, weight, bias)
    _check_inner("linear", x, weight, x.shape[-1], weight.shape[-1])
    result = x.like((*x.shape[:-1], *weight.shape[:-1]))
    if bias is not None:
        check_expandable(bias.shape, result.shape, "linear")
    return result


@rule("matmul")
def matmul(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    if a.ndim == 0 or b.ndim == 0:
        raise DimensionError(f"matmul: needs at least one dimension, got {a} and {b}")
    check_one_dtype("matmul", a, b)
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    _check_inner("matmul", a, b, a.shape[-1], inner)
    return a.like(_matmul_shape(a.shape, b.shape))


@whole_result("linear")
def whole_linear(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None) -> Any:
    if x.ndim != 3 or weight.ndim != 2 or not x.is_contiguous or (bias is not None and bias.ndim != 1):
        return NotImplemented
    result = linear(x, weight, bias)
    has_base = bias is not None and holds("linear_gives_view")
    return (
        ViewOfNew(result.like((x.shape[0] * x.shape[1], result.shape[2])), result.shape)
        if has_base
        else result
    )


@whole_result("matmul")
def whole_matmul(a: TensorSpec, b: TensorSpec) -> Any:
    return matmul(a, b) if a.ndim > 2 and a.shape[:-2] == b.shape[:-2] else NotImplemented


def _matmul_shape(a: Shape, b: Shape) -> Shape:
    outer = (*a[-2:-1], *(b[-1:] if len(b) > 1 else ()))
    return (*broadcast_shapes(a[:-2], b[:-2]), *outer)


# --- scaled and grouped products


@rule("_scaled_mm")
def scaled_mm(
    a: TensorSpec, b: TensorSpec, scale_a: TensorSpec, scale_b: TensorSpec, bias: TensorSpec | None = None,
    scale_result: TensorSpec | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> TensorSpec:  # fmt: skip
    for matrix in (a, b):
        _check_rank("_scaled_mm", matrix, 2)
        check_any_dtype("_scaled_mm", matrix, FLOAT8)
    _check_inner("_scaled_mm", a, b, a.shape[1], b.shape[0])
    if a.device.type == "cpu" and (scale_a.numel != 1 or scale_b.numel != 1):
        _check_scales_of_rows("_scaled_mm", a, b, scale_a, scale_b)
    _check_bias("_scaled_mm", b, bias)
    return a.like((a.shape[0], b.shape[1]), dtype=out_dtype)


OF_TENSORS, OF_ROWS = 0, 1
"""The recipe numbers of `_scaled_mm_v2` that CPU kernels support: one scale for a matrix, or one for each row or column."""


@rule("_scaled_mm_v2")
def scaled_mm_by_recipe(
    a: TensorSpec, b: TensorSpec, scale_a: Sequence[TensorSpec], recipe_a: Sequence[int], swizzle_a: Sequence[int],
    scale_b: Sequence[TensorSpec], recipe_b: Sequence[int], swizzle_b: Sequence[int], bias: TensorSpec | None,
    out_dtype: torch.dtype | None, contraction_dim: Sequence[int] = (), use_fast_accum: bool = False,
) -> Any:  # fmt: skip
    recipes = (*recipe_a, *recipe_b)
    if a.device.type != "cpu" or recipes not in ((OF_TENSORS,) * 2, (OF_ROWS,) * 2):
        return NotImplemented
    for matrix in (a, b):
        _check_rank("_scaled_mm_v2", matrix, 2)
        check_any_dtype("_scaled_mm_v2", matrix, FLOAT8)
    _check_inner("_scaled_mm_v2", a, b, a.shape[1], b.shape[0])
    if recipes == (OF_ROWS,) * 2:
        _check_scales_of_rows("_scaled_mm_v2", a, b, scale_a[0], scale_b[0])
    elif scale_a[0].numel != 1 or scale_b[0].numel != 1:
        raise ShapeMismatch(
            f"_scaled_mm_v2: expected scales of one element, got {scale_a[0]} and {scale_b[0]}"
        )
    _check_bias("_scaled_mm_v2", b, bias)
    return a.like((a.shape[0], b.shape[1]), dtype=out_dtype)


def _check_scales_of_rows(
    what: str, a: TensorSpec, b: TensorSpec, scale_a: TensorSpec, scale_b: TensorSpec
) -> None:
    if not (same_shape(scale_a.shape, (a.shape[0], 1)) and same_shape(scale_b.shape, (1, b.shape[1]))):
        raise ShapeMismatch(
            f"{what}: scales {scale_a} and {scale_b} do not match the rows of {a} and the columns of {b}"
        )


def _check_bias(what: str, b: TensorSpec, bias: TensorSpec | None) -> None:
    if bias is not None and bias.numel != b.shape[1]:
        raise ShapeMismatch(f"{what}: expected a bias of {b.shape[1]} elements, got {bias}")


GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@rule("_grouped_mm")
def grouped_mm(
    a: TensorSpec, b: TensorSpec, offs: TensorSpec | None = None, bias: TensorSpec | None = None,
    out_dtype: torch.dtype | None = None,
) -> TensorSpec:  # fmt: skip
    check_any_dtype("_grouped_mm", a, GROUPED_DTYPES)
    check_one_dtype("_grouped_mm", a, b)
    if out_dtype not in (None, a.dtype):
        raise DtypeError(f"_grouped_mm: expected out_dtype {a.dtype} for {a}, got {out_dtype}")
    return _group_product("_grouped_mm", a, b, offs, bias, a.dtype)


@rule("_scaled_grouped_mm")
def scaled_grouped_mm(
    a: TensorSpec, b: TensorSpec, scale_a: TensorSpec, scale_b: TensorSpec, offs: TensorSpec | None = None,
    bias: TensorSpec | None = None, scale_result: TensorSpec | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> TensorSpec:  # fmt: skip
    refuse_cpu("_scaled_grouped_mm", a)
    for matrix in (a, b):
        check_any_dtype("_scaled_grouped_mm", matrix, FLOAT8)
    return _group_product("_scaled_grouped_mm", a, b, offs, bias, out_dtype or torch.bfloat16)


def _group_product(
    what: str,
    a: TensorSpec,
    b: TensorSpec,
    offs: TensorSpec | None,
    bias: TensorSpec | None,
    dtype: torch.dtype,
) -> TensorSpec:
    """The rows, columns or inner dimension of 2-D operands are divided into groups by `offs`."""
    if a.ndim not in (2, 3) or b.ndim not in (2, 3):
        raise ShapeMismatch(f"{what}: expected operands of 2 or 3 dimensions, got {a} and {b}")
    if bias is not None:
        raise ArgumentError(f"{what}: a bias is not supported")
    _check_inner(what, a, b, a.shape[-1], b.shape[-2])
    _check_grouped_strides(what, a)
    _check_grouped_strides(what, b)
    shape = _grouped_shape(what, a, b, offs)
    per_16_bytes = 16 // dtype.itemsize
    row = (shape[-1] + per_16_bytes - 1) // per_16_bytes * per_16_bytes
    stride = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return a.like(shape, stride=stride, dtype=dtype)


def _grouped_shape(what: str, a: TensorSpec, b: TensorSpec, offs: TensorSpec | None) -> Shape:
    if a.ndim == b.ndim == 3:
        if offs is not None:
            raise ArgumentError(f"{what}: offsets are not supported for 3-D operands")
        if a.shape[0] != b.shape[0]:
            raise ShapeMismatch(f"{what}: {a} and {b} differ in the number of groups")
        return (a.shape[0], a.shape[1], b.shape[2])
    if offs is None:
        raise ArgumentError(f"{what}: a 2-D operand needs offsets that delimit its groups")
    _check_rank(what, offs, 1)
    check_any_dtype(what, offs, (torch.int32,))
    if a.ndim == b.ndim:
        return (offs.shape[0], a.shape[0], b.shape[1])
    groups = b.shape[0] if a.ndim == 2 else a.shape[0]
    if offs.shape[0] != groups:
        raise ShapeMismatch(f"{what}: expected offsets of {groups} groups, got {offs}")
    return (a.shape[-2], b.shape[-1])


def _check_grouped_strides(what: str, spec: TensorSpec) -> None:
    """Row- or column-major, with rows that start at multiples of 16 bytes."""
    rows, columns = spec.shape[-2:]
    row_stride, column_stride = spec.stride[-2:]
    if row_stride == 1 and column_stride >= rows and column_stride >= 1:
        step = column_stride
    elif column_stride == 1 and row_stride >= columns and row_stride >= 1:
        step = row_stride
    else:
        raise ArgumentError(f"{what}: {spec} is neither row-major nor column-major")
    if step * spec.itemsize % 16 != 0:
        raise ArgumentError(f"{what}: expected strides in multiples of 16 bytes, got {spec}")


# --- Products of three tensors, summed over some dimensions: for bilinear layers and their gradients ----------------


@rule("_trilinear")
def trilinear(
    i1: TensorSpec, i2: TensorSpec, i3: TensorSpec, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Any:  # fmt: skip
    """Each tensor gets dimensions of size 1 at some positions; the sizes must then agree."""
    rank = i1.ndim + len(expand1)
    aligned = [
        _with_gaps(spec, wrap_dims(places, rank), rank)
        for spec, places in ((i1, expand1), (i2, expand2), (i3, expand3))
    ]
    if not 0 <= unroll_dim < rank or any(len(sizes) != rank for sizes in aligned):
        return NotImplemented
    if i2.dtype is not i1.dtype or i3.dtype is not i1.dtype:
        return NotImplemented
    shape: list[Any] = []
    summed = wrap_dims(sumdim, rank)
    for dim, meeting in enumerate(zip(*aligned, strict=True)):
        sizes = [size for size in meeting if size is not None]
        if not sizes or any(size != sizes[0] for size in sizes[1:]):
            return NotImplemented
        if dim not in summed:
            shape.append(sizes[0])
    return i1.like(shape)


def _with_gaps(spec: TensorSpec, places: Sequence[int], rank: int) -> list[Any]:
    sizes = iter(spec.shape)
    aligned = [None if dim in places else next(sizes, None) for dim in range(rank)]
    return [*aligned, *sizes]


# --- batches: decompositions for symbolic sizes -------------------------------------------------------------


@decomposition("matmul")
def decompose_matmul(a: Tensor, b: Tensor) -> Any:
    """Two batches, or a matrix and a batch. C++ would add guards on empty batches that are not needed. (Where a
    matrix requires grad, C++ folds the batch into one matrix.)"""
    if a.dim() < 2 or b.dim() < 3 or spec_of(a) is None or spec_of(b) is None:
        return NotImplemented
    if a.dim() == 2:
        if a.requires_grad:
            return NotImplemented
        aten.transpose.int(b, -2, -1)  # C++ makes this view in any case
    if a.dim() == b.dim() == 3 and guard_or_false(a.shape[0] != b.shape[0]):
        return NotImplemented
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    count = product(batch)
    left = _reshape(a.expand([*batch, *a.shape[-2:]]), [count, *a.shape[-2:]])
    right = _reshape(b.expand([*batch, *b.shape[-2:]]), [count, *b.shape[-2:]])
    shape = [*batch, a.shape[-2], b.shape[-1]]
    products = left.bmm(right)
    return products.view(shape) if is_recorded_symbolically() else aten._unsafe_view(products, shape)


def _reshape(x: Any, shape: Sequence[object]) -> Tensor:
    """A view if possible, else a copy."""
    if view_strides(x._spec, tuple(map(from_torch, shape))) is not None:
        return x.view(shape)
    return aten._unsafe_view(x.clone(memory_format=torch.contiguous_format), shape)


# --- chains of products: decompositions for symbolic sizes --------------------------------------------------


# --- Kronecker and other products: decompositions for symbolic sizes ----------------------------------------
