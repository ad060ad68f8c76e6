"""The weakest guard for an answer about layouts: a disjunction of all paths to it that can be found.

The strides of eager's results depend on which sizes are 0 or 1, but mostly the result is the same: a row is dense
whatever its stride. A function that compares size by size would add a guard for each comparison. So for sizes that may
be 0 or 1, the function is also run at other sizes, in separate environments, and the guard is that one of the paths
with the same result is taken.

Where an answer can be tried at other sizes, the guard may also be that sizes at which it does not hold are excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

from understudy.errors import UnderstudyError
from understudy.shapes.algebra import conditions
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.facts import Proof
from understudy.shapes.env import ShapeEnv
from understudy.shapes.node import Shape, SymNode, value_of
from understudy.spec.tensor_spec import TensorSpec

Sizes = Mapping[Expr, int]
Way = frozenset[Any]
"""The conditions of one path to an answer, all of which have to hold."""
MOST_TRIALS, MOST_WAYS, MOST_SYMBOLS = 16, 6, 2
"""Limits. Beyond them the answer is still right, but the guard may be stronger than necessary."""
SMALL = (0, 1, 2)


def with_weakest_guard(function: Callable[..., Shape | None], *args: object) -> Shape | None:
    """`function(*args)`, a pure function from specs and sizes to strides, with the weakest guard."""
    nodes = list(_nodes_in(args))
    if not nodes:
        return function(*args)
    env = nodes[0].shape_env
    symbols = frozenset().union(*(node.value.symbols for node in nodes))
    open_symbols = [symbol for symbol in symbols if symbol.low in (0, 1)]
    if not open_symbols or env.definitions or not env.hints.keys() >= symbols:
        return function(*args)
    known = [env.facts.simplify(symbol) for symbol in open_symbols]  # many are equal
    left = {symbol for value in known if isinstance(value, Expr) for symbol in value.symbols if symbol.low in (0, 1)}
    if not 0 < len(left) <= MOST_SYMBOLS:
        return function(*args)
    return _explore(env, sorted(left, key=lambda symbol: symbol.order), function, args)


def _explore(env: Any, symbols: Sequence[Expr], function: Callable[..., Shape | None], args: Any) -> Any:
    recorded = _trial(env, env.hints, function, args)
    if recorded is None:
        return function(*args)
    if not recorded.way:
        return _move_to_env(recorded.strides, env)
    ways = [recorded.way]
    for sizes in islice(_other_sizes(env, symbols), MOST_TRIALS):
        if len(ways) == MOST_WAYS:
            break
        if any(_holds_at(way, sizes) for way in ways):
            continue
        trial = _trial(env, sizes, function, args)
        way = None if trial is None else trial.way_to(recorded.strides)
        if way is not None:
            ways.append(way)
    if len(ways) == 1:
        return function(*args)
    env.decide(_condition(_shorter(env, ways)))
    return _move_to_env(recorded.strides, env)


# --- runs at other sizes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutRun:
    """The result of a run at some sizes, in an environment with the guards of that run."""

    env: ShapeEnv
    strides: Shape | None

    def way_to(self, strides: Shape | None) -> Way | None:
        """The conditions of this path if it leads to these strides; None otherwise."""
        if strides is None or self.strides is None:
            return self.way if strides is self.strides else None
        for a, b in zip(strides, self.strides, strict=True):
            if not self.env.decide(conditions.eq(value_of(a), value_of(b))):
                return None
        return self.way

    @property
    def way(self) -> Way:
        return frozenset(guard.condition for guard in self.env.guards)


def _trial(env: Any, sizes: Sizes, function: Callable[..., Shape | None], args: tuple[object, ...]) -> LayoutRun | None:
    """None if it raises."""
    hints = dict(sizes)
    tried = env.fork(hints, env.facts.copy(hints))
    try:
        return LayoutRun(tried, function(*_move_to_env(args, tried)))
    except (UnderstudyError, ArithmeticError):
        return None


def _other_sizes(env: Any, symbols: Sequence[Expr]) -> Iterator[Sizes]:
    """Other sizes that satisfy the guards, with small sizes varied."""
    numbers = sorted({*SMALL, *env.hints.values(), max(env.hints.values()) + 2})
    known = [(symbol, env.facts.simplify(symbol)) for symbol in env.hints]
    followers = [(symbol, value) for symbol, value in known if isinstance(value, Expr) and value is not symbol]
    for places in sorted(product(range(len(numbers)), repeat=len(symbols)), key=sum):
        chosen = {symbol: numbers[place] for symbol, place in zip(symbols, places, strict=True)}
        for others in _sizes_of_others(env.hints, chosen):
            sizes = {**others, **chosen}
            try:
                sizes |= {symbol: value.evaluate(sizes) for symbol, value in followers}
            except (ArithmeticError, KeyError):  # as below
                continue
            if all(_is_in_range(*each) for each in sizes.items()) and _holds_at(env.facts.conditions, sizes):
                yield sizes
                break


def _sizes_of_others(hints: Sizes, chosen: Sizes) -> Iterator[Sizes]:
    """The sizes of the other symbols: their hints; larger ones; that of a chosen symbol with the same hint."""
    yield hints
    yield dict.fromkeys(hints, max(hints.values()) + 3)
    for symbol, number in chosen.items():
        yield {other: number if hint == hints[symbol] else hint for other, hint in hints.items()}


def _is_in_range(symbol: Expr, number: int) -> bool:
    return (symbol.low is None or symbol.low <= number) and (symbol.high is None or number <= symbol.high)


def _holds_at(way: Any, sizes: Sizes) -> bool:
    try:
        return all(condition.evaluate(sizes) for condition in way)
    except (ArithmeticError, KeyError):  # it can't be computed, or is data-dependent
        return False


# --- sizes at which an answer does not hold -----------------------------------------------------------------------

DoesAgree = Callable[[Sizes], bool]
MOST_CHANGED = 8
"""Calls with more symbols than this are not compared at other sizes."""


def exclude_other_answers(args: object, does_agree: DoesAgree) -> None:
    """Add guards that exclude small sizes, of the symbols in specs and sizes, at which an answer does not hold:
    `does_agree` tries it there."""
    nodes = list(_nodes_in(args))
    env: Any = nodes[0].shape_env if nodes else None
    given = frozenset().union(*(node.value.symbols for node in nodes))
    if env is None or env.definitions or not env.hints.keys() >= given:
        return
    known = [env.facts.simplify(symbol) for symbol in given]  # many are equal
    symbols = {symbol for value in known if isinstance(value, Expr) for symbol in value.symbols}
    if len(symbols) > MOST_CHANGED:
        return
    tried: set[tuple[frozenset[Expr], int]] = set()
    for start in _groups(env, sorted(symbols, key=lambda symbol: symbol.order)):
        hint = env.hints[start[0]]
        for number in (max(hint + 1, 2), 1, 0):
            changed = start if number == hint else _extend_changes(env, start, number)
            if number == hint or not changed or (frozenset(changed), number) in tried:
                continue
            tried.add((frozenset(changed), number))
            if not does_agree(_change(env, changed, number)):
                _exclude(env, changed, number, hint)


def _groups(env: Any, symbols: Sequence[Expr]) -> Iterator[Sequence[Expr]]:
    """What is changed together: each symbol by itself, then those that have the same hint."""
    by_hint: dict[int, list[Expr]] = {}
    for symbol in symbols:
        by_hint.setdefault(env.hints[symbol], []).append(symbol)
        yield [symbol]
    yield from (group for group in by_hint.values() if len(group) > 1)


def _extend_changes(env: Any, changed: Sequence[Expr], number: int) -> Sequence[Expr]:
    """These symbols, and those of the same hint that have to change with them to satisfy the guards; none if that does not
    help."""
    hint = env.hints[changed[0]]
    while True:
        try:
            sizes = _change(env, changed, number)
        except ArithmeticError:
            return ()
        if not all(_is_in_range(*each) for each in sizes.items()):
            return ()
        broken = [condition for condition in env.facts.conditions if not _holds_at((condition,), sizes)]
        if not broken:
            return changed
        asked = frozenset().union(*(condition.symbols for condition in broken))
        more = [symbol for symbol in asked if env.hints.get(symbol) == hint and symbol not in changed]
        if not more:
            return ()
        changed = [*changed, *sorted(more, key=lambda symbol: symbol.order)]


def _change(env: Any, changed: Sequence[Expr], number: int) -> Sizes:
    """The example's sizes, with this number for some symbols, and what follows from it for others by the guards."""
    sizes = {**env.hints, **dict.fromkeys(changed, number)}
    for symbol in env.hints:
        value = env.facts.simplify(symbol)
        if isinstance(value, Expr) and value is not symbol:
            sizes[symbol] = value.evaluate(sizes)
    return sizes


