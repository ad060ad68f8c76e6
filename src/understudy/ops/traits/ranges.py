"""Between which numbers the values of results lie, from the ranges of inputs: interval arithmetic, an operator at a time.

    @value_range("abs")
    def _abs(x: Operand) -> ValueRange: ...

A rule sees an `Operand` in the place of each tensor. What it says must hold for every element, whatever the data; only
`likely` is a guess, for policies that answer reads of data which is not there. It returns one range, for the last of the
tensors that the call gives or writes to, or a tuple with one for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from understudy.ops.registry import Trait, record_of
from understudy.ops.traits.values import specs_in
from understudy.spec import Outcomes, TensorSpec
from understudy.spec.call import Call

INFINITE = math.inf


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Every element is in `low..high`, or NaN if it may be that.

    `likely`: what an element would be in an ordinary run; of booleans, the share that is true. None: no idea.
    """

    low: float = -INFINITE
    high: float = INFINITE
    may_be_nan: bool = True
    likely: float | None = None

    @property
    def value(self) -> float | None:
        """The one number that all elements are, if that is sure."""
        return self.low if self.low == self.high and not self.may_be_nan else None

    def expect(self, likely: float | None) -> ValueRange:
        """The same range with a guess, which is moved into it."""
        return self if likely is None else replace(self, likely=min(max(likely, self.low), self.high))


class Operand(NamedTuple):
    """A tensor of a call. `storage` tells which memory it is on."""

    range: ValueRange
    spec: TensorSpec
    storage: int

    @property
    def is_single(self) -> bool:
        return self.spec.numel == 1

    def is_same_as(self, other: object) -> bool:
        return isinstance(other, Operand) and (self.storage, self.spec) == (other.storage, other.spec)


Rule = Callable[..., ValueRange | tuple[ValueRange, ...] | None]
value_range: Trait[Rule] = Trait("range of the values of its results", of_packets=True)

LARGEST = 128
"""Elements up to which ranges of integers are followed. Of masks all are, of other numbers single ones."""


def has_ranges(call: Call, outcomes: Outcomes, written: tuple[int, ...]) -> bool:
    """Whether the ranges of what a call gives, or writes to, are followed: of masks, of few numbers, of random ones."""
    if value_range.of(call.op) is None or record_of(call.op).has_out:
        return False
    made = [call.inputs[position] for position in written] or specs_in(outcomes)
    is_random = record_of(call.op).is_random
    return any(not spec.is_symbolic and (is_random or _is_of_interest(spec)) for spec in made)


def _is_of_interest(spec: TensorSpec) -> bool:
    return spec.dtype is torch.bool or spec.numel <= (1 if spec.dtype.is_floating_point else LARGEST)


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


def exactly(value: float) -> ValueRange:
    return ValueRange(value, value, math.isnan(value), value)


TRUE, FALSE = exactly(1), exactly(0)


def of(x: object) -> ValueRange:
    """The range of an operand or of a plain number."""
    if isinstance(x, Operand):
        return x.range
    return exactly(x) if isinstance(x, (bool, int, float)) else ValueRange()


def truth(share: float | None) -> ValueRange:
    """Booleans of which nothing is sure."""
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
        return truth(0)  # two numbers that nobody knows are rarely the same
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
    first, second = _likely(a), _likely(b)
    is_number = [not isinstance(operand, Operand) or operand.is_single for operand in (a, b)]
    if not all(is_number):
        return None
    if first is None and second is None:
        return 1.0  # a new score beside the best one so far: better
    first, second = (ORDINARY if guess is None else guess for guess in (first, second))
    return float(first < second or (first == second and not is_strict))


ORDINARY = 1.0
"""What a number is taken for of which nothing is known, where it is compared: positive, and neither small nor large."""


@value_range("lt")
def _lt(a: object, b: object) -> ValueRange:
    return _compare(a, b, True)


@value_range("le")
def _le(a: object, b: object) -> ValueRange:
    return _compare(a, b, False)


@value_range("gt")
def _gt(a: object, b: object) -> ValueRange:
    return _compare(b, a, True)


@value_range("ge")
def _ge(a: object, b: object) -> ValueRange:
    return _compare(b, a, False)


@value_range("isnan")
def _isnan(x: Operand) -> ValueRange:
    return truth(0) if x.range.may_be_nan else FALSE


def _is_finite(x: ValueRange) -> bool:
    return not x.may_be_nan and x.low > -INFINITE and x.high < INFINITE


@value_range("isinf", "isposinf", "isneginf")
def _isinf(x: Operand) -> ValueRange:
    return FALSE if x.range.low > -INFINITE and x.range.high < INFINITE else truth(0)


