"""Whether other inputs satisfy the guards of a run: as a list of broken guards, and as the source of a function."""

from __future__ import annotations

import keyword
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from understudy.errors import SymbolMismatch
from understudy.shapes.algebra.expr import Algebra, Expr
from understudy.shapes.algebra.floats import FUNCTIONS, OPERATIONS, AnyCondition, Comparison, FloatExpr
from understudy.shapes.algebra.writers import PythonWriter
from understudy.shapes.guards import InputSize, InputSizes, because, holds_at
from understudy.shapes.input_dims import range_of
from understudy.shapes.node import value_of

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

MATHEMATICS = {name: OPERATIONS[name] for name in ("floor", "ceil", "trunc", *FUNCTIONS)}
ZERO_ONE_REASON = "sizes 0 and 1 are always specialised (specialize_zero_one)"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One condition on the inputs under which the recorded answers hold."""

    condition: AnyCondition
    why: str
    inputs: tuple[str, ...]
    is_static: bool = False
    place: InputSize | None = None
    """The size of an input that it restricts, if it is about one."""
    number: Expr | None = None
    """The symbol for that size in the condition."""
    is_of_operator: bool = False
    """Whether it comes from an operator, not from the program itself."""

    @property
    def text(self) -> str:
        """The condition with the names of the symbols."""
        return str(self.condition)

    def __str__(self) -> str:
        return because(self.text, self.why)

    def holds(self, values: Mapping[Expr, float], given: Sequence[object]) -> bool:
        if self.place is not None and self.number is not None:
            values = {**values, self.number: self.place.read(given)}
        return holds_at(self.condition, values)

    def write_code(self, code: InputCode) -> str:
        """The condition as Python code, with these names of symbols and inputs."""
        names = dict(code.symbols)
        if self.place is not None and self.number is not None:
            names[self.number] = self.place.write(code.inputs.get(self.place.source, self.place.source))
        return PythonWriter(names, code.definitions).write(self.condition).text


@dataclass(frozen=True, slots=True)
class InputCode:
    """The names of symbols and inputs in code, and the definitions of symbols without a name."""

    symbols: Mapping[Expr, str]
    definitions: Mapping[Expr, FloatExpr]
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BrokenGuard:
    """A requirement that inputs violate, with their sizes."""

    requirement: Requirement
    found: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs that it restricts."""
        return self.requirement.inputs

    def __str__(self) -> str:
        return f"{self.requirement}\n    but {self.found}" if self.found else str(self.requirement)


@dataclass(frozen=True)
class SymbolBindings:
    """The input size from which each symbol is read."""

    places: dict[Expr, tuple[InputSize, Expr]]

    def values(self, inputs: Sequence[object], definitions: Mapping[Expr, FloatExpr]) -> dict[Expr, int]:
        values = {symbol: solve(expr, place.read(inputs)) for symbol, (place, expr) in self.places.items()}
        for symbol, expression in definitions.items():
            if expression.symbols <= values.keys():
                # A definition that can't be computed has no value, and satisfies no guard.
                with suppress(ArithmeticError, ValueError, TypeError):
                    values[symbol] = int(expression.evaluate(values))
        return values

    def sources(self, symbols: frozenset[Expr], definitions: Mapping[Expr, FloatExpr]) -> list[InputSize]:
        plain = {s for symbol in symbols for s in origins(symbol, definitions)}
        return [place for symbol, (place, _) in self.places.items() if symbol in plain]


def origins(symbol: Expr, definitions: Mapping[Expr, FloatExpr]) -> Iterator[Expr]:
    """The symbols from which a symbol is computed, each once; itself, unless it has a definition."""
    waiting, seen = [symbol], {symbol}
    while waiting:
        symbol = waiting.pop()
        if symbol not in definitions:
            yield symbol
            continue
        new = [part for part in definitions[symbol].symbols if part not in seen]
        seen.update(new)
        waiting += new


def is_linear(expr: object) -> bool:
    """Whether it is a*symbol + b for numbers a and b."""
    return isinstance(expr, Expr) and len(expr.symbols) == 1 and all(
        not monomial or (len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0].is_symbol)
        for monomial, _ in expr.terms
    )  # fmt: skip


