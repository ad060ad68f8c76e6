"""New tensors: from sizes and numbers, like another tensor, and as copies, casts and moves of one; filling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from understudy.errors import ArgumentError, DtypeError, ShapeMismatch
from understudy.ops.kernel_tables.table import holds
from understudy.ops.registry import rule
from understudy.ops.shared.dtypes import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    check_can_store,
    check_dtype,
    check_made_tensor,
)
from understudy.ops.variants import check_no_overlap
from understudy.shapes.node import Scalar, Shape, Size, Sizes
from understudy.shapes.sizes import is_provably_equal
from understudy.spec import (
    Same,
    TensorSpec,
    channels_last_strides,
    check_expandable,
    contiguous_strides,
    default_complex_dtype,
    default_dtype,
    is_channels_last_contiguous,
    number_dtype,
    preserved_copy,
    preserved_strides,
)
from understudy.spec.elementwise import CPU

CHANNELS_LAST_NDIM = {torch.channels_last: 4, torch.channels_last_3d: 5}


def strides_in_format(shape: Shape, memory_format: torch.memory_format | None) -> Shape:
    """Strides of a new tensor in a memory format."""
    ndim = CHANNELS_LAST_NDIM.get(memory_format) if memory_format is not None else None
    if ndim is None:
        if memory_format is torch.preserve_format:
            raise ArgumentError(
                "memory_format=preserve_format requires an input tensor; choose another memory_format"
            )
        return contiguous_strides(shape)
    if len(shape) != ndim:
        raise ShapeMismatch(f"{memory_format}: expected {ndim} dimensions, got {len(shape)} in {list(shape)}")
    return channels_last_strides(shape)


def copy_strides(spec: TensorSpec, memory_format: torch.memory_format | None) -> Shape:
    """Strides of a copy of a tensor in this format, its own layout if None."""
    if memory_format is None or memory_format is torch.preserve_format:
        return preserved_strides(spec.shape, spec.stride)
    return strides_in_format(spec.shape, memory_format)


@rule("clone")
def clone(a: TensorSpec, *, memory_format: torch.memory_format | None = None) -> TensorSpec:
    return a.like(stride=copy_strides(a, memory_format))


@rule("contiguous")
def contiguous(a: TensorSpec, *, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    if _has_format(a, memory_format):
        return Same(0)
    if memory_format is torch.preserve_format:
        raise ArgumentError("contiguous: expected a memory_format other than preserve_format")
    return clone(a, memory_format=memory_format)


def _has_format(a: TensorSpec, memory_format: torch.memory_format) -> bool:
    ndim = CHANNELS_LAST_NDIM.get(memory_format)
    if ndim is None:
        return a.is_contiguous
    return a.ndim == ndim and is_channels_last_contiguous(a.shape, a.stride)


@rule("copy_")
def copy_in_place(a: TensorSpec, source: TensorSpec, non_blocking: bool = False) -> Same:
    check_expandable(source.shape, a.shape, "copy_")
    if a is not source and not any(is_provably_equal(size, 0) for size in a.shape):
        check_no_overlap("copy_", a)
    return Same(0)


@rule("copy")
def copy(a: TensorSpec, source: TensorSpec, non_blocking: bool = False) -> TensorSpec:
    """Writes into a copy of `a`'s whole storage, so the strides and the offset are those of `a`."""
    check_expandable(source.shape, a.shape, "copy")
    for size, step in zip(a.shape, a.stride, strict=True):
        if step == 0 and size > 1:
            return preserved_copy(a)
    return a.as_view(a.shape, a.stride, conj=False, neg=False)


@rule("fill.Scalar")
def fill_with_number(a: TensorSpec, value: object) -> TensorSpec:
    check_can_store("fill", value, a.dtype, a.device)
    return preserved_copy(a)


@rule("fill.Tensor")
def fill_with_tensor(a: TensorSpec, value: TensorSpec) -> TensorSpec:
    if value.shape:
        raise ShapeMismatch(f"fill: expected a 0-dim tensor as value, got {value}")
    return preserved_copy(a)


@rule("zero")
def zero(a: TensorSpec) -> TensorSpec:
    return preserved_copy(a)


@rule("_pin_memory")
def pin_memory(a: TensorSpec, device: torch.device | None = None) -> TensorSpec:
    return preserved_copy(a)


