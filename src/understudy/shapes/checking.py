"""Whether other inputs meet what a run assumed: as a list of what they break, and as the source of a function."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from understudy.errors import SymbolMismatch
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import FUNCTIONS, OPERATIONS
from understudy.shapes.arithmetic import Arithmetic
from understudy.shapes.guards import Guard, InputSize, InputSizes, because
from understudy.shapes.input_dims import range_of
from understudy.shapes.node import value_of

MATHEMATICS = {name: OPERATIONS[name] for name in ("floor", "ceil", "trunc", *FUNCTIONS)}
NOT_ONE = "a size of 0 or 1 is no example of it: specialize_zero_one"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One thing that inputs must be for the recorded answers to hold."""

    text: str  # in the names of the symbols
    why: str
    inputs: tuple[str, ...]
    is_static: bool
    holds: Callable[[Mapping[Expr, int], Sequence[Any]], bool]
    place: InputSize | None = None
    """The number of an input that the text begins with, if it does."""

    def __str__(self) -> str:
        return because(self.text, self.why)

    def as_code(self, symbols: Mapping[str, str], arguments: Mapping[str, str]) -> str:
        """As Python reads it, where symbols and inputs are called otherwise."""
        if "⟨" in self.text:
            raise ValueError("a guard is too long to be written as code: ask ShapeEnv.check")
        if self.place is None:
            return rename_symbols(self.text, symbols)
        asked = self.place.called(arguments.get(self.place.source, self.place.source))
        return asked + rename_symbols(self.text[len(self.place.text) :], symbols)


