"""Bounds of the values of results, from the bounds of inputs: interval arithmetic.

    @value_range("abs")
    def _abs(x: Operand) -> ValueRange: ...

A rule gets an `Operand` for each tensor. The range must hold for every element, whatever the data; only
`likely` is a guess, for policies that answer reads of missing data. It returns one range, for the last of the tensors
that the call returns or writes to, or a tuple with one for each of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from understudy.ops.registry import OpFacts
from understudy.spec import TensorSpec

INFINITE = math.inf


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Every element is in `low..high`, or NaN if it may be that.

    `likely`: a typical value in an ordinary run; for booleans, the share that is true. None: unknown.
    `filled`: the share of elements that were written over zeros, such as the gates of chosen experts. None: unknown.
    """

    low: float = -INFINITE
    high: float = INFINITE
    may_be_nan: bool = True
    likely: float | None = None
    filled: float | None = None

    @property
    def value(self) -> float | None:
        """The value of all elements, if the range is a single number."""
        return self.low if self.low == self.high and not self.may_be_nan else None

    def expect(self, likely: float | None) -> ValueRange:
        """The same range with a likely value, clamped to it."""
        return self if likely is None else replace(self, likely=min(max(likely, self.low), self.high))


class Operand(NamedTuple):
    """A tensor argument of a call. `storage` identifies its storage."""

    range: ValueRange
    spec: TensorSpec
    storage: int

    @property
    def is_single(self) -> bool:
        return self.spec.numel == 1

    @property
    def is_float(self) -> bool:
        return self.spec.dtype.is_floating_point

    def is_same_as(self, other: object) -> bool:
        return isinstance(other, Operand) and (self.storage, self.spec) == (other.storage, other.spec)


Rule = Callable[..., ValueRange | tuple[ValueRange, ...] | None]
value_range = OpFacts.value_range
followed_through = OpFacts.followed_through
followed_through.mark("cat", "stack", "sort", "flip", "where", "masked_fill", "masked_fill_", "amax", "amin")
followed_at_any_size = OpFacts.followed_at_any_size

LARGEST = 128
"""Integer tensors of up to this many elements have ranges, and single floats. Masks, positions, elements selected by these,
probabilities, and results of masks alone have them at any size; so do bytes, which old programs use as masks."""


MASKS = (torch.bool, torch.uint8)
"""Dtypes of masks: as an index, a tensor of bytes selects like one of booleans."""


@functools.cache
def range_of_dtype(dtype: torch.dtype) -> ValueRange:
    if dtype is torch.bool:
        return ValueRange(0, 1, False)
    if dtype.is_floating_point or dtype.is_complex:
        return ValueRange()
    try:
        limits = torch.iinfo(dtype)
    except TypeError:  # dtypes of a few bits, and those of quantised tensors
        return ValueRange(may_be_nan=False)
    return ValueRange(limits.min, limits.max, False)


def single_value(value: float) -> ValueRange:
    return ValueRange(value, value, math.isnan(value), value)


TRUE, FALSE = single_value(1), single_value(0)


def of(x: object) -> ValueRange:
    """The range of an operand or of a plain number."""
    if isinstance(x, Operand):
        return x.range
    return single_value(x) if isinstance(x, (bool, int, float)) else ValueRange()


def truth(share: float | None) -> ValueRange:
    """Booleans of unknown value; `share` is the likely share of true ones."""
    return ValueRange(0, 1, False, share)


def _likely(x: object) -> float | None:
    return of(x).likely


# --- comparisons -----------------------------------------------------------------------------------------------------


@value_range("eq")
def _eq(a: Operand, b: object) -> ValueRange:
    x, y = of(a), of(b)
    if a.is_same_as(b):
        return truth(1) if x.may_be_nan else TRUE
    if x.high < y.low or y.high < x.low:
        return FALSE
    if x.value is not None and x.value == y.value:
        return TRUE
    if a.is_single or a.spec.dtype.is_floating_point:
        if x.filled is not None and y.value == 0:
            return truth(1 - x.filled)
        is_none = not a.is_float and y.value == 0 == _likely_number(a)  # a count of rare elements
        return truth(float(is_none))  # two unknown numbers are rarely equal
    count = x.high - x.low + 1
    return truth(1 / count if count <= 1 << 16 else 0.5)


