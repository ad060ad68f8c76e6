"""Conditions: normal forms, text, combinations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings

from understudy.shapes.algebra.conditions import (
    Condition,
    both,
    conjunction,
    either,
    eq,
    ge,
    gt,
    le,
    lt,
    ne,
    negate,
)
from understudy.shapes.algebra.expr import Algebra

from .trees import Tree, build_question, holds, questions

algebra = Algebra()
b, s, h = (algebra.symbol(name, 1) for name in ("b", "s", "h"))
d, s0, s1 = (algebra.symbol(name, 0) for name in ("d", "s0", "s1"))


@pytest.mark.parametrize(
    "condition",
    [
        ge(b * s * h, 0),
        ne(b * s * h, 0),
        ge((s + 7) // 8 * 8, s),
        le(2 * (s // 2), s),
        eq(b * s * d // (b * s), d),
        eq((b * h) * (s * d), b * s * h * d),
        gt(s + 1, s),
        ne(s, s + 1),
        le(0, s % 8),
        lt(s % 8, 8),
        ge(s - s // 2, 0),
        eq(algebra.maximum(1, s), s),
        eq(s * d, d * s),
        ge(s * d, d),
        ne(2 * s0 + 4 * s1, 7),
        eq((s + 1) // 2 + s // 2, s),
        le((s + 3) // 4, 7 * ((s + 27) // 28)),
        ne(s**2, 50),
        eq(3, 3),
    ],
)
def test_decided_by_normal_form(condition: bool | Condition) -> None:
    assert condition is True


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        (eq(b * s % 8, 0), "b*s % 8 == 0"),
        (ge(s // 4, 8), "s >= 32"),
        (le((s + 3) // 4, 8), "s <= 32"),
        (eq((s + 6) % 7, 6), "s % 7 == 0"),
        (le((s + 6) % 7, 5), "s % 7 != 0"),
        (ge(s % 7, 1), "s % 7 != 0"),
        (ne(s % 2, 1), "s % 2 == 0"),
        (eq(s**2, 49), "s == 7"),
        (le(s**2, 50), "s <= 7"),
        (ge(b**2 * s**2, 50), "b*s >= 8"),
        (gt(b * s, b), "s >= 2"),
        (le(s, 2048), "s <= 2048"),
        (lt(s, 2048), "s <= 2047"),
        (eq(s0, s1), "s0 == s1"),
        (eq(s1 - s0, 0), "s0 == s1"),
        (lt(s0, s1), "s0 < s1"),
        (gt(s0, s1), "s0 > s1"),
        (ne(s0, 4), "s0 != 4"),
        (eq(2 * s0, 8), "s0 == 4"),
        (ge(2 * s0, 7), "s0 >= 4"),
        (eq(s // 8 * 8, s), "s % 8 == 0"),
        (eq(s0 + s1, 10), "s0 + s1 == 10"),
        (eq(b * s0, b * s1), "s0 == s1"),
        (gt(2 * s0, s1 + 2), "2*s0 >= s1 + 3"),
        (both(lt(s0, s1), either(eq(s0, 4), ne(s1, 3))), "s0 < s1 and (s0 == 4 or s1 != 3)"),
        (negate(both(lt(s0, s1), eq(s0, 4))), "s0 != 4 or s0 >= s1"),
    ],
)
def test_text(condition: bool | Condition, text: str) -> None:
    assert str(condition) == text


def test_the_same_condition_is_the_same_object() -> None:
    assert eq(s0, s1) is eq(2 * s1, 2 * s0)
    assert lt(s0, s1) is negate(ge(s0, s1))
    assert negate(negate(eq(s0, s1))) is eq(s0, s1)
    assert both(eq(s0, 1), ge(s1, 2)) is both(ge(s1, 2), eq(s0, 1))


def test_combinations_with_what_is_decided() -> None:
    question = eq(s0, s1)
    assert both(True, question) is question
    assert both(False, question) is False
    assert either(True, question) is True
    assert either(question, question) is question
    assert either(question, negate(question)) is True
    assert both(question, negate(question)) is False


def test_a_condition_is_no_bool() -> None:
    with pytest.raises(TypeError, match="the truth value of s0 == s1 depends on sizes"):
        bool(eq(s0, s1))


def test_substitute() -> None:
    condition = both(lt(s0, s1), eq(s0 % 8, 0))
    assert isinstance(condition, Condition)
    assert condition.substitute({s0: 8}) is ge(s1, 9)
    assert condition.substitute({s0: 8, s1: 8}) is False
    assert condition.symbols == {s0, s1}


@settings(max_examples=300, deadline=None)
@given(questions(symbols=2))
def test_normal_form_holds_where_the_question_does(tree: Tree) -> None:
    own = Algebra()
    symbols = [own.symbol("a", 0, 5), own.symbol("b", -3, 4)]
    condition = build_question(tree, own, symbols)
    assert build_question(tree, own, symbols) is condition
    for values in itertools.product(range(6), range(-3, 5)):
        expected = holds(tree, values)
        if expected is not None:
            point = dict(zip(symbols, values, strict=True))
            assert (condition if isinstance(condition, bool) else condition.evaluate(point)) is expected


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([eq(d, 1), eq(d * s0, 1)], "d == 1 and s0 == 1"),
        ([eq(d * s0, 1), eq(d, 1), either(eq(s0, 1), eq(d, 16))], "d == 1 and s0 == 1"),
        ([eq(s0 // 4, 1), eq(s0 // 4 * (s1 // 4), 1)], "s0//4 == 1 and s1//4 == 1"),
        ([eq(d, 2), eq(d * s0, 1)], "False"),
        ([ge(d, 1), eq(d * s0, 1)], "d >= 1 and d*s0 == 1"),
    ],
)
def test_what_one_part_of_a_conjunction_says_the_others_use(parts: list[bool | Condition], text: str) -> None:
    assert set(str(conjunction(parts)).split(" and ")) == set(text.split(" and "))
