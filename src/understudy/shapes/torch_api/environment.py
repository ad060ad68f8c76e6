"""The attributes and methods of torch's own environments: tables keyed by sympy symbols, made on access."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.errors import ConstraintViolationError
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import AnyCondition, FloatExpr, Operand, Truth
from understudy.shapes.algebra.polynomials import Integer
from understudy.shapes.arithmetic import MOST
from understudy.shapes.checking import (
    ADVICE,
    MATHEMATICS,
    describe_inputs,
    is_linear,
    list_placeholders,
    list_violations,
    origins,
)
from understudy.shapes.guards import Guard, InputSize, InputSizes, Specialisation
from understudy.shapes.node import SymNode, adopt, value_of
from understudy.shapes.sympy_reader import from_sympy, is_sympy
from understudy.shapes.torch_api.guard_texts import GuardText, write_guards

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

WORDS = {
    **MATHEMATICS, "math": math, "FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod,
    "Max": torch.sym_max, "Min": torch.sym_min,
}  # fmt: skip
"""Names that the text of an expression may use, ours or sympy's."""


@dataclass(frozen=True)
class GuardWriters:
    """Guards in one language."""

    exprs: list[str]


class AssertsOfSymbol(list[Any]):
    """The runtime asserts of one symbol. One that is appended is added to the environment."""

    def __init__(self, facade: TorchFacade, found: Iterable[Any]) -> None:
        super().__init__(found)
        self._facade = facade

    def append(self, added: Any) -> None:
        self._facade.add_runtime_assert(added)
        super().append(added)

    def extend(self, added: Iterable[Any]) -> None:
        for one in added:
            self.append(one)


class RuntimeAsserts(dict[Any, AssertsOfSymbol]):
    """The runtime asserts of an environment by symbol; torch's tools add to them in place."""

    def __init__(self, facade: TorchFacade, found: Mapping[Any, Iterable[Guard]]) -> None:
        super().__init__({symbol: AssertsOfSymbol(facade, asserts) for symbol, asserts in found.items()})
        self._facade = facade

    def __setitem__(self, symbol: Any, asserts: Iterable[Any]) -> None:
        known = AssertsOfSymbol(self._facade, self.get(symbol, ()))
        known.extend(one for one in asserts if one not in known)
        super().__setitem__(symbol, known)

    def setdefault(self, symbol: Any, asserts: Any = ()) -> AssertsOfSymbol:
        if symbol not in self:
            self[symbol] = asserts
        return self[symbol]


USUAL_SIZE = 8192
"""Torch's default for unknown sizes, in choices that do not change results."""