@dataclass(frozen=True, slots=True)
class BrokenGuard:
    """A requirement that inputs do not meet, with the sizes that they have."""

    requirement: Requirement
    found: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that it is about."""
        return self.requirement.inputs

    def __str__(self) -> str:
        return f"{self.requirement}\n    but {self.found}" if self.found else str(self.requirement)


@dataclass(frozen=True)
class SymbolBindings:
    """Where each symbol is read off the inputs."""

    places: dict[Expr, tuple[InputSize, Expr]]

    def values(self, inputs: Sequence[Any], definitions: Mapping[Expr, Any]) -> dict[Expr, int]:
        values = {symbol: solve(expr, place.of(inputs)) for symbol, (place, expr) in self.places.items()}
        for symbol, expression in definitions.items():
            if expression.symbols <= values.keys():
                # What can't be computed has no value, and meets no guard.
                with suppress(ArithmeticError, ValueError, TypeError):
                    values[symbol] = int(expression.evaluate(values))
        return values

    def sources(self, symbols: frozenset[Expr], definitions: Mapping[Expr, Any]) -> list[InputSize]:
        plain = {s for symbol in symbols for s in origins(symbol, definitions)}
        return [place for symbol, (place, _) in self.places.items() if symbol in plain]


def origins(symbol: Expr, definitions: Mapping[Expr, Any]) -> Iterator[Expr]:
    """The symbols that a symbol is computed from, each once; itself, unless it is defined by others."""
    waiting, seen = [symbol], {symbol}
    while waiting:
        symbol = waiting.pop()
        if symbol not in definitions:
            yield symbol
            continue
        new = [part for part in definitions[symbol].symbols if part not in seen]
        seen.update(new)
        waiting += new


def linear(expr: Any) -> bool:
    """Whether it is one symbol, times and plus numbers."""
    return isinstance(expr, Expr) and len(expr.symbols) == 1 and all(
        not monomial or (len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0].is_symbol)
        for monomial, _ in expr.terms
    )  # fmt: skip


def solve(expr: Expr, number: int) -> int:
    """The value of the only symbol with which the expression is this number, or about it if there is none."""
    (symbol,) = expr.symbols
    start = expr.evaluate({symbol: 0})
    return (number - start) // (expr.evaluate({symbol: 1}) - start)


class Checking(Arithmetic):
    """Whether other inputs meet what was assumed."""

    # --- what is required ----------------------------------------------------------------------------------------

    def requirements(self, inputs: InputSizes | None = None) -> list[Requirement]:
        """All that inputs must be: their static sizes, the ranges of the symbols, the guards."""
        inputs = self.inputs if inputs is None else inputs
        bindings = bindings_of(inputs)
        return [*_of_inputs(inputs, bindings), *_of_ranges(bindings), *self._of_guards(bindings)]

    def _of_guards(self, bindings: SymbolBindings) -> Iterator[Requirement]:
        for guard in (*self.guards, *self.runtime_asserts):  # promises are about inputs where they can be read off them
            plain = {s for symbol in guard.condition.symbols for s in origins(symbol, self.definitions)}
            if plain <= bindings.places.keys():
                about = bindings.sources(guard.condition.symbols, self.definitions)
                names = tuple(dict.fromkeys(place.source for place in about))

                def holds(values: Mapping[Expr, int], _: Any, guard: Guard = guard) -> bool:
                    return guard.holds(values)

                yield Requirement(guard.text, guard.line, names, False, holds)

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, *given: Any, **named: Any) -> list[BrokenGuard]:
        """What these inputs break, in the order of the run's or by name; nothing if its answers hold for them."""
        arguments = self._in_order(given, named)
        return self._broken(self.inputs, arguments)

    def _broken(self, inputs: InputSizes, given: Sequence[Any], static: bool = True) -> list[BrokenGuard]:
        wrong = [_wrong_rank(inputs, position, value) for position, value in enumerate(given)]
        if any(wrong):
            return [broken for broken in wrong if broken is not None]
        bindings = bindings_of(inputs)
        values = bindings.values(given, self.definitions)
        broken: list[BrokenGuard] = []
        for required in self.requirements(inputs):
            if (static or not required.is_static) and not required.holds(values, given):
                if ".stride(" in required.text and any(
                    required.inputs == other.inputs and ".size(" in other.requirement.text for other in broken
                ):
                    continue  # strides follow from sizes, and these are not the run's
                broken.append(BrokenGuard(required, self._found(required, inputs, bindings, values, given)))
        return broken

    def _found(
        self, required: Requirement, inputs: InputSizes, bindings: SymbolBindings, values: Mapping[Expr, int], given: Any
    ) -> str:
        asked = required.place
        text = required.text if asked is None else required.text[len(asked.text) :]
        shown = [
            f"{symbol.name} = {values[symbol]}" + (f" ({place.text})" if place.text != symbol.name else "")
            for symbol, (place, _) in bindings.places.items()
            if re.search(rf"\b{re.escape(symbol.name)}\b", text)
        ]
        return ", ".join(shown if asked is None else [f"{asked.text} = {asked.of(given)}", *shown])

    def _in_order(self, given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        names = self.inputs.names
        both = [*zip(names, given, strict=False), *named.items()]
        arguments = dict(both)
        unknown = sorted(set(arguments) - set(names))
        missing = [name for name in names if name not in arguments]
        if unknown or missing or len(given) > len(names) or len(both) > len(arguments):
            had = ", ".join(names) or "(none)"
            raise TypeError(f"the run had the inputs {had}: got {len(given)} and {sorted(named)}")
        return [arguments[name] for name in names]

    def evaluate_guards(self, *given: Any, **named: Any) -> bool:
        """Whether the recorded answers hold for these inputs."""
        return not self.check(*given, **named)

    def evaluate_guards_for_args(
        self, placeholders: Sequence[Any], args: Sequence[Any], *, ignore_static: bool = True
    ) -> bool:
        """The same for stand-ins and what takes their place, input by input."""
        return not self._broken(inputs_of(placeholders), list(args), static=not ignore_static)

    def bind_symbols(self, placeholders: Any, *args: Any) -> dict[Expr, int]:
        """What each symbol is for these inputs: in place of stand-ins, a graph's placeholders, or (None) the run's."""
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = tuple(args[0])
        inputs = self.inputs if placeholders is None else inputs_of(placeholders_of(placeholders))
        if len(args) != len(inputs.names):
            raise TypeError(f"{len(inputs.names)} inputs are expected, got {len(args)}")
        found = bindings_of(inputs).values(args, {})
        for place in inputs.sizes:
            value = value_of(place.size)
            if isinstance(value, Expr) and value.symbols <= found.keys() and value.evaluate(found) != place.of(args):
                expected, given = value.evaluate(found), place.of(args)
                raise SymbolMismatch(f"{place.text} is {given}, where {value} is {expected}: {expected} != {given}")
        return found

    # --- as text and as code ---------------------------------------------------------------------------------------

    def produce_guards(
        self, placeholders: Any = None, sources: Sequence[Any] | None = None, *, ignore_static: bool = False,
        _simplified: bool = False, **ignored: Any,
    ) -> list[str]:  # fmt: skip
        """Every requirement as a Python expression in terms of the inputs: `x.size(0)*x.size(1) % 8 == 0`.

        `_simplified`: only what the program assumed, without what the inputs themselves say. What else torch's
        environments take here is about the ways in which these can be written: there is one.
        """
        inputs = self.inputs if placeholders is None else inputs_of(placeholders_of(placeholders), sources)
        bindings = bindings_of(inputs)
        names = names_as_code(bindings)
        required = self._of_guards(bindings) if _simplified else self.requirements(inputs)
        wanted = [r for r in required if not (ignore_static and r.is_static)]
        return [required.as_code(names, {}) for required in wanted]

    def produce_guards_expression(
        self, placeholders: Sequence[Any], *, guards: Any = None, ignore_static: bool = True
    ) -> str | None:
        """All of them as one expression in `args`, for `evaluate_guards_expression`; None if there are none."""
        names = [f"args[{position}]" for position in range(len(placeholders))]
        found = self.produce_guards(placeholders, names, ignore_static=ignore_static)
        return " and ".join(f"({guard})" for guard in found) or None

    def evaluate_guards_expression(self, code: str, args: Sequence[Any]) -> bool:
        """Whether the inputs meet such an expression; `L['t0']`, as torch writes the first of them, is understood, too."""
        return bool(eval(code, {**MATHEMATICS, "math": math, "args": args, "L": {f"t{i}": a for i, a in enumerate(args)}}))

    def check_source(self, name: str = "check") -> str:
        """The source of a function of the inputs that raises ValueError with the guards that they break."""
        return source_of_check(name, self.inputs, bindings_of(self.inputs), self.requirements())


def inputs_of(placeholders: Sequence[Any], sources: Sequence[Any] | None = None) -> InputSizes:
    """What stands in the metadata of stand-ins and symbolic numbers."""
    inputs = InputSizes()
    for position, placeholder in enumerate(placeholders):
        source = sources[position] if sources is not None else f"arg{position}"
        called = getattr(source, "name", source)
        name = str(called() if callable(called) else called)
        spec = getattr(placeholder, "_spec", None)
        if spec is not None:
            inputs.add(name, spec.shape, spec.stride, spec.offset)
        elif hasattr(placeholder, "stride"):
            inputs.add(name, tuple(placeholder.shape), placeholder.stride(), placeholder.storage_offset())
        else:
            inputs.add_number(name, placeholder)
    return inputs


def placeholders_of(graph_or_values: Any) -> Sequence[Any]:
    graph = getattr(graph_or_values, "graph", None)
    if graph is None:
        return graph_or_values if isinstance(graph_or_values, (list, tuple)) else [graph_or_values]
    return [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]


def bindings_of(inputs: InputSizes) -> SymbolBindings:
    """A symbol is read where it stands alone, else where it can be solved for."""
    places: dict[Expr, tuple[InputSize, Expr]] = {}
    sizes = [(place, value_of(place.size)) for place in inputs.sizes]
    for is_wanted in (lambda value: value.is_symbol, linear):
        for place, value in sizes:
            if isinstance(value, Expr) and is_wanted(value):
                places.setdefault(next(iter(value.symbols)), (place, value))
    return SymbolBindings(places)


def _of_inputs(inputs: InputSizes, bindings: SymbolBindings) -> Iterator[Requirement]:
    for place in inputs.sizes:
        value = value_of(place.size)
        if isinstance(value, Expr):
            if not value.symbols <= bindings.places.keys() or bindings.places.get(value, (None,))[0] is place:
                continue

            def equals(values: Mapping[Expr, int], given: Any, place: InputSize = place, value: Any = value) -> bool:
                return bool(place.of(given) == value.evaluate(values))

            yield Requirement(f"{place.text} == {value}", "", (place.source,), False, equals, place)
        elif isinstance(value, (int, float)):

            def is_number(_: Any, given: Any, place: InputSize = place, value: Any = value) -> bool:
                return bool(place.of(given) == value)

            yield Requirement(f"{place.text} == {value}", "", (place.source,), True, is_number, place)


def _of_ranges(bindings: SymbolBindings) -> Iterator[Requirement]:
    for symbol, (place, _) in bindings.places.items():
        low, high = symbol.low, symbol.high

        def is_within(values: Mapping[Expr, int], _: Any, s: Expr = symbol, least: Any = low, most: Any = None) -> bool:
            return (least is None or values[s] >= least) and (most is None or values[s] <= most)

        if low is not None and low > 0:
            why = NOT_ONE if low == 2 else "its range"
            yield Requirement(f"{symbol.name} >= {low}", why, (place.source,), False, is_within)
        if high is not None:
            at_most = partial(is_within, least=None, most=high)
            yield Requirement(f"{symbol.name} <= {high}", "its range", (place.source,), False, at_most)


def _wrong_rank(inputs: InputSizes, position: int, value: Any) -> BrokenGuard | None:
    rank, name = inputs.ranks[position], inputs.names[position]
    if rank is None or value.dim() == rank:
        return None
    required = Requirement(f"{name}.dim() == {rank}", "", (name,), True, lambda values, given: False)
    return BrokenGuard(required, f"{name}.dim() = {value.dim()}")


# --- code -------------------------------------------------------------------------------------------------------


def rename_symbols(text: str, names: Mapping[str, str]) -> str:
    """The text with symbols replaced by what they are read from."""
    if not names:
        return text
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{pattern})(?!\w)", lambda found: names[found[0]], text)


