"""Elementwise operators: dtype and device of the result, broadcasting, the spec of the result.

For the dtype, operands come in three ranks: tensors with dimensions, 0-dim tensors, and Python numbers. A lower rank
changes the dtype only if it is of a higher category (bool < integer < float < complex) than all ranks above it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch

from understudy.errors import ShapeMismatch
from understudy.shapes.node import Scalar, Shape, Size, Sizes
from understudy.shapes.sizes import (
    are_equal_or_one,
    expect_equal,
    has_unbacked,
    have_different_hints,
    hint_of,
    is_or_is_one,
    is_provably_equal,
    is_symbolic,
)
from understudy.spec.strides import elementwise_strides, is_provably_row_major, preserved_strides
from understudy.spec.tensor_spec import TensorSpec

# Some releases of torch have a complex dtype whose parts are bfloat16.
COMPLEX_OF = {
    dtype: dtype.to_complex() for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
REAL_OF = {dtype: dtype.to_real() for dtype in COMPLEX_OF.values()}


def default_dtype() -> torch.dtype:
    """The default floating dtype. Rules read it only here, because it is part of the cache key."""
    return torch.get_default_dtype()


def default_complex_dtype() -> torch.dtype:
    """The complex dtype of Python numbers; a complex bfloat16 is not used for them."""
    dtype = default_dtype()
    return torch.complex64 if dtype is torch.bfloat16 else COMPLEX_OF[dtype]


def number_dtype(number: object) -> torch.dtype:
    """The dtype that a Python number (or a symbolic one) takes part with in promotion."""
    kind = getattr(number, "pytype", None)  # symbolic numbers are nodes
    if isinstance(number, (bool, torch.SymBool)) or kind is bool:
        return torch.bool
    if isinstance(number, (float, torch.SymFloat)) or kind is float:
        return default_dtype()
    if isinstance(number, complex):
        return default_complex_dtype()
    return torch.int64


def result_type(*operands: object) -> torch.dtype:
    """The common dtype of specs and Python numbers; None is skipped."""
    dimensioned = zero_dim = number = None
    for operand in operands:
        if isinstance(operand, TensorSpec):
            dtype = operand.dtype
            if operand.shape:
                if dimensioned is not dtype:
                    dimensioned = dtype if dimensioned is None else promote(dimensioned, dtype)
            else:
                zero_dim = dtype if zero_dim is None else promote(zero_dim, dtype)
        elif operand is not None:
            dtype = number_dtype(operand)
            number = dtype if number is None else promote(number, dtype)
    if zero_dim is None and number is None and dimensioned is not None:
        return dimensioned
    return _combine(dimensioned, _combine(zero_dim, number)) or default_dtype()


def promote(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if a is b else torch.promote_types(a, b)


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None:
        return lower
    if lower is None or higher is lower or higher.is_complex:
        return higher
    if higher.is_floating_point:
        return COMPLEX_OF.get(higher, higher) if lower.is_complex else higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return promote(higher, lower)
    return higher


def float_type(dtype: torch.dtype) -> torch.dtype:
    """Floats and complex dtypes unchanged; other dtypes compute in the default dtype."""
    return dtype if dtype.is_floating_point or dtype.is_complex else default_dtype()


def real_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the parts of a complex dtype; any other dtype unchanged."""
    return REAL_OF.get(dtype, dtype)


def complex_type(dtype: torch.dtype) -> torch.dtype:
    """The complex dtype whose parts have this dtype; complex dtypes unchanged."""
    return dtype if dtype.is_complex else COMPLEX_OF[dtype]


def is_integral(dtype: torch.dtype, include_bool: bool = False) -> bool:
    if dtype is torch.bool:
        return include_bool
    return not (dtype.is_floating_point or dtype.is_complex)


CPU = torch.device("cpu")