def _exclude(env: Any, changed: Sequence[Expr], number: int, hint: int) -> None:
    if number > 1:  # it stands for all other sizes
        kept = [conditions.eq(symbol, hint) for symbol in changed]
    else:
        kept = [conditions.ne(symbol, number) for symbol in changed]
    env.decide(conditions.join("and", kept))


# --- conditions ---------------------------------------------------------------------------------------------------


def _shorter(env: ShapeEnv, ways: Sequence[Way]) -> list[Way]:
    """The paths without redundant conditions: with `a and b` and `not a`, it is enough that `b` holds."""
    found = list(dict.fromkeys(ways))
    for way in ways:
        if way in found and len(found) > 1:
            others = [other for other in found if other is not way]
            needed = way
            for condition in _order_conditions(way):
                rest = needed - {condition}
                if _implies_one_of(env, rest | {conditions.negate(condition)}, others):
                    needed = rest
            found = others if _implies_one_of(env, needed, others) else [needed, *others]
    return found


def _implies_one_of(env: ShapeEnv, way: Way, others: Sequence[Way]) -> bool:
    """Whether one of the others holds wherever this path does."""
    facts = env.facts.copy({})
    for condition in way:
        facts.learn(condition)
    return any(all(facts.prove(condition) is Proof.YES for condition in other) for other in others)


def _condition(ways: Sequence[Way]) -> Any:
    common = frozenset.intersection(*ways)
    rest = [conditions.join("and", _order_conditions(way - common)) for way in ways]
    return conditions.join("and", [*_order_conditions(common), conditions.join("or", rest)])


def _order_conditions(way: Way) -> list[Any]:
    return sorted(way, key=lambda condition: condition.order)


# --- environments -------------------------------------------------------------------------------------------------


def _nodes_in(value: object) -> Iterator[SymNode]:
    if type(value) is SymNode:
        yield value
    elif type(value) is tuple or type(value) is list:
        for part in value:
            yield from _nodes_in(part)
    elif type(value) is dict:
        yield from _nodes_in(list(value.values()))
    elif type(value) is TensorSpec and value.is_symbolic:
        yield from _nodes_in((value.shape, value.stride))


def _move_to_env(value: object, env: Any) -> Any:
    """The same value with nodes of another environment."""
    if type(value) is SymNode:
        return env.node(value.value, value.kind)
    if type(value) is tuple or type(value) is list:
        return type(value)(_move_to_env(part, env) for part in value)
    if type(value) is TensorSpec and value.is_symbolic:
        shape, stride = _move_to_env((value.shape, value.stride), env)
        return TensorSpec(shape, stride, dtype=value.dtype, device=value.device)
    return value
