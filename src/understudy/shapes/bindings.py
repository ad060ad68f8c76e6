"""Symbols in values, and where the ones that data decides can be read off a result when the program runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from understudy.shapes.checking import origins
from understudy.shapes.expr import Expr
from understudy.shapes.floats import FloatExpr
from understudy.shapes.from_sympy import is_sympy
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class KeyPath:
    """The way from a result to one number in it: `[0].size(1)`, or nothing at all."""

    steps: tuple[tuple[str, Any], ...] = ()

    def then(self, kind: str, key: Any = None) -> KeyPath:
        return KeyPath((*self.steps, (kind, key)))

    def get(self, value: Any) -> Any:
        """The number at the end of the way."""
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

    def __iter__(self) -> Iterator[KeyPath]:
        """Step by step, each with a `get`: as `torch.utils._pytree.key_get` walks a path."""
        return (KeyPath((step,)) for step in self.steps)

    def __str__(self) -> str:
        written = {"item": "[{!r}]", "attribute": ".{}", "offset": ".storage_offset()", "divided": "//{}"}
        return "".join(written.get(kind, f".{kind}({{!r}})").format(key) for kind, key in self.steps)

    __repr__ = __str__


HERE = KeyPath()


def values_in(result: Any, path: KeyPath = HERE) -> Iterator[tuple[SymNode, KeyPath]]:
    """Every symbolic number in a result: in tensors, in lists, tuples and dicts of them; with the way to it."""
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
        if type(result.node) is SymNode:
            yield result.node, path
    elif type(result) is SymNode:
        yield result, path
    elif isinstance(result, (list, tuple)):
        for position, part in enumerate(result):
            yield from values_in(part, path.then("item", position))
    elif isinstance(result, dict):
        for key, part in result.items():
            yield from values_in(part, path.then("item", key))


def free_symbols(value: Any) -> set[Expr]:
    """The symbols in a value: a size, a tensor's metadata, lists and dicts of these; sympy's own of sympy's."""
    if is_sympy(value):
        return set(value.free_symbols)
    found: set[Expr] = set()
    for node, _ in values_in(value):
        if not node.is_plain:
            simple = node.shape_env.simplify(node.value)
            for symbol in getattr(simple, "symbols", ()):
                found.update(origins(symbol, node.shape_env.definitions))
    return found


def free_unbacked_symbols(value: Any) -> set[Expr]:
    """Those of them that only data tells."""
    envs = {node.shape_env for node, _ in values_in(value)}
    return {symbol for symbol in free_symbols(value) if any(symbol in env.births for env in envs)}


def has_free_symbols(value: Any) -> bool:
    """Whether there are symbols in a value."""
    return bool(free_symbols(value))


def has_free_unbacked_symbols(value: Any) -> bool:
    """Whether there are symbols in a value that only data tells."""
    return bool(free_unbacked_symbols(value))


def compute_unbacked_bindings(
    shape_env: ShapeEnv | None, result: Any, old: Any = None, peek: bool = False
) -> dict[Expr, KeyPath] | None:
    """For each symbol that was born since the last call: where it is in this result.

    None if none was born. A symbol that is nowhere in the result is an error: nothing could say what it is when the
    program runs. `peek` leaves the symbols for a later call.
    """
    if shape_env is None or not shape_env.pending_fresh_unbacked_symbols:
        return None
    pending = list(shape_env.pending_fresh_unbacked_symbols)
    found: dict[Expr, KeyPath] = {}
    for node, path in values_in(result):
        for symbol, place in _readable(shape_env, node, path):
            if symbol in pending:
                found.setdefault(symbol, place)
    if not peek:
        shape_env.pending_fresh_unbacked_symbols.clear()
        lost = [s for s in pending if s not in found and not isinstance(shape_env.simplify(s), int)]
        if lost:
            names = ", ".join(f"{symbol.name} (made by {shape_env.births[symbol]})" for symbol in lost)
            raise ValueError(
                f"the result does not say what {names} is; if that is nobody's concern, make it within "
                "shape_env.ignore_fresh_unbacked_symbols()"
            )
    return found


