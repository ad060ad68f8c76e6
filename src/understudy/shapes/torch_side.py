"""What torch's shape functions ask of an environment, beyond what nodes answer themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.shapes import conditions
from understudy.shapes.facts import Proof

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv
    from understudy.shapes.node import SymNode


class TorchSide:
    """Mixed into `ShapeEnv`. Torch's functions speak sympy; what was translated for them is remembered both ways."""

    _sympy: dict[Any, Any]
    _from_sympy: dict[Any, Any]

    def to_sympy(self: ShapeEnv, value: Any) -> Any:
        found = self._sympy.get(value)
        if found is None:
            from understudy.shapes.sympify import to_sympy  # why: sympy is slow, and only other tools want it

            found = self._sympy[value] = to_sympy(value)
            self._from_sympy[found] = value
        return found

    def evaluate_sym_node(
        self: ShapeEnv, node: SymNode, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> Any:
        if node.kind is bool:
            return self.decide(node.value, fallback=False if size_oblivious else fallback_value)
        return self.specialise(node.value)

    def evaluate_expr(self: ShapeEnv, expression: Any, hint: Any = None, *args: Any, **kwargs: Any) -> Any:
        value = self._from_sympy.get(expression, expression)
        return self.decide(value) if isinstance(value, conditions.Condition) else self.specialise(value)

    def _maybe_evaluate_static(self: ShapeEnv, expression: Any, **ignored: Any) -> bool | None:
        value = self._from_sympy.get(expression)
        if value is None:
            return None
        proof = self.prove(value)
        return None if proof is Proof.UNKNOWN else proof is Proof.YES

    def guarding_hint_or_throw(self: ShapeEnv, expression: Any) -> Any:
        hint = self.hint_of(self._from_sympy.get(expression, expression))
        if hint is None:
            raise self.undecidable(self._from_sympy[expression])
        return hint

    def optimization_hint(self: ShapeEnv, expression: Any, fallback: int | None = None) -> Any:
        hint = self.hint_of(self._from_sympy.get(expression, expression))
        return fallback if hint is None else hint

    def is_unbacked_symint(self: ShapeEnv, symbol: Any) -> bool:
        return self._from_sympy.get(symbol, symbol) in self.births

    def _constrain_range_for_size(self: ShapeEnv, symbol: Any, min: int | None = None, max: int | None = None) -> None:
        size = self._from_sympy.get(symbol, symbol)
        self.expect(conditions.ge(size, 0 if min is None else min))
        if max is not None:
            self.expect(conditions.le(size, max))

    def _constrain_is_bounded(self: ShapeEnv, symbol: Any, upper: int) -> None:
        self.expect(conditions.le(self._from_sympy.get(symbol, symbol), upper))