def solve(expr: Expr, number: int) -> int:
    """The value of the only symbol for which the expression is this number, rounded if there is none."""
    (symbol,) = expr.symbols
    start = expr.evaluate({symbol: 0})
    return (number - start) // (expr.evaluate({symbol: 1}) - start)


class InputChecks:
    """Checks whether other inputs satisfy the guards."""

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self.inputs, self.definitions = env.inputs, env.definitions

    # --- requirements ----------------------------------------------------------------------------------------

    def list_requirements(self, inputs: InputSizes | None = None) -> list[Requirement]:
        """All conditions on the inputs: their static sizes, the ranges of the symbols, the guards."""
        inputs = self.inputs if inputs is None else inputs
        bindings = bind_inputs(inputs)
        return [
            *_require_sizes(inputs, bindings),
            *_require_ranges(bindings),
            *self._require_guards(bindings),
        ]

    def _require_guards(self, bindings: SymbolBindings) -> Iterator[Requirement]:
        for guard in (
            *self.env.guards,
            *self.env.runtime_asserts,
        ):  # asserts only where they are about inputs
            plain = {s for symbol in guard.condition.symbols for s in origins(symbol, self.definitions)}
            if plain <= bindings.places.keys():
                about = bindings.sources(guard.condition.symbols, self.definitions)
                names = tuple(dict.fromkeys(place.source for place in about))
                yield Requirement(guard.condition, guard.line, names, is_of_operator=guard.is_of_operator)

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self, *given: object, **named: object) -> list[BrokenGuard]:
        """The guards that these inputs violate; the inputs are given in the order of the run, or by name."""
        return self._find_broken(self.inputs, self._put_in_order(given, named))

    def _find_broken(
        self, inputs: InputSizes, given: Sequence[object], static: bool = True
    ) -> list[BrokenGuard]:
        wrong = [_check_rank(inputs, position, value) for position, value in enumerate(given)]
        if any(wrong):
            return [broken for broken in wrong if broken is not None]
        bindings = bind_inputs(inputs)
        values = bindings.values(given, self.definitions)
        broken: list[BrokenGuard] = []
        for required in self.list_requirements(inputs):
            if (required.is_static and not static) or required.holds(values, given):
                continue
            # Strides follow from sizes: they are not reported if the sizes already differ.
            if not _is_about(required, "stride") or not any(
                required.inputs == other.inputs and _is_about(other.requirement, "size") for other in broken
            ):
                broken.append(BrokenGuard(required, self._describe(required, bindings, values, given)))
        return broken

    def _describe(
        self,
        required: Requirement,
        bindings: SymbolBindings,
        values: Mapping[Expr, int],
        given: Sequence[object],
    ) -> str:
        """The sizes of the inputs that the requirement restricts."""
        about = {s for symbol in required.condition.symbols for s in origins(symbol, self.definitions)}
        shown = [
            f"{symbol.name} = {values[symbol]}" + (f" ({place.text})" if place.text != symbol.name else "")
            for symbol, (place, _) in bindings.places.items()
            if symbol in about
        ]
        asked = required.place
        return ", ".join(shown if asked is None else [f"{asked.text} = {asked.read(given)}", *shown])

    def _put_in_order(self, given: Sequence[object], named: Mapping[str, object]) -> list[object]:
        names = self.inputs.names
        both = [*zip(names, given, strict=False), *named.items()]
        arguments = dict(both)
        unknown = sorted(set(arguments) - set(names))
        missing = [name for name in names if name not in arguments]
        if unknown or missing or len(given) > len(names) or len(both) > len(arguments):
            had = ", ".join(names) or "(none)"
            raise TypeError(
                f"expected the inputs {had}, got {len(given)} positional ones and {sorted(named)}"
            )
        return [arguments[name] for name in names]

    def evaluate_guards_for_args(
        self, placeholders: Sequence[object], args: Sequence[object], *, ignore_static: bool = True
    ) -> bool:
        """The same for placeholders and the arguments for them."""
        return not self._find_broken(describe_inputs(placeholders), list(args), static=not ignore_static)

    def bind_symbols(self, placeholders: object, *args: object) -> dict[Expr, int]:
        """The value of each symbol for these inputs, which replace the placeholders, or (None) the inputs of the run."""
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = tuple(args[0])
        inputs = self.inputs if placeholders is None else describe_inputs(list_placeholders(placeholders))
        if len(args) != len(inputs.names):
            raise TypeError(f"expected {len(inputs.names)} inputs, got {len(args)}")
        found = bind_inputs(inputs).values(args, {})
        for place in inputs.sizes:
            value = value_of(place.size)
            if (
                isinstance(value, Expr)
                and value.symbols <= found.keys()
                and value.evaluate(found) != place.read(args)
            ):
                expected, given = value.evaluate(found), place.read(args)
                raise SymbolMismatch(
                    f"expected {place.text} to be {expected} ({value}), got {given}: {expected} != {given}"
                )
        return found

    # --- as text and as code ---------------------------------------------------------------------------------------

    def produce_guards(
        self, placeholders: object = None, sources: Sequence[object] | None = None, *, ignore_static: bool = False,
        _simplified: bool = False, **ignored: object,
    ) -> list[str]:  # fmt: skip
        """Every requirement as a Python expression in terms of the inputs: `x.size(0)*x.size(1) % 8 == 0`.

        `_simplified`: only the guards of the program, without the static sizes and ranges of the inputs. Other options
        of torch's environments are ignored.
        """
        inputs = (
            self.inputs if placeholders is None else describe_inputs(list_placeholders(placeholders), sources)
        )
        code = InputCode(read_symbols(bind_inputs(inputs)), self.definitions)
        required = self.choose_requirements(inputs, ignore_static=ignore_static, _simplified=_simplified)
        return [r.write_code(code) for r in required]

    def choose_requirements(
        self, inputs: InputSizes, *, ignore_static: bool = False, _simplified: bool = False, **ignored: object
    ) -> list[Requirement]:
        """The requirements that `produce_guards` writes. Simplified, without what follows from the values of the inputs:
        static sizes, ranges, and which sizes are the same symbol."""
        bindings = bind_inputs(inputs)
        required = self._require_guards(bindings) if _simplified else self.list_requirements(inputs)
        computed = (
            [r for r in _require_sizes(inputs, bindings) if _is_computed_size(r)] if _simplified else []
        )
        # A number among the inputs is a constant only where the program has specialised it.
        return [
            *computed,
            *(r for r in required if not (ignore_static and r.is_static and not _is_about(r, "number"))),
        ]

    def produce_guards_expression(
        self, placeholders: Sequence[object], *, guards: object = None, ignore_static: bool = True
    ) -> str | None:
        """All guards as one expression in `args`, for `evaluate_guards_expression`; None if there are none."""
        names = [f"args[{position}]" for position in range(len(placeholders))]
        found = self.produce_guards(placeholders, names, ignore_static=ignore_static)
        return " and ".join(f"({guard})" for guard in found) or None

    def evaluate_guards_expression(self, code: str, args: Sequence[object]) -> bool:
        """Whether the inputs satisfy such an expression; torch's notation for inputs, `L['t0']`, is accepted, too."""
        return bool(
            eval(
                code,
                {**MATHEMATICS, "math": math, "args": args, "L": {f"t{i}": a for i, a in enumerate(args)}},
            )
        )

    def write_function(self, name: str = "check") -> str:
        """The source of a function of the inputs that raises ValueError with the guards that they violate."""
        return _write_function(name, self.inputs, self.definitions, self.list_requirements())


