"""What torch's shape functions ask of an environment, beyond what nodes answer themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.shapes import conditions
from understudy.shapes.arithmetic import MOST
from understudy.shapes.expr import Expr
from understudy.shapes.floats import FloatExpr
from understudy.shapes.torch_tables import TorchTables

if TYPE_CHECKING:
    from understudy.shapes.node import SymNode

USUAL_SIZE = 8192
"""What torch takes for a size of which nothing is known, where the choice changes no result."""


class TorchSide(TorchTables):
    """The questions, in torch's words."""

    def evaluate_sym_node(
        self, node: SymNode, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> Any:
        if node.kind is bool:
            return self.decide(node.value, fallback=False if size_oblivious else fallback_value)
        return self.specialise(node.value)

    def evaluate_expr(self, expression: Any, hint: Any = None, *args: Any, **kwargs: Any) -> Any:
        value = self.from_sympy(expression)
        is_number = isinstance(value, (int, float, Expr, FloatExpr)) and not isinstance(value, bool)
        return self.specialise(value) if is_number else self.decide(value)

    def _maybe_evaluate_static(self, expression: Any, **ignored: Any) -> bool | None:
        value = self.from_sympy(expression)
        return None if isinstance(value, (Expr, FloatExpr)) else self.known_truth(value)

    def guarding_hint_or_throw(self, expression: Any) -> Any:
        value = self.from_sympy(expression)
        hint = self.hint_of(value)
        if hint is None:
            raise self.undecidable(value)
        return hint

    def optimization_hint(self, expression: Any, fallback: int | None = None) -> Any:
        """The example value; where only data tells, what comes out for a size like `fallback`, as far as it can be that."""
        value = self.from_sympy(expression)
        hint = self.hint_of(value)
        if hint is not None or not isinstance(value, Expr):
            return fallback if hint is None else hint
        return self._like(self.facts.simplify(value), USUAL_SIZE if fallback is None else fallback)

    def _like(self, value: Any, usual: int) -> int:
        if isinstance(value, int):
            return value
        found: dict[Expr, int] = {}
        for symbol in value.symbols:
            definition = self.definitions.get(symbol)
            if symbol in self.hints:
                found[symbol] = self.hints[symbol]
            elif definition is not None and all(inner is not symbol for inner in definition.symbols):
                inner = {s: self._like(self.facts.simplify(s), usual) for s in definition.symbols}
                found[symbol] = int(definition.evaluate(inner))
            else:
                low, high = self.facts.interval(symbol)
                found[symbol] = max(usual if high is None else min(usual, high), usual if low is None else low)
        return value.evaluate(found)

    def size_hint(self, expression: Any, fallback: int | None = None, *, allow_none: bool = False) -> Any:
        """As `optimization_hint`; `allow_none`: None where only data tells."""
        if allow_none:
            return self.hint_of(self.from_sympy(expression))
        return self.optimization_hint(expression, fallback)

    def has_guarding_hint(self, expression: Any) -> bool:
        return self.hint_of(self.from_sympy(expression)) is not None

    def freeze_runtime_asserts(self) -> None:
        """From here on nothing more is written down to be checked when the program runs."""
        self.runtime_asserts_frozen = True

    def constrain_symbol_range(self, symbol: Any, compiler_min: int, compiler_max: int) -> None:
        number = self.from_sympy(symbol)
        self.expect(conditions.ge(number, compiler_min))
        if compiler_max < MOST:
            self.expect(conditions.le(number, compiler_max))

    def is_unbacked_symint(self, symbol: Any) -> bool:
        return self.from_sympy(symbol) in self.births

    def _constrain_range_for_size(self, symbol: Any, min: int | None = None, max: int | None = None) -> None:
        size = self.from_sympy(symbol)
        self.expect(conditions.ge(size, 0 if min is None else min))
        if max is not None:
            self.expect(conditions.le(size, max))

    def _constrain_is_bounded(self, symbol: Any, upper: int) -> None:
        self.expect(conditions.le(self.from_sympy(symbol), upper))

    # --- one symbol for another: when a program is run again, its data-dependent numbers are the same numbers ----

    def rename_unbacked(self, new: Expr, old: Expr) -> None:
        """The symbol that a second run made is the one that the first run made."""
        if new is old:
            return
        self.unbacked_renamings[old] = new
        equal = conditions.eq(new, old)
        if not isinstance(equal, bool):
            self.facts.learn(equal)
        if new in self.pending_fresh_unbacked_symbols:
            self.pending_fresh_unbacked_symbols.remove(new)

    _rename_unbacked_to = rename_unbacked
