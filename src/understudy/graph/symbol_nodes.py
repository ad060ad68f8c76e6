"""Symbolic numbers in a graph.

Arithmetic on sizes is not recorded when it happens. A symbolic number is identified by its interned expression; when it
is an argument of a recorded call, the nodes that compute it are made from its expression, each once. So the graph
contains only the arithmetic it needs, and the same size computed twice is one node.

The symbols themselves come from the sizes, strides and offsets of inputs, from numbers among the inputs, and from
data-dependent results (unbacked symbols).
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import torch
from torch.fx import Node

from understudy import _torch
from understudy.errors import UntrackedValueError
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import FUNCTIONS, FloatExpr, Operand
from understudy.shapes.algebra.writers import Term, Writable, Writer
from understudy.shapes.bindings import symbols_in
from understudy.shapes.env import ShapeEnv
from understudy.shapes.node import SymNode
from understudy.spec import TensorSpec

aten = torch.ops.aten
SymbolSource = tuple[Any, tuple[Any, ...]]
"""The target and arguments of the node that reads a symbol."""
RELATIONS: dict[str, Callable[..., Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
OPERATIONS: dict[str, Callable[..., Any]] = {
    "floordiv": operator.floordiv, "mod": operator.mod, "min": torch.sym_min, "max": torch.sym_max,
    "abs": operator.abs, "pow": operator.pow,
    "to_float": torch.sym_float, "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "truediv": operator.truediv, "neg": operator.neg, "round": round,
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "ite": torch.sym_ite,
    **{name: _torch.symbolic_function(name) for name in FUNCTIONS},
}  # fmt: skip


PLAIN = frozenset({int, float, bool})


class GraphBuilder(Protocol):
    """The tracer that builds the graph: has the shape environment, and appends calls."""

    shape_env: Any
    graph: Any
    node_meta: Any

    def append_call(self, target: object, args: object, kwargs: object) -> Node: ...


class SymbolNodes(Writer[Any]):
    """The nodes of one graph that are symbolic numbers."""

    def __init__(self, tracer: GraphBuilder) -> None:
        self._tracer = tracer
        self._nodes: dict[SymNode, Any] = {}
        self._sources: dict[SymNode, SymbolSource] = {}
        self._promised: dict[SymNode, Callable[[], Any]] = {}
        self._foreign: TorchSymbolNames | None = None
        self._number: Any = None  # the SymNode whose expression is being written
        self._readable: dict[Expr, None] = {}
        self._last_read: list[SymNode | None] = [None, None, None]
        """For each table, the last number whose symbols were added to `_readable`."""
        self.simplifies = True
        """Whether a number with only one possible value is written as a plain number."""

    # --- where symbols come from -----------------------------------------------------------------------------

    def bind(self, symbolic: object, node: Node) -> None:
        """Register a node for a symbolic number. The first node for a number is kept."""
        number = self._find_number(symbolic)
        if number is not None:
            self._nodes.setdefault(number, node)

    def _find_number(self, symbolic: Any) -> SymNode | None:
        """The key under which a number is registered; None for numbers that are not ours."""
        if type(symbolic.node) is SymNode:
            return symbolic.node
        if not is_torch_number(symbolic):
            return None
        self._foreign = self._foreign or TorchSymbolNames(self)
        return self._foreign.find_number(symbolic)

    def node_of_torch_number(self, symbolic: object) -> Any:
        """Return the node of a symbolic number of torch, or the number itself."""
        node = (
            None
            if self._foreign is None or not is_torch_number(symbolic)
            else self._foreign.node_of(symbolic)
        )
        return symbolic if node is None else node

    def bind_tensor(self, spec: TensorSpec, node: Node) -> None:
        """Register a node from which the sizes, strides and offset of this tensor can be read."""
        for dim, size in enumerate(spec.shape):
            if type(size) is SymNode:
                self._sources.setdefault(size, (aten.sym_size.int, (node, dim)))
        for dim, step in enumerate(spec.stride):
            if type(step) is SymNode and not self._follows_from_sizes(step):
                self._sources.setdefault(step, (aten.sym_stride.int, (node, dim)))
        if type(spec.offset) is SymNode:
            self._sources.setdefault(spec.offset, (aten.sym_storage_offset.default, (node,)))

    def _follows_from_sizes(self, number: SymNode) -> bool:
        """Whether a stride can be computed from sizes with nodes: preferred, because it also holds for other layouts."""
        symbols = getattr(number.value, "symbols", ())
        env = number.shape_env
        return bool(symbols) and all(env.node(symbol, int) in self._sources for symbol in symbols)

    def bind_symbols_of(self, wrapper: torch.Tensor, node: Node) -> None:
        """As `bind_tensor`, for a wrapper with symbolic sizes."""
        strides = wrapper.stride() if wrapper.layout is torch.strided else ()
        for target, numbers in ((aten.sym_size.int, wrapper.shape), (aten.sym_stride.int, strides)):
            for dim, number in enumerate(numbers):
                known = self._find_number(number) if isinstance(number, torch.SymInt) else None
                if known is not None:
                    self._sources.setdefault(known, (target, (node, dim)))

    def bind_later(self, symbolic: Any, node: Callable[[], object]) -> None:
        """As `bind`, where the node is made when the number first reaches the graph."""
        if type(symbolic.node) is SymNode and not self.has(symbolic):
            self._promised[symbolic.node] = node

    def has(self, symbolic: Any) -> bool:
        return any(symbolic.node in known for known in (self._nodes, self._sources, self._promised))

    def list_numbers(self) -> list[SymNode]:
        """The numbers that have a node, or a place to read them from."""
        return list(dict.fromkeys((*self._sources, *self._promised, *self._nodes)))

    def forget(self, symbolic: Any) -> None:
        """Drop the nodes of a number."""
        for known in (self._nodes, self._sources, self._promised):
            known.pop(symbolic.node, None)

    def can_compute(self, symbolic: Any) -> bool:
        """Whether there is a node for a number, or one can be made from existing nodes."""
        number = symbolic.node
        if type(number) is not SymNode or number.is_plain:
            return False
        if self.has(symbolic):
            return True
        return symbols_in(symbolic) <= self.readable()

    def readable(self) -> Set[Expr]:
        """The symbols for which there are nodes, or can be, in the order in which they were added. The set only grows."""
        tables: tuple[dict[SymNode, Any], ...] = (self._nodes, self._sources, self._promised)
        for position, table in enumerate(tables):
            last = self._last_read[position]
            for number in reversed(table):  # dicts keep the order of insertion
                if number is last:
                    break
                self._readable.update(dict.fromkeys(getattr(number.value, "symbols", ())))
            self._last_read[position] = next(reversed(table), None)
        return self._readable.keys()

    def readable_from(self, position: int) -> list[Expr]:
        """The symbols that have become readable since there were `position` of them."""
        count = len(self.readable()) - position
        return list(itertools.islice(reversed(self._readable), count))

    def read_all(self) -> None:
        """Make the nodes that read sizes now, because a tensor is about to change its metadata.

        For all tensors: a tensor may have several nodes. Unused nodes are removed later as dead code.
        """
        for number in list(self._sources):
            if number not in self._nodes:
                self.node_of(number)

    # --- from a number to its node -----------------------------------------------------------------------------

    def node_of(self, number: SymNode) -> Any:
        """The node that computes a symbolic number; the number itself if it is plain."""
        if number.is_plain:
            return number.value
        found = self._nodes.get(number)
        if found is not None:
            return found
        node_meta = self._tracer.node_meta
        if node_meta.shared_trace is not None:  # a part of another number
            found = self._nodes[number] = self._make_node_of(number)
            return found
        node_meta.shared_trace = node_meta.trace_of(sys._getframe(1))
        try:
            found = self._nodes[number] = self._make_node_of(number)
        finally:
            node_meta.shared_trace = None
        return found

    def _make_node_of(self, number: SymNode) -> Any:
        source = self._sources.get(number)
        promised = self._promised.pop(number, None)
        if promised is not None:
            return promised()
        if (
            self.simplifies
            and type(number.value) is not FloatExpr  # never an integer
            and isinstance(fixed := number.shape_env.simplify(number.value), int)
        ):
            return fixed  # a guard leaves it no other value
        return self._read(number, source) if source is not None else self._compute(number)

    def node_of_other_env(self, env: object, number: SymNode) -> Any:
        """`node_of` a number of another environment than the trace's."""
        before, self._tracer.shape_env = self._tracer.shape_env, env
        try:
            return self.node_of(number)
        finally:
            self._tracer.shape_env = before

    def _read(self, number: SymNode, source: SymbolSource) -> Node:
        target, arguments = source
        return self._make(target, arguments, number)

    def _make(self, target: object, arguments: tuple[object, ...], number: SymNode | None) -> Node:
        node = self._tracer.append_call(target, arguments, {})
        if number is not None:
            node.meta["val"] = number.symbolic
        return node

    def _compute(self, number: SymNode) -> Any:
        """The nodes of an expression: the fold of `Writer`, in which each part is the number of a node."""
        value = number.value
        if isinstance(value, Condition) and (found := self._find_condition(value, number)) is not None:
            return found
        before, self._number = self._number, number
        try:
            if type(value) is FloatExpr:
                return self.write_operation(value, value.operation, value.arguments)
            return value.write(self)
        finally:
            self._number = before

    def write(self, value: Operand | Writable) -> Any:
        """The node of a part of an expression."""
        if isinstance(value, (int, float)):
            return value
        kind = float if type(value) is FloatExpr else int if isinstance(value, Expr) else bool
        env = self._tracer.shape_env
        number = env.nodes.get((kind, value))
        if number is None:
            number = env.node(value, kind)
        found = self._nodes.get(number)
        return self.node_of(number) if found is None else found

    def write_symbol(self, symbol: Expr) -> Any:
        env = self._number.shape_env
        if symbol in env.definitions:
            return self.write(env.definitions[symbol])
        solved = self._solve(env, symbol)
        if solved is not None:
            return solved
        raise UntrackedValueError(
            f"the size {symbol} is neither an input of this graph nor computed in it: pass the "
            "tensor or the number that it belongs to as an input"
        )

    def _solve(self, env: Any, symbol: Expr) -> Any:
        """`s` where only `3*s` or `s + 2` can be read."""
        for number in self._sources:
            expression = number.value
            if not isinstance(expression, Expr) or expression.symbols != {symbol} or expression.kind != "sum":
                continue
            constant, factor, rest = 0, 0, False
            for monomial, coefficient in expression.terms:
                if not monomial:
                    constant = coefficient
                elif len(monomial) == 1 and monomial[0] == (symbol, 1):
                    factor = coefficient
                else:
                    rest = True
            if factor and not rest:
                node = self.node_of(number)
                if constant:
                    node = self._make(operator.sub, (node, constant), env.node(expression - constant, int))
                return (
                    self._make(operator.floordiv, (node, factor), env.node(symbol, int))
                    if factor != 1
                    else node
                )
        return None

    def write_operation(self, value: Writable, operation: str, operands: Sequence[Operand]) -> Any:
        number = self._number
        write = self.write
        parts = tuple([part if type(part) in PLAIN else write(part) for part in operands])
        if operation == "value":
            return parts[0]
        if operation == "to_float" and isinstance(parts[0], int):
            return float(parts[0])
        return self._make(OPERATIONS[operation], parts, number)

    def write_sum(self, terms: Sequence[Term]) -> Any:
        """Terms with symbols first, the constant last; negative terms are subtracted."""
        env = self._tracer.shape_env
        terms = sorted(terms, key=lambda term: (not term[0], term[1] < 0))
        total: Any = 0 if not terms else None
        so_far: Any = 0
        for monomial, coefficient in terms:
            term: Any = 1
            for atom, exponent in monomial:
                term = term * atom**exponent
            subtracts = total is not None and coefficient < 0
            part = self._product(monomial, -coefficient if subtracts else coefficient)
            so_far = so_far + coefficient * term
            if total is None:
                total = part
            else:
                join = operator.sub if subtracts else operator.add
                total = self._make(join, (total, part), env.node(so_far, int))
        return total

    def _product(self, monomial: Any, coefficient: int) -> Any:
        env = self._tracer.shape_env
        product: Any = None
        so_far: Any = 1
        for atom, exponent in monomial:
            for _ in range(exponent):
                factor = self.write(atom)
                so_far = so_far * atom
                product = (
                    factor
                    if product is None
                    else self._join(operator.mul, (product, factor), env.node(so_far, int))
                )
        if product is None:
            return coefficient
        if coefficient == 1:
            return product
        if coefficient == -1:
            return self._join(operator.neg, (product,), env.node(-so_far, int))
        return self._join(operator.mul, (product, coefficient), env.node(so_far * coefficient, int))

    def _join(self, target: Callable[..., object], parts: tuple[Node | int, ...], number: SymNode) -> object:
        found = self._nodes.get(number)
        if found is None:
            found = self._nodes[number] = self._make(target, parts, number)
        return found

    def _find_condition(self, condition: Condition, number: SymNode) -> object:
        """The node of a condition that is already in the graph, or the form in which the program asked it."""
        env = number.shape_env
        symbol = env.truths.get(condition)
        if symbol is not None and (known := self._nodes.get(env.node(symbol, int))) is not None:
            return self._make(operator.eq, (known, 1), number)
        opposite = conditions.negate(condition)
        if opposite in env.truths and (known := self._nodes.get(env.node(opposite, bool))) is not None:
            return self._make(torch.sym_not, (known,), number)
        asked = env.numbers.find_question(condition)
        if asked is None:
            return None
        relation, *sides = asked
        return self._write_comparison(relation, tuple(map(self.node_of, sides)), number)

    def write_comparison(self, relation: str, left: Any, right: Any) -> Any:
        return self._write_comparison(relation, (left, right), self._number)

    def _write_comparison(self, relation: str, sides: tuple[Node | int, ...], number: SymNode) -> Any:
        if any(isinstance(side, Node) for side in sides):
            return self._make(RELATIONS[relation], sides, number)
        return RELATIONS[relation](*sides)  # both sides are specialised

    def write_junction(self, kind: str, parts: Sequence[Writable]) -> object:
        number = self._number
        total = self.write(parts[0])
        for part in parts[1:]:
            total = self._make(
                operator.and_ if kind == "and" else operator.or_, (total, self.write(part)), None
            )
        total.meta["val"] = number.symbolic
        return total