def common_device(operands: Iterable[Scalar | TensorSpec]) -> torch.device:
    """The device of the first spec that is not a 0-dim CPU tensor; CPU if there is none.

    Other operands (numbers, None) are ignored. That the devices match was checked before.
    """
    for operand in operands:
        if isinstance(operand, TensorSpec) and (operand.shape or operand.device.type != "cpu"):
            return operand.device
    return CPU


# --- Broadcasting of shapes ---------------------------------------------------------------------------------

Meeting = Callable[[Any, Any], Any]
"""Combines two sizes in the same dimension, neither of which is provably 1; None if they do not match."""


def broadcast_shapes(*shapes: Sizes, meet: Meeting | None = None) -> Shape:
    """The shape to which all of these can be expanded. `meet` is `meet_by_hints` by default."""
    if not shapes:
        return ()
    result = tuple(shapes[0])
    for shape in shapes[1:]:
        if shape is not result:
            result = _broadcast_pair(result, tuple(shape), meet or meet_by_hints)
    return result


def _broadcast_pair(a: Sequence[Any], b: Sequence[Any], meet: Meeting) -> Shape:
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    sizes = list(a)
    for position, size in enumerate(b, lead):
        other = sizes[position]
        # Provable cases first: next to a plain 1 no guard on a symbol is needed.
        if (
            other is size
            or is_provably_equal(size, 1)
            or (type(size) is int and type(other) is int and size == other)
        ):
            continue
        met = size if is_provably_equal(other, 1) else meet(other, size)
        if met is None:
            raise ShapeMismatch(
                f"shapes {list(a)} and {list(b)} can't be broadcast together: {other} and {size} differ in dimension "
                f"{position}"
            )
        sizes[position] = met
    return tuple(sizes)


def meet_by_hints(other: Size, size: Size) -> object:
    """By hints: a size that is expanded for the hints is assumed to be 1, others to be equal."""
    if _is_one_beside_unbacked(other, size):
        return size
    if (
        _is_one_beside_unbacked(size, other)
        or (not have_different_hints(other, size) and other == size)
        or size == 1
    ):
        return other
    if has_unbacked(size, other) and (expect_equal(other, size) or expect_equal(size, 1)):
        return other
    return size if expect_equal(other, 1) else None


def broadcast_without_choice(a: Sequence[object], b: Sequence[object]) -> Shape:
    """As `broadcast_shapes`, for operators for which only the shape depends on which size is expanded."""
    return _broadcast_pair(a, b, meet_without_choice)


def meet_without_choice(other: Size, size: Size) -> object:
    """Only that they match is guarded: equal sizes may be 1 in another run."""
    if is_or_is_one(size, other):
        return other
    return size if is_or_is_one(other, size) else None


def check_broadcastable(a: Sequence[object], b: Sequence[object]) -> None:
    """Raise if shapes can't be broadcast together, for operators whose result has none of their sizes.

    No guard on which of two sizes is expanded. Sizes that are equal and larger than 1 get an equality guard.
    """
    _broadcast_pair(a, b, _meet_unused)


def _meet_unused(other: Any, size: Any) -> Any:
    if has_unbacked(other, size) or (not have_different_hints(other, size) and hint_of(size) > 1):
        return meet_by_hints(other, size)
    return other if are_equal_or_one(other, size) else None


def check_expandable(shape: Sizes, target: Sizes, what: str) -> None:
    """Raise if a shape can't be expanded to `target`."""
    lead = len(target) - len(shape)
    fits = lead >= 0
    if fits:
        for size, wanted in zip(shape, target[lead:], strict=True):
            if is_provably_equal(size, wanted):  # whether it is 1 does not matter
                continue
            if has_unbacked(size, wanted):
                fits = _is_fitted(size, wanted)
            elif have_different_hints(size, wanted):
                fits = bool(size == 1)  # autograd needs to know which sizes are expanded
            else:
                fits = is_or_is_one(size, wanted)
            if not fits:
                break
    if not fits:
        raise ShapeMismatch(f"{what}: shape {list(shape)} can't be expanded to {list(target)}")