@rule("_lazy_clone")
def lazy_clone(a: TensorSpec) -> TensorSpec:
    """Copy-on-write: behaves like a copy with the strides and the offset of `a`."""
    return a


@rule("fill_.Scalar")
def fill_in_place(a: TensorSpec, value: Scalar | complex) -> Same:
    check_can_store("fill_", value, a.dtype, a.device)
    return Same(0)


@rule("fill_.Tensor")
def fill_with_tensor_in_place(a: TensorSpec, value: TensorSpec) -> Same:
    fill_with_tensor(a, value)
    if a.device == value.device:
        check_no_overlap(
            "fill_", a
        )  # the value is copied; one from another device is read, and filled in as a number
    return Same(0)


@rule("zero_")
def zero_in_place(a: TensorSpec) -> Same:
    return Same(0)


# --- Operators that make tensors from sizes and numbers, or beside another tensor ---------------------------

Dtype = torch.dtype
Device = torch.device


def fresh(
    shape: Sizes, dtype: Dtype | None = None, device: Device | None = None, layout: torch.layout | None = None,
    stride: Sizes | None = None, pin_memory: bool | None = None,
) -> TensorSpec:  # fmt: skip
    """A new tensor: by default of the default dtype, on the CPU, contiguous. All factories have these `options`."""
    if layout is not None and layout is not torch.strided:
        return NotImplemented
    for size in shape:
        if size < 0:
            raise ArgumentError(f"expected sizes of at least 0, got {list(shape)}")
    return TensorSpec(shape, stride, dtype=dtype or default_dtype(), device=device or CPU)


@rule("zeros", "ones", "_efficientzerotensor")
def filled_with_constant(size: Sizes, **options: Any) -> TensorSpec:
    return fresh(size, **options)


@rule("empty.memory_format")
def empty(size: Sizes, *, memory_format: torch.memory_format | None = None, **options: Any) -> TensorSpec:
    stride = None if memory_format is None else strides_in_format(tuple(size), memory_format)
    return fresh(size, stride=stride, **options)


@rule("empty_strided")
def empty_strided(size: Sizes, stride: Sizes, **options: Any) -> TensorSpec:
    _check_strides(size, stride)
    return fresh(size, stride=stride, **options)


def _check_strides(size: Sizes, stride: Sizes) -> None:
    if len(size) != len(stride):
        raise ShapeMismatch(f"expected as many strides as sizes, got {list(stride)} for {list(size)}")
    for step in stride:
        if step < 0:
            raise ArgumentError(f"expected strides of at least 0, got {list(stride)}")


@rule("empty_permuted")
def empty_permuted(size: Sizes, physical_layout: Sequence[int], **options: Any) -> TensorSpec:
    if sorted(physical_layout) != list(range(len(size))):
        raise ArgumentError(
            f"expected a permutation of {len(size)} dimensions as physical_layout, got {list(physical_layout)}"
        )
    in_memory = contiguous_strides([size[dim] for dim in physical_layout])
    stride = [in_memory[physical_layout.index(dim)] for dim in range(len(size))]
    return fresh(size, stride=stride, **options)


@rule("full")
def full(size: Sizes, fill_value: object, *, dtype: Dtype | None = None, **options: Any) -> TensorSpec:
    dtype = dtype or number_dtype(fill_value)
    check_can_store("full", fill_value, dtype, options.get("device") or CPU)
    return fresh(size, dtype, **options)


@rule("scalar_tensor")
def scalar_tensor(s: Scalar | complex, *, dtype: Dtype | None = None, **options: Any) -> TensorSpec:
    check_made_tensor("scalar_tensor", s, dtype or default_dtype(), options.get("device") or CPU)
    return fresh((), dtype, **options)


@rule("eye")
def eye(n: Size, **options: Any) -> TensorSpec:
    return fresh((n, n), **options)


@rule("eye.m")
def eye_rectangular(n: Size, m: Size, **options: Any) -> TensorSpec:
    return fresh((n, m), **options)


