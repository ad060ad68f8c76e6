"""Symbols in values, and where unbacked symbols can be read from a result when the program runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from understudy import _torch
from understudy.errors import PendingUnbackedSymbolNotFound
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import FloatExpr
from understudy.shapes.checking import origins
from understudy.shapes.node import SymNode, adopt
from understudy.shapes.sympy_reader import is_sympy
from understudy.shapes.torch_api.foreign_symbols import accept_torch_symbols

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

UNBACKED_NAME = re.compile(r"(u|zuf)\d+")
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True, eq=False)
class KeyPath:
    """The path from a result to one number in it: `[0].size()[1]`, or empty.

    Torch's tools use it as a tuple of their keys, which are made on access: `path == ()`, `path[0]`, `path[1:]`.
    """

    steps: tuple[tuple[str, Any], ...] = ()

    def then(self, kind: str, key: object = None) -> KeyPath:
        return KeyPath((*self.steps, (kind, key)))

    def get(self, value: Any) -> Any:
        """The number at the end of the path."""
        for kind, key in self.steps:
            if kind == "item":
                value = value[key]
            elif kind == "attribute":
                value = getattr(value, key)
            elif kind == "offset":
                value = value.storage_offset()
            elif kind == "divided":
                value = value // key
            else:
                value = getattr(value, kind)(key)
        return value

    def __iter__(self) -> Iterator[Any]:
        """The keys, as objects of torch's own classes with a `get`, which its tools check."""
        for kind, key in self.steps:
            yield from _torch.keys_of_step(kind, key)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, position: Any) -> Any:
        return tuple(self)[position]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, KeyPath):
            return self.steps == other.steps
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __str__(self) -> str:
        written = {"item": "[{!r}]", "attribute": ".{}", "offset": ".storage_offset()", "divided": "//{}"}
        return "".join(written.get(kind, f".{kind}()[{{!r}}]").format(key) for kind, key in self.steps)

    __repr__ = __str__


HERE = KeyPath()


class UnbackedBindings(Mapping[Any, KeyPath]):
    """The path of each symbol, by its sympy symbol, as in `.node.expr`; sympy is imported on first access.

    `by_symbol` is the same by our symbols.
    """

    __slots__ = ("_env", "by_symbol")

    def __init__(self, env: ShapeEnv, by_symbol: dict[Expr, KeyPath]) -> None:
        self._env = env
        self.by_symbol = by_symbol

    def __getitem__(self, symbol: object) -> KeyPath:
        return self.by_symbol[self._env.from_sympy(symbol)]

    def __iter__(self) -> Iterator[Any]:
        return map(self._env.to_sympy, self.by_symbol)

    def __len__(self) -> int:
        return len(self.by_symbol)

    def __repr__(self) -> str:
        return repr(self.by_symbol)


def values_in(result: object, path: KeyPath = HERE) -> Iterator[tuple[SymNode, KeyPath]]:
    """Every symbolic number in a result (in tensors, lists, tuples and dicts), with its path."""
    if isinstance(result, torch.Tensor):
        spec = getattr(result, "_spec", None)
        if spec is None or spec.sparse is not None:
            return
        for what, sizes in (("size", spec.shape), ("stride", spec.stride)):
            for dim, size in enumerate(sizes):
                if type(size) is SymNode:
                    yield size, path.then(what, dim)
        if type(spec.offset) is SymNode:
            yield spec.offset, path.then("offset")
    elif isinstance(result, SYMBOLIC):
        node = adopt(result.node)
        if type(node) is SymNode:
            yield node, path
    elif type(result) is SymNode:
        yield result, path
    elif isinstance(result, (list, tuple)):
        for position, part in enumerate(result):
            yield from values_in(part, path.then("item", position))
    elif isinstance(result, dict):
        for key, part in result.items():
            yield from values_in(part, path.then("item", key))


def symbols_in(value: object) -> set[Expr]:
    """The symbols in a value: a size, a tensor's metadata, lists and dicts of these."""
    return {symbol for symbol, _ in _free(value)}


def unbacked_symbols_in(value: object) -> set[Expr]:
    """The unbacked symbols among them."""
    return {symbol for symbol, env in _free(value) if symbol in env.unbacked}


