"""Conditions as code to paste into a program in which sizes are symbols: Python's own words would ask at once."""

from __future__ import annotations

import ast
import functools

WORDS = (" or ", " and ", " if ", "(")
"""Without one of these, the text is such code as it stands."""
CALLS = {
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
        name = CALLS.get(node.func.id, "") if isinstance(node.func, ast.Name) else ""
        if not name:
            return node  # the user's own, as `flag.item()`
        self.has_changed = True
        parts = [self.visit(part) for part in node.args]
        if len(parts) < 2:
            return _call(name, parts)
        return functools.reduce(lambda left, right: _call(name, [left, right]), parts)


def _call(name: str, arguments: list[ast.expr]) -> ast.expr:
    return ast.Call(ast.parse(name, mode="eval").body, arguments, [])