def place_as_code(place: InputSize, expr: Expr, source: str) -> str:
    if expr.is_symbol:
        return place.called(source)
    (symbol,) = expr.symbols
    start = expr.evaluate({symbol: 0})
    return f"(({place.called(source)} - {start})//{expr.evaluate({symbol: 1}) - start})"


def names_as_code(bindings: SymbolBindings, arguments: Mapping[str, str] | None = None) -> dict[str, str]:
    """How each symbol is read off the inputs."""
    called = arguments or {}
    return {
        symbol.name: place_as_code(place, expr, called.get(place.source, place.source))
        for symbol, (place, expr) in bindings.places.items()
    }


def variable(name: str, taken: set[str], otherwise: str) -> str:
    """The name, or another one, that nothing has and that Python takes for one."""
    found = name if name.isidentifier() and not keyword.iskeyword(name) else otherwise
    while found in taken:
        found += "_"
    taken.add(found)
    return found


TEMPLATE = '''\
from math import {functions}


def {name}({arguments}):
    """Raises ValueError with the guards of the run that these inputs break."""
    for what, tensor, rank in ({ranks}):
        if tensor.dim() != rank:
            raise ValueError(f"{{what}} has {{tensor.dim()}} dimensions, where the run had {{rank}}")
{bindings}
    guards = [
{guards}
    ]
    broken = []
    for guard, holds in guards:
        try:
            fine = holds()
        except (ArithmeticError, ValueError, TypeError):
            fine = False
        if not fine:
            broken.append(guard)
    if broken:
        sizes = {sizes}
        raise ValueError("\\n  ".join(["these inputs break what the run assumed:", *broken, f"with {{sizes}}"]))
'''


