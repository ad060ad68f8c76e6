"""Expressions: normal forms, interning, text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.shapes.algebra.expr import Algebra, Expr

from .trees import Tree, build, compute, trees

algebra = Algebra()
batch, seq, dim = algebra.symbol("batch", 1), algebra.symbol("seq", 1), algebra.symbol("dim", 0)
any_int = algebra.symbol("n", None)


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (batch * seq + 1, "batch*seq + 1"),
        ((seq + 7) // 8, "(seq + 7)//8"),
        (seq - 1, "seq - 1"),
        (1 - seq, "1 - seq"),
        (-seq, "-seq"),
        (-(seq // 2), "-(seq//2)"),
        ((seq + 7) // 8 * 8, "8*((seq + 7)//8)"),
        (batch * seq % 8, "batch*seq % 8"),
        (seq**2, "seq**2"),
        (2**seq, "2**seq"),
        (algebra.maximum(seq, dim), "max(seq, dim)"),
        (abs(any_int), "abs(n)"),
        ((seq - 1) // 2 + 1, "(seq + 1)//2"),
        (-((-seq) // 8), "(seq + 7)//8"),
        (((seq + 1) // 2 + 1) // 2, "(seq + 3)//4"),
        (seq - seq % 8, "8*(seq//8)"),
        (batch * seq - batch * (seq % 8), "8*batch*(seq//8)"),
        (seq + (8 - seq % 8) % 8, "8*((seq + 7)//8)"),
        (seq // 4 + (7 - seq // 4 % 7) % 7, "7*((seq + 24)//28)"),
        (seq - seq // 2, "(seq + 1)//2"),
        (seq // 4 - seq // 8, "(seq + 4)//8"),
        ((seq + seq % 2) // 2, "(seq + 1)//2"),
    ],
)
def test_text(expr: int | Expr, text: str) -> None:
    assert str(expr) == text


@pytest.mark.parametrize(
    ("expr", "same"),
    [
        (batch * seq, seq * batch),
        ((batch + seq) * (batch - seq), batch**2 - seq**2),
        (seq // 8 * 8 + seq % 8, seq),
        (seq // batch * batch + seq % batch, seq),
        ((seq - seq % 8) // 8, seq // 8),
        ((seq // 2) // 4, seq // 8),
        ((8 * seq + 3) // 8, seq),
        ((8 * seq + 3) % 8, 3),
        ((seq % 8) % 4, seq % 4),
        ((seq % 8) % 8, seq % 8),
        (batch * seq * dim // (batch * seq), dim),
        ((batch * seq + batch) // (seq + 1), batch),
        ((seq * batch) % seq, 0),
        ((seq - 1) // seq, 0),
        ((2 * seq + 1) // 4, seq // 2),
        (algebra.maximum(1, seq), seq),
        (algebra.minimum(seq, seq + 1), seq),
        (algebra.maximum(algebra.maximum(seq, dim), seq), algebra.maximum(dim, seq)),
        (abs(-3 * any_int), 3 * abs(any_int)),
        (abs(seq), seq),
        (seq // -8, -seq // 8),
        ((seq + 1) ** 2, seq * seq + 2 * seq + 1),
        (seq - seq, 0),
        (0 * seq, 0),
        (seq**0, 1),
        (seq // 1, seq),
        (seq % 1, 0),
    ],
)
def test_normal_form(expr: int | Expr, same: int | Expr) -> None:
    assert expr is same


def test_symbols_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="symbol seq exists already"):
        algebra.symbol("seq")


def test_division_by_zero_and_negative_powers_are_errors() -> None:
    for operation in (lambda: seq // 0, lambda: seq % 0, lambda: seq**-1):
        with pytest.raises(ArithmeticError):
            operation()


def test_other_types_are_refused() -> None:
    assert str(seq + 1) == "seq + 1"  # a remembered sum must not answer for a float
    with pytest.raises(TypeError):
        seq + 1.0
    with pytest.raises(TypeError):
        assert seq < dim  # type: ignore[operator]


def test_substitute() -> None:
    expr = (batch * seq + 1) // 2 + seq % 4
    assert isinstance(expr, Expr)
    assert expr.substitute({seq: 8}) is 4 * batch
    assert expr.substitute({seq: batch, batch: seq}) is (batch * seq + 1) // 2 + batch % 4
    assert expr.substitute({seq: 3, batch: 2}) == 6
    assert expr.symbols == {batch, seq}


def test_evaluate_where_it_is_not_defined() -> None:
    expr = seq // dim
    assert isinstance(expr, Expr)
    with pytest.raises(ZeroDivisionError):
        expr.evaluate({seq: 3, dim: 0})


@settings(max_examples=300, deadline=None)
@given(trees(symbols=2))
def test_value_is_that_of_python(tree: Tree) -> None:
    own = Algebra()
    symbols = [own.symbol("a", 0, 5), own.symbol("b", -3, 4)]
    expr = build(tree, own, symbols)
    again = build(tree, own, symbols)
    assert again is expr or (isinstance(expr, int) and again == expr)
    low, high = own.interval(expr)
    for values in itertools.product(range(6), range(-3, 5)):
        expected = compute(tree, values)
        if expected is None:
            continue
        point = dict(zip(symbols, values, strict=True))
        assert (expr if isinstance(expr, int) else expr.evaluate(point)) == expected
        assert (low is None or low <= expected) and (high is None or expected <= high)


@settings(max_examples=60, deadline=None)
@given(trees(symbols=2), st.integers(0, 6), st.integers(0, 6))
def test_value_is_that_of_sympy(tree: Tree, x: int, y: int) -> None:
    sympy = pytest.importorskip("sympy")
    from understudy.shapes.sympy_writer import SympyWriter

    own = Algebra()
    symbols = [own.symbol("a"), own.symbol("b")]
    expr = build(tree, own, symbols)
    expected = compute(tree, (x, y))
    if expected is None or isinstance(expr, int):
        return
    named = {"a": x, "b": y}
    converted = SympyWriter({}).write(expr)
    assert converted.subs({s: sympy.Integer(named[s.name]) for s in converted.free_symbols}) == expected