def _readable(env: ShapeEnv, node: SymNode, path: KeyPath) -> Iterator[tuple[Expr, KeyPath]]:
    """The symbol that can be read off a number, if there is one."""
    value = node.value
    if isinstance(value, Expr):
        if value.is_symbol:
            yield value, path
        elif len(value.terms) == 1:
            ((monomial, factor),) = value.terms
            if factor > 0 and len(monomial) == 1 and monomial[0][1] == 1 and monomial[0][0].is_symbol:
                yield monomial[0][0], path.then("divided", factor)
    elif isinstance(value, FloatExpr):
        if value.operation == "value":
            yield value.arguments[0], path
    elif value in env.truths:
        yield env.truths[value], path


def resolve_unbacked_bindings(
    shape_env: ShapeEnv | None, bindings: dict[Expr, KeyPath] | None
) -> dict[Expr, KeyPath] | None:
    """The bindings with symbols that were renamed since under their new names."""
    if bindings is None or shape_env is None:
        return None
    return {shape_env.unbacked_renamings.get(symbol, symbol): path for symbol, path in bindings.items()}


def rebind_unbacked(shape_env: ShapeEnv | None, node: Any, result: Any) -> None:
    """Tell the environment that the symbols of this result are those that the graph's node had when it was first run.

    `node` is an fx node with `meta["unbacked_bindings"]`, or such bindings themselves.
    """
    bindings = node if isinstance(node, dict) else getattr(node, "meta", {}).get("unbacked_bindings")
    if shape_env is None or not bindings or getattr(node, "op", "") == "placeholder":
        return
    for old, path in bindings.items():
        now = path.get(result)
        if not isinstance(now, SYMBOLIC):
            continue  # it became a number
        for new, rest in _readable(shape_env, now.node, KeyPath()):
            if not rest.steps:
                shape_env.rename_unbacked(new, old)


def fx_placeholder_vals(graph_module: Any) -> list[Any]:
    """What stands for the inputs of a graph, in their order."""
    return [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]


def fx_placeholder_targets(graph_module: Any) -> list[str]:
    """The names of the inputs of a graph, in their order."""
    return [node.target for node in graph_module.graph.nodes if node.op == "placeholder"]


def bind_symbols(graph_module: Any, *args: Any) -> dict[Expr, int]:
    """What each symbol of a graph's placeholders is for these arguments."""
    return _env_of(graph_module).bind_symbols(graph_module, *args)


def eval_guards(graph_module: Any, *args: Any, ignore_static: bool = True) -> bool:
    """Whether the guards of a graph hold for these arguments."""
    env = _env_of(graph_module)
    return env.evaluate_guards_for_args(fx_placeholder_vals(graph_module), args, ignore_static=ignore_static)


def _env_of(graph_module: Any) -> ShapeEnv:
    known: ShapeEnv | None = getattr(graph_module, "shape_env", None)
    if known is not None:
        return known
    values = [node.meta.get("val") for node in graph_module.graph.nodes]
    found = next((node.shape_env for node, _ in values_in(values)), None)
    if found is None:
        raise ValueError("there are no symbols in the metadata of this graph")
    return found


# --- decisions, under the names of torch ---------------------------------------------------------------------------


def guard_or_false(condition: bool | torch.SymBool) -> bool:
    """The answer if it can be had, with a guard if need be; False if only data tells."""
    return condition.node.guard_or_false() if isinstance(condition, torch.SymBool) else bool(condition)


def guard_or_true(condition: bool | torch.SymBool) -> bool:
    """The answer if it can be had, with a guard if need be; True if only data tells."""
    return condition.node.guard_or_true() if isinstance(condition, torch.SymBool) else bool(condition)


def statically_known_true(condition: bool | torch.SymBool) -> bool:
    """Whether it is true for all sizes that are admitted. No guard comes of asking."""
    return condition.node.statically_known_true() if isinstance(condition, torch.SymBool) else bool(condition)


def statically_known_false(condition: bool | torch.SymBool) -> bool:
    """Whether it is false for all sizes that are admitted. No guard comes of asking."""
    if not isinstance(condition, torch.SymBool):
        return not condition
    return condition.node.sym_not().statically_known_true()