@value_range("ne")
def _ne(a: Operand, b: object) -> ValueRange:
    is_equal = _eq(a, b)
    assert isinstance(is_equal, ValueRange)
    return _negate(is_equal)


def _negate(x: ValueRange) -> ValueRange:
    return ValueRange(1 - x.high, 1 - x.low, False, None if x.likely is None else 1 - x.likely)


def _compare(a: object, b: object, is_strict: bool) -> ValueRange:
    """a < b, or a <= b."""
    x, y = of(a), of(b)
    is_sure = x.high < y.low or (x.high == y.low and not is_strict)
    if isinstance(a, Operand) and a.is_same_as(b):
        if is_strict:
            return FALSE
        is_sure = True
    if is_sure and not (x.may_be_nan or y.may_be_nan):
        return TRUE
    if y.high < x.low or (y.high == x.low and is_strict):
        return FALSE
    return truth(_guess_order(a, b, is_strict))


def _guess_order(a: object, b: object, is_strict: bool) -> float | None:
    first, second = _likely_number(a), _likely_number(b)
    is_number = [not isinstance(operand, Operand) or operand.is_single for operand in (a, b)]
    has_marker = any(guess is not None and abs(guess) >= EXTRAORDINARY for guess in (first, second))
    if not all(is_number) and not has_marker:
        return _share_below(a, b, is_strict)
    if first is None and second is None:
        return 1.0  # a new score compared with the best one so far: assumed to be better
    first, second = (ORDINARY if guess is None else guess for guess in (first, second))
    return float(first < second or (first == second and not is_strict))


def _likely_number(x: object) -> float | None:
    """The likely value of a count is a whole number: among 8 tokens of a vocabulary of 50,000, none is the padding."""
    guess = _likely(x)
    is_count = isinstance(x, Operand) and x.is_single and not x.is_float and not _is_truth(x)
    return float(round(guess)) if guess is not None and is_count else guess


def _share_below(a: object, b: object, is_strict: bool) -> float | None:
    """The share of elements below or above a number, if they are spread evenly over a known range."""
    if isinstance(a, Operand) and of(b).value is not None:
        limit, elements, is_above = of(b).low, a, False
    elif isinstance(b, Operand) and of(a).value is not None:
        limit, elements, is_above = of(a).low, b, True
    else:
        return None
    x, width = elements.range, elements.range.high - elements.range.low
    if x.filled is not None and limit == 0:  # what is written over zeros, such as gates, is positive
        share = 0.0 if is_strict != is_above else 1 - x.filled
        return 1 - share if is_above else share
    if not is_finite(x) or width == 0:
        return None
    if not elements.is_float:  # n + 1 integers, of which those at the limit count or not
        if width == 1 and x.likely is not None:
            return (x.likely - x.low) if is_above else 1 - (x.likely - x.low)
        width, limit = width + 1, limit + (is_strict == is_above)
    share = min(max((limit - x.low) / width, 0.0), 1.0)
    return 1 - share if is_above else share


ORDINARY = 1.0
"""The likely value of an unknown number in a comparison: positive, neither small nor large."""
EXTRAORDINARY = 1e8
"""Numbers of at least this magnitude are treated as markers, such as -1e9 for "not yet": all others are on one side."""


value_range("lt")(lambda a, b: _compare(a, b, True))
value_range("le")(lambda a, b: _compare(a, b, False))
value_range("gt")(lambda a, b: _compare(b, a, True))
value_range("ge")(lambda a, b: _compare(b, a, False))


@value_range("isnan")
def _isnan(x: Operand) -> ValueRange:
    return truth(0) if x.range.may_be_nan else FALSE


def is_finite(x: ValueRange) -> bool:
    return not x.may_be_nan and x.low > -INFINITE and x.high < INFINITE