def describe_inputs(placeholders: Sequence[Any], sources: Sequence[object] | None = None) -> InputSizes:
    """The sizes in the metadata of stand-ins, and symbolic numbers, as inputs."""
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


def list_placeholders(graph_or_values: object) -> Sequence[object]:
    graph = getattr(graph_or_values, "graph", None)
    if graph is None:
        return graph_or_values if isinstance(graph_or_values, (list, tuple)) else [graph_or_values]
    return [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]


def bind_inputs(inputs: InputSizes) -> SymbolBindings:
    """Choose the size from which each symbol is read: where it stands alone, else where it can be solved for."""
    places: dict[Expr, tuple[InputSize, Expr]] = {}
    sizes = [(place, value_of(place.size)) for place in inputs.sizes]
    for is_wanted in (lambda value: value.is_symbol, is_linear):
        for place, value in sizes:
            if isinstance(value, Expr) and is_wanted(value):
                places.setdefault(next(iter(value.symbols)), (place, value))
    return SymbolBindings(places)


def _require_sizes(inputs: InputSizes, bindings: SymbolBindings) -> Iterator[Requirement]:
    """Static sizes, and sizes that are computed from others."""
    algebra = Algebra()  # for symbols that stand for the sizes of other inputs
    for place in inputs.sizes:
        value = value_of(place.size)
        if isinstance(value, Expr):
            if not value.symbols <= bindings.places.keys() or bindings.places.get(value, (None,))[0] is place:
                continue
        elif not isinstance(value, (int, float)):
            continue
        number = algebra.free_symbol(place.text)
        is_static = not isinstance(value, Expr)
        yield Requirement(Comparison("==", number, value), "", (place.source,), is_static, place, number)


