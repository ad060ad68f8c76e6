"""Guards as Python code in torch's notation, for inputs that torch's tools name: `L['x'].size()[0] == 2*L['y'].size()[0]`.

The guards are those of `InputChecks`. Here each symbol that equals other sizes is replaced, an equality stands at the input
that has it, and all bounds of one symbol are one range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.writers import PythonWriter
from understudy.shapes.checking import bind_inputs, describe_inputs, is_linear, origins, read_symbols
from understudy.shapes.guards import InputSize, InputSizes
from understudy.shapes.node import value_of

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv


class GuardText(NamedTuple):
    """One guard in torch's notation, with the line that made it (empty: the inputs themselves)."""

    code: str
    line: str = ""


class TorchInputSize(InputSize):
    """One number of an input's metadata, which torch's tools write as `x.size()[0]`."""

    __slots__ = ()

    def write(self, source: str) -> str:
        return (
            f"{source}.{self.what}()[{self.dim}]"
            if self.what in ("size", "stride")
            else super().write(source)
        )


def write_guards(
    env: ShapeEnv,
    placeholders: Sequence[Any],
    sources: Sequence[object],
    *,
    ignore_static: bool,
    simplified: bool,
) -> list[GuardText]:
    """The guards on these inputs. `simplified`: without equalities and ranges that follow from the inputs themselves.
    `ignore_static`: without sizes, strides and offsets that are numbers."""
    inputs = describe_inputs(placeholders, list(map(_as_local, sources)))
    inputs = replace(inputs, sizes=[_simplify(env, place) for place in inputs.sizes])
    bindings = bind_inputs(inputs)
    writer = PythonWriter(read_symbols(bindings), env.definitions)
    found = [] if simplified else list(_write_equalities(inputs, bindings.places, writer, ignore_static))
    found += _write_conditions(env, bindings.places, writer)
    for symbol in bindings.places:
        found += _write_range(env, symbol, writer.write(symbol).text, simplified)
    return list(dict.fromkeys(found))


def _as_local(source: object) -> object:
    """A name stands for a local variable, as in torch."""
    return f"L[{source!r}]" if isinstance(source, str) else source


def _simplify(env: ShapeEnv, place: InputSize) -> TorchInputSize:
    """The same place with specialised and merged symbols replaced."""
    value: Any = value_of(place.size)
    if isinstance(value, Expr):
        value = env.decisions.simplify(value)
    return TorchInputSize(place.source, place.position, place.dim, place.what, value)


def _write_equalities(
    inputs: InputSizes, places: dict[Expr, Any], writer: PythonWriter, ignore_static: bool
) -> Iterator[GuardText]:
    for place in inputs.sizes:
        value: Any = place.size
        if not isinstance(value, Expr):
            is_guarded = isinstance(value, (int, float)) and (not ignore_static or place.what == "number")
            if is_guarded:
                yield GuardText(f"{place.text} == {value!r}")
        elif value.symbols <= places.keys() and places.get(value, (None,))[0] is not place:
            yield GuardText(f"{place.text} == {writer.write(value).text}")


def _write_conditions(env: ShapeEnv, places: dict[Expr, Any], writer: PythonWriter) -> Iterator[GuardText]:
    """The guards that are not equalities or bounds of one symbol."""
    for guard in (*env.guards, *env.runtime_asserts):  # asserts only where they are about inputs
        condition: Any = guard.condition
        if isinstance(condition, Condition):
            known = {symbol: env.facts.simplify(symbol) for symbol in condition.symbols}
            condition = condition.substitute({s: now for s, now in known.items() if now is not s})
        if isinstance(condition, bool) or _is_bound(condition):
            continue
        if {s for symbol in condition.symbols for s in origins(symbol, env.definitions)} <= places.keys():
            yield GuardText(writer.write(condition).text, guard.line)


def _is_bound(condition: object) -> bool:
    """Whether it restricts one symbol to a range, or to one number."""
    if not isinstance(condition, Condition) or condition.parts or condition.kind == "ne":
        return False
    return is_linear(condition.expr)


def _write_range(env: ShapeEnv, symbol: Expr, name: str, simplified: bool) -> Iterator[GuardText]:
    low, high = env.facts.interval(symbol)
    usual = 2 if env.settings.specialize_zero_one else 0
    has_low = low is not None and low > 0 and not (simplified and low == usual)
    bounds = [f"{low} <= {name}"] * has_low + ([] if high is None else [f"{name} <= {high}"])
    if bounds:
        lines = [g.line for g in env.guards if _is_bound(g.condition) and symbol in g.condition.symbols]
        yield GuardText(" and ".join(bounds), lines[-1] if lines else "")
