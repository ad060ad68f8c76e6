"""The error for a decision that depends on data: what was asked, where the symbols came from, what to write."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from understudy.errors import Context, GuardOnDataDependentSymNode
from understudy.lines import user_frames, user_line
from understudy.shapes.algebra.conditions import Condition
from understudy.shapes.algebra.expr import Expr
from understudy.shapes.algebra.floats import AnyCondition, Combination, Comparison, FloatExpr, Truth
from understudy.shapes.algebra.writers import TorchWriter
from understudy.shapes.checking import origins
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

Question = Expr | FloatExpr | AnyCondition
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
CONDITIONS = (Condition, Comparison, Combination)
PLAIN_NUMBERS_ONLY = (
    "what takes plain numbers only: int(), range(), len(), places in lists, math.sqrt (** 0.5 does)"
)
OURS = "understudy."
MANY = 64
"""Of lists, dicts and objects with more parts than these, nobody would look for the one to write about."""


def make_error(env: ShapeEnv, asked: Question) -> GuardOnDataDependentSymNode:
    symbols = {s for symbol in asked.symbols for s in origins(symbol, env.definitions)}
    unbacked = sorted((s for s in symbols if s in env.births), key=lambda s: s.order)
    names = find_names(env, symbols)
    is_condition = isinstance(asked, CONDITIONS)
    question = f"whether {asked}" if is_condition else f"the value of {asked}"
    born = "; ".join(f"{symbol.name} was made by {env.births[symbol]}" for symbol in unbacked)
    line = user_line()
    made = GuardOnDataDependentSymNode(
        f"the program needs to know {question}, and that is data-dependent: {born}",
        context=Context(
            "a decision on sizes", str(asked), line,
            advise_on_loops(line) + advise_on_names(env, [s for s in unbacked if s not in names])
            + advise(env, asked, names),
        ),
    )  # fmt: skip
    made.cond = asked
    return made


def advise(env: ShapeEnv, asked: Question, names: dict[Expr, str]) -> str:
    """The line to paste, in terms of the variables that the asking code has."""
    if isinstance(asked, CONDITIONS):
        holds, fails = (write_check(env, c, names) for c in (asked, env.numbers.negate_condition(asked)))
        return f"say which it is, before it is needed: {holds} or {fails}"
    paste = f"torch._check({TorchWriter(names, env.definitions).write(asked).text} == <number>)"
    return (
        f"say what it is, before it is needed: {paste}; or keep it a symbol, away from {PLAIN_NUMBERS_ONLY}"
    )


def advise_on_loops(line: str) -> str:
    """`for row in rows:`: how many rounds there are is data, and a graph has every round written out."""
    loop = line.rpartition(": for ")
    if not loop[1] or "range(" in loop[2]:
        return ""
    grouped = (
        "; of a mixture of experts, take the implementation that groups them, in transformers "
        "model.set_experts_implementation('grouped_mm')"
    )
    return (
        "how many rounds the loop has is data: go through all that there can be, with torch.where for what does not "
        f"count, or do the work of all rounds in one call{grouped if 'expert' in line else ''}; if it is known, "
    )


def advise_on_names(env: ShapeEnv, unnamed: list[Expr]) -> str:
    """No variable holds these: a line about them needs one."""
    if not unnamed:
        return ""
    read = {
        symbol: "(…).item()" if env.births[symbol].what.startswith(".item()") else "(…).shape[…]"
        for symbol in unnamed
    }
    kept = ", ".join(f"{symbol.name} = {how}" for symbol, how in read.items())
    return f"keep what made it in a variable, {kept}, ask that one, and "


def write_check(env: ShapeEnv, condition: Truth, names: dict[Expr, str]) -> str:
    for truth, symbol in env.truths.items():
        if condition is truth or condition is env.numbers.negate_condition(truth):
            name = names.get(symbol, symbol.name)
            return f"torch._check({name})" if condition is truth else f"torch._check(torch.sym_not({name}))"
    return f"torch._check({TorchWriter(names, env.definitions).write(condition).text})"


def find_names(env: ShapeEnv, symbols: set[Expr]) -> dict[Expr, str]:
    """For each symbol, how the user's code that is running can write it: `n`, `kept.shape[0]`, `self.lengths[0]`."""
    found: dict[Expr, str] = {}
    for frame in user_frames():
        held = [(name, value) for name, value in frame.f_locals.items() if not name.startswith("_")]
        inside = [part for name, value in held for part in list_parts(name, value)]
        deeper = [part for name, value in inside for part in list_parts(name, value)]
        for name, value in (*held, *inside, *deeper):
            for symbol, text in list_symbols(env, name, value):
                if symbol in symbols:
                    found.setdefault(symbol, text)
        if len(found) == len(symbols):
            break
    return found


def list_parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a variable holds: items of lists, tuples and dicts, attributes of objects; each with the way to write it."""
    if type(value) in (list, tuple):
        pairs = [(f"{name}[{position}]", part) for position, part in enumerate(value[:MANY])]
    elif isinstance(value, dict):
        pairs = [(f"{name}[{key!r}]", part) for key, part in value.items() if isinstance(key, (str, int))]
    elif isinstance(value, (torch.Tensor, type, ModuleType, FunctionType)) or type(
        value
    ).__module__.startswith(OURS):
        return
    else:
        held = getattr(value, "__dict__", {})
        pairs = [(f"{name}.{key}", part) for key, part in held.items() if not key.startswith("_")]
    if len(pairs) <= MANY:
        yield from pairs


def list_symbols(env: ShapeEnv, name: str, value: Any) -> Iterator[tuple[Expr, str]]:
    """The symbols that a variable holds, each with the way to write it."""
    if isinstance(value, SYMBOLIC):
        yield from find_symbol(env, value.node, name)
    elif isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)
        for dim, size in enumerate(spec.shape if spec is not None else ()):
            yield from find_symbol(env, size, f"{name}.shape[{dim}]")
        read = getattr(value, "item_memo", None)
        if isinstance(read, SYMBOLIC):
            yield from find_symbol(env, read.node, f"{name}.item()")


def find_symbol(env: ShapeEnv, node: Any, text: str) -> Iterator[tuple[Expr, str]]:
    if type(node) is not SymNode or node.shape_env is not env:
        return
    value = node.value
    if isinstance(value, Expr) and value.is_symbol:
        yield value, text
    elif value in env.truths:
        yield env.truths[value], text
    elif isinstance(value, FloatExpr) and value.unbacked is not None:
        yield value.unbacked, text
