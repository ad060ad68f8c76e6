"""Products of matrices and vectors. All results are contiguous, but for those of `addr` and grouped products."""

from __future__ import annotations

from typing import Any

import torch

from understudy.errors import ArgumentError, DimensionError, DtypeError, ShapeMismatch
from understudy.rules.dtype_sets import (
    BOOL,
    FLOAT8,
    INTEGERS,
    NUMBERS,
    check_any_dtype,
    check_cpu_dtype,
    check_one_dtype,
)
from understudy.rules.registry import check_no_overlap, rule
from understudy.spec import (
    Same,
    TensorSpec,
    broadcast_shapes,
    check_expandable,
    elementwise_strides,
    result_type,
    same_shape,
)
from understudy.spec.tensor_spec import Size

MATRIX_DTYPES = NUMBERS | FLOAT8


def _check_rank(what: str, spec: TensorSpec, ndim: int) -> None:
    if spec.ndim != ndim:
        raise ShapeMismatch(f"{what}: expected {ndim} dimensions, got {spec}")


def _check_inner(what: str, a: TensorSpec, b: TensorSpec, columns: Any, rows: Any) -> None:
    if columns != rows:
        raise ShapeMismatch(f"{what}: {a} has {columns} columns, {b} has {rows} rows")


# --- matrix times matrix