class TorchFacade:
    """Attributes and methods under torch's names that `ShapeEnv` delegates, for torch's tools."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self.decisions, self.facts, self.hints = env.decisions, env.facts, env.hints
        self.unbacked, self.definitions = env.unbacked, env.definitions
        self._sympy: dict[Operand, Any] = {}
        self._from_sympy: dict[Any, Operand] = {}
        self._hint_overrides: dict[Any, int] = {}

    # --- sympy; conversions are memoised ------------------------------

    def to_sympy(self, value: Operand) -> Any:
        found = self._sympy.get(value)
        if found is None:
            # why: sympy is slow, and only other tools want it
            from understudy.shapes.sympy_writer import SympyWriter

            found = self._sympy[value] = SympyWriter(self.definitions).write(value)
            self._from_sympy[found] = value
        return found

    def from_sympy(self, expression: Any) -> Any:
        """A sympy expression in our terms; any other value unchanged."""
        if isinstance(expression, (int, Expr)):
            return expression
        found = self._from_sympy.get(expression)
        if found is None:
            found = from_sympy(self.env.numbers, expression) if is_sympy(expression) else expression
        return found

    def replace(self, value: Any) -> Any:
        """The value with symbols replaced that were merged or specialised; of a node, as an object of sympy."""
        if type(value) is SymNode:
            return self.to_sympy(self.decisions.simplify(value.value))
        if not is_sympy(value):
            return self.decisions.simplify(value)
        ours = [symbol for symbol in value.free_symbols if symbol.name in self.env.algebra.symbols]
        return value.xreplace(
            {symbol: self.to_sympy(self.decisions.simplify(self.from_sympy(symbol))) for symbol in ours}
        )

    def merge_symbols(self, value: Any) -> Any:
        """The value with specialised and merged symbols replaced."""
        if not isinstance(value, (Expr, Condition)):
            return self.decisions.simplify(value)
        known = {symbol: self.facts.simplify(symbol) for symbol in value.symbols}
        merged = {
            s: now for s, now in known.items() if now is not s and (isinstance(now, int) or now.is_symbol)
        }
        return value.substitute(merged) if merged else value

    # --- symbols ----------------------------------------------------------------------------------------------

    @property
    def backed_var_to_val(self) -> dict[Any, int]:
        """The hint of each backed symbol."""
        return {
            self.to_sympy(symbol): self.hints[symbol]
            for symbol in self.env.symbols.list_visible()
            if symbol in self.hints
        }

    var_to_val = backed_var_to_val

    @property
    def var_to_hint_override(self) -> dict[Any, int]:
        """The number that `optimization_hint` uses for a symbol, where the program has set one."""
        return self._hint_overrides

    @property
    def var_to_sources(self) -> dict[Any, list[InputSize]]:
        """The sources of each symbol in the inputs."""
        found: dict[Any, list[InputSize]] = {}
        for place in self.env.inputs.sizes:
            value = value_of(place.size)
            if isinstance(value, Expr) and value.is_symbol:
                found.setdefault(self.to_sympy(value), []).append(place)
        for places in found.values():
            places.sort(key=InputSize.is_ephemeral)
        return found

    @property
    def var_to_range(self) -> dict[Any, Any]:
        """The range of each symbol, by all facts."""
        return {
            self.to_sympy(s): _torch.value_range(*self.facts.interval(s))
            for s in self.env.symbols.list_visible()
        }

    @property
    def replacements(self) -> dict[Any, Any]:
        """The replacement of each symbol that was merged or specialised."""
        simple = {symbol: self.decisions.simplify(symbol) for symbol in self.env.symbols.list_visible()}
        return {self.to_sympy(s): self.to_sympy(other) for s, other in simple.items() if other is not s}

    @property
    def source_to_var(self) -> dict[str, Any]:
        """For each source in the inputs that is a single symbol: the symbol."""
        return {place.text: symbol for symbol, places in self.var_to_sources.items() for place in places}

    @property
    def val_to_var(self) -> dict[int, Any]:
        """For each example size of duck-shaped dimensions: the symbol."""
        return {example: self.to_sympy(symbol) for example, symbol in self.env.symbols.by_hint.items()}

    @property
    def size_like(self) -> set[Any]:
        """The unbacked symbols that are known to be sizes: at least 0."""
        least = {symbol: self.facts.interval(symbol)[0] for symbol in self.unbacked}
        return {
            self.to_sympy(symbol) for symbol, number in least.items() if number is not None and number >= 0
        }

    def bind_symbols(self, placeholders: object, *args: object) -> dict[Any, int]:
        """The value of each symbol for these inputs, which replace the placeholders, or (None) the inputs of the run."""
        found = self.env.checks.bind_symbols(placeholders, *args)
        return {self.to_sympy(symbol): number for symbol, number in found.items()}

    def _default_unspecified_value_range(self) -> Any:
        """Called by torch's passes."""
        return _torch.value_range(None, None)

    def bound_sympy(self, expr: object, size_oblivious: bool = False) -> Any:
        """The range of an expression, as an object of torch's class for ranges."""
        value = self.from_sympy(expr)
        low, high = self.facts.interval(value) if isinstance(value, (int, Expr)) else (None, None)
        return _torch.value_range(low, high)

    # --- guards -------------------------------------------------------------------------------------------------

    @property
    def deferred_runtime_asserts(self) -> RuntimeAsserts:
        """The runtime asserts, by the last of their unbacked symbols (None: no unbacked symbol)."""
        found: dict[Any, list[Guard]] = {}
        for promise in self.env.runtime_asserts:
            symbols = {s for symbol in promise.condition.symbols for s in origins(symbol, self.definitions)}
            unbacked = sorted((s for s in symbols if s in self.unbacked), key=lambda s: s.order)
            found.setdefault(self.to_sympy(unbacked[-1]) if unbacked else None, []).append(promise)
        return RuntimeAsserts(self, found)

    def add_runtime_assert(self, found: Any) -> None:
        """A runtime assert that one of torch's tools adds, with an expression of sympy. Nothing is concluded from it."""
        self.decisions.record_assert(self.from_sympy(found.expr))

    def produce_guards(
        self,
        placeholders: object = None,
        sources: Any = None,
        *args: object,
        input_contexts: Any = None,
        **options: Any,
    ) -> list[str]:
        """The guards as Python expressions: of these inputs in torch's notation, or (None) of the inputs of the run. With
        the contexts of the inputs, raises if the run violates their constraints."""
        found = self._write_guards(placeholders, sources, **options)
        if input_contexts:
            inputs = self._choose_inputs(placeholders, sources)
            broken = list_violations(self.env, inputs, input_contexts)
            if broken:
                lines = "\n  ".join(
                    ["the run violates constraints on its inputs:", *broken, f"to do: {ADVICE}"]
                )
                raise ConstraintViolationError(lines)
        return [guard.code for guard in found]

    def produce_guards_verbose(
        self, placeholders: object = None, sources: Any = None, *args: object,
        langs: Sequence[str] = ("python", "verbose_python"), **options: Any,
    ) -> list[GuardWriters]:  # fmt: skip
        """The same for each of the languages; the verbose one has the lines that made the guards as comments."""
        found = self._write_guards(placeholders, sources, **options)
        commented = [f"{guard.code}  # {guard.line}" if guard.line else guard.code for guard in found]
        plain = [guard.code for guard in found]
        return [GuardWriters(commented if lang == "verbose_python" else plain) for lang in langs]

    def _write_guards(
        self, placeholders: object, sources: Any, *, ignore_static: bool | None = None, _simplified: bool = False,
        **ignored: object,
    ) -> list[GuardText]:  # fmt: skip
        if placeholders is not None and sources is not None:
            return write_guards(
                self.env, list_placeholders(placeholders), sources,
                ignore_static=ignore_static is not False, simplified=_simplified,
            )  # fmt: skip
        ignore_static = bool(ignore_static)
        required = self.env.checks.choose_requirements(
            self._choose_inputs(placeholders, None), ignore_static=ignore_static, _simplified=_simplified
        )
        texts = self.env.checks.produce_guards(
            placeholders, ignore_static=ignore_static, _simplified=_simplified
        )
        return [GuardText(text, r.why) for text, r in zip(texts, required, strict=True)]

    def _choose_inputs(self, placeholders: object, sources: Sequence[object] | None) -> InputSizes:
        return (
            self.env.inputs
            if placeholders is None
            else describe_inputs(list_placeholders(placeholders), sources)
        )

    def get_pruned_guards(self, symints: Sequence[object]) -> list[Guard]:
        """The guards whose symbols are all in these numbers."""
        symbols = {s for number in symints for s in getattr(self.from_sympy(value_of(number)), "symbols", ())}
        return [guard for guard in self.env.guards if guard.condition.symbols <= symbols]

    def format_guards(self, verbose: bool = False) -> str:
        """The guards, one in each line; `verbose`: with the lines of code that made them."""
        return "\n".join(f" - {guard if verbose else guard.text}" for guard in self.env.guards)

    def get_nontrivial_guards(self) -> list[Any]:
        """The guards that are not just a range or the value of one symbol, or the equality of two symbols."""
        merged = [self._replace_known(guard.condition) for guard in self.env.guards]
        return [self.to_sympy(condition) for condition in merged if not is_trivial(condition)]

    def _replace_known(self, condition: AnyCondition) -> Truth:
        if not isinstance(condition, Condition):
            return condition
        return condition.substitute({symbol: self.facts.simplify(symbol) for symbol in condition.symbols})

    def guard_or_defer_runtime_assert(
        self, expression: object, message: str = "", fx_node: object = None
    ) -> bool:
        """`torch._check` of a condition: a guard if there are hints, else a promise."""
        return self.decisions.expect(self.from_sympy(expression))

    def freeze(self) -> None:
        """From now on, decisions are made without recording guards."""
        self.env.frozen = True

    def evaluate_symexpr(self, code: str) -> Any:
        """The value of an expression for the hints: `env.evaluate_symexpr("n // 2")`."""
        examples = {str(symbol): number for symbol, number in self.backed_var_to_val.items()}
        return eval(code, dict(WORDS), examples)

    def deserialize_symexpr(self, code: str) -> Any:
        """The same as a symbolic number."""
        symbols = {str(s): self.env.node(self.from_sympy(s), int).symbolic for s in self.backed_var_to_val}
        return eval(code, dict(WORDS), symbols)

    @property
    def num_deferred_runtime_asserts(self) -> int:
        """The number of runtime asserts. Torch's tools set it after they have added one: it is counted already."""
        return len(self.env.runtime_asserts)

    @num_deferred_runtime_asserts.setter
    def num_deferred_runtime_asserts(self, count: int) -> None:
        if count < len(self.env.runtime_asserts):
            raise AttributeError(
                f"expected at least {len(self.env.runtime_asserts)} runtime asserts, got {count}; a ShapeEnv keeps all"
            )

    def _update_version_counter(self) -> None:
        """Called by torch's tools after a change. No answer is cached here that a runtime assert could change."""

    @property
    def specializations(self) -> list[Specialisation]:
        """The other spelling."""
        return self.env.specialisations

    # --- called by nodes of torch's own class, which a program has made of symbols of this environment --------

    _translation_validation_enabled = False

    @property
    def _replacements_version_counter(self) -> int:
        """Changes with the facts of the environment. Never 0: torch's nodes would not ask for the sympy expression of
        a symbol."""
        return 1 + len(self.env.guards) + len(self.env.runtime_asserts) + len(self.env.unbacked_renamings)

    def _create_fx_call_function(self, op: object, args: object) -> tuple[None, bool]:
        """Nothing is validated by a solver, for which operations would be nodes of a graph."""
        return None, False

    def _simplify_floor_div(self, expression: object) -> object:
        return expression

    # --- called by torch's shape functions ---------------------------------------------------------------------

    def evaluate_sym_node(
        self, sym_node: SymNode, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> Any:
        node = adopt(sym_node)
        if node.kind is bool:
            return self.decisions.decide(node.value, fallback=False if size_oblivious else fallback_value)
        return self.decisions.specialise(node.value)

    def evaluate_expr(self, orig_expr: object, hint: object = None, *args: object, **kwargs: object) -> Any:
        value = self.from_sympy(orig_expr)
        is_number = isinstance(value, (int, float, Expr, FloatExpr)) and not isinstance(value, bool)
        return self.decisions.specialise(value) if is_number else self.decisions.decide(value)

    def _maybe_evaluate_static(
        self, expression: object, *, compute_hint: bool = False, **ignored: object
    ) -> Any:
        value = self.from_sympy(expression)
        if compute_hint:
            return self.decisions.get_hint(value)
        return None if isinstance(value, (Expr, FloatExpr)) else self.decisions.find_truth(value)

    def guarding_hint_or_throw(self, expr: object) -> Any:
        value = self.from_sympy(expr)
        hint = self.decisions.get_hint(value)
        if hint is None:
            raise self.decisions.make_error(value)
        return hint

    def optimization_hint(self, expr: object, fallback: int | None = None) -> Any:
        """The value for the hints; for unbacked symbols, the value for sizes of `fallback`, within their ranges."""
        value = self.from_sympy(expr)
        hint = None if self._hint_overrides else self.decisions.get_hint(value)
        if hint is not None or not isinstance(value, Expr):
            return fallback if hint is None else hint
        return self._evaluate_like(self.facts.simplify(value), USUAL_SIZE if fallback is None else fallback)

    def _evaluate_like(self, value: Integer, usual: int) -> int:
        if isinstance(value, int):
            return value
        found: dict[Expr, int] = {}
        for symbol in value.symbols:
            definition = self.definitions.get(symbol)
            if self._hint_overrides and self.to_sympy(symbol) in self._hint_overrides:
                found[symbol] = self._hint_overrides[self.to_sympy(symbol)]
            elif symbol in self.hints:
                found[symbol] = self.hints[symbol]
            elif definition is not None and all(inner is not symbol for inner in definition.symbols):
                inner = {s: self._evaluate_like(self.facts.simplify(s), usual) for s in definition.symbols}
                found[symbol] = int(definition.evaluate(inner))
            else:
                low, high = self.facts.interval(symbol)
                found[symbol] = max(
                    usual if high is None else min(usual, high), usual if low is None else low
                )
        return value.evaluate(found)

    def cleanup(self) -> None:
        """Called when `torch._guards.tracing(TracingContext(mode))` ends: torch breaks its own cycles, we have none."""

    def size_hint(self, expr: object, fallback: int | None = None, *, allow_none: bool = False) -> Any:
        """The value for the hints. For unbacked symbols: None with `allow_none`, else the one for the fallback, else an
        error."""
        if allow_none:
            return self.decisions.get_hint(self.from_sympy(expr))
        return (
            self.guarding_hint_or_throw(expr) if fallback is None else self.optimization_hint(expr, fallback)
        )

    def has_guarding_hint(self, expression: object) -> bool:
        return self.decisions.get_hint(self.from_sympy(expression)) is not None

    def freeze_runtime_asserts(self) -> None:
        """From now on, no runtime asserts are recorded."""
        self.env.runtime_asserts_frozen = True

    def constrain_symbol_range(self, symbol: object, compiler_min: int, compiler_max: int) -> None:
        number = self.from_sympy(symbol)
        self.decisions.expect(conditions.ge(number, compiler_min))
        if compiler_max < MOST:
            self.decisions.expect(conditions.le(number, compiler_max))

    def is_unbacked_symint(self, symbol: object) -> bool:
        return self.from_sympy(symbol) in self.unbacked

    def _constrain_range_for_size(
        self, symbol: object, min: int | None = None, max: int | None = None
    ) -> None:
        size = self.from_sympy(symbol)
        self.decisions.expect(conditions.ge(size, 0 if min is None else min))
        if max is not None:
            self.decisions.expect(conditions.le(size, max))

    def _constrain_is_bounded(self, symbol: object, upper: int) -> None:
        self.decisions.expect(conditions.le(self.from_sympy(symbol), upper))

    def _rename_unbacked_to(self, new: Expr, old: Expr) -> None:
        self.env.symbols.rename_unbacked(new, old)


def is_trivial(condition: object) -> bool:
    """Whether a condition is decided, or just a range or the value of one symbol."""
    if isinstance(condition, bool):
        return True
    return (
        isinstance(condition, Condition)
        and not condition.parts
        and condition.kind != "ne"
        and is_linear(condition.expr)
    )
