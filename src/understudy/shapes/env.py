"""ShapeEnv: the symbols of a run, and an append-only list of what was assumed about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from understudy.errors import Context, GuardOnDataDependentSymNode
from understudy.lines import user_line
from understudy.shapes import conditions
from understudy.shapes.conditions import Condition
from understudy.shapes.expr import Algebra, Expr
from understudy.shapes.facts import Facts, Proof
from understudy.shapes.floats import FloatCondition, FloatExpr, as_fraction
from understudy.shapes.guards import Birth, Guard, Inputs, InputSize
from understudy.shapes.node import SymNode, value_of
from understudy.shapes.torch_side import TorchSide

RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": conditions.eq, "!=": conditions.ne, "<": conditions.lt,
    "<=": conditions.le, ">": conditions.gt, ">=": conditions.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How an environment makes symbols.

    `duck_shape`: equal example sizes share a symbol. `specialize_zero_one`: sizes of 0 and 1 stay numbers.
    `allow_scalar_outputs`, `allow_dynamic_output_shape_ops`: data-dependent numbers and sizes become symbols.
    """

    allow_scalar_outputs: bool = True
    allow_dynamic_output_shape_ops: bool = True
    assume_static_by_default: bool = False
    specialize_zero_one: bool = True
    duck_shape: bool = True