def arange_count(start: object, end: Any, step: Any, dtype: Dtype) -> Any:
    """How many steps from `start` fit before `end`."""
    if step == 0:
        raise ArgumentError("arange: the step must not be 0")
    for bound in (start, end):
        if isinstance(bound, float) and not math.isfinite(bound):
            raise ArgumentError(f"arange: expected finite bounds, got {start} and {end}")
    if (end < start) if step > 0 else (end > start):
        direction = "negative" if end < start else "positive"
        raise ArgumentError(f"arange: the step from {start} to {end} must be {direction}, got {step}")
    floats = [isinstance(number, float) for number in (start, end, step)]
    if any(floats) and not (dtype is torch.int64 and holds("arange_truncates_to_int64")):
        return math.ceil((end - start) / step)
    if any(floats):
        start, end, step = (math.trunc(n) if isinstance(n, float) else n for n in (start, end, step))
    return -((start - end) // step)


@rule("arange")
def arange(end: Scalar | complex, **options: Any) -> TensorSpec:
    return arange_start_step(0, end, 1, **options)


@rule("arange.start")
def arange_start(start: Scalar | complex, end: Scalar | complex, **options: Any) -> TensorSpec:
    return arange_start_step(start, end, 1, **options)


@rule("arange.start_step")
def arange_start_step(
    start: Scalar | complex, end: Scalar | complex, step: Scalar | complex = 1, *, dtype: Dtype | None = None,
    **options: Any,
) -> TensorSpec:  # fmt: skip
    numbers = (start, end, step)
    if any(isinstance(number, torch.SymFloat) for number in numbers):
        return NotImplemented
    if any(isinstance(number, complex) for number in numbers):
        raise DtypeError("arange: complex dtypes are not supported")
    if dtype is None:
        dtype = default_dtype() if any(isinstance(number, float) for number in numbers) else torch.int64
    check_dtype("arange", dtype, "if")
    return fresh((arange_count(start, end, step, dtype),), dtype, **options)


@rule("range", "range.step")
def range_inclusive(
    start: Any, end: Any, step: Any = 1, *, dtype: Dtype | None = None, **options: Any
) -> TensorSpec:
    dtype = dtype or default_dtype()
    check_dtype("range", dtype, "if")
    if step == 0:
        raise ArgumentError("range: the step must not be 0")
    if (end < start) if step > 0 else (end > start):
        direction = "negative" if end < start else "positive"
        raise ArgumentError(f"range: the step from {start} to {end} must be {direction}, got {step}")
    if not all(isinstance(number, (int, float)) for number in (start, end, step)):
        return NotImplemented
    if dtype is torch.int64:
        start, end, step = math.trunc(start), math.trunc(end), math.trunc(step)
    return fresh((math.floor((end - start) / step) + 1,), dtype, **options)


@rule("linspace", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor")
def linspace(
    start: Scalar | complex, end: Scalar | complex, steps: Size, *, dtype: Dtype | None = None, **options: Any
) -> TensorSpec:
    for bound in (start, end):
        check_can_store("linspace", bound, dtype or default_complex_dtype(), options.get("device") or CPU)
    return _spaced_spec("linspace", start, end, steps, dtype, **options)


@rule("logspace", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor")
def logspace(start: Any, end: Any, steps: Size, base: float = 10.0, **options: Any) -> TensorSpec:
    return _spaced_spec("logspace", start, end, steps, **options)


def _spaced_spec(
    name: str,
    start: Scalar | complex,
    end: Scalar | complex,
    steps: Size,
    dtype: Dtype | None = None,
    **options: Any,
) -> TensorSpec:
    if steps < 0:
        raise ArgumentError(f"{name}: the number of steps must not be negative, got {steps}")
    for bound in (start, end):
        if isinstance(bound, TensorSpec) and bound.shape:
            raise ShapeMismatch(f"{name}: expected numbers or 0-dim tensors as bounds, got {bound}")
    if any(isinstance(x, complex) or (isinstance(x, TensorSpec) and x.is_complex) for x in (start, end)):
        inferred = {torch.float64: torch.complex128}.get(default_dtype(), torch.complex64)
        if dtype is not None and not dtype.is_complex:
            raise DtypeError(f"{name}: complex bounds need a complex dtype, got {dtype}")
        dtype = dtype or inferred
    if dtype is torch.bool and steps > 1 and (options.get("device") or CPU).type == "cpu":
        raise DtypeError(f"{name}: bool is not supported")
    return fresh((steps,), dtype, **options)


@rule("tril_indices")
def tril_indices(
    row: object, col: object, offset: object = 0, *, dtype: Dtype | None = None, **options: Any
) -> TensorSpec:
    _check_matrix(row, col)
    return fresh((2, _lower_count(row, col, offset)), dtype or torch.int64, **options)


@rule("triu_indices")
def triu_indices(
    row: object, col: Any, offset: Any = 0, *, dtype: Dtype | None = None, **options: Any
) -> TensorSpec:
    _check_matrix(row, col)
    count = row * col - _lower_count(row, col, offset - 1)
    return fresh((2, count), dtype or torch.int64, **options)


def _check_matrix(row: Any, col: Any) -> None:
    if row < 0 or col < 0:
        raise ArgumentError(f"expected row and col of at least 0, got {row} and {col}")


def _lower_count(row: object, col: object, offset: Any) -> Any:
    """The number of elements of a matrix on and below a diagonal."""
    if row == 0 or col == 0:
        return 0
    first = min(col, 1 + offset) if offset > 0 else (1 if row + offset > 0 else 0)
    last = max(0, min(col, row + offset))
    rows = max(0, min(row, row + offset))
    growing = last - first + 1
    return (first + last) * growing // 2 + max(0, rows - growing) * col


WINDOWS = (
    "bartlett_window", "bartlett_window.periodic", "blackman_window", "blackman_window.periodic",
    "hann_window", "hann_window.periodic", "hamming_window", "hamming_window.periodic",
    "hamming_window.periodic_alpha", "hamming_window.periodic_alpha_beta", "kaiser_window",
    "kaiser_window.periodic", "kaiser_window.beta",
)  # fmt: skip


@rule(*WINDOWS)
def window(length: Any, *_: object, dtype: Dtype | None = None, **options: Any) -> TensorSpec:
    dtype = dtype or default_dtype()
    check_dtype("window", dtype, "f" if length > 1 else "fc")
    return fresh((length,), dtype, **options)


@rule("empty_like", "zeros_like", "ones_like", "_to_copy")
def like(
    a: TensorSpec, *, dtype: Dtype | None = None, layout: torch.layout | None = None, device: Device | None = None,
    pin_memory: bool | None = None, non_blocking: bool = False, memory_format: torch.memory_format | None = None,
) -> Any:  # fmt: skip
    if layout is not None and layout is not torch.strided:
        return NotImplemented
    return a.like(stride=copy_strides(a, memory_format), dtype=dtype, device=device)


@rule("full_like")
def full_like(a: TensorSpec, fill_value: object, *, dtype: Dtype | None = None, **options: Any) -> Any:
    check_can_store("full_like", fill_value, dtype or a.dtype, options.get("device") or a.device)
    return like(a, dtype=dtype, **options)


@rule("new_empty", "new_zeros", "new_ones")
def new(
    a: TensorSpec, size: Sizes, *, dtype: Dtype | None = None, device: Device | None = None, **options: Any
) -> Any:
    return fresh(size, dtype or a.dtype, device or a.device, **options)


@rule("new_full")
def new_full(
    a: TensorSpec, size: Sizes, fill_value: object, *, dtype: Dtype | None = None, **options: Any
) -> Any:
    check_can_store("new_full", fill_value, dtype or a.dtype, options.get("device") or a.device)
    return new(a, size, dtype=dtype, **options)


@rule("new_empty_strided")
def new_empty_strided(a: TensorSpec, size: Sizes, stride: Sizes, **options: Any) -> TensorSpec:
    _check_strides(size, stride)
    return new(a, size, stride=stride, **options)


# --- `torch.linspace` with a symbolic number of points, which C++ reads as a plain integer: by other operators -----------

NUMBERS = (int, float, torch.SymInt, torch.SymFloat)


def symbolic_linspace(
    start: object, end: Any, steps: Any, *, dtype: torch.dtype | None = None, requires_grad: bool = False, **options: Any
) -> Any:  # fmt: skip
    """As the kernel: counts from `start` up to the middle, and from `end` down to it, so that both ends are exact."""
    are_numbers = isinstance(start, NUMBERS) and isinstance(end, NUMBERS)
    if not are_numbers or options.get("out") is not None:
        return NotImplemented
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in FLOATS | INTEGERS | COMPLEX:
        return NotImplemented  # there is a kernel for a single point, and none for more
    counted = dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
    places = torch.arange(steps, dtype=torch.int64, **options)
    step = (end - start) / torch.sym_max(steps - 1, 1)
    rising = places.to(counted) * step + start
    falling = (places - (steps - 1)).to(counted) * step + end
    values = torch.where(places < torch.sym_max(steps // 2, 1), rising, falling).to(dtype)
    return values.requires_grad_() if requires_grad else values