def _free(value: object) -> Iterator[tuple[Expr, ShapeEnv]]:
    for node, _ in values_in(value):
        if not node.is_plain:
            env = node.shape_env
            definitions = env.definitions
            for symbol in getattr(env.decisions.simplify(node.value), "symbols", ()):
                if symbol not in definitions:
                    yield symbol, env
                    continue
                for origin in origins(symbol, definitions):
                    yield origin, env


def free_symbols(val: object) -> set[object]:
    """The sympy symbols in a value: a size, a tensor's metadata, a sympy expression, lists and dicts of these."""
    return {env.to_sympy(symbol) for symbol, env in _free(val)} | _free_in_sympy(val)


def free_unbacked_symbols(x: object) -> set[object]:
    """The unbacked symbols among them; in sympy expressions, those with such names: `u0`, `zuf0`."""
    called_so = {symbol for symbol in _free_in_sympy(x) if UNBACKED_NAME.fullmatch(symbol.name)}
    return {env.to_sympy(symbol) for symbol, env in _free(x) if symbol in env.unbacked} | called_so


def _free_in_sympy(value: Any) -> set[Any]:
    if is_sympy(value):
        return set(value.free_symbols)
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return set().union(*map(_free_in_sympy, value)) if isinstance(value, (list, tuple)) else set()


def has_free_symbols(val: object) -> bool:
    """Whether there are symbols in a value."""
    return bool(symbols_in(val) or _free_in_sympy(val))


def has_free_unbacked_symbols(x: object) -> bool:
    """Whether there are unbacked symbols in a value."""
    return bool(unbacked_symbols_in(x))


def compute_unbacked_bindings(
    shape_env: ShapeEnv | None, example_value: object, old_example_value: object = None, peek: bool = False
) -> UnbackedBindings | None:
    """For each unbacked symbol created since the last call: its path in this result.

    None if there are none. A symbol that is not in the result is an error: nothing would define it when the program
    runs. `peek` leaves the symbols pending for a later call.
    """
    if shape_env is None or not shape_env.pending_fresh_unbacked_symbols:
        return None
    pending = list(shape_env.pending_fresh_unbacked_symbols)
    found: dict[Expr, KeyPath] = {}
    for node, path in values_in(example_value):
        for symbol, place in _readable(shape_env, node, path):
            if symbol in pending:
                found.setdefault(symbol, place)
    if not peek:
        shape_env.pending_fresh_unbacked_symbols.clear()
        lost = [s for s in pending if s not in found and not isinstance(shape_env.simplify(s), int)]
        if lost:
            names = ", ".join(f"{symbol.name} (made by {shape_env.unbacked[symbol]})" for symbol in lost)
            raise PendingUnbackedSymbolNotFound(
                f"{names} can't be computed from the result; if it is unused, create it inside "
                "shape_env.ignore_fresh_unbacked_symbols()"
            )
    return UnbackedBindings(shape_env, found)


def bindings_of_input(env: ShapeEnv, value: object) -> UnbackedBindings | None:
    """As `compute_unbacked_bindings`, for one input of several: symbols that are not in it stay pending."""
    found = compute_unbacked_bindings(env, value, peek=True)
    if found:
        waiting = [symbol for symbol in env.pending_fresh_unbacked_symbols if symbol not in found.by_symbol]
        env.pending_fresh_unbacked_symbols[:] = waiting
    return found or None


def _readable(env: ShapeEnv, node: SymNode, path: KeyPath) -> Iterator[tuple[Expr, KeyPath]]:
    """The symbol that can be read from a number, if there is one."""
    value = node.value
    if isinstance(value, Expr):
        if value.is_symbol:
            yield value, path
        elif len(value.terms) == 1:
            ((monomial, factor),) = value.terms
            if factor > 0 and len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0].is_symbol:
                yield monomial[0][0], path.then("divided", factor)
    elif isinstance(value, FloatExpr):
        if value.unbacked_symbol is not None:
            yield value.unbacked_symbol, path
    elif value in env.truths:
        yield env.truths[value], path


def resolve_unbacked_bindings(
    shape_env: ShapeEnv | None, bindings: Mapping[object, KeyPath] | None
) -> UnbackedBindings | None:
    """The bindings, with renamed symbols under their new names."""
    if bindings is None or shape_env is None:
        return None
    renamed = shape_env.unbacked_renamings
    known = _by_symbol(shape_env, bindings)
    return UnbackedBindings(shape_env, {renamed.get(symbol, symbol): path for symbol, path in known.items()})