NAMES_OF_TEMPLATE = (
    "what tensor rank guards broken guard holds fine sizes tuple ValueError ArithmeticError TypeError".split()
)


def source_of_check(name: str, inputs: InputSizes, bindings: SymbolBindings, required: list[Requirement]) -> str:
    taken = {name, *NAMES_OF_TEMPLATE, *MATHEMATICS}
    arguments = {
        source: variable(source, taken, f"arg{position}") for position, source in enumerate(inputs.names)
    }
    places = names_as_code(bindings, arguments)
    symbols = {symbol: variable(symbol, taken, "size") for symbol in places}
    ranked = [(name, rank) for name, rank in zip(inputs.names, inputs.ranks, strict=True) if rank is not None]
    quoted = {name: name.replace('"', "'") for name, _ in ranked}
    shapes = [f"{quoted[name]}: {{tuple({arguments[name]}.shape)}}" for name, _ in ranked]
    sizes = ", ".join([*(f"{symbol} = {{{symbols[symbol]}}}" for symbol in symbols), *shapes])
    return TEMPLATE.format(
        name=name,
        functions=", ".join(MATHEMATICS),
        arguments=", ".join(arguments.values()),
        ranks="".join(f"({name!r}, {arguments[name]}, {rank}), " for name, rank in ranked).rstrip(),
        bindings="\n".join(f"    {symbols[symbol]} = {code}" for symbol, code in places.items()),
        guards="\n".join(f"        ({str(r)!r}, lambda: {r.as_code(symbols, arguments)})," for r in required),
        sizes=f'f"{sizes}"',
    )


