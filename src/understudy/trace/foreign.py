"""Symbolic numbers of torch's own shape environment in a graph.

A program is traced inside of torch's compiler, say, which gives sizes as inputs. Decisions on them stay with torch: it
writes its guards as the program runs. What reaches the graph is computed from the inputs, as for symbols of ours: each of
torch's symbols has one of the same name in an environment that serves nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from understudy.shapes.env import ShapeEnv
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.trace.sym_nodes import SymbolNodes

EXAMPLE = 8
"""Nothing is ever decided by it."""


def is_foreign(symbolic: Any) -> bool:
    """Whether it is a number of torch's, with an expression; the sizes of jagged rows have none."""
    node: Any = symbolic.node
    return type(node) is not SymNode and hasattr(node, "expr") and hasattr(node.expr, "free_symbols")


class Foreign:
    """What the symbols of torch's that a graph can read are called here."""

    def __init__(self, nodes: SymbolNodes) -> None:
        self._nodes = nodes
        self._env = ShapeEnv(duck_shape=False, specialize_zero_one=False)

    def named(self, symbolic: Any) -> SymNode | None:
        """The symbol for a number that is one; None for a number that is computed from others."""
        expression = symbolic.node.expr
        if not isinstance(symbolic, torch.SymInt) or not expression.is_Symbol:
            return None
        known = self._env.algebra.symbols.get(expression.name)
        if known is None:
            made: SymNode = self._env.create_symint(EXAMPLE, expression.name).node
            return made
        return self._env.node(known, int)

    def node_of(self, symbolic: Any) -> Node | None:
        """The node that computes a number; None if the graph can't."""
        kind = {torch.SymInt: int, torch.SymBool: bool}.get(type(symbolic))
        if kind is None:
            return None
        try:
            value = self._env.from_sympy(symbolic.node.expr)
        except ValueError:  # a symbol that no input tells, or a function that is not computed with here
            return None
        found: Node | None = self._nodes.in_terms_of(self._env, self._env.node(value, kind))
        return found