@rule("mm")
def mm(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    _check_rank("mm", a, 2)
    _check_rank("mm", b, 2)
    check_one_dtype("mm", a, b)
    check_cpu_dtype("mm", a, MATRIX_DTYPES)
    _check_inner("mm", a, b, a.shape[1], b.shape[0])
    return a.like((a.shape[0], b.shape[1]))


@rule("bmm")
def bmm(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    check_cpu_dtype("bmm", a, NUMBERS)
    return _batched("bmm", a, b)


def _batched(what: str, a: TensorSpec, b: TensorSpec) -> TensorSpec:
    _check_rank(what, a, 3)
    _check_rank(what, b, 3)
    check_one_dtype(what, a, b)
    if a.shape[0] != b.shape[0]:
        raise ShapeMismatch(f"{what}: {a} and {b} differ in batch size")
    _check_inner(what, a, b, a.shape[2], b.shape[1])
    return a.like((a.shape[0], a.shape[1], b.shape[2]))


@rule("addmm")
def addmm(bias: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: Any = 1, alpha: Any = 1) -> TensorSpec:
    return _added("addmm", bias, mm(a, b))


@rule("_addmm_activation")
def addmm_activation(
    bias: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> TensorSpec:
    accepted = NUMBERS - {torch.complex64, torch.complex128}
    check_cpu_dtype("_addmm_activation", a, accepted - INTEGERS if use_gelu else accepted)
    return _added("_addmm_activation", bias, mm(a, b))


@rule("baddbmm")
def baddbmm(bias: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: Any = 1, alpha: Any = 1) -> TensorSpec:
    check_cpu_dtype("baddbmm", a, NUMBERS)
    return _added("baddbmm", bias, _batched("baddbmm", a, b))


@rule("addbmm")
def addbmm(bias: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: Any = 1, alpha: Any = 1) -> TensorSpec:
    check_cpu_dtype("addbmm", a, MATRIX_DTYPES)
    products = _batched("addbmm", a, b)
    return _added("addbmm", bias, products.like(products.shape[1:]))


@rule("addbmm_")
def addbmm_in_place(
    target: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: Any = 1, alpha: Any = 1
) -> Same:
    """Alone among its kind, it resizes a target that has to be broadcast."""
    result = addbmm(target, a, b)
    check_no_overlap("addbmm_", target)
    if same_shape(result.shape, target.shape):
        return Same(0)
    return Same(0, target.viewed(result.shape, result.stride))


def _added(what: str, bias: TensorSpec, result: TensorSpec) -> TensorSpec:
    check_one_dtype(what, bias, result)
    if not same_shape(bias.shape, result.shape):
        check_expandable(bias.shape, result.shape, what)
    return result


@rule("mm.dtype", "bmm.dtype")
def mm_to_dtype(a: TensorSpec, b: TensorSpec, out_dtype: torch.dtype) -> TensorSpec:
    _check_gpu("mm with a dtype for its result", a)
    result = mm(a, b) if a.ndim == 2 else bmm(a, b)
    return result.like(dtype=out_dtype)


@rule("addmm.dtype", "baddbmm.dtype")
def addmm_to_dtype(
    bias: TensorSpec, a: TensorSpec, b: TensorSpec, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1
) -> TensorSpec:
    _check_gpu("addmm with a dtype for its result", a)
    result = mm_to_dtype(a, b, out_dtype)
    check_expandable(bias.shape, result.shape, "addmm")
    return result


def _check_gpu(what: str, spec: TensorSpec) -> None:
    if spec.device.type == "cpu":
        raise ArgumentError(f"{what}: there is no CPU kernel")


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
    check_cpu_dtype("mv", matrix, NUMBERS)
    _check_inner("mv", matrix, vector, matrix.shape[1], vector.shape[0])
    return matrix.like((matrix.shape[0],))


@rule("addmv")
def addmv(
    bias: TensorSpec, matrix: TensorSpec, vector: TensorSpec, *, beta: Any = 1, alpha: Any = 1
) -> TensorSpec:
    result = _added("addmv", bias, mv(matrix, vector))
    # Without elements in the matrix, eager scales the bias and forgets to expand it.
    return result if not matrix.is_empty or beta == 0 else result.like(bias.shape)


@rule("dot")
def dot(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    return _inner_product(a, b, lazily_conjugated=a.conj and b.conj)


@rule("vdot")
def vdot(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    return _inner_product(a, b, lazily_conjugated=b.conj and not a.conj)


def _inner_product(a: TensorSpec, b: TensorSpec, lazily_conjugated: bool) -> TensorSpec:
    """Conjugates are not taken but counted, and what is left over becomes a bit of the result."""
    _check_rank("dot", a, 1)
    _check_rank("dot", b, 1)
    check_one_dtype("dot", a, b)
    check_cpu_dtype("dot", a, NUMBERS)
    if not same_shape(a.shape, b.shape):
        raise ShapeMismatch(f"dot: {a} and {b} differ in size")
    result = a.like(())
    return result.viewed((), (), conj=True) if lazily_conjugated else result


@rule("addr")
def addr(bias: TensorSpec, a: TensorSpec, b: TensorSpec, *, beta: Any = 1, alpha: Any = 1) -> TensorSpec:
    """Elementwise on the bias, a column and a row: the only product whose result follows a layout."""
    _check_rank("addr", a, 1)
    _check_rank("addr", b, 1)
    shape = (a.shape[0], b.shape[0])
    check_expandable(bias.shape, shape, "addr")
    column = a.viewed((shape[0], 1), (a.stride[0], 1))
    dtype = result_type(bias, a, b)
    check_cpu_dtype("addr", bias.like(dtype=dtype), NUMBERS | BOOL)
    return a.like(shape, stride=elementwise_strides(shape, (_expanded(bias, shape), column, b)), dtype=dtype)


def _expanded(spec: TensorSpec, shape: Size) -> TensorSpec:
    """As `expand` does it: new dimensions of size 1 get the stride that they would have in memory."""
    lead = len(shape) - spec.ndim
    stride: list[Any] = []
    for dim in reversed(range(len(shape))):
        if dim >= lead:
            size, step = spec.shape[dim - lead], spec.stride[dim - lead]
        else:
            size, step = 1, shape[dim + 1] * stride[-1] if stride else 1
        stride.append(step if size == shape[dim] else 0)
    return spec.viewed(shape, stride[::-1])


@rule("outer")
def outer(a: TensorSpec, b: TensorSpec) -> TensorSpec:
    _check_rank("outer", a, 1)
    _check_rank("outer", b, 1)
    return a.like((a.shape[0], b.shape[0]), dtype=result_type(a, b))


# --- composites, which arrive whole in inference mode


@rule("linear")
def linear(x: TensorSpec, weight: TensorSpec, bias: TensorSpec | None = None) -> TensorSpec:
    if x.ndim == 0 or weight.ndim == 0:
        raise DimensionError(f"linear: needs at least one dimension, got {x} and {weight}")
    if weight.ndim > 2 or (weight.ndim == 1 and x.ndim == 2 and bias is not None):
        raise ShapeMismatch(f"linear: a weight is a matrix, got {weight}")
    check_one_dtype("linear", x, weight, bias)
    check_cpu_dtype("linear", x, MATRIX_DTYPES)
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
    check_cpu_dtype("matmul", a, MATRIX_DTYPES)
    inner = b.shape[-2] if b.ndim > 1 else b.shape[0]
    _check_inner("matmul", a, b, a.shape[-1], inner)
    return a.like(_matmul_shape(a.shape, b.shape))


def _matmul_shape(a: Size, b: Size) -> Size:
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
    if bias is not None and bias.numel != b.shape[1]:
        raise ShapeMismatch(f"_scaled_mm: {bias} is no bias for {b.shape[1]} columns")
    return a.like((a.shape[0], b.shape[1]), dtype=out_dtype)


GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@rule("_grouped_mm")
def grouped_mm(
    a: TensorSpec, b: TensorSpec, offs: TensorSpec | None = None, bias: TensorSpec | None = None,
    out_dtype: torch.dtype | None = None,
) -> TensorSpec:  # fmt: skip
    check_any_dtype("_grouped_mm", a, GROUPED_DTYPES)
    check_one_dtype("_grouped_mm", a, b)
    if out_dtype not in (None, a.dtype):
        raise DtypeError(f"_grouped_mm: the result of {a} can't be in {out_dtype}")
    return _grouped("_grouped_mm", a, b, offs, bias, a.dtype)


@rule("_scaled_grouped_mm")
def scaled_grouped_mm(
    a: TensorSpec, b: TensorSpec, scale_a: TensorSpec, scale_b: TensorSpec, offs: TensorSpec | None = None,
    bias: TensorSpec | None = None, scale_result: TensorSpec | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> TensorSpec:  # fmt: skip
    _check_gpu("_scaled_grouped_mm", a)
    for matrix in (a, b):
        check_any_dtype("_scaled_grouped_mm", matrix, FLOAT8)
    return _grouped("_scaled_grouped_mm", a, b, offs, bias, out_dtype or torch.bfloat16)


def _grouped(
    what: str,
    a: TensorSpec,
    b: TensorSpec,
    offs: TensorSpec | None,
    bias: TensorSpec | None,
    dtype: torch.dtype,
) -> TensorSpec:
    """Rows, columns or the inner dimension of 2-D operands come in groups, which `offs` delimits."""
    if a.ndim not in (2, 3) or b.ndim not in (2, 3):
        raise ShapeMismatch(f"{what}: operands have 2 or 3 dimensions, got {a} and {b}")
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


def _grouped_shape(what: str, a: TensorSpec, b: TensorSpec, offs: TensorSpec | None) -> Size:
    if a.ndim == b.ndim == 3:
        if offs is not None:
            raise ArgumentError(f"{what}: 3-D operands take no offsets")
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
        raise ShapeMismatch(f"{what}: {offs} delimits {offs.shape[0]} groups of {groups}")
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
        raise ArgumentError(f"{what}: the strides of {spec} are no multiples of 16 bytes")