@value_range("isfinite")
def _isfinite(x: Operand) -> ValueRange:
    return TRUE if _is_finite(x.range) else truth(1)


@value_range("isin")
def _isin(elements: object, tests: object, *, assume_unique: bool = False, invert: bool = False) -> ValueRange:
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
    return _both(_as_truth(of(a)), _as_truth(of(b)))


@value_range("logical_or")
def _logical_or(a: Operand, b: object) -> ValueRange:
    return _negate(_both(_negate(_as_truth(of(a))), _negate(_as_truth(of(b)))))


@value_range("logical_not")
def _logical_not(a: Operand) -> ValueRange:
    return _negate(_as_truth(of(a)))


def _as_truth(x: ValueRange) -> ValueRange:
    """Whether it is not zero."""
    if x.low > 0 or x.high < 0:
        return TRUE
    if x.value == 0:
        return FALSE
    return ValueRange(0, 1, False, None if x.likely is None else min(abs(x.likely), 1.0))


def _is_bit(x: object) -> bool:
    """A truth, or an integer that is 0 or 1."""
    return _is_truth(x) or (of(x).low >= 0 and of(x).high <= 1)


@value_range("bitwise_and", "__and__", "bitwise_and_", "__iand__")
def _bitwise_and(a: object, b: object) -> ValueRange | None:
    return _both(of(a), of(b)) if _is_bit(a) and _is_bit(b) else None


@value_range("bitwise_or", "__or__", "bitwise_or_", "__ior__")
def _bitwise_or(a: object, b: object) -> ValueRange | None:
    return _negate(_both(_negate(of(a)), _negate(of(b)))) if _is_bit(a) and _is_bit(b) else None


@value_range("bitwise_not")
def _bitwise_not(a: Operand) -> ValueRange | None:
    return _negate(a.range) if _is_truth(a) else None


# --- reductions ------------------------------------------------------------------------------------------------------


# Of masks of which there is no idea, `all` and `any` are taken for checks, which pass.


@value_range("all", "_is_all_true")
def _all(x: Operand, *args: object, **kwargs: object) -> ValueRange:
    found = _as_truth(x.range)
    if x.spec.numel == 0:
        return TRUE
    return found if found.value is not None else truth(float(found.likely is None or found.likely >= 1))


@value_range("any", "_is_any_true")
def _any(x: Operand, *args: object, **kwargs: object) -> ValueRange:
    found = _as_truth(x.range)
    if x.spec.numel == 0:
        return FALSE
    return found if found.value is not None else truth(float(found.likely is not None and found.likely > 0))


@value_range("max", "min", "amax", "amin")
def _extreme(x: Operand, *args: object, **kwargs: object) -> ValueRange | tuple[ValueRange, ...]:
    if args and isinstance(args[0], Operand):
        return _larger_range(x.range, args[0].range)
    if args and isinstance(args[0], int) and x.spec.ndim:  # with positions, if it is `max.dim`
        return x.range, ValueRange(0, max(x.spec.shape[args[0]] - 1, 0), False)
    return x.range


def _larger_range(a: ValueRange, b: ValueRange) -> ValueRange:
    return ValueRange(min(a.low, b.low), max(a.high, b.high), a.may_be_nan or b.may_be_nan)


@value_range("argmax", "argmin")
def _position(x: Operand, dim: int | None = None, keepdim: bool = False) -> ValueRange:
    count = x.spec.shape[dim] if dim is not None and x.spec.ndim else x.spec.numel
    return ValueRange(0, max(count - 1, 0), False)


@value_range("sum", "count_nonzero")
def _sum(x: Operand, *args: object, **kwargs: object) -> ValueRange | None:
    if x.spec.dtype is not torch.bool:
        return None
    count = x.spec.numel
    if args:  # along some dimensions
        return ValueRange(0, x.range.high * count, False)
    likely = None if x.range.likely is None else round(x.range.likely * count)
    return ValueRange(x.range.low * count, x.range.high * count, False).expect(likely)


# --- arithmetic: exact in the reals; results of floating point are widened by its rounding ----------------------------


def _round_outwards(low: float, high: float, may_be_nan: bool, likely: float | None, is_float: bool) -> ValueRange:
    if math.isnan(low) or math.isnan(high):
        return ValueRange(likely=likely)
    if is_float:
        low, high = low - abs(low) * ROUNDING, high + abs(high) * ROUNDING
    elif low < -(1 << 31) or high >= 1 << 31:
        return ValueRange(may_be_nan=False)  # integers may wrap around
    return ValueRange(low, high, may_be_nan, likely)


ROUNDING = 2.0**-7
"""Half of the precision of bfloat16, the coarsest of the usual dtypes."""