def _require_ranges(bindings: SymbolBindings) -> Iterator[Requirement]:
    for symbol, (place, _) in bindings.places.items():
        low, high = symbol.low, symbol.high
        if low is not None and low > 0:
            why = ZERO_ONE_REASON if low == 2 else "its range"
            yield Requirement(Comparison(">=", symbol, low), why, (place.source,))
        if high is not None:
            yield Requirement(Comparison("<=", symbol, high), "its range", (place.source,))


def _is_computed_size(required: Requirement) -> bool:
    """Whether this is the size of an input as an expression of other sizes: `2*B`."""
    equation: Any = required.condition
    return not required.is_static and not equation.right.is_symbol and _is_about(required, "size")


def _is_about(required: Requirement, what: str) -> bool:
    return required.place is not None and required.place.what == what


def _check_rank(inputs: InputSizes, position: int, value: Any) -> BrokenGuard | None:
    rank, name = inputs.ranks[position], inputs.names[position]
    if rank is None or value.dim() == rank:
        return None
    number = Algebra().free_symbol(f"{name}.dim()")
    required = Requirement(Comparison("==", number, rank), "", (name,), is_static=True)
    return BrokenGuard(required, f"{number.name} = {value.dim()}")


# --- code -------------------------------------------------------------------------------------------------------


def read_symbol(place: InputSize, expr: Expr, source: str) -> str:
    if expr.is_symbol:
        return place.write(source)
    (symbol,) = expr.symbols
    start = expr.evaluate({symbol: 0})
    return f"(({place.write(source)} - {start})//{expr.evaluate({symbol: 1}) - start})"


def read_symbols(bindings: SymbolBindings, arguments: Mapping[str, str] | None = None) -> dict[Expr, str]:
    """The code that reads each symbol from the inputs."""
    called = arguments or {}
    return {
        symbol: read_symbol(place, expr, called.get(place.source, place.source))
        for symbol, (place, expr) in bindings.places.items()
    }


def choose_variable(name: str, taken: set[str], otherwise: str) -> str:
    """The name as a valid identifier that is not taken."""
    found = name if name.isidentifier() and not keyword.iskeyword(name) else otherwise
    while found in taken:
        found += "_"
    taken.add(found)
    return found


TEMPLATE = '''\
from math import {functions}


def {name}({arguments}):
    """Raises ValueError with the guards of the run that these inputs violate."""
    for what, tensor, rank in ({ranks}):
        if tensor.dim() != rank:
            raise ValueError(f"{{what}}: expected {{rank}} dimensions as in the run, got {{tensor.dim()}}")
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
        sizes = [f"{{what}} = {{size}}" for what, size in ({symbols})]
        sizes += [f"{{what}}: {{shape}}" for what, shape in ({shapes})]
        raise ValueError("\\n  ".join(["these inputs violate guards of the run:", *broken, "with " + ", ".join(sizes)]))
'''