@value_range("isinf", "isposinf", "isneginf")
def _isinf(x: Operand) -> ValueRange:
    return FALSE if x.range.low > -INFINITE and x.range.high < INFINITE else truth(0)


@value_range("isfinite")
def _isfinite(x: Operand) -> ValueRange:
    return TRUE if is_finite(x.range) else truth(1)


@value_range("isin")
def _isin(
    elements: object, tests: object, *, assume_unique: bool = False, invert: bool = False
) -> ValueRange:
    found = truth(0)
    return _negate(found) if invert else found


@value_range("isclose")
def _isclose(a: Operand, b: Operand, *args: object, **kwargs: object) -> ValueRange:
    return TRUE if a.is_same_as(b) and not a.range.may_be_nan else truth(1)


# --- logic -----------------------------------------------------------------------------------------------------------


def _is_truth(x: object) -> bool:
    return isinstance(x, bool) or (isinstance(x, Operand) and x.spec.dtype is torch.bool)


def _both(a: ValueRange, b: ValueRange) -> ValueRange:
    share = None if a.likely is None or b.likely is None else a.likely * b.likely
    return ValueRange(min(a.low, b.low), min(a.high, b.high), False, share)


@value_range("logical_and")
def _logical_and(a: Operand, b: object) -> ValueRange:
    return _both(as_truth(of(a)), as_truth(of(b)))


def _either(a: ValueRange, b: ValueRange) -> ValueRange:
    """Masks that are united, such as those of two samples, are assumed to select different elements."""
    share = None if a.likely is None or b.likely is None else min(a.likely + b.likely, 1.0)
    return ValueRange(max(a.low, b.low), max(a.high, b.high), False, share)


@value_range("logical_or")
def _logical_or(a: Operand, b: object) -> ValueRange:
    return _either(as_truth(of(a)), as_truth(of(b)))


@value_range("logical_not")
def _logical_not(a: Operand) -> ValueRange:
    return _negate(as_truth(of(a)))


def as_truth(x: ValueRange) -> ValueRange:
    """Whether it is not zero."""
    if x.low > 0 or x.high < 0:
        return TRUE
    if x.value == 0:
        return FALSE
    share = x.likely if x.filled is None else x.filled
    return ValueRange(0, 1, False, None if share is None else min(abs(share), 1.0))


def _is_bit(x: object) -> bool:
    """A truth value, or an integer that is 0 or 1."""
    return _is_truth(x) or (of(x).low >= 0 and of(x).high <= 1)


@value_range("bitwise_and", "__and__", "bitwise_and_", "__iand__")
def _bitwise_and(a: object, b: object) -> ValueRange | None:
    return _both(of(a), of(b)) if _is_bit(a) and _is_bit(b) else None


@value_range("bitwise_or", "__or__", "bitwise_or_", "__ior__")
def _bitwise_or(a: object, b: object) -> ValueRange | None:
    return _either(of(a), of(b)) if _is_bit(a) and _is_bit(b) else None


@value_range("bitwise_not")
def _bitwise_not(a: Operand) -> ValueRange | None:
    return _negate(a.range) if _is_truth(a) else None


# --- operators whose results are made of elements of their inputs ------------------------------------------------------


def positions_in(x: Operand, dim: int | None) -> ValueRange:
    count = x.spec.shape[dim] if dim is not None and x.spec.ndim else x.spec.numel
    return ValueRange(0, max(count - 1, 0), False)


followed_at_any_size.mark(
    "argmax", "argmin", "topk", "gather", "index", "index_select", "scatter", "scatter_", "one_hot"
)


@value_range("gather", "index", "index_select", "flip", "roll", "repeat")
def _select(x: Operand, *args: object, **kwargs: object) -> ValueRange:
    return x.range


@value_range("topk")
def _topk(
    x: Operand, k: object, dim: int = -1, *args: object, **kwargs: object
) -> tuple[ValueRange, ValueRange] | None:
    return None if x.spec.is_symbolic else (x.range, positions_in(x, dim))


