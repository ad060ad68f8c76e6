"""Arithmetic and comparisons of nodes: integers by the algebra, floats by trees, truth values by conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Algebra, Expr
from understudy.shapes.algebra.floats import (
    INTEGER_RELATIONS,
    OPERATIONS,
    Combination,
    Comparison,
    FloatExpr,
    Number,
    Operand,
    Truth,
    as_fraction,
    as_integer_condition,
    bounds_of,
)
from understudy.shapes.algebra.polynomials import Integer
from understudy.shapes.algebra.writers import ATOM, LONGEST, TEXT
from understudy.shapes.node import Scalar, SymNode, adopt

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

Tree = TypeVar("Tree", FloatExpr, Comparison, Combination)
NUMBERS = (int, float)  # and bool, which is an int
LEAST = -(1 << 63)
MOST = (1 << 63) - 1
"""Sizes and numbers computed from them are 64-bit integers."""
BITWISE = frozenset({"and", "or", "xor"})
INTEGER: dict[str, Callable[[Algebra, Integer, Integer], Integer]] = {
    "add": Algebra.add, "sub": Algebra.sub, "mul": Algebra.mul, "floordiv": Algebra.floordiv, "mod": Algebra.mod,
    "pow": Algebra.pow, "min": Algebra.minimum, "max": Algebra.maximum,
}  # fmt: skip


FLAT = frozenset({"add", "sub"})
"""Operations whose results are sums again."""
HEAVIEST, DEEPEST = 2000, 50
"""Limits of the size and the nesting depth of integer expressions. A larger one becomes a new symbol that is defined by
the expression: a product of sums has as many terms as there are pairs of theirs."""


def _weight(number: Operand) -> int:
    return number.weight if isinstance(number, Expr) else 1


def _weight_of_product(left: Number, right: Number) -> int:
    """The size of an expanded product."""
    if not isinstance(left, Expr) or not isinstance(right, Expr):
        return 1
    return len(left.terms) * right.weight + len(right.terms) * left.weight


class NotMemoised(Exception):
    """Inside `limit_to_memo`, a result was needed that is not memoised."""


class Arithmetic:
    """The nodes of an environment, and arithmetic on them. `computed` has memoised results, which nodes look up first."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self.algebra, self.facts, self.hints = env.algebra, env.facts, env.hints
        self.nodes, self.computed = env.nodes, env.computed
        self.definitions, self.choices, self.truths = env.definitions, env.choices, env.truths
        self.is_limited_to_memory = False
        """Whether only memoised results may be used."""
        self._trees: dict[tuple[object, ...], Any] = {}

    # --- nodes ---------------------------------------------------------------------------------------------

    def node(self, value: Operand, kind: type) -> SymNode:
        key = (kind, value)
        found = self.nodes.get(key)
        if found is None:
            found = self.nodes[key] = SymNode(self.env, value, kind)
            if kind is int and self.env.specialised_symbols and not found.is_plain:
                self.update_constant(found)
        return found

    def update_constant(self, node: SymNode) -> None:
        """Update `constant` of an integer node, which C++ reads: guards may have specialised it."""
        if not self.env.specialised_symbols.isdisjoint(node.value.symbols):
            number = self.facts.simplify(node.value)
            if isinstance(number, int):
                node.maybe_as_int = number.__index__

    def as_node(self, number: Scalar) -> SymNode:
        """The node of a plain number, or the node itself."""
        return self.node(number, type(number)) if isinstance(number, (int, float)) else number

    def make_float(self, operation: str, *arguments: Operand) -> FloatExpr:
        """The tree of an operation on these."""
        key = (FloatExpr, operation, arguments, *map(type, arguments))
        found: FloatExpr | None = self._trees.get(key)
        if found is None:
            found = self._trees[key] = FloatExpr(operation, arguments)
        return found

    def _intern(self, kind: Callable[..., Tree], *parts: Any) -> Tree:
        operands: tuple[Any, ...] = parts[-1] if type(parts[-1]) is tuple else parts
        # The types are part of the key: 1, 1.0 and True are different operands, but equal keys.
        key = (kind, *parts, *map(type, operands))
        found: Tree | None = self._trees.get(key)
        if found is None:
            found = self._trees[key] = kind(*parts)
        return found

    # --- for rules: numbers and nodes in, a number or a node out ---------------------------------------------

    def compute(self, operation: str, a: Scalar, b: Scalar) -> Any:
        if type(a) is float or type(b) is float:  # 2.0 and 2 are equal keys
            return self.apply(operation, self.as_node(a), self.as_node(b)).unwrap()
        key = (operation, a, b, "size")
        found = self.computed.get(key)
        if found is None:
            found = self.computed[key] = self.apply(operation, self.as_node(a), self.as_node(b)).unwrap()
        return found

    # --- for torch: nodes in, a node out -----------------------------------------------------------------------

    def apply(self, operation: str, a: SymNode, b: SymNode) -> SymNode:
        key = (operation, a, b)
        found = self.computed.get(key)
        if found is None:
            if self.is_limited_to_memory:
                raise NotMemoised
            found = self.computed[key] = self._apply(operation, a, b if type(b) is SymNode else adopt(b))
        return found

    def _apply(self, operation: str, a: SymNode, b: SymNode) -> SymNode:
        if operation in BITWISE:
            return self._apply_bitwise(operation, a, b)
        if a.kind is float or b.kind is float or operation == "truediv":
            left = self._to_number(a) if a.kind is bool else a.value
            right = self._to_number(b) if b.kind is bool else b.value
            if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
                return self.node(float(OPERATIONS[operation](left, right)), float)
            return self.node(self.make_float(operation, left, right), float)
        left, right = self._to_number(a), self._to_number(b)
        if operation == "mul" and _weight_of_product(left, right) > HEAVIEST:
            return self.define(self.make_float(operation, left, right))
        result = INTEGER[operation](self.algebra, left, right)
        if (
            operation not in FLAT
            and isinstance(result, Expr)
            and (result.weight > HEAVIEST or result.depth > DEEPEST)
        ):
            return self.define(self.make_float(operation, left, right))
        return self.node(result, int)

    def add_all(self, nodes: Sequence[SymNode]) -> SymNode:
        """The sum of integers in linear time; adding them one by one would be quadratic."""
        return self.node(self.algebra.add_all([self._to_number(node) for node in nodes]), int)

    def _apply_bitwise(self, operation: str, a: SymNode, b: SymNode) -> SymNode:
        if a.kind is bool and b.kind is bool:
            if operation == "xor":
                return self.join("or", self.join("and", a, b.sym_not()), self.join("and", a.sym_not(), b))
            return self.join(operation, a, b)
        left, right = self._to_number(a), self._to_number(b)
        if isinstance(left, int) and isinstance(right, int):
            return self.node(OPERATIONS[operation](left, right), int)
        return self.define(self.make_float(operation, left, right))

    def _to_number(self, node: SymNode) -> Any:
        """A truth value that takes part in arithmetic is 0 or 1."""
        value = node.value
        if node.kind is not bool:
            return value
        if isinstance(value, bool):
            return int(value)
        symbol = self.truths.get(value)
        return int(self.env.decisions.decide(value)) if symbol is None else symbol

    def negate(self, a: SymNode) -> SymNode:
        return (
            self.apply("sub", self.node(0, int), a) if a.kind is not float else self.apply_function("neg", a)
        )

    def take_absolute(self, a: SymNode) -> SymNode:
        if a.kind is float:
            return self.apply_function("abs", a)
        return self.node(self.algebra.absolute(self._to_number(a)), int)

    def apply_function(self, name: str, a: SymNode, *more: int) -> SymNode:
        """A function of floats."""
        value = self._to_number(a)
        if isinstance(value, NUMBERS):
            return self.node(float(OPERATIONS[name](value, *more)), float)
        return self.node(self.make_float(name, value, *more), float)

    def to_float(self, a: SymNode) -> SymNode:
        if a.kind is float:
            return a
        if a.kind is bool and not a.is_plain and a.value not in self.truths:
            return self.node(self.make_float("ite", a.value, 1.0, 0.0), float)
        value = self._to_number(a)
        return self.node(
            float(value) if isinstance(value, int) else self.make_float("to_float", value), float
        )

    def round_to_integer(self, operation: str, a: SymNode) -> SymNode:
        """A float back to an integer: exactly, where it is a quotient of sizes."""
        if a.kind is not float:
            return a if a.kind is int else self.node(self._to_number(a), int)
        if a.is_plain:
            return self.node(int(OPERATIONS[operation](a.value)), int)
        fraction = as_fraction(a.value)
        if fraction is not None and operation != "round":
            top, bottom = fraction
            if operation == "ceil":
                return self.node(self.algebra.neg(self.algebra.floordiv(self.algebra.neg(top), bottom)), int)
            if operation == "floor" or self.env.decisions.is_known(conditions.ge(top, 0)):
                return self.node(self.algebra.floordiv(top, bottom), int)
        return self.define(self.make_float(operation, a.value))

    def define(self, expression: FloatExpr) -> SymNode:
        """A new symbol that is defined by an expression, with the bounds of that expression."""
        key = ("opaque", expression)
        found = self.computed.get(key)
        if found is None:
            low, high = bounds_of(expression, self.facts.interval)
            symbol = self.algebra.symbol(
                self._name_number(expression),
                math.floor(low) if low > LEAST else LEAST,
                math.ceil(high) if high < -LEAST else None,
            )
            symbol.weight = sum(map(_weight, expression.arguments))
            self.definitions[symbol] = expression
            hint = self.env.decisions.get_hint(expression)
            if hint is not None:
                self.hints[symbol] = int(hint)
            found = self.computed[key] = self.node(symbol, int)
        return found

    def _name_number(self, expression: FloatExpr) -> str:
        """The text of the definition, in parentheses if necessary."""
        text = TEXT.write(expression).within(ATOM)
        is_free = len(text) < LONGEST and text not in self.algebra.symbols
        return text if is_free else f"⟨number {len(self.definitions)}⟩"

    def choose(self, condition: SymNode, then: SymNode, otherwise: SymNode) -> SymNode:
        """`then if condition else otherwise`, without deciding the condition."""
        known = self.env.decisions.find_truth(condition.value)
        if known is not None or then is otherwise:
            return otherwise if known is False else then
        if then.kind is bool:
            return self.join(
                "or", self.join("and", condition, then), self.join("and", condition.sym_not(), otherwise)
            )
        expression = self.make_float("ite", condition.value, then.value, otherwise.value)
        if then.kind is float or otherwise.kind is float:
            return self.node(expression, float)
        number = self.define(expression)
        self.choices[number.value] = expression
        return number

    # --- conditions ----------------------------------------------------------------------------------------

    def compare(self, relation: str, a: SymNode, b: SymNode) -> SymNode:
        key = (relation, a, b)
        found = self.computed.get(key)
        if found is None:
            if self.is_limited_to_memory:
                raise NotMemoised
            b = adopt(b)
            found = self.computed[key] = self.node(self.build_condition(relation, a, b), bool)
            if type(found.value) is Condition and bool not in (a.kind, b.kind):
                self.computed.setdefault(("as asked", found.value), (relation, a, b))
        return found

    def find_question(self, condition: Condition) -> tuple[str, SymNode, SymNode] | None:
        """The comparison from which a condition was first made, unless that contains symbols that cancelled."""
        asked: tuple[str, SymNode, SymNode] | None = self.computed.get(("as asked", condition))
        if asked is None:
            return None
        spoken_of: set[Expr] = set()
        for side in asked[1:]:
            spoken_of.update(getattr(side.value, "symbols", ()))
        return asked if spoken_of == condition.symbols else None

    def build_condition(self, relation: str, a: SymNode, b: SymNode) -> Truth:
        if a.kind is bool and b.kind is bool and relation in ("==", "!="):
            differ = self._apply_bitwise("xor", a, b)
            return (differ if relation == "!=" else differ.sym_not()).value
        left, right = self._to_number(a), self._to_number(b)
        if a.kind is not float and b.kind is not float:
            if type(right) is int and right >= MOST and relation in ("<=", ">"):
                return relation == "<="  # the end of an open slice in C++
            return INTEGER_RELATIONS[relation](left, right)
        if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
            return Comparison.RELATIONS[relation](left, right)
        integral = as_integer_condition(relation, left, right)
        return self._intern(Comparison, relation, left, right) if integral is None else integral

    def join(self, kind: str, *nodes: SymNode) -> SymNode:
        """The conjunction or disjunction of truth values."""
        values = [node.value for node in nodes]
        if all(isinstance(value, (bool, Condition)) for value in values):
            return self.node(conditions.join(kind, values), bool)
        absorbing = kind == "or"
        if absorbing in values:
            return self.node(absorbing, bool)
        parts = tuple(dict.fromkeys(value for value in values if not isinstance(value, bool)))
        return self.node(parts[0] if len(parts) == 1 else self._intern(Combination, kind, parts), bool)

    def negate_condition(self, condition: Truth) -> Truth:
        if isinstance(condition, (bool, Condition)):
            return conditions.negate(condition)
        return self.negate_float_condition(condition)

    def negate_float_condition(self, condition: Comparison | Combination) -> Comparison | Combination:
        if isinstance(condition, Comparison):
            opposite = condition.OPPOSITE[condition.relation]
            return self._intern(Comparison, opposite, condition.left, condition.right)
        opposite = "or" if condition.kind == "and" else "and"
        return self._intern(
            Combination, opposite, tuple(self.negate_condition(part) for part in condition.parts)
        )
