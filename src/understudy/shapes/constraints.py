"""What was asked of dimensions of the inputs, and whether a run has kept it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from understudy.shapes.checking import origins
from understudy.shapes.contexts import range_of
from understudy.shapes.expr import Expr
from understudy.shapes.guards import Inputs, InputSize, because
from understudy.shapes.node import value_of

if TYPE_CHECKING:
    from understudy.shapes.checking import Checking

ADVICE = "ask for no more than the program can keep: torch._dynamo.maybe_mark_dynamic, Dim.AUTO, or no constraint"


def violations(env: Checking, inputs: Inputs, contexts: Sequence[Any]) -> list[str]:
    """One line for each dimension of which more was asked than the run has left of it."""
    return [
        line
        for position, context in enumerate(contexts)
        for place, constraint in _constrained(inputs, position, context)
        for line in _broken(env, place, constraint)
    ]


def _constrained(inputs: Inputs, position: int, context: Any) -> Iterator[tuple[InputSize, Any]]:
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