# --- What was asked of dimensions of the inputs, and whether a run has kept it ------------------------------

ADVICE = "ask for no more than the program can keep: torch._dynamo.maybe_mark_dynamic, Dim.AUTO, or no constraint"


def violations(env: Checking, inputs: InputSizes, contexts: Sequence[Any]) -> list[str]:
    """One line for each dimension of which more was asked than the run has left of it."""
    return [
        line
        for position, context in enumerate(contexts)
        for place, constraint in _constrained_sizes(inputs, position, context)
        for line in _broken(env, place, constraint)
    ]


def _constrained_sizes(inputs: InputSizes, position: int, context: Any) -> Iterator[tuple[InputSize, Any]]:
    """The places of one input of which something is asked. To warn is no more than to take note."""
    wanted = getattr(context, "constraint_sizes", None) or [getattr(context, "constraint", None)]
    for place in inputs.sizes:
        if place.position == position and place.what in ("size", "number") and place.dim < len(wanted):
            constraint = wanted[place.dim]
            if constraint is not None and not constraint.warn_only:
                yield place, constraint


def _broken(env: Checking, place: InputSize, constraint: Any) -> Iterator[str]:
    has_range = hasattr(constraint, "vr")
    low, high = range_of(constraint)
    value = value_of(place.size)
    if not isinstance(value, Expr):
        # A size of 0 or 1 that is fixed surprises nobody.
        if not (value == low == high if has_range else value in (0, 1)):
            yield f"{place.text} was to be dynamic, and is {value} for good"
        return
    about = [guard for guard in env.guards if _is_about(env, guard.condition.symbols, value)]
    number = env.simplify(value)
    if isinstance(number, int):
        line = next((guard.line for guard in reversed(about)), "")
        yield because(f"{place.text} was to be dynamic, and has become {number}", line)
    elif has_range:
        sizes = f"{'-∞' if low is None else low}..{'∞' if high is None else high}"
        for guard in about:
            yield f"{place.text} was to be any number in {sizes}, but it was assumed that {guard}"


def _is_about(env: Checking, symbols: frozenset[Expr], value: Expr) -> bool:
    return any(origin in value.symbols for symbol in symbols for origin in origins(symbol, env.definitions))