@value_range("sort")
def _sort(x: Operand, dim: int = -1, *args: object, **kwargs: object) -> tuple[ValueRange, ValueRange] | None:
    return _topk(x, None, dim)


@value_range("scatter", "scatter_")
def _scatter(x: Operand, dim: int, index: Operand, source: object, **kwargs: object) -> ValueRange | None:
    if kwargs or x.spec.is_symbolic or index.spec.is_symbolic or not x.spec.numel:
        return None
    share = min(index.spec.numel / x.spec.numel, 1.0)
    found = _unite([x.range, of(source)], [1 - share, share])
    is_filled = x.is_float and x.range.value == 0 and of(source).value != 0
    return replace(found, filled=share) if is_filled else found


@value_range("index_put", "index_put_")
def _put(x: Operand, indices: Any, values: Operand, accumulate: bool = False) -> ValueRange | None:
    if accumulate or x.spec.is_symbolic or not x.spec.numel:
        return None
    share = _share_picked(x.spec, {dim: index for dim, index in enumerate(indices) if index is not None})
    return _unite([x.range, values.range], [1.0, 1.0] if share is None else [1 - share, share])


def _share_picked(spec: TensorSpec, indices: dict[int, Operand]) -> float | None:
    """The share of elements that these indices pick, which are different ones, if they are positions."""
    if any(index.spec.is_symbolic for index in indices.values()):
        return None
    if any(index.spec.dtype in MASKS for index in indices.values()):
        return next(iter(indices.values())).range.likely if len(indices) == 1 else None
    picked = math.prod(torch.broadcast_shapes(*[index.spec.shape for index in indices.values()]))
    return min(picked / math.prod(spec.shape[dim] for dim in indices), 1.0)


def counts_of(spec: TensorSpec, count: int) -> ValueRange:
    """How many of the elements are in each of `count` groups."""
    return ValueRange(0, spec.numel, False, spec.numel / max(count, 1))


@value_range("one_hot")
def _one_hot(x: Operand, count: int = -1) -> ValueRange:
    return truth(1 / count if count > 0 else None)


@value_range("zeros", "zeros_like", "new_zeros")
def _zeros(*args: object, **kwargs: object) -> ValueRange:
    return FALSE


@value_range("ones", "ones_like", "new_ones")
def _ones(*args: object, **kwargs: object) -> ValueRange:
    return TRUE


@value_range("cat", "stack")
def _join(parts: Any, *args: object) -> ValueRange | None:
    if any(part.spec.is_symbolic for part in parts):
        return None
    ranges = [part.range for part in parts if part.spec.numel]
    return _unite(ranges, [part.spec.numel for part in parts if part.spec.numel]) if ranges else None


def _unite(ranges: list[ValueRange], weights: list[float]) -> ValueRange:
    """The range of elements from several tensors. Probabilities are weighted by the number of elements."""
    low, high = min(each.low for each in ranges), max(each.high for each in ranges)
    known = [
        (each.likely, weight) for each, weight in zip(ranges, weights, strict=True) if each.likely is not None
    ]
    is_guessed = len(known) == len(ranges) and sum(weights) > 0
    likely = sum(guess * weight for guess, weight in known) / sum(weights) if is_guessed else None
    return ValueRange(low, high, any(each.may_be_nan for each in ranges), likely)


@value_range("where")
def _where(condition: Operand, *choices: Any) -> ValueRange | None:
    if len(choices) != 2:  # the positions of true elements
        return None
    share = condition.range.likely
    if share in (0, 1):
        return _unite([of(choice) for choice in choices], [1, 1]).expect(_likely(choices[share == 0]))
    return _unite([of(choice) for choice in choices], [1, 1] if share is None else [share, 1 - share])


@value_range("masked_fill")
def _masked_fill(x: Operand, mask: Operand, value: object) -> ValueRange | None:
    return _where(mask, value, x)


# --- arithmetic: exact in the reals; results of floating point are widened by its rounding ----------------------------


