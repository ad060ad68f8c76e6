"""How expressions and conditions read: Python's notation, in the names of the symbols."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from understudy.shapes.algebra.polynomials import Monomial, Size, Terms

if TYPE_CHECKING:
    from understudy.shapes.algebra.expr import Expr

CALLS = {"min": "min", "max": "max", "abs": "abs"}
OPERATORS = {"floordiv": "//", "mod": " % ", "pow": "**"}


def text_of(expr: Expr) -> str:
    if expr.is_symbol:
        return expr.name
    if expr.kind == "sum":
        return sum_text(expr.terms)
    if expr.kind in CALLS:
        return f"{CALLS[expr.kind]}({', '.join(map(str, expr.args))})"
    left, right = expr.args
    return f"{operand(left, product_allowed=expr.kind != 'pow')}{OPERATORS[expr.kind]}{operand(right)}"


def operand(size: Size, product_allowed: bool = False) -> str:
    """With parentheses unless it binds at least as tightly as its surroundings."""
    text = str(size)
    if isinstance(size, int):
        return text if size >= 0 else f"({text})"
    if size.is_symbol or size.kind in CALLS:
        return text
    plain_product = len(size.terms) == 1 and size.kind == "sum" and size.terms[0][1] > 0
    return text if product_allowed and plain_product else f"({text})"


def sum_text(terms: Iterable[tuple[Monomial, int]]) -> str:
    """Positive terms first among equals in their order: `seq - 1`, never `-1 + seq`."""
    terms = list(terms)
    positive = next((i for i, (_, coefficient) in enumerate(terms) if coefficient > 0), 0)
    text = ""
    for monomial, coefficient in terms[positive : positive + 1] + terms[:positive] + terms[positive + 1 :]:
        sign = "-" if coefficient < 0 else "+"
        term = term_text(monomial, abs(coefficient))
        if text:
            text = f"{text} {sign} {term}"
        elif coefficient < 0:  # in Python -a//b is (-a)//b
            text = f"-({term})" if "//" in term or "%" in term else f"-{term}"
        else:
            text = term
    return text or "0"


def term_text(monomial: Monomial, coefficient: int) -> str:
    if coefficient == 1 and len(monomial) == 1 and monomial[0][1] == 1:
        return str(monomial[0][0])
    factors = [str(coefficient)] if coefficient != 1 or not monomial else []
    for atom, exponent in monomial:
        factor = operand(atom)
        factors.append(factor if exponent == 1 else f"{factor}**{exponent}")
    return "*".join(factors)


def relation_text(kind: str, terms: Terms) -> str:
    left, operator, right = sides(kind, terms)
    return f"{sum_text(left)} {operator} {sum_text(right)}"


def sides(kind: str, terms: Terms) -> tuple[list[tuple[Monomial, int]], str, list[tuple[Monomial, int]]]:
    """`kind` is eq, ne or ge: the relation of the terms' sum to zero, positive terms on both sides."""
    left = [(m, c) for m, c in terms if c > 0]
    right = [(m, -c) for m, c in terms if c < 0]
    operator = {"eq": "==", "ne": "!=", "ge": ">="}[kind]
    has_strict_form = kind == "ge" and (((), 1) in right) and len(right) > 1 and bool(left)
    if has_strict_form:  # a >= b + 1
        right.remove(((), 1))
        operator = ">"
    first_is_right = any(m for m, _ in right) and not any(m for m, _ in left)
    leading = terms[0]
    if first_is_right or (leading[1] < 0 and leading[0]):
        left, right = right, left
        operator = {">=": "<=", ">": "<"}.get(operator, operator)
    return left, operator, right


# --- Conditions as code to paste into a program in which sizes are symbols: Python's own words would ask at once ---

WORDS = (" or ", " and ", " if ", "(")
"""Without one of these, the text is such code as it stands."""
SYMBOLIC_CALLS = {
    "min": "torch.sym_min",
    "max": "torch.sym_max",
    "floor": "math.floor",
    "ceil": "math.ceil",
    "trunc": "math.trunc",
    "sqrt": "torch.sym_sqrt",
}


def as_code(text: str) -> str:
    """`n == 3 or n == 5` as `(n == 3) | (n == 5)`, `min(n, m)` as `torch.sym_min(n, m)`, and so on."""
    if not any(word in text for word in WORDS):
        return text
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:  # a name that is no name of Python's
        return text
    writer = _Undecided()
    changed = writer.visit(tree)
    return ast.unparse(changed) if writer.has_changed else text


class _Undecided(ast.NodeTransformer):
    has_changed = False

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        self.has_changed = True
        parts = [self.visit(part) for part in node.values]
        join: ast.operator = ast.BitOr() if isinstance(node.op, ast.Or) else ast.BitAnd()
        return functools.reduce(lambda left, right: ast.BinOp(left, join, right), parts)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.has_changed = True
        return _call("torch.sym_ite", [self.visit(part) for part in (node.test, node.body, node.orelse)])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = SYMBOLIC_CALLS.get(node.func.id, "") if isinstance(node.func, ast.Name) else ""
        if not name:
            return node  # the user's own, as `flag.item()`
        self.has_changed = True
        parts = [self.visit(part) for part in node.args]
        if len(parts) < 2:
            return _call(name, parts)
        return functools.reduce(lambda left, right: _call(name, [left, right]), parts)


def _call(name: str, arguments: list[ast.expr]) -> ast.expr:
    return ast.Call(ast.parse(name, mode="eval").body, arguments, [])
