"""What an environment knows: the state that its parts share, and the decisions that they ask of each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from understudy.errors import GuardOnDataDependentSymNode
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Algebra, Expr
from understudy.shapes.algebra.facts import Facts
from understudy.shapes.algebra.floats import (
    INTEGER_RELATIONS,
    OPERATIONS,
    Combination,
    FloatCondition,
    FloatExpr,
    as_fraction,
    as_integer_condition,
    bounds_of,
    compared_by_bounds,
    evaluate,
)
from understudy.shapes.guards import Guard, InputSizes, Specialisation, SymbolOrigin
from understudy.shapes.node import SymNode


@dataclass(frozen=True)
class Settings:
    """How an environment makes symbols.

    `duck_shape`: equal example sizes share a symbol. `specialize_zero_one`: sizes of 0 and 1 stay numbers.
    `assume_static_by_default`: sizes stay numbers unless a context or a mark says otherwise.
    `allow_scalar_outputs`, `allow_dynamic_output_shape_ops`: data-dependent numbers and sizes become symbols.
    `prefer_deferred_runtime_asserts_over_guards`: what `torch._check` says of sizes with an example is promised as well.
    `trace_asserts` is torch's, and means nothing here: what is to be checked is in `runtime_asserts`.
    """

    allow_scalar_outputs: bool = True
    allow_dynamic_output_shape_ops: bool = True
    assume_static_by_default: bool = False
    specialize_zero_one: bool = True
    duck_shape: bool = True
    prefer_deferred_runtime_asserts_over_guards: bool = False
    trace_asserts: bool = False


class NotRemembered(Exception):
    """A question came up that was not answered before, where no new answers were wanted."""


class EnvState:
    """The base of `ShapeEnv`, below `Arithmetic`, `Checking` and `TorchSide`."""

    def __init__(
        self, *, settings: Settings | None = None, duck_shape: bool | None = None, should_record_events: Any = None,
        tracked_fakes: Any = None, co_fields: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        if duck_shape is not None:
            options["duck_shape"] = duck_shape
        self.settings = replace(settings or Settings(), **options)
        # For torch's own debugging, and kept for whoever gave them.
        self.should_record_events, self.tracked_fakes, self.co_fields = should_record_events, tracked_fakes, co_fields
        self.algebra = Algebra()
        self.hints: dict[Expr, int] = {}
        self.facts = Facts(self.algebra, self.hints)
        self.guards: list[Guard] = []
        self.runtime_asserts: list[Guard] = []
        self.specialisations: list[Specialisation] = []
        self.inputs = InputSizes()
        self.births: dict[Expr, SymbolOrigin] = {}
        self.definitions: dict[Expr, FloatExpr] = {}
        self.choices: dict[Expr, FloatExpr] = {}  # definitions of which it is open what they choose
        self.truths: dict[Condition, Expr] = {}
        self.float_facts: dict[Any, bool] = {}
        self.pending_fresh_unbacked_symbols: list[Expr] = []
        self.unbacked_renamings: dict[Expr, Expr] = {}
        self.computed: dict[tuple[Any, ...], Any] = {}
        self.nodes: dict[Any, SymNode] = {}
        self._floats: dict[Any, Any] = {}
        self._sympy: dict[Any, Any] = {}
        self._from_sympy: dict[Any, Any] = {}
        self._decided: dict[Any, bool] = {}
        self._failing: dict[Condition, bool] = {}
        self._ordinaries: dict[Expr, Expr] = {}
        self._by_example: dict[int, Expr] = {}
        self._by_name: dict[str, Expr] = {}
        self.unbacked_by_name: dict[str, SymNode] = {}
        self._specialised: set[Expr] = set()
        self.frozen = False
        self.runtime_asserts_frozen = False
        self._guards_are_errors = False
        self._suppressed = 0
        self._from_memory = False
        self._ignoring_fresh = 0
        self._named: dict[str, int] = {}

    # --- answered by ShapeEnv ----------------------------------------------------------------------------------

    def decide(self, condition: Any, fallback: bool | None = None) -> bool:
        raise NotImplementedError

    def specialise(self, value: Any) -> Any:
        raise NotImplementedError

    def expect(self, condition: Any, is_refused_else: bool = False) -> bool:
        raise NotImplementedError

    def undecidable(self, asked: Any) -> GuardOnDataDependentSymNode:
        raise NotImplementedError


# --- Arithmetic and comparisons of nodes: integers by the algebra, floats by trees, truth values by conditions ---

NUMBERS = (int, float)  # and bool, which is an int
LEAST = -(1 << 63)
MOST = (1 << 63) - 1
"""Sizes, and what is computed from them, are numbers of 64 bits."""
BITWISE = frozenset({"and", "or", "xor"})
INTEGER: dict[str, Callable[[Algebra, Any, Any], Any]] = {
    "add": Algebra.add, "sub": Algebra.sub, "mul": Algebra.mul, "floordiv": Algebra.floordiv, "mod": Algebra.mod,
    "pow": Algebra.pow, "min": Algebra.minimum, "max": Algebra.maximum,
}  # fmt: skip


FLAT = frozenset({"add", "sub"})
"""What makes a sum of sums."""
HEAVIEST, DEEPEST = 2000, 50
"""Up to how many symbols and operations, and how many inside of each other, an integer is written out. What would be
longer is taken for a number of which only is known how to compute it: a product of sums has as many terms as there are
pairs of theirs."""
LONGEST = 10_000
"""How long the name of such a number may be, which says how it is computed."""


def _weight(number: Any) -> int:
    return number.weight if isinstance(number, Expr) else 1


def _weight_of_product(left: Any, right: Any) -> int:
    """How long a product is with every term of one multiplied with every term of the other."""
    if not isinstance(left, Expr) or not isinstance(right, Expr):
        return 1
    return len(left.terms) * right.weight + len(right.terms) * left.weight


class Arithmetic(EnvState):
    """What was computed once is found in `computed`; nodes look there first themselves."""

    # --- nodes ---------------------------------------------------------------------------------------------

    def node(self, value: Any, kind: type) -> SymNode:
        key = (kind, value)
        found = self.nodes.get(key)
        if found is None:
            found = self.nodes[key] = SymNode(self, value, kind)  # type: ignore[arg-type]
            if self._specialised and kind is int and not found.is_plain:
                self.tell(found)
        return found

    def tell(self, node: SymNode) -> None:
        """C++ asks nodes of whole numbers whether they are plain after all: some have become so."""
        if not self._specialised.isdisjoint(node.value.symbols):
            number = self.facts.simplify(node.value)
            if isinstance(number, int):
                node.maybe_as_int = number.__index__

    def node_of(self, number: Any) -> SymNode:
        """The node of a plain number, of a symbolic one, or the node itself."""
        if type(number) is SymNode:
            return number
        if type(number) in (int, float, bool):
            return self.node(number, type(number))
        return number.node

    def float_expr(self, operation: str, *arguments: Any) -> FloatExpr:
        return self._interned(FloatExpr, operation, arguments)

    def _interned(self, kind: Any, *parts: Any) -> Any:
        # The types take part: 1, 1.0 and True are different operands, but equal keys.
        key = (kind, *parts, *(type(p) for part in parts for p in (part if type(part) is tuple else (part,))))
        found = self._floats.get(key)
        if found is None:
            found = self._floats[key] = kind(*parts)
        return found

    # --- for rules: numbers and nodes in, a number or a node out ---------------------------------------------

    def size(self, operation: str, a: Any, b: Any) -> Any:
        if type(a) is float or type(b) is float:  # 2.0 and 2 are equal keys
            return self._plain(self.arithmetic(operation, self.node_of(a), self.node_of(b)))
        key = (operation, a, b, "size")
        found = self.computed.get(key)
        if found is None:
            found = self.computed[key] = self._plain(self.arithmetic(operation, self.node_of(a), self.node_of(b)))
        return found

    @staticmethod
    def _plain(node: SymNode) -> Any:
        return node.value if node.is_plain else node

    # --- for torch: nodes in, a node out -----------------------------------------------------------------------

    def arithmetic(self, operation: str, a: SymNode, b: SymNode) -> SymNode:
        key = (operation, a, b)
        found = self.computed.get(key)
        if found is None:
            if self._from_memory:
                raise NotRemembered
            found = self.computed[key] = self._arithmetic(operation, a, b)
        return found

    def _arithmetic(self, operation: str, a: SymNode, b: SymNode) -> SymNode:
        if operation in BITWISE:
            return self._bitwise(operation, a, b)
        if a.kind is float or b.kind is float or operation == "truediv":
            left, right = self._as_number(a), self._as_number(b)
            if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
                return self.node(float(OPERATIONS[operation](left, right)), float)
            return self.node(self.float_expr(operation, left, right), float)
        left, right = self._as_number(a), self._as_number(b)
        if operation == "mul" and _weight_of_product(left, right) > HEAVIEST:
            return self.opaque(self.float_expr(operation, left, right))
        result = INTEGER[operation](self.algebra, left, right)
        if operation not in FLAT and isinstance(result, Expr) and (result.weight > HEAVIEST or result.depth > DEEPEST):
            return self.opaque(self.float_expr(operation, left, right))
        return self.node(result, int)

    def _bitwise(self, operation: str, a: SymNode, b: SymNode) -> SymNode:
        if a.kind is bool and b.kind is bool:
            if operation == "xor":
                return self.joined("or", self.joined("and", a, b.sym_not()), self.joined("and", a.sym_not(), b))
            return self.joined(operation, a, b)
        left, right = self._as_number(a), self._as_number(b)
        if isinstance(left, int) and isinstance(right, int):
            return self.node(OPERATIONS[operation](left, right), int)
        return self.opaque(self.float_expr(operation, left, right))

    def _as_number(self, node: SymNode) -> Any:
        """A truth value that takes part in arithmetic is 0 or 1."""
        value = node.value
        if node.kind is not bool:
            return value
        if isinstance(value, bool):
            return int(value)
        symbol = self.truths.get(value)
        return int(self.decide(value)) if symbol is None else symbol

    def negative(self, a: SymNode) -> SymNode:
        return self.arithmetic("sub", self.node(0, int), a) if a.kind is not float else self.function("neg", a)

    def absolute(self, a: SymNode) -> SymNode:
        if a.kind is float:
            return self.function("abs", a)
        return self.node(self.algebra.absolute(self._as_number(a)), int)

    def function(self, name: str, a: SymNode, *more: Any) -> SymNode:
        """A function of floats."""
        value = self._as_number(a)
        if isinstance(value, NUMBERS):
            return self.node(float(OPERATIONS[name](value, *more)), float)
        return self.node(self.float_expr(name, value, *more), float)

    def to_float(self, a: SymNode) -> SymNode:
        if a.kind is float:
            return a
        if a.kind is bool and not a.is_plain and a.value not in self.truths:
            return self.node(self.float_expr("ite", a.value, 1.0, 0.0), float)
        value = self._as_number(a)
        return self.node(float(value) if isinstance(value, int) else self.float_expr("to_float", value), float)

    def rounded(self, operation: str, a: SymNode) -> SymNode:
        """A float back to an integer: exactly, where it is a quotient of sizes."""
        if a.kind is not float:
            return a if a.kind is int else self.node(self._as_number(a), int)
        if a.is_plain:
            return self.node(int(OPERATIONS[operation](a.value)), int)
        fraction = as_fraction(a.value)
        if fraction is not None and operation != "round":
            top, bottom = fraction
            if operation == "ceil":
                return self.node(self.algebra.neg(self.algebra.floordiv(self.algebra.neg(top), bottom)), int)
            if operation == "floor" or self.is_known(conditions.ge(top, 0)):
                return self.node(self.algebra.floordiv(top, bottom), int)
        return self.opaque(self.float_expr(operation, a.value))

    def opaque(self, expression: FloatExpr) -> SymNode:
        """An integer of which nothing is known but how to compute it, and between which numbers it lies."""
        key = ("opaque", expression)
        found = self.computed.get(key)
        if found is None:
            low, high = bounds_of(expression, self.facts.interval)
            text = str(expression)
            symbol = self.algebra.symbol(
                text if len(text) < LONGEST else f"⟨number {len(self.definitions)}⟩",
                math.floor(low) if low > LEAST else LEAST,
                math.ceil(high) if high < -LEAST else None,
            )
            symbol.weight = sum(map(_weight, expression.arguments))
            self.definitions[symbol] = expression
            hint = self.hint_of(expression)
            if hint is not None:
                self.hints[symbol] = int(hint)
            found = self.computed[key] = self.node(symbol, int)
        return found

    def chosen(self, condition: SymNode, then: SymNode, otherwise: SymNode) -> SymNode:
        """`then if condition else otherwise`, without deciding what is open."""
        known = self.known_truth(condition.value)
        if known is not None or then is otherwise:
            return otherwise if known is False else then
        if then.kind is bool:
            return self.joined(
                "or", self.joined("and", condition, then), self.joined("and", condition.sym_not(), otherwise)
            )
        expression = self.float_expr("ite", condition.value, then.value, otherwise.value)
        if then.kind is float or otherwise.kind is float:
            return self.node(expression, float)
        number = self.opaque(expression)
        self.choices[number.value] = expression
        return number

    # --- conditions ----------------------------------------------------------------------------------------

    def comparison(self, relation: str, a: SymNode, b: SymNode) -> SymNode:
        key = (relation, a, b)
        found = self.computed.get(key)
        if found is None:
            if self._from_memory:
                raise NotRemembered
            found = self.computed[key] = self.node(self.condition(relation, a, b), bool)
            if type(found.value) is Condition and bool not in (a.kind, b.kind):
                self.computed.setdefault(("as asked", found.value), (relation, a, b))
        return found

    def as_asked(self, condition: Condition) -> tuple[str, SymNode, SymNode] | None:
        """The comparison that a condition was first asked as, unless it spoke of symbols that make no difference."""
        asked: tuple[str, SymNode, SymNode] | None = self.computed.get(("as asked", condition))
        if asked is None:
            return None
        spoken_of: set[Expr] = set()
        for side in asked[1:]:
            spoken_of.update(getattr(side.value, "symbols", ()))
        return asked if spoken_of == condition.symbols else None

    def condition(self, relation: str, a: SymNode, b: SymNode) -> Any:
        if a.kind is bool and b.kind is bool and relation in ("==", "!="):
            differ = self._bitwise("xor", a, b)
            return (differ if relation == "!=" else differ.sym_not()).value
        left, right = self._as_number(a), self._as_number(b)
        if a.kind is not float and b.kind is not float:
            if type(right) is int and right >= MOST and relation in ("<=", ">"):
                return relation == "<="  # how C++ writes a slice without end
            return INTEGER_RELATIONS[relation](left, right)
        if isinstance(left, NUMBERS) and isinstance(right, NUMBERS):
            return FloatCondition.RELATIONS[relation](left, right)
        integral = as_integer_condition(relation, left, right)
        return self._interned(FloatCondition, relation, left, right) if integral is None else integral

    def joined(self, kind: str, *nodes: SymNode) -> SymNode:
        """The conjunction or disjunction of truth values."""
        values = [node.value for node in nodes]
        if all(isinstance(value, (bool, Condition)) for value in values):
            return self.node(conditions.join(kind, values), bool)
        absorbing = kind == "or"
        if absorbing in values:
            return self.node(absorbing, bool)
        parts = tuple(dict.fromkeys(value for value in values if not isinstance(value, bool)))
        return self.node(parts[0] if len(parts) == 1 else self._interned(Combination, kind, parts), bool)

    def negated(self, condition: Any) -> Any:
        if isinstance(condition, (bool, Condition)):
            return conditions.negate(condition)
        if isinstance(condition, FloatCondition):
            opposite = condition.OPPOSITE[condition.relation]
            return self._interned(FloatCondition, opposite, condition.left, condition.right)
        opposite = "or" if condition.kind == "and" else "and"
        return self._interned(Combination, opposite, tuple(self.negated(part) for part in condition.parts))

    def known_truth(self, condition: Any) -> bool | None:
        """True or False if it is proved, else None."""
        if isinstance(condition, bool):
            return condition
        if self._from_memory:
            return self._remembered_truth(condition)
        if isinstance(condition, Condition):
            return KNOWN[self.facts.prove(condition).name]
        if condition in self.float_facts:
            return self.float_facts[condition]
        if isinstance(condition, FloatCondition):
            sides = [bounds_of(side, self.facts.interval) for side in (condition.left, condition.right)]
            return compared_by_bounds(condition.relation, *sides)
        known = [self.known_truth(part) for part in condition.parts]
        decisive = condition.kind == "or"
        if decisive in known:
            return decisive
        return None if None in known else not decisive

    def settled(self, condition: Any) -> bool | None:
        """True or False if that was found before, and for good; else None."""
        if isinstance(condition, bool):
            return condition
        return KNOWN[self.facts.recall(condition).name] if isinstance(condition, Condition) else None

    def _remembered_truth(self, condition: Any) -> bool:
        found = self.settled(condition)
        if found is None:
            raise NotRemembered
        return found

    def is_known(self, condition: Any) -> bool:
        """Whether it is proved to hold. Asking records nothing."""
        if self.fails_at_hand(condition):
            return False  # a search for a proof would be in vain
        return self.known_truth(condition) is True

    def fails_at_hand(self, condition: Any) -> bool:
        """Whether the example is one of the sizes for which a condition on sizes does not hold."""
        if not isinstance(condition, Condition):
            return False
        found = self._failing.get(condition)
        if found is None:
            try:
                hint = self.hint_of(condition)
            except ArithmeticError:  # it can't be computed at the example's sizes
                hint = True
            if hint is None:
                return False
            found = self._failing[condition] = not hint
        return found

    # --- examples ------------------------------------------------------------------------------------------

    def hint_of(self, value: Any) -> Any:
        """The value at the example's sizes, None if it depends on a symbol without example."""
        if isinstance(value, NUMBERS):
            return value
        if any(symbol not in self.hints for symbol in value.symbols):
            return None
        return evaluate(value, self.hints)

    def simplify(self, expr: Any) -> Any:
        if isinstance(expr, Expr):
            return self.facts.simplify(expr)
        if isinstance(expr, FloatExpr) and expr.operation != "value":
            known = {symbol: self.facts.simplify(symbol) for symbol in expr.symbols}
            if all(isinstance(number, int) for number in known.values()):
                return float(expr.evaluate(known))
        return expr


KNOWN: dict[str, bool | None] = {"YES": True, "NO": False, "UNKNOWN": None}