def _is_fitted(size: Any, wanted: Any) -> bool:
    return not (size != wanted and size != 1) or expect_equal(size, wanted) or expect_equal(size, 1)


def _is_one_beside_unbacked(size: Size, other: Size) -> bool:
    """Whether the hint of a size is 1 and the other one is unbacked: then the two need not be equal."""
    if type(size) is int or type(other) is int:
        return False
    return (
        has_unbacked(other)
        and not has_unbacked(size)
        and not have_different_hints(size, 1)
        and bool(size == 1)
    )


# --- The spec of an elementwise operator's result -----------------------------------------------------------


def preserved_copy(
    spec: TensorSpec, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> TensorSpec:
    """A new dense tensor with the memory order of this one, without conj and neg bits (as empty_like)."""
    return spec.like(stride=preserved_strides(spec.shape, spec.stride), dtype=dtype, device=device)


def elementwise(
    operands: Sequence[Scalar | TensorSpec | None], dtype: torch.dtype, common: torch.dtype | None = None
) -> TensorSpec:
    """The result of an elementwise operator on specs and Python numbers (None is skipped).

    `dtype` is that of the result; `common` the one to which operands are cast first, None for operators without a cast.
    On CPU the cast makes dense copies, which may change the memory order of the result.
    """
    first = operands[0] if operands else None
    if type(first) is TensorSpec and dtype is first.dtype and (common is dtype or common is None):
        for operand in operands:
            if operand is not first:
                break
        else:  # all operands have the spec of the result
            if (
                first.offset == 0
                and not (first.conj or first.neg or first.is_symbolic)
                and first.is_contiguous
            ):
                return first.like() if 0 in first.shape or 1 in first.shape else first
    given = [operand for operand in operands if operand is not None]
    specs = [operand for operand in given if isinstance(operand, TensorSpec)]
    if not specs:
        return TensorSpec((), dtype=dtype, device=common_device(()))
    device = common_device(specs)
    shape = broadcast_shapes(*[spec.shape for spec in specs], meet=_choose_meeting(specs))
    numbers = len(specs) != len(given)
    on_cpu = device.type == "cpu"
    are_copied = [
        spec.conj or spec.neg or (on_cpu and common is not None and spec.dtype is not common)
        for spec in specs
    ]
    if True in are_copied and not (
        is_symbolic(shape) and _are_provably_row_major(specs)
    ):  # copies would be row-major, too
        specs = [
            preserved_copy(s) if is_copied else s for s, is_copied in zip(specs, are_copied, strict=True)
        ]
    return TensorSpec(shape, elementwise_strides(shape, specs, numbers), dtype=dtype, device=device)


def _choose_meeting(operands: Sequence[TensorSpec]) -> Meeting | None:
    """How sizes are combined. The result of row-major operands is row-major, so which size is expanded does not matter.

    That applies only to sizes whose hints are both 0, or both 1. Larger ones get an equality guard, which is more
    useful; for others autograd needs to know which one is expanded.
    """
    if not any(operand.is_symbolic for operand in operands) or _is_expanded_by_a_third(operands):
        return None

    def meet(other: Size, size: Size) -> Any:
        is_small = hint_of(size) in (0, 1) and hint_of(size) == hint_of(other)
        if is_small and _are_provably_row_major(operands):
            return meet_without_choice(other, size)
        return meet_by_hints(other, size)

    return meet


def _are_provably_row_major(operands: Sequence[TensorSpec]) -> bool:
    return all(is_provably_row_major(operand.shape, operand.stride) for operand in operands)


def _is_expanded_by_a_third(operands: Sequence[TensorSpec]) -> bool:
    """Whether two sizes that are combined first may be expanded by a third operand."""
    if len(operands) < 3:
        return False
    sizes = zip_longest(*[map(hint_of, reversed(operand.shape)) for operand in operands], fillvalue=1)
    return any(len(set(of_one_dim)) > 1 for of_one_dim in sizes)