class ShapeEnv(TorchSide):
    """Owns symbols and facts. Everything that it answers is true for all sizes that its guards admit."""

    def __init__(self, *, settings: Settings | None = None, **options: Any) -> None:
        self.settings = replace(settings or Settings(), **options)
        self.algebra = Algebra()
        self.facts = Facts(self.algebra)
        self.guards: list[Guard] = []
        self.runtime_asserts: list[Guard] = []
        self.inputs = Inputs()
        self.hints: dict[Expr, int] = {}
        self.births: dict[Expr, Birth] = {}
        self.definitions: dict[Expr, FloatExpr] = {}
        self.pending_fresh_unbacked_symbols: list[Expr] = []
        self._nodes: dict[Any, SymNode] = {}
        self._floats: dict[Any, FloatExpr] = {}
        self._memo: dict[Any, Any] = {}
        self._sympy: dict[Any, Any] = {}
        self._from_sympy: dict[Any, Any] = {}
        self._decided: dict[Any, bool] = {}
        self._by_example: dict[int, Expr] = {}
        self._by_name: dict[str, Expr] = {}
        self.specialisations: list[str] = []
        self._suppressed = 0
        self._ignoring_fresh = 0
        self._named = 0

    # --- symbols -------------------------------------------------------------------------------------------

    def create_symbol(
        self, example: int, source: Any = None, *, name: str | None = None, low: int | None = None,
        high: int | None = None, duck: bool | None = None, keep_dynamic: bool = False,
    ) -> Any:  # fmt: skip
        """A size that is `example` at hand: a node, or the number itself if it must not vary.

        A size of 0 or 1 stays a number, unless `specialize_zero_one` is off or `keep_dynamic` asks for a symbol.
        """
        if name is not None and name in self._by_name:
            return self._again(name, example, source)
        if self.settings.specialize_zero_one and example in (0, 1) and not keep_dynamic:
            self.specialisations.append(f"{source} = {example}    because 0 and 1 are not made symbols")
            return example
        shared = self.settings.duck_shape if duck is None else duck
        if shared and name is None and example in self._by_example:
            return self.node(self._by_example[example], int)
        least = low if low is not None else (2 if self.settings.specialize_zero_one and example >= 2 else 0)
        symbol = self.algebra.symbol(name or self._fresh_name("s"), least, high)
        self.hints[symbol] = example
        if name is not None:
            self._by_name[name] = symbol
        if shared and name is None:
            self._by_example[example] = symbol
        return self.node(symbol, int)

    def _again(self, name: str, example: int, source: Any) -> SymNode:
        """A dimension whose name was used before is the same size."""
        symbol = self._by_name[name]
        if self.hints[symbol] != example:
            raise ValueError(f"dimension {name!r} is {self.hints[symbol]} elsewhere, but {example} in {source}")
        return self.node(symbol, int)

    def add_input(self, name: str, tensor: Any, shape: Any, stride: Any) -> None:
        position = len(self.inputs.names)
        self.inputs.names.append(name)
        for what, sizes in (("size", shape), ("stride", stride)):
            for dim, size in enumerate(sizes):
                self.inputs.sizes.append(InputSize(name, position, dim, what, size))

    def create_unbacked_symint(self, source: Any = None, *, low: int | None = None, high: int | None = None,
                               what: str = "create_unbacked_symint") -> torch.SymInt:  # fmt: skip
        return self._unbacked("u", int, low, high, what)  # type: ignore[no-any-return]

    def create_unbacked_symfloat(self, source: Any = None, *, what: str = "create_unbacked_symfloat") -> torch.SymFloat:
        symbol = self._unbacked("zuf", int, None, None, what).node.value
        return self.node(self.float_expr("value", symbol), float).symbolic  # type: ignore[no-any-return]

    def create_unbacked_symbool(self, source: Any = None, *, what: str = "create_unbacked_symbool") -> torch.SymBool:
        symbol = self._unbacked("u", int, 0, 1, what).node.value
        return self.node(conditions.eq(symbol, 1), bool).symbolic  # type: ignore[no-any-return]

    def _unbacked(self, prefix: str, kind: type, low: int | None, high: int | None, what: str) -> Any:
        symbol = self.algebra.symbol(self._fresh_name(prefix), -(1 << 63) if low is None else low, high)
        self.births[symbol] = Birth(what, user_line())
        if not self._ignoring_fresh:
            self.pending_fresh_unbacked_symbols.append(symbol)
        return self.node(symbol, kind).symbolic

    def _fresh_name(self, prefix: str) -> str:
        self._named += 1
        return f"{prefix}{self._named - 1}"

    def is_unbacked(self, symbol: Expr) -> bool:
        return symbol in self.births

    # --- nodes ---------------------------------------------------------------------------------------------

    def node(self, value: Any, kind: type) -> SymNode:
        key = (kind, value)
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = SymNode(self, value, kind)
        return found

    def sized(self, value: Any) -> Any:
        """A number for specs: a plain int, or the node of an expression."""
        return value if type(value) is int else self.node(value, int)

    def float_expr(self, operation: str, *arguments: Any) -> Any:
        key = (operation, *arguments)
        found = self._floats.get(key)
        if found is None:
            found = self._floats[key] = FloatExpr(operation, arguments)
        return found

    # --- arithmetic ----------------------------------------------------------------------------------------

    def size(self, operation: str, a: Any, b: Any) -> Any:
        """Arithmetic on sizes, for rules: numbers and nodes in, a number or a node out."""
        key = (operation, a, b)
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self.sized(self._integer(operation, value_of(a), value_of(b)))
        return found

    def _integer(self, operation: str, a: Any, b: Any) -> Any:
        return getattr(self.algebra, _METHOD.get(operation, operation))(a, b)

    def arithmetic(self, operation: str, a: SymNode, b: SymNode) -> SymNode:
        key = (operation, a, b, "node")
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self._arithmetic(operation, a, b)
        return found

    def _arithmetic(self, operation: str, a: SymNode, b: SymNode) -> SymNode:
        if a.kind is float or b.kind is float:
            return self.node(self.float_expr(operation, a.value, b.value), float)
        return self.node(self._integer(operation, self._as_int(a.value), self._as_int(b.value)), int)

    def _as_int(self, value: Any) -> Any:
        """A truth value that takes part in arithmetic has to be decided."""
        if isinstance(value, bool) or not isinstance(value, (int, Expr)):
            return int(self.decide(value))
        return value

    def quotient(self, a: SymNode, b: SymNode) -> SymNode:
        return self.node(self.float_expr("truediv", a.value, b.value), float)

    def unary(self, operation: str, a: SymNode, *more: Any) -> SymNode:
        if a.kind is float:
            return self.node(self.float_expr(operation, a.value, *more), float)
        if operation == "neg":
            return self.node(self.algebra.neg(a.value), int)
        return self.node(self.algebra.absolute(a.value), int)

    def to_float(self, a: SymNode) -> SymNode:
        if a.kind is float:
            return a
        value = float(a.value) if a.is_constant() else self.float_expr("to_float", a.value)
        return self.node(value, float)

    def rounded(self, operation: str, a: SymNode) -> SymNode:
        """A float back to an integer: exactly, where it is a quotient of sizes."""
        if a.kind is not float:
            return a
        if a.is_constant():
            return self.node(int(getattr(math, operation)(a.value) if operation != "round" else round(a.value)), int)
        fraction = as_fraction(a.value)
        if fraction is not None and operation != "round":
            top, bottom = fraction
            if operation == "ceil":
                return self.node(self.algebra.neg(self.algebra.floordiv(self.algebra.neg(top), bottom)), int)
            if operation == "floor" or self.is_known(conditions.ge(top, 0)):
                return self.node(self.algebra.floordiv(top, bottom), int)
        return self._opaque(self.float_expr(operation, a.value))

    def _opaque(self, expression: FloatExpr) -> SymNode:
        """An integer of which nothing is known but how to compute it."""
        key = ("opaque", expression)
        if key not in self._memo:
            symbol = self.algebra.symbol(str(expression), -(1 << 63), None)
            self.definitions[symbol] = expression
            hint = self.hint_of(expression)
            if hint is not None:
                self.hints[symbol] = int(hint)
            self._memo[key] = self.node(symbol, int)
        return self._memo[key]  # type: ignore[no-any-return]

    def comparison(self, relation: str, a: SymNode, b: SymNode) -> SymNode:
        key = (relation, a, b, "node")
        found = self._memo.get(key)
        if found is None:
            found = self._memo[key] = self.node(self._condition(relation, a, b), bool)
        return found

    def _condition(self, relation: str, a: SymNode, b: SymNode) -> Any:
        if a.kind is float or b.kind is float:
            if a.is_constant() and b.is_constant():
                return FloatCondition.RELATIONS[relation](a.value, b.value)
            return FloatCondition(relation, a.value, b.value)
        return RELATIONS[relation](self._as_int(a.value), self._as_int(b.value))

    # --- decisions -----------------------------------------------------------------------------------------

    def compare(self, relation: str, a: Any, b: Any) -> bool:
        """Decide a comparison of sizes, for rules."""
        key = (relation, a, b)
        found = self._decided.get(key)
        if found is None:
            decided = self._decide_for_rule(RELATIONS[relation](value_of(a), value_of(b)))
            if self._suppressed:
                return decided
            found = self._decided[key] = decided
        return found

    def _decide_for_rule(self, condition: Any) -> bool:
        """As `decide`; but a size that only data knows is taken for an ordinary one: neither 0 nor 1, and fitting
        the others that it meets. What that takes for granted is checked when the program runs."""
        if isinstance(condition, bool) or self.hint_of(condition) is not None:
            return self.decide(condition)
        for question in (condition, condition.substitute(self._ordinary(condition.symbols))):
            proof = self.prove(question)
            if proof is not Proof.UNKNOWN:
                return proof is Proof.YES
        is_equality = isinstance(condition, Condition) and condition.kind == "eq"
        self.expect(condition if is_equality else negated(condition))
        return is_equality

    def _ordinary(self, symbols: frozenset[Expr]) -> dict[Expr, Expr]:
        """For each symbol without example that may be a size: one like it that is at least 2."""
        result = {}
        for symbol in symbols:
            low, high = self.facts.interval(symbol)
            if symbol in self.births and (low is None or low >= 0 or symbol.low == -(1 << 63)):
                key = ("ordinary", symbol)
                if key not in self._memo:
                    self._memo[key] = self.algebra.symbol(f"{symbol.name}≥2", 2, high)
                result[symbol] = self._memo[key]
        return result

    def decide(self, condition: Any, fallback: bool | None = None) -> bool:
        """True or False: by proof, else by the example (recorded as a guard), else the fallback, else an error."""
        if isinstance(condition, bool):
            return condition
        proof = self.prove(condition)
        if proof is not Proof.UNKNOWN:
            return proof is Proof.YES
        answer = self.hint_of(condition)
        if answer is None:
            if fallback is not None:
                return fallback
            raise self.undecidable(condition)
        self._assume(condition if answer else negated(condition))
        return bool(answer)

    def prove(self, condition: Any) -> Proof:
        if isinstance(condition, bool):
            return Proof.YES if condition else Proof.NO
        return self.facts.prove(condition) if isinstance(condition, Condition) else Proof.UNKNOWN

    def is_known(self, condition: Any) -> bool:
        return self.prove(condition) is Proof.YES

    def specialise(self, value: Any) -> Any:
        """The number that a symbolic value has to be from now on."""
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, Expr):
            value = self.facts.simplify(value)
            if isinstance(value, int):
                return value
        number = self.hint_of(value)
        if number is None:
            raise self.undecidable(value)
        if isinstance(value, Expr):
            self._assume(conditions.eq(value, number), is_specialisation=True)
        else:
            self._assume(FloatCondition("==", value, number), is_specialisation=True)
        return number

    def expect(self, condition: Any) -> bool:
        """`torch._check`: a decision if there is an example, else a fact to be checked when the program runs."""
        proof = self.prove(condition)
        if proof is not Proof.UNKNOWN:
            return proof is Proof.YES
        answer = self.hint_of(condition)
        if answer is not None:
            self._assume(condition if answer else negated(condition))
            return bool(answer)
        self.runtime_asserts.append(Guard(condition, user_line()))
        if isinstance(condition, Condition):
            self.facts.learn(condition)
        return True

    def _assume(self, condition: Any, is_specialisation: bool = False) -> None:
        if isinstance(condition, bool) or self._suppressed:
            return
        if isinstance(condition, Condition):
            self.facts.learn(condition)
        self.guards.append(Guard(condition, user_line(), is_specialisation))

    def undecidable(self, asked: Any) -> GuardOnDataDependentSymNode:
        unbacked = sorted((s for s in asked.symbols if s in self.births), key=lambda s: s.name)
        born = "; ".join(f"{symbol.name} was made by {self.births[symbol]}" for symbol in unbacked)
        is_condition = isinstance(asked, (Condition, FloatCondition))
        question = f"whether {asked}" if is_condition else f"the value of {asked}"
        paste = f"torch._check({asked})" if is_condition else f"torch._check({asked} == <number>)"
        return GuardOnDataDependentSymNode(
            f"the program needs to know {question}, and that depends on data: {born}",
            context=Context("a decision on sizes", str(asked), user_line(), f"say what holds before it is needed: {paste}"),
        )

    # --- values --------------------------------------------------------------------------------------------

    def hint_of(self, value: Any) -> Any:
        if isinstance(value, (int, float)):
            return value
        if any(symbol not in self.hints for symbol in value.symbols):
            return None
        return value.evaluate(self.hints)

    size_hint = hint_of

    def simplify(self, value: Any) -> Any:
        return self.facts.simplify(value) if isinstance(value, Expr) else value

    # --- switches ------------------------------------------------------------------------------------------

    @contextmanager
    def suppress_guards(self) -> Iterator[None]:
        """Decisions are made, and not recorded."""
        self._suppressed += 1
        try:
            yield
        finally:
            self._suppressed -= 1

    @contextmanager
    def ignore_fresh_unbacked_symbols(self) -> Iterator[None]:
        """Symbols born here are nobody's to bind."""
        self._ignoring_fresh += 1
        try:
            yield
        finally:
            self._ignoring_fresh -= 1


_METHOD = {"min": "minimum", "max": "maximum"}


def negated(condition: Any) -> Any:
    return condition.negated() if isinstance(condition, FloatCondition) else conditions.negated(condition)
