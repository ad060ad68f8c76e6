"""Floats over sizes: exact where they are quotients of sizes, bounded elsewhere, never decided wrongly."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from understudy import GuardOnDataDependentSymNode, ShapeEnv, statically_known_true
from understudy.shapes.algebra.floats import as_fraction, bounds_of, compared_by_bounds


def symbol(env: ShapeEnv, low: int = 2, high: int | None = None) -> Any:
    return env.create_symint(12, "n", low=low, high=high)


def test_quotients_become_integers() -> None:
    env = ShapeEnv()
    n = symbol(env)
    assert str(math.floor(n / 8)) == "n//8"
    assert str(math.ceil(n / 8)) == "(n + 7)//8"
    assert str(torch.sym_int(n * 0.25)) == "n//4"
    assert str(torch.sym_int(n * 1.5)) == "n + n//2"
    assert str(n / 2 > 3.5) == "n >= 8"
    assert str((n / 4).is_integer()) == "n % 4 == 0"


@pytest.mark.parametrize(
    "write", [lambda n: n / 49 * 49, lambda n: n * 0.1, lambda n: n / 3 / 5, lambda n: n * 0.1 * 10]
)
def test_what_is_rounded_on_the_way_is_no_fraction(write: Any) -> None:
    """(1/49)*49 is less than 1: an exact answer would be a wrong one."""
    assert as_fraction(write(symbol(ShapeEnv())).node.value) is None


def test_fractions_agree_with_floats() -> None:
    chosen = random.Random(7)
    for _ in range(300):
        env = ShapeEnv()
        factor, divisor = chosen.choice([1, 2, 3, 0.5, 0.75, 1.25]), chosen.choice([1, 2, 3, 5, 7, 8, 0.5])
        written = symbol(env) * factor / divisor
        size, bottom = as_fraction(written.node.value) or (None, 0)
        if size is None:
            continue
        for n in (2, 3, chosen.randrange(2, 10_000), chosen.randrange(2, 1 << 30)):
            exact = Fraction(size.evaluate({env.algebra.symbols["n"]: n}), bottom)
            real = n * factor / divisor
            assert (math.floor(real), math.ceil(real)) == (math.floor(exact), math.ceil(exact))


def test_bounds_decide() -> None:
    env = ShapeEnv()
    n = symbol(env, 2, 100)
    assert statically_known_true(n * 0.3 > 0.5)
    assert statically_known_true(n * 0.3 <= 31)
    assert statically_known_true(torch._sym_sqrt(n) > 1)
    assert not statically_known_true(n * 0.3 > 5)
    assert not env.guards


def test_bounds_contain_all_values() -> None:
    chosen = random.Random(3)
    for _ in range(300):
        env = ShapeEnv()
        n = symbol(env, 2, 60)
        written, text = n, "n"
        for _ in range(chosen.randrange(1, 5)):
            change, number = chosen.choice("+-*/"), chosen.choice([0.1, 0.3, 1.7, 3.0, -2.5])
            text = f"({text} {change} {number})"
        written = eval(text, {"n": n})
        low, high = bounds_of(written.node.value, env.facts.interval)
        values = [eval(text, {"n": size}) for size in range(2, 61)]
        assert low <= min(values) and max(values) <= high


def test_intervals_never_decide_that_floats_are_equal() -> None:
    assert compared_by_bounds("==", (1.0, 1.0), (1.0, 1.0)) is None
    assert compared_by_bounds("<", (0.0, 1.0), (2.0, 3.0)) is True
    assert compared_by_bounds(">=", (0.0, 1.0), (1.0, 3.0)) is None
    assert compared_by_bounds("<=", (0.0, 1.0), (1.0, 3.0)) is True
    assert compared_by_bounds("<=", (-math.inf, math.inf), (math.inf, math.inf)) is None  # nan


def test_one_guard_for_one_question() -> None:
    env = ShapeEnv()
    n = symbol(env)
    for _ in range(3):
        assert bool(n * 0.3 > 2)
        assert not bool(n * 0.3 <= 2)
    (guard,) = env.guards
    assert guard.text == "n * 0.3 > 2.0"
    assert guard.holds({env.algebra.symbols["n"]: 7}) and not guard.holds({env.algebra.symbols["n"]: 6})


def test_a_float_that_only_data_tells() -> None:
    env = ShapeEnv()
    f = env.create_unbacked_symfloat()
    assert not statically_known_true(f > -1e300) and not statically_known_true(f < 1e300)
    torch._check(f > 0.5)
    assert bool(f > 0.5) and not bool(f <= 0.5)
    assert [guard.text for guard in env.runtime_asserts] == ["zuf0 > 0.5"]


def test_rounding_is_computed_when_sizes_are_checked() -> None:
    env = ShapeEnv()
    n = symbol(env)
    assert bool(torch.sym_int(n * 0.3) == 3)
    assert env.guards[-1].text == "trunc(n * 0.3) == 3"
    assert not env.check(12) and not env.check(13)
    (broken,) = env.check(14)
    assert broken.inputs == ("n",) and "n = 14" in str(broken)
    assert env.evaluate_guards_expression(env.produce_guards_expression([n]) or "", [13])


def test_a_plain_float_among_symbols() -> None:
    """C++ wraps numbers in nodes where others are symbols; torch's operators take these as well."""
    seed = ShapeEnv().create_symint(6, "n").node
    two = torch.SymFloat(seed.wrap_float(2.5))
    assert [two + 1, 1 - two, two * two, two > 1, abs(two), torch.sym_max(two, 3.0)] == [
        3.5,
        -1.5,
        6.25,
        True,
        2.5,
        3.0,
    ]
    assert float(two) == 2.5


def test_what_is_rounded_of_a_size_is_at_least_zero() -> None:
    env = ShapeEnv()
    n = symbol(env)
    for rounded in (torch.sym_int(n * 0.3), math.floor(n * 0.3), math.ceil(n * 0.3)):
        assert statically_known_true(rounded >= 0)
    assert not env.guards


# --- data-dependent floats with bounds -------------------------------------------------------------------------------------


def test_a_bounded_float_decides_by_its_bounds() -> None:
    env = ShapeEnv()
    step: Any = env.create_unbacked_symfloat(low=1, high=1 << 24)
    assert bool(step >= 1) and not bool(step < 1)
    assert bool(1 - 0.999**step > 0) and bool(0.9**step < 0.95)
    assert not env.runtime_asserts and not env.guards


def test_powers_of_unbounded_floats_are_not_decided() -> None:
    env = ShapeEnv()
    number: Any = env.create_unbacked_symfloat()
    with pytest.raises(GuardOnDataDependentSymNode):
        bool(1 - 0.999**number > 0)


@given(
    st.floats(0.01, 100.0),
    st.integers(-20, 20),
    st.integers(0, 40),
    st.floats(0, 1),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_bounds_of_powers_hold(base: float, low: int, width: int, position: float, bound: float) -> None:
    """What is decided of `base ** x` is true for each x within the bounds."""
    env = ShapeEnv()
    x: Any = env.create_unbacked_symfloat(low=low, high=low + width)
    try:
        is_less = bool(base**x < bound)
    except GuardOnDataDependentSymNode:
        return
    assert (base ** (low + width * position) < bound) == is_less
