"""The writers of expressions and conditions, each against the value itself; and another writer, as a user would add one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shapes.trees import Tree, build, compute, trees
from understudy import ShapeEnv
from understudy.shapes.algebra.expr import Algebra, Expr
from understudy.shapes.algebra.floats import FUNCTIONS, Operand
from understudy.shapes.algebra.polynomials import Monomial
from understudy.shapes.algebra.writers import PythonWriter, TorchWriter, Writable, Writer

WORDS = {name: getattr(math, name) for name in ("floor", "ceil", "trunc", *FUNCTIONS)}

NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "a quotient as the right operand": lambda n, m: 0.3 * ((n + 1) // 2),
    "a sum of quotients": lambda n, m: 0.3 * (n // 3) - (m % 4) * 1.7,
    "a negative quotient": lambda n, m: 3 - n // 2 - (2 * (m // 3)),
    "a power of a sum": lambda n, m: (n + m) ** 2 // 3,
    "a rounded float": lambda n, m: torch.sym_int(n * 0.3) + m,
    "a rounded float in an operation": lambda n, m: (torch.sym_int(n * 0.3) & m) * 2 - 1,
    "a float of a rounded float": lambda n, m: torch.sym_int(torch.sym_int(n * 0.3) * 0.7) + 0.5,
    "minima": lambda n, m: torch.sym_min(n, torch.sym_max(m, 5) - 3),
    "a choice": lambda n, m: torch.sym_ite(n > m, n * 2, m),
    "a function": lambda n, m: torch.sym_sqrt(n + m) * 2,
    "the absolute value": lambda n, m: abs(n - m),
}
CONDITIONS: dict[str, Callable[[Any, Any], Any]] = {
    "or": lambda n, m: (n == 3) | (m == 5),
    "and of or": lambda n, m: ((n == 3) | (m == 5)) & (n < m),
    "of floats": lambda n, m: (n * 0.3 > 2.0) | (m == 5),
    "of a float and a quotient": lambda n, m: 0.5 * ((n + 1) // 2) < m / 3,
    "not equal": lambda n, m: n % 4 != m // 2,
}


def values(program: Callable[[Any, Any], Any]) -> tuple[ShapeEnv, Expr, Expr, Any]:
    env = ShapeEnv(duck_shape=False)
    n, m = (env.create_symint(9, "n"), env.create_symint(14, "m"))
    return env, n.node.value, m.node.value, program(n, m).node.value


@pytest.mark.parametrize("program", [*NUMBERS.values(), *CONDITIONS.values()], ids=[*NUMBERS, *CONDITIONS])
def test_python_computes_the_value(program: Callable[[Any, Any], Any]) -> None:
    env, n, m, value = values(program)
    code = PythonWriter({n: "args[0]", m: "args[1]"}, env.definitions).write(value).text
    for numbers in ((9, 14), (3, 5), (20, 4), (2, 2)):
        known = dict(zip((n, m), numbers, strict=True))
        for symbol, definition in env.definitions.items():
            known[symbol] = int(definition.evaluate(known))
        assert eval(code, dict(WORDS), {"args": numbers}) == value.evaluate(known), (code, numbers)


@pytest.mark.parametrize("program", [*NUMBERS.values(), *CONDITIONS.values()], ids=[*NUMBERS, *CONDITIONS])
def test_torch_code_computes_the_same_symbolic_value(program: Callable[[Any, Any], Any]) -> None:
    """In the names of a program in which sizes are symbols; nothing is decided on the way."""
    env, n, m, value = values(program)
    code = TorchWriter({n: "sizes[0]", m: "sizes[1]"}, env.definitions).write(value).text
    sizes = [env.node(symbol, int).symbolic for symbol in (n, m)]
    again = eval(code, {"torch": torch, "math": math}, {"sizes": sizes})
    assert again.node.value is value, (code, str(value))
    assert not env.guards


def test_text_has_the_parentheses_that_it_needs() -> None:
    _, _, _, value = values(NUMBERS["a quotient as the right operand"])
    assert str(value) == "0.3 * ((n + 1)//2)"
    _, _, _, value = values(NUMBERS["a negative quotient"])
    assert str(value) == "3 - n//2 - 2*(m//3)"


def test_a_negative_number_stands_on_the_right() -> None:
    env = ShapeEnv()
    k = env.create_symint(-3, "k")
    assert k == -3
    assert [guard.text for guard in env.guards] == ["k == -3"]


def test_infinity_is_code() -> None:
    assert eval(PythonWriter({}, {}).write(-math.inf).text) == -math.inf


@settings(max_examples=60, deadline=None)
@given(trees(symbols=2), st.integers(0, 6), st.integers(0, 6))
def test_python_of_random_expressions(tree: Tree, x: int, y: int) -> None:
    algebra = Algebra()
    a, b = algebra.symbol("a"), algebra.symbol("b")
    value = build(tree, algebra, [a, b])
    expected = compute(tree, (x, y))
    if expected is not None:
        assert eval(PythonWriter({a: "x", b: "y"}, {}).write(value).text, {}, {"x": x, "y": y}) == expected


# --- the worked example of docs/symbolic-shapes.md: another language is another writer ------------------------------


class Lisp(Writer[str]):
    def write_number(self, number: float) -> str:
        return str(number)

    def write_symbol(self, symbol: Expr) -> str:
        return symbol.name

    def write_sum(self, terms: Sequence[tuple[Monomial, int]]) -> str:
        products = []
        for monomial, coefficient in terms:
            atoms = [self.write(atom) for atom, exponent in monomial for _ in range(exponent)]
            factors = [str(coefficient), *atoms] if coefficient != 1 or not atoms else atoms
            products.append(factors[0] if len(factors) == 1 else f"(* {' '.join(factors)})")
        return products[0] if len(products) == 1 else f"(+ {' '.join(products)})"

    def write_operation(self, value: Writable, operation: str, operands: Sequence[Operand]) -> str:
        return f"({operation} {' '.join(map(self.write, operands))})"

    def write_comparison(self, relation: str, left: str, right: str) -> str:
        return f"({relation} {left} {right})"

    def write_junction(self, kind: str, parts: Sequence[Writable]) -> str:
        return f"({kind} {' '.join(map(self.write, parts))})"


def test_another_language_is_another_writer() -> None:
    env, _, _, value = values(lambda n, m: ((2 * n + 1) // 3 == m) | (m * 0.5 > 3.3))
    assert Lisp().write(value) == "(or (== m (floordiv (+ (* 2 n) 1) 3)) (> (mul (to_float m) 0.5) 3.3))"
    assert not env.guards