# --- Symbolic numbers of torch's own shape environment in a graph -------------------------------------------
# A program may be traced inside torch's compiler, with torch's symbolic sizes as inputs. Torch decides on them, and
# records its own guards. Numbers that reach the graph are computed from the inputs, as with our symbols: each of
# torch's symbols has one of the same name in a separate environment.

PLACEHOLDER_HINT = 8
"""The hint of these symbols, on which nothing depends."""


def is_torch_number(symbolic: Any) -> bool:
    """Whether it is a symbolic number of torch's own with an expression; nested ints have none."""
    node: Any = symbolic.node
    return type(node) is not SymNode and hasattr(node, "expr") and hasattr(node.expr, "free_symbols")


class TorchSymbolNames:
    """Our symbols for those symbols of torch that a graph can read."""

    def __init__(self, nodes: SymbolNodes) -> None:
        self._nodes = nodes
        self._env = ShapeEnv(duck_shape=False, specialize_zero_one=False)

    def find_number(self, symbolic: Any) -> SymNode | None:
        """Our symbol for a number that is a single symbol; None for other expressions."""
        expression = symbolic.node.expr
        if not isinstance(symbolic, torch.SymInt) or not expression.is_Symbol:
            return None
        known = self._env.algebra.symbols.get(expression.name)
        if known is None:
            made = self._env.create_symint(PLACEHOLDER_HINT, expression.name)
            return made.node if isinstance(made, torch.SymInt) else None
        return self._env.node(known, int)

    def node_of(self, symbolic: Any) -> Node | None:
        """The node that computes a number; None if the graph can't compute it."""
        kind = {torch.SymInt: int, torch.SymBool: bool}.get(type(symbolic))
        if kind is None:
            return None
        try:
            value = self._env.from_sympy(symbolic.node.expr)
        except ValueError:  # a symbol without input, or an unsupported function
            return None
        found: Node | None = self._nodes.node_of_other_env(self._env, self._env.node(value, kind))
        return found