NAMES_OF_TEMPLATE = (
    "what tensor rank guards broken guard holds fine sizes size shape tuple "
    "ValueError ArithmeticError TypeError"
).split()


def _write_function(
    name: str, inputs: InputSizes, definitions: Mapping[Expr, FloatExpr], required: list[Requirement]
) -> str:
    taken = {name, *NAMES_OF_TEMPLATE, *MATHEMATICS}
    arguments = {
        source: choose_variable(source, taken, f"arg{position}")
        for position, source in enumerate(inputs.names)
    }
    read = read_symbols(bind_inputs(inputs), arguments)
    symbols = {symbol: choose_variable(symbol.name, taken, "size") for symbol in read}
    code = InputCode(symbols, definitions, arguments)
    ranked = [(name, rank) for name, rank in zip(inputs.names, inputs.ranks, strict=True) if rank is not None]
    sizes = [(symbol.name, variable) for symbol, variable in symbols.items()]
    shapes = [(name, f"tuple({arguments[name]}.shape)") for name, _ in ranked]
    return TEMPLATE.format(
        name=name,
        functions=", ".join(MATHEMATICS),
        arguments=", ".join(arguments.values()),
        ranks="".join(f"({name!r}, {arguments[name]}, {rank}), " for name, rank in ranked).rstrip(),
        bindings="\n".join(f"    {symbols[symbol]} = {reading}" for symbol, reading in read.items()),
        guards="\n".join(f"        ({str(r)!r}, lambda: {r.write_code(code)})," for r in required),
        symbols="".join(f"({name!r}, {variable}), " for name, variable in sizes).rstrip(),
        shapes="".join(f"({name!r}, {shape}), " for name, shape in shapes).rstrip(),
    )


# --- Constraints on dimensions of the inputs, and whether a run satisfies them ------------------------------

ADVICE = "relax the constraint: torch._dynamo.maybe_mark_dynamic, Dim.AUTO, or none"


def list_violations(env: ShapeEnv, inputs: InputSizes, contexts: Sequence[object]) -> list[str]:
    """One line for each constraint on a dimension that the guards violate."""
    return [
        line
        for position, context in enumerate(contexts)
        for place, constraint in _list_constraints(inputs, position, context)
        for line in _list_losses(env, place, constraint)
    ]


def _list_constraints(
    inputs: InputSizes, position: int, context: object
) -> Iterator[tuple[InputSize, object]]:
    """The sizes of one input with a constraint that is not `warn_only`."""
    wanted = getattr(context, "constraint_sizes", None) or [getattr(context, "constraint", None)]
    for place in inputs.sizes:
        if place.position == position and place.what in ("size", "number") and place.dim < len(wanted):
            constraint = wanted[place.dim]
            if constraint is not None and not constraint.warn_only:
                yield place, constraint


def _list_losses(env: ShapeEnv, place: InputSize, constraint: object) -> Iterator[str]:
    has_range = hasattr(constraint, "vr")
    low, high = range_of(constraint)
    value = value_of(place.size)
    if not isinstance(value, Expr):
        # Specialisation of sizes 0 and 1 is expected.
        if not (value == low == high if has_range else value in (0, 1)):
            yield f"expected {place.text} to be dynamic, got the constant {value}"
        return
    about = [guard for guard in env.guards if _depends_on(env, guard.condition.symbols, value)]
    number = env.facts.simplify(value)
    if isinstance(number, int):
        line = next((guard.line for guard in reversed(about)), "")
        yield because(f"expected {place.text} to be dynamic, but it was specialised to {number}", line)
    elif has_range:
        sizes = f"{'-∞' if low is None else low}..{'∞' if high is None else high}"
        for guard in about:
            yield f"expected {place.text} to be any number in {sizes}, but the run assumed {guard}"


def _depends_on(env: ShapeEnv, symbols: frozenset[Expr], value: Expr) -> bool:
    return any(origin in value.symbols for symbol in symbols for origin in origins(symbol, env.definitions))
