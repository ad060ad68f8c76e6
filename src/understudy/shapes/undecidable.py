"""The error for a decision that depends on data: what was asked, where the symbols came from, what to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from understudy.errors import Context, GuardOnDataDependentSymNode
from understudy.lines import user_frames, user_line
from understudy.shapes.checking import origins, renamed
from understudy.shapes.conditions import Condition
from understudy.shapes.expr import Expr
from understudy.shapes.floats import Combination, FloatCondition
from understudy.shapes.node import SymNode

if TYPE_CHECKING:
    from understudy.shapes.env import ShapeEnv

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
CONDITIONS = (Condition, FloatCondition, Combination)


def error(env: ShapeEnv, asked: Any) -> GuardOnDataDependentSymNode:
    symbols = {s for symbol in asked.symbols for s in origins(symbol, env.definitions)}
    unbacked = sorted((s for s in symbols if s in env.births), key=lambda s: s.order)
    names = names_of(env, symbols)
    is_condition = isinstance(asked, CONDITIONS)
    question = f"whether {asked}" if is_condition else f"the value of {asked}"
    born = "; ".join(f"{symbol.name} was made by {env.births[symbol]}" for symbol in unbacked)
    line = user_line()
    made = GuardOnDataDependentSymNode(
        f"the program needs to know {question}, and that is data-dependent: {born}",
        context=Context(
            "a decision on sizes", str(asked), line,
            advice_on_loops(line) + advice_on_names([s.name for s in unbacked if s.name not in names])
            + advice(env, asked, names),
        ),
    )  # fmt: skip
    made.cond = asked
    return made


def advice(env: ShapeEnv, asked: Any, names: dict[str, str]) -> str:
    """The line to paste, in terms of the variables that the asking code has."""
    if isinstance(asked, CONDITIONS):
        holds, fails = (checked(env, condition, names) for condition in (asked, env.negated(asked)))
        return f"say which it is, before it is needed: {holds} or {fails}"
    shown = renamed(str(asked), names)
    paste = f"torch._check({shown} == <number>)"
    return f"say what it is, before it is needed: {paste}; or keep it a symbol, without int() and range()"


def advice_on_loops(line: str) -> str:
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


def advice_on_names(unnamed: list[str]) -> str:
    """No variable holds these: a line about them needs one."""
    if not unnamed:
        return ""
    return f"keep what made it in a variable, {', '.join(f'{name} = …' for name in unnamed)}, and "


def checked(env: ShapeEnv, condition: Any, names: dict[str, str]) -> str:
    for truth, symbol in env.truths.items():
        if condition is truth or condition is env.negated(truth):
            name = names.get(symbol.name, symbol.name)
            return f"torch._check({name})" if condition is truth else f"torch._check(not {name})"
    return f"torch._check({renamed(str(condition), names)})"


def names_of(env: ShapeEnv, symbols: set[Expr]) -> dict[str, str]:
    """For each symbol, how the user's code that is running can write it: `n`, `kept.shape[0]`."""
    found: dict[str, str] = {}
    for frame in user_frames():
        for name, value in frame.f_locals.items():
            for symbol, text in spoken(env, name, value):
                if symbol in symbols and not name.startswith("_"):
                    found.setdefault(symbol.name, text)
        if len(found) == len(symbols):
            break
    return found


def spoken(env: ShapeEnv, name: str, value: Any) -> Iterator[tuple[Expr, str]]:
    """The symbols that a variable holds, each with the way to write it."""
    if isinstance(value, SYMBOLIC):
        yield from symbol_of(env, value.node, name)
    elif isinstance(value, torch.Tensor):
        spec = getattr(value, "_spec", None)
        for dim, size in enumerate(spec.shape if spec is not None else ()):
            yield from symbol_of(env, size, f"{name}.shape[{dim}]")
    elif type(value) in (list, tuple) and len(value) <= 16:
        for position, part in enumerate(value):
            if isinstance(part, SYMBOLIC):
                yield from symbol_of(env, part.node, f"{name}[{position}]")


def symbol_of(env: ShapeEnv, node: Any, text: str) -> Iterator[tuple[Expr, str]]:
    if type(node) is not SymNode or node.shape_env is not env:
        return
    value = node.value
    if isinstance(value, Expr) and value.is_symbol:
        yield value, text
    elif value in env.truths:
        yield env.truths[value], text
    elif getattr(value, "operation", None) == "value":
        yield value.arguments[0], text
