"""What an environment knows, as the tables that users of torch's read: keyed by sympy symbols, made when asked for."""

from __future__ import annotations

from typing import Any

from understudy import _torch
from understudy.shapes.checking import Checking, linear, origins
from understudy.shapes.conditions import Condition
from understudy.shapes.expr import Expr
from understudy.shapes.from_sympy import is_sympy, translated
from understudy.shapes.guards import Guard, InputSize
from understudy.shapes.node import value_of


class TorchTables(Checking):
    """Translation both ways, and the tables."""

    # --- sympy: torch's tools speak it; what was translated for them is remembered ------------------------------

    def to_sympy(self, value: Any) -> Any:
        found = self._sympy.get(value)
        if found is None:
            # why: sympy is slow, and only other tools want it
            from understudy.shapes.sympify_floats import to_sympy

            found = self._sympy[value] = to_sympy(value)
            self._from_sympy[found] = value
        return found

    def from_sympy(self, expression: Any) -> Any:
        """What a sympy expression stands for here; anything else as it is."""
        if isinstance(expression, (int, Expr)):
            return expression
        found = self._from_sympy.get(expression)
        if found is None:
            found = translated(self.algebra, expression) if is_sympy(expression) else expression
        return found

    def simplify(self, value: Any) -> Any:
        """The value with all that is known; a sympy expression for a sympy expression."""
        if is_sympy(value):
            return self.to_sympy(super().simplify(self.from_sympy(value)))
        return super().simplify(value)

    replace = simplify

    # --- settings ---------------------------------------------------------------------------------------------

    @property
    def allow_scalar_outputs(self) -> bool:
        return self.settings.allow_scalar_outputs

    @property
    def allow_dynamic_output_shape_ops(self) -> bool:
        return self.settings.allow_dynamic_output_shape_ops

    @property
    def assume_static_by_default(self) -> bool:
        return self.settings.assume_static_by_default

    @property
    def specialize_zero_one(self) -> bool:
        return self.settings.specialize_zero_one

    @property
    def duck_shape(self) -> bool:
        return self.settings.duck_shape

    @property
    def prefer_deferred_runtime_asserts_over_guards(self) -> bool:
        return self.settings.prefer_deferred_runtime_asserts_over_guards

    # --- symbols ----------------------------------------------------------------------------------------------

    def _symbols(self) -> list[Expr]:
        """The symbols that users see: neither those of the prover nor results that only have a name."""
        return [s for s in (*self.hints, *self.births) if s not in self.definitions]

    @property
    def backed_var_to_val(self) -> dict[Any, int]:
        """For each symbol with an example: the example."""
        return {
            self.to_sympy(symbol): self.hints[symbol] for symbol in self._symbols() if symbol in self.hints
        }

    var_to_val = backed_var_to_val

    @property
    def var_to_sources(self) -> dict[Any, list[InputSize]]:
        """For each symbol: where it stands in the inputs."""
        found: dict[Any, list[InputSize]] = {}
        for place in self.inputs.sizes:
            value = value_of(place.size)
            if isinstance(value, Expr) and value.is_symbol:
                found.setdefault(self.to_sympy(value), []).append(place)
        return found

    @property
    def var_to_range(self) -> dict[Any, Any]:
        """For each symbol: the values that it can have, with all that is known."""
        return {self.to_sympy(s): _torch.value_range(*self.facts.interval(s)) for s in self._symbols()}

    @property
    def replacements(self) -> dict[Any, Any]:
        """For each symbol that was merged or became a number: what it is."""
        simple = {symbol: super(TorchTables, self).simplify(symbol) for symbol in self._symbols()}
        return {self.to_sympy(s): self.to_sympy(other) for s, other in simple.items() if other is not s}

    def bind_symbols(self, placeholders: Any, *args: Any) -> dict[Any, int]:
        """What each symbol is for these inputs: in place of stand-ins, a graph's placeholders, or (None) the run's."""
        found = super().bind_symbols(placeholders, *args)
        return {self.to_sympy(symbol): number for symbol, number in found.items()}

    def _default_unspecified_value_range(self) -> Any:
        """Asked for by torch's passes, under this name."""
        return _torch.any_number()

    def bound_sympy(self, expression: Any, size_oblivious: bool = False) -> Any:
        """The least and the largest value of an expression, as torch's tools know ranges."""
        value = self.from_sympy(expression)
        low, high = self.facts.interval(value) if isinstance(value, (int, Expr)) else (None, None)
        return _torch.value_range(low, high)

    # --- guards -------------------------------------------------------------------------------------------------

    @property
    def deferred_runtime_asserts(self) -> dict[Any, list[Guard]]:
        """What is to be checked when the program runs, by the symbol that is known last (None: no data needed)."""
        found: dict[Any, list[Guard]] = {}
        for promise in self.runtime_asserts:
            symbols = {s for symbol in promise.condition.symbols for s in origins(symbol, self.definitions)}
            unbacked = sorted((s for s in symbols if s in self.births), key=lambda s: s.order)
            found.setdefault(self.to_sympy(unbacked[-1]) if unbacked else None, []).append(promise)
        return found

    def format_guards(self, verbose: bool = False) -> str:
        """The guards, one a line; `verbose`: with the lines of code that made them."""
        return "\n".join(f" - {guard if verbose else guard.text}" for guard in self.guards)

    def get_nontrivial_guards(self) -> list[Any]:
        """The guards that are more than a range or the value of one symbol, or that two symbols are one."""
        merged = [self._with_merged_symbols(guard.condition) for guard in self.guards]
        return [self.to_sympy(condition) for condition in merged if not is_trivial(condition)]

    def _with_merged_symbols(self, condition: Any) -> Any:
        if not isinstance(condition, Condition):
            return condition
        return condition.substitute({symbol: super(TorchTables, self).simplify(symbol) for symbol in condition.symbols})

    def guard_or_defer_runtime_assert(self, expression: Any, message: str = "", fx_node: Any = None) -> bool:
        """`torch._check` of a condition: a guard if there is an example, else a promise."""
        return self.expect(self.from_sympy(expression))

    def freeze(self) -> None:
        """From here on decisions are made, and not recorded."""
        self.frozen = True
        self._suppressed += 1


def is_trivial(condition: Any) -> bool:
    """Whether a condition is decided, or no more than a range or the value of one symbol."""
    if isinstance(condition, bool):
        return True
    return isinstance(condition, Condition) and not condition.parts and condition.kind != "ne" and linear(condition.expr)