def round_outwards(
    low: float, high: float, may_be_nan: bool, likely: float | None, is_float: bool
) -> ValueRange:
    if math.isnan(low) or math.isnan(high):
        return ValueRange(likely=likely)
    if is_float:
        low, high = low - abs(low) * ROUNDING, high + abs(high) * ROUNDING
    elif low < -(1 << 31) or high >= 1 << 31:
        return ValueRange(may_be_nan=False)  # integers may wrap around
    return ValueRange(low, high, may_be_nan, likely)


ROUNDING = 2.0**-7
"""Half of the precision of bfloat16, the coarsest of the usual dtypes."""
MOST_EXACT = 1 << 8
"""Up to this, integers are exact in bfloat16."""


def _is_float(*operands: object) -> bool:
    return any(
        isinstance(x, float) or (isinstance(x, Operand) and x.spec.dtype.is_floating_point) for x in operands
    )


def _combine(function: Callable[[float, float], float], a: object, b: object) -> ValueRange:
    x, y = of(a), of(b)
    if not (is_finite(x) and is_finite(y)):
        likely = None if x.likely is None or y.likely is None else function(x.likely, y.likely)
        return ValueRange(likely=likely) if _is_float(a, b) else ValueRange(may_be_nan=False, likely=likely)
    corners = [function(first, second) for first in (x.low, x.high) for second in (y.low, y.high)]
    likely = None if x.likely is None or y.likely is None else function(x.likely, y.likely)
    low, high, is_float = min(corners), max(corners), _is_float(a, b)
    found = round_outwards(low, high, False, likely, is_float)
    if not is_float:
        return found
    # Rounding is monotonic: an end that every dtype can represent is not passed.
    return replace(
        found, low=low if _is_exact(low) else found.low, high=high if _is_exact(high) else found.high
    )


def _is_exact(end: float) -> bool:
    return abs(end) <= MOST_EXACT and end == int(end)


@value_range("add", "add_")
def _add(a: object, b: object, *, alpha: float = 1) -> ValueRange | None:
    return _combine(lambda x, y: x + y, a, b) if alpha == 1 else None


@value_range("sub", "sub_")
def _sub(a: object, b: object, *, alpha: float = 1) -> ValueRange | None:
    return _combine(lambda x, y: x - y, a, b) if alpha == 1 else None


@value_range("rsub")
def _rsub(a: object, b: object, alpha: float = 1) -> ValueRange | None:
    return _combine(lambda x, y: x - y, b, a) if alpha == 1 else None


@value_range("mul", "mul_")
def _mul(a: object, b: object) -> ValueRange:
    if _is_truth(a) and _is_truth(b):
        return _both(of(a), of(b))
    return _combine(lambda x, y: x * y, a, b)


@value_range("div")
def _div(a: object, b: object, *, rounding_mode: str | None = None) -> ValueRange | None:
    by = of(b)
    if rounding_mode is not None or by.value == 0:
        return None
    if by.value is None:
        guess = _likely(a)
        return None if guess is None or not by.likely else ValueRange(likely=guess / by.likely)
    return _combine(lambda x, y: x / y, a, b)


@value_range("neg")
def _neg(x: Operand) -> ValueRange:
    likely = None if x.range.likely is None else -x.range.likely
    return round_outwards(-x.range.high, -x.range.low, x.range.may_be_nan, likely, _is_float(x))


@value_range("abs")
def _abs(x: Operand) -> ValueRange:
    low, high = x.range.low, x.range.high
    likely = None if x.range.likely is None else abs(x.range.likely)
    most = max(abs(low), abs(high))
    found = ValueRange(max(low, -high, 0), most, x.range.may_be_nan, likely)
    return found if _is_float(x) or most < 1 << 31 else ValueRange(may_be_nan=False, likely=likely)


followed_at_any_size.mark("sigmoid", "_softmax")  # programs read means of many probabilities


@value_range("sigmoid")
def _sigmoid(x: Operand) -> ValueRange:
    return ValueRange(0, 1, x.range.may_be_nan)