def rebind_unbacked(shape_env: ShapeEnv | None, n: object, result: object) -> None:
    """Unify the symbols of this result with those that the graph's node had when it was first run.

    `n` is an fx node with `meta["unbacked_bindings"]`, or such bindings themselves.
    """
    bindings = n if isinstance(n, Mapping) else getattr(n, "meta", {}).get("unbacked_bindings")
    if shape_env is None or not bindings or getattr(n, "op", "") == "placeholder":
        return
    for old, path in _by_symbol(shape_env, bindings).items():
        now = read_along(path, result)
        if not isinstance(now, SYMBOLIC):
            continue  # it was specialised
        for new, rest in _readable(shape_env, now.node, KeyPath()):
            if not rest.steps:
                shape_env.symbols.rename_unbacked(new, old)


def read_along(path: Any, value: object) -> Any:
    """The number at the end of a path, which may be a tuple of torch's keys."""
    if isinstance(path, KeyPath):
        return path.get(value)
    for key in path:
        value = key.get(value)
    return value


def _by_symbol(env: ShapeEnv, bindings: Mapping[Any, KeyPath]) -> dict[Expr, KeyPath]:
    if isinstance(bindings, UnbackedBindings):
        return bindings.by_symbol
    return {env.from_sympy(symbol): path for symbol, path in bindings.items()}


def fx_placeholder_vals(gm: Any) -> list[object]:
    """The `val`s of the inputs of a graph, in their order."""
    return [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]


def fx_placeholder_targets(gm: Any) -> list[str]:
    """The names of the inputs of a graph, in their order."""
    return [node.target for node in gm.graph.nodes if node.op == "placeholder"]


def is_symbol_binding_fx_node(node: Any) -> Any:
    """Return the symbol that a node of a graph binds, or None."""
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt) or type(value.node) is not SymNode:
        return None
    symbol = value.node.expr
    binds = symbol.is_Symbol and (node.op == "placeholder" or unbacked_symbols_in(value))
    return symbol if binds else None


def find_symbol_binding_fx_nodes(graph: Any) -> dict[object, object]:
    """For each symbol of a graph: the first node that binds it."""
    found: dict[Any, Any] = {}
    for node in graph.nodes:
        symbol = is_symbol_binding_fx_node(node)
        if symbol is not None:
            found.setdefault(symbol, node)
    return found


def bind_symbols(gm: object, *args: object) -> dict[object, int]:
    """The value of each symbol of a graph's placeholders for these arguments, by its sympy symbol."""
    return _env_of(gm).torch_api.bind_symbols(gm, *args)


def eval_guards(gm: object, *args: object, ignore_static: bool = True) -> bool:
    """Whether the guards of a graph hold for these arguments."""
    env = _env_of(gm)
    return env.checks.evaluate_guards_for_args(fx_placeholder_vals(gm), args, ignore_static=ignore_static)


def _env_of(graph_module: Any) -> ShapeEnv:
    known: ShapeEnv | None = getattr(graph_module, "shape_env", None)
    if known is not None:
        return known
    values = [node.meta.get("val") for node in graph_module.graph.nodes]
    found = next((node.shape_env for node, _ in values_in(values)), None)
    if found is None:
        raise ValueError("the metadata of this graph has no symbols")
    return found


# --- decisions, under the names of torch ---------------------------------------------------------------------------


@accept_torch_symbols
def guard_or_false(a: bool | torch.SymBool) -> bool:
    """The value, with a guard if necessary; False if it is data-dependent."""
    return a.node.guard_or_false("", 0) if isinstance(a, torch.SymBool) else bool(a)


@accept_torch_symbols
def guard_or_true(a: bool | torch.SymBool) -> bool:
    """The value, with a guard if necessary; True if it is data-dependent."""
    return a.node.guard_or_true("", 0) if isinstance(a, torch.SymBool) else bool(a)


@accept_torch_symbols
def statically_known_true(x: bool | torch.SymBool) -> bool:
    """Whether it can be proved true. Adds no guard."""
    return x.node.statically_known_true("", 0) if isinstance(x, torch.SymBool) else bool(x)


@accept_torch_symbols
def statically_known_false(x: bool | torch.SymBool) -> bool:
    """Whether it can be proved false. Adds no guard."""
    if not isinstance(x, torch.SymBool):
        return not x
    return x.node.sym_not().statically_known_true("", 0)
