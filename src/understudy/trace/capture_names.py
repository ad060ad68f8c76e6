"""The names of a captured program's inputs, from the signature of the function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from understudy import _torch


def argument_names(f: Callable[..., Any], args: tuple[Any, ...]) -> list[tuple[str, tuple[Any, ...]]]:
    """Name and default of each argument: those of the signature, or arg0, arg1, … where it does not say."""
    numbered: list[tuple[str, tuple[Any, ...]]] = [(f"arg{position}", ()) for position in range(len(args))]
    inner = inspect.unwrap(f)
    code = getattr(inner, "__code__", None)
    if code is None or code.co_flags & inspect.CO_VARARGS:
        return numbered
    parameters = list(inspect.signature(inner).parameters.values())
    if len(parameters) < len(args):
        return numbered
    return [
        (parameter.name, () if parameter.default is inspect.Parameter.empty else (parameter.default,))
        for parameter in parameters[: len(args)]
    ]


def name_of(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", None) or type(f).__name__


def leaf_names(names: list[tuple[str, tuple[Any, ...]]], in_spec: Any) -> list[str]:
    """What each leaf of the arguments is called: `x`, or `x_1`, `x_2`, … for the leaves of a structure."""
    result = []
    for (name, _), part in zip(names, _torch.children(in_spec), strict=True):
        if _torch.is_leaf(part):
            result.append(name)
        else:
            result.extend(f"{name}_{count}" for count in range(1, part.num_leaves + 1))
    return result