def _is_float(*operands: object) -> bool:
    return any(
        isinstance(x, float) or (isinstance(x, Operand) and x.spec.dtype.is_floating_point) for x in operands
    )


def _combine(function: Callable[[float, float], float], a: object, b: object) -> ValueRange:
    x, y = of(a), of(b)
    if not (_is_finite(x) and _is_finite(y)):
        likely = None if x.likely is None or y.likely is None else function(x.likely, y.likely)
        return ValueRange(likely=likely) if _is_float(a, b) else ValueRange(may_be_nan=False, likely=likely)
    corners = [function(first, second) for first in (x.low, x.high) for second in (y.low, y.high)]
    likely = None if x.likely is None or y.likely is None else function(x.likely, y.likely)
    return _round_outwards(min(corners), max(corners), False, likely, _is_float(a, b))


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
    if rounding_mode is not None or by.value is None or by.value == 0:
        return None
    return _combine(lambda x, y: x / y, a, b)


@value_range("neg")
def _neg(x: Operand) -> ValueRange:
    likely = None if x.range.likely is None else -x.range.likely
    return _round_outwards(-x.range.high, -x.range.low, x.range.may_be_nan, likely, _is_float(x))


@value_range("abs")
def _abs(x: Operand) -> ValueRange:
    low, high = x.range.low, x.range.high
    likely = None if x.range.likely is None else abs(x.range.likely)
    most = max(abs(low), abs(high))
    found = ValueRange(max(low, -high, 0), most, x.range.may_be_nan, likely)
    return found if _is_float(x) or most < 1 << 31 else ValueRange(may_be_nan=False, likely=likely)


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
        return _as_truth(x.range)
    if dtype is None or dtype == x.spec.dtype:
        return ValueRange(math_floor(x.range.low), math_ceil(x.range.high), x.range.may_be_nan, x.range.likely)
    if not _is_finite(x.range):
        return ValueRange(likely=x.range.likely) if dtype.is_floating_point else None
    if dtype.is_floating_point:
        return _round_outwards(x.range.low, x.range.high, False, x.range.likely, True)
    limits = range_of_dtype(dtype)
    is_within = limits.low <= x.range.low and x.range.high <= limits.high
    low, high = math.floor(x.range.low), math.ceil(x.range.high)
    return ValueRange(low, high, False, x.range.likely) if is_within else None


def math_floor(x: float) -> float:
    return x if math.isinf(x) else math.floor(x)


def math_ceil(x: float) -> float:
    return x if math.isinf(x) else math.ceil(x)


# --- random numbers --------------------------------------------------------------------------------------------------


@value_range("rand", "rand_like")
def _rand(*args: object, **kwargs: object) -> ValueRange:
    return ValueRange(0, math.nextafter(1, 0), False, 0.5)  # without 1


@value_range("uniform_", "uniform")
def _uniform(x: Operand, low: float = 0.0, high: float = 1.0, *, generator: object = None) -> ValueRange:
    return _round_outwards(low, high, False, (low + high) / 2, low != 0 or high != 1)


@value_range("randint", "randint_like")
def _randint(*args: object, **kwargs: object) -> ValueRange | None:
    numbers = [value for value in args if isinstance(value, int)]
    low, high = (0, *numbers)[-2:]
    return ValueRange(low, high - 1, False, (low + high) // 2)


@value_range("random_")
def _random(x: Operand, *bounds: Any, generator: object = None) -> ValueRange | None:
    if not bounds or any(not isinstance(bound, int) for bound in bounds):
        return None
    low, high = (0, *bounds)[-2:]
    return ValueRange(low, high - 1, False, (low + high) // 2)


@value_range("bernoulli", "bernoulli_")
def _bernoulli(x: Operand, p: object = None, *, generator: object = None) -> ValueRange:
    chance = of(x if p is None else p)
    if chance.value in (0, 1):
        return exactly(chance.value)
    return ValueRange(0, 1, False, chance.likely)


@value_range("multinomial")
def _multinomial(x: Operand, *args: object, **kwargs: object) -> ValueRange:
    return ValueRange(0, x.spec.shape[-1] - 1, False)


# --- loss scaling: gradients of an ordinary run do not overflow -------------------------------------------------------


@value_range("_amp_foreach_non_finite_check_and_unscale_")
def _check_overflow(gradients: object, found: Operand, inverse_scale: Operand) -> ValueRange:
    return ValueRange(0, 1, False, 0)


@value_range("_amp_update_scale_")
def _update_scale(scale: Operand, *args: object, **kwargs: object) -> tuple[ValueRange, ValueRange]:
    return ValueRange(0, INFINITE, False, scale.range.likely), ValueRange(0, INFINITE, False, 0)