@value_range("_softmax")
def _softmax(x: Operand, *args: object) -> ValueRange:
    return ValueRange(0, 1)  # NaN where all of a row is -inf


@value_range("clamp")
def _clamp(x: Operand, min: object = None, max: object = None) -> ValueRange:
    low = x.range.low if min is None else builtin_max(x.range.low, of(min).low)
    high = x.range.high if max is None else builtin_min(x.range.high, of(max).high)
    return ValueRange(builtin_min(low, high), high, x.range.may_be_nan).expect(x.range.likely)


builtin_min, builtin_max = min, max


@value_range("_to_copy", "clone", "floor", "round", "trunc")
def _copy(x: Operand, *args: object, dtype: torch.dtype | None = None, **kwargs: object) -> ValueRange | None:
    if dtype is torch.bool:
        found = as_truth(x.range)
        return found.expect(1 if found.likely is None else found.likely)  # unknown numbers are rarely zero
    if dtype == x.spec.dtype:
        return x.range
    if dtype is None:
        return ValueRange(
            math_floor(x.range.low), math_ceil(x.range.high), x.range.may_be_nan, x.range.likely
        )
    if not is_finite(x.range):
        return ValueRange(likely=x.range.likely) if dtype.is_floating_point else None
    if dtype.is_floating_point:
        if _is_exact_in(x.range.low, dtype) and _is_exact_in(
            x.range.high, dtype
        ):  # rounding keeps the order of numbers
            return ValueRange(x.range.low, x.range.high, False, x.range.likely)
        return round_outwards(x.range.low, x.range.high, False, x.range.likely, True)
    limits = range_of_dtype(dtype)
    is_within = limits.low <= x.range.low and x.range.high <= limits.high
    low, high = math.floor(x.range.low), math.ceil(x.range.high)
    return ValueRange(low, high, False, x.range.likely) if is_within else None


def _is_exact_in(number: float, dtype: torch.dtype) -> bool:
    """Whether it is an integer that the dtype has."""
    return number == int(number) and abs(number) <= 2 / torch.finfo(dtype).eps


@value_range("to")
def _to(x: Operand, *args: object, dtype: torch.dtype | None = None, **kwargs: object) -> ValueRange | None:
    given = [value for value in args if isinstance(value, torch.dtype)]
    return _copy(x, dtype=given[0] if given else dtype or x.spec.dtype)


def math_floor(x: float) -> float:
    return x if math.isinf(x) else math.floor(x)


def math_ceil(x: float) -> float:
    return x if math.isinf(x) else math.ceil(x)


# --- loss scaling: gradients of an ordinary run do not overflow -------------------------------------------------------


@value_range("_amp_foreach_non_finite_check_and_unscale_")
def _check_overflow(gradients: object, found: Operand, inverse_scale: Operand) -> ValueRange:
    return ValueRange(0, 1, False, 0)


@value_range("_amp_update_scale_")
def _update_scale(scale: Operand, *args: object, **kwargs: object) -> tuple[ValueRange, ValueRange]:
    return ValueRange(0, INFINITE, False, scale.range.likely), ValueRange(0, INFINITE, False, 0)


# --- values that occur ------------------------------------------------------------------------------------------

extremes = OpFacts.extremes


@extremes("arange")
def _arange(start: Any, end: Any = None, step: Any = 1) -> tuple[Any, Any] | None:
    if end is None:
        start, end = 0, start
    return (start, end - 1) if step == 1 and {type(start), type(end)} <= {int, torch.SymInt} else None


@extremes("full", "full_like", "new_full")
def _full(*args: Any) -> tuple[Any, Any] | None:
    return (args[-1], args[-1]) if type(args[-1]) in (int, torch.SymInt) else None


@extremes("ones", "ones_like", "new_ones")
def _one(*args: object) -> tuple[int, int]:
    return 1, 1


@extremes("zeros", "zeros_like", "new_zeros")
def _zero(*args: object) -> tuple[int, int]:
    return 0, 0
