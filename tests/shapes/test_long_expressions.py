"""Programs whose sizes grow long: they are computed, decided and checked in reasonable time, and to the right number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.counting import count_calls
from understudy import ShapeEnv, statically_known_true

MOST_CALLS = 5_000_000
"""Far more than it takes; without a limit to what is written out, it takes minutes or all memory."""


def numbers(count: int) -> tuple[ShapeEnv, list[Any], list[int]]:
    env = ShapeEnv(duck_shape=False)
    examples = [i % 5 + 2 for i in range(count)]
    return env, [env.create_symint(example, f"n{i}") for i, example in enumerate(examples)], examples


def test_a_product_of_many_sums() -> None:
    env, symbols, examples = numbers(40)
    with count_calls(MOST_CALLS):
        product = math.prod(n + 1 for n in symbols)
        assert product > 10
        assert len(str(product)) < 20_000
        assert int(product) == math.prod(n + 1 for n in examples)
        assert env.check(*examples) == []
        assert env.check(*[n + 1 for n in examples]) != []


STEPS: dict[str, Callable[[Any], Any]] = {
    "floor of a multiple": lambda n: (n * 3 + 1) // 2 % 997,
    "twice itself": lambda n: n + n // 2,
    "a product with itself": lambda n: (n // 2) * (n % 5) + 3,
    "the least": lambda n: torch.sym_min(n * 2, 100 - n),
    "deep": lambda n: (n + 1) // 2 + 7,
}


@pytest.mark.parametrize("step", STEPS)
def test_many_steps(step: str) -> None:
    env = ShapeEnv(duck_shape=False)
    symbolic, number = env.create_symint(30, "n"), 30
    with count_calls(MOST_CALLS):
        for _ in range(60):
            symbolic, number = STEPS[step](symbolic), STEPS[step](number)
        decided = bool(symbolic > 10)
        assert decided == (number > 10)
        assert symbolic.node.hint == number
        assert env.check(30) == []


def test_a_sum_of_many_terms_is_simplified_at_once() -> None:
    _, symbols, _ = numbers(8)
    with count_calls(MOST_CALLS):
        product = math.prod(n + 1 for n in symbols)
        assert len(product.node.value.terms) == 256
        assert statically_known_true(product - product == 0)
        str(product)


def test_a_guard_that_is_too_long_for_code() -> None:
    env = ShapeEnv(duck_shape=False)
    n = env.create_symint(30, "n")
    for _ in range(40):
        n = torch.sym_min(n * 2, 100 - n)
    assert n > 10 or n <= 10
    assert env.check(30) == []
    with pytest.raises(ValueError, match="too long for code"):
        env.produce_guards()


def test_what_can_not_be_computed_is_no_match() -> None:
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    a, b = env.create_symint(7, "a"), env.create_symint(2, "b")
    assert int(torch.sym_int(a / b)) == 3
    assert env.evaluate_guards(7, 2)
    assert not env.evaluate_guards(7, 0)
    assert [str(broken.requirement.text) for broken in env.check(7, 0)]
    check: dict[str, Any] = {}
    exec(env.check_source(), check)
    check["check"](7, 2)
    with pytest.raises(ValueError, match="violate guards of the run"):
        check["check"](7, 0)
