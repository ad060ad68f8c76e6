"""What code asks of numbers that may be symbols: decisions, promises, examples, conditions without decisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from understudy import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    constrain_range,
    expect_true,
    guard_bool,
    guard_float,
    guard_int,
    guard_scalar,
    guard_size_oblivious,
    guarding_hint_or_throw,
    has_guarding_hint,
    has_static_value,
    is_concrete_bool,
    is_concrete_float,
    is_concrete_int,
    is_symbolic,
    optimization_hint,
    statically_known_true,
    sym_and,
    sym_eq,
    sym_or,
)


@pytest.fixture
def env() -> ShapeEnv:
    return ShapeEnv()


def test_a_guarded_number_is_plain_and_stays_what_it_is(env: ShapeEnv) -> None:
    n = env.create_symint(6, "n")
    assert guard_bool(n > 3) is True and guard_float(n / 4) == 1.5 and guard_int(n) == 6
    assert [guard.text for guard in env.guards] == ["n >= 4", "n == 6"]
    assert (guard_int(3), guard_float(2.0), guard_bool(False)) == (3, 2.0, False)


def test_the_guard_follows_the_kind(env: ShapeEnv) -> None:
    n = env.create_symint(6, "n")
    found = [guard_scalar(value) for value in (n > 3, n, n / 4, True, 2, 0.5)]
    assert found == [True, 6, 1.5, True, 2, 0.5] and type(found[0]) is bool


def test_what_is_no_number_of_the_kind_is_refused() -> None:
    for guard, wrong in ((guard_int, "3"), (guard_float, None), (guard_bool, 1)):
        with pytest.raises(TypeError, match="expected"):
            guard(wrong)  # type: ignore[operator]


def test_size_oblivious_takes_sizes_that_data_decides_for_ordinary_ones(env: ShapeEnv) -> None:
    n = env.create_unbacked_symint(low=0)
    assert guard_size_oblivious(n == 1) is False and guard_size_oblivious(True) is True


def test_expectations_are_decided_or_promised(env: ShapeEnv) -> None:
    n, u = env.create_symint(6, "n"), env.create_unbacked_symint()
    assert expect_true(n > 5) and not expect_true(n > 7) and expect_true(True)
    assert expect_true(u < n) and statically_known_true(u != n)
    assert [guard.text for guard in env.guards] == ["n >= 6", "n <= 7"]
    assert [promise.text for promise in env.runtime_asserts] == ["n > u0"]


def test_ranges_are_promised(env: ShapeEnv) -> None:
    u = env.create_unbacked_symint()
    constrain_range(u, min=2, max=9)
    assert statically_known_true(u >= 2) and statically_known_true(u < 10)
    constrain_range(5, min=2, max=9)
    with pytest.raises(ValueError, match="not in the range from 2 to 9"):
        constrain_range(1, min=2, max=9)
    with pytest.raises(ValueError, match="min must not be greater than max, got 3 and 2"):
        constrain_range(u, min=3, max=2)


def test_symbolic_or_not(env: ShapeEnv) -> None:
    n = env.create_symint(6, "n")
    assert is_symbolic(n) and is_symbolic(n / 2) and is_symbolic(n > 3)
    assert not any(map(is_symbolic, (3, 0.5, True)))


def test_concrete_is_what_can_be_nothing_else(env: ShapeEnv) -> None:
    n, m = env.create_symint(6, "n"), env.create_symint(7, "m")
    assert not is_concrete_int(n) and not is_concrete_bool(n > 3) and not is_concrete_float(n / 2)
    assert is_concrete_bool(n >= 2), "by its range"
    assert guard_int(n) == 6 and is_concrete_int(n) and is_concrete_int(2 * n) and not is_concrete_int(m)
    assert has_static_value(n) and not has_static_value(n + m) and has_static_value(4)
    assert is_concrete_int(3) and is_concrete_float(0.5) and is_concrete_bool(True)
    with pytest.raises(TypeError, match="SymInt"):
        is_concrete_int(0.5)  # type: ignore[arg-type]


def test_examples(env: ShapeEnv) -> None:
    n, u = env.create_symint(6, "n"), env.create_unbacked_symint()
    assert has_guarding_hint(n) and has_guarding_hint(3) and not has_guarding_hint(u + n)
    assert (
        guarding_hint_or_throw(2 * n) == 12
        and guarding_hint_or_throw(n > 3) is True
        and guarding_hint_or_throw(4) == 4
    )
    assert optimization_hint(n) == 6 and optimization_hint(u, fallback=8) == 8 and optimization_hint(4) == 4
    assert env.guards == []
    with pytest.raises(GuardOnDataDependentSymNode, match="the value of u0"):
        guarding_hint_or_throw(u)


def test_conditions_are_joined_without_deciding(env: ShapeEnv) -> None:
    a, b = env.create_symint(6, "a"), env.create_symint(6, "b")
    same: Any = sym_eq((a, 2, [b]), [b, 2, (a,)])
    assert type(same) is torch.SymBool and env.guards == []
    assert sym_eq((a, 2), (a,)) is False and sym_eq((), ()) is True and sym_eq(3, 3) is True
    both, one = sym_and(a > 3, b > 4, True), sym_or(a > 30, b > 4, False)
    assert env.guards == [] and bool(both) and bool(one) and bool(same)
    assert [str(guard.condition) for guard in env.guards] == ["a >= 4", "b >= 5", "a == b"]
